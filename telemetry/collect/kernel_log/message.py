"""What a kernel message says about a GPU, its driver or the node: XIDs, losses without an XID, driver loads, boots."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from telemetry.xids.pci import normalise_pci_bus_id
from telemetry.xids.xid_message import mentions_xid, parse_xid_message

FALLEN_OFF: Final = "fallen_off_the_bus"
"""Code of ``failure`` events: the driver lost a GPU and says so without an XID."""

BOOT: Final = "boot"
"""Code of ``other`` events: the node's kernel started."""

_ADDRESS = r"(?P<address>(?:PCI:)?(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_LOST = re.compile(rf"NVRM:(?!.*\bXid\b).*?\bGPU\s+(?:at\s+)?{_ADDRESS}\W.*?fallen off the bus", re.DOTALL)
# At boot it is one sentence over four messages, of which the first names the GPU and the last what befell it.
LOSS_BEGINS: Final = re.compile(rf"NVRM:\s*The NVIDIA GPU\s+{_ADDRESS}\s*(?:\(.*)?\Z", re.DOTALL)
LOSS_ENDS: Final = re.compile(r"NVRM:\s*(?:installed in this system has\s+)?fallen off the bus and is not responding")
_DRIVER = re.compile(r"NVRM:\s*loading NVIDIA UNIX\b.*?\bKernel Module\b.*?\s(?P<version>\d{2,4}\.\d+(?:\.\d+)*)\b")
_KERNEL = re.compile(r"\s*Linux version (?P<version>\d+\.\d+\S*)\s")


class Unclear(Exception):
    """A message about an XID that has no code or no GPU."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An event that a message reports; the fields are as in :class:`telemetry.collect.event.Event`."""

    type: str
    code: str
    detail: str | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None


def read_message(message: str, *, boots: bool = True) -> Finding | None:
    """Read one kernel message, with or without what stands before ``NVRM:``; None if it reports no event.

    ``boots``: whether the kernel's first message is a boot; False where boots are known by their id.
    Raises ``Unclear``.
    """
    if "NVRM" not in message:
        kernel = _KERNEL.match(message) if boots else None
        return None if kernel is None else Finding("other", BOOT, f"Linux {kernel['version']}")
    if mentions_xid(message):
        xid = parse_xid_message(message)
        if xid is None:
            raise Unclear
        return Finding("xid", xid.code, xid.detail, xid.gpu, xid.pci_bus_id)
    if driver := _DRIVER.search(message):
        return Finding("driver", driver["version"], "open kernel module" if "Open Kernel" in message else None)
    lost = _LOST.search(message)
    return None if lost is None else lost_gpu(normalise_pci_bus_id(lost["address"]))


def lost_gpu(pci_bus_id: str | None) -> Finding:
    """Return the finding that a GPU is lost; of a whole node where the address is unknown."""
    return Finding("failure", FALLEN_OFF, "the driver says that the GPU fell off the bus", None, pci_bus_id)
