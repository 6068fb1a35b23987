"""Asks workloads for a checkpoint, each in its own way, and learns whether it was written."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from scheduler.evacuation.settings import CheckpointSettings
from scheduler.ports.codec import plain_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.workloads import (
    CheckpointAsk,
    CheckpointKind,
    CheckpointOffer,
    CheckpointState,
    Fence,
    Hook,
    HookKind,
    HookReply,
    WorkAnswer,
    Workload,
    Workloads,
)

AT_ONCE = 8
"""Hooks that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One request, first or again.

    ``first``: whether it is to be asked; else only whether it was written.
    """

    workload: Workload
    offer: CheckpointOffer
    ask: CheckpointAsk
    first: bool


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What a request outcome to: the answer to it, and where the checkpoint stands."""

    answer: WorkAnswer
    state: CheckpointState


class Checkpoints:
    """Asks for checkpoints.

    ``hooks``: by what a workload names; None: not set up.
    """

    def __init__(self, workloads: Workloads, settings: CheckpointSettings, hooks: Mapping[str, Hook | None]) -> None:
        self._workloads = workloads
        self._settings = settings
        self._hooks = {means: hook for means, hook in hooks.items() if hook is not None}

    def offer_of(self, workload: Workload) -> CheckpointOffer | None:
        """Give the way to ask a workload; None: it names none, or one that is not set up."""
        offer = workload.checkpoint
        if offer is None and workload.job is not None and self._settings.default != "none":
            offer = CheckpointOffer(self._settings.default)
        if offer is None or (offer.means != "scheduler" and offer.means not in self._hooks):
            return None
        return offer

    def wait_of(self, offer: CheckpointOffer) -> timedelta:
        """Give how long its acknowledgement is waited for."""
        return min(max(offer.takes or self._settings.timeout, timedelta(0)), self._settings.max_timeout)

    def ask(self, batch: list[PendingRequest], fence: Fence) -> list[RequestOutcome]:
        """Ask some of them; hooks at the same time, the scheduler one after another."""
        hooked = [each for each in batch if each.offer.means != "scheduler"]
        replies: dict[int, HookReply] = {}
        if hooked:
            with ThreadPoolExecutor(min(AT_ONCE, len(hooked)), thread_name_prefix="checkpoint") as pool:
                replies = dict(zip(map(id, hooked), pool.map(self._tell, hooked), strict=True))
        return [
            self._through_scheduler(each, fence) if id(each) not in replies else _came(replies[id(each)])
            for each in batch
        ]

    def _tell(self, pending: PendingRequest) -> HookReply:
        return self._hooks[pending.offer.means].tell(_payload(pending), pending.ask.key)

    def _through_scheduler(self, pending: PendingRequest, fence: Fence) -> RequestOutcome:
        answer = WorkAnswer("already")
        if pending.first:
            answer = self._workloads.ask_checkpoint(pending.workload, pending.ask, fence)
            if not answer.confirmed:
                return RequestOutcome(
                    answer, CheckpointState("gone" if answer.kind == "conflict" else "waiting", answer.words)
                )
        try:
            return RequestOutcome(answer, self._workloads.checkpoint_state(pending.workload, pending.ask.key))
        except SchedulerError as error:
            return RequestOutcome(answer, CheckpointState("waiting", f"whether it was written cannot be read: {error}"))


def _payload(pending: PendingRequest) -> dict[str, Any]:
    workload = pending.workload
    return {
        "kind": "checkpoint", "key": pending.ask.key, "node": workload.node, "reason": pending.ask.why,
        "deadline": plain_of(pending.ask.deadline),
        "workload": {
            "name": workload.name, "uid": workload.uid, "kind": workload.kind, "owner": workload.owner,
            "job": plain_of(workload.job),
        },
    }  # fmt: skip


def _came(reply: HookReply) -> RequestOutcome:
    if reply.kind in ("refused", "timeout"):
        return RequestOutcome(
            WorkAnswer(reply.kind, reply.words, reply.again_at), CheckpointState("waiting", reply.words)
        )
    states: dict[HookKind, CheckpointKind] = {"done": "acknowledged", "waiting": "waiting", "failed": "failed"}
    return RequestOutcome(WorkAnswer("done", reply.words), CheckpointState(states[reply.kind], reply.words))
