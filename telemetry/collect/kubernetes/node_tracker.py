"""Every known node: from two looks at it to the events between them, and its place as rows of the inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import TypeAdapter

from telemetry.collect.event import Event
from telemetry.collect.kubernetes.node_view import NodeView, own_taint
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.milliseconds import from_ms, to_ms

SOURCE: Final = "kubernetes"
OWN_SOURCE: Final = "predrain"
"""``source`` of what our own controller did: labels leave such drains out."""

_VIEWS: Final = TypeAdapter(list[NodeView])
_GONE: Final = TypeAdapter(list[tuple[NodeView, int]])
READY: Final = "Ready"
_SOFT: Final = "PreferNoSchedule"
_DETAIL_LENGTH: Final = 400
_AGAIN_MS: Final = 1000

OBSERVED_EVERY: Final = timedelta(hours=1)
"""The place of a node is written when it changes, and otherwise this often."""

GONE_KEPT: Final = timedelta(days=90)
"""A removed node is remembered so long: a repair takes weeks, and what comes back is compared with what went."""


class NodeTracker:
    """The nodes of a fleet.

    ``cluster``: for the inventory, where no label names one.
    ``all_nodes``: whether nodes without GPUs are taken too. A node that once had GPUs is taken for ever.
    """

    def __init__(
        self,
        rules: KubernetesRules,
        *,
        cluster: str | None = None,
        all_nodes: bool = False,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        self._rules = rules
        self._cluster = cluster
        self._all = all_nodes
        content = content or {}
        self._nodes = {view.name: view for view in _VIEWS.validate_python(content.get("nodes", ()))}
        self._gone = {view.name: (view, ms) for view, ms in _GONE.validate_python(content.get("gone", ()))}
        self._observed: dict[str, tuple[dict[str, str], datetime]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: str) -> bool:
        return name in self._nodes or name in self._gone

    def content(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "nodes": _VIEWS.dump_python(list(self._nodes.values()), mode="json"),
            "gone": _GONE.dump_python(list(self._gone.values()), mode="json"),
        }

    def update(self, view: NodeView, at: datetime) -> list[Event]:
        """Apply the current state of a node; return what happened to it."""
        before = self._nodes.get(view.name)
        if before is None and view.name in self._gone:
            before, _ = self._gone.pop(view.name)
        if before is None and not (self._all or view.has_gpus):
            return []
        if before is not None:
            # A node that has just registered again may not say yet which machine it is: until then, it is the old one.
            view = replace(
                view,
                system_uuid=view.system_uuid or before.system_uuid,
                boot_id=view.boot_id or before.boot_id,
                provider_id=view.provider_id or before.provider_id,
            )
        self._nodes[view.name] = view
        return [] if view == before else node_changes(before, view, self._rules, at)

    def remove(self, name: str, at: datetime) -> list[Event]:
        """Remove a node; return the events of that."""
        view = self._nodes.pop(name, None)
        if view is None:
            return []
        oldest = to_ms(at - GONE_KEPT)
        self._gone = {each: (old, ms) for each, (old, ms) in self._gone.items() if ms > oldest}
        self._gone[name] = (view, to_ms(at))
        self._observed.pop(name, None)
        return [node_gone(view, at)]

    def keep_only(self, names: Iterable[str], at: datetime) -> list[Event]:
        """Apply a listing: a node that is not in it was removed."""
        there = set(names)
        return [
            event for name in [each for each in self._nodes if each not in there] for event in self.remove(name, at)
        ]

    def observations(self, now: datetime) -> list[dict[str, Any]]:
        """Return rows of the inventory that are due: ``gpu`` null, the node's place, when it was seen so.

        Nodes of which no place is known have none: what is in them the exporter says.
        """
        rows = []
        for name, view in self._nodes.items():
            place = dict(view.place)
            if self._cluster is not None:
                place.setdefault("cluster", self._cluster)
            if not place:
                continue
            written = self._observed.get(name)
            if written is not None and written[0] == place and timedelta() <= now - written[1] < OBSERVED_EVERY:
                continue
            self._observed[name] = (place, now)
            rows.append({"node": name, **place, "seen_at": to_ms(now)})
        return rows


@dataclass(frozen=True, slots=True)
class NodeMarker:
    """Something that holds of a node for a while: a cordon, a taint, a condition.

    ``ended`` and ``ended_code`` are type and code of the event when it goes.
    """

    type: str
    code: str
    ended: str
    ended_code: str
    source: str = SOURCE
    since_ms: int | None = None
    detail: str | None = None


def markers_of(view: NodeView, rules: KubernetesRules) -> dict[str, NodeMarker]:
    """Return what holds of a node now, by a key that stays the same while it does."""
    markers: dict[str, NodeMarker] = {}
    if view.cordoned:
        by = view.cordoned_by or ""
        source = OWN_SOURCE if by.startswith(OWN_SOURCE) else SOURCE
        detail = f"by {by}" if by else None
        markers["cordon"] = NodeMarker("drain", "cordon", "drain", "uncordon", source, view.cordoned_ms, detail)
    for taint in view.taints:
        rule = rules.for_taint(taint.key)
        own = own_taint(taint.key, rules)
        if rule is None and not own:
            continue
        code = (rule.code if rule else None) or (taint.key.split("/", 1)[-1] if own else taint.key)
        kind = "drain" if rule is None or own else rule.type
        if kind == "drain" and taint.effect == _SOFT:
            kind = "other"
        ended = (rule.ended if rule else None) or ("drain" if kind == "drain" else "other")
        ended_code = "undrain" if ended == "drain" else f"{code}_ended"
        detail = f"{taint.key}={taint.value or ''}:{taint.effect}"
        source = OWN_SOURCE if own else SOURCE
        markers[f"taint {taint.key} {taint.effect}"] = NodeMarker(
            kind, code, ended, ended_code, source, taint.since_ms, detail
        )
    for condition in view.conditions:
        detail = ": ".join(text for text in (condition.status, condition.reason, condition.message) if text)
        detail = detail[:_DETAIL_LENGTH]
        if condition.type == READY:
            if condition.status != "True":
                markers[READY] = NodeMarker(
                    "other", "node_not_ready", "other", "node_ready", SOURCE, condition.since_ms, detail
                )
            continue
        rule = rules.for_condition(condition.type)
        if rule is None or condition.status != rule.status:
            continue
        code = rule.code or condition.type
        ended = rule.ended or ("drain" if rule.type == "drain" else "other")
        ended_code = "undrain" if ended == "drain" else f"{code}_ended"
        markers[f"condition {condition.type}"] = NodeMarker(
            rule.type, code, ended, ended_code, SOURCE, condition.since_ms, detail
        )
    return markers


def node_changes(before: NodeView | None, after: NodeView, rules: KubernetesRules, at: datetime) -> list[Event]:
    """Return what happened to a node between two looks.

    ``before``: None: never seen; what already holds then is reported with the time that the object gives, else ``at``.
    ``at``: Aware; when ``after`` was heard. Events carry it as ``known_at``, and as ``timestamp`` where the object does
    not say when.
    Returns: of the whole node. A drain is taken back (a ``drain`` event with code ``uncordon`` or ``undrain``) when the
    last reason for it is gone; our own reasons do not hold up the release of others'.
    """
    events = [] if before is None else _machine(before, after, at)
    old = {} if before is None else markers_of(before, rules)
    new = markers_of(after, rules)
    left = [marker for marker in new.values() if marker.type == "drain"]
    last_release: dict[str, str] = {}
    for key, marker in old.items():
        if key in new:
            continue
        since_ms = _ended_ms(key, marker, after)
        kind, code = marker.ended, marker.ended_code
        own = marker.source == OWN_SOURCE
        if marker.type == "drain" and kind == "drain":
            if any(own or other.source != OWN_SOURCE for other in left):
                kind, code = "other", f"{marker.code}_ended"
            elif marker.source in last_release:  # two reasons gone at once: one release
                continue
            else:
                last_release[marker.source] = code
        events.append(_event(after.name, kind, code, marker.source, since_ms, marker.detail, at))
    for key, marker in new.items():
        if key not in old or _began_again(old[key], marker):
            events.append(
                _event(after.name, marker.type, marker.code, marker.source, marker.since_ms, marker.detail, at)
            )
    # Stable: of one instant, what ended comes before what began.
    return sorted(events, key=lambda event: event.timestamp)


def node_gone(view: NodeView, at: datetime) -> Event:
    """Return the event of a node object that was deleted."""
    detail = f"provider ID {view.provider_id}" if view.provider_id else None
    return _event(view.name, "other", "node_removed", SOURCE, None, detail, at)


def _machine(before: NodeView, after: NodeView, at: datetime) -> list[Event]:
    """Whether it is another machine, another instance of it, or another boot."""
    recreated = bool(before.uid and after.uid and before.uid != after.uid)
    since_ms = after.created_ms if recreated else None
    if before.system_uuid and after.system_uuid and before.system_uuid != after.system_uuid:
        detail = f"system UUID {before.system_uuid} -> {after.system_uuid}"
        return [_event(after.name, "replacement", "node_replaced", SOURCE, since_ms, detail, at)]
    events = []
    if recreated or (before.provider_id and after.provider_id and before.provider_id != after.provider_id):
        moved: str | None = None
        if before.provider_id != after.provider_id:
            moved = f"provider ID {before.provider_id or 'none'} -> {after.provider_id or 'none'}"
        events.append(_event(after.name, "other", "node_recreated", SOURCE, since_ms, moved, at))
    if before.boot_id and after.boot_id and before.boot_id != after.boot_id:
        detail = f"boot ID {before.boot_id} -> {after.boot_id}"
        events.append(_event(after.name, "other", "boot", SOURCE, _booted_ms(before, after), detail, at))
    return events


def _booted_ms(before: NodeView, after: NodeView) -> int | None:
    """When the node turned ready after the boot, if it did since the last look: the object has no time of the boot."""
    old, new = _since(before, READY, None), _since(after, READY, "True")
    return new if new is not None and (old is None or new > old) else None


def _since(view: NodeView, kind: str, status: str | None) -> int | None:
    for condition in view.conditions:
        if condition.type == kind and status in (None, condition.status):
            return condition.since_ms
    return None


def _ended_ms(key: str, marker: NodeMarker, after: NodeView) -> int | None:
    """When a condition became healthy again; the removal time of a taint or cordon is not recorded anywhere."""
    kind = key.removeprefix("condition ")
    if kind == key and key != READY:
        return None
    since_ms = _since(after, kind, None)
    return since_ms if since_ms is not None and since_ms >= (marker.since_ms or 0) else None


def _began_again(old: NodeMarker, new: NodeMarker) -> bool:
    """Whether it went and came back between two looks, or from a soft taint became a hard one."""
    if old.since_ms is None or new.since_ms is None:
        return False
    return new.since_ms - old.since_ms > _AGAIN_MS


def _event(
    node: str, kind: str, code: str, source: str, since_ms: int | None, detail: str | None, at: datetime
) -> Event:
    when = at if since_ms is None else from_ms(since_ms)
    return Event(timestamp=when, node=node, type=kind, source=source, known_at=at, code=code, detail=detail)
