"""A node as labels, annotations and taints: how predrain's marks are read, and what each action changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from policy.fleet import Level, Marks, NodeView, Published
from policy.plan import Action
from scheduler.ports.codec import instant, json_object, plain_of
from scheduler.ports.readings import Write

Effect = Literal["PreferNoSchedule", "NoSchedule", "NoExecute"]

WRITER: Final = "predrain"
"""The field manager of predrain's patches."""

_LONGEST_REASONS = 3
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)

FOREIGN_OPT_OUTS: Mapping[str, str] = {
    "nvsentinel.dgxc.nvidia.com/managed": "false",
    "k8saas.nvidia.com/ManagedByNVSentinel": "false",
    "remediation.medik8s.io/exclude-from-remediation": "true",
}
"""Labels and annotations of other tools that keep every remediator off a node."""

FOREIGN_OWNERS: Mapping[str, str] = {"dgxc.nvidia.com/nvsentinel-state": "NVSentinel"}
"""Labels and annotations by which another tool has taken a node over."""

FOREIGN_OWNER_TAINTS: Mapping[str, str] = {"karpenter.sh/disrupted": "Karpenter", "medik8s.io/drain": "medik8s"}
"""Taints by which another tool has taken a node over."""


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint, known by key and effect."""

    key: str
    value: str
    effect: Effect


@dataclass(frozen=True, slots=True)
class NodeObject:
    """What of a node can be written.

    ``cordoner``: who cordoned it; None: it is not cordoned, or not known.
    ``tells_cordoner``: whether the scheduler reports who did. Where it does not, a cordon that a person set after
    predrain's was undone would look like predrain's.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    cordoner: str | None = None
    tells_cordoner: bool = False


class Keys:
    """The names under which predrain writes.

    ``avoid``: a label (``KEY=VALUE``) that jobs avoid, put on nodes of tier ``elevated`` and ``high`` too.
    ``horizon``: what a published risk looks ahead.
    """

    def __init__(
        self, prefix: str = "predrain.io", *, avoid: str | None = None, horizon: timedelta | None = None
    ) -> None:
        self.avoid, self.horizon = avoid, horizon
        self.taint = f"{prefix}/at-risk"  # of both taints, which differ by their effect
        self.tier = f"{prefix}/risk-tier"  # label
        self.prediction = f"{prefix}/prediction"  # annotation: tier, risk, horizon, end and reasons
        # annotation: what was put on the node, since when and until when: by it a removal by a person is recognised
        self.applied = f"{prefix}/applied-taints"
        self.drain = f"{prefix}/drain"  # annotation: when a drain began
        # annotation: that predrain cordoned the node, since when, and how it was before
        self.cordon = f"{prefix}/cordoned-by-us"
        self.managed = f"{prefix}/managed"  # label or annotation by which a person keeps predrain off (``false``)
        self.maintenance = (
            f"{prefix}/maintenance"  # label or annotation: in maintenance while it stands (not ``false``)
        )

    def owns(self, taint: Taint) -> bool:
        """Whether a taint is predrain's."""
        return taint.key == self.taint and taint.effect in ("PreferNoSchedule", "NoSchedule")

    def cordoned(self, node: NodeObject) -> bool:
        """Whether predrain cordoned a node, and no other client cordoned it since."""
        return node.unschedulable and self.cordon in node.annotations and node.cordoner == WRITER


@dataclass(frozen=True, slots=True)
class _Applied:
    level: Level
    until: datetime
    since: datetime | None = None


def view_of(node: NodeObject, base: NodeView, keys: Keys, now: datetime) -> NodeView:
    """Return a node as the policy sees it.

    ``base``: what is known of it otherwise: cluster, group, units, jobs, whether it is down.
    Returns: ``undone`` where a mark is gone before its time: only a person, or a tool on a person's behalf, removes
    one. ``uncordoned`` where that is the cordon.
    """
    marks = marks_of(node, keys, now)
    applied = _applied(node, keys)
    own_cordon = keys.cordoned(node)
    uncordoned = keys.cordon in node.annotations and not own_cordon
    foreign_cordon = "a person or tool (it is unschedulable)" if node.unschedulable and not own_cordon else None
    undone = applied is not None and applied.level >= Level.SOFT and now < applied.until
    undone = undone and applied is not None and (marks.level < applied.level or uncordoned)
    return replace(
        base, name=node.name, marks=marks, opt_out=base.opt_out or _opt_out(node, keys),
        maintenance=base.maintenance or _maintenance(node, keys),
        owner=base.owner or _owner(node), cordoned_by=base.cordoned_by or foreign_cordon,
        undone=base.undone or undone, uncordoned=base.uncordoned or uncordoned,
    )  # fmt: skip


def marks_of(node: NodeObject, keys: Keys, now: datetime) -> Marks:
    """Read predrain's marks on a node.

    A prediction that cannot be read counts as expired, and so do marks without one. A drain is called off with its
    taint. A hard mark whose beginning cannot be read began now: a rate limit counts it once more rather than never.
    """
    effects = {taint.effect for taint in node.taints if keys.owns(taint)}
    tainted = "NoSchedule" in effects
    applied = _applied(node, keys)
    since = applied.since if applied is not None else None
    return Marks(
        published=_published(node, keys),
        soft="PreferNoSchedule" in effects,
        tainted=tainted,
        drained=tainted and keys.drain in node.annotations,
        hard_since=(since or now) if tainted else None,
    )


def after(action: Action, node: NodeObject, keys: Keys, now: datetime, *, cordon: bool = False) -> NodeObject:
    """Return what a node is after an action, changed in predrain's marks only; the same node where nothing changes.

    ``cordon``: whether a hard mark cordons the node too, where the scheduler reports who cordons; not one that is
    cordoned already.
    """
    if action.verb == "release":
        return _released(action, node, keys)
    end = action.expires_at or now
    node = _predicted(action, node, keys, end)  # no mark stands without its end
    if action.verb == "publish":
        return node
    annotations, taints = dict(node.annotations), list(node.taints)
    standing, unschedulable, cordoner = marks_of(node, keys, now), node.unschedulable, node.cordoner
    if action.verb == "soft_taint" and not standing.soft:
        taints.append(Taint(keys.taint, "elevated", "PreferNoSchedule"))
    if action.verb in ("taint", "drain") and not standing.tainted:
        taints.append(Taint(keys.taint, "high", "NoSchedule"))
        annotations.pop(keys.drain, None)  # of a drain that was called off
        if cordon and node.tells_cordoner and not node.unschedulable:
            unschedulable, cordoner = True, WRITER
            annotations[keys.cordon] = json.dumps({"earlier": "schedulable", "since": plain_of(now)})
    if action.verb == "drain" and not standing.drained:
        annotations[keys.drain] = plain_of(now)
    if (tuple(taints), annotations) == (node.taints, dict(node.annotations)):
        return node
    level = max(standing.level, action.to)
    since = (standing.hard_since or now) if level.hard else None
    annotations[keys.applied] = _applied_text(_Applied(level, end, since))
    return replace(node, annotations=annotations, taints=tuple(taints), unschedulable=unschedulable, cordoner=cordoner)


def _predicted(action: Action, node: NodeObject, keys: Keys, end: datetime) -> NodeObject:
    annotations, labels, applied = dict(node.annotations), dict(node.labels), _applied(node, keys)
    labels[keys.tier] = action.tier
    avoid = _avoid(node, keys, labels, keys.avoid if action.tier in ("elevated", "high") else None)
    annotations[keys.prediction] = _prediction(action, end, keys, avoid)
    if applied is not None:
        annotations[keys.applied] = _applied_text(replace(applied, until=end))
    return replace(node, labels=labels, annotations=annotations)


def _released(action: Action, node: NodeObject, keys: Keys) -> NodeObject:
    annotations, labels = dict(node.annotations), dict(node.labels)
    kept = {"NoSchedule": action.to >= Level.TAINTED, "PreferNoSchedule": action.to >= Level.SOFT}
    taints = tuple(taint for taint in node.taints if not keys.owns(taint) or kept[taint.effect])
    if action.to < Level.DRAINED:
        annotations.pop(keys.drain, None)
    if action.to < Level.PUBLISHED:
        _avoid(node, keys, labels, None)
        annotations.pop(keys.prediction, None)
        labels.pop(keys.tier, None)
    then = replace(node, labels=labels, annotations=annotations, taints=taints)
    applied = _applied(node, keys)
    if action.to < Level.TAINTED and annotations.pop(keys.cordon, None) is not None:
        if keys.cordoned(node):
            then = replace(then, unschedulable=False, cordoner=None)
        elif applied is not None and action.to is Level.PUBLISHED:
            return then  # a person undid it: the mark is remembered until it would have ended
    left = action.to if applied is None or applied.level <= action.to else marks_of(then, keys, applied.until).level
    if left < Level.SOFT:
        annotations.pop(keys.applied, None)
    elif applied is not None and applied.level > action.to:
        since = applied.since if left.hard else None
        annotations[keys.applied] = _applied_text(_Applied(left, applied.until, since))
    return then


def writes_between(before: NodeObject, then: NodeObject) -> tuple[Write, ...]:
    """Return each change from one state of a node to another, in a fixed order."""
    target = f"node {before.name}"
    writes: list[Write] = []
    for kind in ("labels", "annotations"):
        old, new = getattr(before, kind), getattr(then, kind)
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        writes += [Write(target, f"metadata.{kind}[{key}]", old.get(key), new.get(key)) for key in changed]
    if before.unschedulable != then.unschedulable:
        values = ["true" if node.unschedulable else None for node in (before, then)]
        writes.append(Write(target, "spec.unschedulable", *values))
    if before.taints != then.taints:
        writes.append(Write(target, "spec.taints", _taint_text(before), _taint_text(then)))
    return tuple(writes)


def _taint_text(node: NodeObject) -> str | None:
    return ", ".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in node.taints) or None


def _opt_out(node: NodeObject, keys: Keys) -> str | None:
    for key, value in {keys.managed: "false", **FOREIGN_OPT_OUTS}.items():
        if value in (node.labels.get(key), node.annotations.get(key)):
            return f"{key}={value}"
    return None


def _maintenance(node: NodeObject, keys: Keys) -> str | None:
    stands = {node.labels.get(keys.maintenance), node.annotations.get(keys.maintenance)} - {None, "false"}
    return f"maintenance ({keys.maintenance})" if stands else None


def _owner(node: NodeObject) -> str | None:
    for key, name in FOREIGN_OWNERS.items():
        if key in node.labels or key in node.annotations:
            return name
    owners = (FOREIGN_OWNER_TAINTS.get(taint.key) for taint in node.taints)
    return next((owner for owner in owners if owner is not None), None)


def _avoid(node: NodeObject, keys: Keys, labels: dict[str, str], wanted: str | None) -> str | None:
    """Set or remove the label that jobs avoid; return the one that the prediction then records as predrain's.

    Without that record the label is another's. One that a person removed, or a tool overwrote, is left like that.
    """
    before = json_object(node.annotations.get(keys.prediction)).get("avoid_label")
    if before == wanted:
        return wanted
    if isinstance(before, str):
        name, _, value = before.partition("=")
        if labels.get(name) == value:
            del labels[name]
    if wanted is None:
        return None
    name, _, value = wanted.partition("=")
    if name in labels:
        return None
    labels[name] = value
    return wanted


def _prediction(action: Action, end: datetime, keys: Keys, avoid: str | None) -> str:
    risk, reasons = None if action.risk is None else round(action.risk, 6), list(action.reasons[:_LONGEST_REASONS])
    content = {"tier": action.tier, "risk": risk, "expires_at": plain_of(end), "reasons": reasons}
    if keys.horizon is not None:
        content["horizon_seconds"] = round(keys.horizon.total_seconds())
    if avoid is not None:
        content["avoid_label"] = avoid
    return json.dumps(content, ensure_ascii=False, sort_keys=True)


def _published(node: NodeObject, keys: Keys) -> Published | None:
    text = node.annotations.get(keys.prediction)
    if text is None:
        left = keys.tier in node.labels or keys.applied in node.annotations or keys.drain in node.annotations
        return Published("unreadable", _NEVER) if left else None
    content = json_object(text)
    end, tier = instant(content.get("expires_at")), content.get("tier")
    if end is None or not isinstance(tier, str) or node.labels.get(keys.tier) != tier:
        return Published("unreadable", _NEVER)
    return Published(tier, end)


def _applied_text(applied: _Applied) -> str:
    content = plain_of(applied)
    return json.dumps({name: value for name, value in content.items() if value is not None}, sort_keys=True)


def _applied(node: NodeObject, keys: Keys) -> _Applied | None:
    content = json_object(node.annotations.get(keys.applied))
    until, name = instant(content.get("until")), content.get("level")
    names = {level.name.lower(): level for level in Level}
    if until is None or name not in names:
        return None
    return _Applied(names[name], until, instant(content.get("since")))
