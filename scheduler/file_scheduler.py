"""A cluster described by a file: for rehearsals, and for schedulers whose own tooling writes and follows one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from policy.fleet import JobView, NodeView, UnitView
from policy.plan import Action
from scheduler.answers import Answer, Precondition, Write
from scheduler.failures import SchedulerError
from scheduler.locked_json import LockedJson
from scheduler.memory import Lease, MemoryNode, MemoryScheduler
from scheduler.node_object import Keys, NodeObject, Taint
from scheduler.ports import Clock
from scheduler.readings import FleetReading, NodeReading, StoredState, Switches
from telemetry.errors import InputError

FORMAT = 1
"""Version of the file; another one is refused."""


@dataclass(frozen=True, slots=True)
class ListedNode:
    """One node in the file.

    ``name``, ``cluster``, ``group``, ``rack``, ``domain``: as in :class:`policy.fleet.NodeView`.
    ``units``: GPUs that are in it, as the scores name them; none: those that were scored on it.
    ``version``: rises with each write of ours. Whoever else writes the file raises it too.
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
    """The whole file."""

    format: int
    nodes: tuple[ListedNode, ...]
    switches: Switches = field(default_factory=Switches)
    state: str | None = None
    state_version: int = 0
    lease: Lease | None = None


class FileScheduler:
    """A scheduler whose cluster is a JSON file.

    ``path``: read at each call, and replaced atomically at each write, under a lock beside it (``.NAME.lock``).
    Raises ``InputError`` if there is no such file, or it is not of this format.
    """

    def __init__(self, path: Path, clock: Clock, keys: Keys = Keys()) -> None:  # noqa: B008 - frozen
        self.path = path
        self._file = LockedJson(path, ClusterFile, FORMAT, "a cluster", "the cluster", "cluster")
        self._clock = clock
        self._keys = keys
        self._file.check(self._load)

    def read_fleet(self) -> FleetReading:
        """List all nodes."""
        return self._reading(lambda memory: memory.read_fleet())

    def revalidate(self, node: str) -> NodeReading | None:
        """Read one node anew."""
        return self._reading(lambda memory: memory.revalidate(node))

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Give what would be written now."""
        return self._reading(lambda memory: memory.preview(actions, reading))

    def apply(self, action: Action, precondition: Precondition) -> Answer:
        """Carry out an action."""
        return self._writing(lambda memory: memory.apply(action, precondition))

    def load_state(self) -> StoredState:
        """Read the safety state."""
        return self._reading(lambda memory: memory.load_state())

    def save_state(self, text: str, version: str) -> Answer:
        """Replace the safety state."""
        return self._writing(lambda memory: memory.save_state(text, version))

    def read_switches(self) -> Switches:
        """Read the switches."""
        return self._reading(lambda memory: memory.read_switches())

    def set_switches(self, switches: Switches) -> Answer:
        """Set the switches."""
        return self._writing(lambda memory: memory.set_switches(switches))

    def hold_lease(self, holder: str, lasts: timedelta) -> datetime | None:
        """Take or prolong the lease."""
        return self._reading(lambda memory: memory.hold_lease(holder, lasts))

    def drop_lease(self, holder: str) -> None:
        """Give the lease back."""
        with contextlib.suppress(SchedulerError):
            self._reading(lambda memory: memory.drop_lease(holder))

    def _reading(self, call: Callable[[MemoryScheduler], Any]) -> Any:
        try:
            with self._file.locked():
                return call(self._load())
        except (OSError, ValueError, InputError) as error:
            raise SchedulerError(f"{self.path}: {error}") from error

    def _writing(self, call: Callable[[MemoryScheduler], Answer]) -> Answer:
        try:
            with self._file.locked():
                return call(self._load())
        except (OSError, ValueError, InputError) as error:
            # the file is replaced as a whole or not at all
            return Answer("refused", f"{self.path}: {error}")

    def _load(self) -> MemoryScheduler:
        listed: ClusterFile = self._file.load()
        names = [each.name for each in listed.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"node {next(n for n in names if names.count(n) > 1)} is listed twice")
        memory = MemoryScheduler(map(_node, listed.nodes), self._clock, self._keys, lambda: self._save(memory))
        memory.switches, memory.lease = listed.switches, listed.lease
        memory.state, memory.state_version = listed.state, listed.state_version
        return memory

    def _save(self, memory: MemoryScheduler) -> None:
        nodes = tuple(map(_listed, memory.nodes.values()))
        self._file.save(ClusterFile(FORMAT, nodes, memory.switches, memory.state, memory.state_version, memory.lease))


def _node(listed: ListedNode) -> MemoryNode:
    base = NodeView(
        listed.name, listed.cluster, listed.group, listed.rack, listed.domain, tuple(map(UnitView, listed.units)),
        listed.jobs, down=listed.down, software=listed.software,
    )  # fmt: skip
    thing = NodeObject(listed.name, listed.labels, listed.annotations, listed.taints, listed.unschedulable)
    return MemoryNode(thing, base, listed.boot_id, listed.version)


def _listed(node: MemoryNode) -> ListedNode:
    base, thing = node.base, node.object
    return ListedNode(
        base.name, base.cluster, base.group, base.rack, base.domain, tuple(unit.name for unit in base.units),
        base.jobs, dict(thing.labels), dict(thing.annotations), thing.taints, thing.unschedulable, base.down,
        base.software, node.boot_id, node.version,
    )  # fmt: skip
