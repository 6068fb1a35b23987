"""A cluster described by a file: for rehearsals, and for schedulers whose own tooling writes and follows one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from policy.fleet import JobView, NodeView, UnitView
from policy.plan import Action
from scheduler.answers import Answer, Precondition, Write
from scheduler.failures import SchedulerError
from scheduler.memory import Lease, MemoryNode, MemoryScheduler
from scheduler.node_object import Keys, NodeObject, Taint
from scheduler.plain import object_of, plain_of
from scheduler.ports import Clock
from scheduler.readings import FleetReading, NodeReading, StoredState, Switches
from telemetry.atomic import write_bytes
from telemetry.errors import InputError

FORMAT = 1
"""Version of the file; another one is refused."""


@dataclass(frozen=True, slots=True)
class ListedNode:
    """One node in the file.

    Attributes
    ----------
    name, cluster, group, rack, domain
        As in :class:`policy.fleet.NodeView`.
    units : tuple of str
        GPUs that are in it, as the scores name them; none: those that were scored on it.
    jobs : tuple of JobView
    labels, annotations : mapping of str to str
    taints : tuple of Taint
    unschedulable, down : bool
    software, boot_id : str or None
    version : int
        Rises with each write of ours. Whoever else writes the file raises it too.
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

    Parameters
    ----------
    path : pathlib.Path
        Read at each call, and replaced atomically at each write, under a lock beside it (``.NAME.lock``).
    clock : Clock
    keys : Keys

    Raises
    ------
    InputError
        If there is no such file, or it is not of this format.
    """

    def __init__(self, path: Path, clock: Clock, keys: Keys = Keys()) -> None:  # noqa: B008 - frozen
        self.path = path
        self._clock = clock
        self._keys = keys
        if not path.is_file():
            raise InputError("there is no file of a cluster here", str(path), "Write one, see the operator's page.")
        try:
            self._load()
        except ValueError as error:
            raise InputError(f"the file of the cluster cannot be used: {error}", str(path), "Correct it.") from None

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
            with self._locked():
                return call(self._load())
        except (OSError, ValueError, InputError) as error:
            raise SchedulerError(f"{self.path}: {error}") from error

    def _writing(self, call: Callable[[MemoryScheduler], Answer]) -> Answer:
        try:
            with self._locked():
                return call(self._load())
        except (OSError, ValueError, InputError) as error:
            # the file is replaced as a whole or not at all
            return Answer("refused", f"{self.path}: {error}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _load(self) -> MemoryScheduler:
        content = json.loads(self.path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it has format {found!r}, this code reads {FORMAT}")
        listed = object_of(ClusterFile, content, "cluster")
        names = [each.name for each in listed.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"node {next(n for n in names if names.count(n) > 1)} is listed twice")
        memory = MemoryScheduler(map(_node, listed.nodes), self._clock, self._keys, lambda: self._save(memory))
        memory.switches, memory.lease = listed.switches, listed.lease
        memory.state, memory.state_version = listed.state, listed.state_version
        return memory

    def _save(self, memory: MemoryScheduler) -> None:
        content = ClusterFile(
            FORMAT, tuple(map(_listed, memory.nodes.values())), memory.switches, memory.state, memory.state_version,
            memory.lease,
        )  # fmt: skip
        text = json.dumps(plain_of(content), indent=1, ensure_ascii=False, allow_nan=False)
        write_bytes(self.path, (text + "\n").encode())


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
