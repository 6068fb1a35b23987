"""Identities of GPUs: UUIDs, serial numbers and PCI addresses, and placeholders that identify nothing.

An index or slot is not an identity, because devices are renumbered when one is lost. It identifies a GPU only at a time
at which both were observed together.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Final

_ADDRESS: Final = re.compile(
    r"\s*(?:\S*/)?(?:pci(?:e|[ _]?bus)?[:@ -])?\s*(?:(?:0x)?(?P<domain>[0-9a-f]{1,8}):)?(?:0x)?(?P<bus>[0-9a-f]{1,2})"
    r":(?:0x)?(?P<device>[01]?[0-9a-f])(?:\.(?:0x)?(?P<function>[0-7]))?\s*\Z",
    re.IGNORECASE,
)
_IN_NAMES: Final = re.compile(
    r"(?:pci[-_])?([0-9a-f]{4,8})([-_])([0-9a-f]{2})\2([0-9a-f]{2})[._-]([0-7])", re.IGNORECASE
)
# Labels and file names have no colons: ``0000_3b_00.0``, ``pci-0000-3b-00-0``.


@lru_cache(maxsize=4096)
def normalise_pci_bus_id(text: str) -> str | None:
    """Return ``domain:bus:device`` in lower case with 8, 2 and 2 digits; None if ``text`` is not a PCI address.

    ``text``: ``00000000:3B:00.0`` (NVML), ``0000:3b:00.0`` (Linux), ``PCI:0000:3b:00`` (kernel messages),
    ``pci-0000:3b:00.0`` (udev), ``0x0000:0x3b:0x00.0x0``, ``3b:00.0`` (domain 0), or a sysfs path.

    The PCI function is dropped: kernel messages omit it, and a GPU is always function 0 of its device.

    >>> normalise_pci_bus_id("PCI:0000:3B:00"), normalise_pci_bus_id("00000000:3b:00.0")
    ('00000000:3b:00', '00000000:3b:00')
    """
    named = _IN_NAMES.fullmatch(text.strip())
    match = _ADDRESS.match(text if named is None else f"{named[1]}:{named[3]}:{named[4]}.{named[5]}")
    if match is None:
        return None
    domain, bus, device = (int(match[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:08x}:{bus:02x}:{device:02x}"


_UUID: Final = re.compile(
    r"(?:[\w.-]+/[\w.-]+=)?[^\w-]*(?:uuid\W+)?(?P<kind>gpu-|mig-)?"
    r"(?P<hex>[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12})(?:::\d{1,4})?\W*"
)
# The prefix ``nvidia.com/gpu=`` is from device names of the Container Device Interface, and ``::3`` numbers the shares
# of a GPU that the device plugin of Kubernetes divides.
_MIG_OF_GPU: Final = re.compile(r"(?:mig-)?(?P<gpu>gpu-[0-9a-f-]+)/(?P<gi>\d+)/(?P<ci>\d+)")
_NUMBER: Final = re.compile(r"0*(\d{4,}?)(?:\.0)?")
"""A serial number of digits; spreadsheets drop its leading zeros."""
_REPEATS: Final = 6
_PREFIX: Final = re.compile(r"(?:gpu|mig|nic|device)[-_:]|0x")


@lru_cache(maxsize=1 << 16)
def device_key(text: str) -> str:
    """Return the comparison key of a UUID or serial number.

    It ignores letter case, and the prefix ``GPU-`` and dashes of a UUID; it keeps the prefix ``MIG-``.
    """
    text = text.strip().casefold()
    match = _UUID.fullmatch(text)
    if match is None:
        return text
    return ("mig-" if match["kind"] == "mig-" else "") + match["hex"].replace("-", "")


@lru_cache(maxsize=1 << 16)
def is_placeholder(text: str | None) -> bool:
    """Whether a UUID or serial number identifies nothing.

    True for the values in ``placeholders.csv``, and for one repeated digit or letter, e.g. an all-zero UUID.
    """
    if text is None:
        return True
    text = text.strip().casefold()
    uuid = _UUID.fullmatch(text)
    text = text if uuid is None else uuid["hex"]
    value = _PREFIX.sub("", text, count=1)
    letters = "".join(letter for letter in value if letter.isalnum())
    # ``0`` is not a serial number, but operators may name a device ``gpu-0`` or ``a``.
    repeats = len(set(letters)) <= 1 and (len(letters) >= _REPEATS or (value == text and not letters.strip("0")))
    return repeats or any(_placeholder().fullmatch(form) for form in (text, value))


def parent_of_mig(text: str) -> str | None:
    """Return the GPU of a MIG instance named ``MIG-GPU-…/1/0`` or ``GPU-…/1/0``; None for other names."""
    match = _MIG_OF_GPU.fullmatch(text.strip().casefold())
    return None if match is None else "GPU-" + match["gpu"].removeprefix("gpu-")


def place_identity(node: str, *, pci_bus_id: str | None = None, slot: str | None = None) -> str | None:
    """Return the identity of a GPU without UUID and serial number: its node and PCI address, or else its slot.

    It identifies the location: a replacement GPU has the same identity.
    """
    if pci_bus_id is not None:
        return f"{node}@{pci_bus_id}"
    return None if slot is None else f"{node}@slot-{slot}"


class GpuNames:
    """Resolves names of GPUs.

    ``gpus``: known identities, in the spelling of results.
    ``other_names``: further names of these GPUs, e.g. serial numbers.
    """

    def __init__(self, gpus: Iterable[str], other_names: Mapping[str, str] | None = None) -> None:
        self.gpus = frozenset(gpus)
        by_key: dict[str, set[str]] = {}
        for gpu in self.gpus:
            by_key.setdefault(device_key(gpu), set()).add(gpu)
        for name, gpu in (other_names or {}).items():
            if not is_placeholder(name):
                by_key.setdefault(device_key(name), set()).add(gpu)
        by_number: dict[str, set[str]] = {}
        for key, named in by_key.items():
            if (number := _NUMBER.fullmatch(key)) is not None:
                by_number.setdefault(number[1], set()).update(named)
        by_key = by_number | by_key
        # A name shared by two GPUs identifies neither.
        self._by_key = {key: gpus.pop() for key, gpus in by_key.items() if len(gpus) == 1}

    def find(self, name: str) -> str | None:
        """Return the GPU with this name; None if it is unknown or ambiguous."""
        if name in self.gpus:
            return name
        key = device_key(name)
        number = None if key in self._by_key else _NUMBER.fullmatch(key)
        return self._by_key.get(key if number is None else number[1])

    def written(self, name: str) -> str:
        """Return the known spelling of a name, or the name itself if it is unknown or ambiguous."""
        return self.find(name) or name


@cache
def _placeholder() -> re.Pattern[str]:
    text = resources.files(__package__).joinpath("placeholders.csv").read_text(encoding="utf-8")
    return re.compile("|".join(f"(?:{row['pattern']})" for row in csv.DictReader(text.splitlines())))
