"""A cluster described by a file: for rehearsals, and for schedulers whose own tooling writes and follows one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock

from policy.fleet import JobView, NodeView, UnitView
from policy.plan import Action
from scheduler.file.memory import Lease, MemoryNode, MemoryScheduler
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.node_object import Keys, NodeObject, Taint
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Answer, FleetReading, NodeReading, Precondition, StoredState, Switches, Write
from telemetry.atomic import write_bytes
from telemetry.errors import InputError

_LOCK_WAIT_S = 30.0

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


@dataclass(frozen=True, slots=True)
class LockedJson:
    """The file.

    ``path``: the lock is ``.NAME.lock`` beside it.
    ``kind``: dataclass of its content, with a field ``format``.
    ``format``: version of the content; another one is refused.
    ``what``, ``the``: what it describes, in errors: ``a cluster``, ``the cluster``.
    ``where``: what its content is called in errors about a place in it.
    """

    path: Path
    kind: type
    format: int
    what: str
    the: str
    where: str

    def check(self, load: Callable[[], object]) -> None:
        """Make sure that it is there and can be used.

        ``load``: reads and checks it; :meth:`load` and whatever more its owner asks of it.
        Raises ``InputError`` if it is missing, or ``load`` raises ValueError.
        """
        where = str(self.path)
        if not self.path.is_file():
            raise InputError(f"there is no file of {self.what} here", where, "Write one, see the operator's page.")
        try:
            load()
        except ValueError as error:
            raise InputError(f"the file of {self.the} cannot be used: {error}", where, "Correct it.") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from reading and writing it; the lock ends with the process at the latest."""
        with FileLock(
            self.path.with_name(f".{self.path.name}.lock"), timeout=_LOCK_WAIT_S, mode=0o600, fallback_to_soft=False
        ):
            yield

    def load(self) -> Any:
        """Read it; the lock is held for as long as what was read is to be true.

        Raises ``ValueError`` if it is no JSON, of another format, or has an unknown key or a value of another kind.
        """
        content = json.loads(self.path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != self.format:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it has format {found!r}, this code reads {self.format}")
        return object_of(self.kind, content, self.where)

    def save(self, content: Any) -> None:
        """Replace it as a whole, or not at all, under the lock."""
        text = json.dumps(plain_of(content), indent=1, ensure_ascii=False, allow_nan=False)
        write_bytes(self.path, (text + "\n").encode())
