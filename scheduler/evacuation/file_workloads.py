"""Workloads described by a file beside that of the cluster: for rehearsals, and for tooling that follows one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.answers import Answer, Write
from scheduler.evacuation.memory import MemoryWorkloads
from scheduler.evacuation.ports import CheckpointAsk, CheckpointState, Fence, WorkAnswer
from scheduler.evacuation.workload import Workload
from scheduler.failures import SchedulerError
from scheduler.plain import object_of, plain_of
from scheduler.ports import Clock
from scheduler.readings import StoredState
from telemetry.atomic import write_bytes
from telemetry.errors import InputError

FORMAT = 1
"""Version of the file; another one is refused."""


@dataclass(frozen=True, slots=True)
class WorkloadsFile:
    """The whole file.

    Attributes
    ----------
    format : int
    workloads : tuple of Workload
        Whoever runs them takes one out when it is gone; one that we evicted is ``ending``.
    asked : mapping of str to CheckpointAsk
        By uid: what we ask for.
    written, cannot : tuple of str
        The keys of requests that were carried out; the uids of workloads that cannot.
    blocked : mapping of str to str
        Uids that must not go now, with why.
    progress : str or None
    version : int
        Of the progress.
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

    Parameters
    ----------
    path : pathlib.Path
    clock : Clock

    Raises
    ------
    InputError
        If there is no such file, or it is not of this format.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        if not path.is_file():
            raise InputError("there is no file of workloads here", str(path), "Write one, see the operator's page.")
        try:
            self._load()
        except ValueError as error:
            raise InputError(f"the file of workloads cannot be used: {error}", str(path), "Correct it.") from None

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
            with self._locked():
                return call(self._load())
        except (OSError, ValueError, InputError) as error:
            raise SchedulerError(f"{self.path}: {error}") from error

    def _writing(self, call: Callable[[MemoryWorkloads], Any], kind: type[Answer] | type[WorkAnswer]) -> Any:
        try:
            with self._locked():
                memory = self._load()
                before = _content(memory)
                answer = call(memory)
                content = _content(memory)
                if content != before:
                    text = json.dumps(plain_of(content), indent=1, ensure_ascii=False, allow_nan=False)
                    write_bytes(self.path, (text + "\n").encode())
                return answer
        except (OSError, ValueError, InputError) as error:
            return kind("refused", f"{self.path}: {error}")  # the file is replaced as a whole or not at all

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _load(self) -> MemoryWorkloads:
        content = json.loads(self.path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it has format {found!r}, this code reads {FORMAT}")
        listed = object_of(WorkloadsFile, content, "workloads")
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
