"""Instants as sources write them, to milliseconds since the epoch in UTC."""

from __future__ import annotations

import contextlib
import re
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from telemetry.importing.mapping import TimeFormat

OK: Final = 0
"""The instant is usable."""

PROBLEMS: Final = {
    1: "missing timestamp",
    2: "unreadable timestamp",
    3: "naive timestamp",
    4: "ambiguous local time",
    5: "timestamp out of range",
}
"""Why an instant cannot be used, by status: the reasons of the quarantine."""

WRONG_CLOCK: Final = "a clock that cannot be right"
"""Reason of the quarantine for rows of a later time than now, or of another time than a live source can be of."""

MISSING, _UNREADABLE, NAIVE, _AMBIGUOUS, _OUTSIDE = 1, 2, 3, 4, 5
# Clocks that were never set show 1970 or 1980.
_EARLIEST_MS = int(pd.Timestamp("1990-01-01", tz="UTC").value // 1_000_000)
_LATEST_MS = int(pd.Timestamp("2100-01-01", tz="UTC").value // 1_000_000)
_UNIT_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6, "d": 8.64e7}
_DAY_END_MS: Final = 86_400_000 - 1
_DATE = r"^\d{4}-\d{2}-\d{2}$"
_TIME_OF_DAY = re.compile(r"%[HIpMSfcXTRrs]")
_AWARE = r"[T ]\d{2}:?\d{2}.*(?:[Zz]|UTC|GMT|[+-]\d{2}(?::?\d{2})?)$"


class Instants(NamedTuple):
    """A parsed column.

    ``ms``: milliseconds since 1970-01-01 UTC; 0 where unusable.
    ``status``: :data:`OK` or a key of :data:`PROBLEMS`.
    """

    ms: npt.NDArray[np.int64]
    status: npt.NDArray[np.int8]

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Which are usable."""
        return self.status == OK


def times_of(ms: npt.NDArray[np.int64]) -> pd.DatetimeIndex:
    """Return aware instants."""
    return pd.DatetimeIndex(ms.astype("datetime64[ms]"), dtype="datetime64[ms]").tz_localize("UTC")


def parse_instants(column: pa.ChunkedArray, time: TimeFormat, where: str, *, day_end: bool = False) -> Instants:
    """Parse a column of instants.

    ``where``: file and column, for errors.
    ``day_end``: whether a date without a time is the last millisecond of the day, in the zone, instead of its first.
    Raises ``InputError`` if numbers come without a unit, or the mapping's format is none.

    Fractions of a millisecond are cut off, never rounded up: a rounded instant could lie in the future.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        ms, status = np.zeros(len(column), np.int64), np.zeros(len(column), np.int8)
    elif pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        ms, status = _from_arrow(column, time, day_end)
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        ms, status = _from_numbers(column, time, where)
    else:
        ms, status = _from_text(column, time, where, day_end)
    status = np.where(_as_bools(column.is_null()), MISSING, status).astype(np.int8)
    status[(status == OK) & ((ms < _EARLIEST_MS) | (ms >= _LATEST_MS))] = _OUTSIDE
    return Instants(np.where(status == OK, ms, 0), status)


def _as_bools(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return column.fill_null(False).to_numpy(zero_copy_only=False).astype(bool)


def _from_arrow(column: pa.ChunkedArray, time: TimeFormat, day_end: bool) -> Instants:
    aware = pa.types.is_timestamp(column.type) and column.type.tz is not None
    plain = column.cast(pa.timestamp(column.type.unit if pa.types.is_timestamp(column.type) else "s"))
    ms = plain.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()).fill_null(0).to_numpy()
    if aware:
        return Instants(ms, np.full(len(ms), OK, np.int8))
    return _localised(ms, time.timezone, np.full(len(ms), pa.types.is_date(column.type)), day_end)


def _localised(
    naive_ms: npt.NDArray[np.int64], zone: ZoneInfo | None, is_date: npt.NDArray[np.bool_], day_end: bool
) -> Instants:
    if zone is None:
        return Instants(np.zeros(len(naive_ms), np.int64), np.full(len(naive_ms), NAIVE, np.int8))
    naive = pd.DatetimeIndex((naive_ms + _DAY_END_MS * (is_date & day_end)).astype("datetime64[ms]"))
    local = naive.tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
    if local.hasnans and is_date.any():  # clocks change at midnight in some zones: a day ends at the later of two
        shifted = naive.tz_localize(zone, ambiguous=np.zeros(len(naive), bool), nonexistent="shift_forward")
        local = local.where(~is_date, shifted)
    return Instants(_milliseconds(local), np.where(local.isna(), _AMBIGUOUS, OK).astype(np.int8))


def _milliseconds(aware: pd.DatetimeIndex) -> npt.NDArray[np.int64]:
    # Casting datetime64 to a coarser unit rounds towards the past.
    values = aware.tz_convert("UTC").tz_localize(None).to_numpy().astype("datetime64[ms]")
    return np.where(np.isnat(values), 0, values.astype(np.int64))


def _from_numbers(column: pa.ChunkedArray, time: TimeFormat, where: str) -> Instants:
    numbers = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy()
    status = np.where(np.isfinite(numbers), OK, _UNREADABLE).astype(np.int8)
    if time.unit is None:
        example = column.drop_null()
        if len(example) == 0:
            return Instants(np.zeros(len(column), np.int64), status)
        value = example[0].as_py()
        raise InputError(
            f"timestamps are numbers such as {value}, without a unit",
            where,
            f"Give `time: {{unit: {_guess(float(value))}}}` in its table's section of the mapping (`samples:`, "
            "`events:`), if that is their unit.",
        )
    origin = int(pd.Timestamp(time.origin).timestamp() * 1000)
    if pa.types.is_integer(column.type) and time.unit in ("ns", "us"):  # exact, a float64 is not
        per_ms = {"ns": 1_000_000, "us": 1000}[time.unit]
        return Instants(column.cast(pa.int64()).fill_null(0).to_numpy() // per_ms + origin, status)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.floor(np.round(np.where(status == OK, numbers, 0.0) * _UNIT_MS[time.unit], 3))
    status[np.abs(scaled) > 2.0**52] = _OUTSIDE
    return Instants(np.where(status == OK, scaled, 0.0).astype(np.int64) + origin, status)


def _guess(value: float) -> str:
    for unit, least in (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e8)):
        if abs(value) >= least:
            return unit
    return "d"


def _from_text(column: pa.ChunkedArray, time: TimeFormat, where: str, day_end: bool) -> Instants:
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    empty = _as_bools(pc.equal(text, ""))
    if time.unit is not None or (time.format is None and _is_numeric(text)):
        read = pd.to_numeric(text.to_pandas().astype(object), errors="coerce").to_numpy(np.float64)
        numbers = pa.chunked_array([pa.array(read, from_pandas=True)])
        if time.unit is not None and time.unit != "d":
            # Whole nanoseconds do not fit a float64: read integers as such where every value is one.
            with contextlib.suppress(pa.ArrowInvalid):
                numbers = pc.if_else(pc.equal(text, ""), None, text).cast(pa.int64())
        ms, status = _from_numbers(numbers, time, where)
        status[_as_bools(numbers.is_null())] = _UNREADABLE
    else:
        iso = pc.replace_substring_regex(text, r"\s*(?:UTC|GMT)$", "Z") if time.format is None else text
        try:
            times = pd.to_datetime(iso.to_pandas(), format=time.format or "ISO8601", errors="coerce", utc=True)
        except ValueError as error:
            raise InputError(str(error), where, "Correct `time: {format: …}` in the mapping.") from error
        parsed = pd.DatetimeIndex(times)
        ms, status = _milliseconds(parsed), np.where(parsed.isna(), _UNREADABLE, OK).astype(np.int8)
        aware = _as_bools(pc.match_substring_regex(text, _AWARE)) if time.format is None else "%z" in time.format
        naive = (status == OK) & ~np.asarray(aware)
        if time.format is None:
            is_date = _as_bools(pc.match_substring_regex(text, _DATE))
        else:
            is_date = np.full(len(ms), _TIME_OF_DAY.search(time.format) is None)
        ms[naive], status[naive] = _localised(ms[naive], time.timezone, is_date[naive], day_end)
    status[empty] = MISSING
    return Instants(ms, status)


def _is_numeric(text: pa.ChunkedArray) -> bool:
    """Whether the first reported value is a plain number, so that the whole column is taken for numbers."""
    reported = text.filter(pc.not_equal(text, "").fill_null(False))
    return len(reported) > 0 and bool(pc.match_substring_regex(reported.slice(0, 1), r"^-?\d+(\.\d+)?$")[0].as_py())
