"""Remedy and diagnostic of an empty node, and handling of the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

from policy.ladder.remedies import INSTRUCTIONS, Remedy
from scheduler.evacuation.case import OUTCOMES, DrainCase, StopCheck
from scheduler.evacuation.progress import Evacuating, Result
from scheduler.evacuation.settings import VerificationSettings
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.codec import instant, plain_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import ResultKind, WriteResult
from scheduler.ports.records import CallKind, FindingKind, PendingCall
from scheduler.ports.workloads import DiagnosticKind, DiagnosticResult, Fence, Hook, HookKind, Verification, Workloads


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Runs diagnostics on empty nodes.

    ``verification``: runner for evacuated nodes; None: no diagnostic. ``prober``: runner for idle nodes.

    A passed diagnostic voids earlier scores of the node's GPUs, so that the controller releases the node by its own
    rules. A failed one is the fact ``diagnostic_failed``: its rule keeps the node out of service, and operators are
    notified. An inconclusive one is retried, then reported; it never releases a node. A probe runs once, on a node that
    stays in service; if it is preempted or times out, it is inconclusive.
    """

    workloads: Workloads
    verification: Verification | None
    prober: Verification | None
    settings: VerificationSettings
    stop_reason_of: StopCheck

    def _timeout(self, case: DrainCase) -> timedelta:
        return self.settings.timeout if case.entry.request is None else self.settings.probe_timeout

    def advance(self, case: DrainCase, log: RoundLog) -> Result | None:
        """Start the diagnostic or read its state; return its result once it has ended."""
        runner = self._runner(case.entry)
        if runner is None:
            case.change(phase="done", message="empty")
            return None
        return (self._start if case.entry.started_at is None else self._read)(runner, case, log)

    def _runner(self, entry: Evacuating) -> Verification | None:
        return self.verification if entry.request is None else self.prober

    @staticmethod
    def _by_hand(case: DrainCase, log: RoundLog) -> None:
        """Report the remedy that an operator has to carry out."""
        remedy = _remedy(case)
        if remedy is not None and case.entry.phase == "done":
            message = f"empty: {INSTRUCTIONS[remedy]} manually, because evacuation.verification.method is none"
            case.notify(log, "remedy", "escalated", message, {"remedy": remedy, "units": list(case.units)})

    def drop(self, node: str, entry: Evacuating) -> None:
        """Stop the diagnostic of a node that was released in the meantime."""
        runner = self._runner(entry)
        if runner is not None:
            runner.drop(node, entry.verify_key(node))

    def settled(self, case: DrainCase, log: RoundLog) -> None:
        """Notify operators of a failed or inconclusive diagnostic, and repeat it after ``retry_after``."""
        entry, now, remedy = case.entry, log.clock.now(), _remedy(case)
        if self.verification is None:
            self._by_hand(case, log)
            return
        if entry.phase not in ("failed", "inconclusive"):
            return
        message = f"the diagnostic {case.entry.phase}: {case.entry.message}"
        content = {"units": list(case.units), "result": case.entry.phase}
        case.notify(log, entry.phase, "escalated", message, content)
        since = entry.ended_at or entry.began_at
        boots = {case.reading.boot_id, entry.boot_id} - {None}  # an unknown boot id is not a reboot
        other = len(boots) > 1 or bool(case.units and entry.units and case.units != entry.units)
        needs_remedy = remedy not in (None, entry.remedy) and entry.phase == "inconclusive"
        if case.hold_reason is None and (other or needs_remedy or now - since >= self.settings.retry_after):
            attempt = entry.attempt + 1
            reported = tuple(topic for topic in entry.reported if topic != "stuck")
            case.change(
                phase="evacuating", attempt=attempt, first_attempt=attempt, started_at=None, empty_at=None,
                waiting_since=now, reported=reported,
            )  # fmt: skip

    def _start(self, verification: Verification, case: DrainCase, log: RoundLog) -> Result | None:
        now, entry = log.clock.now(), case.entry
        if case.hold_reason is not None and entry.request is not None:
            case.change(phase="done", message=f"not started: {case.hold_reason}")
            log.step(case.node, entry.rung, "held", None, case.hold_reason)
            return None
        if case.hold_reason is not None:
            case.change(empty_at=None)  # the start timeout runs only while a start is allowed
            return None
        if entry.empty_at is None:
            case.change(empty_at=now)
        elif now - entry.empty_at > self._timeout(case):
            return self._ended(case, DiagnosticResult("inconclusive", f"it could not be started: {entry.message}"), log)
        if not self._may_start(case, log):
            return None
        fence = log.fence()
        key = entry.verify_key(case.node)
        remedy = _remedy(case)
        reason = case.why if remedy is None else f"remedy: {remedy}; {case.why}"
        verb = _verb(entry)
        number = log.intend(
            PendingCall(now, case.node, verb, key, self.settings.method, None, reason, request=entry.request)
        )
        if number is None:
            return None
        answer = verification.start(case.node, case.units, key, fence, remedy, probe=entry.request is not None)
        log.answered(number, answer)
        started = answer.kind in ("done", "already")
        case.change(started_at=now if started else None, remedy=remedy, message=answer.message)
        outcome = "waiting" if answer.confirmed else OUTCOMES[answer.kind]
        log.step(case.node, verb, outcome, None, answer.message)
        return None

    def _may_start(self, case: DrainCase, log: RoundLog) -> bool:
        """Re-check right before the start: the marker is set, no operator intervened, and the node is still empty."""
        if case.hold_reason is not None or log.over():
            return False
        case.hold_reason = self.stop_reason_of(case)
        if case.hold_reason is not None:
            return False
        try:
            returned = [workload.name for workload in self.workloads.on_node(case.node) if workload.stays is None]
        except SchedulerError as error:
            log.error(f"the workloads on {case.node} cannot be listed: {error}")
            return False
        if returned:
            message = f"no longer empty: {', '.join(returned[:5])}"
            case.change(phase="evacuating" if case.entry.request is None else "done", empty_at=None, message=message)
            log.step(case.node, "hold", "held", None, message)
        return not returned

    def _read(self, verification: Verification, case: DrainCase, log: RoundLog) -> Result | None:
        now, entry = log.clock.now(), case.entry
        key = entry.verify_key(case.node)
        try:
            outcome = verification.result(case.node, key)
        except SchedulerError as error:
            log.error(str(error))
            # An unreadable result is no verdict; the timeout still applies.
            outcome = DiagnosticResult("running")
        if outcome.kind == "missing":
            outcome = DiagnosticResult("inconclusive", "it was started, but no longer exists")
        if outcome.kind == "running":
            if entry.started_at is None or now - entry.started_at <= self._timeout(case):
                log.step(case.node, _verb(entry), "waiting", None, outcome.message)
                return None
            verification.drop(case.node, key)
            outcome = DiagnosticResult("inconclusive", f"no result within {self._timeout(case)}")
        return self._ended(case, outcome, log)

    def _ended(self, case: DrainCase, outcome: DiagnosticResult, log: RoundLog) -> Result | None:
        entry = case.entry
        key = entry.verify_key(case.node)
        started_at = entry.started_at or entry.began_at
        now = log.clock.now()
        # Another machine's clock: a time ahead would void evidence that is yet to come.
        ended_at = min(max(outcome.at or now, started_at), now)
        remedy, rung = entry.remedy, entry.rung
        result = Result(
            case.node, key, case.units, outcome.kind, ended_at, outcome.failed_units, outcome.message, rung, remedy
        )
        content: dict[str, Any] = {
            "key": key, "result": outcome.kind, "units": list(case.units), "at": ended_at.isoformat(),
            "failed_units": list(outcome.failed_units), "rung": rung,
        }  # fmt: skip
        if entry.request is not None:
            idle_gpu_hours = len(case.units) * ((ended_at - started_at) / timedelta(hours=1))
            content |= {"idle_gpu_hours": round(idle_gpu_hours, 3), "expected": plain_of(entry.request)}
        finding: FindingKind = "verified" if entry.request is None else "probed"
        log.find(case.node, finding, f"{outcome.kind}: {outcome.message}".rstrip(": "), content)
        if not log.forward:
            return None  # the result must be recorded: read it again next round
        log.step(case.node, _verb(entry), outcome.kind, None, outcome.message)
        retried = entry.request is None and outcome.kind == "inconclusive"
        if retried and entry.attempt - entry.first_attempt + 1 < self.settings.attempts:
            # an attempt that was never started has its own timeout too
            case.change(attempt=entry.attempt + 1, started_at=None, empty_at=now, message=outcome.message)
        else:
            boot, units = case.reading.boot_id, case.units
            phase = outcome.kind if outcome.kind in ("passed", "failed") else "inconclusive"
            case.change(phase=phase, message=outcome.message, ended_at=now, boot_id=boot, units=units)
        return result


def _remedy(case: DrainCase) -> Remedy | None:
    return None if case.decision is None or case.entry.request is not None else case.decision.remedy


def _verb(entry: Evacuating) -> CallKind:
    return "verify" if entry.request is None else "probe"


_ANSWERS: Mapping[HookKind, ResultKind] = {
    "done": "done", "waiting": "done", "failed": "refused", "refused": "refused", "timeout": "timeout",
}  # fmt: skip

_KINDS: Mapping[str, DiagnosticKind] = {kind: kind for kind in get_args(DiagnosticKind)}


@dataclass(frozen=True, slots=True)
class HookVerification:
    """Runs diagnostics through a hook.

    The payload is ``{"kind": "verify", "step": "start" | "result" | "drop", "node": …, "key": …}``. ``start`` adds
    ``units``, ``remedy`` (:data:`policy.ladder.remedies.Remedy`; null: diagnose only) and ``probe`` (true: the node is
    idle and in service, and any job must be able to preempt it). The reply to ``result`` has ``state`` (``passed``,
    ``failed``, ``inconclusive``, ``running``, ``missing``), ``node`` and ``key`` as in the request, and optionally
    ``failed_units``, ``message`` and ``at``. A reply without a valid state, or a verdict for another node or request,
    is inconclusive: an aborted diagnostic, or one of another node, must not release this node.
    """

    hook: Hook

    def start(
        self, node: str, units: Sequence[str], key: str, fence: Fence, remedy: Remedy | None, *, probe: bool
    ) -> WriteResult:
        """Start the diagnostic."""
        reply = self.hook.tell({**_payload("start", node, key, units), "remedy": remedy, "probe": probe}, key)
        return WriteResult(_ANSWERS[reply.kind], reply.message)

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Read the state of the diagnostic."""
        reply = self.hook.tell(_payload("result", node, key), key)
        if reply.kind in ("timeout", "refused"):
            raise SchedulerError(f"cannot read the result of the diagnostic on {node}: {reply.message}")
        content, state = reply.content, _KINDS.get(str(reply.content.get("state")))
        if state is None:
            if reply.kind == "waiting":
                return DiagnosticResult("running", reply.message)
            return DiagnosticResult("inconclusive", f"it reports neither passed nor failed ({reply.message})")
        if reply.kind == "failed" and state != "failed":
            return DiagnosticResult("inconclusive", f"it reports {state}, but ended with an error ({reply.message})")
        reported_node = content.get("node")
        if state in ("passed", "failed") and (reported_node, content.get("key")) != (node, key):
            return DiagnosticResult("inconclusive", f"its result is for {reported_node!r}, not for this node and run")
        units = content.get("failed_units")
        named = tuple(str(unit) for unit in units) if isinstance(units, list) else ()
        message = content.get("message")
        text = message[:500] if isinstance(message, str) else ""
        return DiagnosticResult(state, text, named[:64], instant(content.get("at")))

    def drop(self, node: str, key: str) -> None:
        """Stop the diagnostic."""
        self.hook.tell(_payload("drop", node, key), key)


def _payload(step: str, node: str, key: str, units: Sequence[str] | None = None) -> dict[str, Any]:
    payload: dict[str, Any] = {"kind": "verify", "step": step, "node": node, "key": key}
    return payload if units is None else {**payload, "units": list(units)}
