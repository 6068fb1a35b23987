"""The workloads of a cluster in memory; its nodes are those of :class:`scheduler.file.MemoryScheduler`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from scheduler.ports.protocols import Clock
from scheduler.ports.readings import StoredState, Write, WriteResult
from scheduler.ports.workloads import CheckpointAsk, CheckpointState, Fence, Workload


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
        self.text: str | None = None
        self.version = 0
        self._clock = clock

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List what runs on a node."""
        return tuple(workload for workload in self.running.values() if workload.node == node)

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WriteResult:
        """Show a workload a request."""
        wrong = self._wrong(workload, fence)
        if wrong is not None:
            return wrong
        before = self.asked.get(workload.uid)
        if before is not None and before.key == ask.key:
            return WriteResult("already")
        self.asked[workload.uid] = ask
        return WriteResult("done")

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Say how far a request is."""
        if workload.uid not in self.running:
            return CheckpointState("gone")
        if workload.uid in self.cannot:
            return CheckpointState("failed", "it has none")
        return CheckpointState("acknowledged" if key in self.written else "waiting")

    def evict(self, workload: Workload, fence: Fence) -> WriteResult:
        """Ask a workload to go."""
        wrong = self._wrong(workload, fence)
        if wrong is not None:
            return wrong
        result = self.running[workload.uid]
        if result.ending:
            return WriteResult("already")
        if result.uid in self.blocked:
            return WriteResult("blocked", self.blocked[result.uid])
        self.running[result.uid] = replace(result, state="ending")
        self.evicted.append((self._clock.now(), result.node, result.uid))
        return WriteResult("done", "", self.preview(result))

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Return what an eviction would write."""
        return (Write(f"{workload.kind} {workload.name}", "ending", None, "true"),)

    def load_progress(self) -> StoredState:
        """Read how far evacuations are."""
        return StoredState(self.text, str(self.version))

    def save_progress(self, text: str, version: str) -> WriteResult:
        """Keep how far evacuations are."""
        if version != str(self.version):
            return WriteResult("conflict", f"the progress has version {self.version}, expected {version}")
        self.text, self.version = text, self.version + 1
        return WriteResult("done", "", (), str(self.version))

    def _wrong(self, workload: Workload, fence: Fence) -> WriteResult | None:
        if self._clock.now() >= fence.until:
            return WriteResult("refused", "the lease has ended")
        if workload.uid in self.running:
            return None
        same = any(item.name == workload.name for item in self.running.values())
        return WriteResult("conflict", "another one has its name") if same else WriteResult("gone")
