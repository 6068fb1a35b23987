"""Feature rows from outside: matched by name, checked by type, a missing value is NaN.

Only here and where the model is loaded is numpy needed; look-ups of nodes never come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from serving.http.request import unknown_name
from serving.http.scores import parse_instant
from serving.http.strict_json import shown
from telemetry.receiving.problems import Refused

UNIT: Final = "unit"
DECISION_TIME: Final = "decision_time"
_OWN: Final = (UNIT, DECISION_TIME)
_LARGEST: Final = float(np.finfo(np.float32).max)
_MS: Final = 1000
_FIRST_MS: Final = -62_135_596_800_000  # the years 1 to 9999, which is what a datetime can say
_LAST_MS: Final = 253_402_300_799_999


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows ready to score.

    Attributes
    ----------
    values : ndarray of float32, shape (n_rows, n_features)
        In the model's order; NaN: missing.
    units : list of str
        As given; else the rows' numbers from 0.
    times : ndarray of int64, shape (n_rows,)
        Decision times, milliseconds since 1970 (UTC); 0 where none were given.
    timed : bool
        Whether they were given.
    """

    values: npt.NDArray[np.float32]
    units: list[str]
    times: npt.NDArray[np.int64]
    timed: bool


def rows_of_records(records: Any, columns: Sequence[str], limit: int, what: str = "rows") -> FeatureRows:
    """Read a list of objects, one a row.

    Raises
    ------
    Refused
        422, naming row and column; 413 for too many rows.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise Refused(422, f"{what} is no list of objects, each of feature names and numbers", "invalid")
    _check_count(len(records), limit, what)
    first = list(records[0])
    if all(list(record) == first for record in records):  # as a program writes them
        return rows_of_table(first, [list(record.values()) for record in records], columns, limit, what)
    names = _union(records)
    if len(names) > len(columns) + len(_OWN):  # some are unknown: say which before all are spread out
        _places(names, columns)
    return rows_of_table(names, [[record.get(name) for name in names] for record in records], columns, limit, what)


def rows_of_table(
    names: Any, data: Any, columns: Sequence[str], limit: int, what: str = "dataframe_split"
) -> FeatureRows:
    """Read columns' names and a list of lists, one a row.

    Raises
    ------
    Refused
        As :func:`rows_of_records`.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refused(422, f"{what}: the columns are no list of names", "invalid")
    if not isinstance(data, list) or not all(isinstance(row, list) for row in data):
        raise Refused(422, f"{what}: the data is no list of lists", "invalid")
    _check_count(len(data), limit, what)
    for number, row in enumerate(data):
        if len(row) != len(names):
            raise Refused(422, f"{what}: row {number} has {len(row)} values for {len(names)} columns", "invalid")
    places = _places(names, columns)
    features = [place for place, name in enumerate(names) if name not in _OWN]
    plain = [[row[place] for place in features] for row in data] if len(features) < len(names) else data
    values = np.full((len(data), len(columns)), np.nan, dtype=np.float32)
    kinds = set(map(type, chain.from_iterable(plain)))
    if not kinds <= {int, float, type(None)}:
        raise _wrong_type(plain, [names[place] for place in features], what)
    try:
        given = np.array(plain, dtype=np.float64).reshape(len(data), len(features))
    except OverflowError:
        raise Refused(422, f"{what}: a number is beyond what can be held", "invalid") from None
    _check_range(given, [names[place] for place in features], what)
    values[:, [places[names[place]] for place in features]] = given
    units = _units([row[names.index(UNIT)] for row in data] if UNIT in names else None, len(data), what)
    times = [row[names.index(DECISION_TIME)] for row in data] if DECISION_TIME in names else None
    return FeatureRows(values, units, *_times(times, len(data), what))


def rows_of_arrow(body: bytes, columns: Sequence[str], limit: int, byte_limit: int) -> FeatureRows:
    """Read an Arrow IPC stream of numeric columns, and ``unit`` and ``decision_time`` if there are.

    Raises
    ------
    Refused
        400 if it is damaged, 413 for too much, 422 for columns or types that do not fit.
    """
    import pyarrow as pa  # noqa: PLC0415 - JSON rows do without

    from telemetry.receiving.arrow_body import BodyError, BodyTooLarge, read_stream  # noqa: PLC0415

    try:
        table = read_stream(body, row_limit=limit, byte_limit=byte_limit)
    except BodyTooLarge as error:
        raise Refused(413, str(error), "too_large") from error
    except BodyError as error:
        raise Refused(400, str(error)[:500], "garbage") from error
    count = table.num_rows
    _check_count(count, limit, "the table")
    names = table.column_names
    places = _places(names, columns)
    if count * len(columns) * 4 > byte_limit:
        raise Refused(413, f"{count} rows of {len(columns)} features are too many: send fewer rows", "too_large")
    values = np.full((count, len(columns)), np.nan, dtype=np.float32)
    for name in names:
        if name in _OWN:
            continue
        column = table.column(name)
        kind = column.type
        if pa.types.is_null(kind):
            continue
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise Refused(422, f"column {shown(name)} has the type {str(kind)[:60]}: send numbers", "invalid")
        given = column.cast(pa.float64(), safe=False).to_numpy().reshape(count, 1)
        _check_range(given, [name], "the table")
        values[:, places[name]] = given[:, 0]
    units = table.column(UNIT).to_pylist() if UNIT in names else None
    times = table.column(DECISION_TIME) if DECISION_TIME in names else None
    if times is not None and pa.types.is_timestamp(times.type):
        return FeatureRows(values, _units(units, count, "the table"), _stamps(times), True)
    texts = None if times is None else times.to_pylist()
    return FeatureRows(values, _units(units, count, "the table"), *_times(texts, count, "the table"))


def _stamps(times: Any) -> npt.NDArray[np.int64]:
    """Return a column of timestamps in milliseconds."""
    import pyarrow as pa  # noqa: PLC0415 - as in the caller

    if times.type.tz is None or times.null_count:
        raise Refused(422, "decision_time: send times with a time zone, and for each row", "invalid")
    # Seconds may overflow, which the cast then says; finer units lose digits, which it must not mind.
    try:
        millis = times.cast(pa.timestamp("ms", "UTC"), safe=times.type.unit == "s").cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        millis = None
    if millis is None or (millis < _FIRST_MS).any() or (millis > _LAST_MS).any():
        raise Refused(422, "decision_time: a time is beyond what can be held", "invalid")
    return np.asarray(millis, dtype=np.int64)


def _check_count(count: int, limit: int, what: str) -> None:
    if count == 0:
        raise Refused(422, f"{what} holds no row", "invalid")
    if count > limit:
        raise Refused(413, f"{what} holds {count} rows: send at most {limit}", "too_large")


def _union(records: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(records)))


def _places(names: Sequence[str], columns: Sequence[str]) -> dict[str, int]:
    places = {name: place for place, name in enumerate(columns)}
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Refused(422, f"column {shown(twice)} comes twice", "invalid")
    for name in names:
        if name not in places and name not in _OWN:
            raise Refused(422, unknown_name(name, [*columns, *_OWN], "feature"), "invalid")
    if not any(name in places for name in names):
        raise Refused(422, "the rows hold no feature of the model", "invalid")
    return places


def _wrong_type(rows: Sequence[Sequence[Any]], names: Sequence[str], what: str) -> Refused:
    for number, row in enumerate(rows):
        for name, value in zip(names, row, strict=True):
            if value is not None and type(value) not in (int, float):
                return Refused(422, f"{what}: row {number}, {name}: {shown(value)} is no number", "invalid")
    return Refused(422, f"{what}: a value is no number", "invalid")


def _check_range(values: npt.NDArray[np.float64], names: Sequence[str], what: str) -> None:
    wrong = np.abs(values) > _LARGEST  # infinity among them, NaN not
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        detail = f"{what}: row {row}, {names[column]}: {values[row, column]} is beyond what can be held"
        raise Refused(422, detail, "invalid")


def _units(given: Sequence[Any] | None, count: int, what: str) -> list[str]:
    if given is None:
        return [str(number) for number in range(count)]
    for number, unit in enumerate(given):
        if not isinstance(unit, str) or not unit.isprintable() or not unit:
            raise Refused(422, f"{what}: row {number}, unit: {shown(unit)} is no name", "invalid")
    return list(given)


def _times(given: Sequence[Any] | None, count: int, what: str) -> tuple[npt.NDArray[np.int64], bool]:
    if given is None or all(text is None for text in given):
        return np.zeros(count, dtype=np.int64), False
    times = np.zeros(count, dtype=np.int64)
    for number, text in enumerate(given):
        try:
            times[number] = round(parse_instant(text).timestamp() * _MS)
        except (ValueError, OverflowError):
            detail = f"{what}: row {number}, decision_time: {shown(text)} is no ISO 8601 time with a zone"
            raise Refused(422, detail, "invalid") from None
    return times, True
