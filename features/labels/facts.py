"""Events as arrays of facts: the unit concerned, the meaning, and the known-at time."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foundation.errors import InputError
from foundation.times import NEVER, BoolArray, Int64Array, is_null, milliseconds, text
from telemetry.dataset.installations import Installations

RESET_CODES = frozenset({"boot", "reset", "gpu_reset", "node_reset", "reboot", "node_reboot", "power_cycle"})
"""Codes of ``other`` events that end an incident like a repair; case-insensitive."""

RELEASE_CODES = frozenset({"release", "released", "undrain", "undrained", "uncordon", "resume"})
"""Codes of ``drain`` events that release a drain; case-insensitive."""

OWN_SOURCE = "predrain"
"""Source prefix of predrain's own actions, which are no evidence about the hardware."""

_LEADING_NUMBER = re.compile(r"\s*(\d{1,9})(?!\d)")
_PLANNED = re.compile(r"(?<![a-z])(planned|scheduled|maintenance)(?![a-z])", re.IGNORECASE)
_UNPLANNED = re.compile(r"(un-?|no[nt][-_ ])(planned|scheduled)", re.IGNORECASE)  # "unscheduled maintenance"
_PASSED = re.compile(r"(?<![a-z])(pass|passed|ok|success|succeeded|healthy)(?![a-z])", re.IGNORECASE)
_FAILED = re.compile(r"(?<![a-z])(fail|failed|failure|error|unhealthy)(?![a-z])", re.IGNORECASE)


def reported(events: pd.DataFrame, delay: timedelta) -> pd.DataFrame:
    """Apply a reporting delay to the known-at times of events.

    A dataset fixes ``known_at`` at import. The recorded entry time of a ticket is kept, but nothing is known earlier
    than the present delay after it happened, whatever the delay was at import.

    Returns: a copy with ``known_at`` at least the delay after ``timestamp``, or after ``last_at`` of a run.
    """
    last = events["timestamp"] if "last_at" not in events else events["last_at"].fillna(events["timestamp"])
    earliest = last + delay
    known_at = events["known_at"].where(events["known_at"] >= earliest, earliest)
    return events.assign(known_at=known_at.astype(events["known_at"].dtype))


@dataclass(frozen=True, slots=True)
class EventArrays:
    """Events as arrays, in an order that depends only on their content.

    ``time``, ``known``: when it happened and from when it is known (ms); nothing is known before it happened.
    ``unit``: unit code of the installations; -1 for a whole node of GPUs and for unknown devices.
    ``node_wide``: the event names a node and no GPU.
    ``node``, ``type``, ``code``, ``detail``, ``source``: as in the event; null as '', except ``node``.
    ``xid``: XID number of ``xid`` events; -1: none.
    ``count``: events that the entry represents. A run has two entries: its first event, and the others at its last.
    """

    time: Int64Array
    known: Int64Array
    unit: Int64Array
    node_wide: BoolArray
    node: NDArray[np.object_]
    type: NDArray[np.object_]
    code: NDArray[np.object_]
    detail: NDArray[np.object_]
    source: NDArray[np.object_]
    xid: Int64Array
    count: Int64Array

    @classmethod
    def of(cls, events: pd.DataFrame, installations: Installations, *, as_of_ms: int = NEVER) -> Self:
        """Read events, leaving out those not known at ``as_of_ms``.

        Raises ``InputError`` if an event has no time or no known-at time.
        """
        events, count = _runs_as_two(events)
        time = milliseconds(events["timestamp"], "timestamp")
        known = milliseconds(events["known_at"], "known_at")
        for column, values in (("timestamp", time), ("known_at", known)):
            if (values == NEVER).any():
                raise InputError(
                    f"an event without {column}",
                    f"events row {int(np.argmax(values == NEVER))}",
                    f"Fill {column}; `predrain import` does so.",
                )
        # A ticket may be dated later than it was entered; it must not be used before its date.
        known = np.maximum(known, time)
        gpu, node = text(events["gpu"]), text(events["node"])
        kind, code, detail, source = (_filled(events, name) for name in ("type", "code", "detail", "source"))
        named = ~is_null(gpu)
        unit = np.where(named, installations.codes(gpu), -1)
        unit = np.where(unit < 0, installations.codes(node), unit)
        node_wide = ~named & (unit < 0)
        # An event before a unit's first installation concerns another device.
        unit = np.where(installations.timeline().last(unit, time) < 0, -1, unit)
        xid = np.where(kind == "xid", _mapped(code, _leading_number).astype(np.int64), -1)
        texts = [pd.factorize(values, sort=True)[0] for values in (source, detail, code, kind, text(node))]
        order = np.lexsort((*texts, unit, time, known))
        order = order[known[order] <= as_of_ms]
        columns: tuple[Any, ...] = (time, known, unit, node_wide, node, kind, code, detail, source, xid, count)
        return cls(*(column[order] for column in columns))

    def is_by_predrain(self) -> BoolArray:
        """Return which events predrain's controller caused."""
        return _test(self.source, lambda value: value.casefold().startswith(OWN_SOURCE))

    def releases(self) -> BoolArray:
        """Return which events release a drain."""
        return (self.type == "drain") & _test(self.code, lambda code: normalized(code) in RELEASE_CODES)

    def drains(self) -> BoolArray:
        """Return which events start a drain."""
        return (self.type == "drain") & ~self.releases()

    def ends(self) -> BoolArray:
        """Return repairs, replacements and resets, after which the unit is presumed healthy."""
        reset = (self.type == "other") & _test(self.code, lambda code: normalized(code) in RESET_CODES)
        return (self.type == "repair") | (self.type == "replacement") | reset

    def diagnostics(self, *, passed: bool) -> BoolArray:
        """Return diagnostics that passed or failed, by their code or, if that is inconclusive, their detail."""
        chosen = self.type == "diagnostic"
        out = np.zeros(len(self.time), dtype=bool)
        for i in np.flatnonzero(chosen).tolist():
            outcome = diagnostic_outcome(self.code[i], self.detail[i])
            out[i] = outcome is passed
        return out

    def confirms_late(self) -> BoolArray:
        """Return repairs, replacements, drains and failed diagnostics that confirm a conditional error even days later.

        Resets, planned work and predrain's own drains also happen to healthy units.
        """
        mended = self.ends() & (self.type != "other") & ~_test(self.code, lambda code: normalized(code) in RESET_CODES)
        planned = _test(self.code, _is_planned) | _test(self.detail, _is_planned)
        return (mended | (self.drains() & ~self.is_by_predrain()) | self.diagnostics(passed=False)) & ~planned

    def at_units(self, chosen: BoolArray, installations: Installations) -> tuple[Int64Array, Int64Array]:
        """Return (fact position, unit code) pairs; a fact about a node of GPUs has one for each GPU then on it."""
        direct = np.flatnonzero(chosen & (self.unit >= 0))
        wide = np.flatnonzero(chosen & self.node_wide)
        position, unit = installations.on_node(self.node[wide], self.time[wide])
        return np.r_[direct, wide[position]], np.r_[self.unit[direct], unit]


def diagnostic_outcome(code: str, detail: str) -> bool | None:
    """Return whether a diagnostic passed (True) or failed (False); None: neither code nor detail says so."""
    if normalized(code) == "inconclusive":  # whatever its detail says
        return None
    for value in (code, detail):
        # First: a summary like "7 passed, 1 failed" is a failure.
        if _FAILED.search(value):
            return False
        if _PASSED.search(value):
            return True
    return None


def _is_planned(value: str) -> bool:
    return _PLANNED.search(value) is not None and _UNPLANNED.search(value) is None


def normalized(code: str) -> str:
    """Normalize a code for comparison: no surrounding whitespace, case-folded."""
    return code.strip().casefold()


def _runs_as_two(events: pd.DataFrame) -> tuple[pd.DataFrame, Int64Array]:
    """Add a second row at the last event of each run; also return how many events each row represents."""
    if "count" not in events:
        return events, np.ones(len(events), dtype=np.int64)
    count = events["count"].fillna(1).to_numpy(np.int64)
    is_run = count > 1
    ends = events[is_run].assign(timestamp=events.loc[is_run, "last_at"])
    return pd.concat([events, ends], ignore_index=True), np.r_[np.where(is_run, 1, count), count[is_run] - 1]


def _filled(events: pd.DataFrame, column: str) -> NDArray[np.object_]:
    if column not in events.columns:
        return np.full(len(events), "", dtype=object)
    values = text(events[column])
    return np.where(is_null(values), "", values)


def _mapped(values: NDArray[np.object_], change: Callable[[str], Any]) -> NDArray[np.object_]:
    # Events hold few distinct values: convert each once.
    code, distinct = pd.factorize(values)
    changed = np.empty(len(distinct), dtype=object)
    changed[:] = [change(value) for value in distinct]
    return np.asarray(changed[code], dtype=object)


def _test(values: NDArray[np.object_], holds: Callable[[str], bool]) -> BoolArray:
    return _mapped(values, holds).astype(bool)


def _leading_number(code: str) -> int:
    match = _LEADING_NUMBER.match(code)
    return int(match.group(1)) if match else -1


@dataclass(frozen=True, slots=True, order=True)
class Sign:
    """One label-worthy event of a unit: when it happened, and from when until when it counts (ms).

    ``ticket``: normalized code of a ``failure`` event, compared with that of a repair; else empty.
    ``fact``: position of the fact if it may be the ticket of an earlier failure; else -1.
    """

    time: int
    established: int
    class_index: int
    code: str
    node: str
    ticket: str
    fact: int = -1
    until: int = NEVER


@dataclass(slots=True)
class UnitEvidence:
    """Facts that start and end the incidents of one unit, each list in ascending order.

    ``tickets``: tickets of earlier signs: they extend the downtime but start no incident.
    ``ends``: (happened, known) of repairs, replacements, resets and removals, without repairs of one failure that leave
    another open.
    ``own_ends``: those of ``ends`` that remove or repair the unit, or repair its node (no resets).
    """

    signs: list[Sign] = field(default_factory=list)
    tickets: list[Sign] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    own_ends: list[tuple[int, int]] = field(default_factory=list)
