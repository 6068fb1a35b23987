"""What each event says about a unit (a failure, a doubtful sign, a repair) and from when that is known."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.config import FAILURE_CLASSES, LabelSection
from features.errors import InputError
from features.installations import Installations
from features.times import NEVER, BoolArray, Int64Array, absent, duration_ms, milliseconds, text

SUBCODE_XIDS = frozenset(range(144, 151))
"""NVLink 5 errors whose sub-code, spelled out in the log line, says whether they are fatal (NVIDIA's XID catalogue)."""

CONDITIONAL_XIDS = SUBCODE_XIDS | {74, 157}
"""Interconnect errors that most GPUs survive; alone they are no incident."""

CONFIRMED_AT_ONCE = timedelta(hours=1)
"""A conditional error counts when a repair, reset, drain, failure, failed diagnostic or loss follows within this span,
and when one of :meth:`Facts.confirms_late` follows within ``labels.confirm_within``."""

TICKET_DELAY = timedelta(days=1)
"""A drain confirms a conditional error of days ago only this long after it is known: until then a ticket may come that
says which newer failure it answers."""

REPEATS = 3
"""A conditional error counts when it is one of this many ...."""

REPEATED_WITHIN = timedelta(hours=24)
"""... within this span."""

RESET_CODES = frozenset({"boot", "reset", "gpu_reset", "node_reset", "reboot", "node_reboot", "power_cycle"})
"""Codes (without case) of ``other`` events that end an incident as a repair does."""

RELEASE_CODES = frozenset({"release", "released", "undrain", "undrained", "uncordon", "resume"})
"""Codes (without case) of ``drain`` events that take a drain back."""

OWN_SOURCE = "predrain"
"""Sources that begin so are predrain's own actions; they prove nothing about the hardware."""

_FATAL = re.compile(r"(?<![a-z])(?<!non[- _])fatal(?![a-z])", re.IGNORECASE)
_LEADING_NUMBER = re.compile(r"\s*(\d{1,9})(?!\d)")
_PLANNED = re.compile(r"(?<![a-z])(planned|scheduled|maintenance)(?![a-z])", re.IGNORECASE)
_UNPLANNED = re.compile(r"(un-?|no[nt][-_ ])(planned|scheduled)", re.IGNORECASE)  # "unscheduled maintenance"
_PASSED = re.compile(r"(?<![a-z])(pass|passed|ok|success|succeeded|healthy)(?![a-z])", re.IGNORECASE)
_FAILED = re.compile(r"(?<![a-z])(fail|failed|failure|error|unhealthy)(?![a-z])", re.IGNORECASE)


def reported(events: pd.DataFrame, delay: timedelta) -> pd.DataFrame:
    """Give events their known-at times under a reporting delay.

    A dataset fixes ``known_at`` when it is imported. A ticket's entry time stands; but nothing is known earlier than
    the delay of now after it happened, whatever the delay was at the import.

    ``delay``: ``features.delay``.
    Returns: a copy with ``known_at`` at least ``timestamp + delay``.
    """
    last = events["timestamp"] if "last_at" not in events else events["last_at"].fillna(events["timestamp"])
    earliest = last + delay
    later = events["known_at"].where(events["known_at"] >= earliest, earliest)
    return events.assign(known_at=later.astype(events["known_at"].dtype))


@dataclass(frozen=True, slots=True)
class Facts:
    """Events as arrays, one entry an event, in a fixed order that depends on their content only.

    ``time``, ``known``: when it happened and from when it is known (ms); nothing is known before it happened.
    ``unit``: unit code (see :mod:`features.installations`); -1 for a whole node of GPUs and for unknown devices.
    ``node_wide``: the event names a node and no GPU.
    ``node``, ``type``, ``code``, ``detail``, ``source``: as the event has them; null as ''.
    ``xid``: XID number of ``xid`` events, -1 for every other event.
    ``count``: events that the fact stands for: a run is a fact at its first event,
    and one of the others at its last.
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
    def of(cls, events: pd.DataFrame, stays: Installations, *, as_of_ms: int = NEVER) -> Facts:
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
        # A ticket may be dated later than it was entered; it must not be used before the time it speaks of.
        known = np.maximum(known, time)
        gpu, node = text(events["gpu"]), text(events["node"])
        kind, code, detail, source = (_filled(events, name) for name in ("type", "code", "detail", "source"))
        named = ~absent(gpu)
        unit = np.where(named, stays.codes(gpu), -1)
        unit = np.where(unit < 0, stays.codes(node), unit)
        node_wide = ~named & (unit < 0)
        # What is dated before a unit's first installation happened to something else.
        unit = np.where(stays.timeline().last(unit, time) < 0, -1, unit)
        xid = np.where(kind == "xid", _mapped(code, _leading_number).astype(np.int64), -1)
        texts = [pd.factorize(values, sort=True)[0] for values in (source, detail, code, kind, text(node))]
        order = np.lexsort((*texts, unit, time, known))
        order = order[known[order] <= as_of_ms]
        return cls(
            time=time[order],
            known=known[order],
            unit=unit[order],
            node_wide=node_wide[order],
            node=node[order],
            type=kind[order],
            code=code[order],
            detail=detail[order],
            source=source[order],
            xid=xid[order],
            count=count[order],
        )

    def own(self) -> BoolArray:
        """Events that predrain's controller caused."""
        return _test(self.source, lambda value: value.casefold().startswith(OWN_SOURCE))

    def releases(self) -> BoolArray:
        """Drains taken back."""
        return (self.type == "drain") & _test(self.code, lambda code: normalized(code) in RELEASE_CODES)

    def drains(self) -> BoolArray:
        """Drains begun."""
        return (self.type == "drain") & ~self.releases()

    def ends(self) -> BoolArray:
        """Repairs, replacements and resets: after any of them the unit is taken to be sound."""
        reset = (self.type == "other") & _test(self.code, lambda code: normalized(code) in RESET_CODES)
        return (self.type == "repair") | (self.type == "replacement") | reset

    def diagnostics(self, *, passed: bool) -> BoolArray:
        """Diagnostics that passed, or that failed, by their code or, where that says neither, their detail."""
        chosen = self.type == "diagnostic"
        out = np.zeros(len(self.time), dtype=bool)
        for i in np.flatnonzero(chosen).tolist():
            outcome = diagnostic_outcome(self.code[i], self.detail[i])
            out[i] = outcome is passed
        return out

    def confirms_late(self) -> BoolArray:
        """Repairs, replacements, drains and failed diagnostics that confirm a conditional error even days later.

        Resets, planned work and predrain's own drains happen to sound units too.
        """
        mended = self.ends() & (self.type != "other") & ~_test(self.code, lambda code: normalized(code) in RESET_CODES)
        planned = _test(self.code, _is_planned) | _test(self.detail, _is_planned)
        return (mended | (self.drains() & ~self.own()) | self.diagnostics(passed=False)) & ~planned

    def at_units(self, chosen: BoolArray, stays: Installations) -> tuple[Int64Array, Int64Array]:
        """Pairs (position of the fact, unit code); a fact about a node of GPUs stands once for each GPU then on it."""
        direct = np.flatnonzero(chosen & (self.unit >= 0))
        wide = np.flatnonzero(chosen & self.node_wide)
        position, unit = stays.on_node(self.node[wide], self.time[wide])
        return np.r_[direct, wide[position]], np.r_[self.unit[direct], unit]


def diagnostic_outcome(code: str, detail: str) -> bool | None:
    """Whether a diagnostic passed (True) or failed (False); None if neither its code nor its detail says so."""
    if normalized(code) == "inconclusive":  # whatever its detail says
        return None
    for value in (code, detail):
        if _FAILED.search(value):
            return False
        if _PASSED.search(value):
            return True
    return None


def is_fatal(detail: str) -> bool:
    """Whether the log line of an NVLink 5 error calls it fatal (``Nonfatal`` and ``non-fatal`` do not)."""
    return _FATAL.search(detail) is not None


def _is_planned(value: str) -> bool:
    return _PLANNED.search(value) is not None and _UNPLANNED.search(value) is None


@dataclass(frozen=True, slots=True, order=True)
class Sign:
    """One label-worthy event of a unit: when it happened, and from when it is established that it counts.

    ``ticket``: code of a ``failure`` event, as it is compared with that of a repair; else empty.
    """

    time: int
    established: int
    class_index: int
    code: str
    node: str
    ticket: str


@dataclass(slots=True)
class UnitEvidence:
    """The facts of one unit that make and end its incidents, each list in ascending order.

    ``ends``: Repairs, replacements, resets and removals, without repairs of one failure that leave another open.
    ``own_ends``: those of ``ends`` that name the unit itself and take it out of the node or mend it (no resets).
    """

    signs: list[Sign] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    own_ends: list[int] = field(default_factory=list)


def xid_classes(labels: LabelSection) -> dict[int, int]:
    """Failure class, as an index into ``labels.all_classes``, by label-worthy XID."""
    table: dict[int, int] = {}
    for index, name in enumerate(FAILURE_CLASSES):
        for xid in labels.xids.get(name, ()):
            table.setdefault(xid, index)
    return table


def gather(
    facts: Facts, stays: Installations, labels: LabelSection, *, as_of_ms: int = NEVER
) -> dict[int, UnitEvidence]:
    """Collect the evidence of every unit that has any label-worthy event established by a time, by unit code."""
    table = xid_classes(labels)
    names = labels.all_classes
    classes = {normalized(code): names.index(name) for code, name in labels.classes.items()}
    other = FAILURE_CLASSES.index("other")
    wanted = {names.index(name) for name in labels.only or names}
    listed = np.isin(facts.xid, list(table))
    conditional = listed & np.isin(facts.xid, list(CONDITIONAL_XIDS))
    for i in np.flatnonzero(conditional & np.isin(facts.xid, list(SUBCODE_XIDS))).tolist():
        conditional[i] = is_fatal(facts.detail[i])
    failure = facts.type == "failure"
    certain = failure | (listed & ~np.isin(facts.xid, list(CONDITIONAL_XIDS)))

    def class_of(i: int) -> int:
        return classes.get(normalized(facts.code[i]), other) if failure[i] else table[int(facts.xid[i])]

    def sign(i: int, established: int) -> Sign:
        code = facts.code[i]
        ticket = normalized(code) if failure[i] else ""
        return Sign(int(facts.time[i]), established, class_of(i), code, facts.node[i] or "", ticket)

    out: dict[int, UnitEvidence] = {}
    candidates: dict[int, list[int]] = {}
    for i in np.flatnonzero((certain | conditional) & (facts.unit >= 0)).tolist():
        unit = int(facts.unit[i])
        evidence = out.setdefault(unit, UnitEvidence())
        if conditional[i]:
            candidates.setdefault(unit, []).append(i)
        else:
            evidence.signs.append(sign(i, int(facts.known[i])))

    # Predrain's drains follow its own alerts: taken as proof, the model would confirm itself.
    proofs = failure | (facts.drains() & ~facts.own()) | facts.diagnostics(passed=False)
    mended, drained = (facts.confirms_late() & chosen for chosen in (facts.type != "drain", facts.type == "drain"))
    confirmers, late, drains = (_moments(facts, stays, chosen, candidates) for chosen in (proofs, mended, drained))
    for unit, moments in drains.items():
        late.setdefault(unit, []).extend((time, known + duration_ms(TICKET_DELAY)) for time, known in moments)
    _collect_ends(facts, stays, out, confirmers, duration_ms(labels.cooldown), wanted)
    for unit, positions in candidates.items():
        doubtful = [(int(facts.time[i]), int(facts.known[i])) for i in positions]
        certainly = [(sign.time, sign.established) for sign in out[unit].signs]
        established = established_at(doubtful, confirmers.get(unit, []), late.get(unit, []), certainly, labels)
        out[unit].signs += [
            sign(i, at) for i, at in zip(positions, established, strict=True) if at < NEVER and at <= as_of_ms
        ]
    for evidence in out.values():
        # Only now: failures of other classes have repairs of their own, which must not end or confirm those wanted.
        evidence.signs = sorted(sign for sign in evidence.signs if sign.class_index in wanted)
        evidence.ends.sort()
        evidence.own_ends.sort()
    return {unit: out[unit] for unit in sorted(out) if out[unit].signs}


@dataclass(frozen=True, slots=True)
class Record:
    """What events say of the units of an inventory, read once for all who ask; ``evidence`` by unit code."""

    labels: LabelSection
    stays: Installations
    facts: Facts
    evidence: Mapping[int, UnitEvidence]

    @classmethod
    def of(cls, events: pd.DataFrame, inventory: pd.DataFrame, labels: LabelSection) -> Record:
        """Read events and inventory as a dataset holds them."""
        stays = Installations.of(inventory)
        facts = Facts.of(events, stays)
        return cls(labels, stays, facts, gather(facts, stays, labels))


def _collect_ends(
    facts: Facts,
    stays: Installations,
    out: Mapping[int, UnitEvidence],
    confirmers: dict[int, list[tuple[int, int]]],
    cooldown: int,
    wanted: Container[int],
) -> None:
    """Add ends and confirmers; a repair with the code of one failure is no end while another is known to be open.

    ``wanted``: classes of the failures that it may leave open.
    """
    ends: dict[int, list[tuple[int, int, str, bool]]] = {}
    for i, code in zip(*facts.at_units(facts.ends(), stays), strict=True):
        if int(code) in out:
            time, known, named = int(facts.time[i]), int(facts.known[i]), normalized(facts.code[i])
            is_own = facts.type[i] != "other" and named not in RESET_CODES and not facts.node_wide[i]
            is_repair = is_own and facts.type[i] == "repair"
            signs = out[int(code)].signs if is_repair and named else ()
            names_one = any(s.ticket == named and s.time <= time and s.established <= known for s in signs)
            ends.setdefault(int(code), []).append((time, known, named if names_one else "", is_own))
    for code, left in zip(*stays.leaves(), strict=True):
        if int(code) in out:
            ends.setdefault(int(code), []).append((int(left), int(left), "", True))
    for unit, of_unit in ends.items():
        for time, known, repaired, is_own in of_unit:
            confirmers.setdefault(unit, []).append((time, known))
            before = [end for end in of_unit if repaired and end[0] <= time and end[1] <= known]
            another_is_open = any(
                sign.ticket and sign.class_index in wanted
                and sign.time <= time < sign.time + cooldown and sign.established <= known
                and not any(sign.time <= end[0] and end[2] in ("", sign.ticket) for end in before)
                for sign in (out[unit].signs if repaired else ())
            )  # fmt: skip
            if not another_is_open:
                out[unit].ends.append((time, known))
                out[unit].own_ends += [time] if is_own else []


def _moments(
    facts: Facts, stays: Installations, chosen: BoolArray, units: Container[int]
) -> dict[int, list[tuple[int, int]]]:
    """Give when the chosen facts happened and when they were known, by unit."""
    out: dict[int, list[tuple[int, int]]] = {}
    for i, unit in zip(*facts.at_units(chosen, stays), strict=True):
        if int(unit) in units:
            out.setdefault(int(unit), []).append((int(facts.time[i]), int(facts.known[i])))
    return out


def established_at(
    candidates: list[tuple[int, int]],
    confirmers: list[tuple[int, int]],
    late: list[tuple[int, int]],
    certain: list[tuple[int, int]],
    labels: LabelSection,
) -> list[int]:
    """From when each conditional error of one unit is known to count.

    All moments are pairs of when it happened and from when it is known (ms).

    ``candidates``: the unit's conditional errors.
    ``confirmers``: repairs, resets, drains, failures, losses, failed diagnostics: what counts at once.
    ``late``: those of :meth:`Facts.confirms_late`, drains known :data:`TICKET_DELAY` later.
    ``certain``: the unit's certain signs. A late confirmer answers the newest incident before it that is known with
    it: no candidate before a certain sign, or ``labels.merge_window`` before another candidate.
    Returns: for each candidate the earliest time (ms) at which the known facts hold a confirmer within
    :data:`CONFIRMED_AT_ONCE` after it, a late one within ``labels.confirm_within``, or :data:`REPEATS` candidates, it
    among them, within :data:`REPEATED_WITHIN`; :data:`features.times.NEVER` if they never do.
    """
    once = duration_ms(min(CONFIRMED_AT_ONCE, labels.confirm_within))
    within, span = duration_ms(labels.confirm_within), duration_ms(REPEATED_WITHIN)
    apart = duration_ms(labels.merge_window) + 1
    confirmers, late, certain, in_order = (sorted(moments) for moments in (confirmers, late, certain, candidates))
    out: list[int] = []
    for time, known in candidates:
        proofs = [max(known, since) for _, since in _between(confirmers, time, time + once)]
        for later, since in _between(late, time, time + within):
            shown = max(known, since)
            newer = _between(certain, time, later) + _between(in_order, time + apart, later)
            if all(newer_known > shown for _, newer_known in newer):
                proofs.append(shown)
        out.append(min(proofs, default=NEVER))
    # In the order in which they become known: whatever makes a candidate one of three is, together with the
    # newcomer, among its nearest neighbours in time, since with one more between them it was one of three before.
    placed: list[tuple[int, int]] = []
    for i in sorted(range(len(candidates)), key=lambda k: (candidates[k][1], candidates[k][0], k)):
        time, known = candidates[i]
        at = bisect_left(placed, (time, i))
        placed.insert(at, (time, i))
        for first in range(max(0, at - REPEATS + 1), min(at, len(placed) - REPEATS) + 1):
            group = placed[first : first + REPEATS]
            if group[-1][0] - group[0][0] <= span:
                for _, member in group:
                    out[member] = min(out[member], known)
    return out


def _between(moments: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Those of sorted moments that happened in [first, last]."""
    return moments[bisect_left(moments, (first, -NEVER)) : bisect_right(moments, (last, NEVER))]


def normalized(code: str) -> str:
    """Give a code as it is compared: without surrounding blanks and case."""
    return code.strip().casefold()


def _runs_as_two(events: pd.DataFrame) -> tuple[pd.DataFrame, Int64Array]:
    """Give each run of events a second row at its last event, and say how many events each row stands for."""
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
    return np.where(absent(values), "", values)


def _mapped(values: NDArray[np.object_], change: Callable[[str], Any]) -> NDArray[np.object_]:
    # Events hold few distinct values, so the change is made once for each.
    code, distinct = pd.factorize(values)
    changed = np.empty(len(distinct), dtype=object)
    changed[:] = [change(value) for value in distinct]
    return np.asarray(changed[code], dtype=object)


def _test(values: NDArray[np.object_], holds: Callable[[str], bool]) -> BoolArray:
    return _mapped(values, holds).astype(bool)


def _leading_number(code: str) -> int:
    match = _LEADING_NUMBER.match(code)
    return int(match.group(1)) if match else -1
