"""A node in memory: the child's session answers in this process, and hangs and crashes when told to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from telemetry.collect.nvml.child import Ended, Message, Process, Session, Silent
from telemetry.collect.nvml.node_reader import NodeReader
from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu, MemoryNvml


class Clock:
    """Time that only passes when told to."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> datetime:
        return datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=self.s)

    def monotonic(self) -> float:
        return self.s

    def pass_(self, s: float) -> None:
        self.s += s


class InlineChild(Process):
    """A child that hangs or crashes at the GPUs that ``hang`` and ``crash`` name (None: while opening)."""

    def __init__(self, node: MemoryNode) -> None:
        self._node = node
        self._session = Session(node.nvml, monotonic=node.clock.monotonic, clock_ms=lambda: 0, sleep=node.clock.pass_)
        self._messages: Iterator[Message] = iter(())
        self._at: int | None = -1
        self.ended = False

    def ask(self, request: Message) -> None:
        self._messages = self._session.answer(request)

    def hear(self, timeout_s: float) -> Message:
        if self._at in self._node.hang:
            self._node.clock.pass_(timeout_s)
            raise Silent
        if self._at in self._node.crash:
            self._at = -1
            raise Ended("exit status -11")
        message = next(self._messages)
        self._at = message.get("at", -1)
        return message

    def end(self) -> None:
        self.ended = True


class MemoryNode:
    """A node of which everything can be changed between two turns."""

    def __init__(self, gpus: int = 2) -> None:
        self.clock = Clock()
        self.nvml = MemoryNvml([gpu(f"GPU-{index}") for index in range(gpus)])
        self.hang: set[int | None] = set()
        self.crash: set[int | None] = set()
        self.children: list[InlineChild] = []
        self.stuck = 0

    def spawn(self) -> InlineChild:
        self.children.append(InlineChild(self))
        return self.children[-1]

    def reader(self, **told: object) -> NodeReader:
        return NodeReader(
            self.spawn,
            lambda: self.stuck,
            clock=self.clock,
            monotonic=self.clock.monotonic,
            **told,  # type: ignore[arg-type]  # passed through from the test as it is
        )


def gpu(name: str) -> MemoryGpu:
    """Return a GPU with a value of each kind."""
    return MemoryGpu(name, fields={83: 5000.0, 230: 0.0}, calls={"temperature": (40.0,), "power": (250_000.0,)})
