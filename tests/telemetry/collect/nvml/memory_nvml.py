"""NVML in memory: the port's twin for tests and rehearsals, with faults to switch on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from telemetry.collect.nvml.library import Identity, Library, NvmlFault
from telemetry.collect.nvml.questions import Call

_NOT_SUPPORTED = 3


@dataclass(slots=True)
class MemoryGpu:
    """A GPU that answers what it was told to.

    ``fields``, ``calls``: field number and question to NVML's own numbers, or to the code of a failure (an
    ``NvmlFault``); absent ones are not supported.
    ``links``: (link, counter) to its value; ``down`` holds the links that are not active.
    """

    gpu: str
    fields: dict[int, float | NvmlFault] = field(default_factory=dict)
    calls: dict[str, tuple[float, ...] | NvmlFault] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    down: set[int] = field(default_factory=set)
    profile: dict[int, float] = field(default_factory=dict)
    lost: int | None = None
    watchable: bool = True
    asked: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise if the GPU is lost."""
        if self.lost is not None:
            raise NvmlFault(self.lost)


class MemoryNvml(Library):
    """A node whose driver is a list of :class:`MemoryGpu`."""

    def __init__(self, gpus: Sequence[MemoryGpu], *, version: str = "580.95.05") -> None:
        self.gpus = list(gpus)
        self.version = version
        self.broken: int | None = None
        self.events: list[tuple[MemoryGpu, int, int | None] | NvmlFault] = []
        self._sampled: set[int] = set()

    def open(self) -> None:
        """Open, unless ``broken`` says how that fails."""
        self._check()

    def driver(self) -> str:
        """Return ``version``."""
        self._check()
        return self.version

    def count(self) -> int:
        """Return the number of GPUs."""
        self._check()
        return len(self.gpus)

    def handle(self, index: int) -> MemoryGpu:
        """Return the GPU itself."""
        self._check()
        self.gpus[index].check()
        return self.gpus[index]

    def identity(self, index: int, handle: Any) -> Identity:
        """Return an identity made of the UUID and the index."""
        handle.check()
        return Identity(index, handle.gpu, f"serial-{index}", "Memory GPU", f"00000000:{index + 1:02X}:00.0")

    def fields(self, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return the GPU's fields."""
        self._check()
        handle.check()
        handle.asked.append("fields")
        found = [handle.fields.get(number, NvmlFault(_NOT_SUPPORTED)) for number in numbers]
        return [(each.code, 0.0) if isinstance(each, NvmlFault) else (0, float(each)) for each in found]

    def call(self, call: Call, handle: Any) -> tuple[float, ...]:
        """Return the GPU's answer."""
        self._check()
        handle.check()
        handle.asked.append(call.name)
        answer: tuple[float, ...] | NvmlFault = handle.calls.get(call.name, NvmlFault(_NOT_SUPPORTED))
        if isinstance(answer, NvmlFault):
            raise answer
        return answer

    def links(self) -> int:
        """Return the highest number of links."""
        return 4

    def link_active(self, handle: Any, link: int) -> bool:
        """Whether the link is not ``down``."""
        handle.check()
        if not any(each == link for each, _ in handle.links):
            raise NvmlFault(_NOT_SUPPORTED)
        return link not in handle.down

    def link_counter(self, handle: Any, link: int, counter: int) -> float:
        """Return a counter of a link."""
        handle.check()
        if (link, counter) not in handle.links:
            raise NvmlFault(_NOT_SUPPORTED)
        return float(handle.links[link, counter])

    def profile(self, index: int, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return the metrics, but not at the first call."""
        handle.check()
        if not handle.profile:
            raise NvmlFault(_NOT_SUPPORTED)
        if index not in self._sampled:
            self._sampled.add(index)
            return []
        return [
            (0, handle.profile[number]) if number in handle.profile else (_NOT_SUPPORTED, 0.0) for number in numbers
        ]

    def forget(self, index: int) -> None:
        """Forget the first sample."""
        self._sampled.discard(index)

    def watch(self, handles: Sequence[Any]) -> tuple[Any, list[NvmlFault | None]]:
        """Register every GPU that is ``watchable``."""
        self._check()
        return object(), [None if each.watchable else NvmlFault(_NOT_SUPPORTED) for each in handles]

    def unwatch(self, events: Any) -> None:
        """Nothing to free."""

    def wait(self, events: Any, timeout_ms: int) -> tuple[Any, int, int | None] | None:
        """Return the next of ``events`` at once."""
        del events, timeout_ms
        self._check()
        if not self.events:
            return None
        event = self.events.pop(0)
        if isinstance(event, NvmlFault):
            raise event
        return event

    def same(self, one: Any, other: Any) -> bool:
        """Whether it is the same object."""
        return one is other

    def _check(self) -> None:
        if self.broken is not None:
            raise NvmlFault(self.broken)
