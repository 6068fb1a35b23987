"""Parsing of dates and times in the formats of many tools and locales, with names of months and zones.

``months.csv`` has one row per locale. An empty offset in ``zones.csv`` marks a name shared by several zones.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import Final, Literal, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from telemetry.values.tables import read_table

DateOrder = Literal["dmy", "mdy", "ymd"]


@lru_cache(maxsize=256)
def zone_of_offset(text: str) -> tzinfo | None:
    """Return the zone of an offset like ``+05:30`` or ``-08``, or of a name in the tz database; None if empty."""
    if "/" in text or not text:
        return ZoneInfo(text) if text else None
    hours, minutes = int(text[1:3]), int(text[3:].lstrip(":") or 0)
    return timezone((-1 if text[0] == "-" else 1) * timedelta(hours=hours, minutes=minutes))


def _month_numbers() -> dict[str, int]:
    numbers: dict[str, int] = {}
    for row in read_table("months.csv"):
        for number in range(1, 13):
            for name in filter(None, row[str(number)].split("|")):
                if numbers.setdefault(name.lower(), number) != number:
                    raise ValueError(f"months.csv: {name!r} names two months ({row['locale']})")
    return numbers


MONTHS: Final = _month_numbers()
"""Number of a month by its lower-case name in any locale."""

ZONES: Final = {row["name"]: zone_of_offset(row["offset"]) for row in read_table("zones.csv")}
"""Zone by upper-case name; None if several zones share the name."""

_WORD = r"[^\W\d_]{3,12}\.?"
_WEEKDAY = r"(?:(?:(?:mon|tue|wed|thu|fri|sat|sun|mo|di|mi|do|fr|sa|so)[a-z]*|[^\W\d_]{2,4})\.?,?\s+)?"
_TIME = (
    r"(?P<hour>\d{1,2})(?P<colon>[:.h])(?P<minute>\d\d)(?:(?P=colon)(?P<second>\d\d)(?:[.,](?P<fraction>\d+))?)?"
    r"(?:\s*(?P<half>[ap])\.?\s?m\b\.?|\s*uhr\b)?"
)
_ZONE = (
    r"(?P<zone>[+-]\d\d(?::?\d\d)?|[A-Za-z]{1,5}(?:\d[A-Za-z]{3}|[+-]\d{1,2}(?::?\d\d)?)?|[A-Za-z]+/[A-Za-z_/+-]+\d*)"
)
# Go and Java write the zone's name after its offset, and Apache a colon before the time.
_AFTER = (
    rf"(?:(?:\s*[T,:_-]\s*|\s+(?:(?:at|à|um|klo?\.?|às|@)\s+)?){_TIME}"
    rf"(?:\s*\(?{_ZONE}\)?(?:\s[A-Z]{{1,5}}|\[[\w/+-]+\]|\s\([\w ]+\))?)?)?"
)
_SHAPES: Final = [
    re.compile(_WEEKDAY + shape + r"\s*\Z", re.IGNORECASE)
    for shape in (
        rf"(?P<year>\d{{4}})[-/.](?:(?P<month>\d{{1,2}})|(?P<name>{_WORD}))[-/.](?P<day>\d{{1,2}})" + _AFTER,
        r"(?P<first>\d{1,2})(?P<mark>[-/.])(?P<other>\d{1,2})(?P=mark)(?P<year>\d{4}|\d\d)" + _AFTER,
        rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th|er|\.)?[ /-]?\s*(?:of\s|de\s)?(?P<name>{_WORD})[ ,/.-]?\s*(?:de\s)?"
        r"(?P<year>\d{4}|\d\d)" + _AFTER,
        rf"(?P<name>{_WORD})[ -]\s*(?P<day>\d{{1,2}})(?:st|nd|rd|th)?,?[ -]\s*(?P<year>\d{{4}})" + _AFTER,
        rf"(?P<name>{_WORD})\s+(?P<day>\d{{1,2}})\s+{_TIME}\s+(?:{_ZONE}\s+)?(?P<year>\d{{4}})",
        rf"(?P<day>\d{{1,2}})\s+(?P<name>{_WORD})\s+{_TIME}\s+(?:{_ZONE}\s+)?(?P<year>\d{{4}})",
        r"(?P<year>\d{4})(?P<month>\d\d)(?P<day>\d\d)"
        rf"(?:[T -]?(?P<hour>\d\d):?(?P<minute>\d\d)(?::?(?P<second>\d\d)(?:[.,](?P<fraction>\d+))?)?{_ZONE}?)?",
        rf"{_TIME}(?:\s*\(?{_ZONE}\)?)?[\s,]+(?P<first>\d{{1,2}})(?P<mark>[-/.])(?P<other>\d{{1,2}})(?P=mark)"
        r"(?P<year>\d{4}|\d\d)",
    )
]
_DASHES: Final = dict.fromkeys(map(ord, "\u2010\u2011\u2212"), "-")
_EAST_ASIAN_DATE: Final = re.compile(r"(\d{4})[.年년]\s*(\d{1,2})[.月월]\s*(\d{1,2})[.日일]?\s*")
_EAST_ASIAN_HALF: Final = re.compile(r"(上午|下午|오전|오후|午前|午後)\s*([\d:.]+)")
_ISO_DAY: Final = re.compile(r"\d{4}-(?:(?P<week>W\d\d-[1-7])|\d{3})(?=\s|T|\Z)|\d{4}W\d{3}(?=\s|T|\Z)")
"""ISO 8601 week and ordinal dates: ``2026-W48-5``, ``2026W485`` and ``2026-332``."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PIVOT: Final = 70
_MAX_LENGTH: Final = 80


def clock_time(parts: Mapping[str, str | None], year: int, month: int, day: int) -> datetime:
    """Return a naive datetime from ``hour``, ``minute``, ``second``, ``fraction`` and ``half`` (a.m. or p.m.).

    Raises ``ValueError`` if the day or time does not exist.
    """
    hour, minute, second = (int(parts.get(name) or 0) for name in ("hour", "minute", "second"))
    if half := parts.get("half"):
        if not 1 <= hour <= 12:
            raise ValueError(f"{hour} {half}m")
        hour = hour % 12 + 12 * (half in "pP")
    second -= second == 60  # datetime has no leap seconds
    microsecond = int((parts.get("fraction") or "0").ljust(6, "0")[:6])
    return datetime(year, month, day, hour, minute, second, microsecond)  # noqa: DTZ001 - the text has no zone


class Dates(NamedTuple):
    """Parsed dates.

    ``ms``: milliseconds since 1970 in UTC if ``is_aware``, otherwise of the local time; shape (n,).
    ``is_read``, ``is_aware``, ``is_date``: whether a text was parsed, has an offset, has no time of day; shape (n,).
    ``order``: order of day and month, given or inferred from the texts; None if unknown.
    ``undecided``: an ambiguous text, or None.
    """

    ms: npt.NDArray[np.int64]
    is_read: npt.NDArray[np.bool_]
    is_aware: npt.NDArray[np.bool_]
    is_date: npt.NDArray[np.bool_]
    order: DateOrder | None
    undecided: str | None


def read_dates(texts: Sequence[str], order: DateOrder | None = None) -> Dates:
    """Parse the texts of one column.

    ``order``: order of day and month in dates like 03/04/2026; None: inferred from the other texts.
    """
    matches = [_match(text) for text in texts]
    effective = order or _order_of(matches)
    undecided = None
    ms = np.zeros(len(texts), np.int64)
    is_read, is_aware, is_date = (np.zeros(len(texts), np.bool_) for _ in range(3))
    for place, (text, parts) in enumerate(zip(texts, matches, strict=True)):
        if parts is None:
            continue
        if parts.get("first") and _is_undecided(parts) and effective is None:
            undecided = undecided or text
            continue
        read = _moment(parts, effective)
        if read is not None:
            ms[place], is_aware[place], is_read[place] = read[0], read[1], True
            is_date[place] = parts.get("hour") is None
    return Dates(ms, is_read, is_aware, is_date, effective, undecided)


def _match(text: str) -> dict[str, str] | None:
    if len(text) > _MAX_LENGTH:
        return None
    if not text.isascii():
        text = _EAST_ASIAN_DATE.sub(r"\1-\2-\3 ", text.translate(_DASHES))
        text = _EAST_ASIAN_HALF.sub(lambda match: f"{match[2]} {'ap'[match[1] in '下午오후午後']}m", text)
    if (day := _ISO_DAY.match(text)) is not None:
        form = "%Y-%j" if "W" not in day[0] else "%G-W%V-%u" if day["week"] else "%GW%V%u"
        try:
            date = datetime.strptime(day[0], form)  # noqa: DTZ007
        except ValueError:
            return None
        if date.strftime(form) != day[0]:  # day 366 or week 53 of a year that lacks it
            return None
        text = date.strftime("%Y-%m-%d" if "-" in day[0] else "%Y%m%d") + text[day.end() :]
    for shape in _SHAPES:
        match = shape.match(text)
        if match is not None:
            return match.groupdict()
    return None


def _order_of(matches: Sequence[dict[str, str] | None]) -> DateOrder | None:
    """Infer the order from numbers above 12; None if there are none, or they contradict each other."""
    orders: set[DateOrder] = set()
    for parts in matches:
        # Dates with dots put the day first everywhere.
        if parts and parts.get("first") and parts["mark"] != ".":
            orders |= {"dmy"} if int(parts["first"]) > 12 else set()
            orders |= {"mdy"} if int(parts["other"]) > 12 else set()
    return orders.pop() if len(orders) == 1 else None


def _is_undecided(parts: dict[str, str]) -> bool:
    first, other = int(parts["first"]), int(parts["other"])
    # 03/03 is the same in either order.
    return parts["mark"] != "." and first <= 12 and other <= 12 and first != other


def _moment(parts: dict[str, str], order: DateOrder | None) -> tuple[int, bool] | None:
    """Return milliseconds, and whether they are in UTC; None if the day or time does not exist."""
    year, month, day = parts.get("year") or "", parts.get("month"), parts.get("day")
    if parts.get("name"):
        month = str(MONTHS.get(parts["name"].lower().rstrip("."), 0))
    elif parts.get("first"):
        first, other = parts["first"], parts["other"]
        if order == "ymd" and len(year) == 2:
            year, month, day = first, other, year
        else:
            is_month_first = parts["mark"] != "." and (order == "mdy" if int(first) <= 12 else False)
            is_month_first |= int(other) > 12
            month, day = (first, other) if is_month_first else (other, first)
    full_year = int(year) + (0 if len(year) == 4 else 2000 if int(year) < _PIVOT else 1900)
    try:
        moment = clock_time(parts, full_year, int(month or 0), int(day or 0)).replace(tzinfo=UTC)
        offset = _offset(parts.get("zone"), moment)
    except (ValueError, OverflowError):
        return None
    ms = (moment - _EPOCH) // timedelta(milliseconds=1)
    return (ms, False) if offset is None else (ms - offset // timedelta(milliseconds=1), True)


def _offset(zone: str | None, moment: datetime) -> timedelta | None:
    """Return the offset from UTC; None without a zone. Raises ``ValueError`` if the zone is unknown or ambiguous."""
    if not zone:
        return None
    if "/" in zone:
        try:
            return moment.replace(tzinfo=ZoneInfo(zone)).utcoffset()
        except (ZoneInfoNotFoundError, OSError) as error:
            raise ValueError(zone) from error
    match = re.fullmatch(r"([A-Za-z]*(?:\d[A-Za-z]{3})?)([+-]\d{1,2}(?::?\d\d)?)?", zone)
    named = ZONES.get(match[1].upper() or "UTC") if match else None
    if match is None or named is None:
        raise ValueError(zone)
    written = zone_of_offset(match[2] or "+00")
    assert written is not None
    offset = sum((part.utcoffset(moment) or timedelta(0) for part in (named, written)), timedelta(0))
    if abs(offset) >= timedelta(hours=24):
        raise ValueError(zone)
    return offset
