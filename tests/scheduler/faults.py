"""Failures on demand, and workloads and diagnostics in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

from scheduler import file
from scheduler.file import MemoryNode, MemoryScheduler
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import NodeReading, WriteResult
from scheduler.ports.workloads import CheckpointAsk, CheckpointState, DiagnosticResult, Fence, Workload

FaultKind = Literal[
    "conflict", "refused", "timeout_before", "timeout_after", "unreadable", "crash_before", "crash_after"
]  # fmt: skip


class Crash(KeyboardInterrupt):
    """The process dies here. No handler of errors or native panics may catch it."""


class Watch:
    """Checks of calls that a controller makes. It takes whatever a call raises for a fault of the call, and goes on.

    ``broken``: what the checks found, to be asserted where no controller is above.
    """

    def __init__(self) -> None:
        self.broken: list[Exception] = []

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, of which each error but a planned one is recorded."""

        def watched(*args: Any, **others: Any) -> Any:
            try:
                return call(*args, **others)
            except SchedulerError:
                raise
            except Exception as error:
                self.broken.append(error)
                raise

        return watched


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
        self.failed: set[str] = set()  # names of the calls that failed since the last `clear`

    def plan(self, kind: FaultKind, call: str | None = None, skip: int = 0) -> None:
        """Let a call fail: the next one, or after ``skip`` others; of one name only, where ``call`` is given."""
        self._planned.append(_Planned(kind, call, skip))

    def clear(self) -> None:
        self._planned.clear()
        self.failed.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let calls of the test itself succeed."""
        planned, self._planned = self._planned, []
        yield
        self._planned = planned

    def _meet(self, call: str) -> FaultKind | None:
        self.calls.append(call)
        for planned in self._planned:
            if planned.call not in (None, call):
                continue
            if not planned.skip:
                self._planned.remove(planned)
                self.failed.add(call)
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

    def write(self, name: str, call: Callable[..., Any], *args: Any, **others: Any) -> Any:
        fault = self._meet(name)
        if fault == "crash_before":
            raise Crash(name)
        if fault in ("timeout_before", "unreadable"):
            return WriteResult("timeout", "no answer")
        if fault in ("conflict", "refused"):
            return WriteResult(fault, "not allowed")
        result = call(*args, **others)
        if fault == "crash_after":
            raise Crash(name)
        return WriteResult("timeout", "no answer") if fault == "timeout_after" else result


class FaultyScheduler(MemoryScheduler):
    """A scheduler in memory whose calls fail on demand."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.faults = Faults()
        for name in ("read_fleet", "revalidate", "load_state", "read_switches", "hold_lease"):
            setattr(self, name, partial(self.faults.read, name, getattr(self, name)))
        for name in ("apply", "save_state", "set_switches"):
            setattr(self, name, partial(self.faults.write, name, getattr(self, name)))
        self._readings: dict[str, tuple[MemoryNode, datetime, NodeReading]] = {}

    def _reading(self, node: MemoryNode) -> NodeReading:
        """Read a node once for each state and time: a round reads it several times."""
        now, known = self._clock.now(), self._readings.get(node.object.name)
        if known is None or known[0] is not node or known[1] != now:
            known = self._readings[node.object.name] = (node, now, super()._reading(node))
        return known[2]


class MemoryWorkloads(file.MemoryWorkloads):
    """What runs on the nodes of a cluster in memory, with failures on demand.

    ``cannot``: uids of workloads that cannot write a checkpoint.
    ``blocked``: name of the disruption budget that protects a workload, by uid.
    ``evicted``: accepted evictions: time, node, uid.
    """

    def __init__(self, workloads: Iterable[Workload], clock: Clock) -> None:
        super().__init__(workloads)
        self._clock = clock
        self.cannot: set[str] = set()
        self.blocked: dict[str, str] = {}
        self.evicted: list[tuple[datetime, str, str]] = []
        self.faults = Faults()
        for name in ("ask_checkpoint", "evict", "save_progress"):
            setattr(self, name, partial(self.faults.write, name, getattr(self, name)))
        for name in ("checkpoint_state", "on_node", "load_progress"):
            setattr(self, name, partial(self.faults.read, name, getattr(self, name)))

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        state = super().checkpoint_state(workload, key)
        return CheckpointState("failed", "it has none") if workload.uid in self.cannot else state

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WriteResult:
        return self._refusal(workload, fence) or super().ask_checkpoint(workload, ask, fence)

    def evict(self, workload: Workload, fence: Fence) -> WriteResult:
        refusal = self._refusal(workload, fence)
        if refusal is None and self.running[workload.uid].ending:
            refusal = WriteResult("already")
        if refusal is None and workload.uid in self.blocked:
            refusal = WriteResult("blocked", self.blocked[workload.uid])
        if refusal is not None:
            return refusal
        self.evicted.append((self._clock.now(), workload.node, workload.uid))
        return super().evict(workload, fence)

    def _refusal(self, workload: Workload, fence: Fence) -> WriteResult | None:
        if self._clock.now() >= fence.until:
            return WriteResult("refused", "the lease has ended")
        if workload.uid in self.running:
            return None
        same = any(running.name == workload.name for running in self.running.values())
        return WriteResult("conflict", "the name is taken by another workload") if same else WriteResult("gone")


class MemoryVerification:
    """Diagnostics that are settled by hand.

    ``started``: node and units, ``remedies``: what is to be carried out, by key; ``probes``: keys of probes.
    ``results``: by node; none: it runs.
    """

    def __init__(self) -> None:
        self.started: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.results: dict[str, DiagnosticResult] = {}
        self.remedies: dict[str, str | None] = {}
        self.probes: set[str] = set()
        self.dropped: list[str] = []
        self.faults = Faults()
        self.start = partial(self.faults.write, "start", self._start)
        self.result = partial(self.faults.read, "result", self._result)

    def _start(
        self, node: str, units: Sequence[str], key: str, _: Fence, remedy: str | None = None, *, probe: bool = False
    ) -> WriteResult:
        before = key in self.started
        self.probes |= {key} if probe else set()
        self.remedies.setdefault(key, remedy)
        self.started.setdefault(key, (node, tuple(units)))
        return WriteResult("already" if before else "done")

    def _result(self, node: str, key: str) -> DiagnosticResult:
        return (
            self.results.get(node, DiagnosticResult("running")) if key in self.started else DiagnosticResult("missing")
        )

    def drop(self, node: str, key: str) -> None:
        self.dropped.append(key)
