"""Evidence for incidents: label-worthy events, events that end them, and confirmation of conditional errors."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pandas as pd

from features.config import DRIVER_CLASSES, FAILURE_CLASSES, LabelSection
from features.labels.facts import RESET_CODES, EventArrays, Sign, UnitEvidence, normalized
from features.labels.maintenance import Maintenance
from features.labels.tickets import assign_tickets, possible_tickets
from foundation.times import NEVER, BoolArray, Int64Array, duration_ms
from telemetry.dataset.installations import Installations

SUBCODE_XIDS = frozenset(range(144, 151))
"""NVLink 5 errors whose sub-code in the log line says whether they are fatal (NVIDIA's XID catalogue)."""

CONDITIONAL_XIDS = SUBCODE_XIDS | {74, 157}
"""Interconnect errors that most GPUs survive; without confirmation they are no incident."""

IMMEDIATE_CONFIRMATION = timedelta(hours=1)
"""A conditional error counts if a repair, reset, drain, failure, failed diagnostic or removal follows within this span,
or if an event of :meth:`features.labels.facts.EventArrays.confirms_late` follows within ``labels.confirm_within``. A
repair that names only the node counts for the GPUs it can be attributed to, see :func:`unattributed_repairs`."""

TICKET_DELAY = timedelta(days=1)
"""Delay after which a known drain confirms a conditional error of days ago: until then, a ticket may show that the
drain answers a newer failure."""

REPEATS = 3
"""This many conditional errors of a unit within :data:`REPEATED_WITHIN` confirm each other."""

REPEATED_WITHIN = timedelta(hours=24)
"""See :data:`REPEATS`."""

_FATAL = re.compile(r"(?<![a-z])(?<!non[- _])fatal(?![a-z])", re.IGNORECASE)


def is_fatal(detail: str) -> bool:
    """Whether the log line of an NVLink 5 error calls it fatal (``Nonfatal`` and ``non-fatal`` do not)."""
    return _FATAL.search(detail) is not None


def xid_classes(labels: LabelSection) -> dict[int, int]:
    """Return the failure class of each label-worthy XID, as an index into ``labels.all_classes``."""
    table: dict[int, int] = {}
    for index, name in enumerate(FAILURE_CLASSES):
        for xid in labels.xids.get(name, ()):
            table.setdefault(xid, index)
    return table


def find_evidence(
    facts: EventArrays, installations: Installations, labels: LabelSection, *, as_of_ms: int = NEVER
) -> tuple[dict[int, UnitEvidence], Int64Array]:
    """Return the evidence of every unit with a label-worthy event established by ``as_of_ms``, by unit code.

    Returns: the evidence, and from when each fact is known to be a ticket of another failure; see
    :func:`~features.labels.tickets.assign_tickets`.
    """
    class_of_xid = xid_classes(labels)
    names = labels.all_classes
    classes = {normalized(code): names.index(name) for code, name in {**DRIVER_CLASSES, **labels.classes}.items()}
    other, interconnect = FAILURE_CLASSES.index("other"), FAILURE_CLASSES.index("interconnect")
    listed = {names.index(name) for name in labels.only or names}
    is_listed = np.isin(facts.xid, list(class_of_xid))
    is_conditional = is_listed & np.isin(facts.xid, list(CONDITIONAL_XIDS))
    for i in np.flatnonzero(is_conditional & np.isin(facts.xid, list(SUBCODE_XIDS))).tolist():
        is_conditional[i] = is_fatal(facts.detail[i])
    is_failure = facts.type == "failure"
    is_certain = is_failure | (is_listed & ~np.isin(facts.xid, list(CONDITIONAL_XIDS)))

    def class_of(i: int) -> int:
        if not is_failure[i]:
            return class_of_xid[int(facts.xid[i])]
        code = normalized(facts.code[i])
        return classes.get(code, interconnect if code.startswith("sxid") else other)

    may_be_ticket = possible_tickets(facts)
    unattributed = unattributed_repairs(facts, installations, is_certain | is_conditional, labels)

    def sign(i: int, established: int) -> Sign:
        code = facts.code[i]
        ticket = normalized(code) if is_failure[i] else ""
        fact = i if may_be_ticket[i] else -1
        return Sign(int(facts.time[i]), established, class_of(i), code, facts.node[i] or "", ticket, fact)

    evidence_of: dict[int, UnitEvidence] = {}
    candidates: dict[int, list[int]] = {}
    for i in np.flatnonzero((is_certain | is_conditional) & (facts.unit >= 0)).tolist():
        unit = int(facts.unit[i])
        evidence = evidence_of.setdefault(unit, UnitEvidence())
        if is_conditional[i]:
            candidates.setdefault(unit, []).append(i)
        else:
            evidence.signs.append(sign(i, int(facts.known[i])))

    # Predrain's drains follow its own alerts: accepting them as proof would let the model confirm itself.
    confirms_now = is_failure | (facts.drains() & ~facts.is_by_predrain()) | facts.diagnostics(passed=False)
    confirms_late, is_drain = facts.confirms_late(), facts.type == "drain"
    confirmers, late, late_drains = (
        _times_by_unit(facts, installations, chosen, candidates, unattributed)
        for chosen in (confirms_now, confirms_late & ~is_drain, confirms_late & is_drain)
    )
    for unit, moments in late_drains.items():
        late.setdefault(unit, []).extend((time, known + duration_ms(TICKET_DELAY)) for time, known in moments)
    _add_ends(facts, installations, evidence_of, confirmers, duration_ms(labels.cooldown), listed, unattributed)
    for unit, positions in candidates.items():
        conditionals = [(int(facts.time[i]), int(facts.known[i])) for i in positions]
        certain = [(sign.time, sign.established) for sign in evidence_of[unit].signs]
        established = established_at(conditionals, confirmers.get(unit, []), late.get(unit, []), certain, labels)
        evidence_of[unit].signs += [
            sign(i, known_from)
            for i, known_from in zip(positions, established, strict=True)
            if known_from < NEVER and known_from <= as_of_ms
        ]
    for evidence in evidence_of.values():
        evidence.own_ends.sort()
    repeats = assign_tickets(facts, may_be_ticket, installations, evidence_of, labels)
    for evidence in evidence_of.values():
        # Filter by class last: repairs of other failures must not end or confirm the wanted ones.
        evidence.signs, evidence.tickets = (
            sorted(sign for sign in signs if sign.class_index in listed) for signs in (evidence.signs, evidence.tickets)
        )
        evidence.ends.sort()
    return {unit: evidence_of[unit] for unit in sorted(evidence_of) if evidence_of[unit].signs}, repeats


@dataclass(frozen=True, slots=True)
class IncidentEvidence:
    """Evidence on all units of an inventory, computed once and shared.

    ``repeats``: from when each fact is known to be the ticket of a failure that already counts (ms).
    """

    labels: LabelSection
    installations: Installations
    facts: EventArrays
    evidence: Mapping[int, UnitEvidence]
    repeats: Int64Array
    maintenance: Maintenance

    @classmethod
    def of(cls, events: pd.DataFrame, inventory: pd.DataFrame, labels: LabelSection) -> "IncidentEvidence":
        """Read the events and inventory of a dataset."""
        installations = Installations.of(inventory)
        facts = EventArrays.of(events, installations)
        return cls(
            labels,
            installations,
            facts,
            *find_evidence(facts, installations, labels),
            Maintenance.of(facts, installations),
        )

    def is_unplanned(self, unit: Int64Array, signs: Sequence[Sign]) -> BoolArray:
        """Return which signs were not yet known to be in planned maintenance when they were established."""
        time, established = (np.array([getattr(s, name) for s in signs], np.int64) for name in ("time", "established"))
        return self.maintenance.known_inside(unit, time, established) > established


def _add_ends(
    facts: EventArrays,
    installations: Installations,
    evidence_of: Mapping[int, UnitEvidence],
    confirmers: dict[int, list[tuple[int, int]]],
    cooldown: int,
    classes: Container[int],
    unattributed: Container[tuple[int, int]],
) -> None:
    """Add ends and confirmers; a repair whose code names one failure ends nothing while another is known open.

    ``classes``: those of the failures that can stay open. ``unattributed``: ends that confirm nothing.
    """
    ends: dict[int, list[tuple[int, int, str, bool]]] = {}
    for i, unit_code in zip(*facts.at_units(facts.ends(), installations), strict=True):
        if int(unit_code) in evidence_of:
            time, known, repaired_code = int(facts.time[i]), int(facts.known[i]), normalized(facts.code[i])
            # Work on a node that names no GPU ends the incidents of all its GPUs: the repaired one is unknown.
            is_own = facts.type[i] != "other" and repaired_code not in RESET_CODES
            is_repair = is_own and facts.type[i] == "repair"
            signs = evidence_of[int(unit_code)].signs if is_repair and repaired_code else ()
            names_one = any(s.ticket == repaired_code and s.time <= time and s.established <= known for s in signs)
            ends.setdefault(int(unit_code), []).append((time, known, repaired_code if names_one else "", is_own))
            if (int(i), int(unit_code)) not in unattributed:
                confirmers.setdefault(int(unit_code), []).append((time, known))
    for unit_code, left_at in zip(*installations.leaves(), strict=True):
        if int(unit_code) in evidence_of:
            ends.setdefault(int(unit_code), []).append((int(left_at), int(left_at), "", True))
            confirmers.setdefault(int(unit_code), []).append((int(left_at), int(left_at)))
    for unit, unit_ends in ends.items():
        for time, known, repaired, is_own in unit_ends:
            earlier_ends = [end for end in unit_ends if repaired and end[0] <= time and end[1] <= known]
            another_is_open = any(
                sign.ticket and sign.class_index in classes
                and sign.time <= time < sign.time + cooldown and sign.established <= known
                and not any(sign.time <= end[0] and end[2] in ("", sign.ticket) for end in earlier_ends)
                for sign in (evidence_of[unit].signs if repaired else ())
            )  # fmt: skip
            if not another_is_open:
                evidence_of[unit].ends.append((time, known))
                evidence_of[unit].own_ends += [(time, known)] if is_own else []


def unattributed_repairs(
    facts: EventArrays, installations: Installations, is_error: BoolArray, labels: LabelSection
) -> set[tuple[int, int]]:
    """Find node-level repairs and replacements that cannot be attributed to a GPU of the node.

    Such work answers the errors of the node known with it, within ``labels.confirm_within`` before it: those of one
    GPU, or of the GPUs whose newest errors form a node incident. If another GPU has an older error, it may answer that
    one.

    ``is_error``: certain and conditional errors.
    Returns: pairs of fact position and unit code.
    """
    confirm_within, window = duration_ms(labels.confirm_within), duration_ms(labels.node_window)
    positions = np.flatnonzero(is_error & (facts.unit >= 0))
    by_node: dict[str, list[tuple[int, int, int]]] = {}
    places = installations.node[installations.timeline().last(facts.unit[positions], facts.time[positions])]
    for i, node in zip(positions.tolist(), places, strict=True):
        by_node.setdefault(node, []).append((int(facts.time[i]), int(facts.unit[i]), int(facts.known[i])))
    work = facts.node_wide & ((facts.type == "repair") | (facts.type == "replacement"))
    units_of: dict[int, set[int]] = {}
    for i in np.flatnonzero(work).tolist():
        time, known = int(facts.time[i]), int(facts.known[i])
        recent = [error for error in by_node.get(facts.node[i], ()) if time - confirm_within <= error[0] <= time]
        recent = sorted((error for error in recent if error[2] <= known), reverse=True)
        cut = next(
            (n for n, (newer, older) in enumerate(pairwise(recent), 1) if newer[0] - older[0] > window), len(recent)
        )
        newest_units, older_units = ({unit for _, unit, _ in errors} for errors in (recent[:cut], recent[cut:]))
        units_of[i] = newest_units if older_units <= newest_units else set()
    return {
        (int(i), int(unit))
        for i, unit in zip(*facts.at_units(work, installations), strict=True)
        if unit not in units_of[i]
    }


def _times_by_unit(
    facts: EventArrays,
    installations: Installations,
    chosen: BoolArray,
    units: Container[int],
    unattributed: Container[tuple[int, int]],
) -> dict[int, list[tuple[int, int]]]:
    """Return (happened, known) of the chosen facts by unit, without those that cannot be attributed to it."""
    times_of: dict[int, list[tuple[int, int]]] = {}
    for i, unit in zip(*facts.at_units(chosen, installations), strict=True):
        if int(unit) in units and (int(i), int(unit)) not in unattributed:
            times_of.setdefault(int(unit), []).append((int(facts.time[i]), int(facts.known[i])))
    return times_of


def established_at(
    candidates: list[tuple[int, int]],
    confirmers: list[tuple[int, int]],
    late: list[tuple[int, int]],
    certain: list[tuple[int, int]],
    labels: LabelSection,
) -> list[int]:
    """Return from when each conditional error of one unit counts.

    Moments are pairs (happened, known), in ms.

    ``candidates``: the unit's conditional errors.
    ``confirmers``: repairs, resets, drains, failures, removals, failed diagnostics: they confirm immediately.
    ``late``: see :meth:`features.labels.facts.EventArrays.confirms_late`; drains count :data:`TICKET_DELAY` later.
    ``certain``: the unit's certain signs. A late confirmer answers the newest incident before it that is known with it:
    no candidate before a certain sign, or more than ``labels.merge_window`` before another candidate.
    Returns: for each candidate the earliest time (ms) at which the known facts hold a confirmer within
    :data:`IMMEDIATE_CONFIRMATION` after it, a late one within ``labels.confirm_within``, or :data:`REPEATS` candidates,
    including itself, within :data:`REPEATED_WITHIN`; :data:`foundation.times.NEVER` if they never do.
    """
    immediate_ms = duration_ms(min(IMMEDIATE_CONFIRMATION, labels.confirm_within))
    late_ms, repeated_ms = duration_ms(labels.confirm_within), duration_ms(REPEATED_WITHIN)
    apart_ms = duration_ms(labels.merge_window) + 1
    confirmers, late, certain, ordered = (sorted(moments) for moments in (confirmers, late, certain, candidates))
    established: list[int] = []
    for time, known in candidates:
        proofs = [max(known, since) for _, since in _between(confirmers, time, time + immediate_ms)]
        for moment, since in _between(late, time, time + late_ms):
            shown_at = max(known, since)
            newer_errors = _between(certain, time, moment) + _between(ordered, time + apart_ms, moment)
            if all(newer_known > shown_at for _, newer_known in newer_errors):
                proofs.append(shown_at)
        established.append(min(proofs, default=NEVER))
    # In order of known-at time. The group of three that a newcomer completes consists of its nearest neighbours in
    # time: with a further candidate between them, its members would have been confirmed before.
    known_by_time: list[tuple[int, int]] = []
    for i in sorted(range(len(candidates)), key=lambda k: (candidates[k][1], candidates[k][0], k)):
        time, known = candidates[i]
        position = bisect_left(known_by_time, (time, i))
        known_by_time.insert(position, (time, i))
        for first in range(max(0, position - REPEATS + 1), min(position, len(known_by_time) - REPEATS) + 1):
            group = known_by_time[first : first + REPEATS]
            if group[-1][0] - group[0][0] <= repeated_ms:
                for _, member in group:
                    established[member] = min(established[member], known)
    return established


def _between(moments: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the sorted moments that happened in [first, last]."""
    return moments[bisect_left(moments, (first, -NEVER)) : bisect_right(moments, (last, NEVER))]
