"""Parameters of the features room: decision times, labels, feature groups."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from foundation.durations import Duration, format_duration
from foundation.settings import Section

__all__ = ["Duration", "Section", "format_duration"]  # for the rooms above, which do not import telemetry


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("must be positive, such as '24h'")
    return value


PositiveDuration = Annotated[Duration, AfterValidator(_positive)]

Group = Literal["telemetry", "history", "peers", "onset", "gaps", "workload", "static"]
Scope = Literal["gpu", "slot", "node"]
DomainScope = str | tuple[str, ...]
FailureClass = Literal["memory", "bus", "firmware", "interconnect", "thermal_power", "other"]

GROUPS: tuple[Group, ...] = ("telemetry", "history", "peers", "onset", "gaps", "workload", "static")
"""All feature groups, in the order of their columns in a matrix."""

FAILURE_CLASSES: tuple[FailureClass, ...] = ("memory", "bus", "firmware", "interconnect", "thermal_power", "other")
"""The classes of GPU failures; ``labels.classes`` may name others."""


DRIVER_CLASSES: Mapping[str, FailureClass] = {
    "fallen_off_the_bus": "bus",
    "gpu_init_failed": "bus",
    "pcie_fatal": "bus",
    "ras_uncorrectable": "memory",
    "gpu_reset_failed": "firmware",
}
"""Classes of the failures that a kernel log reports without an XID (docs/reference/kernel-messages.md)."""


def _class_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value) or value == "all":  # "all" represents every class in reports
        raise ValueError(f"{value!r} is not a valid failure class: write snake_case, such as 'power_supply'")
    return value


ClassName = Annotated[str, AfterValidator(_class_name)]


def _default_label_xids() -> dict[FailureClass, tuple[int, ...]]:
    # NVIDIA's XID catalogue and how operators read it; 74, 157 and the fatal sub-codes of 144 to 150
    # are label-worthy only under the condition that features.labels.evidence applies.
    return {
        "memory": (48, 64, 95, 140),
        "bus": (79, 143),
        "firmware": (62, 119, 120),
        "interconnect": (74, 144, 145, 146, 147, 148, 149, 150, 157),
        "other": (158,),
    }


class DecisionSection(Section):
    """``decision``: when scores are asked for."""

    every: Duration = timedelta(hours=6)
    """Spacing of the grid of decision times; a multiple of ``telemetry.step``."""

    origin: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    """An instant on the grid; the default puts decision times at 00:00, 06:00, 12:00 and 18:00 UTC."""

    @field_validator("origin")
    @classmethod
    def _aware(cls, value: datetime) -> datetime:
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone: write it with one, such as '2026-01-01T00:00:00Z'")
        return value.astimezone(UTC)


class LabelSection(Section):
    """``labels``: what counts as a failure, and what the label asks."""

    gap: Duration = timedelta(minutes=10)
    """Time after a decision in which a failure comes too soon to act on."""

    horizon: PositiveDuration = timedelta(hours=24)
    """Length of the interval after the gap in which an incident start makes the label positive."""

    merge_window: Duration = timedelta(hours=1)
    """Label-worthy events of one GPU no further apart than this are one incident."""

    cooldown: Duration = timedelta(hours=24)
    """An incident without a repair, replacement or reset ends this long after its last event."""

    acts_on: Literal["node", "unit"] = "node"
    """What an alert takes out of service: the ``node`` with all of its GPUs, or the ``unit`` alone, such as a disk."""

    node_window: PositiveDuration = timedelta(minutes=30)
    """Incidents of GPUs of one node that each begin at most this long after the one before are one node incident."""

    ticket_lag: PositiveDuration = timedelta(days=7)
    """A ``failure`` without a code, or dated by day, that follows a failure of that node within this and no repair
    between belongs to that failure."""

    confirm_within: PositiveDuration = timedelta(days=7)
    """An interconnect XID that is doubtful alone is an incident when a repair, replacement, drain or failed diagnostic
    of that GPU or node follows within this; after more than 1 h only if not planned and not due to a later failure."""

    xids: dict[FailureClass, tuple[int, ...]] = Field(default_factory=_default_label_xids)
    """XID codes that make an incident, by failure class; a plain list takes each code's class from the defaults."""

    classes: dict[str, ClassName] = Field(default_factory=dict)
    """Failure class by the code of a ``failure`` event (matched without case), before :data:`DRIVER_CLASSES`; unlisted
    codes are ``other``, those of NVSwitches (``sxid_20034``) ``interconnect``."""

    only: tuple[ClassName, ...] = ()
    """Failure classes of which incidents are made; an empty list means all."""

    @property
    def all_classes(self) -> tuple[str, ...]:
        """Every failure class there is: those of GPUs, and then the operator's own by name."""
        return (*FAILURE_CLASSES, *sorted(set(self.classes.values()).difference(FAILURE_CLASSES)))

    censor_leavers: bool = True
    """A GPU that leaves service unfailed inside the horizon has no label (null) instead of a negative one."""

    @model_validator(mode="after")
    def _known_classes(self) -> Self:
        if unknown := sorted(set(self.only).difference(self.all_classes)):
            raise ValueError(f"only: there is no failure class {unknown[0]!r} among {', '.join(self.all_classes)}")
        return self

    @field_validator("xids", mode="before")
    @classmethod
    def _by_class(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        known = {code: name for name, codes in _default_label_xids().items() for code in codes}
        classed: dict[str, list[object]] = {}
        for code in value:
            classed.setdefault(known.get(code, "other"), []).append(code)
        return classed


class SequenceSection(Section):
    """``features.sequence``: raw windows kept next to the matrix, for learners that read a window as a sequence."""

    channels: tuple[str, ...] | Literal["auto"] = ()
    """Gauges and counters of the windows; ``auto`` takes the paper's four where present; an empty list keeps none."""

    window: Duration = timedelta(hours=24)
    """Length of a window; a multiple of ``step``."""

    step: Duration = timedelta(minutes=30)
    """Length of a window's steps, over which gauges are averaged; a multiple of ``telemetry.step``."""

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        if self.step <= timedelta(0) or self.window <= timedelta(0) or self.window % self.step:
            window, step = format_duration(self.window), format_duration(self.step)
            raise ValueError(f"a window of {window} is not a whole number of steps of {step}, such as 24h and 30m")
        return self


class FeatureSection(Section):
    """``features``: what a decision is made from."""

    delay: Duration = timedelta(minutes=10)
    """Reporting delay: a sample or event is known this long after its time unless it carries ``known_at``."""

    groups: tuple[Group, ...] = GROUPS
    """Feature groups to compute."""

    channels: tuple[str, ...] | Literal["auto"] = "auto"
    """Channels that columns are made of, in all groups; ``auto`` takes every channel of the dataset."""

    windows: tuple[Duration, ...] = (timedelta(hours=1),)
    """Trailing windows of telemetry, ascending; multiples of ``telemetry.step``."""

    peer_window: Duration = timedelta(hours=6)
    """Window whose mean is compared with the node's other GPUs and with the fleet's same-model median."""

    onset: tuple[tuple[Duration, Duration], ...] = (
        (timedelta(hours=1), timedelta(hours=24)),
        (timedelta(hours=6), timedelta(days=3)),
        (timedelta(hours=24), timedelta(days=7)),
    )
    """Windows of the group ``onset``, ascending, each with the longer past that its rises are compared with."""

    history_windows: tuple[Duration, ...] = (
        timedelta(days=1),
        timedelta(days=7),
        timedelta(days=30),
        timedelta(days=90),
    )
    """Trailing windows of event counts, ascending."""

    history_scopes: tuple[DomainScope, ...] = ("gpu", "slot", "node")
    """Whose history is counted: the device, the position it sits in, its whole node; and per unit-day in service that
    of failure domains: inventory columns (``rack``), nested ones (``[cabinet, cage]``), ranges of the number that ends
    one (``serial/1000``), ``fleet``, and ``age``, the units that have been in service about as long."""

    static: tuple[str, ...] | Literal["auto", "all"] = "auto"
    """Static inventory columns to use; ``auto`` takes model, driver, age and rack position where present, ``all`` age
    and every column that does not name the unit: none may hold what became of it."""

    sequence: SequenceSection = SequenceSection()

    @field_validator("onset")
    @classmethod
    def _longer_past(cls, value: tuple[tuple[timedelta, timedelta], ...]) -> tuple[tuple[timedelta, timedelta], ...]:
        windows = [window for window, _ in value]
        if not value or windows != sorted(set(windows)):
            raise ValueError("must be pairs whose windows ascend, such as [[1h, 24h], [24h, 7d]]")
        for window, past in value:
            if not timedelta(0) < window < past:
                raise ValueError(f"{format_duration(past)} is not longer than its window {format_duration(window)}")
        return value

    @field_validator("groups")
    @classmethod
    def _something(cls, value: tuple[Group, ...]) -> tuple[Group, ...]:
        if not value:
            raise ValueError("the list is empty: name at least one group")
        return value

    @property
    def domains(self) -> tuple[DomainScope, ...]:
        """The failure domains among ``history_scopes``."""
        return tuple(scope for scope in self.history_scopes if scope not in ("gpu", "slot", "node"))

    @field_validator("windows", "history_windows")
    @classmethod
    def _ascending(cls, value: tuple[timedelta, ...]) -> tuple[timedelta, ...]:
        if not value or any(b <= a for a, b in pairwise(value)) or value[0] <= timedelta(0):
            raise ValueError("must be one or more positive durations in ascending order")
        return value
