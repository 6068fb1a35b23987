"""PCI addresses in one form, from each form that tools write."""

import re
from functools import lru_cache
from typing import Final

_ADDRESS: Final = re.compile(
    r"\s*(?:\S*/)?(?:pci(?:e|[ _]?bus)?[:@ -])?\s*(?:(?:0x)?(?P<domain>[0-9a-f]{1,8}):)?(?:0x)?(?P<bus>[0-9a-f]{1,2})"
    r":(?:0x)?(?P<device>[01]?[0-9a-f])(?:\.(?:0x)?(?P<function>[0-7]))?\s*\Z",
    re.IGNORECASE,
)
_IN_NAMES: Final = re.compile(
    r"(?:pci[-_])?([0-9a-f]{4,8})([-_])([0-9a-f]{2})\2([0-9a-f]{2})[._-]([0-7])", re.IGNORECASE
)
# Labels and file names hold no colon: ``0000_3b_00.0``, ``pci-0000-3b-00-0``.


@lru_cache(maxsize=4096)
def normalise_pci_bus_id(text: str) -> str | None:
    """Return ``domain:bus:device`` in lower case with 8, 2 and 2 digits; None if ``text`` is no PCI address.

    ``text``: ``00000000:3B:00.0`` (NVML), ``0000:3b:00.0`` (Linux), ``PCI:0000:3b:00`` (kernel messages),
    ``pci-0000:3b:00.0`` (udev), ``0x0000:0x3b:0x00.0x0``, ``3b:00.0`` (domain 0), a path in sysfs.

    The function is dropped: kernel messages omit it, and every GPU is function 0 of its device.

    >>> normalise_pci_bus_id("PCI:0000:3B:00"), normalise_pci_bus_id("00000000:3b:00.0")
    ('00000000:3b:00', '00000000:3b:00')
    """
    named = _IN_NAMES.fullmatch(text.strip())
    match = _ADDRESS.match(text if named is None else f"{named[1]}:{named[3]}:{named[4]}.{named[5]}")
    if match is None:
        return None
    domain, bus, device = (int(match[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:08x}:{bus:02x}:{device:02x}"
