"""Empties nodes: asks for checkpoints, waits, and evicts, a bounded number at once; never by force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from scheduler.evacuation.case import OUTCOMES, Case, Still
from scheduler.evacuation.progress import Leaving, key_of
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.codec import plain_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Answer
from scheduler.ports.records import Call
from scheduler.ports.workloads import (
    CheckpointAsk,
    CheckpointKind,
    CheckpointOffer,
    CheckpointState,
    Fence,
    Hook,
    HookKind,
    Workload,
    Workloads,
)

AT_ONCE = 8
"""Hooks that are asked at the same time."""

_TIME = "%Y-%m-%d %H:%M:%S"

Next = Literal["going", "ask", "await", "held", "later", "evict"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a checkpoint.

    ``first``: whether it is to be asked; else only whether it was written.
    """

    case: Case
    workload: Workload
    offer: CheckpointOffer
    ask: CheckpointAsk
    first: bool

    def payload(self) -> dict[str, Any]:
        """Return what a hook is sent."""
        workload = self.workload
        return {
            "kind": "checkpoint", "key": self.ask.key, "node": workload.node, "reason": self.ask.why,
            "deadline": plain_of(self.ask.deadline),
            "workload": {
                "name": workload.name, "uid": workload.uid, "kind": workload.kind, "owner": workload.owner,
                "job": plain_of(workload.job),
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drainer:
    """Empties nodes.

    ``hooks``: how workloads are asked that are not asked through the scheduler, by what they name.
    """

    workloads: Workloads
    settings: EvacuationSettings
    hooks: Mapping[str, Hook]
    still: Still

    def _offer_of(self, workload: Workload) -> CheckpointOffer | None:
        """Return the way to ask a workload; None: it names none, or one that is not set up."""
        offer, default = workload.checkpoint, self.settings.checkpoint.default
        if offer is None and workload.job is not None and default != "none":
            offer = CheckpointOffer(default)
        return None if offer is None or offer.means not in {"scheduler", *self.hooks} else offer

    def foresee(self, workload: Workload) -> tuple[Literal["evict", "wait"], str]:
        """Return what would be done with a workload if its node were drained now, and how."""
        workload = self._understood(workload)
        if workload.held is not None:
            return "wait", f"it may not be moved ({workload.held})"
        offer = self._offer_of(workload)
        return "evict", "without a checkpoint" if offer is None else f"after a checkpoint by {offer.means}"

    def look(self, case: Case, log: RoundLog, now: datetime) -> None:
        """List what has to go from a node that is being emptied; with nothing left, it is empty."""
        try:
            listed = self.workloads.on_node(case.node)
        except SchedulerError as error:
            log.error(f"what runs on {case.node} cannot be listed: {error}")
            return
        case.going = tuple(self._understood(workload) for workload in listed if workload.stays is None)
        here = {workload.uid for workload in case.going}
        case.change(leaving={uid: leaving for uid, leaving in case.entry.leaving.items() if uid in here})
        if not case.going:
            case.change(phase="verifying", empty_at=now, words="")
            log.find(case.node, "empty", "nothing that has to go is left on it")
            log.step(case.node, "empty", "done")

    def _understood(self, workload: Workload) -> Workload:
        """Hold a workload that wants to be asked in a way that we cannot: to move it unasked would lose its work."""
        offer = workload.checkpoint
        if offer is None or workload.held is not None or self._offer_of(workload) is not None:
            return workload
        return replace(workload, held=f"it wants to be asked for a checkpoint by {offer.means}, which is not set up")

    def plan(self, case: Case, now: datetime) -> None:
        """Decide for each workload that is new here how it is asked, and until when its answer is waited for."""
        if case.stopped is not None:
            # a wait of which no workload was asked must not run out; the request keeps its key
            kept = {uid: known for uid, known in case.entry.leaving.items() if known.asked != "planned"}
            case.change(leaving=kept)
            return
        for workload in case.going or ():
            if workload.uid in case.entry.leaving:
                continue
            offer = None if workload.ending else self._offer_of(workload)
            key = key_of(case.node, case.entry.began_at, f"checkpoint {workload.uid}")
            deadline = None if offer is None else now + self._wait_of(offer)
            leaving = Leaving(workload.name, workload.uid, key, "none" if offer is None else "planned", deadline)
            case.change(leaving={**case.entry.leaving, workload.uid: leaving})
            case.wait_until(deadline)

    def _wait_of(self, offer: CheckpointOffer) -> timedelta:
        settings = self.settings.checkpoint
        return min(max(offer.takes or settings.timeout, timedelta(0)), settings.max_timeout)

    def ask(self, cases: Iterable[Case], log: RoundLog) -> None:
        """Ask for checkpoints and learn which were written; what is ready to go must not wait for slow hooks."""
        todo: list[Request] = []
        for case, workload, leaving, step, _ in self._steps(cases, log):
            offer = self._offer_of(workload)
            # also after the deadline, as long as it is there: the answer may have come in the last moment
            read = step in ("ask", "await") or (leaving.asked == "asked" and step != "going")
            if read and offer is not None and leaving.deadline is not None:
                ask = CheckpointAsk(leaving.key, leaving.deadline, case.why)
                todo.append(Request(case, workload, offer, ask, step == "ask"))
        # the scheduler answers at once, a hook may not: then who was not asked yet, then whose time is over first
        todo.sort(key=lambda request: (request.offer.means != "scheduler", not request.first, request.ask.deadline))
        for at in range(0, len(todo), AT_ONCE):
            if log.over(reserve=self.settings.max_round_duration / 2):
                return
            self._ask_some(todo[at : at + AT_ONCE], log)

    def evict(self, cases: Iterable[Case], log: RoundLog, flying: int) -> None:
        """Evict what is ready to go, in addition to what was evicted before and is still on its way."""
        for case, workload, leaving, step, message in self._steps(cases, log):
            self._silent(case, workload, leaving, log)
            if step != "evict":
                self._say_wait(case, workload, step, message, log)
                continue
            again = leaving.evicted_at is not None
            if not again and flying >= self.settings.max_concurrent:
                log.step(
                    case.node, "wait", "waiting", workload.name, f"{flying} workloads are on their way out already"
                )
                continue
            if case.stopped is not None or log.over():
                continue
            flying += self._evict_one(case, workload, log) and not again

    def _steps(self, cases: Iterable[Case], log: RoundLog) -> Iterable[tuple[Case, Workload, Leaving, Next, str]]:
        for case in cases:
            for workload in case.going or ():
                leaving = case.entry.leaving.get(workload.uid)
                if case.stopped is not None or leaving is None:
                    continue
                step, message = _next_step(workload, leaving, log.clock.now())
                yield case, workload, leaving, step, message

    def _ask_some(self, requests: list[Request], log: RoundLog) -> None:
        fence = log.fence()
        ready: list[tuple[Request, int | None]] = []
        for request in requests:
            case, number = request.case, None
            if request.first:
                case.held = case.held or self.still(case)
                if case.held is not None:
                    continue
                means, key = request.offer.means, request.ask.key
                number = log.intend(
                    Call(log.clock.now(), case.node, "checkpoint", key, means, request.workload, case.why)
                )
                if number is None:
                    return
            ready.append((request, number))
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="checkpoint") as pool:
            hooked = [request for request, _ in ready if request.offer.means != "scheduler"]
            replies = pool.map(self._tell, hooked)
        for request, number in ready:
            by_hook = request.offer.means != "scheduler"
            answer, state = next(replies) if by_hook else self._through_scheduler(request, fence)
            if number is not None:
                log.settle(number, answer)
            self._asked(request, answer, state, log)

    def _tell(self, request: Request) -> tuple[Answer, CheckpointState]:
        reply = self.hooks[request.offer.means].tell(request.payload(), request.ask.key)
        if reply.kind in ("refused", "timeout"):
            return Answer(reply.kind, reply.message), CheckpointState("waiting", reply.message)
        states: dict[HookKind, CheckpointKind] = {"done": "acknowledged", "waiting": "waiting", "failed": "failed"}
        return Answer("done", reply.message), CheckpointState(states[reply.kind], reply.message)

    def _through_scheduler(self, request: Request, fence: Fence) -> tuple[Answer, CheckpointState]:
        workload, answer = request.workload, Answer("already")
        if request.first:
            answer = self.workloads.ask_checkpoint(workload, request.ask, fence)
            if not answer.confirmed:
                return answer, CheckpointState("waiting", answer.message)
        try:
            return answer, self.workloads.checkpoint_state(workload, request.ask.key)
        except SchedulerError as error:
            return answer, CheckpointState("waiting", f"whether it was written cannot be read: {error}")

    def _asked(self, request: Request, answer: Answer, state: CheckpointState, log: RoundLog) -> None:
        case, workload = request.case, request.workload
        if "gone" in (answer.kind, state.kind) or answer.kind == "conflict":
            return  # the next listing says what is there
        if request.first and answer.confirmed:
            case.move(workload.uid, asked="asked")
        about = {"workload": workload.name, "uid": workload.uid, "key": request.ask.key}
        if state.kind == "acknowledged":
            case.move(workload.uid, asked="acknowledged")
            message = state.message or "the checkpoint is written"
            log.find(case.node, "acknowledged", message, about)
            log.step(case.node, "checkpoint", "done", workload.name, message)
        elif state.kind == "failed":
            case.move(workload.uid, asked="failed")
            message = f"it cannot write a checkpoint: {state.message}"
            log.find(case.node, "no_answer", message, about)
            log.step(case.node, "checkpoint", "inconclusive", workload.name, message)
        elif request.first:
            message = answer.message
            if not answer.confirmed:
                until = f"it is asked again until {request.ask.deadline:{_TIME}} UTC, then moved all the same"
                message = f"{message}; {until}" if message else until
            result = "waiting" if answer.confirmed else OUTCOMES[answer.kind]
            log.step(case.node, "checkpoint", result, workload.name, message)

    def _silent(self, case: Case, workload: Workload, leaving: Leaving, log: RoundLog) -> None:
        """Note once that a checkpoint was waited for in vain."""
        now, key = log.clock.now(), f"no answer {workload.uid}"
        if workload.ending or leaving.asked not in ("planned", "asked"):
            return
        if leaving.deadline is None or now < leaving.deadline or not case.first_time(key):
            return
        asked = "was asked and did not acknowledge" if leaving.asked == "asked" else "could not be asked"
        message = f"{workload.name} {asked} a checkpoint by {leaving.deadline:{_TIME}} UTC"
        log.find(case.node, "no_answer", message, {"workload": workload.name, "uid": workload.uid})

    def _say_wait(self, case: Case, workload: Workload, step: Next, message: str, log: RoundLog) -> None:
        """Report what is waited for: always in the report; the end of what may not be moved once in the ledger."""
        if step == "ask":
            return
        log.step(case.node, "wait", "waiting", workload.name, message)
        if step == "held":
            case.wait_until(workload.ends_at)
            if case.first_time(f"held {workload.uid}"):
                log.find(case.node, "waits", message, {"workload": workload.name, "uid": workload.uid})

    def _evict_one(self, case: Case, workload: Workload, log: RoundLog) -> bool:
        fence = log.fence()
        case.held = self.still(case)
        if case.held is not None:
            return False
        now = log.clock.now()
        if now >= fence.until:
            return False
        key = key_of(case.node, case.entry.began_at, f"evict {workload.uid}")
        writes = self.workloads.preview(workload)
        number = log.intend(Call(now, case.node, "evict", key, "scheduler", workload, case.why, writes))
        if number is None:
            return False
        answer = self.workloads.evict(workload, fence)
        log.settle(number, answer)
        self._evicted(case, workload, answer, log.clock.now())
        log.step(case.node, "evict", OUTCOMES[answer.kind], workload.name, answer.message, answer.writes)
        return answer.kind in ("done", "already", "timeout")

    def _evicted(self, case: Case, workload: Workload, answer: Answer, now: datetime) -> None:
        settings, leaving = self.settings, case.entry.leaving[workload.uid]
        if answer.kind in ("done", "already"):
            # it is asked again only where it neither went nor is on its way long after its own grace time
            again = now + (workload.grace or timedelta(0)) + settings.retry_max_delay
            message = f"it was asked to go at {now:{_TIME}} UTC and is still there"
            case.move(workload.uid, evicted_at=now, again_at=again, tries=0, words=message)
        elif answer.kind in ("blocked", "refused", "timeout"):
            pause = now + min(settings.retry_max_delay, settings.retry_initial_delay * 2 ** min(leaving.tries, 20))
            again = max(pause, min(answer.again_at, now + settings.retry_max_delay) if answer.again_at else pause)
            message = f"{answer.kind}: {answer.message}; tried again from {again:%H:%M:%S} UTC"
            case.move(workload.uid, tries=leaving.tries + 1, again_at=again, words=message)


def _next_step(workload: Workload, leaving: Leaving, now: datetime) -> tuple[Next, str]:
    """Return what is next for a workload that does not ``stay``, and why."""
    if workload.ending:
        return "going", "it is on its way out"
    if leaving.deadline is not None and now < leaving.deadline and leaving.asked in ("planned", "asked"):
        until = f"its checkpoint is waited for until {leaving.deadline:{_TIME}} UTC"
        return ("ask", "") if leaving.asked == "planned" else ("await", until)
    if workload.held is not None:
        end = workload.ends_at
        at_most = "" if end is None else f", until {end:%Y-%m-%d %H:%M} UTC at the latest"
        return "held", f"it may not be moved ({workload.held}): its end is waited for{at_most}"
    if leaving.again_at is not None and now < leaving.again_at:
        return "later", leaving.words
    return "evict", ""
