"""Workloads and diagnostics in memory, with failures on demand: for rehearsals and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from scheduler.file.memory import Crash, Faults
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

    def start(self, node: str, units: Sequence[str], key: str, fence: Fence) -> WorkAnswer:  # noqa: ARG002
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

    def drop(self, node: str, key: str) -> None:  # noqa: ARG002
        """Stop one."""
        self.dropped.append(key)
