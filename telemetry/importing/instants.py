"""Parses timestamp columns in any common format to Unix time in ms."""

import contextlib
import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from telemetry.importing.mapping import TimeFormat
from telemetry.kernel_log.stamps import SKIPPED, TWICE
from telemetry.values.dates import DateOrder, read_dates
from telemetry.values.numbers import NO_VALUE_WORDS

OK: Final = 0
PROBLEMS: Final = {
    1: "missing timestamp",
    2: "unreadable timestamp",
    3: "naive timestamp",
    4: "ambiguous local time",
    5: "timestamp out of range",
    6: "local time that the clock change skips",
}
WRONG_CLOCK: Final = "an impossible clock"
"""Quarantine reason for rows in the future, or at a time that a live source cannot report."""

MISSING, _UNREADABLE, NAIVE, _AMBIGUOUS, _OUTSIDE, _SKIPPED = 1, 2, 3, 4, 5, 6
ASSUMPTIONS: Final = {_AMBIGUOUS: TWICE, _SKIPPED: SKIPPED}
"""Statuses that also have a time, and the assumption behind it."""

# An unset clock shows 1970 or 1980.
_EARLIEST_MS = int(pd.Timestamp("1990-01-01", tz="UTC").value // 1_000_000)
_LATEST_MS = int(pd.Timestamp("2100-01-01", tz="UTC").value // 1_000_000)
_UNIT_MS = {"excel": 8.64e7, "ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6, "d": 8.64e7}
_FEW_DATES: Final = 20_000
_FARTHEST_MS: Final = 8_000_000_000_000_000  # limit of datetime64[ms] in pandas, with a margin
_DAY_END_MS: Final = 86_400_000 - 1
_DATE = r"^\d{4}-\d{2}-\d{2}$"
_NEVER: Final = "|nat|(null)|<nil>|[n/a]|never|none assigned|pending|ongoing|open|tbd|0000-00-00|0000-00-00 00:00:00"
_ZERO: Final = ("0001-01-01t00:00:00z", "0001-01-01 00:00:00", "1970-01-01t00:00:00z")
_NO_INSTANTS: Final = pa.array(sorted({*NO_VALUE_WORDS, *_NEVER.split("|"), *_ZERO}))
"""Placeholders, in lower case, for a time that has not come."""

_TIME_OF_DAY = re.compile(r"%[HIpMSfcXTRrs]")
_EXCEL_ORIGIN_MS: Final = -2_209_161_600_000  # 1899-12-30, which compensates for Excel's February 29, 1900
_EXCEL_DAYS: Final = (36_526.0, 58_440.0)  # 2000 to 2060
_COMPACT: Final = r"^(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4}|\d{6})?$"
_AWARE = r"[T ]\d{2}(?::?\d{2}.*)?(?:[Zz]|UTC|GMT|[+-]\d{2}(?::?\d{2})?)$"


class UndecidedOrderError(InputError):
    """No date in a column reveals its day-month order; ``text`` is an example."""

    def __init__(self, text: str, location: str) -> None:
        super().__init__(
            f"{text!r} is ambiguous, and no date of the column shows the order of day and month",
            location,
            "Give `time: {order: dmy}` (day first) or `time: {order: mdy}` (month first) in its table's section of "
            "the mapping.",
        )
        self.text = text


class Instants(NamedTuple):
    """A parsed timestamp column.

    ``ms``: Unix time in ms; 0 where unusable.
    ``status``: :data:`OK` or a key of :data:`PROBLEMS`, of which :data:`ASSUMPTIONS` have a time.
    ``order``: day-month order found in text.
    """

    ms: npt.NDArray[np.int64]
    status: npt.NDArray[np.int8]
    order: DateOrder | None = None

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Mask of usable timestamps."""
        return self.status == OK


def times_of(ms: npt.NDArray[np.int64]) -> pd.DatetimeIndex:
    """Convert Unix time in ms to aware UTC timestamps."""
    return pd.DatetimeIndex(ms.astype("datetime64[ms]"), dtype="datetime64[ms]").tz_localize("UTC")


def parse_instants(
    column: pa.ChunkedArray, time: TimeFormat, location: str, *, day_end: bool = False, order: DateOrder | None = None
) -> Instants:
    """Parse a timestamp column.

    ``location``: file and column, for errors.
    ``day_end``: resolve a date without a time to the last millisecond of the day in its zone instead of the first.
    ``order``: day-month order, unless the mapping sets it.
    Raises ``InputError`` if the unit of numbers or the day-month order cannot be determined, or the mapping's format
    is invalid.

    Fractions of a millisecond are truncated, because a timestamp rounded up could be in the future.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        parsed = Instants(np.zeros(len(column), np.int64), np.zeros(len(column), np.int8))
    elif pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        parsed = _from_arrow(column, time, day_end)
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        parsed = _from_numbers(column, time, location, day_end)
    else:
        # All GPUs of a fleet share timestamps, so each distinct string is parsed once.
        coded = column.combine_chunks().dictionary_encode()
        texts = pa.chunked_array([pa.concat_arrays([coded.dictionary, pa.nulls(1, coded.dictionary.type)])])
        parsed = _from_text(texts, time, location, day_end, time.order or order)
        places = coded.indices.fill_null(len(texts) - 1).to_numpy()
        parsed = parsed._replace(ms=parsed.ms[places], status=parsed.status[places])
    status = np.where(_as_bools(column.is_null()), MISSING, parsed.status).astype(np.int8)
    status[(status == OK) & ((parsed.ms < _EARLIEST_MS) | (parsed.ms >= _LATEST_MS))] = _OUTSIDE
    return parsed._replace(ms=np.where(np.isin(status, (OK, *ASSUMPTIONS)), parsed.ms, 0), status=status)


def _are_none(text: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return _as_bools(pc.is_in(pc.utf8_lower(text), value_set=_NO_INSTANTS))


def _as_bools(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return column.fill_null(False).to_numpy(zero_copy_only=False).astype(bool)


def _from_arrow(column: pa.ChunkedArray, time: TimeFormat, day_end: bool) -> Instants:
    aware = pa.types.is_timestamp(column.type) and column.type.tz is not None
    unit = column.type.unit if pa.types.is_timestamp(column.type) else "s"
    counts = column.cast(pa.timestamp(unit)).cast(pa.int64()).fill_null(0).to_numpy()
    per_ms = {"s": 1000, "ms": 1, "us": -1000, "ns": -1_000_000}[unit]
    # Clip to avoid overflow; such timestamps are out of range anyway.
    clipped = np.clip(counts, -_FARTHEST_MS // abs(per_ms), _FARTHEST_MS // abs(per_ms)) if per_ms > 0 else counts
    ms = clipped * per_ms if per_ms > 0 else counts // -per_ms
    ms = np.clip(ms, -_FARTHEST_MS, _FARTHEST_MS)
    if aware:
        return Instants(ms, np.full(len(ms), OK, np.int8))
    return _localised(ms, time.timezone, np.full(len(ms), pa.types.is_date(column.type)), day_end)


def _localised(
    naive_ms: npt.NDArray[np.int64], zone: ZoneInfo | None, is_date: npt.NDArray[np.bool_], day_end: bool
) -> Instants:
    if zone is None:
        return Instants(np.zeros(len(naive_ms), np.int64), np.full(len(naive_ms), NAIVE, np.int8))
    # Zones are defined only for the range of datetime; timestamps far outside are out of range in any zone.
    is_far = (naive_ms < _EARLIEST_MS - _DAY_END_MS) | (naive_ms > _LATEST_MS + _DAY_END_MS)
    near_ms = np.where(is_far, 0, naive_ms)
    naive = pd.DatetimeIndex((near_ms + _DAY_END_MS * (is_date & day_end)).astype("datetime64[ms]"))
    local = naive.tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
    status = np.full(len(naive), OK, np.int8)
    if local.hasnans:
        is_doubtful = np.asarray(local.isna()) & ~is_far & ~is_date  # some zones change DST at midnight
        local = naive.tz_localize(zone, ambiguous=np.zeros(len(naive), bool), nonexistent=pd.Timedelta(hours=1))
        is_skipped = np.asarray(local.tz_localize(None) != naive)
        status[is_doubtful] = np.where(is_skipped, _SKIPPED, _AMBIGUOUS)[is_doubtful]
    return Instants(np.where(is_far, naive_ms, _milliseconds(local)), status)


def _milliseconds(aware: pd.DatetimeIndex) -> npt.NDArray[np.int64]:
    # Casting datetime64 to a coarser unit rounds down.
    values = aware.tz_convert("UTC").tz_localize(None).to_numpy().astype("datetime64[ms]")
    return np.where(np.isnat(values), 0, values.astype(np.int64))


def _from_numbers(column: pa.ChunkedArray, time: TimeFormat, location: str, day_end: bool) -> Instants:
    numbers = column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()
    status = np.where(np.isfinite(numbers), OK, _UNREADABLE).astype(np.int8)
    unit: str | None = time.unit
    origin = int(pd.Timestamp(time.origin).timestamp() * 1000)
    if unit is None:
        status[numbers == 0] = MISSING  # end time of a job that is still running
        if not (status == OK).any():
            return Instants(np.zeros(len(column), np.int64), status)
        unit = inferred_unit(numbers[status == OK])
        if unit is None:
            raise InputError(
                f"timestamps are numbers such as {column.drop_null()[0].as_py()}, without a unit",
                location,
                "Give their unit (ns, us, ms, s, m, h, d) in the table's section of the mapping, such as "
                "`time: {unit: d}`, and `origin:` unless they count from 1970.",
            )
        origin = _EXCEL_ORIGIN_MS if unit == "excel" else 0
    if pa.types.is_integer(column.type) and unit in ("ns", "us"):  # float64 would lose precision
        per_ms = {"ns": 1_000_000, "us": 1000}[unit]
        counts = pc.fill_null(column, 0).to_numpy()
        return Instants((counts // per_ms).astype(np.int64) + origin, status)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.round(np.where(status == OK, numbers, 0.0) * _UNIT_MS[unit], 3)
        scaled = np.round(scaled) if unit == "excel" else np.floor(scaled)  # fractions of days are seldom exact
    status[np.abs(scaled) > _FARTHEST_MS] = _OUTSIDE
    ms = np.where(status == OK, scaled, 0.0).astype(np.int64) + origin
    if unit != "excel":
        return Instants(ms, status)
    local = _localised(ms, time.timezone, numbers == np.floor(numbers), day_end)
    return Instants(local.ms, np.where(status == OK, local.status, status).astype(np.int8))


def inferred_unit(numbers: npt.NDArray[np.float64]) -> str | None:
    """Return the unit in which all numbers are plausible timestamps, or None; ``excel`` is days since 1899-12-30.

    The ranges for 1990 to 2099 in s, ms, us and ns do not overlap.
    """
    if not len(numbers):
        return None
    for unit in ("s", "ms", "us", "ns"):
        low, high = _EARLIEST_MS / _UNIT_MS[unit], _LATEST_MS / _UNIT_MS[unit]
        if bool(((numbers >= low) & (numbers < high)).all()):
            return unit
    low, high = _EXCEL_DAYS
    return "excel" if bool(((numbers >= low) & (numbers < high)).all()) else None


def _from_text(
    column: pa.ChunkedArray, time: TimeFormat, location: str, day_end: bool, order: DateOrder | None
) -> Instants:
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    empty = _are_none(text)
    if time.unit is not None or (time.format is None and _is_numeric(text)):
        digits = pc.replace_substring(text, ",", ".")
        read = pd.to_numeric(digits.to_pandas().astype(object), errors="coerce").to_numpy(np.float64)
        numbers = pa.chunked_array([pa.array(read, from_pandas=True)])
        # float64 cannot represent nanoseconds exactly: parse as integers if all values are.
        with contextlib.suppress(pa.ArrowInvalid):
            numbers = pc.if_else(pa.chunked_array([pa.array(empty)]), None, text).cast(pa.int64())
        parsed = _from_numbers(numbers, time, location, day_end)
        parsed.status[_as_bools(numbers.is_null())] = _UNREADABLE
    elif time.format is None:
        parsed = _from_forms(text, empty, time, location, day_end, order)
    else:
        try:
            times = pd.to_datetime(text.to_pandas(), format=time.format, errors="coerce", utc=True)
        except ValueError as error:
            raise InputError(str(error), location, "Correct `time: {format: …}` in the mapping.") from error
        dates = np.full(len(text), _TIME_OF_DAY.search(time.format) is None)
        aware = np.full(len(text), "%z" in time.format)
        moments = pd.DatetimeIndex(times)
        parsed = _placed(_milliseconds(moments), ~np.asarray(moments.isna()), aware, dates, time, day_end)
    parsed.status[empty] = MISSING
    return parsed


def _from_forms(
    text: pa.ChunkedArray,
    empty: npt.NDArray[np.bool_],
    time: TimeFormat,
    location: str,
    day_end: bool,
    order: DateOrder | None,
) -> Instants:
    """Parse ISO 8601 vectorized, and other formats once per distinct string."""
    iso = pc.replace_substring_regex(text, r"\s*(?:UTC|GMT)$", "Z")
    moments = pd.DatetimeIndex(pd.to_datetime(iso.to_pandas(), format="ISO8601", errors="coerce", utc=True))
    ms, is_read = _milliseconds(moments), ~np.asarray(moments.isna())
    is_aware = _as_bools(pc.match_substring_regex(text, _AWARE))
    is_date = _as_bools(pc.match_substring_regex(text, _DATE))
    other = np.flatnonzero(~is_read & ~empty & ~_as_bools(text.is_null()))
    effective = order
    if len(other):
        codes, texts = pd.factorize(text.take(pa.array(other)).to_numpy(zero_copy_only=False))
        dates = read_dates(list(texts), order)
        effective = dates.order
        if dates.undecided is not None:
            raise UndecidedOrderError(dates.undecided, location)
        ms[other], is_read[other] = dates.ms[codes], dates.is_read[codes]
        is_aware[other], is_date[other] = dates.is_aware[codes], dates.is_date[codes]
    return _placed(ms, is_read, is_aware, is_date, time, day_end)._replace(order=effective)


def _placed(
    ms: npt.NDArray[np.int64],
    is_read: npt.NDArray[np.bool_],
    is_aware: npt.NDArray[np.bool_],
    is_date: npt.NDArray[np.bool_],
    time: TimeFormat,
    day_end: bool,
) -> Instants:
    status = np.where(is_read, OK, _UNREADABLE).astype(np.int8)
    naive = is_read & ~is_aware
    local = _localised(ms[naive], time.timezone, is_date[naive], day_end)
    ms[naive], status[naive] = local.ms, local.status
    return Instants(ms, status)


def order_shown(columns: Iterable[pa.ChunkedArray]) -> DateOrder | None:
    """Return the day-month order found in the columns of a table; None if there is none or they disagree."""
    orders = set()
    for column in columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            texts = pc.unique(pc.utf8_trim_whitespace(column.drop_null())).to_pylist()[:_FEW_DATES]
            orders |= {read_dates(texts).order} - {None}
    return orders.pop() if len(orders) == 1 else None


def _is_numeric(text: pa.ChunkedArray) -> bool:
    """Whether a column is numeric, based on its first value; compact dates do not count as numbers."""
    reported = text.filter(pa.array(~_are_none(text)))
    reported = reported.drop_null().slice(0, 1)
    if not len(reported):
        return False
    is_number = pc.match_substring_regex(reported, r"^-?\d+([.,]\d+)?([eE][+-]?\d+)?$")[0].as_py()
    return bool(is_number) and not pc.match_substring_regex(reported, _COMPACT)[0].as_py()
