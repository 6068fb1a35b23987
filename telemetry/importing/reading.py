"""Source files: what they are by content, and their rows in batches (Parquet, CSV and JSON)."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from foundation.errors import InputError
from telemetry.dataset.meta import META_NAME
from telemetry.dataset.store import Dataset
from telemetry.importing.columns import as_text, resolve_columns
from telemetry.importing.instants import (
    MISSING,
    NAIVE,
    PROBLEMS,
    WRONG_CLOCK,
    Instants,
    parse_instants,
    times_of,
)
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import BY_MAPPING, Quarantine, row_text

_BATCH_ROWS: Final = 1 << 17
_BLOCK_BYTES: Final = 1 << 24
_SET_ASIDE_ROWS: Final = 50_000
_SUFFIXES: Final = {
    **dict.fromkeys([".parquet", ".pq"], "parquet"),
    **dict.fromkeys([".csv", ".tsv"], "csv"),
    **dict.fromkeys([".json", ".jsonl", ".ndjson"], "json"),
}
_PACKED: Final = (".gz", ".bz2", ".zst", ".lz4")
_MOST_LINES: Final = 50
"""Lines that a value of a CSV may have."""

_NULLS: Final = ("", "NA", "N/A", "n/a", "[N/A]", "NaN", "nan", "null", "NULL", "None", "[Not Supported]")


@dataclass(slots=True)
class Batch:
    """Some rows of a source file, while they are judged.

    ``table``: the columns as the file has them; all of a CSV's are text, with blanks as null.
    ``rows``: row numbers in the file, from 1, the header not counted; shape (n,).
    ``kind``: table that the file is read as, which is its section in the mapping.
    ``good``: rows that are not refused; shape (n,).
    ``columns``: source column by the dataset's, set with ``mapping`` by :meth:`resolve`; methods take the latter.
    """

    file: Path
    kind: str
    rows: npt.NDArray[np.int64]
    table: pa.Table
    quarantine: Quarantine
    columns: dict[str, str] = field(default_factory=dict)
    mapping: TableMapping = field(default_factory=TableMapping)
    good: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.good = np.ones(len(self.rows), dtype=bool)

    def resolve(self, mapping: TableMapping, known: Sequence[str], *required: str, **options: Any) -> None:
        """Find the columns; ``options``: of :func:`telemetry.importing.columns.resolve_columns`."""
        self.mapping = mapping
        names, where = self.table.column_names, str(self.file)
        self.columns = resolve_columns(names, mapping, known, where, required, **options)
        self.drop_without_values()

    def drop_without_values(self) -> None:
        """Leave out the rows that the mapping's ``drop_without`` means."""
        for name in self.mapping.drop_without:
            if name in self.columns:
                self.keep(~pd.isna(as_text(self.column(name), self.table.num_rows)))

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Leave out the other rows: they are no rows of this table, and no loss."""
        self.quarantine.leave_out(self.kind, self.file, BY_MAPPING, int((self.good & ~chosen).sum()))
        self.rows, self.table, self.good = self.rows[chosen], self.table.filter(pa.array(chosen)), self.good[chosen]

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.mapping.constants

    def column(self, name: str) -> pa.ChunkedArray | None:
        """Return a column, or None where the source has none."""
        if name in self.columns:
            return _plain(self.table.column(self.columns[name]), f"{self.file}, column {self.columns[name]!r}")
        constant = [self.mapping.constants[name]] * self.table.num_rows if name in self else None
        return None if constant is None else pa.chunked_array([pa.array(constant)])

    def texts(self, name: str) -> npt.NDArray[np.object_]:
        """Return a column as text after the mapping's ``values``, and leave out the rows that these drop."""
        texts = as_text(self.column(name), self.table.num_rows)
        rules = self.mapping.values.get(name, {})
        codes, uniques = pd.factorize(texts) if rules else (np.empty(0), ())
        for code, unique in enumerate(uniques):
            if unique in rules:
                result = rules[unique]
                texts[codes == code] = None if result is None else str(result)
                if result is None:
                    dropped = int((self.good & (codes == code)).sum())
                    self.quarantine.leave_out(self.kind, self.file, BY_MAPPING, dropped, f"{name} {unique!r}")
                    self.good &= codes != code
        return texts

    def refuse(self, reason: str, chosen: npt.NDArray[np.bool_], *, lost: bool = True) -> None:
        """Set aside those of the chosen rows that are still good; ``lost``: they might have been of use."""
        self.set_aside(reason, np.flatnonzero(chosen & self.good), lost=lost)
        self.good &= ~chosen

    def set_aside(
        self,
        reason: str,
        places: npt.NDArray[np.int64],
        details: Sequence[str] | None = None,
        *,
        rows: int = 1,
        lost: bool = True,
    ) -> None:
        """Quarantine rows by their place in the batch.

        ``details``: the offending value of each. ``rows``, ``lost``: see :meth:`Quarantine.add`.
        """
        for start in range(0, len(places), _SET_ASIDE_ROWS):
            part = places[start : start + _SET_ASIDE_ROWS]
            records = _readable(self.table.take(pa.array(part))).to_pylist()
            shown = [None] * len(part) if details is None else details[start : start + _SET_ASIDE_ROWS]
            for row, record, detail in zip(self.rows[part].tolist(), records, shown, strict=True):
                content = row_text(record)
                self.quarantine.add(reason, self.kind, self.file, row, content, detail, rows=rows, lost=lost)

    def instants(self, name: str, *, optional: bool = False, day_end: bool = False) -> Instants | None:
        """Parse a column and refuse the rows where it cannot be used; None where the source has none.

        ``optional``: whether a missing instant is one that can be used. ``day_end``: whether a date is the day's end.
        Raises ``InputError`` if all instants are naive.
        """
        column = self.column(name)
        if column is None:
            return None
        where = f"{self.file}, column {self.columns.get(name, name)!r}"
        parsed = parse_instants(column, self.mapping.time, where, day_end=day_end)
        given = parsed.status[parsed.status != MISSING]
        if len(given) and (given == NAIVE).all():
            zone = f"`{self.kind}: {{time: {{timezone: UTC}}}}`"
            raise InputError(
                f"timestamps are naive (without a time zone), such as {str(column.drop_null()[0].as_py())!r}",
                where,
                f"Give the zone in the mapping: {zone}, with the zone they were written in.",
            )
        for status, reason in PROBLEMS.items():
            if status != MISSING or not optional:
                self.refuse(reason if name == "timestamp" else f"{reason} in {name}", parsed.status == status)
        return parsed

    def times(
        self, name: str, not_after: datetime, *, optional: bool, is_end: bool, day_end: bool | None = None
    ) -> pd.Series:
        """Return a column of instants; one after ``not_after`` has a wrong clock, or is an end still to come."""
        instants = self.instants(name, optional=optional, day_end=is_end if day_end is None else day_end)
        if instants is None:
            return pd.Series(pd.NaT, index=range(len(self.rows)), dtype="datetime64[ms, UTC]")
        ahead = instants.ok & (instants.ms > not_after.timestamp() * 1000)
        if not is_end:
            self.refuse(WRONG_CLOCK, ahead)
        return pd.Series(times_of(instants.ms)).where(instants.ok & ~ahead)


def _readable(table: pa.Table) -> pa.Table:
    """Return a table that Python can show: years beyond 9999 are their numbers, times to the nanosecond cut."""
    for place, kind in enumerate(table.schema.types):
        if pa.types.is_temporal(kind):
            numbers = table.column(place)
            if pa.types.is_date32(kind) or pa.types.is_time32(kind):
                numbers = numbers.cast(pa.int32())
            texts = numbers.cast(pa.int64()).cast(pa.string())
            with contextlib.suppress(pa.ArrowInvalid, OverflowError, ValueError):
                texts = pa.chunked_array([pa.array(map(str, table.column(place).to_pylist()), pa.string())])
            table = table.set_column(place, table.column_names[place], texts)
    return table


def _plain(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Return a column with bytes as text and decimals as floats; ``InputError`` if its type is neither."""
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        with read_errors(Path(where)):
            return column.cast(pa.string())
    if pa.types.is_nested(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        problem = f"values of the type {kind} are not read"
        raise InputError(problem, where, "Write them as text or numbers, or map the column to null.")
    return column.cast(pa.float64()) if pa.types.is_decimal(kind) else column


def stem_of(path: Path) -> str:
    """Return a file's name without its suffix, and without ``.gz`` and the like."""
    return Path(path.stem).stem if is_packed(path) else path.stem


def is_packed(path: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return path.suffix.lower() in _PACKED


def kind_of(path: Path) -> str:
    """Return ``parquet``, ``csv``, ``json`` or ``other`` by a file's name, seen through ``.gz`` and the like."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "other")


def is_kernel_log(path: Path) -> bool:
    """Whether an event source is a kernel log: ``.log`` and other text, or the journal's JSON."""
    kind = kind_of(path)
    if kind != "json":
        return kind == "other"
    with read_errors(path), pa.input_stream(path) as stream:
        return b"__REALTIME_TIMESTAMP" in stream.read(1 << 16)


def expand_sources(paths: tuple[Path, ...], what: str) -> list[Path]:
    """Return the files behind ``paths``: a folder stands for the files in it, a glob for what it matches, sorted.

    Raises ``InputError`` if a path does not exist, a glob matches nothing, or a folder is empty.
    """
    files: list[Path] = []
    for path in [match for written in paths for match in _matches(written)]:
        if not path.exists():
            raise InputError(f"the {what} file does not exist", str(path), "Check the path.")
        if (path / META_NAME).is_file():
            part = path / ("telemetry" if what == "samples" else "events.parquet")
            raise InputError(f"a dataset where {what} are expected", str(path), f"Give {part}, or your own files.")
        inside = sorted(path.rglob("*")) if path.is_dir() else []
        inside = [file for file in inside if file.is_file() and not file.name.startswith((".", "_"))]
        if path.is_dir() and not inside:
            raise InputError(f"the folder of {what} is empty", str(path), "Give files, or a folder with files.")
        files += inside or [path]
    return files


def _matches(written: Path) -> list[Path]:
    """Return what a glob that no shell has expanded matches; a path that exists is no glob."""
    found = [] if written.exists() else sorted(Path(name) for name in glob(str(written.expanduser()), recursive=True))
    return found or [written]


def read_batches(path: Path, table: str, quarantine: Quarantine) -> Iterator[Batch]:
    """Read a source file in batches that fit into memory.

    ``path``: ``.parquet``, ``.csv``, ``.tsv``, ``.json`` (a list of objects) or ``.jsonl``; text may be compressed
    (``.csv.gz``). Objects inside an object become columns named ``outer.inner``.
    Raises ``InputError`` if the file is of another kind, damaged, or not UTF-8.
    """
    kind = _table_kind(path, table)
    with read_errors(path):
        if kind == "parquet":
            batches = _read_parquet(path)
        else:
            batches = (_read_csv if kind == "csv" else _read_json_rows)(path, table, quarantine)
        for rows, content in batches:
            quarantine.read(table, path, len(rows))
            yield Batch(path, table, rows, content, quarantine)


def column_names(path: Path, table: str = "samples") -> list[str]:
    """Return the columns of a file without reading its rows (JSON is read whole)."""
    kind = _table_kind(path, table)
    with read_errors(path):
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "csv":
            return _csv_header(path)[0]
        return list(dict.fromkeys(name for record in _read_json(path)[0].values() for name in record))


def _table_kind(path: Path, table: str) -> str:
    kind = kind_of(path)
    if kind == "other":
        problem = f"files of the kind {path.suffix or path.name!r} are not read as {table}"
        raise InputError(problem, str(path), "Give Parquet, CSV, TSV or JSON.")
    return kind


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn what the reader of a file raises, such as for a download cut short, into an error that names it."""
    try:
        yield
    except (pa.ArrowInvalid, UnicodeDecodeError, OSError, RecursionError) as error:
        is_text = not isinstance(error, UnicodeDecodeError) and "utf8" not in str(error).lower().replace("-", "")
        problem = "cannot be read" if is_text else "is not UTF-8 text"
        raise InputError(f"the file {problem}: {error}", str(path), "Check that it is whole, or convert it.") from error


_Rows = tuple[npt.NDArray[np.int64], pa.Table]


def _read_parquet(path: Path) -> Iterator[_Rows]:
    first = 1
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            for place, name in enumerate(table.column_names):
                if pa.types.is_string_view(table.schema.types[place]):  # which Arrow can hardly filter
                    table = table.set_column(place, name, table.column(place).cast(pa.string()))
            yield np.arange(first, first + batch.num_rows), table
            first += batch.num_rows
        if file.metadata.num_rows == 0:
            yield np.empty(0, np.int64), file.schema_arrow.empty_table()


def _read_csv(path: Path, table: str, quarantine: Quarantine) -> Iterator[_Rows]:
    header, delimiter = _csv_header(path)
    malformed: list[tuple[int, str]] = []

    def skip(row: Any) -> str:
        malformed.append((row.number, row.text))
        return "skip"

    reader = pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=list(_NULLS)
        ),
    )
    first = 1
    with reader:
        for batch in reader:
            # Arrow numbers lines from 1 with the header; a malformed row counts, so the rows after it move on by one.
            gone = np.array([number - 1 for number, _ in malformed if number is not None], np.int64)
            rows = np.arange(first, first + batch.num_rows + len(gone), dtype=np.int64)
            rows = np.setdiff1d(rows, gone)[: batch.num_rows]
            first = int(rows[-1]) + 1 if len(rows) else first
            content = pa.Table.from_batches([batch])
            _count_swallowed(content, rows, table, path, quarantine)
            yield rows, content
    for number, text in malformed:
        row = None if number is None else number - 1
        lines = text.count("\n") + 1  # a quote that is not closed swallows the lines after it
        quarantine.read(table, path, lines)
        quarantine.add("malformed row", table, path, row, text, f"expected {len(header)} fields", rows=lines)
    if first == 1:
        yield np.empty(0, np.int64), pa.table({name: pa.array([], pa.string()) for name in header})


def _count_swallowed(
    content: pa.Table, rows: npt.NDArray[np.int64], table: str, path: Path, quarantine: Quarantine
) -> None:
    """Count the lines in values of more lines than any text has as lost."""
    for name in content.column_names:
        breaks = pc.count_substring(content.column(name), "\n").fill_null(0).to_numpy()
        for row in np.flatnonzero(breaks > _MOST_LINES):
            lines, example = int(breaks[row]), f"row {rows[row]}, column {name!r}: a quote that is not closed?"
            quarantine.read(table, path, lines)
            quarantine.leave_out(table, path, "lines inside one value", lines, example, lost=True)


def _csv_header(path: Path) -> tuple[list[str], str]:
    """Return the columns, and what separates them: what the header has most of."""
    with pa.input_stream(path) as stream:
        line = codecs.getincrementaldecoder("utf-8-sig")().decode(stream.read(1 << 16))  # may end within a character
    line = next(iter(line.splitlines()), "")
    delimiter = max(",;\t", key=line.count)
    header = next(csv.reader([line], delimiter=delimiter), [])
    if not header:
        raise InputError("the file is empty", str(path), "Give a file with a header line and rows.")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise InputError(f"the header names columns twice: {twice}", str(path), "Rename one of each.")
    return header, delimiter


def _read_json(path: Path) -> tuple[dict[int, dict[str, Any]], list[tuple[int, str, str]]]:
    """Return the objects of a list or of lines, by number, and what is none: number, text, and why."""
    with pa.input_stream(path) as stream:
        text = stream.read().decode("utf-8-sig")
    parsed: list[tuple[int, Any]] = []
    malformed: list[tuple[int, str, str]] = []
    try:
        content = json.loads(text)
        parsed = list(enumerate(content if isinstance(content, list) else [content], start=1))
    except ValueError:
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                parsed += [(number, json.loads(line))] if line.strip() else []
            except ValueError:
                malformed.append((number, line, "not JSON"))
    malformed += [(n, json.dumps(value), "not a JSON object") for n, value in parsed if not isinstance(value, Mapping)]
    return {number: _flat(value) for number, value in parsed if isinstance(value, Mapping)}, malformed


def _read_json_rows(path: Path, table: str, quarantine: Quarantine) -> Iterator[_Rows]:
    """Read all values as text, as a CSV has them."""
    records, malformed = _read_json(path)
    for number, text, problem in malformed:
        quarantine.read(table, path, 1)
        quarantine.add("malformed row", table, path, number, text, problem)
    texts = [
        {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else json.dumps(value)
            for name, value in record.items()
        }
        for record in records.values()
    ]
    schema = pa.schema([(name, pa.string()) for name in dict.fromkeys(name for row in texts for name in row)])
    rows = [{name: None if text in _NULLS else text for name, text in row.items()} for row in texts]
    yield np.array(list(records), np.int64), pa.Table.from_pylist(rows, schema=schema)


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True, slots=True)
class Source:
    """One source file; ``entry`` is what dataset.json keeps of it: no path, and no time of reading."""

    role: str
    path: Path
    entry: dict[str, Any]


def new_sources(sources: Sequence[Source], existing: Dataset | None) -> list[Source]:
    """Return the sources that the dataset does not hold yet; a file given twice counts once.

    Raises ``InputError`` if the dataset holds a source that was read with other settings: its rows cannot be taken
    back.
    """
    entries = [] if existing is None else existing.meta.sources
    settings = {(entry["role"], entry["sha256"]): entry["settings"] for entry in entries if "sha256" in entry}
    fresh: list[Source] = []
    for source in sources:
        key, given = (source.role, source.entry["sha256"]), source.entry["settings"]
        if key not in settings:
            settings[key] = given
            fresh.append(source)
        # Older versions kept settings that are none any more.
        changed = sorted(name for name, value in given.items() if settings[key].get(name) != value)
        if changed:
            raise InputError(
                f"this source was imported before with other settings: {', '.join(changed)}",
                str(source.path),
                "Import all sources again into an empty folder, or go back to the settings of the first import.",
            )
    return fresh
