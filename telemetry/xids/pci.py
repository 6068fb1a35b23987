"""PCI addresses: every width in which tools write one, brought to a single form."""

from __future__ import annotations

import re
from functools import lru_cache

_ADDRESS = re.compile(
    r"\s*(?:PCI:)?(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"(?:\.(?P<function>[0-7]))?\s*\Z",
    re.IGNORECASE,
)


@lru_cache(maxsize=4096)
def normalise_pci_bus_id(text: str) -> str | None:
    """Return ``domain:bus:device`` in lower case with 8, 2 and 2 digits, or None if ``text`` is no PCI address.

    ``text``: any of the usual forms: NVML writes ``00000000:3B:00.0``, Linux ``0000:3b:00.0``, kernel messages
    ``PCI:0000:3b:00`` without a function, some tools ``3b:00.0`` without a domain.

    The function is left out: kernel messages omit it, and every GPU is function 0 of its device.

    >>> normalise_pci_bus_id("PCI:0000:3B:00"), normalise_pci_bus_id("00000000:3b:00.0")
    ('00000000:3b:00', '00000000:3b:00')
    """
    match = _ADDRESS.match(text)
    if match is None:
        return None
    domain, bus, device = (int(match[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:08x}:{bus:02x}:{device:02x}"
