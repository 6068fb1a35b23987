"""Streaming CSV reader: any common separator, spaces after commas, repeated columns and headers."""

import codecs
import contextlib
import csv
import io
import logging
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from foundation.errors import InputError
from telemetry.importing.quarantine import Quarantine
from telemetry.packing import UNPACKERS, check_ratio, open_for_arrow

_LOG = logging.getLogger(__name__)

BATCH_ROWS: Final = 1 << 17
MAX_COLUMNS: Final = 20_000

NULL_TEXTS: Final = ("", "NA", "N/A", "n/a", "[N/A]", "NaN", "nan", "null", "NULL", "[Not Supported]")


class FileRows(NamedTuple):
    """Rows of a file.

    ``numbers``: row numbers, shape (n,).
    ``disagreeing``: repeated columns whose values differ in a row, with an example.
    """

    numbers: npt.NDArray[np.int64]
    table: pa.Table
    disagreeing: dict[str, str]


_BLOCK_BYTES: Final = 1 << 24
_MAX_HEADER_BYTES: Final = 1 << 20
_MAX_VALUE_LINES: Final = 50
_MAX_MALFORMED: Final = 200_000
csv.field_size_limit(_MAX_HEADER_BYTES)  # of the process; what readers give to this module is bounded
_RELEASE_S: Final = 5.0
_SEPARATORS: Final = ",;\t|"

REPEATED_HEADER: Final = "the header again"
"""Reason for skipping a line: tools that append to a file write the header on every run."""


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """Header line and dialect of a CSV file.

    ``written``: column names as in the file.
    ``skipped_lines``: number of comments, blank lines and Excel's ``sep=;`` before the header.
    ``encoding``: codec name for Arrow.
    ``date_and_time``: date and time-of-day columns, joined into the first.
    """

    written: tuple[str, ...]
    separator: str
    skipped_lines: int
    date_and_time: tuple[str, str] | None = None
    encoding: str = "utf8"

    @property
    def names(self) -> list[str]:
        """Distinct column names, stripped."""
        return list(dict.fromkeys(name.strip() for name in self.written))

    @property
    def columns(self) -> list[str]:
        """Column names of the resulting table."""
        return [name for name in self.names if self.date_and_time is None or name != self.date_and_time[1]]


_DATE: Final = re.compile(r"date|datum|day", re.IGNORECASE)
_CLOCK: Final = re.compile(r"time|uhrzeit|zeit|heure|hora", re.IGNORECASE)
_TIME_OF_DAY: Final = re.compile(r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?")
_VALUE: Final = re.compile(
    r"(GPU-|MIG-)?[0-9A-Fa-f]{8}-([0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"  # a UUID
    r"|\d{4}[-/]\d\d?[-/]\d\d?[ T]\d\d?:\d\d.*|\d\d?/\d\d?/\d{4}|\d\d:\d\d:\d\d"  # a timestamp
    r"|-?\d+(\.\d+)? ?(%|W|C|MiB|MHz)"  # a number with its unit
)
"""Values that are never a column name."""


_NO_TABLES: Final = {
    r"=====|\+-----|<\?xml|GPU \d+: .*\(UUID: [^()]*\)\s*\Z": (
        "this is not a table but a report, such as that of `nvidia-smi`, `-q`, `-L` or `nvlink`",
        "Record a table: `nvidia-smi --query-gpu=timestamp,uuid,… --format=csv`, or `nvidia-smi dmon -o DT`.",
    ),
    r"#(?:group|datatype|default),": (
        "this is annotated CSV of InfluxDB, whose columns change within the file",
        'Query it with the dialect `{"annotations": []}` and one table of columns.',
    ),
    r"JobId=\d|NodeName=\S": (
        "this is not a table but what `scontrol show` prints",
        "Record a table: `sacct --parsable2 --format=JobID,State,Start,End,NodeList,AllocTRES`.",
    ),
    r"[A-Za-z_]\w*(?:,[\w.-]+=(?:\\.|[^\s,\\])*)+ \S+=\S+ \d{10,19}\s*\Z": (
        "this is not a table but InfluxDB's line protocol",
        'Record JSON: `data_format = "json"` in the output of Telegraf.',
    ),
}
"""Patterns of lines that are no header, each with a description and the remedy."""
_MAX_SHOWN: Final = 4096  # characters of such a line


def read_header(path: Path) -> CsvHeader:
    """Detect header, separator and encoding.

    Raises ``InputError`` if the file is empty, is not a table, or its header is missing, malformed or too long.
    """
    with open_for_arrow(path) as stream:
        content = stream.read(_MAX_HEADER_BYTES)
    encoding = _encoding(content)
    text = codecs.getincrementaldecoder(encoding)().decode(content)  # may end in the middle of a character
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff").rstrip("\r\n"))  # where Arrow ends a line
    skipped = 0
    while skipped + 1 < len(lines) and _is_comment(lines[skipped : skipped + 4]):
        skipped += 1
    start = lines[skipped] if lines else ""
    if len(lines) <= skipped + 1 and len(content) == _MAX_HEADER_BYTES:
        raise InputError("the header line is longer than 1 MiB", str(path), "Check that the file is a table.")
    for pattern, (what, do) in _NO_TABLES.items():
        if any(re.match(pattern, line[:_MAX_SHOWN]) for line in lines[skipped : skipped + 3]):
            raise InputError(what, str(path), do)
    separator = max(_SEPARATORS, key=start.count)
    try:
        written = next(csv.reader(io.StringIO("\n".join(lines[skipped:])), delimiter=separator), [])
    except csv.Error as error:
        raise InputError(f"the header cannot be read: {error}", str(path), "Check that the file is a table.") from error
    if not written:
        raise InputError("the file is empty", str(path), "Give a file with a header line and rows.")
    if len(written) > MAX_COLUMNS:
        raise InputError(f"the header has {len(written)} columns", str(path), f"Give at most {MAX_COLUMNS}.")
    value = next((cell.strip() for cell in written if _VALUE.fullmatch(cell.strip())), None)
    if value is not None:
        raise InputError(
            f"the file has no header line: its first line has values, such as {value!r}",
            str(path),
            "Write the names of the columns above the rows; nvidia-smi writes them unless it is given `noheader`.",
        )
    cells = next(csv.reader(lines[skipped + 1 : skipped + 2], delimiter=separator), [])
    return CsvHeader(tuple(written), separator, skipped, _date_and_time(written, cells), encoding)


def _encoding(content: bytes) -> str:
    """Detect UTF-16 (Excel, PowerShell) by its byte order mark; fall back to Windows-1252 if it is not UTF-8."""
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    try:
        codecs.getincrementaldecoder("utf8")().decode(content)
    except UnicodeDecodeError:
        with contextlib.suppress(UnicodeDecodeError):
            text = content.decode("cp1252")
            return "cp1252" if all(letter.isprintable() or letter in "\t\r\n" for letter in text) else "utf8"
    return "utf8"


def _date_and_time(written: list[str], cells: list[str]) -> tuple[str, str] | None:
    """Return the names of a date and a time-of-day column, detected by name and first row."""
    first_row = {name.strip(): cell.strip() for name, cell in zip(written, cells, strict=False)}
    date = next((name for name, cell in first_row.items() if _DATE.fullmatch(name) and ":" not in cell), None)
    clocks = (name for name, cell in first_row.items() if _CLOCK.fullmatch(name) and _TIME_OF_DAY.fullmatch(cell))
    clock = next(clocks, None)
    return None if date is None or clock is None else (date, clock)


def _joined(content: pa.Table, header: CsvHeader) -> pa.Table:
    if header.date_and_time is None:
        return content
    date, clock = header.date_and_time
    instants = pc.binary_join_element_wise(content.column(date), content.column(clock), " ")
    return content.set_column(content.column_names.index(date), date, instants).drop_columns([clock])


def _is_comment(lines: list[str]) -> bool:
    """Whether the first of some lines precedes the table: blank, a title or a comment."""
    if not lines[0].strip() or lines[0].strip('"').startswith("sep="):
        return True
    is_cut = lines[0].count('"') % 2 == 1  # by a line end inside quotes
    if not is_cut and not any(separator in lines[0] for separator in _SEPARATORS):
        return any(line.count(separator) > 1 for line in lines[1:] for separator in _SEPARATORS)
    return lines[0][:2] == "# "


def read_csv(path: Path, header: CsvHeader, table: str, quarantine: Quarantine) -> Iterator[FileRows]:
    """Read a CSV file in batches; an error if most rows are malformed."""
    malformed: list[tuple[int | None, str, int]] = []
    first, unpacked = 1, 0
    packed_bytes = path.stat().st_size if path.suffix.lower() in UNPACKERS else None

    def skip(row: Any) -> str:
        # An unclosed quote swallows the following lines.
        malformed.append((row.number, row.text[:_MAX_SHOWN], row.text.count("\n") + 1))
        return "skip" if len(malformed) <= max(_MAX_MALFORMED, first // 2) else "error"

    if header.encoding == "cp1252":
        _LOG.warning("%s is not UTF-8: it is read as Windows-1252", path)
    released = threading.Event()
    weakref.finalize(skip, released.set)
    reader = pa_csv.open_csv(
        open_for_arrow(path),
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=_BLOCK_BYTES, skip_rows=header.skipped_lines, encoding=header.encoding
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=header.separator, newlines_in_values=True, invalid_row_handler=skip
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(header.written, pa.string()),
            strings_can_be_null=True,
            null_values=list(NULL_TEXTS),
        ),
    )
    skipped = 1 + header.skipped_lines
    try:
        with reader:
            for batch in reader:
                unpacked += batch.nbytes
                if packed_bytes is not None:
                    check_ratio(unpacked, packed_bytes, path)
                # Arrow counts from 1 including the header and malformed rows, so numbers after one shift.
                lost_rows = np.array([number - skipped for number, *_ in malformed if number is not None], np.int64)
                numbers = np.arange(first, first + batch.num_rows + len(lost_rows), dtype=np.int64)
                if len(lost_rows):
                    numbers = np.setdiff1d(numbers, lost_rows)[: batch.num_rows]
                first = int(numbers[-1]) + 1 if len(numbers) else first
                content, disagreeing = distinct(header.written, batch.columns)
                numbers, content = _without_headers(numbers, content, header, table, path, quarantine)
                _count_swallowed(content, numbers, table, path, quarantine)
                yield FileRows(numbers, _joined(content, header), disagreeing)
    finally:
        # Arrow's read-ahead thread takes the GIL to release ``skip``. During interpreter shutdown this aborts the
        # process (std::terminate), so wait for the release, also when the caller stops early.
        del reader, skip
        released.wait(_RELEASE_S)
    for number, text, lines in malformed:
        row = None if number is None else number - skipped
        quarantine.read_rows(table, path, lines)
        expected = f"expected {len(header.written)} fields"
        quarantine.set_aside("malformed row", table, path, row, text, expected, rows=lines)
    if first == 1:
        empty = pa.table({name: pa.array([], pa.string()) for name in header.names})
        yield FileRows(np.empty(0, np.int64), _joined(empty, header), {})


def distinct(names: Sequence[str], values: Sequence[pa.Array]) -> tuple[pa.Table, dict[str, str]]:
    """Strip column names and coalesce columns with the same name; Jira repeats a column for each label of a ticket.

    Also return the repeated columns whose values differ in a row, with an example.
    """
    columns: dict[str, pa.Array] = {}
    disagreeing: dict[str, str] = {}
    for name, column in zip(names, values, strict=True):
        plain = name.strip()
        if plain not in columns:
            columns[plain] = column
            continue
        differs = pc.not_equal(columns[plain], column).fill_null(False)
        if plain not in disagreeing and pc.any(differs).as_py():
            row = pc.index(differs, True).as_py()
            disagreeing[plain] = f"{columns[plain][row].as_py()!r} and {column[row].as_py()!r}"
        columns[plain] = pc.coalesce(columns[plain], column)
    return pa.table(columns), disagreeing


def _without_headers(
    numbers: npt.NDArray[np.int64], content: pa.Table, header: CsvHeader, table: str, path: Path, quarantine: Quarantine
) -> tuple[npt.NDArray[np.int64], pa.Table]:
    first_name = next(name for name in header.names if name or len(header.names) == 1)
    repeats = pc.equal(pc.utf8_trim_whitespace(content.column(first_name)), first_name).fill_null(False)
    if not pc.any(repeats).as_py():
        return numbers, content
    for name in header.names:
        same = pc.equal(pc.utf8_trim_whitespace(content.column(name)), name)
        repeats = pc.and_(repeats, same.fill_null(name in NULL_TEXTS))
    is_repeated = repeats.to_numpy()
    quarantine.read_rows(table, path, int(is_repeated.sum()))
    quarantine.leave_out(table, path, REPEATED_HEADER, int(is_repeated.sum()))
    return numbers[~is_repeated], content.filter(pa.array(~is_repeated))


def _count_swallowed(
    content: pa.Table, numbers: npt.NDArray[np.int64], table: str, path: Path, quarantine: Quarantine
) -> None:
    """Count the lines inside implausibly long multi-line values as lost."""
    for name in content.column_names:
        if not _has_line_break(content.column(name)):
            continue
        breaks = pc.count_substring(content.column(name), "\n").fill_null(0).to_numpy()
        for row in np.flatnonzero(breaks > _MAX_VALUE_LINES):
            lines, example = int(breaks[row]), f"row {numbers[row]}, column {name!r}: a quote that is not closed?"
            quarantine.read_rows(table, path, lines)
            quarantine.leave_out(table, path, "lines inside one value", lines, example, lost=True)


def _has_line_break(column: pa.ChunkedArray) -> bool:
    """Whether any value may contain a line break; searching the raw buffer is 10 times faster than by value."""
    texts = (chunk.buffers()[2] for chunk in column.chunks)
    return any(text is not None and b"\n" in text.to_pybytes() for text in texts)
