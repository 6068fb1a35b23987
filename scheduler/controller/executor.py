"""Carries out the actions of one decision: re-read, re-validate, record the call, make it, record the result."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from policy.fleet import Level, NodeView, UnitView
from policy.plan import Action, Plan
from scheduler.controller.settings import ControllerSettings
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.errors import described
from scheduler.ports.protocols import LeaseLostError, SchedulerAdapter
from scheduler.ports.readings import FleetReading, NodeReading, Precondition, Switches, Write, WriteResult, has_marks
from scheduler.ports.records import Intent, Settled, key_of
from scheduler.ports.report import Step


@dataclass(slots=True)
class Executor:
    """Executes the actions of one decision.

    ``expected``: the state that was decided on, by node; updated after each action.
    ``evidence``: returns a node's units with the newest scores and facts.
    ``blocked``: nodes to leave unchanged, including releases.
    ``expired_before``: without the lease, only markers that expired before this time are released; None: it is held.
    """

    scheduler: SchedulerAdapter
    log: RoundLog
    settings: ControllerSettings
    expected: "dict[str, Expected]"
    evidence: Callable[[NodeView], tuple[UnitView, ...]]
    blocked: frozenset[str] = frozenset()
    expired_before: datetime | None = None
    done: list[Action] = field(default_factory=list)
    _stuck: set[str] = field(default_factory=set)
    _new: int = 0

    def carry_out(self, plan: Plan) -> None:
        """Carry out the allowed actions of a plan.

        Raises ``LeaseLostError`` if the lease is lost; actions completed by then are in ``done``.
        """
        started = self.log.clock.now()
        for action in plan.actions:
            # Releases are skipped too, but they come first in a plan, and those of expired markers get a second pass.
            if self.log.clock.now() - started > self.settings.max_round_duration:
                reason: str | None = "controller.max_round_duration exceeded: postponed to the next round"
            else:
                reason = self._held_back(action)
            try:
                if reason is not None:
                    self._skip(action, reason)
                else:
                    self._carry_out_one(action)
            except LeaseLostError:
                raise
            except Exception as error:  # one faulty node must not block the release of others
                self._stuck.add(action.node)
                self._note(action, "failed", described(error))

    def _held_back(self, action: Action) -> str | None:
        if action.node in self.blocked:
            return "its evidence cannot be read, and its markers have not expired"
        if action.verb == "release":
            return None
        if not self.log.forward:
            return "no new actions in this round"
        if action.verb == "publish":  # no new marker, and possibly the only write this process is allowed
            return None
        if action.node in self._stuck:
            return "an earlier step on the node was not confirmed"
        if self._new >= self.settings.max_new_per_round:
            limit = self.settings.max_new_per_round
            return f"limit of {limit} new markers reached (max_new_per_round): postponed to the next round"
        return None

    def _carry_out_one(self, action: Action) -> None:
        for _ in range(self.settings.retries + 1):
            until = self._until()
            ready = self._ready(action)
            if ready is None:
                return
            reading, writes = ready
            if until is not None and self.log.clock.now() >= until:
                raise LeaseLostError("the lease expired before the write")
            intent = self._intend(action, reading, writes)
            # A release needs no record: a broken ledger must not keep healthy nodes out of service.
            if intent is None and action.verb != "release":
                self._skip(action, "not executed: it cannot be recorded in the ledger")
                return
            if action.verb == "release":  # the ledger may have taken longer than the lease
                until = self._until()
            precondition = Precondition(reading.version, reading.boot_id, self.log.lease.holder, until)
            answer = self.scheduler.apply(action, precondition)
            if self._answered(action, intent, answer):
                return
        self._stuck.add(action.node)
        self._note(action, "failed", f"gave up after repeated update conflicts, {self.settings.retries + 1} times")

    def _until(self) -> datetime | None:
        return self.log.lease.hold() if self.expired_before is None else None

    def _ready(self, action: Action) -> tuple[NodeReading, tuple[Write, ...]] | None:
        """Re-read the node and return it with the writes; None if there is nothing to write, or the action is skipped.

        Either outcome is recorded.
        """
        reading = self.scheduler.as_known(action.node) or self.scheduler.revalidate(action.node)
        reason = "the node was removed" if reading is None else self._why_not(action, reading)
        if reading is None or reason is not None:
            self._skip(action, reason or "")
            return None
        writes = self.scheduler.preview((action,), reading)[0]
        if writes:
            return reading, writes
        self._confirmed(action, WriteResult("already", "already in the desired state"))
        return None

    def _why_not(self, action: Action, reading: NodeReading) -> str | None:
        """Return why an action is no longer allowed; None if it is.

        A release only needs a readable node: it removes nothing but predrain's markers, so it is always correct.
        """
        view, expected = reading.view, self.expected[action.node]
        if not view.readable:
            return "its state cannot be read now"
        if action.verb == "release":
            is_due = self.expired_before is None or has_expired(view, self.expired_before)
            return None if is_due else "its markers were renewed"
        if not reading.jobs_known:
            return "its workloads cannot be read"
        return (
            _forbidden(action, view, self.scheduler.read_switches())
            or _other_node(expected, reading)
            or _other_marks(action, expected, view)
            or _other_evidence(action, expected.view, view, self.evidence(view), self.log.clock.now())
        )

    def _intend(self, action: Action, reading: NodeReading, writes: tuple[Write, ...]) -> int | None:
        """Record a call; None if it could not be recorded."""
        decision = self.log.report.number
        if decision is None:
            return None
        now, key = self.log.clock.now(), key_of(decision, action)
        return self.log.intend(Intent(decision, now, action.node, action.verb, action.to, key, action, reading, writes))

    def _answered(self, action: Action, intent: int | None, answer: WriteResult) -> bool:
        """Record the result of a call; False to retry."""
        # The call may have arrived: a repetition could undo what an operator did since, so the node is read instead.
        if answer.kind == "timeout":
            self._unanswered(action, intent, answer)
            return True
        self.log.settle(
            intent, Settled(self.log.clock.now(), answer.kind, answer.confirmed, answer.message, answer.writes)
        )
        if answer.confirmed:
            self._confirmed(action, answer)
        elif answer.kind == "conflict":
            return False
        else:
            self._stuck.add(action.node)
            self._note(action, "failed", f"{answer.kind}: {answer.message}")
        return True

    def _unanswered(self, action: Action, intent: int | None, answer: WriteResult) -> None:
        try:
            reading = self.scheduler.revalidate(action.node)
        except Exception as error:
            self._stuck.add(action.node)
            self._note(action, "unknown", f"no response, and the node cannot be read again: {described(error)}")
            return  # the call stays unsettled: the next round or process settles it
        settled = settled_by_reading(action, reading, self.log.clock.now(), answer.message)
        self.log.settle(intent, settled)
        if settled.confirmed:
            self._confirmed(action, WriteResult("done", settled.message))
        else:
            self._stuck.add(action.node)
            self._note(action, "failed", settled.message)

    def _confirmed(self, action: Action, answer: WriteResult) -> None:
        self.done.append(action)
        expected = self.expected[action.node]
        self.expected[action.node] = replace(expected, level=level_after(action, expected.level))
        self._new += action.verb not in ("release", "publish") and answer.kind == "done"
        self.log.report.steps.append(Step(action, answer.kind, answer.message, answer.writes))

    def _skip(self, action: Action, reason: str) -> None:
        self._stuck.add(action.node)
        self._note(action, "skipped", reason)
        if self.log.report.number is not None:
            with self.log.recording():
                self.log.ledger.skip(self.log.report.number, self.log.clock.now(), action, reason)

    def _note(self, action: Action, outcome: str, message: str) -> None:
        self.log.report.steps.append(Step(action, outcome, message))


def settled_by_reading(action: Action, reading: NodeReading | None, now: datetime, message: str) -> Settled:
    """Return the outcome of a call without a response, according to the re-read node."""
    if reading is None:
        return Settled(now, "gone", False, "the node was removed")
    if not reading.view.readable:
        return Settled(now, "not_found", False, f"{message}; the node's state cannot be read")
    if has_marks(action, reading.view.marks):
        return Settled(now, "found", True, f"{message}; read again: in the desired state")
    return Settled(now, "not_found", False, f"{message}; read again: not in the desired state")


@dataclass(frozen=True, slots=True)
class Expected:
    """The state of a node that an action was decided on.

    ``level``: expected level of predrain's markers: the level at the decision, updated by completed actions.
    """

    view: NodeView
    boot_id: str | None
    level: Level


def expected_of(fleet: FleetReading, views: Iterable[NodeView]) -> dict[str, Expected]:
    """Return the state of each node as decided on."""
    boots = {reading.view.name: reading.boot_id for reading in fleet.nodes}
    return {view.name: Expected(view, boots[view.name], view.marks.level) for view in views}


def has_expired(view: NodeView, now: datetime) -> bool:
    """Whether the markers of a node have expired; those without a valid expiry count as expired."""
    published = view.marks.published
    return published is None or published.expires_at <= now


def level_after(action: Action, level: Level) -> Level:
    """Return a node's level after an action at ``level``."""
    return min(level, action.to) if action.verb == "release" else max(level, action.to)


def _forbidden(action: Action, view: NodeView, switches: Switches) -> str | None:
    if switches.kill:
        return "the kill switch was set"
    if switches.release_all:
        return "release-all is set"
    if view.opt_out is not None:
        return f"it opted out ({view.opt_out})"
    if action.verb == "publish":
        return None
    if view.foreign is not None:
        return view.foreign
    return "another client removed a predrain marker" if view.marker_removed else None


def _other_node(expected: Expected, reading: NodeReading) -> str | None:
    if reading.boot_id != expected.boot_id:
        return "it booted since the decision"
    now_in, then_in = ({unit.name for unit in view.units} for view in (reading.view, expected.view))
    # Empty: this scheduler lists no GPUs, and those expected are from the scores.
    if now_in and now_in != then_in:
        return f"its GPUs changed since the decision: {', '.join(sorted(now_in ^ then_in))}"
    return None


def _other_marks(action: Action, expected: Expected, view: NodeView) -> str | None:
    if view.marks.level != expected.level:
        return (
            f"another client changed its markers: they are those of {view.marks.level.name.lower()}, expected "
            f"{expected.level.name.lower()}"
        )
    # Without the taint, the scheduler would refill the node as fast as it is evacuated.
    if action.verb == "drain" and not view.marks.tainted:
        return "no marker keeps new work off the node"
    return None


def _other_evidence(
    action: Action, decided: NodeView, view: NodeView, units: tuple[UnitView, ...], now: datetime
) -> str | None:
    if action.expires_at is None or now >= action.expires_at:
        return "the prediction has expired"
    if {unit.name: unit for unit in units} != {unit.name: unit for unit in decided.units}:
        return "its scores or facts changed since the decision"
    if view.scopes != decided.scopes:
        return "its jobs or its location changed since the decision, and with them its disruption budgets"
    if view.down and not decided.down:
        return "it went down since the decision"
    return None
