"""From two looks at a node to the events between them: drains, releases, trouble, boots, replacements."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from telemetry.collect.event import Event
from telemetry.collect.kubernetes.node_view import NodeView, own_taint
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.milliseconds import from_ms

SOURCE: Final = "kubernetes"
OWN_SOURCE: Final = "predrain"
"""``source`` of what our own controller did: labels leave such drains out."""

READY: Final = "Ready"
_SOFT: Final = "PreferNoSchedule"
_DETAIL_LENGTH: Final = 400
_AGAIN_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Mark:
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


def marks_of(view: NodeView, rules: KubernetesRules) -> dict[str, Mark]:
    """Return what holds of a node now, by a key that stays the same while it does."""
    marks: dict[str, Mark] = {}
    if view.cordoned:
        by = view.cordoned_by or ""
        source = OWN_SOURCE if by.startswith(OWN_SOURCE) else SOURCE
        detail = f"by {by}" if by else None
        marks["cordon"] = Mark("drain", "cordon", "drain", "uncordon", source, view.cordoned_ms, detail)
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
        marks[f"taint {taint.key} {taint.effect}"] = Mark(kind, code, ended, ended_code, source, taint.since_ms, detail)
    for condition in view.conditions:
        detail = ": ".join(text for text in (condition.status, condition.reason, condition.message) if text)
        detail = detail[:_DETAIL_LENGTH]
        if condition.type == READY:
            if condition.status != "True":
                marks[READY] = Mark(
                    "other", "node_not_ready", "other", "node_ready", SOURCE, condition.since_ms, detail
                )
            continue
        rule = rules.for_condition(condition.type)
        if rule is None or condition.status != rule.status:
            continue
        code = rule.code or condition.type
        ended = rule.ended or ("drain" if rule.type == "drain" else "other")
        ended_code = "undrain" if ended == "drain" else f"{code}_ended"
        marks[f"condition {condition.type}"] = Mark(
            rule.type, code, ended, ended_code, SOURCE, condition.since_ms, detail
        )
    return marks


def node_changes(before: NodeView | None, after: NodeView, rules: KubernetesRules, at: datetime) -> list[Event]:
    """Return what happened to a node between two looks.

    ``before``: None: never seen; what already holds then is told with the time that the object gives, else ``at``.
    ``at``: Aware; when ``after`` was heard. Events carry it as ``known_at``, and as ``timestamp`` where the object does
    not say when.
    Returns: of the whole node. A drain is taken back (a ``drain`` event with code ``uncordon`` or ``undrain``) when the
    last reason for it is gone; our own reasons do not hold up the release of others'.
    """
    events = [] if before is None else _machine(before, after, at)
    old = {} if before is None else marks_of(before, rules)
    new = marks_of(after, rules)
    left = [mark for mark in new.values() if mark.type == "drain"]
    last_release: dict[str, str] = {}
    for key, mark in old.items():
        if key in new:
            continue
        since_ms = _ended_ms(key, mark, after)
        kind, code = mark.ended, mark.ended_code
        own = mark.source == OWN_SOURCE
        if mark.type == "drain" and kind == "drain":
            if any(own or other.source != OWN_SOURCE for other in left):
                kind, code = "other", f"{mark.code}_ended"
            elif mark.source in last_release:  # two reasons gone at once: one release
                continue
            else:
                last_release[mark.source] = code
        events.append(_event(after.name, kind, code, mark.source, since_ms, mark.detail, at))
    for key, mark in new.items():
        if key not in old or _began_again(old[key], mark):
            events.append(_event(after.name, mark.type, mark.code, mark.source, mark.since_ms, mark.detail, at))
    # Stable: of one instant, what ended comes before what began.
    return sorted(events, key=lambda event: event.timestamp)


def node_gone(view: NodeView, at: datetime) -> Event:
    """Return the event of a node object that was deleted."""
    detail = f"provider ID {view.provider_id}" if view.provider_id else None
    return _event(view.name, "other", "node_removed", SOURCE, None, detail, at)


def _machine(before: NodeView, after: NodeView, at: datetime) -> list[Event]:
    """Whether it is another machine, another instance of it, or another boot."""
    anew = bool(before.uid and after.uid and before.uid != after.uid)
    since_ms = after.created_ms if anew else None
    if before.system_uuid and after.system_uuid and before.system_uuid != after.system_uuid:
        detail = f"system UUID {before.system_uuid} -> {after.system_uuid}"
        return [_event(after.name, "replacement", "node_replaced", SOURCE, since_ms, detail, at)]
    events = []
    if anew or (before.provider_id and after.provider_id and before.provider_id != after.provider_id):
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


def _ended_ms(key: str, mark: Mark, after: NodeView) -> int | None:
    """When a condition turned good again; nobody writes down when a taint or cordon went."""
    kind = key.removeprefix("condition ")
    if kind == key and key != READY:
        return None
    since_ms = _since(after, kind, None)
    return since_ms if since_ms is not None and since_ms >= (mark.since_ms or 0) else None


def _began_again(old: Mark, new: Mark) -> bool:
    """Whether it went and came back between two looks, or from a soft taint became a hard one."""
    if old.since_ms is None or new.since_ms is None:
        return False
    return new.since_ms - old.since_ms > _AGAIN_MS


def _event(
    node: str, kind: str, code: str, source: str, since_ms: int | None, detail: str | None, at: datetime
) -> Event:
    when = at if since_ms is None else from_ms(since_ms)
    return Event(timestamp=when, node=node, type=kind, source=source, known_at=at, code=code, detail=detail)
