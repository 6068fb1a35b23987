"""Feature rows of requests: columns matched by name, types checked, missing values as NaN.

Imported lazily, because node lookups do not need numpy.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foundation.server.problems import RequestRefused
from policy.risk_record import parse_utc
from serving.champion import FeatureRows
from serving.http.bodies import quoted, unknown_name

UNIT: Final = "unit"
DECISION_TIME: Final = "decision_time"
_KEY_COLUMNS: Final = (UNIT, DECISION_TIME)
_LARGEST: Final = float(np.finfo(np.float32).max)
_MS: Final = 1000
_NUMBERS: Final = frozenset({int, float, type(None)})
_FIRST_MS: Final = -62_135_596_800_000  # years 1 to 9999, the range of ``datetime``
_LAST_MS: Final = 253_402_300_799_999


def rows_of_records(records: Any, columns: Sequence[str], limit: int, field: str = "rows") -> FeatureRows:
    """Parse a list of objects, one per row.

    Raises ``RequestRefused``: 422 with row and column of an invalid value; 413 for too many rows.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise RequestRefused(422, f"{field} is not a list of objects with feature names and numbers", "invalid")
    _check_count(len(records), limit, field)
    first = list(records[0])
    if all(list(record) == first for record in records):  # the usual case for generated JSON
        data = [list(record.values()) for record in records]
        return rows_of_table(first, data, columns, limit, field)
    names = list(dict.fromkeys(chain.from_iterable(records)))
    if len(names) > len(columns) + len(_KEY_COLUMNS):  # some are unknown: reject them before expanding all rows
        _places(names, columns)
    data = [[record.get(name) for name in names] for record in records]
    return rows_of_table(names, data, columns, limit, field)


def rows_of_table(
    names: Any, data: Any, columns: Sequence[str], limit: int, field: str = "dataframe_split"
) -> FeatureRows:
    """Parse column names and a list of lists, one per row.

    ``data``: its rows may be modified in place.
    Raises ``RequestRefused`` like :func:`rows_of_records`.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestRefused(422, f"{field}: the columns are not a list of names", "invalid")
    if not isinstance(data, list) or not all(isinstance(row, list) for row in data):
        raise RequestRefused(422, f"{field}: the data is not a list of lists", "invalid")
    _check_count(len(data), limit, field)
    for number, row in enumerate(data):
        if len(row) != len(names):
            raise RequestRefused(
                422, f"{field}: row {number} has {len(row)} values for {len(names)} columns", "invalid"
            )
    places = _places(names, columns)
    keys = {name: names.index(name) for name in _KEY_COLUMNS if name in names}
    aside = {name: [row[place] for row in data] for name, place in keys.items()}
    for place in sorted(keys.values(), reverse=True):
        for row in data:
            del row[place]
    features = [name for name in names if name not in keys]
    numbers = _numbers(data, features, field)
    values = _spread(numbers, [places[name] for name in features], len(columns))
    return FeatureRows(
        values,
        _units(aside.get(UNIT), len(data), field),
        _times(aside.get(DECISION_TIME), len(data), field),
    )


def rows_of_arrow(body: bytes, columns: Sequence[str], limit: int, byte_limit: int) -> FeatureRows:
    """Parse an Arrow IPC stream of numeric columns, optionally with ``unit`` and ``decision_time``.

    Raises ``RequestRefused``: 400 if it is damaged, 413 if it is too large, 422 for invalid columns or types.
    """
    import pyarrow as pa

    from telemetry.collect.remote_write.arrow_body import read_stream

    table = read_stream(body, row_limit=limit, byte_limit=byte_limit)
    count = table.num_rows
    _check_count(count, limit, "the table")
    names = table.column_names
    places = _places(names, columns)
    if count * len(columns) * 4 > byte_limit:
        raise RequestRefused(413, f"{count} rows of {len(columns)} features are too many: send fewer rows", "too_large")
    kinds = dict(zip(names, table.schema.types, strict=True))
    aside = [name for name, kind in kinds.items() if name in _KEY_COLUMNS or pa.types.is_null(kind)]
    features = [name for name in names if name not in aside]
    numbers = _matrix(table.drop_columns(aside), {name: kinds[name] for name in features})
    values = _spread(numbers, [places[name] for name in features], len(columns))
    units = table.column(UNIT).to_pylist() if UNIT in names else None
    times = table.column(DECISION_TIME) if DECISION_TIME in names else None
    if times is not None and pa.types.is_timestamp(times.type):
        return FeatureRows(values, _units(units, count, "the table"), _stamps(times))
    texts = None if times is None else times.to_pylist()
    return FeatureRows(values, _units(units, count, "the table"), _times(texts, count, "the table"))


def _matrix(table: Any, kinds: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return numeric columns as one array, null as NaN; converting each column took most of a request's time."""
    import pyarrow as pa

    if not kinds:
        return np.empty((table.num_rows, 0), dtype=np.float32)
    floats = (pa.float32(), pa.float64())
    for name, kind in kinds.items():
        if kind not in floats and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise RequestRefused(422, f"column {quoted(name)} has the type {str(kind)[:60]}: send numbers", "invalid")
    if not set(kinds.values()) <= set(floats):
        as_floats = {name: kind if kind in floats else pa.float64() for name, kind in kinds.items()}
        table = table.cast(pa.schema(as_floats), safe=False)
    batches = table.to_batches()
    batch = batches[0] if len(batches) == 1 else table.combine_chunks().to_batches()[0]
    numbers: npt.NDArray[Any] = batch.to_tensor(null_to_nan=True).to_numpy()
    _check_range(numbers, list(kinds), "the table")
    return numbers


def _numbers(data: Sequence[Sequence[Any]], names: Sequence[str], field: str) -> npt.NDArray[np.float64]:
    """Return rows of numbers and nulls as one array, filled row by row so that other threads can run."""
    numbers = np.empty((len(data), len(names)), dtype=np.float64)
    for number, row in enumerate(data):
        if not _NUMBERS.issuperset(map(type, row)):
            name, value = next(pair for pair in zip(names, row, strict=True) if type(pair[1]) not in _NUMBERS)
            raise RequestRefused(422, f"{field}: row {number}, {name}: {quoted(value)} is not a number", "invalid")
        numbers[number] = row
    _check_range(numbers, names, field)
    return numbers


def _spread(numbers: npt.NDArray[Any], places: Sequence[int], width: int) -> npt.NDArray[np.float32]:
    """Put columns into the model's order; the model's other columns are NaN."""
    if list(places) == list(range(width)):
        return numbers.astype(np.float32, order="C")
    values = np.full((len(numbers), width), np.nan, dtype=np.float32)
    values[:, places] = numbers
    return values


def _stamps(times: Any) -> npt.NDArray[np.int64]:
    """Return a timestamp column in milliseconds since the epoch."""
    import pyarrow as pa

    if times.type.tz is None:
        detail = f"decision_time: {times.type} has no time zone: send timestamps with one, such as UTC"
        raise RequestRefused(422, detail, "invalid")
    if times.null_count:
        raise _no_time("the table", times.is_null().to_pylist().index(True))
    # Casting seconds may overflow and must fail then; finer units lose digits, which must not fail.
    try:
        millis = times.cast(pa.timestamp("ms", "UTC"), safe=times.type.unit == "s").cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        millis = None
    if millis is None or (millis < _FIRST_MS).any() or (millis > _LAST_MS).any():
        raise RequestRefused(422, "decision_time: a time lies outside the years 1 to 9999 (UTC)", "invalid")
    return np.asarray(millis, dtype=np.int64)


def _check_count(count: int, limit: int, field: str) -> None:
    if count == 0:
        raise RequestRefused(422, f"{field} has no rows", "invalid")
    if count > limit:
        raise RequestRefused(413, f"{field} holds {count} rows: send at most {limit}", "too_large")


def _places(names: Sequence[str], columns: Sequence[str]) -> dict[str, int]:
    places = {name: place for place, name in enumerate(columns)}
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise RequestRefused(422, f"column {quoted(repeated)} is duplicated", "invalid")
    for name in names:
        if name not in places and name not in _KEY_COLUMNS:
            raise RequestRefused(422, unknown_name(name, [*columns, *_KEY_COLUMNS], "feature"), "invalid")
    if not any(name in places for name in names):
        raise RequestRefused(422, "the rows have no feature of the model", "invalid")
    return places


def _check_range(values: npt.NDArray[np.float64], names: Sequence[str], field: str) -> None:
    out_of_range = np.abs(values) > _LARGEST  # includes infinity, not NaN
    if out_of_range.any():
        row, column = np.argwhere(out_of_range)[0]
        detail = f"{field}: row {row}, {names[column]}: {values[row, column]} exceeds the range of float32"
        raise RequestRefused(422, detail, "invalid")


def _units(units: Sequence[Any] | None, count: int, field: str) -> list[str]:
    if units is None:
        return [str(number) for number in range(count)]
    for number, unit in enumerate(units):
        if not isinstance(unit, str) or not unit.isprintable() or not unit:
            raise RequestRefused(422, f"{field}: row {number}, unit: {quoted(unit)} is not a valid name", "invalid")
    return list(units)


def _times(values: Sequence[Any] | None, count: int, field: str) -> npt.NDArray[np.int64]:
    times = np.zeros(count, dtype=np.int64)
    if values is None or all(text is None for text in values):
        return times
    for number, text in enumerate(values):
        if text is None:
            raise _no_time(field, number)
        try:
            times[number] = round(parse_utc(text).timestamp() * _MS)
        except ValueError:
            reason = "is not a time with a zone: write ISO 8601, such as '2026-01-01T06:00:00Z'"
            raise RequestRefused(
                422, f"{field}: row {number}, decision_time: {quoted(text)} {reason}", "invalid"
            ) from None
    return times


def _no_time(field: str, number: int) -> RequestRefused:
    detail = f"{field}: row {number} has no decision_time, but others have one: give all rows a time, or none"
    return RequestRefused(422, detail, "invalid")
