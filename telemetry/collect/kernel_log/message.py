"""What a kernel message says about a GPU, its driver or the node: XIDs, losses without an XID, driver loads, boots."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from telemetry.xids.pci import normalise_pci_bus_id
from telemetry.xids.xid_message import (
    mentions_xid,
    parse_gpu_introduction,
    parse_xid_message,
)

FALLEN_OFF: Final = "fallen_off_the_bus"
"""Code of ``failure`` events: the driver lost a GPU and says so without an XID."""

BOOT: Final = "boot"
"""Code of ``other`` events: the node's kernel started."""

_ADDRESS = r"(?:PCI:)?(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_LOST = re.compile(rf"NVRM:(?!.*\bXid\b).*?\bGPU\s+(?:at\s+)?(?P<address>{_ADDRESS})\W.*?fallen off the bus", re.DOTALL)
# The oldest form is one sentence over four messages, of which the first names the GPU and the last what befell it.
_LOST_FIRST = re.compile(rf"NVRM:\s*The NVIDIA GPU\s+(?P<address>{_ADDRESS})\s*(?:\(.*)?\Z", re.DOTALL)
_LOST_LAST = re.compile(r"NVRM:\s*(?:installed in this system has\s+)?fallen off the bus and is not responding")
_DRIVER = re.compile(r"NVRM:\s*loading NVIDIA UNIX\b.*?\bKernel Module\b.*?\s(?P<version>\d{2,4}\.\d+(?:\.\d+)*)\b")
_KERNEL = re.compile(r"Linux version (?P<version>\d+\.\d+\S*)\s")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a message says.

    ``kind``: ``event``: as the other fields say. ``unclear``: about an XID, but without a code or a GPU.
    ``introduction``: ``pci_bus_id`` is ``gpu``. ``lost_begins``: ``pci_bus_id`` begins a sentence that may end in its
    loss.
    ``type``, ``code``, ``detail``, ``gpu``, ``pci_bus_id``: as in :class:`telemetry.collect.event.Event`.
    """

    kind: Literal["event", "unclear", "introduction", "lost_begins", "lost_ends"]
    type: str = "other"
    code: str | None = None
    detail: str | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None


def read_message(message: str, *, boots: bool = True) -> Finding | None:
    """Read one kernel message; None if it says nothing of interest.

    ``message``: with or without what stands before ``NVRM:``.
    ``boots``: whether the kernel's first message is a boot; False where boots are known by their id.
    """
    if "NVRM" in message:
        return next((found for read in _READERS if (found := read(message)) is not None), None)
    kernel = _KERNEL.match(message.lstrip()) if boots and "Linux version" in message else None
    return None if kernel is None else Finding("event", "other", BOOT, f"Linux {kernel['version']}")


def _xid(message: str) -> Finding | None:
    if not mentions_xid(message):
        return None
    xid = parse_xid_message(message)
    if xid is None:
        return Finding("unclear", "xid")
    return Finding("event", "xid", xid.code, xid.detail, xid.gpu, xid.pci_bus_id)


def _introduction(message: str) -> Finding | None:
    introduced = parse_gpu_introduction(message)
    return None if introduced is None else Finding("introduction", gpu=introduced[1], pci_bus_id=introduced[0])


def _driver(message: str) -> Finding | None:
    match = _DRIVER.search(message)
    if match is None:
        return None
    return Finding("event", "driver", match["version"], "open kernel module" if "Open Kernel" in message else None)


def _loss(message: str) -> Finding | None:
    lost = _LOST.search(message)
    if lost is not None:
        return lost_gpu(normalise_pci_bus_id(lost["address"]))
    if _LOST_LAST.search(message):
        return Finding("lost_ends")
    begun = _LOST_FIRST.search(message)
    return None if begun is None else Finding("lost_begins", pci_bus_id=normalise_pci_bus_id(begun["address"]))


def lost_gpu(pci_bus_id: str | None) -> Finding:
    """Return the finding that a GPU is lost; of a whole node where the address is unknown."""
    return Finding("event", "failure", FALLEN_OFF, "the driver says that the GPU fell off the bus", None, pci_bus_id)


_READERS: Final = (_xid, _introduction, _driver, _loss)
