"""Output of ``nvidia-smi dmon`` and ``dcgmi dmon``: space-separated cells, GPUs by index, headers every few rows.

Neither gives the node or GPU UUIDs. ``nvidia-smi dmon -o DT`` writes date and time; rows of ``dcgmi dmon`` are
prefixed with a timestamp by ``ts`` or a recording script. ``dmon.csv`` maps the columns to channels.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from foundation.errors import InputError
from telemetry.importing.files.csv_tables import REPEATED_HEADER, FileRows
from telemetry.importing.files.printed import OTHER_ENTITY, printed_rows
from telemetry.importing.quarantine import Quarantine
from telemetry.packing import open_packed
from telemetry.values.tables import read_table

_HEADER: Final = re.compile(r"(?P<before>[^#]*)#\s*(?P<names>(?:Date\s+)?(?:Time\s+)?gpu\s.*|Entity\s.*)\s*")
_UNITS: Final = re.compile(r"[^#]*#.*\bIdx\b.*\s*|(?:[^#]*\s)?I[Dd]\s*")
_CHANNELS: Final = {row["name"]: row for row in read_table("dmon.csv", __file__)}
_BEGINNING: Final = 1 << 12


class _Header(NamedTuple):
    """``n_leading``: number of unnamed cells at the start of a row, written by ``ts`` or a script."""

    n_leading: int
    names: list[str]


def is_dmon(path: Path) -> bool:
    """Whether a file is dmon output, based on its first bytes."""
    return _read_header(path) is not None


def dmon_columns(path: Path) -> list[str]:
    """Return the dataset columns of a table; unknown ones keep their dmon name.

    Raises ``InputError`` if rows have no date or time.
    """
    header = _read_header(path)
    assert header is not None
    if "pid" in header.names:
        advice = "Record the GPUs: `nvidia-smi dmon -o DT`."
        raise InputError("this is a table of processes, as `nvidia-smi pmon` prints it", str(path), advice)
    has_date, has_time = (name in header.names for name in ("Date", "Time"))
    if not header.n_leading and not (has_date and has_time):
        lacking = "date" if has_time else "time" if has_date else "date and time"
        problem = f"the rows of this table of dmon have no {lacking}"
        advice = "Record it with `nvidia-smi dmon -o DT`, or pipe it through `ts '%FT%T%z'` (moreutils)."
        raise InputError(problem, str(path), advice)
    return ["timestamp", "slot", *filter(None, map(_column, header.names))]


def _column(name: str) -> str | None:
    if name in ("Date", "Time", "gpu", "Entity"):
        return None
    row = _CHANNELS.get(name)
    if row is None:
        return name
    return f"{row['channel']} [{row['unit']}]" if row["unit"] and row["channel"] else row["channel"] or None


def read_dmon(path: Path, table: str, quarantine: Quarantine) -> Iterator[FileRows]:
    """Read a table in batches; see :func:`telemetry.importing.files.printed.printed_rows`."""
    first = _read_header(path)
    assert first is not None

    def read(line: str) -> list[str] | str | None:
        if (header := _header(line)) is not None:
            return REPEATED_HEADER if header == first else None
        is_row = line.strip() and _UNITS.fullmatch(line) is None
        return _row(line.replace(",", " ").split(), first) if is_row else ""

    return printed_rows(path, table, quarantine, dmon_columns(path), read)


def _read_header(path: Path) -> _Header | None:
    with open_packed(path) as (_, content):
        lines = content.read(_BEGINNING).decode("utf-8-sig", "replace").splitlines()
    return next(filter(None, map(_header, lines)), None)


def _header(line: str) -> _Header | None:
    match = _HEADER.fullmatch(line.replace(",", " ")) if "#" in line else None
    return None if match is None else _Header(len(match["before"].split()), match["names"].split())


def _row(cells: list[str], header: _Header) -> list[str] | str:
    """Return the cells in the order of :func:`dmon_columns`, or the reason for skipping the row."""
    leading, named = cells[: header.n_leading], cells[header.n_leading :]
    if header.names[0] == "Entity":
        if named[:1] != ["GPU"]:
            return OTHER_ENTITY
        del named[0]
    if len(named) != len(header.names):
        return f"expected {len(header.names)} cells"
    cell_of = dict(zip(header.names, named, strict=True))
    time = [cell_of["Date"], cell_of["Time"]] if {"Date", "Time"} <= cell_of.keys() else leading
    slot = cell_of.get("gpu") or cell_of["Entity"]
    values = [cell for name, cell in zip(header.names, named, strict=True) if _column(name) is not None]
    return [" ".join(time).strip("[]"), slot, *values]
