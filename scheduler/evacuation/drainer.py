"""Evacuates nodes: requests checkpoints, waits, and evicts a bounded number of workloads, never by force."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from scheduler.evacuation.case import OUTCOMES, DrainCase, Request, StopCheck
from scheduler.evacuation.progress import LeavingWorkload, RequestState, key_of
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.errors import described
from scheduler.ports.readings import WriteResult
from scheduler.ports.records import FindingKind, PendingCall
from scheduler.ports.workloads import (
    CheckpointAsk,
    CheckpointKind,
    CheckpointOffer,
    CheckpointState,
    Fence,
    Hook,
    HookKind,
    HookReply,
    Workload,
    Workloads,
)

MAX_CONCURRENT_HOOKS = 8
"""Number of concurrent hook calls."""

MAX_EVICTIONS = 2
"""Limit on evictions of work that returns, or of a workload that survives them; then it is reported and left alone."""

_TIME = "%Y-%m-%d %H:%M:%S"

NextStep = Literal["going", "ask", "await", "held", "left", "later", "evict"]
PlannedStep = tuple[DrainCase, Workload, LeavingWorkload, NextStep, str]


@dataclass(frozen=True, slots=True)
class Drainer:
    """Evacuates nodes.

    ``hooks``: hooks for checkpoint requests that do not go through the scheduler, by means.
    """

    workloads: Workloads
    settings: EvacuationSettings
    hooks: Mapping[str, Hook]
    stop_reason_of: StopCheck

    def _offer_of(self, workload: Workload) -> CheckpointOffer | None:
        """Return how to request a checkpoint; None if the workload names no means, or one that is not configured."""
        offer, default = workload.checkpoint, self.settings.checkpoint.default
        if offer is None and workload.job is not None and default != "none" and workload.state != "suspended":
            offer = CheckpointOffer(default)
        return None if offer is None or offer.means not in {"scheduler", *self.hooks} else offer

    def preview(self, workload: Workload) -> tuple[Literal["evict", "wait"], str]:
        """Return what a drain would do with a workload now, and how."""
        workload = self._with_configured_means(workload)
        if workload.immovable is not None:
            return "wait", f"it cannot be moved ({workload.immovable})"
        offer = self._offer_of(workload)
        return "evict", "without a checkpoint" if offer is None else f"after a checkpoint by {offer.means}"

    def read_workloads(self, case: DrainCase, log: RoundLog, now: datetime) -> None:
        """List the workloads that must leave a node; with none left, the node is empty."""
        try:
            listed = self.workloads.on_node(case.node)
        except Exception as error:  # one faulty node must not block the others
            case.unlisted = f"its workloads cannot be listed: {described(error)}"
            log.error(f"the workloads on {case.node} cannot be listed: {described(error)}")
            return
        case.departing = tuple(self._with_configured_means(workload) for workload in listed if case.concerns(workload))
        known = case.entry.leaving
        case.change(
            leaving={
                workload.uid: self._observed(workload, known[workload.uid], now)
                for workload in case.departing
                if workload.uid in known
            }
        )
        if case.entry.request is not None:
            return
        if not case.departing:
            case.change(phase="verifying", empty_at=now, message="")
            log.find(case.node, "empty", "no workloads left to evict")
            log.step(case.node, "empty", "done")

    def _observed(self, workload: Workload, leaving: LeavingWorkload, now: datetime) -> LeavingWorkload:
        """Set the time after which a terminating workload counts as hanging; its grace period counts up to a limit."""
        if leaving.gone_by is not None or not workload.ending:
            return leaving
        return replace(leaving, gone_by=self._gone_by(workload, now))

    def _gone_by(self, workload: Workload, now: datetime) -> datetime:
        grace = min(workload.grace or timedelta(0), self.settings.stuck_after)
        return now + grace + self.settings.retry_max_delay

    def _with_configured_means(self, workload: Workload) -> Workload:
        """Block the eviction of a workload whose checkpoint means is not configured: its work would be lost."""
        offer = workload.checkpoint
        if offer is None or workload.immovable is not None or self._offer_of(workload) is not None:
            return workload
        return replace(workload, loss=f"its checkpoint method {offer.means} is not configured")

    def plan(self, case: DrainCase, now: datetime, requests: dict[str, LeavingWorkload]) -> None:
        """Decide for each new workload how its checkpoint is requested, and the deadline of the acknowledgement."""
        if case.stop_reason is not None:
            # the deadline of a request that was never sent must not expire; the request keeps its key
            answered = {uid: known for uid, known in case.entry.leaving.items() if known.asked != "planned"}
            case.change(leaving=answered)
            return
        for workload in case.departing or ():
            if workload.uid in case.entry.leaving:
                continue
            origin = workload.origin or workload.name
            returned = case.entry.evicted.get(origin, 0)
            identity = self.recipient_of(workload)
            pending = requests.get(identity)
            # A job on several nodes is asked once, with the deadline of its first node.
            if pending is not None and pending.uid == workload.uid:
                leaving = replace(pending, returned=returned, again_at=None, tries=0, message="")
            # Another part of a gang that a hook has been asked for: the same key, so that a repeated call changes
            # nothing.
            elif pending is not None and pending.deadline is not None and now < pending.deadline:
                leaving = LeavingWorkload(
                    workload.name, workload.uid, pending.key, pending.asked, pending.deadline, origin, returned
                )
            else:
                asks = not workload.ending and returned < MAX_EVICTIONS
                offer = self._offer_of(workload) if asks else None
                key = key_of(case.node, case.entry.began_at, f"checkpoint {identity}")
                deadline = None if offer is None else now + self._wait_of(offer)
                request_state: Literal["none", "planned"] = "none" if offer is None else "planned"
                leaving = LeavingWorkload(workload.name, workload.uid, key, request_state, deadline, origin, returned)
            leaving = requests[identity] = self._observed(workload, leaving, now)
            case.change(leaving={**case.entry.leaving, workload.uid: leaving})

    def recipient_of(self, workload: Workload) -> str:
        """Return the recipient of a checkpoint request: the gang if it is asked by hook, else the workload's uid."""
        offer = self._offer_of(workload)
        by_hook = offer is not None and offer.means != "scheduler"
        return workload.gang if by_hook and workload.gang is not None else workload.uid

    def _wait_of(self, offer: CheckpointOffer) -> timedelta:
        settings = self.settings.checkpoint
        return min(max(offer.takes or settings.timeout, timedelta(0)), settings.max_timeout)

    def ask(self, cases: Iterable[DrainCase], log: RoundLog) -> None:
        """Request checkpoints and read acknowledgements; bounded in time, so that slow hooks do not delay evictions."""
        requests: dict[str, Request] = {}
        for case, workload, leaving, step, _ in self._steps(cases, log):
            offer = self._offer_of(workload)
            # even after the deadline while the workload exists: it may have acknowledged at the last moment
            read = step in ("ask", "await") or (leaving.asked == "asked" and step != "going")
            if read and offer is not None and leaving.deadline is not None:
                known, first = requests.get(leaving.key), step == "ask"
                if known is not None:
                    first = first or known.first
                    others = (*known.others, (case, workload.uid))
                    requests[leaving.key] = replace(known, first=first, others=others)
                else:
                    ask = CheckpointAsk(leaving.key, leaving.deadline, case.why)
                    requests[leaving.key] = Request(case, workload, offer, ask, first)
        # scheduler requests first, because hooks may be slow; then unsent requests, then by deadline
        todo = sorted(
            requests.values(),
            key=lambda request: (request.offer.means != "scheduler", not request.first, request.ask.deadline),
        )
        for i in range(0, len(todo), MAX_CONCURRENT_HOOKS):
            if log.over(reserve=self.settings.max_round_duration / 2):
                return
            self._ask_some(todo[i : i + MAX_CONCURRENT_HOOKS], log)

    def evict(self, cases: Iterable[DrainCase], log: RoundLog, under_way: set[str]) -> None:
        """Evict the workloads that are ready.

        ``under_way``: uids of workloads that are terminating, without hanging ones.
        """
        steps = list(self._steps(cases, log))
        gangs = self._gangs_that_wait(steps, log.clock.now())
        stopped: set[str] = set()  # jobs stopped in this round, on any of their nodes
        stopping = {workload.gang for _, workload, *_ in steps if workload.uid in under_way} - {None}
        for case, workload, leaving, planned, cause in steps:
            self._report_unanswered(case, workload, leaving, log)
            waits = planned == "evict" and workload.gang in gangs
            step: NextStep = "later" if waits else planned
            message = gangs[workload.gang] if waits else cause
            if step != "evict":
                self._report_wait(case, workload, leaving, step, message, log)
                continue
            # exempt from the limit: evicting a part of a stopping job later would stop the restarted job again
            is_exempt = leaving.gone_by is not None or workload.gang in stopping
            if workload.uid in stopped:
                self._record_eviction(case, workload, WriteResult("already"), log.clock.now())
                log.step(case.node, "wait", "waiting", workload.name, "it was stopped on another of its nodes")
            elif not is_exempt and len(under_way) >= self.settings.max_concurrent:
                full = f"{len(under_way)} workloads are already terminating"
                log.step(case.node, "wait", "waiting", workload.name, full)
            elif not log.over() and self._evict_one(case, workload, log):
                stopped.add(workload.uid)
                stopping |= {workload.gang} - {None}
                under_way.add(workload.uid)

    def _gangs_that_wait(self, steps: Iterable[PlannedStep], now: datetime) -> dict[str | None, str]:
        """Return the jobs whose parts must wait for each other, with the reason, so that each job stops only once.

        An immovable part holds back the others, because it would stop without them. The wait for checkpoints is bounded
        by ``max_timeout`` from the start of the job's first evacuation, even if more of its nodes are drained later.
        """
        waiting: dict[str | None, str] = {}
        waiting_since: dict[str, datetime] = {}
        parts = [step for step in steps if step[1].gang is not None]
        for case, workload, *_ in parts:
            assert workload.gang is not None
            waiting_since[workload.gang] = min(waiting_since.get(workload.gang, now), case.entry.began_at)
        for _, workload, leaving, step, message in parts:
            assert workload.gang is not None
            in_time = now < waiting_since[workload.gang] + self.settings.checkpoint.max_timeout
            if step in ("held", "left"):
                waiting[workload.gang] = f"{workload.name} of the same job stays: {message}"
            elif step in ("ask", "await") and in_time:
                until = "" if leaving.deadline is None else f" until {leaving.deadline:{_TIME}} UTC"
                waiting.setdefault(
                    workload.gang, f"the checkpoint of {workload.name}, of the same job, is pending{until}"
                )
        return waiting

    def _steps(self, cases: Iterable[DrainCase], log: RoundLog) -> Iterable[PlannedStep]:
        for case in cases:
            for workload in case.departing or ():
                leaving = case.entry.leaving.get(workload.uid)
                if case.stop_reason is not None or leaving is None:
                    continue
                step, message = _next_step(workload, leaving, log.clock.now())
                yield case, workload, leaving, step, message

    def _ask_some(self, requests: list[Request], log: RoundLog) -> None:
        fence = log.fence()
        ready: list[tuple[Request, int | None]] = []
        for request in requests:
            case, number = request.case, None
            if request.first:
                case.hold_reason = case.hold_reason or self.stop_reason_of(case)
                if case.hold_reason is not None:
                    continue
                means, key = request.offer.means, request.ask.key
                number = log.intend(
                    PendingCall(
                        log.clock.now(), case.node, "checkpoint", key, means, request.workload, case.why,
                        request=case.entry.request,
                    )
                )  # fmt: skip
                if number is None:
                    return
            ready.append((request, number))
        with ThreadPoolExecutor(MAX_CONCURRENT_HOOKS, thread_name_prefix="checkpoint") as pool:
            hooked = [request for request, _ in ready if request.offer.means != "scheduler"]
            replies = pool.map(self._call_hook, hooked)
        for request, number in ready:
            by_hook = request.offer.means != "scheduler"
            answer, state = next(replies) if by_hook else self._through_scheduler(request, fence)
            if number is not None:
                log.answered(number, answer)
            self._record_request(request, answer, state, log)

    def _call_hook(self, request: Request) -> tuple[WriteResult, CheckpointState]:
        try:
            reply = self.hooks[request.offer.means].tell(request.payload(), request.ask.key)
        except Exception as error:  # one failing hook must not block the others
            reply = HookReply("timeout", described(error))
        if reply.kind in ("refused", "timeout"):
            return WriteResult(reply.kind, reply.message), CheckpointState("unknown", reply.message)
        states: dict[HookKind, CheckpointKind] = {"done": "acknowledged", "waiting": "waiting", "failed": "failed"}
        return WriteResult("done", reply.message), CheckpointState(states[reply.kind], reply.message)

    def _through_scheduler(self, request: Request, fence: Fence) -> tuple[WriteResult, CheckpointState]:
        workload, answer = request.workload, WriteResult("already")
        if request.first:
            answer = _answer_of(lambda: self.workloads.ask_checkpoint(workload, request.ask, fence))
            if not answer.confirmed:
                return answer, CheckpointState("waiting", answer.message)
        try:
            return answer, self.workloads.checkpoint_state(workload, request.ask.key)
        except Exception as error:
            return answer, CheckpointState("unknown", described(error))

    def _record_request(self, request: Request, answer: WriteResult, state: CheckpointState, log: RoundLog) -> None:
        case, workload = request.case, request.workload
        if "gone" in (answer.kind, state.kind):
            return  # the next list shows what is left
        states: dict[CheckpointKind, RequestState] = {"acknowledged": "acknowledged", "failed": "failed"}
        now_asked = states.get(state.kind) or ("asked" if request.first and answer.confirmed else None)
        for part, uid in ((case, workload.uid), *request.others) if now_asked is not None else ():
            part.move(uid, asked=now_asked)
        details = {"workload": workload.name, "uid": workload.uid, "key": request.ask.key}
        if state.kind == "acknowledged":
            message = state.message or "the checkpoint is written"
            log.find(case.node, "acknowledged", message, details)
            log.step(case.node, "checkpoint", "done", workload.name, message)
        elif state.kind == "failed":
            message = f"it cannot write a checkpoint: {state.message}"
            log.find(case.node, "unanswered", message, details)
            log.step(case.node, "checkpoint", "inconclusive", workload.name, message)
        elif state.kind == "unknown" and (answer.confirmed or not request.first):
            message = f"whether the checkpoint is written cannot be read: {state.message}"
            log.step(case.node, "checkpoint", "unknown", workload.name, message)
        elif request.first:
            message = answer.message
            if not answer.confirmed:
                outcome = "moved without it" if case.entry.request is None else "left alone"
                until = f"requested again until {request.ask.deadline:{_TIME}} UTC, then {outcome}"
                message = f"{message}; {until}" if message else until
            result = "waiting" if answer.confirmed else OUTCOMES[answer.kind]
            log.step(case.node, "checkpoint", result, workload.name, message)

    def finish(self, case: DrainCase, log: RoundLog) -> None:
        """End a checkpoint request once its jobs have answered, are gone or have reached their deadline."""
        leaving = case.entry.leaving
        for workload in case.departing or ():
            if workload.uid in leaving:
                self._report_unanswered(case, workload, leaving[workload.uid], log)
        now = log.clock.now()
        waits = any(
            part.asked in ("planned", "asked") and part.deadline is not None and now < part.deadline
            for part in leaving.values()
        )
        if case.departing is not None and not waits:
            case.change(phase="done")

    def _report_unanswered(self, case: DrainCase, workload: Workload, leaving: LeavingWorkload, log: RoundLog) -> None:
        """Record once that a checkpoint was not acknowledged by its deadline."""
        now, key = log.clock.now(), f"no answer {workload.uid}"
        if workload.ending or leaving.asked not in ("planned", "asked"):
            return
        if leaving.deadline is None or now < leaving.deadline or not case.first_time(key):
            return
        details = {"workload": workload.name, "uid": workload.uid}
        offer = self._offer_of(workload)
        if leaving.asked == "asked" and offer is not None and offer.means == "scheduler":
            with contextlib.suppress(Exception):  # it may have answered since the last round
                if self.workloads.checkpoint_state(workload, leaving.key).kind == "acknowledged":
                    case.move(workload.uid, asked="acknowledged")
                    log.find(case.node, "acknowledged", "the checkpoint is written", {**details, "key": leaving.key})
                    return
        failure = "did not acknowledge" if leaving.asked == "asked" else "could not be asked for"
        message = f"{workload.name} {failure} a checkpoint by {leaving.deadline:{_TIME}} UTC"
        log.find(case.node, "unanswered", message, details)

    def _report_wait(
        self, case: DrainCase, workload: Workload, leaving: LeavingWorkload, step: NextStep, message: str, log: RoundLog
    ) -> None:
        """Report a wait: always in the round report, and once in the ledger if it needs attention."""
        if step == "ask":
            return
        details = {"workload": workload.name, "uid": workload.uid}
        hangs = step == "going" and leaving.gone_by is not None and log.clock.now() >= leaving.gone_by
        if hangs:
            keeping = f" (finalizers {', '.join(workload.finalizers)})" if workload.finalizers else ""
            message = (
                f"it has not terminated by {leaving.gone_by:{_TIME}} UTC{keeping} and no longer "
                "counts toward max_concurrent"
            )
        if hangs or step == "left":
            kind: FindingKind = "hanging" if hangs or leaving.accepted else "returned"
            case.notify(log, f"{kind} {leaving.origin}", kind, f"{workload.name}: {message}", details)
        elif step == "held" and case.first_time(f"held {workload.uid}"):
            log.find(case.node, "waiting", message, details)
        log.step(case.node, "wait", "waiting", workload.name, message)

    def _evict_one(self, case: DrainCase, workload: Workload, log: RoundLog) -> bool:
        fence = log.fence()
        case.hold_reason = self.stop_reason_of(case)
        if case.hold_reason is not None:
            return False
        key = key_of(case.node, case.entry.began_at, f"evict {workload.uid}")
        number = None
        with log.boundary(f"the eviction of {workload.name}", blocks=False):
            writes = self.workloads.preview(workload)
            number = log.intend(
                PendingCall(log.clock.now(), case.node, "evict", key, "scheduler", workload, case.why, writes)
            )
        if number is None:
            return False
        answer = _answer_of(lambda: self.workloads.evict(workload, fence))
        log.answered(number, answer)
        self._record_eviction(case, workload, answer, log.clock.now())
        log.step(case.node, "evict", OUTCOMES[answer.kind], workload.name, answer.message, answer.writes)
        return answer.kind in ("done", "already", "timeout")

    def _record_eviction(self, case: DrainCase, workload: Workload, answer: WriteResult, now: datetime) -> None:
        settings, leaving = self.settings, case.entry.leaving[workload.uid]
        if answer.kind in ("done", "already", "timeout"):
            # Not an increment: pods of one origin that are evicted together count once. A timeout counts, because it
            # may have arrived.
            count = max(case.entry.evicted.get(leaving.origin, 0), leaving.returned + 1)
            case.change(evicted={**case.entry.evicted, leaving.origin: count})
        if answer.kind in ("done", "already"):
            # evicted again only if it is neither gone nor terminating long after its grace period
            due = self._gone_by(workload, now)
            message = f"it was evicted at {now:{_TIME}} UTC and is still there"
            case.move(
                workload.uid, gone_by=leaving.gone_by or due, accepted=leaving.accepted + 1, again_at=due, tries=0,
                message=message,
            )  # fmt: skip
        elif answer.kind in ("blocked", "refused", "timeout"):
            # Beyond 2**20 the limit applies anyway, and timedelta would overflow.
            pause = now + min(settings.retry_max_delay, settings.retry_initial_delay * 2 ** min(leaving.tries, 20))
            retry_at = max(pause, min(answer.again_at, now + settings.retry_max_delay) if answer.again_at else pause)
            message = f"{answer.kind}: {answer.message}; retried from {retry_at:%H:%M:%S} UTC"
            case.move(workload.uid, tries=leaving.tries + 1, again_at=retry_at, message=message)


def _answer_of(call: Callable[[], WriteResult]) -> WriteResult:
    """Return the result of a call; the outcome of one that raises is unknown, and must not block the others."""
    try:
        return call()
    except Exception as error:
        return WriteResult("timeout", described(error))


def _next_step(workload: Workload, leaving: LeavingWorkload, now: datetime) -> tuple[NextStep, str]:
    """Return the next step for a workload that must leave, and why."""
    if workload.ending:
        return "going", "it is terminating"
    if leaving.deadline is not None and now < leaving.deadline and leaving.asked in ("planned", "asked"):
        until = f"waiting for its checkpoint until {leaving.deadline:{_TIME}} UTC"
        return ("ask", "") if leaving.asked == "planned" else ("await", until)
    if workload.immovable is not None:
        end = workload.ends_at
        at_most = "" if end is None else f", until {end:%Y-%m-%d %H:%M} UTC at the latest"
        return "held", f"it cannot be moved ({workload.immovable}): waiting for its end{at_most}"
    if leaving.again_at is not None and now < leaving.again_at:
        return "later", leaving.message
    if leaving.accepted >= MAX_EVICTIONS:
        return "left", f"it survived {leaving.accepted} accepted evictions: no further attempt"
    if leaving.returned >= MAX_EVICTIONS:
        return "left", f"work of {leaving.origin} returned after {leaving.returned} evictions: no further attempt"
    return "evict", ""


def why_there(workload: Workload, leaving: LeavingWorkload | None, now: datetime) -> str:
    """Return why a workload is still on its node, for reports."""
    _, message = ("", "") if leaving is None else _next_step(workload, leaving, now)
    return message or (leaving.message if leaving is not None else "") or "its eviction has not started"
