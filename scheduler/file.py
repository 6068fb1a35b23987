"""Schedulers in memory and in a JSON file, for dry runs, tests and tools that read the file."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from filelock import BaseFileLock, FileLock, Timeout

from foundation.errors import InputError
from foundation.files import read_small, write_bytes
from policy.fleet import JobView, NodeView, UnitView
from policy.plan import Action
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.node_object import Keys, NodeObject, Taint, after, view_of, writes_between
from scheduler.ports.protocols import Clock, SchedulerExtras
from scheduler.ports.readings import FleetReading, NodeReading, Precondition, StoredState, Switches, Write, WriteResult
from scheduler.ports.workloads import CheckpointAsk, CheckpointState, Fence, Workload

FORMAT = 1
"""Version of the file; others are rejected."""

_SHAPE = 'Write JSON with a "format" and "nodes", as docs/operating.md shows.'
_LOCK_WAIT_S = 30.0
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """One node of an in-memory cluster."""

    object: NodeObject
    base: NodeView
    boot_id: str | None = None
    version: int = 1


@dataclass(frozen=True, slots=True)
class LeaseEntry:
    """The active replica, and the expiry of its lease."""

    holder: str
    until: datetime


class MemoryScheduler(SchedulerExtras):
    """In-memory scheduler; :meth:`edit` simulates changes by operators and other tools."""

    def __init__(self, nodes: Iterable[MemoryNode], clock: Clock, keys: Keys = Keys()) -> None:
        self.nodes = {node.object.name: node for node in nodes}
        self.keys = keys
        self.switches = Switches()
        self.state: str | None = None
        self.state_version = 0
        self.lease: LeaseEntry | None = None
        self._clock, self.server_time = clock, clock.now

    def edit(self, node: str, change: Callable[[MemoryNode], MemoryNode]) -> None:
        """Change a node like an operator or another tool, with a new version."""
        old = self.nodes[node]
        self.nodes[node] = replace(change(old), version=old.version + 1)

    def read_fleet(self) -> FleetReading:
        """List all nodes."""
        read_at = self._clock.now()
        return FleetReading(tuple(map(self._reading, self.nodes.values())), read_at, self.switches)

    def revalidate(self, node: str) -> NodeReading | None:
        """Re-read one node."""
        return self._reading(self.nodes[node]) if node in self.nodes else None

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Return the writes of each action."""
        if reading.view.name not in self.nodes:
            return tuple(() for _ in actions)
        states = [self.nodes[reading.view.name].object]
        for action in actions:
            states.append(after(action, states[-1], self.keys, self._clock.now()))
        return tuple(writes_between(old, new) for old, new in itertools.pairwise(states))

    def apply(self, action: Action, precondition: Precondition) -> WriteResult:
        """Carry out an action."""
        node = self.nodes.get(action.node)
        if node is None:
            return WriteResult("gone", f"unknown node {action.node}")
        now = self._clock.now()
        conflict = precondition.conflict(self._reading(node))
        if conflict is not None:
            return conflict
        holds_lease = self.lease is not None and self.lease.holder == precondition.holder and now < self.lease.until
        if not holds_lease and precondition.until is not None:
            return WriteResult("refused", f"{precondition.holder} does not hold the lease")
        written = after(action, node.object, self.keys, now)
        writes = writes_between(node.object, written)
        if not writes:
            return WriteResult("already", "no change", (), str(node.version))
        self.nodes[action.node] = replace(node, object=written, version=node.version + 1)
        return WriteResult("done", "", writes, str(node.version + 1))

    def load_state(self) -> StoredState:
        """Read the safety state."""
        return StoredState(self.state, str(self.state_version))

    def save_state(self, text: str, version: str) -> WriteResult:
        """Replace the safety state."""
        if version != str(self.state_version):
            return WriteResult("conflict", f"the state has version {self.state_version}, expected {version}")
        if text != self.state:
            self.state, self.state_version = text, self.state_version + 1
        return WriteResult("done", "", (), str(self.state_version))

    def read_switches(self) -> Switches:
        """Read the switches."""
        return self.switches

    def set_switches(self, switches: Switches) -> WriteResult:
        """Set the switches."""
        if switches == self.switches:
            return WriteResult("already")
        self.switches = switches
        return WriteResult("done")

    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Acquire or renew the lease."""
        now = self._clock.now()
        if self.lease is not None and self.lease.holder != holder and now < self.lease.until:
            return None
        self.lease = LeaseEntry(holder, now + duration)
        return self.lease.until

    def drop_lease(self, holder: str) -> None:
        """Release the lease."""
        if self.lease is not None and self.lease.holder == holder:
            self.lease = None

    def _reading(self, node: MemoryNode) -> NodeReading:
        view = view_of(node.object, node.base, self.keys, self._clock.now())
        return NodeReading(view, str(node.version), node.boot_id)


@dataclass(frozen=True, slots=True)
class ListedNode:
    """One node in the file.

    ``units``: its GPUs, named as in the scores; empty: the GPUs that the scores list for it.
    ``version``: incremented by each write; other writers of the file must increment it too.
    """

    name: str
    cluster: str
    group: str
    rack: str | None = None
    domain: str | None = None
    units: tuple[str, ...] = ()
    jobs: tuple[JobView, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    down: bool = False
    software: str | None = None
    boot_id: str | None = None
    version: int = 1


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """Content of the file."""

    format: int
    nodes: tuple[ListedNode, ...]
    switches: Switches = field(default_factory=Switches)
    state: str | None = None
    state_version: int = 0


class FileScheduler(SchedulerExtras):
    """A scheduler whose cluster is a JSON file.

    ``path``: read at each call, and replaced atomically at each write, under the lock file ``.NAME.lock``.
    Raises ``InputError`` if the file is missing or not in this format.

    The lease is another file lock (``.NAME.lease``), held from the first round to the end of the process. The operating
    system frees it, so no clock is involved.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path, self._clock, self.server_time = path, clock, clock.now
        if not path.exists():
            raise InputError("the cluster file does not exist", str(path), _SHAPE)
        self._active = self._lock("lease", timeout_s=0.0)
        self._lease: LeaseEntry | None = None
        self.read_fleet = self._reading(MemoryScheduler.read_fleet)
        self.revalidate = self._reading(MemoryScheduler.revalidate)
        self.preview = self._reading(MemoryScheduler.preview)
        self.apply = self._writing(MemoryScheduler.apply)
        self.load_state = self._reading(MemoryScheduler.load_state)
        self.save_state = self._writing(MemoryScheduler.save_state)
        self.read_switches = self._reading(MemoryScheduler.read_switches)
        self.set_switches = self._writing(MemoryScheduler.set_switches)
        try:
            self._load()
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"the cluster file is invalid: {error}", str(path), _SHAPE) from None

    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Acquire or renew the lease."""
        try:
            if not self._active.is_locked:
                self._active.acquire()
        except Timeout:
            return None
        except OSError as error:
            raise SchedulerError(f"{self.path}: {error}") from error
        self._lease = LeaseEntry(holder, self._clock.now() + duration)
        return self._lease.until

    def drop_lease(self, holder: str) -> None:
        """Release the lease."""
        if self._lease is not None and self._lease.holder == holder:
            self._lease = None
            self._active.release()

    def _lock(self, name: str, timeout_s: float) -> BaseFileLock:
        file = self.path.with_name(f".{self.path.name}.{name}")
        return FileLock(file, timeout=timeout_s, mode=0o600, thread_local=False, fallback_to_soft=False)

    def _reading(self, call: Callable[Concatenate[MemoryScheduler, P], R]) -> Callable[P, R]:
        """Apply a method of :class:`MemoryScheduler` to the file; errors become ``SchedulerError``."""

        def read(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                with self._lock("lock", _LOCK_WAIT_S):
                    memory = self._load()
                    result = call(memory, *args, **kwargs)
                    if isinstance(result, WriteResult) and result.kind == "done":
                        self._save(memory)
                    return result
            except SchedulerError:
                raise
            except Exception as error:  # a hand-edited file may fail in any way
                raise SchedulerError(f"{self.path}: {error}") from error

        return read

    def _writing(self, call: Callable[Concatenate[MemoryScheduler, P], WriteResult]) -> Callable[P, WriteResult]:
        """Apply a write of :class:`MemoryScheduler` to the file; errors become refused results."""

        def write(*args: P.args, **kwargs: P.kwargs) -> WriteResult:
            try:
                return self._reading(call)(*args, **kwargs)
            except SchedulerError as error:
                return WriteResult("refused", str(error))  # the file is replaced atomically

        return write

    def _load(self) -> MemoryScheduler:
        content = json.loads(read_small(self.path, 1 << 28))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            stored = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it has format {stored!r}, but this code reads {FORMAT}")
        listed: ClusterFile = object_of(ClusterFile, content, "cluster")
        names = [node.name for node in listed.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"node {next(n for n in names if names.count(n) > 1)} is listed twice")
        memory = MemoryScheduler(map(_node, listed.nodes), self._clock)
        memory.switches, memory.lease = listed.switches, self._lease
        memory.state, memory.state_version = listed.state, listed.state_version
        return memory

    def _save(self, memory: MemoryScheduler) -> None:
        nodes = tuple(map(_listed, memory.nodes.values()))
        content = ClusterFile(FORMAT, nodes, memory.switches, memory.state, memory.state_version)
        text = json.dumps(plain_of(content), indent=1, ensure_ascii=False, allow_nan=False)
        write_bytes(self.path, (text + "\n").encode())


def _node(listed: ListedNode) -> MemoryNode:
    base = NodeView(
        listed.name, listed.cluster, listed.group, listed.rack, listed.domain, tuple(map(UnitView, listed.units)),
        listed.jobs, down=listed.down, software=listed.software,
    )  # fmt: skip
    item = NodeObject(listed.name, listed.labels, listed.annotations, listed.taints, listed.unschedulable)
    return MemoryNode(item, base, listed.boot_id, listed.version)


def _listed(node: MemoryNode) -> ListedNode:
    base, item = node.base, node.object
    return ListedNode(
        base.name, base.cluster, base.group, base.rack, base.domain, tuple(unit.name for unit in base.units),
        base.jobs, dict(item.labels), dict(item.annotations), item.taints, item.unschedulable, base.down,
        base.software, node.boot_id, node.version,
    )  # fmt: skip


class MemoryWorkloads:
    """Workloads of an in-memory cluster."""

    def __init__(self, workloads: Iterable[Workload] = ()) -> None:
        self.running = {workload.uid: workload for workload in workloads}
        self.asked: dict[str, CheckpointAsk] = {}
        self.written: set[str] = set()
        self.text: str | None = None
        self.version = 0

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List the workloads on a node."""
        return tuple(workload for workload in self.running.values() if workload.node == node)

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WriteResult:
        """Send a workload a checkpoint request."""
        earlier = self.asked.get(workload.uid)
        if earlier is not None and earlier.key == ask.key:
            return WriteResult("already")
        self.asked[workload.uid] = ask
        return WriteResult("done")

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Return the state of a request."""
        if workload.uid not in self.running:
            return CheckpointState("gone")
        return CheckpointState("acknowledged" if key in self.written else "waiting")

    def evict(self, workload: Workload, fence: Fence) -> WriteResult:
        """Evict a workload."""
        self.running[workload.uid] = replace(self.running[workload.uid], state="ending")
        return WriteResult("done", "", self.preview(workload))

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Return the writes of an eviction."""
        return (Write(f"{workload.kind} {workload.name}", "ending", None, "true"),)

    def load_progress(self) -> StoredState:
        """Read the evacuation state."""
        return StoredState(self.text, str(self.version))

    def save_progress(self, text: str, version: str) -> WriteResult:
        """Store the evacuation state."""
        if version != str(self.version):
            return WriteResult("conflict", f"the progress has version {self.version}, expected {version}")
        self.text, self.version = text, self.version + 1
        return WriteResult("done", "", (), str(self.version))
