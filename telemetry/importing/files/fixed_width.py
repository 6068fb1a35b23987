"""Tables in columns of fixed width below a line of dashes, as sacct, sacctmgr and qstat print them."""

import io
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from foundation.errors import InputError
from telemetry.importing.files.text_files import BATCH_ROWS, NULL_TEXTS, REPEATED_HEADER, FileRows, text_batch
from telemetry.importing.quarantine import Quarantine
from telemetry.packing import open_packed

_DASHES: Final = re.compile(r"-+(?: +-+)+\s*")
_BEGINNING: Final = 1 << 16
_MAX_LINE: Final = 1 << 16


class FixedColumns(NamedTuple):
    """The columns of a table: names, and where each begins and ends in a line."""

    names: list[str]
    spans: list[tuple[int, int]]


def fixed_columns(path: Path) -> FixedColumns | None:
    """Return the columns if the first line of a file is their names, and the second one dashes; None otherwise."""
    with open_packed(path) as (_, stream):
        beginning = stream.read(_BEGINNING).decode("utf-8-sig", "replace")
    header, _, rest = beginning.lstrip("\r\n").partition("\n")
    dashes = rest.partition("\n")[0]
    if _DASHES.fullmatch(dashes) is None:
        return None
    spans = _spans(dashes)
    names = _cells(header, spans)
    return None if names is None else FixedColumns(names, spans)


def read_fixed(path: Path, table: str, quarantine: Quarantine) -> Iterator[FileRows]:
    """Read a table in batches.

    Raises ``InputError`` if a later header has other columns.
    """
    columns = fixed_columns(path)
    assert columns is not None
    numbers: list[int] = []
    rows: list[list[str | None]] = []
    headers, number = 0, 0
    with open_packed(path) as (_, content), io.TextIOWrapper(content, "utf-8-sig", "replace") as stream:
        for line in filter(str.strip, iter(partial(stream.readline, _MAX_LINE), "")):
            if _DASHES.fullmatch(line) is not None:
                if _spans(line) != columns.spans:
                    advice = "Give the tables before and after it as separate files."
                    raise InputError("the columns change within this table", f"{path}, row {number}", advice)
                continue
            cells = _cells(line, columns.spans)
            if cells == columns.names:
                quarantine.read_rows(table, path, headers > 0)
                quarantine.leave_out(table, path, REPEATED_HEADER, headers > 0)
                headers += 1
                continue
            number += 1
            if cells is None:
                quarantine.read_rows(table, path, 1)
                quarantine.set_aside("malformed row", table, path, number, line.strip(), "text between two columns")
                continue
            numbers.append(number)
            rows.append([None if cell in NULL_TEXTS else cell for cell in cells])
            if len(rows) == BATCH_ROWS:
                yield text_batch(numbers, rows, columns.names)
                numbers, rows = [], []
    yield text_batch(numbers, rows, columns.names)


def _spans(dashes: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer("-+", dashes)]


def _cells(line: str, spans: list[tuple[int, int]]) -> list[str] | None:
    """Return the cells of a line, of which the last runs to its end; None if there is text between two columns."""
    starts, ends = zip(*spans, strict=True)
    if any(line[end:start].strip() for end, start in zip((0, *ends), (*starts, 0), strict=True)):
        return None
    return [line[start:end].strip() for start, end in zip(starts, (*ends[:-1], None), strict=True)]
