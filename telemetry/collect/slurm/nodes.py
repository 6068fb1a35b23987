"""Slurm node states, and the events that their changes imply: drains, failures, resumes, repairs, boots."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from foundation.slurm import SlurmFormatError, check_row, instant, read_rows, states_of, text
from telemetry.accounting import Accounting
from telemetry.dataset.event import Event
from telemetry.dataset.schema import MAINTENANCE_BEGIN, MAINTENANCE_END
from telemetry.kernel_log.catalogue import BOOT
from telemetry.phrases import WORK, PhraseRules

SOURCE: Final = "slurm"
OWN_PREFIX: Final = "predrain:"
"""Prefix of the drain reasons that predrain's controller sets."""

OWN_SOURCE: Final = "predrain"
_OUT: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("down", frozenset({"DOWN", "ERROR"})),
    ("fail", frozenset({"FAIL", "FAILING", "FAILED"})),
    ("drain", frozenset({"DRAIN", "DRAINED", "DRAINING"})),
)
# Codes of drain events, worst first; see sinfo(1), NODE STATE CODES.
_PLANNED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP", "POWER_DRAIN", "FUTURE"),
        "power saving",
    ),
    **dict.fromkeys(("REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "REBOOT_CANCELED"), "reboot"),
    **dict.fromkeys(("MAINT", "MAINTENANCE"), "maintenance"),
}
# Under one of these states, DOWN and DRAIN are planned and no evidence of a hardware fault.
_PLANNED_REASON: Final = re.compile(
    r"\s*(?:\[?reboot (?:asap|requested|issued)|scontrol reboot|reboot by |power(?:ed|ing)?[ -]?(?:down|save|saving)"
    r"|suspend(?:ed|program)?\b|idle[ -]power|\(code:\w*(?:capacity|limit|unsupported|spot)\w*\))",
    re.IGNORECASE,
)
_SILENT: Final = "not responding"
_MAINTAINED: Final = frozenset({"MAINT", "MAINTENANCE"})
_UNKNOWN: Final = frozenset({"UNKNOWN", "NOT_RESPONDING", "NO_RESPOND", "INVALID"})
_SAME_BOOT: Final = timedelta(seconds=120)
# slurmd derives the boot time from the uptime at each registration; it varies by a second or two.
_MAX_REASONS: Final = 20


@dataclass(frozen=True, slots=True)
class ObservedSlurmNode:
    """A node's state in Slurm, and the history of its open drain.

    ``out``: ``drain``, ``fail`` or ``down``; None if it takes jobs.
    ``reasons``: reasons of the open drain, oldest first.
    ``maintained``: the node is in a reservation with the flag ``MAINT``.
    ``planned``: why a planned outage is under way (``power saving``, ``reboot`` …); it starts no drain.
    """

    name: str
    out: str | None = None
    reason: str | None = None
    user: str | None = None
    reason_at: datetime | None = None
    booted_at: datetime | None = None
    reasons: tuple[str, ...] = ()
    maintained: bool = False
    planned: str | None = None


def read_nodes(report: str, accounting: Accounting) -> dict[str, ObservedSlurmNode]:
    """Parse ``scontrol --json show nodes`` or ``sinfo --json``; raises ``SlurmFormatError``.

    Nodes of unknown state, as just after slurmctld starts, are skipped and counted in ``accounting``.
    """
    rows = read_rows(report, "nodes")
    if not rows:  # sinfo 22.05 prints an empty list and exits with 0 when slurmctld is down
        raise SlurmFormatError("Slurm lists no nodes: the controller does not respond")
    views: dict[str, ObservedSlurmNode] = {}
    for row in rows:
        accounting.read("nodes")
        try:
            view = _read_node(check_row(row, ("boot_time", "reason_changed_at")))
        except (ValueError, TypeError, OverflowError) as error:
            accounting.left_out("nodes", "unreadable", example=f"{error}: {row}")
        else:
            if isinstance(view, ObservedSlurmNode):
                accounting.used("nodes")
                views[view.name] = view
            else:
                accounting.left_out("nodes", view, example=row)
    return views


def out_of_service(states: Iterable[str]) -> str | None:
    """Return ``down``, ``fail`` or ``drain`` for a node's upper-case states; None if it takes jobs."""
    known_states = set(states)
    return next((code for code, known in _OUT if known_states & known), None)


def _read_node(row: Mapping[str, Any]) -> ObservedSlurmNode | str:
    name = text(row.get("name"))
    states = [*states_of(row.get("state")), *states_of(row.get("state_flags"))]  # a string up to 22.05, a list since
    if name is None:
        raise ValueError("a node without a name")
    if set(states) <= _UNKNOWN:
        return "state is not known yet"
    out, booted_at = out_of_service(states), instant(row.get("boot_time"))
    maintained = bool(_MAINTAINED & set(states))
    planned = next((_PLANNED[state] for state in states if state in _PLANNED), None)
    if out is None:  # the reason of a drain that has ended is stale
        return ObservedSlurmNode(name, booted_at=booted_at, maintained=maintained, planned=planned)
    reason, user = (
        text(value[0] if isinstance(value, list) and value else value)
        for value in (row.get("reason"), row.get("reason_set_by_user"))
    )
    if planned is None and reason is not None and _PLANNED_REASON.match(reason):
        planned = "reboot" if "boot" in reason.lower() else "power saving"
    reasons = () if reason is None else (reason,)
    since = instant(row.get("reason_changed_at"))
    return ObservedSlurmNode(name, out, reason, user, since, booted_at, reasons, maintained, planned)


def changes(
    old: ObservedSlurmNode | None,
    new: ObservedSlurmNode,
    rules: PhraseRules,
    *,
    now: datetime,
    last_poll: datetime | None,
) -> tuple[list[Event], ObservedSlurmNode]:
    """Return a node's events between two polls, and the state to keep for the next one.

    A drain that is already active when a node is first seen is dated by the time when its reason was set.
    """
    events: list[Event] = []
    previous = old or ObservedSlurmNode(new.name)
    booted = previous.booted_at and new.booted_at and previous.booted_at + _SAME_BOOT < new.booted_at <= now
    if booted:
        assert new.booted_at is not None
        events.append(Event(new.booted_at, new.name, "other", SOURCE, now, BOOT, "boot time that slurmd reports"))
    if new.maintained != previous.maintained:
        code = MAINTENANCE_BEGIN if new.maintained else MAINTENANCE_END
        events.append(Event(now, new.name, "maintenance", SOURCE, now, code, "a reservation with the flag MAINT"))
    if not booted and previous.booted_at is not None:
        new = replace(new, booted_at=previous.booted_at)
    silent = new.out == "down" and (new.reason or "").lower().startswith(_SILENT)
    if new.planned is None and silent and previous.planned == "power saving" and not booted:
        new = replace(new, planned=previous.planned)  # not up since the power-down
    if new.planned is not None and new.out is not None:
        # An open drain continues; a planned outage starts none.
        drain = {name: getattr(previous, name) for name in ("out", "reason", "user", "reason_at", "reasons")}
        return events, replace(new, **drain)
    if new.out is None:
        if previous.out is not None:
            events += _resumed(previous, rules, now)
        return events, new
    if (new.out, new.reason, new.user) != (previous.out, previous.reason, previous.user):
        # A reason set before the last poll predates this change of state and cannot date it.
        since = None if old is None or last_poll is None else last_poll.replace(microsecond=0)  # in Slurm's resolution
        reason_at = new.reason_at
        dated = reason_at is not None and reason_at <= now and (since is None or reason_at >= since)
        events.append(_drain(new, reason_at if reason_at is not None and dated else now, now))
    if previous.out is not None and previous.reasons:
        added = tuple(reason for reason in new.reasons if reason != previous.reasons[-1])
        new = replace(new, reasons=(previous.reasons + added)[-_MAX_REASONS:])
    return events, new


def _drain(view: ObservedSlurmNode, drained_at: datetime, now: datetime) -> Event:
    is_own = view.reason is not None and view.reason.startswith(OWN_PREFIX)
    detail = view.reason if view.user is None else f"{view.reason or 'no reason'} [{view.user}]"
    return Event(drained_at, view.name, "drain", OWN_SOURCE if is_own else SOURCE, now, view.out, detail)


def _resumed(previous: ObservedSlurmNode, rules: PhraseRules, now: datetime) -> list[Event]:
    """Return the resume, preceded by the repair or replacement that the latest such reason of the drain reports."""
    resume = Event(now, previous.name, "drain", SOURCE, now, "resume", previous.reason)
    for reason in reversed(previous.reasons):
        work = rules.classify(reason, "reason")
        if work.type in WORK and not reason.startswith(OWN_PREFIX):
            return [Event(now, previous.name, work.type, SOURCE, now, work.code, reason), resume]
    return [resume]
