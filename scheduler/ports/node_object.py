"""A node's labels, annotations and taints: reading of predrain's markers, and the changes of each action.

:mod:`scheduler.ports.ownership` decides who owns a marker, by the record in the annotation ``applied-taints``.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, Literal

from foundation.kubernetes.foreign_marks import RESTING, ForeignMark, ForeignMarks, catalogue
from foundation.kubernetes.opt_out import is_set, is_unmanaged, unclear
from policy.fleet import Level, Marks, NodeView, Published
from policy.plan import Action
from scheduler.ports.codec import plain_of
from scheduler.ports.ownership import (
    MAX_TRIES,
    DamagedRecordError,
    OwnershipRecord,
    digest_of,
    foreign_marks,
    seal,
    unseal,
)
from scheduler.ports.readings import Write

Effect = Literal["PreferNoSchedule", "NoSchedule", "NoExecute"]

WRITER: Final = "predrain"
"""The field manager of predrain's patches."""

_MAX_REASONS = 3
_CORDONED: Final = "/cordoned-by-us"


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint, identified by key and effect."""

    key: str
    value: str
    effect: Effect

    def __str__(self) -> str:
        """Format the taint like ``kubectl``."""
        return f"{self.key}={self.value}:{self.effect}"


@dataclass(frozen=True, slots=True)
class NodeObject:
    """The writable fields of a node, and its conditions.

    ``cordoner``: who cordoned it, preferring clients other than predrain; None: not cordoned, or unknown.
    ``conditions``: status by type; read-only.
    ``tells_cordoner``: whether the scheduler reports who cordoned the node. Otherwise an operator's cordon could be
    mistaken for predrain's.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    cordoner: str | None = None
    tells_cordoner: bool = False
    conditions: Mapping[str, str] = field(default_factory=dict)


class Keys:
    """The keys of predrain's markers, and the known markers of other tools.

    ``avoid``: a label (``KEY=VALUE``) that jobs avoid, also set on nodes of tiers ``elevated`` and ``high``.
    ``owner``: name of this installation, which does not change markers of other installations.
    """

    def __init__(
        self,
        prefix: str = "predrain.io",
        *,
        avoid: str | None = None,
        horizon: timedelta | None = None,
        foreign: tuple[ForeignMark, ...] = (),
        owner: str = WRITER,
    ) -> None:
        self.owner = owner
        self.avoid, self.horizon, self.foreign = avoid, horizon, ForeignMarks((*foreign, *catalogue()))
        self.taint = f"{prefix}/at-risk"  # key of both taints, which differ in effect
        self.tier = f"{prefix}/risk-tier"  # label
        self.prediction = f"{prefix}/prediction"  # annotation: tier, risk, horizon, expiry and reasons
        self.applied = f"{prefix}/applied-taints"  # annotation: the ownership record
        self.drain = f"{prefix}/drain"  # annotation: start of the drain
        # annotation: predrain cordoned the node, with the time and the earlier state
        self.cordon = f"{prefix}{_CORDONED}"
        self.managed = f"{prefix}/managed"  # label or annotation: opt-out by an operator
        self.maintenance = f"{prefix}/maintenance"  # label or annotation: node is in maintenance


@dataclass(frozen=True, slots=True)
class OwnMarks:
    """Predrain's markers on a node, and foreign ones under its keys.

    ``damaged``: why the record is invalid or belongs to another installation; then predrain owns nothing on the node.
    ``foreign``: markers under predrain's keys that it does not own, with the reason.
    ``cordon``: predrain cordoned the node, and no one else has since.
    ``uncordoned``: predrain cordoned it, and another client removed or took over the cordon.
    ``user``: marker of another tool that is working on the node, and may rely on an existing cordon.
    ``opt_out``: marker that opts the node out of remediation by any tool.
    """

    record: OwnershipRecord | None
    damaged: DamagedRecordError | None
    foreign: Mapping[str, str]
    taints: frozenset[str]
    cordon: bool
    uncordoned: bool
    user: ForeignMark | None
    opt_out: ForeignMark | None

    def is_ours(self, name: str, present: Mapping[str, str]) -> bool:
        """Whether a marker is set and owned by predrain."""
        return name in present and name not in self.foreign


def own_marks(node: NodeObject, keys: Keys) -> OwnMarks:
    """Separate predrain's markers on a node from foreign ones."""
    text = node.annotations.get(keys.applied)
    record, damaged = (None, None) if text is None else _record_of(text, node.name, keys.owner)
    present = _present(node, keys)
    foreign = foreign_marks(record, present)
    taints = frozenset(
        taint.effect for taint in node.taints if taint.key == keys.taint and _taint_name(taint) not in foreign
    )
    noted = _annotation(keys.cordon) in present and _annotation(keys.cordon) not in foreign
    # installations write under one name: a cordon that another one noted too is not ours alone
    shared = any(key.endswith(_CORDONED) and key != keys.cordon for key in node.annotations)
    cordon = noted and not shared and node.unschedulable and node.cordoner == WRITER
    others = keys.foreign.on({
        "label": node.labels, "annotation": node.annotations, "condition": node.conditions,
        "taint": {taint.key: taint.value for taint in node.taints
                  if taint.effect != "PreferNoSchedule" and taint.key != keys.taint},
    })  # fmt: skip
    user = next((mark for mark in others if mark.meaning != "opt_out"), None)
    opt_out = next((mark for mark in others if mark.meaning == "opt_out"), None)
    return OwnMarks(record, damaged, foreign, taints, cordon, noted and not cordon, user, opt_out)


@lru_cache(maxsize=20_000)
def _record_of(text: str, node: str, owner: str) -> tuple[OwnershipRecord | None, DamagedRecordError | None]:
    """Parse a record, or return why it is invalid; cached because the text rarely changes between rounds."""
    try:
        return unseal(json.loads(text), node, owner), None
    except DamagedRecordError as error:
        return None, error
    except (ValueError, RecursionError):
        return None, DamagedRecordError("the record of predrain is not JSON")


def _present(node: NodeObject, keys: Keys) -> dict[str, str]:
    """Return the content of each marker under predrain's keys except the record, by name."""
    present = {_taint_name(taint): str(taint) for taint in node.taints if taint.key == keys.taint}
    if keys.tier in node.labels:
        present[_label(keys.tier)] = node.labels[keys.tier]
    for key in (keys.prediction, keys.drain, keys.cordon):
        if key in node.annotations:
            present[_annotation(key)] = node.annotations[key]
    return present


def _taint_name(taint: Taint) -> str:
    return f"taint {taint.key}:{taint.effect}"


def _label(key: str) -> str:
    return f"label {key}"


def _annotation(key: str) -> str:
    return f"annotation {key}"


def view_of(node: NodeObject, base: NodeView, keys: Keys, now: datetime) -> NodeView:
    """Return the policy's view of a node.

    ``base``: the other fields: cluster, group, units, jobs, whether it is down.
    Returns: ``marker_removed`` is set if another client removed a marker before it expired, ``uncordoned`` for the
    cordon.
    """
    markers = own_marks(node, keys)
    record, marks = markers.record, _marks(node, markers, keys, now)
    opt_out, notices = _opt_out(node, markers, keys)
    problem = "; ".join(f"{name}: {reason}" for name, reason in markers.foreign.items())
    advice = DamagedRecordError.advice
    if markers.damaged is not None:
        problem, advice = str(markers.damaged), markers.damaged.advice
    if problem:
        opt_out = opt_out or f"some markers under predrain's names are foreign ({problem})"
        notices.append("; ".join(filter(None, (f"{problem}: predrain leaves it in place", advice))))
    if markers.cordon and markers.user is not None:
        notices.append(f"predrain's cordon stays while {markers.user.tool} has the node")
    marker_removed = (
        record is not None
        and now < record.until
        and (
            record.refused >= MAX_TRIES
            or (record.level >= Level.AVOID and (marks.level < record.level or markers.uncordoned))
        )
    )
    if record is not None and record.refused:
        notices.append(
            f"the marker was missing from {record.refused} responses: an admission webhook or another controller "
            "removes it"
        )
    of_key = (taint for taint in node.taints if taint.key == keys.taint and taint.effect != "PreferNoSchedule")
    foreign_taint = next((taint for taint in of_key if taint.effect not in markers.taints), None)
    cordoned_by = (
        "an operator or another tool (it is unschedulable)" if node.unschedulable and not markers.cordon else None
    )
    if foreign_taint is not None:
        cordoned_by = cordoned_by or f"an operator or another tool (taint {foreign_taint})"
    owner = markers.user
    maintenance = f"maintenance ({keys.maintenance})" if any(map(is_set, _values(node, keys.maintenance))) else None
    return replace(
        base, name=node.name, marks=marks, opt_out=base.opt_out or opt_out,
        maintenance=base.maintenance or maintenance,
        owner=base.owner or (None if owner is None else owner.tool), cordoned_by=base.cordoned_by or cordoned_by,
        marker_removed=base.marker_removed or marker_removed,
        marked_at=None if record is None else record.set_at, uncordoned=base.uncordoned or markers.uncordoned,
        resting=f"{owner.tool}: {RESTING[owner.meaning]}" if owner and owner.meaning in RESTING else base.resting,
        # a node under maintenance, removal or start is not expected to respond
        down=base.down and not (owner and owner.meaning in RESTING),
        notice="; ".join(filter(None, (base.notice, *notices))) or None,
    )  # fmt: skip


def _marks(node: NodeObject, markers: OwnMarks, keys: Keys, now: datetime) -> Marks:
    """Return predrain's markers on a node; only markers known to be its own count.

    Removing the taint cancels the drain. A cordon left in place for another tool does not count.
    """
    record = markers.record
    if record is None:
        return Marks()
    is_released = record.level is Level.NONE and markers.cordon and markers.user is not None
    tainted = "NoSchedule" in markers.taints
    return Marks(
        published=None if is_released else Published(record.tier, record.until),
        soft="PreferNoSchedule" in markers.taints,
        tainted=tainted,
        drained=tainted and markers.is_ours(_annotation(keys.drain), _present(node, keys)),
        hard_since=(record.since or now) if tainted else None,
    )


def after(action: Action, node: NodeObject, keys: Keys, now: datetime, *, cordon: bool = False) -> NodeObject:
    """Return the node after an action, which changes only predrain's markers; the same object if nothing changes.

    ``cordon``: hard markers also cordon the node, if the scheduler reports who cordons and it is not cordoned yet.
    """
    markers = own_marks(node, keys)
    if markers.damaged is not None:
        return node
    if action.verb == "release":
        return _released(action, node, markers, keys)
    if markers.foreign:  # foreign markers are never overwritten
        return node
    end, old, marks = action.expires_at or now, markers.record, _marks(node, markers, keys, now)
    record = old or OwnershipRecord(action.tier, action.risk, end, Level.PUBLISH)
    record = replace(record, tier=action.tier, risk=None, until=end, level=max(record.level, Level.PUBLISH))
    target, record = _published(action, node, record, keys, end)
    annotations, taints = dict(target.annotations), list(target.taints)
    unschedulable, cordoner = node.unschedulable, node.cordoner
    if action.verb == "avoid" and not marks.soft:
        taints.append(Taint(keys.taint, "elevated", "PreferNoSchedule"))
    if action.verb in ("swap", "drain") and not marks.tainted:
        taints.append(Taint(keys.taint, "high", "NoSchedule"))
        annotations.pop(keys.drain, None)  # left by a canceled drain
        if cordon and node.tells_cordoner and not node.unschedulable:
            unschedulable, cordoner = True, WRITER
            annotations[keys.cordon] = json.dumps({"earlier": "schedulable", "since": plain_of(now)})
    if action.verb == "drain" and not marks.drained:
        annotations[keys.drain] = plain_of(now)
    if (tuple(taints), annotations) != (target.taints, dict(target.annotations)):
        level = max(marks.level, action.to)
        set_at = now if level > marks.level else record.set_at
        record = replace(record, level=level, set_at=set_at, since=(marks.hard_since or now) if level.hard else None)
    target = replace(
        target, annotations=annotations, taints=tuple(taints), unschedulable=unschedulable, cordoner=cordoner
    )
    return _recorded(target, record, markers, keys)


def _published(
    action: Action, node: NodeObject, record: OwnershipRecord, keys: Keys, end: datetime
) -> tuple[NodeObject, OwnershipRecord]:
    annotations, labels = dict(node.annotations), dict(node.labels)
    labels[keys.tier] = action.tier
    avoid, record = _avoid(labels, record, keys, keys.avoid if action.tier in ("elevated", "high") else None)
    annotations[keys.prediction] = _prediction(action, end, keys, avoid)
    return replace(node, labels=labels, annotations=annotations), record


def _recorded(node: NodeObject, record: OwnershipRecord | None, markers: OwnMarks, keys: Keys) -> NodeObject:
    """Return the node with the record of all markers owned by predrain, or without one (None)."""
    annotations = {key: text for key, text in node.annotations.items() if key != keys.applied}
    if record is not None:
        others = {name: digest for name, digest in record.marks.items() if _is_avoided(name, keys)}
        marks = {
            name: digest_of(content) for name, content in _present(node, keys).items() if name not in markers.foreign
        }
        annotations[keys.applied] = json.dumps(
            seal(replace(record, marks={**others, **marks}), node.name, keys.owner), sort_keys=True
        )
    return replace(node, annotations=annotations)


def _is_avoided(name: str, keys: Keys) -> bool:
    return name.startswith(_label("")) and name != _label(keys.tier)


def _released(action: Action, node: NodeObject, markers: OwnMarks, keys: Keys) -> NodeObject:
    old = markers.record
    if old is None:
        return node
    annotations, labels, record = dict(node.annotations), dict(node.labels), old
    lowest = {"NoSchedule": Level.SWAP, "PreferNoSchedule": Level.AVOID}
    kept = {effect for effect in markers.taints if effect in lowest and action.to >= lowest[effect]}
    gone = markers.taints - kept
    taints = tuple(taint for taint in node.taints if taint.key != keys.taint or taint.effect not in gone)
    present = _present(node, keys)

    def drop(texts: dict[str, str], key: str, name: str) -> None:
        if markers.is_ours(name, present):
            texts.pop(key, None)

    keeps_cordon = markers.cordon and markers.user is not None  # another tool may rely on the cordon it found
    if action.to < Level.DRAIN:
        drop(annotations, keys.drain, _annotation(keys.drain))
    if action.to < Level.PUBLISH:
        _, record = _avoid(labels, record, keys, None)
        drop(annotations, keys.prediction, _annotation(keys.prediction))
        if not keeps_cordon:  # the label finds nodes that left the selector
            drop(labels, keys.tier, _label(keys.tier))
    target = replace(node, labels=labels, annotations=annotations, taints=taints)
    remembered = False
    if action.to < Level.SWAP and not keeps_cordon and _annotation(keys.cordon) in present:
        drop(annotations, keys.cordon, _annotation(keys.cordon))
        if markers.cordon:
            target = replace(target, unschedulable=False, cordoner=None)
        else:  # removed by another client: remembered until the prediction expires
            remembered = action.to is Level.PUBLISH
    if action.to < Level.PUBLISH:
        return _recorded(target, replace(record, level=Level.NONE, since=None) if keeps_cordon else None, markers, keys)
    if not remembered and record.level > action.to:
        record = _at_level(record, kept, drained=keys.drain in annotations)
    return _recorded(target, record, markers, keys)


def _at_level(record: OwnershipRecord, effects: Collection[str], *, drained: bool = False) -> OwnershipRecord:
    """Return a record with the level that predrain's taints with these effects amount to."""
    soft, tainted = (effect in effects for effect in ("PreferNoSchedule", "NoSchedule"))
    level = Marks(Published(record.tier, record.until), soft, tainted, tainted and drained).level
    return replace(record, level=level, since=record.since if level.hard else None)


def refused(node: NodeObject, target: NodeObject, keys: Keys) -> NodeObject | None:
    """Return ``node``, the response to a patch to ``target``, with a record of the markers that the server dropped.

    None if no marker is missing. The record then has the actual level, so that the missing marker does not count as
    removed later, and the number of such responses.
    """
    expected, actual = own_marks(target, keys), own_marks(node, keys)
    if actual.record is None or actual.damaged is not None or expected.record is None:
        return None
    lacking = expected.taints - actual.taints or (expected.cordon and not node.unschedulable)
    if not lacking:
        return None
    record = _at_level(replace(actual.record, refused=actual.record.refused + 1), actual.taints)
    return _recorded(node, record, actual, keys)


def missing_from(node: NodeObject, target: NodeObject, keys: Keys) -> list[str]:
    """Return how predrain's markers in a response differ from the requested ones; any difference is a failure."""
    expected, actual = _present(target, keys), _present(node, keys)
    problems = [f"{name} is missing from the response" for name in expected if actual.get(name) != expected[name]]
    problems += [f"{name} was not removed" for name in actual if name not in expected]
    if node.unschedulable != target.unschedulable:
        problems.append("its cordon is not as requested")
    return problems


def writes_between(current: NodeObject, then: NodeObject) -> tuple[Write, ...]:
    """Return the changes between two states of a node, in a fixed order."""
    target = f"node {current.name}"
    writes: list[Write] = []
    for kind in ("labels", "annotations"):
        old, new = getattr(current, kind), getattr(then, kind)
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        writes += [Write(target, f"metadata.{kind}[{key}]", old.get(key), new.get(key)) for key in changed]
    if current.unschedulable != then.unschedulable:
        values = ["true" if node.unschedulable else None for node in (current, then)]
        writes.append(Write(target, "spec.unschedulable", *values))
    if current.taints != then.taints:
        writes.append(Write(target, "spec.taints", _taint_text(current), _taint_text(then)))
    return tuple(writes)


def _taint_text(node: NodeObject) -> str | None:
    return ", ".join(map(str, node.taints)) or None


def _opt_out(node: NodeObject, markers: OwnMarks, keys: Keys) -> tuple[str | None, list[str]]:
    """Return the opt-out of the node, if any, and warnings about unclear values."""
    values = _values(node, keys.managed)
    notices = [notice for value in values if (notice := unclear(keys.managed, value)) is not None]
    if any(map(is_unmanaged, values)):
        return f"{keys.managed}={next(filter(is_unmanaged, values))}", notices
    mark = markers.opt_out
    return (None if mark is None else f"{mark.tool}: {' '.join(mark.pattern)}"), notices


def _values(node: NodeObject, key: str) -> list[str]:
    return [texts[key] for texts in (node.labels, node.annotations) if key in texts]


def _avoid(
    labels: dict[str, str], record: OwnershipRecord, keys: Keys, new_value: str | None
) -> tuple[str | None, OwnershipRecord]:
    """Set or remove the label that jobs avoid; return the label owned by predrain, and the record.

    A label without a record is foreign. If another client removed or overwrote the label, it is left that way.
    """
    recorded = [name for name in record.marks if _is_avoided(name, keys)]
    for name in recorded:
        key = name.removeprefix(_label(""))
        if new_value is not None and key == new_value.partition("=")[0]:
            return new_value, record
        if key in labels and record.matches(name, labels[key]):
            del labels[key]
    record = record.without(*recorded)
    key, _, value = (new_value or "").partition("=")
    if new_value is None or key in labels:
        return None, record
    labels[key] = value
    return new_value, record.with_mark(_label(key), value)


def _prediction(action: Action, end: datetime, keys: Keys, avoid: str | None) -> str:
    risk, reasons = None if action.risk is None else round(action.risk, 6), list(action.reasons[:_MAX_REASONS])
    content = {"tier": action.tier, "risk": risk, "expires_at": plain_of(end), "reasons": reasons}
    if keys.horizon is not None:
        content["horizon_seconds"] = round(keys.horizon.total_seconds())
    if avoid is not None:
        content["avoid_label"] = avoid
    return json.dumps(content, ensure_ascii=False, sort_keys=True)
