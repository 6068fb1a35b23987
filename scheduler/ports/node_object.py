"""A node as labels, annotations and taints, with what of it is ours: how it is read, what each action makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Literal

from policy.fleet import Level, Marks, NodeView, Published
from policy.plan import Action
from scheduler.ports.codec import instant, json_object, plain_of
from scheduler.ports.readings import Write

Effect = Literal["PreferNoSchedule", "NoSchedule", "NoExecute"]

WRITER: Final = "predrain"
"""As whom we write: the field manager of our patches."""

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
    """A taint; ours are known by key and effect."""

    key: str
    value: str
    effect: Effect


@dataclass(frozen=True, slots=True)
class NodeObject:
    """What of a node can be written.

    ``cordoner``: who set that; None: nobody did, or it is not told.
    ``tells_cordoner``: whether the scheduler tells who set it. Where it does not, a cordon of ours that somebody undid
    and set anew for reasons of his own would look like ours.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    cordoner: str | None = None
    tells_cordoner: bool = False


class Keys:
    """The names under which we write."""

    def __init__(self, prefix: str = "predrain.io") -> None:
        self.taint = f"{prefix}/at-risk"  # of both taints, which differ by their effect
        self.tier = f"{prefix}/risk-tier"  # label
        self.prediction = f"{prefix}/prediction"  # annotation: tier, risk, end and reasons
        # annotation: what we put on the node, since when and until when; it tells who took it off
        self.applied = f"{prefix}/applied-taints"
        self.drain = f"{prefix}/drain"  # annotation: when a drain began
        # annotation: that we cordoned the node, since when, and how it was before
        self.cordon = f"{prefix}/cordoned-by-us"
        self.managed = f"{prefix}/managed"  # label or annotation by which a person keeps us off (``false``)

    def owns(self, taint: Taint) -> bool:
        """Tell whether a taint is one of ours."""
        return taint.key == self.taint and taint.effect in ("PreferNoSchedule", "NoSchedule")

    def cordoned(self, node: NodeObject) -> bool:
        """Tell whether a node is cordoned, and by us: we said so, and nobody cordoned it anew since."""
        return node.unschedulable and self.cordon in node.annotations and node.cordoner == WRITER


@dataclass(frozen=True, slots=True)
class _Applied:
    level: Level
    until: datetime
    since: datetime | None = None


def view_of(node: NodeObject, base: NodeView, keys: Keys, now: datetime) -> NodeView:
    """See a node as the policy does.

    ``base``: what is known of it besides: cluster, group, units, jobs, whether it is down.
    Returns: ``undone`` where what we put on it is gone before its time: only a person, or a tool on a person's behalf,
    takes our marks off. ``uncordoned`` where that is our cordon.
    """
    marks = marks_of(node, keys, now)
    applied = _applied(node, keys)
    uncordoned = keys.cordon in node.annotations and not keys.cordoned(node)
    undone = (
        applied is not None
        and applied.level >= Level.SOFT
        and (marks.level < applied.level or uncordoned)
        and now < applied.until
    )
    return replace(
        base,
        name=node.name,
        marks=marks,
        opt_out=base.opt_out or _opt_out(node, keys),
        owner=base.owner or _owner(node),
        cordoned_by=base.cordoned_by
        or ("a person or tool (it is unschedulable)" if node.unschedulable and not keys.cordoned(node) else None),
        undone=base.undone or undone,
        uncordoned=base.uncordoned or uncordoned,
    )


def marks_of(node: NodeObject, keys: Keys, now: datetime) -> Marks:
    """Read what of ours stands on a node.

    Returns: a prediction that cannot be read counts as expired, and so does what is left where there is none any more.
    A drain whose taint somebody took off has been called off with it. Where a hard mark stands and its beginning cannot
    be read, it began now: a rate limit then counts it once more rather than not at all.
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
    """Give what a node is after an action; the same node where nothing is to be changed.

    ``cordon``: whether a hard mark cordons the node besides, where it is told who cordons. One that is cordoned already
    is somebody else's, and stays his.
    Returns: changed in what is ours only.
    """
    if action.verb == "release":
        return _released(action, node, keys)
    annotations, labels, taints = dict(node.annotations), dict(node.labels), list(node.taints)
    end = action.expires_at or now
    applied = _applied(node, keys)
    if action.verb == "publish":
        labels[keys.tier] = action.tier
        annotations[keys.prediction] = _prediction(action, end)
        if applied is not None:
            annotations[keys.applied] = _applied_text(replace(applied, until=end))
        return replace(node, labels=labels, annotations=annotations)
    standing, unschedulable, cordoner = marks_of(node, keys, now), node.unschedulable, node.cordoner
    if action.verb == "soft_taint" and not standing.soft:
        taints.append(Taint(keys.taint, "elevated", "PreferNoSchedule"))
    if action.verb in ("taint", "drain") and not standing.tainted:
        taints.append(Taint(keys.taint, "high", "NoSchedule"))
        annotations.pop(keys.drain, None)  # of a drain that was called off
        if cordon and node.tells_cordoner and not node.unschedulable:
            unschedulable, cordoner = True, WRITER
            annotations[keys.cordon] = json.dumps(
                {"earlier": "schedulable", "since": now.astimezone(UTC).isoformat()}, sort_keys=True
            )
    if action.verb == "drain" and not standing.drained:
        annotations[keys.drain] = now.astimezone(UTC).isoformat()
    if (tuple(taints), annotations) == (node.taints, dict(node.annotations)):
        return node
    level = max(standing.level, action.to)
    since = (standing.hard_since or now) if level.hard else None
    annotations[keys.applied] = _applied_text(_Applied(level, end, since))
    return replace(node, annotations=annotations, taints=tuple(taints), unschedulable=unschedulable, cordoner=cordoner)


def _released(action: Action, node: NodeObject, keys: Keys) -> NodeObject:
    annotations, labels = dict(node.annotations), dict(node.labels)
    gone: set[str] = set()
    if action.to < Level.TAINTED:
        gone.add("NoSchedule")
    if action.to < Level.SOFT:
        gone.add("PreferNoSchedule")
    taints = tuple(taint for taint in node.taints if not (keys.owns(taint) and taint.effect in gone))
    if action.to < Level.DRAINED:
        annotations.pop(keys.drain, None)
    if action.to < Level.PUBLISHED:
        annotations.pop(keys.prediction, None)
        labels.pop(keys.tier, None)
    then = replace(node, labels=labels, annotations=annotations, taints=taints)
    applied = _applied(node, keys)
    if action.to < Level.TAINTED and annotations.pop(keys.cordon, None) is not None:
        if keys.cordoned(node):
            then = replace(then, unschedulable=False, cordoner=None)
        elif applied is not None and action.to is Level.PUBLISHED:
            return then  # a person undid it: what we put on is remembered until it would have ended
    if applied is None or applied.level <= action.to:
        if action.to < Level.SOFT:
            annotations.pop(keys.applied, None)
        return then
    left = marks_of(then, keys, applied.until).level
    if left < Level.SOFT:
        annotations.pop(keys.applied, None)
    else:
        since = applied.since if left.hard else None
        annotations[keys.applied] = _applied_text(_Applied(left, applied.until, since))
    return then


def writes_between(before: NodeObject, then: NodeObject) -> tuple[Write, ...]:
    """Give each change from one state of a node to another, in a fixed order."""
    target = f"node {before.name}"
    writes: list[Write] = []
    for kind, old, new in (
        ("labels", before.labels, then.labels),
        ("annotations", before.annotations, then.annotations),
    ):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                writes.append(Write(target, f"metadata.{kind}[{key}]", old.get(key), new.get(key)))
    if before.unschedulable != then.unschedulable:
        said = ["true" if each.unschedulable else None for each in (before, then)]
        writes.append(Write(target, "spec.unschedulable", *said))
    if before.taints != then.taints:
        writes.append(Write(target, "spec.taints", _taint_text(before), _taint_text(then)))
    return tuple(writes)


def _taint_text(node: NodeObject) -> str | None:
    return ", ".join(f"{each.key}={each.value}:{each.effect}" for each in node.taints) or None


def _opt_out(node: NodeObject, keys: Keys) -> str | None:
    for key, value in {keys.managed: "false", **FOREIGN_OPT_OUTS}.items():
        if value in (node.labels.get(key), node.annotations.get(key)):
            return f"{key}={value}"
    return None


def _owner(node: NodeObject) -> str | None:
    for key, name in FOREIGN_OWNERS.items():
        if key in node.labels or key in node.annotations:
            return name
    return next((FOREIGN_OWNER_TAINTS[each.key] for each in node.taints if each.key in FOREIGN_OWNER_TAINTS), None)


def _prediction(action: Action, end: datetime) -> str:
    content = {
        "tier": action.tier,
        "risk": None if action.risk is None else round(action.risk, 6),
        "expires_at": end.astimezone(UTC).isoformat(),
        "reasons": list(action.reasons[:_LONGEST_REASONS]),
    }
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
    names = {each.name.lower(): each for each in Level}
    if until is None or name not in names:
        return None
    return _Applied(names[name], until, instant(content.get("since")))
