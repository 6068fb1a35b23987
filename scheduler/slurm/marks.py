"""Reads predrain's marks on a Slurm node, and returns what each action changes and records there.

Marks are the reason of a drain, and the weight. The record is a JSON object among whatever else ``extra`` holds.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from policy.fleet import JobView, Level, Marks, NodeView, Published
from policy.plan import Action
from scheduler.ports.ownership import MAX_TRIES, DamagedRecordError, OwnershipRecord, foreign_marks, sealed, unsealed
from scheduler.ports.readings import Write
from scheduler.slurm.node import NodeChange, SlurmNode
from scheduler.slurm.settings import HIGHEST_WEIGHT, SlurmSettings
from telemetry.collect.slurm.nodes import OWN_PREFIX

KEY: Final = "predrain"
REASON: Final = "reason"
AUTHOR: Final = "author"
WEIGHT: Final = "weight"
"""Names of marks in a record: the reason of a drain; its user and time, once Slurm reports them; the raised weight."""

_AS_KEY = re.compile(rf'"{KEY}"\s*:')
_IN_TEXT = re.compile(r' ?\{"predrain":(?P<record>\{(?:[^{}]|\{[^{}]*\})*\})\}')


def record_in(extra: str, node: str, owner: str) -> OwnershipRecord | None:
    """Read the record of an installation on a node; None: there is none.

    Raises ``DamagedRecordError`` if it is not intact, or another installation's.
    """
    content = _split(extra)[1]
    return None if content is None else unsealed(content, node, owner)


def with_record(extra: str, record: OwnershipRecord | None, node: str, owner: str) -> str:
    """Put the record into an ``extra``, or remove it (None); what others hold there is kept.

    A JSON object gets one more key (Slurm can filter nodes by such an ``extra``), any other text an object after it.
    Raises ``DamagedRecordError`` where another key of that name is in the way.
    """
    others, current = _split(extra)
    if record is None and current is None:
        return extra
    own = {} if record is None else {KEY: sealed(record, node, owner)}
    if isinstance(others, dict):
        return json.dumps(others | own) if others or own else ""
    return f"{others} {json.dumps(own, separators=(',', ':'))}" if own else others


def _split(extra: str) -> tuple[dict[str, Any] | str, object]:
    """Return what others hold in an ``extra``, an object or a text, and what is under predrain's key."""
    content = _object(extra or "{}")
    others: dict[str, Any] | str = extra if content is None else content
    own: object = None
    if content is not None:
        own = content.pop(KEY, None)
    elif (match := _IN_TEXT.search(extra)) is not None:  # after the text, unless more was added since
        others, own = extra[: match.start()] + extra[match.end() :], _object(match["record"]) or {}
    if len(_AS_KEY.findall(extra)) != (own is not None):
        raise DamagedRecordError(f"extra contains {KEY!r} in an unexpected place or more than once")
    return others, own


def _object(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


LONGEST: Final = 240
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


@dataclass(frozen=True, slots=True)
class SlurmMarks:
    """Predrain's marks on a node.

    ``foreign``: the reason that a person or tool set on it, drained or down.
    ``record``: from its extra, if it is intact.
    ``damaged``: why the record is not intact, or not of this installation: nothing on the node is its own then.
    ``lost_weight``: the soft mark is recorded, and Slurm has the weight of its configuration again, as after each
    reconfigure and restart. The mark counts as current, and is to be set again.
    ``undone``: somebody else removed a mark, or made it their own.
    """

    marks: Marks
    foreign: str | None
    record: OwnershipRecord | None = None
    damaged: DamagedRecordError | None = None
    lost_weight: bool = False
    undone: bool = False


def slurm_marks_on(node: SlurmNode, settings: SlurmSettings, now: datetime) -> SlurmMarks:
    """Read predrain's marks from a node alone; whose they are, :mod:`scheduler.ports.ownership` decides."""
    record, damaged = None, None
    try:
        record = record_in(node.extra, node.name, settings.installation)
    except DamagedRecordError as error:
        damaged = error
    present = {} if node.reason is None else {REASON: node.reason}
    if record is not None and AUTHOR in record.marks:  # Slurm has told who set the reason, and when
        present[AUTHOR] = _author(node)
    hard = bool(node.out) and node.reason is not None and not foreign_marks(record, present)
    foreign = None
    if node.reason is not None and not hard:
        foreign = f"reason {node.reason!r} of {node.user or 'an unknown user'}"
    if record is None:
        return SlurmMarks(Marks(), foreign, None, damaged)
    intact = record.matches(WEIGHT, str(node.weight))
    lost = WEIGHT in record.marks and node.weight == record.weight and not intact and record.refused < MAX_TRIES
    soft = lost or intact
    since = (record.since or node.reason_at or now) if hard else None
    drained = hard and record.drain_at is not None
    marks = Marks(Published(record.tier, record.until), soft, hard, drained, since)
    undone = record.level >= Level.AVOID and marks.level < record.level and now < record.until
    return SlurmMarks(marks, foreign, record, damaged, lost, undone)


def _author(node: SlurmNode) -> str:
    return f"{node.user} {node.reason_at}"


def view_of(node: SlurmNode, jobs: Iterable[JobView], settings: SlurmSettings, now: datetime) -> NodeView:
    """Return a node as the policy sees it.

    A foreign reason is an opt-out: nothing more is written to such a node, but record and weight are taken back. Slurm
    does not know which GPUs are in a node, so its units come from the scores.
    """
    ours = slurm_marks_on(node, settings, now)
    wanted = _folded(settings.opt_out_feature)
    opt_out = next((f"feature {feature}" for feature in node.features if _folded(feature) == wanted), None)
    opt_out = opt_out or ours.foreign or (None if ours.damaged is None else str(ours.damaged))
    opt_out = opt_out or outside(node, settings)
    by = None
    if node.out and not ours.marks.tainted and node.relied_on is None:
        by = f"{node.user or 'an unknown user'} ({'+'.join(sorted(node.out)).lower()}: {node.reason})"
    group = _named(node, settings.group_prefix) or (node.partitions[0] if node.partitions else "none")
    return NodeView(
        node.name, settings.cluster, group, _named(node, settings.rack_prefix), _named(node, settings.domain_prefix),
        (), tuple(jobs), ours.marks, opt_out, node.relied_on, by, node.down, node.readable,
        ours.undone, None if ours.record is None else ours.record.set_at,
        # a drained node that was powered down is out of service for what it was drained for
        resting=None if by is not None and "MAINT" not in node.states else node.resting,
        unwritable=node.relied_on and f"{node.relied_on} is requested or in progress",
        notice=_notice(node, ours), maintenance="a maintenance reservation" if "MAINT" in node.states else None,
    )  # fmt: skip


def outside(node: SlurmNode, settings: SlurmSettings) -> str | None:
    """Return why a node is no part of the fleet: marks that still are there are removed; None: it is one."""
    if node.gpus <= 0 or "FUTURE" in node.states:
        return f"it has no {settings.gres}"
    chosen = not settings.partitions or bool({*settings.partitions} & {*node.partitions})
    return None if chosen else "none of its partitions is in slurm.partitions"


def _notice(node: SlurmNode, ours: SlurmMarks) -> str | None:
    """Return what an operator should look at: what looks like predrain's and is not, or not any more."""
    if ours.damaged is not None:
        left = f"; nothing is removed from the node until {KEY!r} is removed from extra" if ours.damaged.advice else ""
        return f"{ours.damaged}{left}"
    if ours.record is not None and ours.record.refused >= MAX_TRIES and not ours.marks.soft:
        return f"another client resets its weight, after {MAX_TRIES} restorations: it is not set again in this episode"
    looks_like_ours = node.reason is not None and OWN_PREFIX in node.reason.casefold()
    if ours.foreign is None or not looks_like_ours or not node.out:
        return None
    why = "the node has no predrain record"
    if ours.record is not None:
        why = "it was edited or set by another user"
    return f"{ours.foreign} looks like predrain's, but {why}: the drain stays until an operator resumes the node"


def _folded(feature: str) -> str:
    return re.sub(r"[-_.]", "", feature).casefold()


def _named(node: SlurmNode, prefix: str | None) -> str | None:
    if prefix is None:
        return None
    names = (feature.removeprefix(prefix) for feature in node.features if feature.startswith(prefix))
    return next(filter(None, names), None)


def change_for(action: Action, node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return what an action writes to a node; empty: nothing changes, or the node may not be written to."""
    ours = slurm_marks_on(node, settings, now)
    if not node.readable or node.relied_on or ours.damaged is not None:
        return NodeChange()
    if action.verb == "release":
        return _release(action, node, ours, settings)
    if ours.foreign is not None:
        return NodeChange()
    end, old, marks = action.expires_at or now, ours.record, ours.marks
    new = old or OwnershipRecord(action.tier, action.risk, end, Level.PUBLISH)
    intact = new.matches(WEIGHT, str(node.weight))
    new = replace(new, tier=action.tier, risk=action.risk, until=end, refused=0 if intact else new.refused)
    change = NodeChange()
    if marks.tainted and (reason := reason_for(action, end)) != node.reason:
        change, new = NodeChange(reason=reason), new.with_mark(REASON, reason).without(AUTHOR)
    published = new, change
    if action.verb == "avoid" and not marks.soft:
        weight = min(node.weight + settings.soft_weight, HIGHEST_WEIGHT)
        new = replace(new, weight=node.weight, soft=weight).with_mark(WEIGHT, str(weight))
        change = replace(change, weight=weight)
    if action.verb in ("swap", "drain") and not marks.tainted:
        change = NodeChange("FAIL" if settings.hard_state == "fail" else "DRAIN", reason_for(action, end))
        new = replace(new, since=now, drain_at=None).with_mark(REASON, change.reason or "").without(AUTHOR)
    if action.verb == "drain" and not marks.drained:
        new = replace(new, drain_at=now)
    if (new, change) != published:
        level = max(marks.level, action.to)
        new = replace(new, level=level, set_at=now if level > marks.level else new.set_at)
    return _with_extra(node, new, change, settings)


def weight_again(node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return what restores a soft mark that a reconfigure lost; empty: there is none."""
    ours = slurm_marks_on(node, settings, now)
    record = ours.record
    if record is None or not ours.lost_weight or ours.foreign is not None:
        return NodeChange()
    if not node.readable or node.relied_on or now >= record.until or record.soft is None:
        return NodeChange()
    return _with_extra(node, replace(record, refused=record.refused + 1), NodeChange(weight=record.soft), settings)


def authored(node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return what records who set predrain's reason and when, as Slurm tells it after the drain; empty: it is known."""
    ours = slurm_marks_on(node, settings, now)
    if ours.record is None or not ours.marks.tainted or AUTHOR in ours.record.marks:
        return NodeChange()
    return _with_extra(node, ours.record.with_mark(AUTHOR, _author(node)), NodeChange(), settings)


def _release(action: Action, node: SlurmNode, ours: SlurmMarks, settings: SlurmSettings) -> NodeChange:
    marks, old = ours.marks, ours.record
    if old is None or (marks.level <= action.to and old.level <= action.to):
        return NodeChange()
    change, new = NodeChange(), old
    if action.to < Level.SWAP:
        change = NodeChange("UNDRAIN") if marks.tainted else change
        new = replace(new, since=None).without(REASON, AUTHOR)
    if action.to < Level.DRAIN:
        new = replace(new, drain_at=None)
    if action.to < Level.AVOID:
        if old.matches(WEIGHT, str(node.weight)):
            change = replace(change, weight=old.weight)
        new = replace(new, weight=None, soft=None).without(WEIGHT)
    left = Marks(marks.published, marks.soft and action.to >= Level.AVOID, marks.tainted and action.to >= Level.SWAP)
    new = replace(new, level=left.level)
    return _with_extra(node, None if action.to < Level.PUBLISH else new, change, settings)


def _with_extra(
    node: SlurmNode, record: OwnershipRecord | None, change: NodeChange, settings: SlurmSettings
) -> NodeChange:
    extra = with_record(node.extra, record, node.name, settings.installation)
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
