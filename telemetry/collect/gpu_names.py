"""Which GPU an index or a serial number on a node is: from a list that was given, or from what has been collected."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from telemetry.errors import InputError

_NAMES: Final = {
    "index": ("index", "slot", "gpu_index"),
    "gpu": ("gpu", "uuid", "gpu_uuid"),
    "serial": ("serial",),
}
_DO: Final = (
    "Give --gpus FILE, made on the node with `nvidia-smi --query-gpu=index,uuid,serial,pci.bus_id --format=csv`."
)


@dataclass(slots=True)
class GpuNames:
    """GPUs of one node."""

    by_serial: dict[str, str] = field(default_factory=dict)
    by_index: dict[str, str] = field(default_factory=dict)

    def find(self, index: str, serial: str | None) -> str | None:
        """Return the UUID; the serial number goes before the index, which changes when a GPU is lost."""
        if serial and serial in self.by_serial:
            return self.by_serial[serial]
        return self.by_index.get(index)

    @classmethod
    def of_inventory(cls, rows: Iterable[Mapping[str, Any]]) -> GpuNames:
        """Take GPUs from rows with ``gpu``, ``serial``, ``slot``; later rows go before earlier ones."""
        made = cls()
        for row in rows:
            gpu = row.get("gpu")
            if not isinstance(gpu, str):
                continue
            if isinstance(row.get("serial"), str):
                made.by_serial[row["serial"]] = gpu
            if isinstance(row.get("slot"), str):
                made.by_index[row["slot"]] = gpu
        return made


def read_gpu_names(path: Path) -> GpuNames:
    """Read a CSV of a node's GPUs, as ``nvidia-smi --query-gpu=index,uuid,serial,pci.bus_id --format=csv`` writes it.

    Raises ``InputError`` if the file cannot be read or has no columns ``index`` and ``uuid``.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"the list of GPUs cannot be read: {error}", str(path), _DO) from None
    header = [name.strip().lower() for name in rows[0]] if rows else []
    place = {own: next((header.index(name) for name in names if name in header), None) for own, names in _NAMES.items()}
    if place["index"] is None or place["gpu"] is None:
        raise InputError(f"the list of GPUs has no columns index and uuid, but {header}", str(path), _DO)
    made = GpuNames()
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(f"row {number} has {len(row)} fields, the header {len(header)}", str(path), _DO)
        gpu = row[place["gpu"]].strip()
        made.by_index[row[place["index"]].strip()] = gpu
        if place["serial"] is not None and row[place["serial"]].strip() not in ("", "[N/A]", "[Not Supported]"):
            made.by_serial[row[place["serial"]].strip()] = gpu
    return made


def unknown_gpu(index: str, serial: str | None, where: str) -> InputError:
    """Return the error that a GPU of a report cannot be named."""
    number = f", serial {serial}" if serial else ""
    return InputError(f"it is not known which GPU index {index}{number} is", where, _DO)
