"""What Slurm reports of its nodes, and what changed since: drains, failures, resumes, repairs, boots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from foundation.slurm import SlurmFormatError, instant, read_rows, states_of, text
from telemetry.collect.event import Event
from telemetry.collect.kernel_log.lines import BOOT
from telemetry.collect.slurm.drain_reasons import ReasonRules
from telemetry.dataset.schema import MAINTENANCE_BEGIN, MAINTENANCE_END

SOURCE: Final = "slurm"
OWN_PREFIX: Final = "predrain:"
"""Reasons of predrain's own controller begin so."""

OWN_SOURCE: Final = "predrain"
_OUT: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("down", frozenset({"DOWN", "ERROR"})),
    ("fail", frozenset({"FAIL", "FAILING", "FAILED"})),
    ("drain", frozenset({"DRAIN", "DRAINED", "DRAINING"})),
)
# Codes of drains, worst first. Power saving and reboots asked for say nothing of hardware.
# sinfo(1), NODE STATE CODES: not responding, powering, maintenance, rebooting, ...
_MAINTAINED: Final = frozenset({"MAINT", "MAINTENANCE"})
_UNKNOWN: Final = frozenset({"UNKNOWN", "NOT_RESPONDING", "NO_RESPOND", "INVALID"})
_SAME_BOOT: Final = timedelta(seconds=120)
# slurmd works the boot time out from the uptime when it registers; it differs by a second or two each time.
_MAX_REASONS: Final = 20


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as Slurm sees it, and what we remember of its drain.

    ``out``: ``drain``, ``fail`` or ``down``; None: it takes jobs.
    ``reasons``: all that the drain had so far.
    ``maintained``: in a reservation with the flag ``MAINT``.
    """

    name: str
    out: str | None = None
    reason: str | None = None
    user: str | None = None
    reason_at: datetime | None = None
    booted_at: datetime | None = None
    reasons: tuple[str, ...] = ()
    maintained: bool = False


def read_nodes(report: str) -> dict[str, NodeView]:
    """Read ``scontrol --json show nodes``, or ``sinfo --json`` up to 22.05; raises ``SlurmFormatError``.

    A node whose state Slurm does not know yet, just after a start, is left out.
    """
    rows = read_rows(report, "nodes")
    if not rows:  # sinfo 22.05 writes so, and calls it a success, when the controller is down
        raise SlurmFormatError("Slurm lists no nodes: the controller does not answer")
    return {view.name: view for row in rows if (view := _read_node(row)) is not None}


def out_of_service(states: Iterable[str]) -> str | None:
    """Return ``down``, ``fail`` or ``drain`` for a node's states in upper case; None where it takes jobs."""
    held = set(states)
    return next((code for code, known in _OUT if held & known), None)


def _read_node(row: Mapping[str, Any]) -> NodeView | None:
    name = text(row.get("name"))
    states = [*states_of(row.get("state")), *states_of(row.get("state_flags"))]  # one text up to 22.05, later a list
    if name is None or set(states) <= _UNKNOWN:
        return None
    out, booted_at = out_of_service(states), instant(row.get("boot_time"))
    maintained = bool(_MAINTAINED & set(states))
    if out is None:  # a reason that outlived its drain says nothing
        return NodeView(name, booted_at=booted_at, maintained=maintained)
    reason, user = (
        text(value[0] if isinstance(value, list) and value else value)
        for value in (row.get("reason"), row.get("reason_set_by_user"))
    )
    reasons = () if reason is None else (reason,)
    return NodeView(name, out, reason, user, instant(row.get("reason_changed_at")), booted_at, reasons, maintained)


def changes(
    old: NodeView | None, new: NodeView, rules: ReasonRules, *, now: datetime, last_look: datetime | None
) -> tuple[list[Event], NodeView]:
    """Return what happened to a node between two looks, and the view to remember.

    A drain that is on when a node is first seen is an event of the time when its reason was set.
    """
    events: list[Event] = []
    before = old or NodeView(new.name)
    booted = before.booted_at and new.booted_at and before.booted_at + _SAME_BOOT < new.booted_at <= now
    if booted:
        assert new.booted_at is not None
        events.append(Event(new.booted_at, new.name, "other", SOURCE, now, BOOT, "boot time that slurmd reports"))
    if new.maintained != before.maintained:
        code = MAINTENANCE_BEGIN if new.maintained else MAINTENANCE_END
        events.append(Event(now, new.name, "maintenance", SOURCE, now, code, "a reservation with the flag MAINT"))
    if not booted and before.booted_at is not None:
        new = replace(new, booted_at=before.booted_at)
    if new.out is None:
        if before.out is not None:
            events += _resumed(before, rules, now)
        return events, new
    if (new.out, new.reason, new.user) != (before.out, before.reason, before.user):
        # A reason older than the last look was set before this change of state, and does not date it.
        since = None if old is None or last_look is None else last_look.replace(microsecond=0)  # as Slurm has it
        when = new.reason_at
        dated = when is not None and when <= now and (since is None or when >= since)
        events.append(_drain(new, when if when is not None and dated else now, now))
    if before.out is not None and before.reasons:
        added = tuple(reason for reason in new.reasons if reason != before.reasons[-1])
        new = replace(new, reasons=(before.reasons + added)[-_MAX_REASONS:])
    return events, new


def _drain(view: NodeView, when: datetime, now: datetime) -> Event:
    own = view.reason is not None and view.reason.startswith(OWN_PREFIX)
    detail = view.reason if view.user is None else f"{view.reason or 'no reason'} [{view.user}]"
    return Event(when, view.name, "drain", OWN_SOURCE if own else SOURCE, now, view.out, detail)


def _resumed(before: NodeView, rules: ReasonRules, now: datetime) -> list[Event]:
    resume = Event(now, before.name, "drain", SOURCE, now, "resume", before.reason)
    match = rules.of([reason for reason in before.reasons if not reason.startswith(OWN_PREFIX)])
    if match is None:
        return [resume]
    rule, reason = match
    return [Event(now, before.name, rule.type, SOURCE, now, rule.code or rule.type, reason), resume]
