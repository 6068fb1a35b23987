"""Parameters of the features room: decision times, labels, feature groups."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from foundation.durations import Duration, PositiveDuration, format_duration
from foundation.settings import Section

Group = Literal["telemetry", "history", "peers", "onset", "gaps", "workload", "static"]
Scope = Literal["gpu", "slot", "node"]
DomainScope = str | tuple[str, ...]
FailureClass = Literal["memory", "bus", "firmware", "interconnect", "thermal_power", "other"]

GROUPS: tuple[Group, ...] = get_args(Group)
"""All feature groups, in the order of their columns in a matrix."""

FAILURE_CLASSES: tuple[FailureClass, ...] = get_args(FailureClass)
"""Built-in failure classes of GPUs; ``labels.classes`` may add others."""


DRIVER_CLASSES: Mapping[str, FailureClass] = {
    "fallen_off_the_bus": "bus",
    "gpu_init_failed": "bus",
    "pcie_fatal": "bus",
    "ras_uncorrectable": "memory",
    "gpu_reset_failed": "firmware",
}
"""Failure classes of failures in a kernel log without an XID (docs/reference/kernel-messages.md)."""


def _class_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value) or value == "all":  # reports use "all" for every class
        raise ValueError(f"{value!r} is not a valid failure class: write snake_case, such as 'power_supply'")
    return value


ClassName = Annotated[str, AfterValidator(_class_name)]


def _default_label_xids() -> dict[FailureClass, tuple[int, ...]]:
    # From NVIDIA's XID catalogue and operators' practice. 74, 157 and the fatal sub-codes of 144 to 150 count only once
    # confirmed (features.labels.evidence).
    return {
        "memory": (48, 64, 95, 140),
        "bus": (79, 143),
        "firmware": (62, 119, 120),
        "interconnect": (74, 144, 145, 146, 147, 148, 149, 150, 157),
        "other": (158,),
    }


class DecisionSection(Section):
    """``decision``: when GPUs are scored."""

    every: PositiveDuration = timedelta(hours=6)
    """Interval of decision times; a multiple of ``telemetry.step``."""

    origin: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    """Anchor of the decision grid."""

    @field_validator("origin")
    @classmethod
    def _aware(cls, value: datetime) -> datetime:
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone: write it with one, such as '2026-01-01T00:00:00Z'")
        return value.astimezone(UTC)


class LabelSection(Section):
    """``labels``: definition of failures and of the label."""

    gap: Duration = timedelta(minutes=10)
    """Time after a decision in which a failure is too early to act on."""

    horizon: PositiveDuration = timedelta(hours=24)
    """Time after the gap; the label is positive if an incident starts in it."""

    merge_window: Duration = timedelta(hours=1)
    """Failure events of one GPU within this time of each other are one incident."""

    cooldown: Duration = timedelta(hours=24)
    """Time after the last event at which an incident without a repair, replacement or reset ends."""

    acts_on: Literal["node", "unit"] = "node"
    """What an alert takes out of service: the ``node`` with its GPUs, or only the ``unit`` (a disk)."""

    node_window: PositiveDuration = timedelta(minutes=30)
    """Incidents of the GPUs of a node within this time of each other are one node incident."""

    ticket_lag: PositiveDuration = timedelta(days=7)
    """Longest time from a failure to a ticket that [belongs to it](../concepts.md#incidents)."""

    confirm_within: PositiveDuration = timedelta(days=7)
    """A doubtful interconnect XID is an incident if a repair, replacement, drain or failed diagnostic of that GPU or
    node follows within this time ([incidents](../concepts.md#incidents))."""

    xids: dict[FailureClass, tuple[int, ...]] = Field(default_factory=_default_label_xids)
    """XIDs that count as failures, by failure class; in a plain list, each code gets its default class."""

    classes: dict[str, ClassName] = Field(default_factory=dict)
    """Failure class by the code of a ``failure`` event; unlisted codes are ``other``."""

    only: tuple[ClassName, ...] = ()
    """Failure classes that count; empty: all."""

    @property
    def all_classes(self) -> tuple[str, ...]:
        """All failure classes: the built-in ones, then the operator's own in alphabetical order."""
        return (*FAILURE_CLASSES, *sorted(set(self.classes.values()).difference(FAILURE_CLASSES)))

    censor_leavers: bool = True
    """If true, a GPU that leaves service without a failure inside the horizon is censored instead of negative."""

    @model_validator(mode="after")
    def _known_classes(self) -> Self:
        if unknown := sorted(set(self.only).difference(self.all_classes)):
            raise ValueError(f"only: unknown failure class {unknown[0]!r}: use {', '.join(self.all_classes)}")
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
    """``features.sequence``: raw telemetry windows for sequence models, stored next to the matrix."""

    channels: tuple[str, ...] | Literal["auto"] = ()
    """Channels of the raw windows for ``lstm`` and ``cnn1d``: gauges (means) and counters (increases); ``auto``:
    temperature, power, GPU and memory utilization; empty: none."""

    window: PositiveDuration = timedelta(hours=24)
    """Length of a raw window; a multiple of its step."""

    step: PositiveDuration = timedelta(minutes=30)
    """Step of a raw window; a multiple of ``telemetry.step``."""

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        if self.window % self.step:
            window, step = format_duration(self.window), format_duration(self.step)
            raise ValueError(f"the window ({window}) is not a multiple of the step ({step}), as in 24h and 30m")
        return self


class FeatureSection(Section):
    """``features``: inputs of the models."""

    delay: Duration = timedelta(minutes=10)
    """Reporting delay of samples, and of events without ``known_at``."""

    groups: tuple[Group, ...] = GROUPS
    """Feature groups to compute."""

    channels: tuple[str, ...] | Literal["auto"] = "auto"
    """Channels to compute features from; ``auto``: all channels of the dataset."""

    windows: tuple[Duration, ...] = (timedelta(hours=1),)
    """Trailing windows of telemetry, ascending; multiples of ``telemetry.step``."""

    peer_window: PositiveDuration = timedelta(hours=6)
    """Window whose mean is compared with the node's other GPUs and the fleet's same-model median."""

    onset: tuple[tuple[Duration, Duration], ...] = (
        (timedelta(hours=1), timedelta(hours=24)),
        (timedelta(hours=6), timedelta(days=3)),
        (timedelta(hours=24), timedelta(days=7)),
    )
    """Windows of the group ``onset``, each with its baseline window."""

    history_windows: tuple[Duration, ...] = (
        timedelta(days=1),
        timedelta(days=7),
        timedelta(days=30),
        timedelta(days=90),
    )
    """Trailing windows of event counts, ascending."""

    history_scopes: tuple[DomainScope, ...] = ("gpu", "slot", "node")
    """Scopes of event counts: device, slot, node; and failure domains: inventory columns (``rack``), nested ones
    (``[cabinet, cage]``), ranges of a trailing number (``serial/1000``), ``fleet``, and ``age`` (units of similar
    age)."""

    static: tuple[str, ...] | Literal["auto", "all"] = "auto"
    """Static columns, ``age``, ``in_place`` (days), ``moves``; ``auto``: model, driver, age and rack position; ``all``:
    all columns known at installation except the names of the unit."""

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
            raise ValueError("empty list: name at least one group")
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
