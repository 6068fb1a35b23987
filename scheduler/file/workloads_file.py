"""Workloads described by a file beside that of the cluster: for rehearsals, and for tooling that follows one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.file.cluster_file import LockedJson
from scheduler.file.memory_workloads import MemoryWorkloads
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Answer, StoredState, Write
from scheduler.ports.workloads import CheckpointAsk, CheckpointState, Fence, WorkAnswer, Workload
from telemetry.errors import InputError

FORMAT = 1
"""Version of the file; another one is refused."""


@dataclass(frozen=True, slots=True)
class WorkloadsFile:
    """The whole file.

    ``workloads``: whoever runs them takes one out when it is gone; one that we evicted is ``ending``.
    ``asked``: by uid: what we ask for.
    ``written``, ``cannot``: the keys of requests that were carried out; the uids of workloads that cannot.
    ``blocked``: uids that must not go now, with why.
    """

    format: int
    workloads: tuple[Workload, ...] = ()
    asked: dict[str, CheckpointAsk] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()
    blocked: dict[str, str] = field(default_factory=dict)
    progress: str | None = None
    version: int = 0


class FileWorkloads:
    """Workloads in a JSON file, read at each call and replaced atomically at each change, under a lock beside it.

    Raises ``InputError`` if there is no such file, or it is not of this format.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._file = LockedJson(path, WorkloadsFile, FORMAT, "workloads", "workloads", "workloads")
        self._clock = clock
        self._file.check(self._load)

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List what runs on a node."""
        return self._reading(lambda memory: memory.on_node(node))

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WorkAnswer:
        """Write the request into the file."""
        return self._writing(lambda memory: memory.ask_checkpoint(workload, ask, fence), WorkAnswer)

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Read whether the request was carried out."""
        return self._reading(lambda memory: memory.checkpoint_state(workload, key))

    def evict(self, workload: Workload, fence: Fence) -> WorkAnswer:
        """Mark it as on its way out."""
        return self._writing(lambda memory: memory.evict(workload, fence), WorkAnswer)

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Say what an eviction writes."""
        return MemoryWorkloads((), self._clock).preview(workload)

    def load_progress(self) -> StoredState:
        """Read the progress."""
        return self._reading(lambda memory: memory.load_progress())

    def save_progress(self, text: str, version: str) -> Answer:
        """Replace the progress."""
        return self._writing(lambda memory: memory.save_progress(text, version), Answer)

    def _reading(self, call: Callable[[MemoryWorkloads], Any]) -> Any:
        try:
            with self._file.locked():
                return call(self._load())
        except (OSError, ValueError, InputError) as error:
            raise SchedulerError(f"{self.path}: {error}") from error

    def _writing(self, call: Callable[[MemoryWorkloads], Any], kind: type[Answer] | type[WorkAnswer]) -> Any:
        try:
            with self._file.locked():
                memory = self._load()
                before = _content(memory)
                answer = call(memory)
                content = _content(memory)
                if content != before:
                    self._file.save(content)
                return answer
        except (OSError, ValueError, InputError) as error:
            return kind("refused", f"{self.path}: {error}")  # the file is replaced as a whole or not at all

    def _load(self) -> MemoryWorkloads:
        listed: WorkloadsFile = self._file.load()
        uids = [each.uid for each in listed.workloads]
        if len(set(uids)) != len(uids):
            raise ValueError(f"uid {next(u for u in uids if uids.count(u) > 1)} is listed twice")
        memory = MemoryWorkloads(listed.workloads, self._clock)
        memory.asked, memory.blocked = dict(listed.asked), dict(listed.blocked)
        memory.written, memory.cannot = set(listed.written), set(listed.cannot)
        memory.text, memory.version = listed.progress, listed.version
        return memory


def _content(memory: MemoryWorkloads) -> WorkloadsFile:
    asked = {uid: each for uid, each in memory.asked.items() if uid in memory.running}
    return WorkloadsFile(
        FORMAT, tuple(memory.running.values()), asked, tuple(sorted(memory.written)), tuple(sorted(memory.cannot)),
        dict(memory.blocked), memory.text, memory.version,
    )  # fmt: skip
