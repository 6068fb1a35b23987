"""Rows of a source file during an import: mapped columns, and rows left out, refused or waiting."""

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
    MISSING,
    NAIVE,
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
    """Some rows of a source file, while they are evaluated.

    ``table``: the columns as the file has them; all of a CSV's are text, with blanks as null.
    ``rows``: row numbers in the file, from 1, the header not counted; shape (n,).
    ``kind``: table that the file is read as, which is its section in the mapping.
    ``good``: rows that are not refused; shape (n,).
    ``decimal``: decimal mark of the file's numbers, where a column does not show another.
    ``disagreeing``: columns that the file repeats with different values, with an example.
    ``orders``: order of day and month by column, once a batch of the file has shown it.
    ``columns``: source column by the dataset's, set with ``mapping`` by :meth:`resolve`; methods take the latter.
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
            source = self.columns[name]
            where = f"{self.file}, column {source!r}"
            if source in self.disagreeing:
                problem = f"the file has this column several times, with different values ({self.disagreeing[source]})"
                raise InputError(problem, where, "Rename the one to be read, or map it to null.")
            if source not in self.table.column_names:  # objects of JSON need not have the same keys
                return pa.chunked_array([pa.nulls(self.table.num_rows, pa.string())])
            return _plain(self.table.column(source), where)
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

    def keep_good(self) -> None:
        """Drop the rows that were refused."""
        self.rows, self.table = self.rows[self.good], self.table.filter(pa.array(self.good))
        self.good = np.ones(len(self.rows), dtype=bool)

    def refuse_unstorable(self) -> None:
        """Refuse rows with text that cannot be stored, and empty it, so that nothing else reads it."""
        bad = unstorable_rows(self.table)
        if bad.any():
            for place, kind in enumerate(self.table.schema.types):
                if _is_text(kind):
                    cleared = pc.if_else(pa.array(bad), pa.scalar(None, pa.string()), self.table.column(place))
                    self.table = self.table.set_column(place, self.table.column_names[place], cleared)
            self.refuse(UNSTORABLE, bad)

    def wait(self, waits_for: str, chosen: npt.NDArray[np.bool_]) -> None:
        """Leave those of the chosen rows that are still good to a later run."""
        waiting = chosen & self.good
        self.quarantine.waiting(self.kind, waits_for, int(waiting.sum()), self.file.name)
        self.good &= ~waiting

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

        ``details``: the offending value of each. ``rows``, ``lost``: see :meth:`Quarantine.set_aside`.
        """
        for start in range(0, len(places), _SET_ASIDE_ROWS):
            part = places[start : start + _SET_ASIDE_ROWS]
            records = _readable(self.table.take(pa.array(part))).to_pylist()
            shown = [None] * len(part) if details is None else details[start : start + _SET_ASIDE_ROWS]
            for row, record, detail in zip(self.rows[part].tolist(), records, shown, strict=True):
                content = row_text(record)
                self.quarantine.set_aside(reason, self.kind, self.file, row, content, detail, rows=rows, lost=lost)

    def instants(self, name: str, *, optional: bool = False, day_end: bool = False) -> Instants | None:
        """Parse a column and refuse the rows where it cannot be used; None where the source has none.

        ``optional``: whether a missing instant is one that can be used. ``day_end``: whether a date is the day's end.
        Raises ``InputError`` if all instants are naive.
        """
        column = self.column(name)
        if column is None:
            return None
        source = self.columns.get(name, name)
        where, time = f"{self.file}, column {source!r}", time_of_column(self.mapping.time, source)
        try:
            parsed = parse_instants(column, time, where, day_end=day_end, order=self.orders.get(name))
        except UndecidedOrderError:
            others = {*self.columns.values()} & {*self.table.column_names}
            order = order_shown(self.table.column(other) for other in others)
            if order is None:
                raise
            parsed = parse_instants(column, time, where, day_end=day_end, order=order)
        if parsed.order is not None:
            self.orders[name] = parsed.order
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


def time_of_column(time: TimeFormat, column: str) -> TimeFormat:
    """Return how a column writes its instants: a name such as ``timeUtc`` says the zone."""
    says_utc = time.timezone is None and _SAYS_UTC.search(column) is not None
    return time.model_copy(update={"timezone": ZoneInfo("UTC")}) if says_utc else time


UNSTORABLE: Final = "text that is not UTF-8, or too long"
"""Reason of rows with such text in any column."""

_MAX_TEXT: Final = 1 << 20


def unstorable_rows(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which rows have text that is not UTF-8, or longer than any name or message."""
    bad = np.zeros(table.num_rows, dtype=bool)
    for given in table.columns:
        is_coded = pa.types.is_dictionary(given.type) and _is_text(given.type.value_type)
        column = given.cast(given.type.value_type) if is_coded else given
        if not _is_text(column.type) or not len(column):
            continue
        bad |= pc.greater(pc.binary_length(column), _MAX_TEXT).fill_null(False).to_numpy(zero_copy_only=False)
        try:
            for chunk in column.chunks:
                chunk.validate(full=True)
        except pa.ArrowInvalid:
            raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
            bad |= np.array([value is not None and not _is_utf8(value) for value in raw.to_pylist()])
    return bad


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


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
