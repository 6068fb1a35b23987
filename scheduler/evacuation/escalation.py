"""Tells people what a program must not settle by itself: a stuck node, a failed or an inconclusive diagnostic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.evacuation.case import Case
from scheduler.evacuation.drainer import Turn
from scheduler.evacuation.progress import key_of
from scheduler.ports.records import Call, FindingKind
from scheduler.ports.workloads import Hook, HookKind, WorkAnswer, WorkKind

_TRIES = 5
# Then the ledger and the output are all that tells of it.

_ANSWERS: Mapping[HookKind, WorkKind] = {
    "done": "done", "waiting": "done", "failed": "refused", "refused": "refused", "timeout": "timeout",
}  # fmt: skip


class Escalation:
    """Tells the operator's hooks.

    ``hooks``: by ``webhook`` and ``command``; all are told.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def tell(
        self, case: Case, what: str, kind: FindingKind, words: str, content: Mapping[str, Any], turn: Turn
    ) -> None:
        """Tell something once: to the ledger and the report at once, and to each hook until it takes it."""
        audit = turn.audit
        if not case.told(what):
            audit.find(case.node, kind, words, content)
            case.tell(what)
        for name, hook in self._hooks.items():
            self._one(case, name, hook, what, {"words": words, **content}, turn)

    def _one(self, case: Case, name: str, hook: Hook, what: str, content: Mapping[str, Any], turn: Turn) -> None:
        audit, done, tried = turn.audit, f"{what} to {name}", f"{what} to {name}, tried"
        now = audit.clock.now()
        tries = case.entry.told.count(tried)
        if case.told(done) or tries >= _TRIES or turn.over(now):
            return
        turn.fence()
        key = key_of(case.node, case.entry.began_at, what)
        number = audit.intend(Call(now, case.node, "escalate", key, name, None, str(content["words"])))
        if number is None:
            return
        payload = {"kind": "escalation", "what": what.partition(" ")[0], "node": case.node, "key": key, **content}
        reply = hook.tell(payload, key)
        answer = WorkAnswer(_ANSWERS[reply.kind], reply.words)
        audit.settle(number, answer)
        case.tell(done if answer.confirmed else tried)
        came_to = "done" if answer.confirmed else "failed"
        audit.step(case.node, "tell", came_to, None, f"{name}: {reply.words}")


def stuck_words(case: Case, waiting: Sequence[str]) -> str:
    """Say that a node does not become empty, and why."""
    since = f"{case.entry.began_at:%Y-%m-%d %H:%M} UTC"
    return f"not empty since its drain began at {since}; it keeps its taint, nothing is forced: {'; '.join(waiting)}"
