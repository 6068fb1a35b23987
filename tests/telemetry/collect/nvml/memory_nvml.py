"""A node in memory: NVML's twin with faults to switch on, and a child that answers in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from telemetry.collect.nvml.child import Message, Session
from telemetry.collect.nvml.library import Identity, Library, NvmlFault, NvmlQuery
from telemetry.collect.nvml.node_reader import Ended, NodeReader, Process, Silent
from tests.clock import Clock

_NOT_SUPPORTED = 3


@dataclass(slots=True)
class MemoryGpu:
    """A GPU that answers what a test sets.

    ``fields``, ``calls``: field number and question to NVML's own numbers, or to the code of a failure (an
    ``NvmlFault``); absent ones are not supported. ``links``: (link, counter) to its value.
    """

    gpu: str
    fields: dict[int, float | NvmlFault] = field(default_factory=dict)
    calls: dict[str, tuple[float, ...] | NvmlFault] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    profile: dict[int, float] = field(default_factory=dict)
    lost: int | None = None
    watchable: bool = True
    asked: list[str] = field(default_factory=list)

    def check(self) -> None:
        if self.lost is not None:
            raise NvmlFault(self.lost)


class MemoryNvml(Library):
    """A node whose driver is a list of :class:`MemoryGpu`."""

    max_links = 4

    def __init__(self, gpus: Sequence[MemoryGpu], pause: Callable[[float], None] = lambda _s: None) -> None:
        self.gpus = list(gpus)
        self.version = "580.95.05"
        self.broken: int | None = None
        self.events: list[tuple[MemoryGpu, int, int | None] | NvmlFault] = []
        self._pause = pause

    def open(self) -> None:
        self._check()

    def driver(self) -> str:
        return self.version

    def count(self) -> int:
        return len(self.gpus)

    def handle(self, index: int) -> MemoryGpu:
        self._check()
        self.gpus[index].check()
        return self.gpus[index]

    def identity(self, index: int, handle: Any) -> Identity:
        return Identity(index, handle.gpu, f"serial-{index}", "Memory GPU", f"00000000:{index + 1:02X}:00.0")

    def fields(self, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        self._check()
        handle.check()
        answers = [handle.fields.get(number, NvmlFault(_NOT_SUPPORTED)) for number in numbers]
        return [(answer.code, 0.0) if isinstance(answer, NvmlFault) else (0, float(answer)) for answer in answers]

    def call(self, call: NvmlQuery, handle: Any) -> tuple[float, ...]:
        self._check()
        handle.check()
        handle.asked.append(call.name)
        answer: tuple[float, ...] | NvmlFault = handle.calls.get(call.name, NvmlFault(_NOT_SUPPORTED))
        if isinstance(answer, NvmlFault):
            raise answer
        return answer

    def link_counter(self, handle: Any, link: int, counter: int) -> float:
        if (link, counter) not in handle.links:
            raise NvmlFault(_NOT_SUPPORTED)
        return float(handle.links[link, counter])

    def profile(self, handle: Any, samples: list[Any], numbers: Sequence[int]) -> list[tuple[int, float]]:
        if not handle.profile:
            raise NvmlFault(_NOT_SUPPORTED)
        if not samples:
            samples.append("first")
            return []
        return [
            (0, handle.profile[number]) if number in handle.profile else (_NOT_SUPPORTED, 0.0) for number in numbers
        ]

    def watch(self, handles: Sequence[Any]) -> tuple[Any, int]:
        self._check()
        return object(), sum(handle.watchable for handle in handles)

    def unwatch(self, events: Any) -> None:
        """Nothing to free."""

    def wait(self, events: Any, timeout_ms: int) -> tuple[Any, int, int | None] | None:
        """Return the next of ``events`` immediately."""
        self._check()
        if not self.events:
            self._pause(timeout_ms / 1000)
            return None
        event = self.events.pop(0)
        if isinstance(event, NvmlFault):
            raise event
        return event

    def same(self, one: Any, other: Any) -> bool:
        return one is other

    def _check(self) -> None:
        if self.broken is not None:
            raise NvmlFault(self.broken)


class InlineChild(Process):
    """A child that hangs or crashes at the GPUs that ``hang`` and ``crash`` name (None: opening; -1: listening)."""

    def __init__(self, node: "MemoryNode") -> None:
        self._node = node
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        clock = node.clock
        self._session = Session(node.nvml, monotonic=clock.monotonic, clock=lambda: epoch, sleep=clock.sleep)
        self._news = self._session.watch()
        self._request: int | None = -1
        self.ended = False

    def send(self, index: int | None) -> None:
        self._request = index

    def receive(self, timeout_s: float) -> Message:
        request, self._request = self._request, -1
        if request in self._node.hang:
            self._node.clock.sleep(timeout_s)
            raise Silent
        if request in self._node.crash:
            raise Ended("exit status -11")
        return next(self._news) if request == -1 else self._session.answer(request)

    def end(self) -> None:
        self.ended = True

    def is_gone(self) -> bool:
        return not self._node.stuck


class MemoryNode:
    """A node of which everything can be changed between two turns; ``stuck``: no killed child ever ends."""

    def __init__(self, gpus: int = 2) -> None:
        self.clock = Clock(datetime(2026, 3, 1, tzinfo=UTC))
        answers: dict[str, tuple[float, ...] | NvmlFault] = {"temperature": (40.0,), "power": (250_000.0,)}
        devices = [
            MemoryGpu(f"GPU-{index}", fields={83: 5000.0, 230: 0.0}, calls=dict(answers)) for index in range(gpus)
        ]
        self.nvml = MemoryNvml(devices, self.clock.sleep)
        self.hang: set[int | None] = set()
        self.crash: set[int | None] = set()
        self.children: list[InlineChild] = []
        self.stuck = False

    def spawn(self) -> InlineChild:
        self.children.append(InlineChild(self))
        return self.children[-1]

    def reader(self, **options: Any) -> NodeReader:
        clock = self.clock
        return NodeReader(self.spawn, "node7", clock=clock, monotonic=clock.monotonic, sleep=clock.sleep, **options)
