"""Releases that depend on no decision: of expired markers, and of all markers under release-all.

They depend on the markers and the release-all switch alone, and some are made without the lease.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from policy.fleet import Level
from policy.plan import Action, Plan, PolicyState
from policy.tiers import UNKNOWN
from scheduler.controller.executor import Executor, expected_of, has_expired
from scheduler.controller.scores_reader import CLOCK_SKEW
from scheduler.controller.settings import ControllerSettings
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.protocols import SchedulerAdapter
from scheduler.ports.readings import FleetReading
from scheduler.ports.report import RoundReport

_OVERDUE: Final = timedelta(minutes=10)
# By then, the holder of the lease has released an expired marker.


def due_nodes(fleet: FleetReading, now: datetime, report: RoundReport) -> frozenset[str]:
    """Return the nodes whose markers must be released, and report those whose markers cannot be released."""
    due = set()
    for view in (reading.view for reading in fleet.nodes):
        if view.marks.level and (fleet.switches.release_all or has_expired(view, now)):
            reason = view.unwritable if view.readable else "the state of the node cannot be read"
            if reason is None:
                due.add(view.name)
            else:
                report.notes.append(f"{view.name}: expired markers stay, {reason}")
    return frozenset(due)


def release_plan(nodes: Iterable[str], now: datetime) -> Plan:
    """Return a plan that only releases these nodes."""
    reasons = ("its marker has expired or must be released, and this round has no decision about it",)
    actions = tuple(Action("release", node, UNKNOWN, Level.NONE, None, None, reasons) for node in sorted(nodes))
    return Plan(now, actions, {}, {}, (), {}, {}, (), reasons, PolicyState())


def release_due(due: frozenset[str], executor: Executor, code: str) -> None:
    """Release the nodes in ``due`` that the decision neither renewed nor released."""
    log = executor.log
    now, report = log.clock.now(), log.report
    renewed = {action.node for action in executor.done if action.expires_at is not None and action.expires_at > now}
    # Skipped releases, e.g. those past max_round_duration, are tried again here; failed ones in the next round.
    attempted = {
        step.action.node for step in report.steps
        if step.action.verb == "release" and step.action.to is Level.NONE and step.outcome != "skipped"
    }  # fmt: skip
    plan = release_plan(due - renewed - attempted, now)
    if not plan.actions:
        return
    if report.number is None:
        with log.recording():
            report.number = log.ledger.begin_releases(plan, log.lease.holder, code)
    executor.carry_out(plan)


def release_overdue(
    fleet: FleetReading, scheduler: SchedulerAdapter, log: RoundLog, settings: ControllerSettings, code: str
) -> None:
    """Release markers without the lease, whose state is unknown, e.g. because Slurm's shared folder hangs.

    A release is idempotent and removes only markers that predrain owns. It could at most undo a renewal, so only
    markers are released that no replica has renewed or released long after their expiry, by the clocks of this machine
    and of the scheduler.
    """
    server_time = None
    # The executor checks the expiry again; under release-all every marker is due.
    expired_before = datetime.max.replace(tzinfo=UTC)
    if not fleet.switches.release_all:
        with log.boundary("the time of the scheduler", blocks=False):
            server_time = scheduler.server_time()
        if server_time is None:
            log.report.notes.append("expired markers stay: neither the lease nor the scheduler's time is known")
            return
        now = log.clock.now()
        if abs(server_time - now) > CLOCK_SKEW:
            clocks = f"{now:%Y-%m-%d %H:%M} UTC here and {server_time:%Y-%m-%d %H:%M} UTC in the scheduler"
            log.report.notes.append(f"markers expire by the earlier of two clocks: {clocks}")
        expired_before = min(now, server_time) - _OVERDUE
    due = due_nodes(fleet, expired_before, log.report)
    expected = expected_of(fleet, (reading.view for reading in fleet.nodes))
    executor = Executor(scheduler, log, settings, expected, lambda view: view.units, expired_before=expired_before)
    release_due(due, executor, code)
