"""What NVML answers instead of a value, sorted by what has to be done about it.

The numbers are those of ``nvmlReturn_t`` in ``nvml.h``; they have never changed.
"""

from __future__ import annotations

from typing import Final

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
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10

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
