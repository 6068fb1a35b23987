"""Feature group ``history``: known past events of a unit, its slot and its node.

Prior errors, repairs and failures carry most of the predictive information (on Summit, ROC-AUC 0.84 for GPUs that
already had a double-bit error against 0.53 for the rest). The history of a slot survives the replacement of its device;
that of a node covers all its GPUs and node-level events.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.config import FAILURE_CLASSES, FeatureSection, LabelSection, Scope
from features.groups.domains import DOMAIN_EVENT_KINDS, Domain, domain_columns, domain_values
from features.groups.history_kernel import EventVersions, sweep_history
from features.labels.evidence import IncidentEvidence, xid_classes
from features.labels.facts import EventArrays
from features.labels.incidents import known_onsets
from features.vocabulary import FeatureColumn
from foundation.times import NEVER, Int64Array, duration_ms, milliseconds, text
from telemetry.dataset.installations import Installations
from telemetry.dataset.schema import Unit

PRECURSOR_XIDS = frozenset({63, 92, 94, 156})
"""Errors masked by hardware: row remapping, many corrected errors, error containment, a retired resource."""

APP_XIDS = frozenset({13, 31, 43, 45, 68, 69, 137})
"""Errors caused by applications, and clean-up after other errors."""

RECENCY_HALF_LIFE = timedelta(days=7)
"""Half-life of the recency-weighted sums; in the InfiniteHBD trace, faults of the last 7 to 30 days are the best
predictors of the next one, and faults half a year ago have no predictive value."""

DISTINCT_WINDOW = timedelta(days=30)
"""Window in which distinct XIDs are counted; Meta's lemon detection uses 28 days."""

EVENT_KINDS = (
    "xid_memory",
    "xid_bus",
    "xid_firmware",
    "xid_interconnect",
    "xid_precursor",
    "xid_watch",
    "xid_app",
    "xid_hardware",
    "incident",
    "failure",
    "repair",
    "driver",
    "diagnostic_failed",
)
"""Event types that are counted. ``xid_watch``: XIDs in no other group; ``xid_hardware``: all but application XIDs;
``failure``: all ``failure`` events, also of whole nodes; ``incident``: known onsets; ``repair``: includes replacements
and resets."""

_BIT = {event_kind: bit for bit, event_kind in enumerate(EVENT_KINDS)}
_OF_A_GPU = tuple(event_kind for event_kind in EVENT_KINDS if event_kind not in ("xid_hardware", "failure", "driver"))
_COUNTED: dict[Scope, tuple[str, ...]] = {
    "gpu": _OF_A_GPU,
    # The device's own columns cover the rest; a slot adds the history of its earlier devices.
    "slot": ("xid_hardware", "incident", "repair"),
    # Drivers change, and nodes fail, as a whole.
    "node": (*_OF_A_GPU, "failure", "driver"),
}
_TIMED = ("incident", "xid_hardware", "repair")
_WEIGHED = ("incident", "xid_hardware", "xid_precursor")


def history_columns(features: FeatureSection, *, unit: Unit = "gpu") -> list[FeatureColumn]:
    """List the columns of the group, in the order in which :class:`EventHistory` fills them.

    ``features``: ``history_scopes`` and ``history_windows``.
    ``unit``: unit of the fleet; if it is the node, ``gpu`` and ``slot`` are omitted as they would repeat ``node``.
    Returns: for each of ``gpu``, ``slot`` and ``node``: ``count`` of each event type in each window, hours ``since``
    the last incident, hardware XID and repair (NaN: never), ``recency`` (sum over all known events of 0.5 to the power
    of age over :data:`RECENCY_HALF_LIFE`), and the number of ``distinct`` XIDs in :data:`DISTINCT_WINDOW`; then the
    columns of the failure domains, see :func:`features.groups.domains.domain_columns`.
    """
    columns: list[FeatureColumn] = []
    for scope in _scopes(features, unit):
        for event_kind in _COUNTED[scope]:
            columns += [
                FeatureColumn.of("history", event_kind, "count", window=window, scope=scope)
                for window in features.history_windows
            ]
        columns += [FeatureColumn.of("history", event_kind, "since", scope=scope, unit="h") for event_kind in _TIMED]
        columns += [FeatureColumn.of("history", event_kind, "recency", scope=scope) for event_kind in _WEIGHED]
        columns.append(FeatureColumn.of("history", "xid", "distinct", window=DISTINCT_WINDOW, scope=scope))
    return columns + [column for d in features.domains for column in domain_columns(d, features.history_windows)]


@dataclass(frozen=True, slots=True)
class EventHistory:
    """Events sorted once, to compute the history of any rows, of a matrix or live.

    Observations during planned maintenance stop counting once it is known, except repairs, replacements and driver
    changes. Tickets of failures that already count are ignored.

    ``_scopes``: the events of each scope by entity: units, slots (numbered by ``_slot_of_installation``), ``_nodes``.
    """

    columns: list[FeatureColumn]
    _features: FeatureSection
    _scopes: dict[Scope, EventVersions]
    _slot_of_installation: Int64Array
    _nodes: pd.Index
    _domains: list[Domain]
    _fleet: Domain | None
    _installations: Installations
    _windows: Int64Array

    @classmethod
    def of(
        cls, record: IncidentEvidence, features: FeatureSection, inventory: pd.DataFrame, *, unit: Unit = "gpu"
    ) -> "EventHistory":
        """Sort the known events of a dataset; ``inventory``: the one that the record was built from."""
        installations, facts, labels = record.installations, record.facts, record.labels
        onsets = known_onsets(record)
        onset_unit = installations.codes(text(onsets["unit"]))
        unit_code = np.r_[facts.unit, onset_unit]
        node = np.r_[facts.node, text(onsets["node"])]
        time = np.r_[facts.time, milliseconds(onsets["timestamp"])]
        known = np.r_[facts.known, milliseconds(onsets["known_at"], "known_at")]
        kinds = np.r_[_kinds(facts, labels), np.full(len(onsets), 1 << _BIT["incident"], dtype=np.uint32)]
        planned = record.maintenance.known_inside(np.r_[record.maintenance.concerned(facts), onset_unit], time, known)
        is_work = np.isin(facts.type, ("repair", "replacement", "driver"))  # real work, even if planned
        planned[: len(is_work)][is_work] = NEVER
        # tickets of failures that already count, and onsets opened by such tickets only
        repeated = np.r_[record.repeats, milliseconds(onsets["until"], "until")]
        ceases = np.minimum(planned, repeated)
        kinds[ceases <= known] = 0
        count = np.r_[facts.count, np.ones(len(onsets), dtype=np.int64)]
        distinct = np.unique(facts.xid[facts.xid >= 0])
        xid = np.r_[facts.xid, np.full(len(onsets), -1, dtype=np.int64)]
        code = np.where(xid >= 0, np.searchsorted(distinct, xid), -1)
        # A unit is where its last installation by then put it; later installations and removals are ignored.
        installation = installations.timeline().last(unit_code, time)
        slot_of_installation, slots = pd.factorize(_slots(installations))
        slot_of_installation = np.append(slot_of_installation, -1).astype(np.int64)
        node_code, nodes = pd.factorize(node)
        entities: dict[Scope, tuple[Int64Array, int]] = {
            "gpu": (unit_code, len(installations.units)),
            "slot": (slot_of_installation[installation], len(slots)),
            "node": (node_code, len(nodes)),
        }
        scopes: dict[Scope, EventVersions] = {}
        for scope in _scopes(features, unit):
            entity, number = entities[scope]
            usable = (entity >= 0) & (kinds != 0)
            scopes[scope] = EventVersions.of(
                entity[usable],
                number,
                time=time[usable],
                known=known[usable],
                kinds=kinds[usable],
                size=count[usable],
                until=ceases[usable],
                code=code[usable],
                codes=len(distinct),
            )
        windows = np.asarray([duration_ms(w) for w in (*features.history_windows, DISTINCT_WINDOW)], dtype=np.int64)

        domain_of = partial(
            Domain.of, installations=installations, inventory=inventory, installation=installation,
            time=time, known=known, until=ceases, kinds=kinds, count=count,
        )  # fmt: skip
        domains = [domain_of(scope) for scope in features.domains]
        fleet = domain_of("fleet") if domains else None
        nodes = pd.Index(nodes, dtype=object)
        columns = history_columns(features, unit=unit)
        return cls(columns, features, scopes, slot_of_installation, nodes, domains, fleet, installations, windows)

    def values(self, rows: pd.DataFrame) -> NDArray[np.float32]:
        """Return the group's values of rows with ``decision_time``, ``node`` and ``unit``, in any order.

        A row at t depends only on events with ``known_at <= t`` and installations with ``installed_at <= t``.
        """
        out = np.empty((len(rows), len(self.columns)), dtype=np.float32)
        time = milliseconds(rows["decision_time"], "decision_time")
        unit_code = _lookup(rows["unit"], pd.Index(self._installations.units, dtype=object))
        installation = self._installations.timeline().last(unit_code, time)
        entities = {
            "gpu": unit_code,
            "slot": self._slot_of_installation[installation],
            "node": _lookup(rows["node"], self._nodes),
        }
        column = 0
        for scope, events in self._scopes.items():
            entity = events.version_at(entities[scope], time)
            counted, timed, weighed = (
                np.asarray([_BIT[event_kind] for event_kind in event_kinds], dtype=np.int64)
                for event_kinds in (_COUNTED[scope], _TIMED, _WEIGHED)
            )
            sweep_history(
                np.lexsort((time, entity)).astype(np.int64),
                entity,
                time,
                events.events,
                self._windows,
                counted,
                timed,
                weighed,
                float(duration_ms(RECENCY_HALF_LIFE)),
                column,
                out,
            )
            column += len(counted) * (len(self._windows) - 1) + len(timed) + len(weighed) + 1
        if self._fleet is not None:
            bits = np.asarray([_BIT[event_kind] for event_kind in DOMAIN_EVENT_KINDS], dtype=np.int64)
            out[:, column:] = domain_values(
                self._domains, self._fleet, self._installations, installation, time, self._features, bits
            )
        return out


def _scopes(features: FeatureSection, unit: Unit) -> tuple[Scope, ...]:
    scopes: tuple[Scope, ...] = ("gpu", "slot", "node")
    return tuple(scope for scope in scopes if scope in features.history_scopes) if unit == "gpu" else ("node",)


def _kinds(facts: EventArrays, labels: LabelSection) -> NDArray[np.uint32]:
    """Return the event types of each fact as a bit set."""
    kinds = np.zeros(len(facts.time), dtype=np.uint32)

    def mark(event_kind: str, chosen: NDArray[np.bool_]) -> None:
        kinds[chosen] |= np.uint32(1 << _BIT[event_kind])

    groups = dict.fromkeys(PRECURSOR_XIDS, "xid_precursor") | dict.fromkeys(APP_XIDS, "xid_app")
    for xid, index in xid_classes(labels).items():
        group = f"xid_{FAILURE_CLASSES[index]}"
        groups[xid] = group if group in _BIT else "xid_watch"
    for xid in np.unique(facts.xid[facts.xid >= 0]).tolist():
        group = groups.get(xid, "xid_watch")
        chosen = facts.xid == xid
        mark(group, chosen)
        if group != "xid_app":
            mark("xid_hardware", chosen)
    mark("failure", facts.type == "failure")
    mark("repair", facts.ends())
    mark("driver", facts.type == "driver")
    mark("diagnostic_failed", facts.diagnostics(passed=False))
    return kinds


def _slots(installations: Installations) -> NDArray[np.object_]:
    """Return the position (node and slot) of each installation; None if the inventory has no slot."""
    # Node names contain no line feed, so names are unique.
    named = [
        None if slot is None else f"{node}\n{slot}"
        for node, slot in zip(installations.node, installations.slot, strict=True)
    ]
    out = np.full(len(named), None, dtype=object)
    out[:] = named
    return out


def _lookup(names: pd.Series, index: pd.Index) -> Int64Array:
    # Rows repeat few names: look each up once.
    code, distinct = pd.factorize(names)
    positions = index.get_indexer(pd.Index(np.asarray(distinct, dtype=object), dtype=object))
    return np.append(positions, -1)[code].astype(np.int64)
