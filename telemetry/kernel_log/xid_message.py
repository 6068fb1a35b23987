"""One ``NVRM: Xid`` message: GPU, code and detail.

Messages of many driver ages differ: with or without ``PCI:`` before the address, with the GPU's UUID, with a MIG
instance (``GPU-I:05``), with ``pid=`` and ``name=`` before the text, and, for the NVLink 5 codes 144 to 150, with a
sub-code, a severity and a link that decide what the event means.
"""

import re
from typing import Final, NamedTuple

from telemetry.identity.pci import normalise_pci_bus_id

_DESCRIBED: Final = """
    13 31 32 38 43 45 46 48 61 62 63 64 68 69 74 79 92 94 95 109 110 119 120 121 122 123
    136 137 140 143 144 145 146 147 148 149 150 154 155 156 157 158 171 172
"""
DESCRIBED_XIDS: Final = frozenset(map(int, _DESCRIBED.split()))
"""Codes with a known meaning (NVIDIA's XID catalogue, Ampere and later); others are kept and reported."""

GPU_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
"""The UUID of a GPU in a text."""

DETAIL_LENGTH: Final = 400
"""Characters of a message that are kept in an event."""

_NVLINK5 = range(144, 151)
_MESSAGE = re.compile(r"NVRM:\s*Xid\s*\((?P<place>[^)]*)\)\s*:\s*(?P<code>\d{1,9})\b(?P<rest>.*)", re.DOTALL)
_MENTION = re.compile(r"NVRM:.*\bXid\b")
_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?")
_PROCESS = re.compile(r"pid=(?P<pid>[^,]*)(?:,\s*name=(?P<name>[^,]*))?(?:,\s*|$)")
_LINK = re.compile(r"(?P<sub>[A-Z][A-Z0-9_/]*)\s+(?P<severity>Fatal|Nonfatal)\b(?:.*?\bLink\s+(?P<link>-?\d+))?")
_RECOVERY = re.compile(
    r"recovery action changed from (?P<old>0x[0-9a-fA-F]+) \((?P<was>[^)]*)\) "
    r"to (?P<new>0x[0-9a-fA-F]+) \((?P<now>[^)]*)\)"
)


class KernelFinding(NamedTuple):
    """What a message reports; ``type`` is empty where that is no event, ``unclear`` for an XID without number or GPU.

    ``gpu``: UUID, where the message has it.
    ``again_s``: the same of one GPU within this time is part of the first report.
    ``known``: counts only if the log has named its device as a GPU.
    """

    type: str
    code: str = ""
    detail: str | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None
    part: str = ""
    again_s: int = 0
    known: bool = False


def mentions_xid(message: str) -> bool:
    """Whether a message is about an XID, parsable or not."""
    return _MENTION.search(message) is not None


def parse_xid_message(message: str) -> KernelFinding | None:
    """Parse the text of a kernel message, with whatever is before ``NVRM:``; None if it has no code or no GPU.

    ``detail`` is the text without process; for 144 to 150 sub-code, severity and link (``NETIR_LINK_EVT Fatal link
    00``), for 154 the recovery action.
    """
    match = _MESSAGE.search(message)
    if match is None:
        return None
    place = match["place"]
    uuid = GPU_UUID.search(place)
    address = _ADDRESS.search(place[: uuid.start()] + place[uuid.end() :] if uuid else place)
    bus = normalise_pci_bus_id(address[0]) if address else None
    if bus is None and uuid is None:
        return None
    code = str(int(match["code"]))
    rest = match["rest"].strip().lstrip(",").strip()
    return KernelFinding("xid", code, _detail(int(code), rest), uuid[0] if uuid else None, bus)


def _detail(code: int, rest: str) -> str | None:
    process = _PROCESS.match(rest)
    text = rest[process.end() :] if process else rest
    if code in _NVLINK5:
        link = _LINK.match(text)
        if link is not None:
            return f"{link['sub']} {link['severity']}" + (f" link {link['link']}" if link["link"] else "")
    if code == 154:
        action = _RECOVERY.search(text)
        if action is not None:
            return f"recovery action {action['now']} ({action['new']}), was {action['was']} ({action['old']})"
    if process and not text:
        name = f", name={process['name']}" if process["name"] else ""
        text = f"pid={process['pid']}{name}"
    return text[:DETAIL_LENGTH] or None
