"""The time stamp and host at the beginning of a kernel log line, in every usual form, and the instant that it means."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final

_MONTH = r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_PRIORITY = r"(?:<\d{1,3}>(?:1 )?)?"
_CLOCK = r"\d{2}:\d{2}:\d{2}"
_SINCE_BOOT = re.compile(_PRIORITY + r"\s*\[\s*(?P<seconds>\d{1,10}\.\d+)\](?:\[[^\]]*\])?\s*(?P<rest>.*)", re.DOTALL)
_BRACKETED = re.compile(
    _PRIORITY + rf"\s*\[(?:\w{{3}} )?{_MONTH}\s+(?P<day>\d{{1,2}}) "
    rf"(?:(?P<early_year>\d{{4}}) )?(?P<clock>{_CLOCK})(?: (?P<year>\d{{4}}))?\]\s*(?P<rest>.*)",
    re.DOTALL,
)
_SYSLOG = re.compile(
    _PRIORITY + rf"{_MONTH}\s+(?P<day>\d{{1,2}}) (?P<clock>{_CLOCK})(?:\.\d+)?\s+(?P<rest>.*)", re.DOTALL
)
_ISO = re.compile(
    _PRIORITY + rf"\[?(?P<iso>\d{{4}}-\d{{2}}-\d{{2}}[T ]{_CLOCK}(?:[.,]\d+)?)\s?"
    r"(?P<offset>Z|UTC|[+-]\d{2}:?\d{2})?\]?\s+(?P<rest>.*)",
    re.DOTALL,
)
_HOST = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*)\s+(?P<tag>[^\s:\[]+)(?:\[\d+\])?(?::|\s-)\s*(?P<rest>.*)", re.DOTALL)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AHEAD: Final = timedelta(days=1)
# Clocks and zones of a log and its reader differ a little; a stamp further ahead is of the year before.
_CLOCK_ERROR: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Stamped:
    """A line taken apart.

    ``naive``: a date and time without an offset; with ``yearless`` its year is the leap year 2000 and means nothing.
    """

    message: str
    host: str | None = None
    aware: datetime | None = None
    naive: datetime | None = None
    yearless: bool = False
    since_boot: timedelta | None = None


def split_line(line: str) -> Stamped | None:
    """Take a line apart; None if it begins with no known stamp.

    Known are journal JSON (``journalctl -o json``), syslog with and without a year, ISO syslog, ``dmesg`` with seconds
    since boot, ``dmesg -T``, and ``dmesg --time-format iso``.
    """
    try:
        if line.lstrip().startswith("{"):
            return _journal(json.loads(line))
        if match := _ISO.match(line):
            return _iso(match)
        if match := _SYSLOG.match(line):
            return Stamped(*_host(match["rest"]), naive=_date("2000", match), yearless=True)
        if match := _BRACKETED.match(line):
            return Stamped(match["rest"], naive=_date(match["year"] or match["early_year"], match))
        if match := _SINCE_BOOT.match(line):
            return Stamped(match["rest"], since_boot=timedelta(seconds=float(match["seconds"])))
    except (ValueError, KeyError, TypeError, OverflowError):  # a 77th of March, JSON that is no entry of a journal
        pass
    return None


def instant_of(stamped: Stamped, zone: tzinfo | None, now: datetime) -> datetime | None:
    """Return the aware instant of a stamp; None if it gives none, as seconds since an unknown boot do.

    ``zone``: of stamps without an offset; None is the zone of this machine.

    A stamp without a year is in the latest year that does not put it more than a day after ``now``: right for a log
    that is read within a year of its writing. Of the hour that a change of the clocks repeats, the later one is taken
    that is not to come yet: right for a log that is followed.
    """
    try:
        return _instant_of(stamped, zone, now)
    except OverflowError:  # a stamp of the first or the last day that there is
        return None


def _instant_of(stamped: Stamped, zone: tzinfo | None, now: datetime) -> datetime | None:
    if stamped.aware is not None:
        return stamped.aware.astimezone(UTC)
    if stamped.naive is None:
        return None
    if not stamped.yearless:
        return _localised(stamped.naive, zone, now)
    limit = now + _AHEAD
    for year in range(limit.year + 1, limit.year - 8, -1):  # 29 February comes every four years, or eight
        try:
            when = _localised(stamped.naive.replace(year=year), zone, now)
        except ValueError:
            continue
        if when <= limit:
            return when
    return None


def _localised(naive: datetime, zone: tzinfo | None, now: datetime) -> datetime:
    first, second = (
        (local.astimezone() if zone is None else local.replace(tzinfo=zone)).astimezone(UTC)
        for local in (naive.replace(fold=0), naive.replace(fold=1))
    )
    return second if first < second <= now + _CLOCK_ERROR else first


def _iso(match: re.Match[str]) -> Stamped:
    when = datetime.fromisoformat(match["iso"] + (match["offset"] or "").replace("UTC", "Z"))
    message, host = _host(match["rest"])
    return Stamped(message, host, naive=when) if when.tzinfo is None else Stamped(message, host, aware=when)


def _host(rest: str) -> tuple[str, str | None]:
    match = _HOST.match(rest)
    return (match["rest"], match["host"]) if match else (rest, None)


def _date(year: str, match: re.Match[str]) -> datetime:
    text = f"{year} {match['month']} {match['day']} {match['clock']}"
    return datetime.strptime(text, "%Y %b %d %H:%M:%S")  # noqa: DTZ007


def _journal(entry: Any) -> Stamped:
    message = entry["MESSAGE"]
    if isinstance(message, list):  # the journal writes text that is not UTF-8 as a list of bytes
        message = bytes(message).decode("utf-8", errors="replace")
    stamp = entry.get("_SOURCE_REALTIME_TIMESTAMP", entry["__REALTIME_TIMESTAMP"])
    host = entry.get("_HOSTNAME")
    message = str(message).encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair
    return Stamped(message, host if isinstance(host, str) else None, aware=_EPOCH + timedelta(microseconds=int(stamp)))
