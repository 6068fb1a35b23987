"""What the collector needs of NVML: a port, so that its behaviour is tested without a driver; and NVML's errors.

The numbers of errors are those of ``nvmlReturn_t`` in ``nvml.h``; they have never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

NAMES: Final = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    7: "insufficient_size",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_is_lost",
    16: "reset_required",
    17: "operating_system",
    18: "lib_rm_version_mismatch",
    19: "in_use",
    20: "memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    29: "invalid_state",
    999: "unknown",
}
"""Name of each code, as reports and counters show it."""

LIBRARY_NOT_FOUND: Final = 12

LOST: Final = frozenset({15, 28})
"""The GPU no longer answers (it fell off the bus), or the driver has dropped it."""

UNSUPPORTED: Final = frozenset({3, 13, 22, 25, 26})
"""This device, driver or version of a structure does not have the value: not worth asking again soon."""

RELOADED: Final = frozenset({1, 9, 18})
"""The driver under the library went away or was replaced: everything has to be opened anew."""

ABSENT: Final = frozenset({9, 12})
"""There is no driver (nothing installed, or its module is not loaded)."""


class NvmlFault(Exception):
    """A call into NVML that gave no value.

    ``code``: ``nvmlReturn_t``.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def name(self) -> str:
        """Name of the code, ``error_N`` where it is newer than this table."""
        return NAMES.get(self.code, f"error_{self.code}")

    def __str__(self) -> str:
        return f"NVML answered {self.name} ({self.code})"


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
    """The driver's library. Every method raises :class:`telemetry.collect.nvml.device.NvmlFault`, and any may hang."""

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
        """Return the answer to a question of :data:`telemetry.collect.nvml.reader.CALLS`."""

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
