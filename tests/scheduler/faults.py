"""Failures on demand, and workloads and diagnostics in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal

from scheduler.file import MemoryScheduler
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Answer, StoredState, Write
from scheduler.ports.workloads import CheckpointAsk, CheckpointState, DiagnosticResult, Fence, Workload

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
        self._planned.clear()

    def _meet(self, call: str) -> FaultKind | None:
        self.calls.append(call)
        for planned in self._planned:
            if planned.call not in (None, call):
                continue
            if not planned.skip:
                self._planned.remove(planned)
                return planned.kind
            planned.skip -= 1
        return None

    def read(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        fault = self._meet(name)
        if fault in ("crash_before", "crash_after"):
            raise Crash(name)
        if fault is not None:
            raise SchedulerError(f"{name}: {fault}")
        return call(*args)

    def write(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        fault = self._meet(name)
        if fault == "crash_before":
            raise Crash(name)
        if fault in ("timeout_before", "unreadable"):
            return Answer("timeout", "no answer")
        if fault in ("conflict", "refused"):
            return Answer(fault, "not allowed")
        result = call(*args)
        if fault == "crash_after":
            raise Crash(name)
        return Answer("timeout", "no answer") if fault == "timeout_after" else result


class FaultyScheduler(MemoryScheduler):
    """A scheduler in memory whose calls fail on demand."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.faults = Faults()
        for name in ("read_fleet", "revalidate", "load_state", "read_switches", "hold_lease"):
            setattr(self, name, partial(self.faults.read, name, getattr(self, name)))
        for name in ("apply", "save_state", "set_switches"):
            setattr(self, name, partial(self.faults.write, name, getattr(self, name)))


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
        self.running = {workload.uid: workload for workload in workloads}
        self.asked: dict[str, CheckpointAsk] = {}
        self.written: set[str] = set()
        self.cannot: set[str] = set()
        self.blocked: dict[str, str] = {}
        self.evicted: list[tuple[datetime, str, str]] = []
        self.faults = Faults()
        self.text: str | None = None
        self.version = 0
        self._clock = clock
        self.ask_checkpoint = partial(self.faults.write, "ask_checkpoint", self._asked)
        self.checkpoint_state = partial(self.faults.read, "checkpoint_state", self._state)
        self.evict = partial(self.faults.write, "evict", self._evicted)
        self.save_progress = partial(self.faults.write, "save_progress", self._saved)

    def on_node(self, node: str) -> tuple[Workload, ...]:
        return self.faults.read(
            "on_node", lambda: tuple(workload for workload in self.running.values() if workload.node == node)
        )

    def _asked(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> Answer:
        wrong = self._wrong(workload, fence)
        if wrong is not None:
            return wrong
        before = self.asked.get(workload.uid)
        if before is not None and before.key == ask.key:
            return Answer("already")
        self.asked[workload.uid] = ask
        return Answer("done")

    def _state(self, workload: Workload, key: str) -> CheckpointState:
        if workload.uid not in self.running:
            return CheckpointState("gone")
        if workload.uid in self.cannot:
            return CheckpointState("failed", "it has none")
        return CheckpointState("acknowledged" if key in self.written else "waiting")

    def _evicted(self, workload: Workload, fence: Fence) -> Answer:
        wrong = self._wrong(workload, fence)
        if wrong is not None:
            return wrong
        result = self.running[workload.uid]
        if result.ending:
            return Answer("already")
        if result.uid in self.blocked:
            return Answer("blocked", self.blocked[result.uid])
        self.running[result.uid] = replace(result, ending=True)
        self.evicted.append((self._clock.now(), result.node, result.uid))
        return Answer("done", "", self.preview(result))

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        return (Write(f"{workload.kind} {workload.name}", "ending", None, "true"),)

    def load_progress(self) -> StoredState:
        return self.faults.read("load_progress", lambda: StoredState(self.text, str(self.version)))

    def _saved(self, text: str, version: str) -> Answer:
        if version != str(self.version):
            return Answer("conflict", f"the progress has version {self.version}, expected {version}")
        self.text, self.version = text, self.version + 1
        return Answer("done", "", (), str(self.version))

    def _wrong(self, workload: Workload, fence: Fence) -> Answer | None:
        if self._clock.now() >= fence.until:
            return Answer("refused", "the lease has ended")
        if workload.uid in self.running:
            return None
        same = any(item.name == workload.name for item in self.running.values())
        return Answer("conflict", "another one has its name") if same else Answer("gone")


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
        self.start = partial(self.faults.write, "start", self._start)
        self.result = partial(self.faults.read, "result", self._result)

    def _start(self, node: str, units: Sequence[str], key: str, _: Fence) -> Answer:
        before = key in self.started
        self.started.setdefault(key, (node, tuple(units)))
        return Answer("already" if before else "done")

    def _result(self, node: str, key: str) -> DiagnosticResult:
        return (
            self.results.get(node, DiagnosticResult("running")) if key in self.started else DiagnosticResult("missing")
        )

    def drop(self, node: str, key: str) -> None:
        self.dropped.append(key)
