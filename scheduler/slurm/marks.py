"""Reads predrain's marks on a Slurm node, and returns what each action changes and records there.

The record is a flat JSON object among whatever else the node's ``extra`` holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from policy.fleet import JobView, Level, Marks, NodeView, Published
from policy.plan import Action
from policy.tiers import TIERS, Tier
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.readings import Write
from scheduler.slurm.node import NodeChange, SlurmNode
from scheduler.slurm.settings import HIGHEST_WEIGHT, SlurmSettings
from telemetry.collect.slurm.nodes import OWN_PREFIX

KEY: Final = "predrain"
_ALONE: Final = "alone"  # a field of earlier versions
_IN_TEXT = re.compile(r' ?\{"predrain":(?P<record>\{[^{}]*\})\}')


class DamagedRecordError(ValueError):
    """The node's extra holds a record of predrain that cannot be read: a person or tool edited it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What predrain put on a node, since when and until when.

    ``level``: where less stands before ``until``, a person took it off.
    ``since``: when the node was taken out of service.
    ``weight``, ``soft``: the weight before the soft mark, and with it; None: no soft mark.
    ``reason``: digest of the reason as written: one that was edited is a person's.
    """

    tier: Tier
    risk: float | None
    until: datetime
    level: Level
    since: datetime | None = None
    drain_at: datetime | None = None
    weight: int | None = None
    soft: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        for weight in (self.weight, self.soft):
            if weight is not None and not 0 <= weight <= HIGHEST_WEIGHT:
                raise ValueError(f"a weight is {weight}")


def digest_of(reason: str) -> str:
    """Return the digest of a reason, as a record holds it."""
    return hashlib.sha256(reason.encode()).hexdigest()[:12]


def record_in(extra: str) -> Record | None:
    """Read the record; None: there is none. Raises ``DamagedRecordError`` if it cannot be read."""
    return _split(extra)[1]


def with_record(extra: str, record: Record | None) -> str:
    """Put the record into an ``extra``, or remove it (None); what others hold there is kept.

    A JSON object gets one more key (Slurm can filter nodes by such an ``extra``), any other text an object after it.
    Raises ``DamagedRecordError`` as :func:`record_in`.
    """
    others, current = _split(extra)
    if record is None and current is None:
        return extra
    own = {}
    if record is not None:
        plain = plain_of(replace(record, risk=None if record.risk is None else round(record.risk, 6)))
        own = {KEY: {name: value for name, value in plain.items() if value is not None}}
    if isinstance(others, dict):
        return json.dumps(others | own) if others or own else ""
    return f"{others} {json.dumps(own, separators=(',', ':'))}" if own else others


def _split(extra: str) -> tuple[dict[str, Any] | str, Record | None]:
    """Return what others hold in an ``extra``, an object or a text, and the record."""
    content = _object(extra or "{}")
    others: dict[str, Any] | str = extra if content is None else content
    own: Any = None
    if content is not None:
        own = content.pop(KEY, None)
    elif (match := _IN_TEXT.search(extra)) is not None:  # after the text, unless more was added since
        others, own = extra[: match.start()] + extra[match.end() :], _object(match["record"]) or {}
    if extra.count(f'"{KEY}"') != (own is not None):
        raise DamagedRecordError(f"extra holds {KEY!r} in a place, or as often, as predrain does not write it")
    if own is None:
        return others, None
    try:
        if isinstance(own, dict):
            own = {name: value for name, value in ({"risk": None} | own).items() if name != _ALONE}
        return others, cast(Record, object_of(Record, own, "it"))
    except ValueError as error:
        raise DamagedRecordError(f"predrain's record in extra cannot be read: {error}") from None


def _object(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


LONGEST: Final = 240
_OWN_REASON = re.compile(
    r"predrain: tier=(?P<tier>[a-z]+) risk=(?P<risk>unknown|[0-9.]{1,10}) "
    r"until=(?P<until>\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z)(?P<words>; [^\"\\]+)?"
)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\"\\]+")


def reason_for(action: Action, until: datetime) -> str:
    """Return the reason of an action: tier, risk, end, and the weightiest of its reasons.

    The end is rounded up to whole seconds. ``scontrol`` takes quotation marks off the ends of a reason, so that none
    is written.
    """
    until += timedelta(microseconds=-until.microsecond % 1_000_000)
    risk = "unknown" if action.risk is None else f"{action.risk:.4f}"
    text = f"{OWN_PREFIX} tier={action.tier} risk={risk} until={until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    message = " ".join(_UNSAFE.sub(" ", action.reasons[0]).split()) if action.reasons else ""
    return f"{text}; {message}"[:LONGEST].rstrip() if message else text


def read_reason(reason: str | None) -> Published | None:
    """Read a reason; None: it is not exactly as predrain writes it."""
    match = _OWN_REASON.fullmatch(reason or "")
    if match is None or match["tier"] not in TIERS:
        return None
    try:
        return Published(match["tier"], datetime.fromisoformat(match["until"]))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Standing:
    """Predrain's marks on a node.

    ``foreign``: the reason that a person or tool set on it, drained, down or neither.
    ``record``: from its extra; derived from the reason where there is none.
    ``damaged``: why the record cannot be read.
    ``lost_weight``: the soft mark is recorded, and Slurm has the weight of its configuration again, as after each
    reconfigure and restart. The mark counts as current, and is to be set again.
    ``undone``: a person removed a mark.
    """

    marks: Marks
    foreign: str | None
    record: Record | None = None
    damaged: str | None = None
    lost_weight: bool = False
    undone: bool = False


def standing_on(node: SlurmNode, now: datetime) -> Standing:
    """Read predrain's marks from a node alone.

    A drain is predrain's if its reason is exactly as predrain writes it, and of the digest in the record, if any.
    """
    record, damaged = None, None
    try:
        record = record_in(node.extra)
    except DamagedRecordError as error:
        damaged = str(error)
    reason = read_reason(node.reason)
    digest = None if record is None else record.reason
    hard = bool(node.out) and reason is not None and digest in (None, digest_of(node.reason or ""))
    left_over = not node.out and reason is not None  # Slurm keeps the reason of a node that is down
    foreign = None
    if node.reason is not None and not hard and not left_over:
        foreign = f"reason {node.reason!r} of {node.user or 'an unknown user'}"
    if record is None and hard and reason is not None:
        record = Record(cast(Tier, reason.tier), None, reason.expires_at, Level.TAINTED, node.reason_at)
    if record is None:
        return Standing(Marks(), foreign, None, damaged)
    soft = record.soft is not None and node.weight in (record.soft, record.weight)
    lost = soft and node.weight != record.soft
    since = (record.since or node.reason_at or now) if hard else None
    drained = hard and record.drain_at is not None
    marks = Marks(Published(record.tier, record.until), soft, hard, drained, since)
    undone = record.level >= Level.SOFT and marks.level < record.level and now < record.until
    return Standing(marks, foreign, record, damaged, lost, undone)


def view_of(node: SlurmNode, jobs: Iterable[JobView], settings: SlurmSettings, now: datetime) -> NodeView:
    """Return a node as the policy sees it.

    A foreign reason is an opt-out: nothing more is written to such a node, but record and weight are taken back. Slurm
    does not know which GPUs are in a node, so its units come from the scores.
    """
    standing = standing_on(node, now)
    opt_out = f"feature {settings.opt_out_feature}" if settings.opt_out_feature in node.features else None
    opt_out = opt_out or standing.foreign or standing.damaged
    by = None
    if node.out and not standing.marks.tainted:
        by = f"{node.user or 'an unknown user'} ({'+'.join(sorted(node.out)).lower()}: {node.reason})"
    group = _named(node, settings.group_prefix) or (node.partitions[0] if node.partitions else "none")
    return NodeView(
        node.name, settings.cluster, group, _named(node, settings.rack_prefix), _named(node, settings.domain_prefix),
        (), tuple(jobs), standing.marks, opt_out, node.elsewhere, by, node.down, node.readable, standing.undone,
        maintenance="a maintenance reservation" if node.states & {"MAINT", "MAINTENANCE"} else None,
    )  # fmt: skip


def _named(node: SlurmNode, prefix: str | None) -> str | None:
    if prefix is None:
        return None
    names = (feature.removeprefix(prefix) for feature in node.features if feature.startswith(prefix))
    return next(filter(None, names), None)


def change_for(action: Action, node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return what an action writes to a node; empty: nothing changes, or the node may not be written to."""
    standing = standing_on(node, now)
    if not node.readable:
        return NodeChange()
    if action.verb == "release":
        return _release(action, node, standing)
    if standing.foreign is not None or standing.damaged is not None:
        return NodeChange()
    end, old, marks = action.expires_at or now, standing.record, standing.marks
    new = old or Record(action.tier, action.risk, end, Level.PUBLISHED)
    new = replace(new, tier=action.tier, risk=action.risk, until=end)
    change = NodeChange(reason=reason_for(action, end) if marks.tainted else None)
    published = new, change
    if action.verb == "soft_taint" and not marks.soft:
        new = replace(new, weight=node.weight, soft=min(node.weight + settings.soft_weight, HIGHEST_WEIGHT))
    if action.verb == "soft_taint" and (not marks.soft or standing.lost_weight):
        change = replace(change, weight=new.soft)
    if action.verb in ("taint", "drain") and not marks.tainted:
        change = NodeChange("FAIL" if settings.hard_state == "fail" else "DRAIN", reason_for(action, end))
        new = replace(new, since=now, drain_at=None)
    if action.verb == "drain" and not marks.drained:
        new = replace(new, drain_at=now)
    if (new, change) != published:
        new = replace(new, level=max(marks.level, action.to))
    return _written(node, new, change)


def weight_again(node: SlurmNode, now: datetime) -> NodeChange:
    """Return what restores a soft mark that a reconfigure lost; empty: there is none."""
    standing = standing_on(node, now)
    record = standing.record
    if record is None or not standing.lost_weight or standing.foreign is not None:
        return NodeChange()
    return NodeChange(weight=record.soft) if node.readable and now < record.until else NodeChange()


def _release(action: Action, node: SlurmNode, standing: Standing) -> NodeChange:
    marks, old = standing.marks, standing.record
    if old is None or (marks.level <= action.to and old.level <= action.to):
        return NodeChange()
    change, new = NodeChange(), old
    if action.to < Level.TAINTED:
        if marks.tainted:
            change = NodeChange("UNDRAIN")
        new = replace(new, since=None, reason=None)
    if action.to < Level.DRAINED:
        new = replace(new, drain_at=None)
    if action.to < Level.SOFT:
        if new.soft is not None and node.weight == new.soft and not standing.lost_weight:
            change = replace(change, weight=new.weight)
        new = replace(new, weight=None, soft=None)
    left = Marks(marks.published, marks.soft and action.to >= Level.SOFT, marks.tainted and action.to >= Level.TAINTED)
    new = replace(new, level=left.level)
    if standing.damaged is not None:
        return change
    return _with_extra(node, None if action.to < Level.PUBLISHED else new, change)


def _written(node: SlurmNode, record: Record, change: NodeChange) -> NodeChange:
    """Add the record, with the digest of predrain's reason as it will be."""
    if change.reason == node.reason and change.state is None:
        change = replace(change, reason=None)
    then = after(node, change)
    own = then.out and read_reason(then.reason) is not None
    return _with_extra(node, replace(record, reason=digest_of(then.reason or "") if own else None), change)


def _with_extra(node: SlurmNode, record: Record | None, change: NodeChange) -> NodeChange:
    extra = with_record(node.extra, record)
    return change if extra == node.extra else replace(change, extra=extra)


def after(node: SlurmNode, change: NodeChange) -> SlurmNode:
    """Return what a node is after a change."""
    states, reason = node.states, node.reason if change.reason is None else change.reason
    if change.state in ("DRAIN", "FAIL"):
        states = states | {change.state}
    elif change.state == "UNDRAIN":
        states, reason = states - {"DRAIN", "FAIL"}, None
    return replace(
        node, states=states, reason=reason,
        extra=node.extra if change.extra is None else change.extra,
        weight=node.weight if change.weight is None else change.weight,
    )  # fmt: skip


def writes_of(node: SlurmNode, change: NodeChange) -> tuple[Write, ...]:
    """Return a change as texts, in a fixed order."""
    reason = change.reason is not None or change.state == "UNDRAIN"
    fields = (
        ("State", change.state is not None, "+".join(sorted(node.out)) or None, change.state),
        ("Reason", reason, node.reason, change.reason),
        ("Weight", change.weight is not None, str(node.weight), str(change.weight)),
        ("Extra", change.extra is not None, node.extra or None, change.extra or None),
    )
    return tuple(Write(f"node {node.name}", name, old, new) for name, changed, old, new in fields if changed)
