"""The time stamp and host at the beginning of a kernel log line, in every usual form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH = "(?P<month>" + "|".join(_MONTHS) + ")"
_PRIORITY = r"(?:<\d{1,3}>(?:1 )?)?"
_CLOCK = r"(?P<clock>\d{2}:\d{2}:\d{2})"
_SINCE_BOOT = re.compile(_PRIORITY + r"\s*\[\s*(?P<seconds>\d+\.\d+)\](?:\[[^\]]*\])?\s*(?P<rest>.*)", re.DOTALL)
_BRACKETED = re.compile(
    _PRIORITY + rf"\s*\[(?:\w{{3}} )?{_MONTH}\s+(?P<day>\d{{1,2}}) "
    rf"(?:{_CLOCK} (?P<year>\d{{4}})|(?P<year2>\d{{4}}) (?P<clock2>\d{{2}}:\d{{2}}:\d{{2}}))\]\s*(?P<rest>.*)",
    re.DOTALL,
)
_SYSLOG = re.compile(_PRIORITY + rf"{_MONTH}\s+(?P<day>\d{{1,2}}) {_CLOCK}(?:\.\d+)?\s+(?P<rest>.*)", re.DOTALL)
_ISO = re.compile(
    _PRIORITY + r"\[?(?P<iso>\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?)\s?"
    r"(?P<offset>Z|UTC|[+-]\d{2}:?\d{2})?\]?\s+(?P<rest>.*)",
    re.DOTALL,
)
_HOST = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*)\s+(?P<tag>[^\s:\[]+)(?:\[\d+\])?(?::|\s-)\s*(?P<rest>.*)", re.DOTALL)


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
    if line.lstrip().startswith("{"):
        return _journal(line)
    for form, take_apart in _FORMS:
        match = form.match(line)
        if match:
            return take_apart(match)
    return None


def _iso(match: re.Match[str]) -> Stamped | None:
    whole, _, fraction = match["iso"].replace(",", ".").partition(".")
    text = f"{whole}.{fraction[:6]:0<6}" if fraction else whole
    offset = (match["offset"] or "").replace("UTC", "+00:00").replace("Z", "+00:00")
    host, message = _host(match["rest"])
    try:
        when = datetime.fromisoformat(text + offset)
    except ValueError:
        return None
    return Stamped(message, host, aware=when) if offset else Stamped(message, host, naive=when)


def _syslog(match: re.Match[str]) -> Stamped | None:
    found = _date(2000, match["month"], match["day"], match["clock"])
    host, message = _host(match["rest"])
    return None if found is None else Stamped(message, host, naive=found, yearless=True)


def _bracketed(match: re.Match[str]) -> Stamped | None:
    year, clock = match["year"] or match["year2"], match["clock"] or match["clock2"]
    found = _date(int(year), match["month"], match["day"], clock)
    return None if found is None else Stamped(match["rest"], naive=found)


def _since_boot(match: re.Match[str]) -> Stamped:
    return Stamped(match["rest"], since_boot=timedelta(seconds=float(match["seconds"])))


_FORMS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Stamped | None]], ...]] = (
    (_ISO, _iso),
    (_SYSLOG, _syslog),
    (_BRACKETED, _bracketed),
    (_SINCE_BOOT, _since_boot),
)


def _host(rest: str) -> tuple[str | None, str]:
    match = _HOST.match(rest)
    return (match["host"], match["rest"]) if match else (None, rest)


def _date(year: int, month: str, day: str, clock: str) -> datetime | None:
    try:
        text = f"{year:04d}-{_MONTHS.index(month) + 1:02d}-{int(day):02d}T{clock}"
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _journal(line: str) -> Stamped | None:
    try:
        content: Any = json.loads(line)
        message: Any = content["MESSAGE"]
        if isinstance(message, list):  # the journal writes text that is not UTF-8 as a list of bytes
            message = bytes(message).decode("utf-8", errors="replace")
        stamp = content.get("_SOURCE_REALTIME_TIMESTAMP", content["__REALTIME_TIMESTAMP"])
        when = datetime.fromisoformat("1970-01-01T00:00:00+00:00") + timedelta(microseconds=int(stamp))
        return Stamped(str(message), content.get("_HOSTNAME"), aware=when)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
