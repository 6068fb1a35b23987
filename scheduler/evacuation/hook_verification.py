"""A diagnostic that the operator's own server or command runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

from scheduler.evacuation.hook import Hook, HookKind
from scheduler.evacuation.ports import DiagnosticKind, DiagnosticResult, Fence, WorkAnswer, WorkKind
from scheduler.failures import SchedulerError

_ANSWERS: Mapping[HookKind, WorkKind] = {
    "done": "done", "waiting": "done", "failed": "refused", "refused": "refused", "timeout": "timeout",
}  # fmt: skip

_KINDS: Mapping[str, DiagnosticKind] = {each: each for each in get_args(DiagnosticKind)}


class HookVerification:
    """Asks a hook to run diagnostics.

    It is told ``{"kind": "verify", "step": "start" | "result" | "drop", "node": …, "units": […], "key": …}``. To
    ``result`` it answers with ``state`` (``passed``, ``failed``, ``inconclusive``, ``running``, ``missing``), ``node``
    and ``key`` as it was asked, and may add ``failed_units``, ``words`` and ``at``. What does not say of which node and
    request it is, or says none of these, is inconclusive: a diagnostic that was aborted, and one of another node, must
    not free this one.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def start(self, node: str, units: Sequence[str], key: str, fence: Fence) -> WorkAnswer:  # noqa: ARG002 - the key
        """Start it."""
        reply = self._hook.tell(_payload("start", node, key, units), key)
        return WorkAnswer(_ANSWERS[reply.kind], reply.words, reply.again_at)

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Read where it stands."""
        reply = self._hook.tell(_payload("result", node, key), key)
        if reply.kind in ("timeout", "refused"):
            raise SchedulerError(f"the result of the diagnostic on {node} cannot be read: {reply.words}")
        content, state = reply.content, _KINDS.get(str(reply.content.get("state")))
        if state is None:
            if reply.kind == "waiting":
                return DiagnosticResult("running", reply.words)
            return DiagnosticResult("inconclusive", f"it says neither passed nor failed ({reply.words})")
        if reply.kind == "failed" and state != "failed":
            return DiagnosticResult("inconclusive", f"it says {state}, and failed itself ({reply.words})")
        of = content.get("node")
        if state in ("passed", "failed") and (of, content.get("key")) != (node, key):
            return DiagnosticResult("inconclusive", f"its result is of {of!r}, not of this node and run")
        units = content.get("failed_units")
        named = tuple(str(each) for each in units) if isinstance(units, list) else ()
        return DiagnosticResult(state, _text(content.get("words")), named[:64], _time(content.get("at")))

    def drop(self, node: str, key: str) -> None:
        """Stop it."""
        self._hook.tell(_payload("drop", node, key), key)


def _payload(step: str, node: str, key: str, units: Sequence[str] | None = None) -> dict[str, Any]:
    payload: dict[str, Any] = {"kind": "verify", "step": step, "node": node, "key": key}
    return payload if units is None else {**payload, "units": list(units)}


def _text(value: object) -> str:
    return value[:500] if isinstance(value, str) else ""


def _time(value: object) -> datetime | None:
    try:
        when = datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return when if when.tzinfo is not None else None
