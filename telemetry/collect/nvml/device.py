"""What the collector needs of NVML: a port, so that its behaviour is tested without a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Identity:
    """What is fixed about a GPU while the driver lists it.

    ``gpu``: UUID, of the parent where the GPU is split into MIG instances.
    ``serial``, ``model``, ``pci_bus_id``, ``nvlink_domain``: as NVML writes them; None where the board does not tell.
    The domain is ``CLUSTER.CLIQUE`` of the fabric.
    """

    index: int
    gpu: str
    serial: str | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    nvlink_domain: str | None = None


class Nvml(Protocol):
    """The driver's library. Every method raises :class:`telemetry.collect.nvml.faults.NvmlFault`, and any may hang."""

    def open(self) -> None:
        """Initialise the library."""

    def close(self) -> None:
        """Let go of the driver."""

    def driver(self) -> str:
        """Return the driver's version."""

    def count(self) -> int:
        """Return how many GPUs the driver lists."""

    def handle(self, index: int) -> Any:
        """Return the handle of a GPU."""

    def identity(self, index: int, handle: Any) -> Identity:
        """Return what is fixed about a GPU."""

    def fields(self, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return code and value of each field."""

    def call(self, name: str, handle: Any) -> tuple[float, ...]:
        """Return the answer to a question of :data:`telemetry.collect.nvml.probes.CALLS`."""

    def links(self) -> int:
        """Return how many NVLink links a GPU can have."""

    def link_active(self, handle: Any, link: int) -> bool:
        """Whether a link is up."""

    def link_counter(self, handle: Any, link: int, counter: int) -> float:
        """Return an error counter of a link."""

    def profile(self, index: int, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return code and value of profiling metrics since the previous call; nothing at the first."""

    def forget(self, index: int) -> None:
        """Drop what is remembered of a GPU."""

    def watch(self, handles: Sequence[Any]) -> tuple[Any, list[Exception | None]]:
        """Make an event set for XIDs; return it and, for each handle, why it was refused."""

    def unwatch(self, events: Any) -> None:
        """Free an event set."""

    def wait(self, events: Any, timeout_ms: int) -> tuple[Any, int, int | None] | None:
        """Wait for an XID; return handle, XID and GPU instance, or None when the time is over."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether two handles are of one GPU."""
