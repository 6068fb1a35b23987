"""Failures on demand, and workloads and diagnostics in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from scheduler.file import MemoryScheduler
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Answer, StoredState, Write
from scheduler.ports.workloads import (
    CheckpointAsk,
    CheckpointState,
    DiagnosticResult,
    Fence,
    WorkAnswer,
    Workload,
)

_WORDS: dict[FaultKind, str] = {
    "conflict": "somebody wrote in between", "refused": "not allowed", "timeout_before": "no answer",
    "timeout_after": "no answer", "unreadable": "unreadable", "crash_before": "", "crash_after": "",
}  # fmt: skip


FaultKind = Literal[
    "conflict", "refused", "timeout_before", "timeout_after", "unreadable", "crash_before", "crash_after"
]  # fmt: skip


class Crash(BaseException):
    """The process dies here. No handler of ordinary errors may catch it."""


@dataclass(slots=True)
class _Planned:
    kind: FaultKind
    call: str | None
    skip: int


class Faults:
    """Failures that are planned for calls to come.

    ``before`` means that the call had no effect, ``after`` that it had all of it and nobody was told.
    """

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self.calls: list[str] = []

    def plan(self, kind: FaultKind, call: str | None = None, skip: int = 0) -> None:
        """Let a call fail: the next one, or after ``skip`` others; of one name only, where ``call`` is given."""
        self._planned.append(_Planned(kind, call, skip))

    def clear(self) -> None:
        """Let everything succeed again."""
        self._planned.clear()

    def meet(self, call: str) -> FaultKind | None:
        """Note a call; give how it is to fail."""
        self.calls.append(call)
        for each in self._planned:
            if each.call not in (None, call):
                continue
            if each.skip:
                each.skip -= 1
                continue
            self._planned.remove(each)
            return each.kind
        return None


class FaultyScheduler(MemoryScheduler):
    """A scheduler in memory whose calls fail on demand."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.faults = Faults()
        for name in ("read_fleet", "revalidate", "load_state", "read_switches", "hold_lease"):
            setattr(self, name, self._reads(name, getattr(self, name)))
        for name in ("apply", "save_state", "set_switches"):
            setattr(self, name, self._writes(name, getattr(self, name)))

    def _reads(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            fault = self.faults.meet(name)
            if fault in ("crash_before", "crash_after"):
                raise Crash(name)
            if fault is not None:
                raise SchedulerError(f"{name}: {_WORDS[fault]}")
            return call(*args)

        return read

    def _writes(self, name: str, call: Callable[..., Answer]) -> Callable[..., Answer]:
        def write(*args: Any) -> Answer:
            fault = self.faults.meet(name)
            if fault == "crash_before":
                raise Crash(name)
            if fault in ("timeout_before", "unreadable"):
                return Answer("timeout", _WORDS[fault])
            if fault in ("conflict", "refused"):
                return Answer(fault, _WORDS[fault])
            answer = call(*args)
            if fault == "crash_after":
                raise Crash(name)
            return Answer("timeout", _WORDS[fault]) if fault == "timeout_after" else answer

        return write


class MemoryWorkloads:
    """What runs on the nodes of a cluster in memory.

    ``running``: by uid; may be changed by hand, as owners and other tools do.
    ``asked``: the last request that each workload was shown, by uid.
    ``written``: keys of requests that were acknowledged.
    ``cannot``: uids of workloads that answer that they cannot write one.
    ``blocked``: uids that a disruption budget protects, with its name.
    ``evicted``: each accepted eviction: when, node, uid.
    """

    def __init__(self, workloads: Iterable[Workload], clock: Clock) -> None:
        self.running = {each.uid: each for each in workloads}
        self.asked: dict[str, CheckpointAsk] = {}
        self.written: set[str] = set()
        self.cannot: set[str] = set()
        self.blocked: dict[str, str] = {}
        self.evicted: list[tuple[datetime, str, str]] = []
        self.faults = Faults()
        self.text: str | None = None
        self.version = 0
        self._clock = clock

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List what runs on a node."""
        self._readable("on_node")
        return tuple(each for each in self.running.values() if each.node == node)

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WorkAnswer:
        """Show a workload a request."""

        def effect() -> WorkAnswer:
            if self._clock.now() >= fence.until:
                return WorkAnswer("refused", "the lease has ended")
            wrong = self._other(workload)
            if wrong is not None:
                return wrong
            before = self.asked.get(workload.uid)
            if before is not None and before.key == ask.key:
                return WorkAnswer("already")
            self.asked[workload.uid] = ask
            return WorkAnswer("done")

        return self._written("ask_checkpoint", effect)

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Say whether a request was acknowledged."""
        self._readable("checkpoint_state")
        if workload.uid not in self.running:
            return CheckpointState("gone")
        if workload.uid in self.cannot:
            return CheckpointState("failed", "it has none")
        return CheckpointState("acknowledged" if key in self.written else "waiting")

    def evict(self, workload: Workload, fence: Fence) -> WorkAnswer:
        """Let one go."""

        def effect() -> WorkAnswer:
            if self._clock.now() >= fence.until:
                return WorkAnswer("refused", "the lease has ended")
            wrong = self._other(workload)
            if wrong is not None:
                return wrong
            found = self.running[workload.uid]
            if found.ending:
                return WorkAnswer("already")
            if found.uid in self.blocked:
                return WorkAnswer("blocked", self.blocked[found.uid])
            self.running[found.uid] = replace(found, ending=True)
            self.evicted.append((self._clock.now(), found.node, found.uid))
            return WorkAnswer("done", "", None, self.preview(found))

        return self._written("evict", effect)

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Say what an eviction writes."""
        return (Write(f"{workload.kind} {workload.name}", "ending", None, "true"),)

    def load_progress(self) -> StoredState:
        """Read the progress."""
        self._readable("load_progress")
        return StoredState(self.text, str(self.version))

    def save_progress(self, text: str, version: str) -> Answer:
        """Replace the progress."""
        fault = self.faults.meet("save_progress")
        if fault == "crash_before":
            raise Crash("save_progress")
        if fault == "refused":
            return Answer("refused", "not allowed")
        if version != str(self.version) or fault == "conflict":
            return Answer("conflict", f"the progress has version {self.version}, expected {version}")
        if fault not in ("timeout_before", "unreadable"):
            self.text, self.version = text, self.version + 1
        if fault == "crash_after":
            raise Crash("save_progress")
        if fault is not None:
            return Answer("timeout", "no answer")
        return Answer("done", "", (), str(self.version))

    def _other(self, workload: Workload) -> WorkAnswer | None:
        if workload.uid in self.running:
            return None
        same = any(each.name == workload.name for each in self.running.values())
        return WorkAnswer("conflict", "another one has its name") if same else WorkAnswer("gone")

    def _readable(self, call: str) -> None:
        fault = self.faults.meet(call)
        if fault in ("crash_before", "crash_after"):
            raise Crash(call)
        if fault is not None:
            raise SchedulerError(f"{call}: {fault}")

    def _written(self, call: str, effect: Callable[[], WorkAnswer]) -> WorkAnswer:
        fault = self.faults.meet(call)
        if fault == "crash_before":
            raise Crash(call)
        if fault in ("timeout_before", "unreadable"):
            return WorkAnswer("timeout", "no answer")
        if fault in ("conflict", "refused"):
            return WorkAnswer("refused", "not allowed")
        answer = effect()
        if fault == "crash_after":
            raise Crash(call)
        return WorkAnswer("timeout", "no answer") if fault == "timeout_after" else answer


class MemoryVerification:
    """Diagnostics that are settled by hand.

    ``started``: node and units, by key.
    ``results``: by node; none: it runs.
    """

    def __init__(self) -> None:
        self.started: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.results: dict[str, DiagnosticResult] = {}
        self.dropped: list[str] = []
        self.faults = Faults()

    def start(self, node: str, units: Sequence[str], key: str, fence: Fence) -> WorkAnswer:
        """Start one."""
        fault = self.faults.meet("start")
        if fault == "crash_before":
            raise Crash("start")
        if fault == "refused":
            return WorkAnswer("refused", "not allowed")
        before = key in self.started
        if fault != "timeout_before":
            self.started.setdefault(key, (node, tuple(units)))
        if fault == "crash_after":
            raise Crash("start")
        if fault is not None:
            return WorkAnswer("timeout", "no answer")
        return WorkAnswer("already" if before else "done")

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Read one."""
        fault = self.faults.meet("result")
        if fault in ("crash_before", "crash_after"):
            raise Crash("result")
        if fault is not None:
            raise SchedulerError("the result cannot be read")
        if key not in self.started:
            return DiagnosticResult("missing")
        return self.results.get(node, DiagnosticResult("running"))

    def drop(self, node: str, key: str) -> None:
        """Stop one."""
        self.dropped.append(key)
