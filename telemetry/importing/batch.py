"""A batch of rows from a source file: mapped columns, and rows left out, rejected or deferred."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from telemetry.importing.columns import as_text, resolve_columns
from telemetry.importing.instants import (
    ASSUMPTIONS,
    MISSING,
    NAIVE,
    OK,
    PROBLEMS,
    WRONG_CLOCK,
    Instants,
    UndecidedOrderError,
    order_shown,
    parse_instants,
    times_of,
)
from telemetry.importing.mapping import TableMapping, TimeFormat
from telemetry.importing.quarantine import BY_MAPPING, Quarantine, row_text
from telemetry.packing import read_errors
from telemetry.values.dates import DateOrder
from telemetry.values.numbers import Decimal

_SAYS_UTC: Final = re.compile(r"(?:^|[^A-Za-z])(?:utc|gmt|UTC|GMT)(?:[^A-Za-z]|$)|(?<=[a-z])(?:UTC|Utc)$")
_SET_ASIDE_ROWS: Final = 50_000


@dataclass(slots=True)
class Batch:
    """A batch of rows from a source file during import.

    ``table``: columns as in the file; CSV columns are all text, with blanks as null.
    ``rows``: row numbers in the file, from 1 after the header; shape (n,).
    ``kind``: the table that the file is imported into, also its section in the mapping.
    ``valid``: rows not rejected; shape (n,).
    ``decimal``: decimal separator of the file's numbers, unless a column implies another.
    ``disagreeing``: columns repeated in the file with different values, each with an example.
    ``orders``: date order by column, once a batch of the file has revealed it.
    ``columns``: dataset column to source column, set with ``mapping`` by :meth:`resolve`; methods take dataset columns.
    """

    file: Path
    kind: str
    rows: npt.NDArray[np.int64]
    table: pa.Table
    quarantine: Quarantine
    columns: dict[str, str] = field(default_factory=dict)
    mapping: TableMapping = field(default_factory=TableMapping)
    decimal: Decimal = "."
    disagreeing: dict[str, str] = field(default_factory=dict)
    orders: dict[str, DateOrder] = field(default_factory=dict)
    valid: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.valid = np.ones(len(self.rows), dtype=bool)

    def resolve(self, mapping: TableMapping, known: Sequence[str], *required: str, **options: Any) -> None:
        """Resolve the columns; ``options``: see :func:`telemetry.importing.columns.resolve_columns`."""
        self.mapping = mapping
        names, location = self.table.column_names, str(self.file)
        self.columns = resolve_columns(names, mapping, known, location, required, **options)
        self.drop_without_values()

    def drop_without_values(self) -> None:
        """Leave out rows without a value in the mapping's ``drop_without`` columns."""
        for name in self.mapping.drop_without:
            if name in self.columns:
                self.keep(~pd.isna(as_text(self.column(name), self.table.num_rows)))

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Keep only the chosen rows; the others do not count as lost."""
        self.quarantine.leave_out(self.kind, self.file, BY_MAPPING, int((self.valid & ~chosen).sum()))
        self.rows, self.table, self.valid = self.rows[chosen], self.table.filter(pa.array(chosen)), self.valid[chosen]

    def repeat(self, places: npt.NDArray[np.int64]) -> None:
        """Replace the rows by those at ``places``; repetitions count as read."""
        self.quarantine.read(self.kind, len(places) - len(self.rows))
        self.rows, self.table, self.valid = self.rows[places], self.table.take(pa.array(places)), self.valid[places]

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.mapping.constants

    def column(self, name: str) -> pa.ChunkedArray | None:
        """Return a column, or None if the source lacks it."""
        if name in self.columns:
            source = self.columns[name]
            location = f"{self.file}, column {source!r}"
            if source in self.disagreeing:
                problem = f"the file has this column several times, with different values ({self.disagreeing[source]})"
                raise InputError(problem, location, "Rename the one to be read, or map it to null.")
            if source not in self.table.column_names:  # JSON objects may have different keys
                return pa.chunked_array([pa.nulls(self.table.num_rows, pa.string())])
            return _plain(self.table.column(source), location)
        constant = [self.mapping.constants[name]] * self.table.num_rows if name in self else None
        return None if constant is None else pa.chunked_array([pa.array(constant)])

    def texts(self, name: str) -> npt.NDArray[np.object_]:
        """Return a column as text with the mapping's ``values`` applied, and leave out the rows that these drop."""
        texts = as_text(self.column(name), self.table.num_rows)
        rules = self.mapping.values.get(name, {})
        codes, uniques = pd.factorize(texts) if rules else (np.empty(0), ())
        for code, unique in enumerate(uniques):
            if unique in rules:
                result = rules[unique]
                texts[codes == code] = None if result is None else str(result)
                if result is None:
                    dropped = int((self.valid & (codes == code)).sum())
                    self.quarantine.leave_out(self.kind, self.file, BY_MAPPING, dropped, f"{name} {unique!r}")
                    self.valid &= codes != code
        return texts

    def refuse(self, reason: str, chosen: npt.NDArray[np.bool_], *, lost: bool = True) -> None:
        """Quarantine the chosen rows that are still good; ``lost``: whether they count as lost."""
        self.set_aside(reason, np.flatnonzero(chosen & self.valid), lost=lost)
        self.valid &= ~chosen

    def keep_good(self) -> None:
        """Drop rejected rows."""
        self.rows, self.table = self.rows[self.valid], self.table.filter(pa.array(self.valid))
        self.valid = np.ones(len(self.rows), dtype=bool)

    def refuse_unstorable(self) -> None:
        """Reject rows with text that cannot be stored, and set their text to null so that nothing else reads it."""
        unstorable = unstorable_rows(self.table)
        if unstorable.any():
            for place, kind in enumerate(self.table.schema.types):
                if _is_text(kind):
                    cleared = pc.if_else(pa.array(unstorable), pa.scalar(None, pa.string()), self.table.column(place))
                    self.table = self.table.set_column(place, self.table.column_names[place], cleared)
            self.refuse(UNSTORABLE, unstorable)

    def wait(self, waits_for: str, chosen: npt.NDArray[np.bool_]) -> None:
        """Defer the chosen rows that are still good to a later run."""
        waiting = chosen & self.valid
        self.quarantine.waiting(self.kind, waits_for, int(waiting.sum()), self.file.name)
        self.valid &= ~waiting

    def set_aside(
        self,
        reason: str,
        places: npt.NDArray[np.int64],
        details: Sequence[str] | None = None,
        *,
        rows: int = 1,
        lost: bool = True,
    ) -> None:
        """Quarantine rows by their index in the batch.

        ``details``: the offending value of each row. ``rows``, ``lost``: see :meth:`Quarantine.set_aside`.
        """
        for start in range(0, len(places), _SET_ASIDE_ROWS):
            part = places[start : start + _SET_ASIDE_ROWS]
            records = _readable(self.table.take(pa.array(part))).to_pylist()
            page = [None] * len(part) if details is None else details[start : start + _SET_ASIDE_ROWS]
            for row, record, detail in zip(self.rows[part].tolist(), records, page, strict=True):
                content = row_text(record)
                self.quarantine.set_aside(reason, self.kind, self.file, row, content, detail, rows=rows, lost=lost)

    def instants(self, name: str, *, optional: bool = False, day_end: bool = False) -> Instants | None:
        """Parse a timestamp column and reject rows with unusable values; None if the source lacks the column.

        At a change of daylight saving time, samples are rejected, and other rows are dated by :data:`ASSUMPTIONS`.
        ``optional``: accept missing timestamps. ``day_end``: a date without a time means the end of the day.
        Raises ``InputError`` if all timestamps are naive.
        """
        column = self.column(name)
        if column is None:
            return None
        source = self.columns.get(name, name)
        location, time = f"{self.file}, column {source!r}", time_of_column(self.mapping.time, source)
        try:
            parsed = parse_instants(column, time, location, day_end=day_end, order=self.orders.get(name))
        except UndecidedOrderError:
            others = {*self.columns.values()} & {*self.table.column_names}
            order = order_shown(self.table.column(other) for other in others)
            if order is None:
                raise
            parsed = parse_instants(column, time, location, day_end=day_end, order=order)
        if parsed.order is not None:
            self.orders[name] = parsed.order
        present = parsed.status[parsed.status != MISSING]
        if len(present) and (present == NAIVE).all():
            zone = f"`{self.kind}: {{time: {{timezone: UTC}}}}`"
            raise InputError(
                f"timestamps are naive (without a time zone), such as {str(column.drop_null()[0].as_py())!r}",
                location,
                f"Give the zone in the mapping: {zone}, with the zone they were written in.",
            )
        for status, assumption in ASSUMPTIONS.items() if self.kind != "samples" else ():
            rows = np.flatnonzero((parsed.status == status) & self.valid)
            if len(rows):
                self.quarantine.assumed(self.kind, assumption, len(rows), column[int(rows[0])].as_py())
            parsed.status[parsed.status == status] = OK
        for status, reason in PROBLEMS.items():
            if status != MISSING or not optional:
                self.refuse(reason if name == "timestamp" else f"{reason} in {name}", parsed.status == status)
        return parsed

    def times(
        self, name: str, not_after: datetime, *, optional: bool, is_end: bool, day_end: bool | None = None
    ) -> pd.Series:
        """Parse a timestamp column; reject times after ``not_after``, or with ``is_end`` return them as missing."""
        instants = self.instants(name, optional=optional, day_end=is_end if day_end is None else day_end)
        if instants is None:
            return pd.Series(pd.NaT, index=range(len(self.rows)), dtype="datetime64[ms, UTC]")
        is_ahead = instants.ok & (instants.ms > not_after.timestamp() * 1000)
        if not is_end:
            self.refuse(WRONG_CLOCK, is_ahead)
        return pd.Series(times_of(instants.ms)).where(instants.ok & ~is_ahead)


def time_of_column(time: TimeFormat, column: str) -> TimeFormat:
    """Return the timestamp format of a column; names like ``timeUtc`` imply the zone."""
    says_utc = time.timezone is None and _SAYS_UTC.search(column) is not None
    return time.model_copy(update={"timezone": ZoneInfo("UTC")}) if says_utc else time


UNSTORABLE: Final = "text that is not UTF-8, or too long"
_MAX_TEXT: Final = 1 << 20


def unstorable_rows(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which rows have text that is not UTF-8 or too long."""
    unstorable = np.zeros(table.num_rows, dtype=bool)
    for chunked in table.columns:
        is_coded = pa.types.is_dictionary(chunked.type) and _is_text(chunked.type.value_type)
        column = chunked.cast(chunked.type.value_type) if is_coded else chunked
        if not _is_text(column.type) or not len(column):
            continue
        unstorable |= pc.greater(pc.binary_length(column), _MAX_TEXT).fill_null(False).to_numpy(zero_copy_only=False)
        try:
            for chunk in column.chunks:
                chunk.validate(full=True)
        except pa.ArrowInvalid:
            raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
            unstorable |= np.array([value is not None and not _is_utf8(value) for value in raw.to_pylist()])
    return unstorable


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _readable(table: pa.Table) -> pa.Table:
    """Convert temporal columns to text, or to numbers if Python cannot represent them (e.g. years beyond 9999)."""
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


def _plain(column: pa.ChunkedArray, location: str) -> pa.ChunkedArray:
    """Convert bytes to text and decimals to floats; raise ``InputError`` for unsupported types."""
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        with read_errors(Path(location)):
            return column.cast(pa.string())
    if pa.types.is_nested(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        problem = f"values of the type {kind} are not read"
        raise InputError(problem, location, "Write them as text or numbers, or map the column to null.")
    return column.cast(pa.float64()) if pa.types.is_decimal(kind) else column
