"""XIDs and GPUs that text names: messages of node conditions, Kubernetes events, gpud and tickets."""

import json
import re
from collections.abc import Iterator
from typing import Final

from telemetry.identity.devices import normalise_pci_bus_id
from telemetry.kernel_log.catalogue import GPU_UUID, KernelFinding, parse_xid_message

_MAX_TEXT: Final = 16_384
_MAX_CODES: Final = 32
_PCI: Final = re.compile(
    r"\bPCI:\s*([0-9A-Fa-f]{1,8}(?::[0-9A-Fa-f]{1,4}){1,2}(?:\.[0-7])?)"
    r"|(?<![0-9A-Fa-f:-])([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?)(?![0-9A-Fa-f:])"
)
_SEGMENTS: Final = re.compile(r"(?=NVRM:)|\s*Recommended Action=")
# Start of a kernel message inside a longer one, and its end in NVSentinel's.
_KIND: Final = r"(?:[\s_-]?(?:critical|fatal|error|event|code|number)s?)*"
_LIST: Final = r"\d{1,3}(?!\d)(?:[\s,;/|&]+(?:and\s+)?(?:xid[\s:=#-]*)?\d{1,3}(?!\d))*"
_COUNTED: Final = r"\s*(?:times|occurrences?|hours?|minutes?|days?|nodes?|gpus)\b|x\b"
_NOT_A_CODE: Final = re.compile(
    rf"(?P<codes>(?<!s)xids?{_KIND}[\s:#=_-]*{_LIST}(?!{_COUNTED}|:\d|(?<=\D\d)\s*(?:errors?|in the)\b))"
    rf"|{GPU_UUID.pattern}|{_PCI.pattern}"
    r"|\bgpus[\s#:=_-]*\d+(?:\s*(?:,|and|&|/)\s*\d+)+"
    r"|\b(?:gpu|device|slot|index|minor|pid|count|times|link|port|node|host|server|rack|ticket|case|driver|after|since)s?"
    r"[\s#:=_-]*\d+[\d.:]*"
    r"|\b(?![a-z]*(?:xid|code|error)s?-?\d)[a-z]+-?\d[\w.-]*"  # A100, gpu01, dgx-17
    r"|(?<![\d.])\d+(?:[.:]\d+)+|\d{4}-\d\d-\d\dT?[\d:.]*Z?"  # addresses, versions and times
    rf"|\b\d+(?:{_COUNTED}|\s*(?:errors?|gpu|in the)\b)",
    re.IGNORECASE,
)
_AFTER_XID: Final = re.compile(
    rf"(?:(?<!s)xids?|\bcodes?|errorcodes?){_KIND}\D{{0,40}}?({_LIST})",
    re.IGNORECASE,
)
_ONLY_CODES: Final = re.compile(r"[\s\[({\"']*((?:\d{1,3}[\s,;/|\"'\])}]*)+)")


def xid_faults(name: str, reason: str, message: str) -> list[KernelFinding]:
    """Return a fault for each XID in a condition's or event's message, else in its reason, else in its name.

    Kernel messages (``NVRM: Xid (PCI:…): 79, …``) give code and GPU. Otherwise a code follows ``XID`` (``XID=79``,
    ``Xid79``, ``XIDs: 48, 79``, ``ErrorCode:79``), or the reason is a list of codes or a JSON object keyed by code.
    Repeated kernel messages are separate faults.
    """
    message, reason = message[:_MAX_TEXT], reason[:_MAX_TEXT]
    segments = [segment for segment in _SEGMENTS.split(message) if segment]
    kernel = [xid for xid in map(parse_xid_message, segments) if xid is not None]
    if kernel:
        return kernel
    faults = [
        KernelFinding("xid", code, None, *named_gpu(segment)) for segment in segments for code in xid_codes(segment)
    ]
    if not faults:
        codes = xid_codes(reason) or xid_codes(name)
        if "xid" in f"{name} {reason}".lower():  # other lists of numbers are counts or indices
            codes = listed_codes(reason) or codes or listed_codes(message)
        faults = [KernelFinding("xid", code, None, *named_gpu(message)) for code in codes]
    return list(dict.fromkeys(faults))[:_MAX_CODES]


def lost_gpus(message: str) -> list[KernelFinding]:
    """Return a fault for each GPU that a message names by PCI address."""
    return [KernelFinding("failure", pci_bus_id=address) for address in _addresses(message[:_MAX_TEXT])]


def gpu_names(text: str) -> list[str]:
    """Return the UUIDs and PCI addresses in a text."""
    return [*dict.fromkeys(GPU_UUID.findall(text)), *_addresses(text)]


def named_gpu(text: str) -> tuple[str | None, str | None]:
    """Return UUID and PCI address in a text; None for each that occurs not at all or with several values."""
    uuids, addresses = list(dict.fromkeys(GPU_UUID.findall(text))), _addresses(text)
    return (uuids[0] if len(uuids) == 1 else None), (addresses[0] if len(addresses) == 1 else None)


def _addresses(text: str) -> list[str]:
    written = (with_prefix or bare for with_prefix, bare in _PCI.findall(text))
    return list(dict.fromkeys(filter(None, map(normalise_pci_bus_id, written))))


def xid_codes(text: str) -> list[str]:
    """Return the XIDs in prose, in order; numbers of nodes, GPUs, times and counts are none."""
    plain = _NOT_A_CODE.sub(lambda match: match["codes"] or " ", text)
    return list(dict.fromkeys(code for listed in _AFTER_XID.findall(plain) for code in _numbers(listed)))


def listed_codes(text: str) -> list[str]:
    """Return the codes of a text that is a list of codes or a JSON object keyed by code."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        match = _ONLY_CODES.fullmatch(text)
        return [] if match is None else list(_numbers(match[1]))
    if isinstance(content, dict):
        content = [key for key, present in content.items() if present]
    listed = content if isinstance(content, list) else [content]
    return [code for entry in listed if isinstance(entry, str | int) for code in _numbers(str(entry))]


def _numbers(text: str) -> Iterator[str]:
    return (str(int(number)) for number in re.findall(r"(?<!\d)\d{1,3}(?!\d)", text) if int(number))
