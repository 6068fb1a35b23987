"""Empties nodes: asks for checkpoints, waits, and evicts, a bounded number at once; never by force."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from scheduler.evacuation.case import OUTCOMES, Audit, Case, Turn
from scheduler.evacuation.checkpoint_requests import AT_ONCE, Checkpoints, PendingRequest, RequestOutcome
from scheduler.evacuation.progress import Leaving, key_of
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.ports.errors import SchedulerError
from scheduler.ports.records import Call
from scheduler.ports.workloads import CheckpointAsk, WorkAnswer, Workload, Workloads

Next = Literal["going", "ask", "await", "held", "later", "evict"]


class Drainer:
    """Empties nodes."""

    def __init__(self, workloads: Workloads, checkpoints: Checkpoints, settings: EvacuationSettings) -> None:
        self._workloads = workloads
        self._checkpoints = checkpoints
        self._settings = settings

    def foresee(self, workload: Workload) -> tuple[Literal["evict", "wait"], str]:
        """Say what would be done with a workload if its node were drained now, and how."""
        workload = self._understood(workload)
        if workload.held is not None:
            return "wait", f"it may not be moved ({workload.held})"
        offer = self._checkpoints.offer_of(workload)
        return "evict", "without a checkpoint" if offer is None else f"after a checkpoint by {offer.means}"

    def look(self, case: Case, audit: Audit, now: datetime) -> None:
        """List what has to go from a node that is being emptied; with nothing left, it is empty."""
        try:
            listed = self._workloads.on_node(case.node)
        except SchedulerError as error:
            audit.trouble(f"what runs on {case.node} cannot be listed: {error}")
            return
        case.going = tuple(self._understood(each) for each in listed if each.stays is None)
        here = {each.uid for each in case.going}
        case.change(leaving={uid: each for uid, each in case.entry.leaving.items() if uid in here})
        if not case.going:
            case.change(phase="verifying", empty_at=now, words="")
            audit.find(case.node, "empty", "nothing that has to go is left on it")
            audit.step(case.node, "empty", "done")

    def _understood(self, workload: Workload) -> Workload:
        """Hold a workload that wants to be asked in a way that we cannot: to move it unasked would lose its work."""
        offer = workload.checkpoint
        if offer is None or workload.held is not None or self._checkpoints.offer_of(workload) is not None:
            return workload
        return replace(workload, held=f"it wants to be asked for a checkpoint by {offer.means}, which is not set up")

    def plan(self, case: Case, now: datetime) -> None:
        """Decide for each workload that is new here how it is asked, and until when its answer is waited for."""
        if case.stopped is not None:
            # a wait that nobody was asked for must not run out; the request keeps its key
            kept = {uid: each for uid, each in case.entry.leaving.items() if each.asked != "planned"}
            case.change(leaving=kept)
            return
        for workload in case.going or ():
            if workload.uid in case.entry.leaving:
                continue
            offer = None if workload.ending else self._checkpoints.offer_of(workload)
            key = key_of(case.node, case.entry.began_at, f"checkpoint {workload.uid}")
            deadline = None if offer is None else now + self._checkpoints.wait_of(offer)
            leaving = Leaving(workload.name, workload.uid, key, "none" if offer is None else "planned", deadline)
            case.change(leaving={**case.entry.leaving, workload.uid: leaving})
            self._due(case, deadline)

    def ask(self, cases: Iterable[Case], turn: Turn) -> None:
        """Ask for checkpoints, and learn which were written."""
        todo: list[tuple[Case, PendingRequest]] = []
        for case, workload, leaving, step, _ in self._steps(cases, turn):
            offer = self._checkpoints.offer_of(workload)
            # also after the deadline, as long as it is there: the answer may have come in the last moment
            read = step in ("ask", "await") or (leaving.asked == "asked" and step != "going")
            if read and offer is not None and leaving.deadline is not None:
                request = CheckpointAsk(leaving.key, leaving.deadline, case.why)
                todo.append((case, PendingRequest(workload, offer, request, step == "ask")))
        # the scheduler answers at once, a hook may not: then who was not asked yet, then whose time is over first
        todo.sort(key=lambda each: (each[1].offer.means != "scheduler", not each[1].first, each[1].ask.deadline))
        for at in range(0, len(todo), AT_ONCE):
            chunk = todo[at : at + AT_ONCE]
            if turn.over():
                return
            self._ask_some(chunk, turn)

    def evict(self, cases: Iterable[Case], turn: Turn, unseen: int = 0) -> None:
        """Evict what is ready to go; ``unseen`` were evicted from nodes that could not be looked at in this round."""
        listed = list(cases)
        flying = unseen + sum(_flying(case) for case in listed)
        for case, workload, leaving, step, words in self._steps(listed, turn):
            self._silent(case, workload, leaving, turn)
            if step != "evict":
                self._say_wait(case, workload, step, words, turn.audit)
                continue
            again = leaving.evicted_at is not None
            if not again and flying >= self._settings.max_concurrent:
                turn.audit.step(
                    case.node, "wait", "waiting", workload.name, f"{flying} workloads are on their way out already"
                )
                continue
            if case.stopped is not None or turn.over():
                continue
            flying += self._evict_one(case, workload, turn) and not again

    def _steps(self, cases: Iterable[Case], turn: Turn) -> Iterable[tuple[Case, Workload, Leaving, Next, str]]:
        for case in cases:
            for workload in case.going or ():
                leaving = case.entry.leaving.get(workload.uid)
                if case.stopped is not None or leaving is None:
                    continue
                step, words = _next_step(workload, leaving, turn.audit.clock.now())
                yield case, workload, leaving, step, words

    def _ask_some(self, chunk: list[tuple[Case, PendingRequest]], turn: Turn) -> None:
        audit = turn.audit
        ready: list[tuple[Case, PendingRequest, int | None]] = []
        fence = turn.fence()
        for case, pending in chunk:
            number = None
            if pending.first:
                case.held = case.held or turn.still(case)
                if case.held is not None:
                    continue
                means = pending.offer.means
                call = Call(
                    audit.clock.now(), case.node, "checkpoint", pending.ask.key, means, pending.workload, case.why
                )
                number = audit.intend(call)
                if number is None:
                    return
            ready.append((case, pending, number))
        outcome = self._checkpoints.ask([pending for _, pending, _ in ready], fence)
        for (case, pending, number), each in zip(ready, outcome, strict=True):
            self._asked(case, pending, number, each, audit)

    def _asked(
        self, case: Case, pending: PendingRequest, number: int | None, outcome: RequestOutcome, audit: Audit
    ) -> None:
        workload, answer, state = pending.workload, outcome.answer, outcome.state
        if number is not None:
            audit.settle(number, answer)
        if "gone" in (answer.kind, state.kind) or answer.kind == "conflict":
            return  # the next listing says what is there
        if pending.first and answer.confirmed:
            case.move(workload.uid, asked="asked")
        about = {"workload": workload.name, "uid": workload.uid, "key": pending.ask.key}
        if state.kind == "acknowledged":
            case.move(workload.uid, asked="acknowledged")
            words = state.words or "the checkpoint is written"
            audit.find(case.node, "acknowledged", words, about)
            audit.step(case.node, "checkpoint", "done", workload.name, words)
        elif state.kind == "failed":
            case.move(workload.uid, asked="failed")
            words = f"it cannot write a checkpoint: {state.words}"
            audit.find(case.node, "no_answer", words, about)
            audit.step(case.node, "checkpoint", "inconclusive", workload.name, words)
        elif pending.first:
            result = "waiting" if answer.confirmed else OUTCOMES[answer.kind]
            words = answer.words if answer.confirmed else _unasked(pending, answer)
            audit.step(case.node, "checkpoint", result, workload.name, words)

    def _silent(self, case: Case, workload: Workload, leaving: Leaving, turn: Turn) -> None:
        """Note once that a checkpoint was waited for in vain."""
        now, key = turn.audit.clock.now(), f"no answer {workload.uid}"
        if workload.ending or leaving.asked not in ("planned", "asked"):
            return
        if leaving.deadline is None or now < leaving.deadline or not case.first_time(key):
            return
        asked = "was asked and did not acknowledge" if leaving.asked == "asked" else "could not be asked"
        words = f"{workload.name} {asked} a checkpoint by {leaving.deadline:%Y-%m-%d %H:%M:%S} UTC"
        turn.audit.find(case.node, "no_answer", words, {"workload": workload.name, "uid": workload.uid})

    def _say_wait(self, case: Case, workload: Workload, step: Next, words: str, audit: Audit) -> None:
        """Say what is waited for: always in the report; the end of what may not be moved once in the ledger."""
        if step == "ask":
            return
        audit.step(case.node, "wait", "waiting", workload.name, words)
        if step == "held":
            self._due(case, workload.ends_at)
            if case.first_time(f"held {workload.uid}"):
                audit.find(case.node, "waits", words, {"workload": workload.name, "uid": workload.uid})

    def _evict_one(self, case: Case, workload: Workload, turn: Turn) -> bool:
        audit = turn.audit
        fence = turn.fence()
        case.held = turn.still(case)
        if case.held is not None:
            return False
        now = audit.clock.now()
        if now >= fence.until:
            return False
        key = key_of(case.node, case.entry.began_at, f"evict {workload.uid}")
        writes = self._workloads.preview(workload)
        number = audit.intend(Call(now, case.node, "evict", key, "scheduler", workload, case.why, writes))
        if number is None:
            return False
        answer = self._workloads.evict(workload, fence)
        audit.settle(number, answer)
        self._evicted(case, workload, answer, audit.clock.now())
        audit.step(case.node, "evict", OUTCOMES[answer.kind], workload.name, answer.words, answer.writes)
        return answer.kind in ("done", "already")

    def _evicted(self, case: Case, workload: Workload, answer: WorkAnswer, now: datetime) -> None:
        settings, leaving = self._settings, case.entry.leaving[workload.uid]
        if answer.kind in ("done", "already"):
            # it is asked again only where it neither went nor is on its way long after its own grace time
            again = now + (workload.grace or timedelta(0)) + settings.retry_max_delay
            words = f"it was asked to go at {now:%Y-%m-%d %H:%M:%S} UTC and is still there"
            case.move(workload.uid, evicted_at=now, again_at=again, tries=0, words=words)
        elif answer.kind in ("blocked", "refused", "timeout"):
            pause = now + min(settings.retry_max_delay, settings.retry_initial_delay * 2 ** min(leaving.tries, 20))
            again = max(pause, min(answer.again_at, now + settings.retry_max_delay) if answer.again_at else pause)
            words = f"{answer.kind}: {answer.words}; tried again from {again:%H:%M:%S} UTC"
            case.move(workload.uid, tries=leaving.tries + 1, again_at=again, words=words)

    @staticmethod
    def _due(case: Case, at: datetime | None) -> None:
        if at is not None and (case.entry.due_at is None or at > case.entry.due_at):
            case.change(due_at=at)


def _unasked(pending: PendingRequest, answer: WorkAnswer) -> str:
    until = f"it is asked again until {pending.ask.deadline:%Y-%m-%d %H:%M:%S} UTC, then moved all the same"
    return f"{answer.words}; {until}" if answer.words else until


def _flying(case: Case) -> int:
    known = case.entry.leaving
    return sum(
        each.ending or (each.uid in known and known[each.uid].evicted_at is not None) for each in case.going or ()
    )


def _next_step(workload: Workload, leaving: Leaving, now: datetime) -> tuple[Next, str]:
    """Say what is next for a workload that does not ``stay``, and why."""
    if workload.ending:
        return "going", "it is on its way out"
    if leaving.deadline is not None and now < leaving.deadline and leaving.asked in ("planned", "asked"):
        until = f"its checkpoint is waited for until {leaving.deadline:%Y-%m-%d %H:%M:%S} UTC"
        return ("ask", "") if leaving.asked == "planned" else ("await", until)
    if workload.held is not None:
        end = workload.ends_at
        at_most = "" if end is None else f", until {end:%Y-%m-%d %H:%M} UTC at the latest"
        return "held", f"it may not be moved ({workload.held}): its end is waited for{at_most}"
    if leaving.again_at is not None and now < leaving.again_at:
        return "later", leaving.words
    return "evict", ""
