"""predrain's markers on a Slurm node, and the changes of each action.

The markers are the reason of a drain, and the weight. The record is a JSON object in ``extra``, next to other content.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from policy.fleet import JobView, Level, Marks, NodeView, Published
from policy.plan import Action
from scheduler.ports.ownership import MAX_TRIES, DamagedRecordError, OwnershipRecord, foreign_marks, seal, unseal
from scheduler.ports.readings import Write
from scheduler.slurm.node import NodeChange, SlurmNode
from scheduler.slurm.settings import HIGHEST_WEIGHT, SlurmSettings
from telemetry.collect.slurm.nodes import OWN_PREFIX

KEY: Final = "predrain"
REASON: Final = "reason"
SET_AT: Final = "set_at"
WEIGHT: Final = "weight"
"""Names of markers in a record: the reason of a drain; when it was set, once reported; the raised weight."""

_AS_KEY = re.compile(rf'"{KEY}"\s*:')
_IN_TEXT = re.compile(r' ?\{"predrain":(?P<record>\{(?:[^{}]|\{[^{}]*\})*\})\}')


def record_in(extra: str, node: str, owner: str) -> OwnershipRecord | None:
    """Parse the record in a node's ``extra``; None if there is none.

    Raises ``DamagedRecordError`` if it is invalid or belongs to another installation.
    """
    content = _split(extra)[1]
    return None if content is None else unseal(content, node, owner)


def with_record(extra: str, record: OwnershipRecord | None, node: str, owner: str) -> str:
    """Return ``extra`` with the record set, or removed (None); foreign content is kept.

    A JSON object gets an additional key (Slurm can filter nodes by it); any other text gets an object appended.
    Raises ``DamagedRecordError`` if the key occurs elsewhere in ``extra``.
    """
    others, current = _split(extra)
    if record is None and current is None:
        return extra
    addition = {} if record is None else {KEY: seal(record, node, owner)}
    if isinstance(others, dict):
        return json.dumps(others | addition) if others or addition else ""
    return f"{others} {json.dumps(addition, separators=(',', ':'))}" if addition else others


def _split(extra: str) -> tuple[dict[str, Any] | str, object]:
    """Split ``extra`` into foreign content, an object or a text, and the content under predrain's key."""
    content = _object(extra or "{}")
    others: dict[str, Any] | str = extra if content is None else content
    record: object = None
    if content is not None:
        record = content.pop(KEY, None)
    elif (match := _IN_TEXT.search(extra)) is not None:  # appended to the text, possibly followed by more
        others, record = extra[: match.start()] + extra[match.end() :], _object(match["record"]) or {}
    if len(_AS_KEY.findall(extra)) != (record is not None):
        raise DamagedRecordError(f"extra contains {KEY!r} in an unexpected place or more than once")
    return others, record


def _object(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


MAX_REASON_LENGTH: Final = 240
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\"\\]+")


def reason_for(action: Action, until: datetime) -> str:
    """Return the Slurm reason of an action: tier, risk, expiry, and its first reason.

    The expiry is rounded up to whole seconds. Quotation marks are removed, because ``scontrol`` strips them from the
    ends of a reason.
    """
    until += timedelta(microseconds=-until.microsecond % 1_000_000)
    risk = "unknown" if action.risk is None else f"{action.risk:.4f}"
    text = f"{OWN_PREFIX} tier={action.tier} risk={risk} until={until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    message = " ".join(_UNSAFE.sub(" ", action.reasons[0]).split()) if action.reasons else ""
    return f"{text}; {message}"[:MAX_REASON_LENGTH].rstrip() if message else text


@dataclass(frozen=True, slots=True)
class SlurmMarks:
    """Predrain's markers on a node.

    ``record``: the record in ``extra``, if valid.
    ``damaged``: why the record is invalid or belongs to another installation; then predrain owns nothing on the node.
    ``lost_weight``: the soft marker is recorded, but Slurm has restored the configured weight, as after each
    reconfigure and restart. The marker counts as current, and will be restored.
    """

    marks: Marks
    foreign: str | None
    record: OwnershipRecord | None = None
    damaged: DamagedRecordError | None = None
    lost_weight: bool = False
    marker_removed: bool = False


def slurm_marks_on(node: SlurmNode, settings: SlurmSettings, now: datetime) -> SlurmMarks:
    """Return predrain's markers on a node; :mod:`scheduler.ports.ownership` decides who owns them."""
    record, damaged = None, None
    try:
        record = record_in(node.extra, node.name, settings.installation)
    except DamagedRecordError as error:
        damaged = error
    present = {} if node.reason is None else {REASON: node.reason}
    if record is not None and SET_AT in record.marks:  # not by whom: each host resolves user names itself, or cannot
        present[SET_AT] = str(node.reason_at)
    # Slurm keeps the reason when it drains a node itself, e.g. after an Epilog error: only FAIL shows the added DRAIN
    hard = len(node.out) == 1 and node.reason is not None and not foreign_marks(record, present)
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
    marker_removed = record.level >= Level.AVOID and marks.level < record.level and now < record.until
    return SlurmMarks(marks, foreign, record, damaged, lost, marker_removed)


def view_of(node: SlurmNode, jobs: Iterable[JobView], settings: SlurmSettings, now: datetime) -> NodeView:
    """Return the policy's view of a node.

    A foreign reason is an opt-out: predrain only removes its record and weight from the node. Slurm does not report the
    GPUs of a node, so its units come from the scores.
    """
    current = slurm_marks_on(node, settings, now)
    opt_out_name = _folded(settings.opt_out_feature)
    opt_out = next((f"feature {feature}" for feature in node.features if _folded(feature) == opt_out_name), None)
    opt_out = opt_out or current.foreign or (None if current.damaged is None else str(current.damaged))
    opt_out = opt_out or outside(node, settings)
    actor = None
    if node.out and not current.marks.tainted and node.relied_on is None:
        actor = f"{node.user or 'an unknown user'} ({'+'.join(sorted(node.out)).lower()}: {node.reason})"
    group = _named(node, settings.group_prefix) or (node.partitions[0] if node.partitions else "none")
    return NodeView(
        node.name, settings.cluster, group, _named(node, settings.rack_prefix), _named(node, settings.domain_prefix),
        (), tuple(jobs), current.marks, opt_out, node.relied_on, actor, node.down, node.readable,
        current.marker_removed, None if current.record is None else current.record.set_at,
        # a drained node that is powered down is out of service because of the drain
        resting=None if actor is not None and "MAINT" not in node.states else node.resting,
        unwritable=node.relied_on and f"{node.relied_on} is requested or in progress",
        notice=_notice(node, current), maintenance="a maintenance reservation" if "MAINT" in node.states else None,
    )  # fmt: skip


def outside(node: SlurmNode, settings: SlurmSettings) -> str | None:
    """Return why a node is not part of the fleet (its markers are removed), or None."""
    if node.gpus <= 0 or "FUTURE" in node.states:
        return f"it has no {settings.gres}"
    chosen = not settings.partitions or bool({*settings.partitions} & {*node.partitions})
    return None if chosen else "none of its partitions is in slurm.partitions"


def _notice(node: SlurmNode, current: SlurmMarks) -> str | None:
    """Return a warning about an invalid record, a weight reset by others, or a foreign reason like predrain's."""
    if current.damaged is not None:
        note = (
            f"; nothing is removed from the node until {KEY!r} is removed from extra" if current.damaged.advice else ""
        )
        return f"{current.damaged}{note}"
    if current.record is not None and current.record.refused >= MAX_TRIES and not current.marks.soft:
        return f"another client resets its weight: restored {MAX_TRIES} times, not set again in this episode"
    looks_like_ours = node.reason is not None and OWN_PREFIX in node.reason.casefold()
    if current.foreign is None or not looks_like_ours or not node.out:
        return None
    reason = "the node has no predrain record"
    if current.record is not None:
        reason = "it was edited or set by another user"
    return f"{current.foreign} looks like predrain's, but {reason}: the drain stays until an operator resumes the node"


def _folded(feature: str) -> str:
    return re.sub(r"[-_.]", "", feature).casefold()


def _named(node: SlurmNode, prefix: str | None) -> str | None:
    if prefix is None:
        return None
    names = (feature.removeprefix(prefix) for feature in node.features if feature.startswith(prefix))
    return next(filter(None, names), None)


def change_for(action: Action, node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return the change of an action; empty if nothing changes or the node must not be written to."""
    current = slurm_marks_on(node, settings, now)
    if not node.readable or node.relied_on or current.damaged is not None:
        return NodeChange()
    if action.verb == "release":
        return _release(action, node, current, settings)
    if current.foreign is not None:
        return NodeChange()
    end, old, marks = action.expires_at or now, current.record, current.marks
    new = old or OwnershipRecord(action.tier, action.risk, end, Level.PUBLISH)
    intact = new.matches(WEIGHT, str(node.weight))
    new = replace(new, tier=action.tier, risk=action.risk, until=end, refused=0 if intact else new.refused)
    change = NodeChange()
    if marks.tainted and (reason := reason_for(action, end)) != node.reason:
        change, new = NodeChange(reason=reason), new.with_mark(REASON, reason).without(SET_AT)
    published = new, change
    if action.verb == "avoid" and not marks.soft:
        weight = min(node.weight + settings.soft_weight, HIGHEST_WEIGHT)
        new = replace(new, weight=node.weight, soft=weight).with_mark(WEIGHT, str(weight))
        change = replace(change, weight=weight)
    if action.verb in ("swap", "drain") and not marks.tainted:
        change = NodeChange("FAIL" if settings.hard_state == "fail" else "DRAIN", reason_for(action, end))
        new = replace(new, since=now, drain_at=None).with_mark(REASON, change.reason or "").without(SET_AT)
    if action.verb == "drain" and not marks.drained:
        new = replace(new, drain_at=now)
    if (new, change) != published:
        level = max(marks.level, action.to)
        new = replace(new, level=level, set_at=now if level > marks.level else new.set_at)
    return _with_extra(node, new, change, settings)


def weight_again(node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return the change that restores a soft marker lost in a reconfigure; empty if none was lost."""
    current = slurm_marks_on(node, settings, now)
    record = current.record
    if record is None or not current.lost_weight or current.foreign is not None:
        return NodeChange()
    if not node.readable or node.relied_on or now >= record.until or record.soft is None:
        return NodeChange()
    return _with_extra(node, replace(record, refused=record.refused + 1), NodeChange(weight=record.soft), settings)


def dated(node: SlurmNode, settings: SlurmSettings, now: datetime) -> NodeChange:
    """Return the change that records when predrain's reason was set, as reported by Slurm; empty if recorded."""
    current = slurm_marks_on(node, settings, now)
    if current.record is None or not current.marks.tainted or SET_AT in current.record.marks:
        return NodeChange()
    return _with_extra(node, current.record.with_mark(SET_AT, str(node.reason_at)), NodeChange(), settings)


def _release(action: Action, node: SlurmNode, current: SlurmMarks, settings: SlurmSettings) -> NodeChange:
    marks, old = current.marks, current.record
    if old is None or (marks.level <= action.to and old.level <= action.to):
        return NodeChange()
    change, new = NodeChange(), old
    if action.to < Level.SWAP:
        change = NodeChange("UNDRAIN") if marks.tainted else change
        new = replace(new, since=None).without(REASON, SET_AT)
    if action.to < Level.DRAIN:
        new = replace(new, drain_at=None)
    if action.to < Level.AVOID:
        if old.matches(WEIGHT, str(node.weight)):
            change = replace(change, weight=old.weight)
        new = replace(new, weight=None, soft=None).without(WEIGHT)
    remaining = Marks(
        marks.published, marks.soft and action.to >= Level.AVOID, marks.tainted and action.to >= Level.SWAP
    )
    new = replace(new, level=remaining.level)
    return _with_extra(node, None if action.to < Level.PUBLISH else new, change, settings)


def _with_extra(
    node: SlurmNode, record: OwnershipRecord | None, change: NodeChange, settings: SlurmSettings
) -> NodeChange:
    extra = with_record(node.extra, record, node.name, settings.installation)
    return change if extra == node.extra else replace(change, extra=extra)


def after(node: SlurmNode, change: NodeChange) -> SlurmNode:
    """Return a node after a change."""
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
    """Return a change as writes, in a fixed order."""
    reason = change.reason is not None or change.state == "UNDRAIN"
    fields = (
        ("State", change.state is not None, "+".join(sorted(node.out)) or None, change.state),
        ("Reason", reason, node.reason, change.reason),
        ("Weight", change.weight is not None, str(node.weight), str(change.weight)),
        ("Extra", change.extra is not None, node.extra or None, change.extra or None),
    )
    return tuple(Write(f"node {node.name}", name, old, new) for name, changed, old, new in fields if changed)
