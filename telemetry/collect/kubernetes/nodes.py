"""Tracked nodes: their observed state, the events that changes imply, and their location in the fleet."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Final

from foundation.instants import from_ms, to_ms
from foundation.kubernetes.api import Object, required, text_of, timestamp_ms
from foundation.kubernetes.watching import Tracker
from telemetry.accounting import Accounting
from telemetry.collect.kubernetes.rules import KubernetesRules, Rule
from telemetry.dataset.event import Event
from telemetry.dataset.schema import MAINTENANCE_BEGIN as BEGIN
from telemetry.dataset.schema import MAINTENANCE_END as END
from telemetry.kernel_log.catalogue import DETAIL_LENGTH
from telemetry.kernel_log.mentions import lost_gpus, xid_faults

SOURCE: Final = "kubernetes"
OWN_SOURCE: Final = "predrain"
"""``source`` of drains by predrain's controller, which are excluded from labels."""

OBSERVED_EVERY: Final = timedelta(hours=1)
"""A node's location is written when it changes, and at least this often."""

GONE_KEPT: Final = timedelta(days=90)
"""How long removed nodes are kept, to compare a node that returns after weeks of repair with its last state."""

_READY: Final = "Ready"
_CORDON: Final = "node.kubernetes.io/unschedulable"
_GPU_LABELS: Final = ("nvidia.com/gpu.present", "nvidia.com/gpu.product", "amd.com/gpu.product-name")
_PLACES: Final = ("cluster", "group", "rack", "nvlink_domain")
_SOFT: Final = "PreferNoSchedule"
_AGAIN_MS: Final = 1000
USED, IGNORED, UNNAMED = "used", "ignored", "unnamed"


@dataclass(frozen=True, slots=True)
class NodeMarker:
    """A state that lasts: a cordon, a taint, a condition, or a fault that a condition names.

    ``ended`` and ``ended_code``: type and code of the event when it ends. ``since_ms``: None if unknown.
    ``fault_ms``: time of the fault if the condition was already true before.
    """

    type: str
    code: str
    ended: str
    ended_code: str
    source: str = SOURCE
    since_ms: int | None = None
    detail: str | None = None
    fault_ms: int | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None


_NODE: Final = NodeMarker("other", "", "other", "")


@dataclass(frozen=True, slots=True)
class ObservedKubernetesNode:
    """Observed state of a node, small enough to keep for every node. Times are Unix milliseconds.

    ``has_gpus``: by capacity, or by a label, even if no GPU works.
    ``cordoned_by``: field manager that set ``spec.unschedulable``.
    ``markers``: active markers, by a key that is stable while they last.
    ``transitions_ms``: last transition of ``Ready`` and of conditions with a rule, healthy or not, by the same key.
    ``unknown``: keys of conditions with status ``Unknown``, whose earlier markers are kept.
    ``conditions``: disposition of each condition: ``used``, ``ignored`` by a rule, or ``unnamed`` (no rule).
    ``place``: ``cluster``, ``group``, ``rack``, ``nvlink_domain``, if labels give them.
    """

    name: str
    created_ms: int | None = None
    system_uuid: str | None = None
    boot_id: str | None = None
    has_gpus: bool = False
    ready: bool = False
    cordoned: bool = False
    cordoned_by: str | None = None
    markers: Mapping[str, NodeMarker] = field(default_factory=dict)
    transitions_ms: Mapping[str, int | None] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    place: Mapping[str, str] = field(default_factory=dict)
    removed_ms: int | None = None


def view_of(node: Object, rules: KubernetesRules) -> ObservedKubernetesNode:
    """Return the observed state of a node object."""
    metadata = node["metadata"]
    spec = node.get("spec") or {}
    status = node.get("status") or {}
    info = status.get("nodeInfo") or {}
    labels = metadata.get("labels") or {}
    taints = spec.get("taints") or ()
    conditions = status.get("conditions") or ()
    capacity = status.get("capacity") or {}
    counts = [str(count) for name, count in capacity.items() if rules.is_gpu(name) or rules.is_slice(name)]
    cordon = next((taint for taint in taints if taint["key"] == _CORDON), None)
    cordoned = bool(spec.get("unschedulable")) or cordon is not None
    manager, manager_ms = _cordoned_by(metadata.get("managedFields") or ()) if cordoned else (None, None)
    markers: dict[str, NodeMarker] = {}
    if cordoned:
        source = OWN_SOURCE if (manager or "").startswith(OWN_SOURCE) else SOURCE
        since_ms = timestamp_ms(cordon.get("timeAdded")) if cordon else None
        since_ms = manager_ms if since_ms is None else since_ms
        markers["cordon"] = NodeMarker(
            "drain", "cordon", "drain", "uncordon", source, since_ms, f"by {manager}" if manager else None
        )
    key = f"{rules.prefix}/maintenance"
    maintenance_keys = [
        place[key] for place in (labels, metadata.get("annotations") or {}) if place.get(key, "false") != "false"
    ]
    if maintenance_keys:
        markers["maintenance"] = NodeMarker(
            "maintenance", BEGIN, "maintenance", END, detail=f"{key}={maintenance_keys[0]}"
        )
    transitions_ms: dict[str, int | None] = {}
    for taint in taints:
        markers |= _taint_marker(taint, rules)
    dispositions = {
        str(condition["type"]): _add_condition(condition, rules, markers, transitions_ms) for condition in conditions
    }
    unknown = [kind for kind, condition in ((c["type"], c) for c in conditions) if condition.get("status") == "Unknown"]
    return ObservedKubernetesNode(
        name=required(metadata["name"]),
        created_ms=timestamp_ms(metadata.get("creationTimestamp")),
        # Upper or lower case, depending on the firmware's age.
        system_uuid=(text_of(info.get("systemUUID")) or "").lower() or None,
        boot_id=text_of(info.get("bootID")),
        has_gpus=any(labels.get(key, "false").lower() != "false" for key in _GPU_LABELS)
        or any(count.isdigit() and int(count) > 0 for count in counts),
        ready=any(condition["type"] == _READY and condition.get("status") == "True" for condition in conditions),
        cordoned=cordoned,
        cordoned_by=manager,
        markers=markers,
        transitions_ms=transitions_ms,
        unknown=tuple(f"condition {kind}" for kind in unknown if kind != _READY),
        conditions=dispositions,
        place={
            name: next(required(labels[key]) for key in rules.labels[name] if labels.get(key))
            for name in _PLACES
            if any(labels.get(key) for key in rules.labels.get(name, ()))
        },
    )


def _cordoned_by(managed: Any) -> tuple[str | None, int | None]:
    for entry in managed:
        fields = entry.get("fieldsV1") or {}
        if "f:unschedulable" in (fields.get("f:spec") or {}):
            return text_of(entry.get("manager")), timestamp_ms(entry.get("time"))
    return None, None


def _taint_marker(taint: Object, rules: KubernetesRules) -> dict[str, NodeMarker]:
    key, effect = required(taint["key"]), text_of(taint.get("effect")) or ""
    rule, is_own = rules.for_taint(key), key.startswith(f"{rules.prefix}/")
    if rule is None and not is_own:
        return {}
    kind = "drain" if rule is None or is_own else rule.type
    if kind == "drain" and effect == _SOFT:
        kind = "other"
    code = (rule.code if rule else None) or (key.split("/", 1)[-1] if is_own else key)
    source = OWN_SOURCE if is_own else SOURCE
    detail = f"{key}={taint.get('value') or ''}:{effect}"
    return {f"taint {key} {effect}": _marker(kind, code, rule, source, timestamp_ms(taint.get("timeAdded")), detail)}


def _add_condition(
    condition: Object,
    rules: KubernetesRules,
    markers: dict[str, NodeMarker],
    transitions_ms: dict[str, int | None],
) -> str:
    kind, status = required(condition["type"]), condition.get("status") or "Unknown"
    rule = None if kind == _READY else rules.for_condition(kind)
    if kind != _READY and (rule is None or rule.type == "ignore"):
        return UNNAMED if rule is None else IGNORED
    key = f"condition {kind}"
    since_ms = transitions_ms[key] = timestamp_ms(condition.get("lastTransitionTime"))
    reason, message = str(condition.get("reason") or ""), str(condition.get("message") or "")
    if rule is not None and rule.condition == "*" and "xid" in f"{kind} {reason} {message}".lower():
        rule = rule.model_copy(update={"type": "xid"})  # without the word, a code is that of a program
    # The event's code names the condition, unless it is an XID or a rule's code.
    name = kind if rule is not None and (rule.code or rule.type == "xid") else ""
    detail = ": ".join(text for text in (name, status, reason, message) if text)[:DETAIL_LENGTH]
    if rule is None and status != "True":
        markers[key] = NodeMarker("other", "node_not_ready", "other", "node_ready", SOURCE, since_ms, detail)
    elif rule is not None and status == rule.status:
        faults = lost_gpus(message) if rule.type == "failure" else []
        if rule.type == "xid":
            faults = xid_faults(kind, reason, message)
        template = _marker(
            "other" if rule.type == "xid" and not faults else rule.type,
            rule.code or kind,
            rule,
            SOURCE,
            since_ms,
            detail,
        )
        fault_ms = timestamp_ms(condition.get("lastHeartbeatTime"))
        repeats: Counter[str] = Counter()
        for fault in faults:
            marker = replace(
                template, code=fault.code or template.code, detail=fault.detail or detail, gpu=fault.gpu,
                pci_bus_id=fault.pci_bus_id, fault_ms=fault_ms,
            )  # fmt: skip
            place = f"{key} {marker.code} {marker.gpu or marker.pci_bus_id}"
            repeats[place] += 1  # repeats are separate markers
            markers[place if repeats[place] == 1 else f"{place} {repeats[place]}"] = marker
        if not faults:
            markers[key] = template
    return USED


def _marker(kind: str, code: str, rule: Rule | None, source: str, since_ms: int | None, detail: str) -> NodeMarker:
    ended = (rule.ended if rule else None) or ("drain" if kind == "drain" else "other")
    return NodeMarker(kind, code, ended, "undrain" if ended == "drain" else f"{code}_ended", source, since_ms, detail)


class NodeTracker(Tracker[ObservedKubernetesNode, ObservedKubernetesNode]):
    """Tracks the nodes of a fleet.

    ``cluster``: cluster name in the inventory for nodes without a label for it.
    ``all_nodes``: whether to track nodes without GPUs. A node that once had GPUs stays tracked.
    """

    key = attrgetter("name")

    def __init__(
        self,
        known: Mapping[str, ObservedKubernetesNode] | None = None,
        *,
        cluster: str | None = None,
        all_nodes: bool = False,
    ) -> None:
        super().__init__(known or {})
        self._cluster = cluster
        self._all = all_nodes
        self._observed: dict[str, tuple[Mapping[str, str], datetime]] = {}

    def __len__(self) -> int:
        return sum(view.removed_ms is None for view in self.known.values())

    def update(self, view: ObservedKubernetesNode, now: datetime) -> list[Event]:
        """Apply the current state of a node; return the events of its changes."""
        previous = self.known.get(view.name)
        if previous is None and not (self._all or view.has_gpus):
            return []
        if previous is not None:
            # A node that just re-registered may lack its UUID and boot ID: assume the previous ones until then.
            system_uuid, boot_id = view.system_uuid or previous.system_uuid, view.boot_id or previous.boot_id
            unknown_markers = {key: marker for key, marker in previous.markers.items() if _is_of(key, view.unknown)}
            markers = {**view.markers, **unknown_markers}
            view = replace(view, system_uuid=system_uuid, boot_id=boot_id, markers=markers)
        self.known[view.name] = view
        return [] if view == previous else node_changes(previous, view, now)

    def remove(self, key: str, now: datetime, *, watched: bool = True) -> list[Event]:
        """Remove a node; return the event of its removal."""
        view = self.known.get(key)
        if view is None or view.removed_ms is not None:
            return []
        self.known[key] = replace(view, removed_ms=to_ms(now))
        oldest = to_ms(now - GONE_KEPT)
        self.known = {name: node for name, node in self.known.items() if (node.removed_ms or oldest) >= oldest}
        self._observed.pop(key, None)
        return [Event(now, key, "other", SOURCE, now, "node_removed")]

    def account(self, accounting: Accounting) -> None:
        """Count the conditions of all known nodes by disposition."""
        reasons = {IGNORED: "condition that a rule ignores", UNNAMED: "condition without a rule"}
        for view in self.known.values():
            for kind, disposition in view.conditions.items():
                accounting.read("node conditions")
                if disposition == USED:
                    accounting.used("node conditions")
                else:
                    accounting.left_out("node conditions", f"{reasons[disposition]}: {kind}", example=view.name)

    def observations(self, now: datetime) -> list[dict[str, Any]]:
        """Return the inventory rows due: node, location and time; none for nodes without a known location."""
        default = {"cluster": self._cluster} if self._cluster is not None else {}
        rows = []
        for name, view in self.known.items():
            place = {**default, **view.place}
            written, written_at = self._observed.get(name, (None, now))
            recent = written == place and timedelta() <= now - written_at < OBSERVED_EVERY
            if place and view.removed_ms is None and not recent:
                self._observed[name] = (place, now)
                rows.append({"node": name, **place, "seen_at": to_ms(now)})
        return rows


def _is_of(marker: str, conditions: tuple[str, ...]) -> bool:
    return any(marker == condition or marker.startswith(f"{condition} ") for condition in conditions)


def node_changes(
    previous: ObservedKubernetesNode | None, current: ObservedKubernetesNode, now: datetime
) -> list[Event]:
    """Return the events between two observations of a node.

    ``previous``: None at the first observation, when active markers are reported too.
    ``now``: when ``current`` was received: ``known_at`` of the events, and ``timestamp`` of objects without
    one.
    Returns: events of the node, or of a GPU for faults that name one. A drain is released (a ``drain`` event with code
    ``uncordon`` or ``undrain``) when its last reason ends; predrain's own reasons do not delay the release of others.
    """
    events: list[Event] = []

    def add(kind: str, code: str, detail: str | None, since_ms: int | None, of: NodeMarker = _NODE) -> None:
        event_time = now if since_ms is None else from_ms(since_ms)
        events.append(Event(event_time, current.name, kind, of.source, now, code, detail, of.gpu, of.pci_bus_id))

    previous = previous or ObservedKubernetesNode(current.name)
    if previous.system_uuid and current.system_uuid and previous.system_uuid != current.system_uuid:
        detail = f"system UUID {previous.system_uuid} -> {current.system_uuid}"
        add(
            "replacement",
            "node_replaced",
            detail,
            None if previous.created_ms == current.created_ms else current.created_ms,
        )
    elif previous.boot_id and current.boot_id and previous.boot_id != current.boot_id:
        # The object has no boot time: use when the node became ready again, if it did since the last observation.
        was_ms, ready_ms = (view.transitions_ms.get(f"condition {_READY}") for view in (previous, current))
        ready_again = current.ready and ready_ms is not None and (was_ms is None or ready_ms > was_ms)
        detail = f"boot ID {previous.boot_id} -> {current.boot_id}"
        add("other", "boot", detail, ready_ms if ready_again else None)
    old, new = previous.markers, current.markers
    remaining = [marker for marker in new.values() if marker.type == "drain"]
    released: set[str] = set()
    for key, marker in old.items():
        if key in new:
            continue
        kind, code = marker.ended, marker.ended_code
        if marker.type == kind == "drain":
            if any(marker.source == OWN_SOURCE or other.source != OWN_SOURCE for other in remaining):
                kind, code = "other", f"{marker.code}_ended"
            elif marker.source in released:  # reasons that end together make one release
                continue
            else:
                released.add(marker.source)
        # Time when the condition became healthy; the API keeps no removal time of taints and cordons.
        since_ms = current.transitions_ms.get(key)
        if since_ms is not None and since_ms < (marker.since_ms or 0):
            since_ms = None
        add(kind, code, marker.detail, since_ms, marker)
    turned = tuple(name for name, ms in current.transitions_ms.items() if previous.transitions_ms.get(name) != ms)
    for key, marker in new.items():
        was_ms, since_ms = old[key].since_ms if key in old else None, marker.since_ms
        # It may have ended and started again between two observations.
        has_recurred = was_ms is not None and since_ms is not None and since_ms - was_ms > _AGAIN_MS
        if key not in old or has_recurred:
            # A new fault in a condition that was already bad is dated by the heartbeat, otherwise by the transition.
            in_held = marker.fault_ms is not None and not _is_of(key, turned)
            when_ms = marker.fault_ms if in_held else marker.since_ms
            add(marker.type, marker.code, marker.detail, when_ms, marker)
    # Stable sort: at equal times, ends come before starts.
    return sorted(events, key=attrgetter("timestamp"))
