"""What Slurm reports of its nodes, and what changed since: drains, failures, resumes, repairs, boots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from telemetry.collect.event import Event
from telemetry.collect.kernel_log.message import BOOT
from telemetry.collect.slurm.drain_reasons import ReasonRules
from telemetry.collect.slurm.slurm_json import SlurmFormatError, instant, load, text, words

SOURCE: Final = "slurm"
OWN_PREFIX: Final = "predrain:"
"""Reasons that begin so are our own controller's."""

OWN_SOURCE: Final = "predrain"
_OUT: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("down", frozenset({"DOWN", "ERROR"})),
    ("fail", frozenset({"FAIL", "FAILING", "FAILED"})),
    ("drain", frozenset({"DRAIN", "DRAINED", "DRAINING"})),
)
# Codes of drains, worst first. Power saving, maintenance reservations and reboots asked for say nothing of hardware.
# sinfo(1), NODE STATE CODES: not responding, powering, maintenance, rebooting, ...
_SAME_BOOT: Final = timedelta(seconds=120)
# slurmd works the boot time out from the uptime when it registers; it differs by a second or two each time.
_MOST_REASONS: Final = 20


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as Slurm sees it, and what we remember of its drain.

    ``out``: ``drain``, ``fail`` or ``down``; None: it takes jobs.
    """

    name: str
    out: str | None = None
    reason: str | None = None
    user: str | None = None
    reason_at: datetime | None = None
    booted_at: datetime | None = None
    reasons: tuple[str, ...] = ()


def read_nodes(report: str) -> dict[str, NodeView]:
    """Read ``scontrol --json show nodes``, or ``sinfo --json`` up to 22.05.

    Returns: a node that several partitions list stands there once. One whose state Slurm does not know yet, just after
    a start, is left out.
    Raises ``SlurmFormatError`` if it is neither.
    """
    _, rows = load(report, ("nodes",))
    if not rows:  # sinfo 22.05 writes so, and calls it a success, when the controller is down
        raise SlurmFormatError("Slurm lists no nodes: the controller does not answer")
    return {view.name: view for row in rows if (view := _of_node(row)) is not None}


def out_of_service(states: Iterable[str]) -> str | None:
    """Return ``down``, ``fail`` or ``drain`` for a node's states in upper case; None where it takes jobs."""
    held = set(states)
    return next((code for code, known in _OUT if held & known), None)


def _of_node(row: Mapping[str, Any]) -> NodeView | None:
    name = text(row.get("name"))
    states = [*words(row.get("state")), *words(row.get("state_flags"))]  # one text up to 22.05, later a list
    if name is None or _unknown(states):
        return None
    view = NodeView(name, booted_at=instant(row.get("boot_time")))
    reason_at = instant(row.get("reason_changed_at"))
    return _with_reason(view, states, row.get("reason"), row.get("reason_set_by_user"), reason_at)


def _with_reason(
    view: NodeView, states: list[str], reason: object, user: object, reason_at: datetime | None
) -> NodeView:
    out = out_of_service(states)
    if out is None:  # a reason that outlived its drain says nothing
        return view
    first = reason[0] if isinstance(reason, list) and reason else reason
    who = user[0] if isinstance(user, list) and user else user
    written = text(first)
    return replace(
        view,
        out=out,
        reason=written,
        user=text(who),
        reason_at=reason_at,
        reasons=() if written is None else (written,),
    )


def _unknown(states: list[str]) -> bool:
    return not states or set(states) <= {"UNKNOWN", "NOT_RESPONDING", "NO_RESPOND", "INVALID"}


def changes(
    old: NodeView | None, new: NodeView, rules: ReasonRules, *, now: datetime, last_look: datetime | None
) -> tuple[list[Event], NodeView]:
    """Return what happened to a node between two looks, and the view to remember.

    A drain that is on when a node is first seen is an event of the time when its reason was set.
    """
    events: list[Event] = []
    before = old or NodeView(new.name)
    booted = _booted(before, new, now)
    if booted is not None:
        events.append(booted)
    if new.booted_at is None or (booted is None and before.booted_at is not None):
        new = replace(new, booted_at=before.booted_at)
    if new.out is None:
        if before.out is not None:
            events += _resumed(before, rules, now)
        return events, new
    began = before.out is None
    if began or (new.out, new.reason, new.user) != (before.out, before.reason, before.user):
        # A reason older than the last look was set before this change of state, and does not date it.
        stamp = new.reason_at
        dated = stamp is not None and stamp <= now and (old is None or last_look is None or stamp >= _floor(last_look))
        events.append(_drain(new, stamp if dated and stamp is not None else now, now))
    if not began and before.reasons:
        added = tuple(reason for reason in new.reasons if reason != before.reasons[-1])
        new = replace(new, reasons=(before.reasons + added)[-_MOST_REASONS:])
    return events, new


def _floor(when: datetime) -> datetime:
    return when.replace(microsecond=0)  # Slurm has whole seconds


def _drain(view: NodeView, when: datetime, now: datetime) -> Event:
    own = view.reason is not None and view.reason.startswith(OWN_PREFIX)
    detail = view.reason if view.user is None else f"{view.reason or 'no reason'} [{view.user}]"
    return Event(when, view.name, "drain", OWN_SOURCE if own else SOURCE, now, view.out, detail)


def _resumed(before: NodeView, rules: ReasonRules, now: datetime) -> list[Event]:
    events = []
    done = rules.of([reason for reason in before.reasons if not reason.startswith(OWN_PREFIX)])
    if done is not None:
        rule, reason = done
        events.append(Event(now, before.name, rule.type, SOURCE, now, rule.code or rule.type, reason))
    events.append(Event(now, before.name, "drain", SOURCE, now, "resume", before.reason))
    return events


def _booted(before: NodeView, new: NodeView, now: datetime) -> Event | None:
    if before.booted_at is None or new.booted_at is None or new.booted_at > now:
        return None
    if new.booted_at - before.booted_at <= _SAME_BOOT:
        return None
    return Event(new.booted_at, new.name, "other", SOURCE, now, BOOT, "boot time that slurmd reports")
