"""Tables printed by tools in fixed-width columns, under a line of dashes (sacct, qstat) or of capitals (sinfo -R)."""

import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from telemetry.importing.files.csv_tables import BATCH_ROWS, NULL_TEXTS, REPEATED_HEADER, FileRows, distinct
from telemetry.importing.quarantine import Quarantine
from telemetry.packing import open_packed

OTHER_ENTITY: Final = "dcgmi dmon row of an entity other than a GPU"

_NULLS: Final = frozenset({*NULL_TEXTS, "-"})
_DASHES: Final = re.compile(r"-+(?: +-+)+\s*")
_CAPITALS: Final = re.compile(r"(?: *[A-Z][A-Z_/()%:#-]*){3,}\s*")
_BEGINNING: Final = 1 << 16
_MAX_LINE: Final = 1 << 16


class FixedColumns(NamedTuple):
    """Column names of a table, and the start and end offset of each."""

    names: list[str]
    spans: list[tuple[int, int]]


def fixed_columns(path: Path) -> FixedColumns | None:
    """Return the columns if the first line of a file is in capitals or the second one dashes; None otherwise."""
    with open_packed(path) as (_, stream):
        beginning = stream.read(_BEGINNING).decode("utf-8-sig", "replace")
    header, _, body = beginning.lstrip("\r\n").partition("\n")
    lines = body.splitlines()
    if lines and _DASHES.fullmatch(lines[0]):
        spans = _spans(lines[0])
    else:
        spans = _spans_under(header, lines) if lines and _CAPITALS.fullmatch(header) else []
    names = _cells(header, spans) if spans else None
    return None if names is None else FixedColumns(names, spans)


def printed_rows(
    path: Path, table: str, quarantine: Quarantine, columns: list[str], read: Callable[[str], list[str] | str | None]
) -> Iterator[FileRows]:
    """Read the lines of a printed table in batches.

    ``read``: returns the cells of a line, None for a different header, or a string: empty for a line to skip,
    :data:`REPEATED_HEADER`, :data:`OTHER_ENTITY`, or the reason why the line is malformed.
    The iterator raises ``InputError`` if a later header has other columns.
    """
    numbers: list[int] = []
    rows: list[list[str | None]] = []
    headers = 0
    with open_packed(path) as (_, content), io.TextIOWrapper(content, "utf-8-sig", "replace") as stream:
        for number, line in enumerate(iter(partial(stream.readline, _MAX_LINE), ""), 1):
            cells = read(line)
            if cells is None:
                advice = "Give the tables before and after it as separate files."
                raise InputError("the columns change within this table", f"{path}, line {number}", advice)
            if isinstance(cells, list):
                numbers.append(number)
                rows.append([None if cell in _NULLS else cell for cell in cells])
            elif cells == REPEATED_HEADER:
                headers += 1
                quarantine.read_rows(table, path, headers > 1)
                quarantine.leave_out(table, path, REPEATED_HEADER, headers > 1)
            elif cells:
                quarantine.read_rows(table, path, 1)
                if cells == OTHER_ENTITY:
                    quarantine.leave_out(table, path, cells, 1, line.strip())
                else:
                    quarantine.set_aside("malformed row", table, path, number, line.strip(), cells)
            if len(rows) == BATCH_ROWS:
                yield _batch(numbers, rows, columns)
                numbers, rows = [], []
    yield _batch(numbers, rows, columns)


def read_fixed(path: Path, table: str, quarantine: Quarantine) -> Iterator[FileRows]:
    """Read a table in batches; see :func:`printed_rows`."""
    columns = fixed_columns(path)
    assert columns is not None
    names, spans = columns

    def read(line: str) -> list[str] | str | None:
        if not line.strip() or _DASHES.fullmatch(line) is not None:
            return "" if not line.strip() or _spans(line) == spans else None
        cells = _cells(line, spans)
        return "text between two columns" if cells is None else REPEATED_HEADER if cells == names else cells

    return printed_rows(path, table, quarantine, names, read)


def _batch(numbers: list[int], rows: list[list[str | None]], names: list[str]) -> FileRows:
    values = zip(*rows, strict=True) if rows else ([] for _ in names)
    return FileRows(np.array(numbers, np.int64), *distinct(names, [pa.array(column, pa.string()) for column in values]))


def _spans(dashes: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer("-+", dashes)]


def _spans_under(header: str, lines: list[str]) -> list[tuple[int, int]]:
    """Return the columns under the words of a header, divided where all lines have a space; empty if they have none."""
    words = [match.span() for match in re.finditer(r"\S+", header)]
    gaps = [-1]
    for (_, end), (start, _) in pairwise(words):
        spaces = (
            place for place in range(start - 1, end - 1, -1) if all(line[place : place + 1] in " " for line in lines)
        )
        gaps.append(next(spaces, -1))
    is_divided = -1 not in gaps[1:]
    return [(gap + 1, end) for gap, end in pairwise([*gaps, len(header)])] if is_divided else []


def _cells(line: str, spans: list[tuple[int, int]]) -> list[str] | None:
    """Return the cells of a line, the last one up to its end; None if there is text between columns."""
    starts, ends = zip(*spans, strict=True)
    if any(line[end:start].strip() for end, start in zip((0, *ends), (*starts, 0), strict=True)):
        return None
    return [line[start:end].strip() for start, end in zip(starts, (*ends[:-1], None), strict=True)]
