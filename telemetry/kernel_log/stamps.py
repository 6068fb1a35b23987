"""Timestamps and hostnames of log lines, with year and time zone resolved.

Tools write timestamps in dozens of formats, and forwarders prepend their own. The parser therefore searches the whole
prefix of a message for every format instead of matching complete lines per tool.
Month and zone names come from :mod:`telemetry.values.dates`.
"""

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from telemetry.values.dates import MONTHS, ZONES, clock_time, zone_of_offset

_MAX_PREFIX: Final = 1000
# A longer prefix is not a log header.
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DIGITS: Final = {10: 1, 13: 10**3, 16: 10**6, 19: 10**9}


class Stamp(NamedTuple):
    """A parsed timestamp; exactly one of ``aware``, ``naive`` and ``since_boot`` (seconds) is set.

    ``yearless``: the year of ``naive`` is a placeholder (2000, a leap year).
    """

    aware: datetime | None = None
    naive: datetime | None = None
    yearless: bool = False
    since_boot: float | None = None


class LinePrefix(NamedTuple):
    """Header before a message; ``stamps`` in order of appearance."""

    stamps: tuple[Stamp, ...] = ()
    host: str | None = None


_NAME = r"(?<![^\W_])(?P<name>[^\W\d_]{2,14}|\d{1,2}[月월])\.?"
_CLOCK = (
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2}):(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?"
    r"(?:\s?(?P<half>[AaPp])\.?[Mm]\b\.?)?(?:\s?(?P<zone>[+-]\d{2}(?::?\d{2})?(?![\d:])|[A-Z]{1,5}(?:\d[A-Z]{3})?(?![\w.-])))?"
    r"(?:(?<=\d) UTC\b)?"  # Go writes "+0000 UTC"
)
_TEXT_YEAR = r"(?:\s+(?P<year2>(?:19|20)\d{2})\b)?"
_CLOCKS = re.compile(r"\d:\d{2}:\d{2}")
_FORMS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?<!\d)(?P<year>\d{{4}})[-/.](?P<month>\d{{1,2}})[-/.](?P<day>\d{{1,2}})(?:[Tt_-]|,?\s){_CLOCK}",
        rf"{_NAME}\s{{0,3}}(?P<day>\d{{1,2}})[.,]?\s+(?:(?P<year>\d{{4}}),?\s+)?(?:@\s)?{_CLOCK}{_TEXT_YEAR}",
        rf"(?<!\d)(?P<day>\d{{1,2}})[\s./-]{{1,2}}{_NAME}[\s./-]*(?P<year>\d{{4}})?[\s:,T]+{_CLOCK}{_TEXT_YEAR}",
        rf"(?<!\d)(?P<year>\d{{4}})[年년]\s*(?P<month>\d{{1,2}})[月월]\s*(?P<day>\d{{1,2}})[日일]?\s*{_CLOCK}",
        rf"(?<![\d.])(?P<day>\d{{1,2}})\.(?P<month>\d{{1,2}})\.(?P<year>\d{{4}})[,\s]\s?{_CLOCK}",
        rf"(?<!\w)[IWEF](?P<month>\d{{2}})(?P<day>\d{{2}})\s{_CLOCK}",
    )
)
_NO_HOST = (
    r"(?!(?:stdout|stderr|kernel|emerg|alert|crit|err|error|warn|warning|notice|info|debug|trace|fatal|critical|severe|panic|emergency|(?-i:[A-Z]))(?![\w.-]))"
    r"(?!(?:kern|user|daemon|syslog|auth|authpriv|local\d)\.\w+\s)"
)
_RSYSLOG = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) "
    rf"{_NO_HOST}([A-Z][\w-]{{3,60}}) kernel: ",
    re.IGNORECASE,
)
_UNIX = re.compile(r"(?<![\w.,:;/=-])(?P<whole>\d{19}|\d{16}|\d{13}|\d{10})(?:\.(?P<fraction>\d{1,9}))?(?![\w:/-])")
_SINCE_BOOT = re.compile(
    r"\[\s*(?P<seconds>\d{1,10}\.\d{1,9})(?:\s*<[^>]{0,40}>)?\]|(?<![^\n])(?:\d+\.[\w.+-]+,)?\d+,\d+,(?P<us>\d{1,15}),[^;]*;"
)

_RELATIVE = re.compile(
    r"(?:\x1b\[[\d;]*m|\w{3,8} *:\w{3,6} *: )*"
    r"\[(?: *\+(?P<delta>\d{1,3}\.\d{1,9})|(?P<name>[^\W\d_]{2,14}|\d{1,2}[月월])\.? *(?P<day>\d{1,2}) "
    r"(?P<hour>\d\d):(?P<minute>\d\d))\]"
)

_HOST = re.compile(
    rf"[\]>)\s\",;]*(?:<\w+\.\w+>\s*)?{_NO_HOST}(?:[\w.-]+@)?"
    r"(?P<host>(?=[\w.-]*[A-Za-z]|\d+\.\d+\.\d+\.\d+)[A-Za-z0-9][\w.-]*|(?=[\da-f]*:[\da-f:]*:)[\da-f:]+:[\da-f]+(?=\s+kernel))"
    # Relays of syslog-ng with `chain-hostnames` write "source@node/relay".
    r"(?:/[\w.@-]+)*(?:\s+(?:kern|user|daemon|syslog|local\d)\.\w+)?"
    r"(?:\s+[^\s:\[{]+(?:\[[^\]]*\])?(?::|(?:\s[\w-]+){2}(?:\s|\Z)|\s*\Z)|\"?[,;].*\Z|\s*\Z)",
    re.IGNORECASE,
)
_BEFORE_STAMP = re.compile(
    r"\s*(?P<host>(?=[\w.-]*\d)[A-Za-z][\w.-]*|\d+\.\d+\.\d+\.\d+)(?::| kernel:| \| [A-Z]+ \|.*)\s"
)
# pdsh, clush and talosctl prefix each line with "node-7: ", Ansible with "node-7 | CHANGED | rc=0 | (stdout) ".
_LABEL = re.compile(
    r"""\b(?:host|hostname|node|nodename|node_name|instance)(?:["'\\]*\s*[=:]>?\s*["'\\]+|=)([A-Za-z0-9][\w.-]*)"""
)


class RelativeStamps:
    """Timestamps of ``dmesg --reltime``: the minute when it changes, otherwise seconds since the previous line.

    A line's time is the last minute plus the deltas since, up to a minute early. In a log filtered for GPU messages
    lines are missing, so deltas are used only after a line about something else.
    """

    def __init__(self) -> None:
        self._last: datetime | None = None
        self._is_whole = False

    def read(self, line: str, *, is_about_a_gpu: bool) -> Stamp | None:
        """Return the timestamp of the next line; None if it has another format or the minute is unknown."""
        match = _RELATIVE.match(line)
        if match is None:
            self._last = self._last if line[:1].isspace() else None  # continuation of a multi-line message
            return None
        self._is_whole |= not is_about_a_gpu
        try:
            if match["delta"] is None:
                month = MONTHS.get(match["name"].lower(), 0)
                day, hour, minute = (int(match[name]) for name in ("day", "hour", "minute"))
                self._last = datetime(2000, month, day, hour, minute)  # noqa: DTZ001 - `naive`
            elif self._last is not None:
                self._last += timedelta(seconds=float(match["delta"]))
        except ValueError:  # March 77
            self._last = None
        is_dated = self._last is not None and (self._is_whole or match["delta"] is None)
        return Stamp(naive=self._last, yearless=True) if is_dated else None


def parse_header(prefix: str) -> LinePrefix:
    """Parse the timestamps and the hostname before a message."""
    # The kernel's own timestamp, the last one, is unique to a line; the text before it often hits the cache.
    start = prefix.rfind("[") if prefix.endswith("] ") else -1
    match = _SINCE_BOOT.fullmatch(prefix, start, len(prefix) - 1) if start >= 0 else None
    if match is None:
        return _rsyslog(prefix) or _parse(prefix)
    outer, stamp = prefix[:start], _since_boot(match)
    header = (_rsyslog(outer) or _parse(outer)) if outer else LinePrefix()
    return header if stamp is None else LinePrefix((*header.stamps, stamp), header.host)


def _rsyslog(prefix: str) -> LinePrefix | None:
    """Parse the most common format uncached: its microsecond timestamps would never hit the cache."""
    match = _RSYSLOG.fullmatch(prefix)
    if match is None:
        return None
    try:
        when = datetime.fromisoformat(match[1]).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return LinePrefix((Stamp(when),), match[2])


@lru_cache(maxsize=4096)
def _parse(prefix: str) -> LinePrefix:
    prefix = prefix[-_MAX_PREFIX:]
    if not prefix.isascii():
        prefix = unicodedata.normalize("NFC", prefix)
    stamps = _calendar_stamps(prefix) + _boot_stamps(prefix) or _unix_stamps(prefix)
    if len(stamps) > 1:
        stamps.sort(key=lambda item: item[0])
    host = None
    for index in range(len(stamps) - 1, -1, -1):
        end = stamps[index + 1][0] if index + 1 < len(stamps) else len(prefix)
        tail = prefix[stamps[index][1] : end].rstrip(" [(<")
        match = _HOST.match(tail) or _LABEL.search(tail)
        if match is not None:
            host = match[1]
            break
    else:
        first = _BEFORE_STAMP.match(prefix[: stamps[0][0]] if stamps else prefix)
        host = first["host"] if first else None
    return LinePrefix(tuple(stamp for _, _, stamp in stamps), host)


def parse_time(value: object) -> Stamp | None:
    """Parse a time field of a structured log: text in any format, or a Unix time in seconds to nanoseconds."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        # Magnitude implies the unit: seconds to nanoseconds of this century do not overlap.
        if not 1e9 <= value < 1e19:
            return None
        scale = next(scale for digits, scale in _EPOCH_DIGITS.items() if value < 10**digits)
        return _epoch(int(value // scale), (value % scale) / scale)
    stamps = parse_header(str(value)[:100]).stamps
    return stamps[0] if stamps else None


def _calendar_stamps(prefix: str) -> list[tuple[int, int, Stamp]]:
    stamps: list[tuple[int, int, Stamp]] = []
    clocks = len(_CLOCKS.findall(prefix))
    for form in _FORMS:
        if len(stamps) == clocks:
            break
        for match in form.finditer(prefix):
            stamp, end = _calendar(match)
            overlaps = any(match.start() < stop and start < match.end() for start, stop, _ in stamps)
            if stamp is not None and not overlaps:
                stamps.append((match.start(), end, stamp))
    return stamps


def _calendar(match: re.Match[str]) -> tuple[Stamp | None, int]:
    """Return the timestamp (None for an invalid date) and its end offset."""
    groups = match.groupdict()
    name, zone_name, year = groups.get("name"), groups["zone"], groups.get("year") or groups.get("year2")
    month = int(groups["month"]) if name is None else MONTHS.get(name.lower())
    if month is None:
        return None, 0
    try:
        naive = clock_time(groups, int(year or 2000), month, int(groups["day"]))
        is_name = bool(zone_name) and zone_name[0].isalpha()
        zone = ZONES.get(zone_name) if is_name else zone_of_offset(zone_name or "")
    except ValueError:  # March 77, or an offset of 99 hours
        return None, 0
    end = match.end()
    if is_name and zone_name not in ZONES and not groups.get("year2"):
        end = match.start("zone")  # an uppercase hostname
    if year and zone is not None:
        return _aware(naive.replace(tzinfo=zone)), end
    return Stamp(naive=naive, yearless=not year), end


def _boot_stamps(prefix: str) -> list[tuple[int, int, Stamp]]:
    if "[" not in prefix and ";" not in prefix:
        return []
    matches = ((match, _since_boot(match)) for match in _SINCE_BOOT.finditer(prefix))
    return [(match.start(), match.end(), stamp) for match, stamp in matches if stamp is not None]


def _since_boot(match: re.Match[str]) -> Stamp | None:
    seconds = float(match["seconds"]) if match["seconds"] else int(match["us"]) / 1e6
    if seconds >= 1e9:
        # Not an uptime (31 years) but a Unix time.
        return _epoch(int(seconds), seconds % 1)
    return Stamp(since_boot=seconds)


def _unix_stamps(prefix: str) -> list[tuple[int, int, Stamp]]:
    stamps: list[tuple[int, int, Stamp]] = []
    for match in _UNIX.finditer(prefix):
        scale = _EPOCH_DIGITS[len(match["whole"])]
        seconds, fraction = divmod(int(match["whole"]), scale)
        stamp = _epoch(seconds, float(f"0.{match['fraction']}") if match["fraction"] else fraction / scale)
        if stamp is not None:
            stamps.append((match.start(), match.end(), stamp))
    return stamps


def _epoch(seconds: int, fraction: float) -> Stamp | None:
    if not 10**9 <= seconds < 4_102_444_800:
        return None
    return Stamp(aware=_EPOCH + timedelta(seconds=seconds, microseconds=round(fraction * 1e6)))


def _aware(when: datetime) -> Stamp | None:
    try:
        return Stamp(aware=when.astimezone(UTC))
    except OverflowError:  # the first or last representable day
        return None


_AHEAD: Final = timedelta(days=1)
# Clocks and zones of the log and of this machine may differ; a timestamp further ahead is from the year before.
_CLOCK_ERROR: Final = timedelta(minutes=5)
_DISORDER: Final = timedelta(days=182)

NO_ZONE: Final = "are naive (without a time zone)"
NO_YEAR: Final = "have no year"
NO_BOOT: Final = "are seconds since boot"
ADVICE: Final = {
    NO_ZONE: "Give `kernel_log: {timezone: UTC}` in the mapping, with the zone they were written in.",
    NO_YEAR: "Give `kernel_log: {reference_time: …}` in the mapping: a moment after the last line.",
    NO_BOOT: "Give `kernel_log: {boot_time: …}` in the mapping, or write the log with `dmesg --time-format iso`.",
}
"""Remedy for each reason why a timestamp is ambiguous."""


@dataclass(frozen=True, slots=True)
class LogContext:
    """Context needed to resolve incomplete timestamps.

    ``zone``: zone of timestamps without an offset.
    ``reference``: aware, after the last line; years are inferred backwards from it.
    ``boot_time``: aware; origin of timestamps in seconds since boot.
    """

    zone: tzinfo | None = None
    reference: datetime | None = None
    boot_time: datetime | None = None


def machine_zone() -> tzinfo:
    """Return the time zone of this machine."""
    name = os.environ.get("TZ", "").lstrip(":")
    try:
        if name:
            return ZoneInfo(name)
        with Path("/etc/localtime").open("rb") as stream:
            return ZoneInfo.from_file(stream, key="localtime")
    except (OSError, ValueError, KeyError):
        return UTC


TWICE: Final = "local time that occurs twice, read as the later one"
SKIPPED: Final = "local time that the clock change skips, read an hour later; check the time zone"
"""Assumptions about local times at a change of daylight saving time."""


class Dated(NamedTuple):
    """Time of a line: UTC, a key of :data:`ADVICE` if it is ambiguous, or None; and the assumption behind it."""

    when: datetime | str | None
    assumed: str | None = None


def date_lines(lines: Sequence[Sequence[Stamp]], clock: LogContext) -> list[Dated]:
    """Return the time of each line.

    ``lines``: the timestamps of each line, in log order.

    Years are inferred backwards: no line is more than half a year later than the next one.
    """
    instants: list[Dated] = []
    limit = following = (clock.reference or datetime.now(UTC)).astimezone(UTC)
    if clock.boot_time is not None:
        clock = replace(clock, boot_time=clock.boot_time.astimezone(UTC))
    first_unsettled = 0
    for stamps in reversed(lines):
        when, assumed = _date(stamps, clock, limit, following)
        if isinstance(when, datetime) and when < limit:
            limit, following = min(limit, when + _DISORDER), when
        if assumed == _FIRST:  # this line is of the first hour, so the lines after it are of the second
            instants[first_unsettled:] = [
                Dated(later.when) if later.assumed == TWICE else later for later in instants[first_unsettled:]
            ]
            assumed, first_unsettled = None, len(instants)
        instants.append(Dated(when, assumed))
    return instants[::-1]


def _date(stamps: Sequence[Stamp], clock: LogContext, limit: datetime, following: datetime) -> Dated:
    """Resolve the timestamp closest to the message; earlier ones were added by forwarders.

    The kernel's time since boot is closer still but used last, because the boot time is rarely known.
    """
    lacking: str | None = None
    for stamp in reversed(stamps):
        if stamp.aware is not None:
            return Dated(stamp.aware)
        if stamp.naive is None:
            continue
        if stamp.yearless and clock.reference is None:
            lacking = lacking or NO_YEAR
        elif clock.zone is None:
            lacking = lacking or NO_ZONE
        else:
            if stamp.yearless:
                return _latest(stamp, clock, limit, following)
            return _localised(stamp.naive, clock.zone, following)
    if lacking is not None or not stamps:
        return Dated(lacking)
    since_boot = stamps[-1].since_boot
    if since_boot is None or clock.boot_time is None:
        return Dated(NO_BOOT)
    return Dated(clock.boot_time + timedelta(seconds=since_boot))


def _latest(stamp: Stamp, clock: LogContext, limit: datetime, following: datetime) -> Dated:
    """Resolve to the latest year that puts the timestamp at most a day after ``limit``."""
    assert stamp.naive is not None
    assert clock.zone is not None
    for year in range(limit.year + 1, limit.year - 8, -1):  # Feb 29 recurs after four or eight years
        try:
            dated = _localised(stamp.naive.replace(year=year), clock.zone, following)
        except ValueError:
            continue
        if isinstance(dated.when, datetime) and dated.when <= limit + _AHEAD:
            return dated
    return Dated(None)


_FIRST: Final = "the first of two"


def _localised(naive: datetime, zone: tzinfo, following: datetime) -> Dated:
    """Convert to UTC; in the hour repeated by a DST change, prefer the later time unless the next line is earlier."""
    try:
        first, second = (naive.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    except OverflowError:  # the first or last representable day
        return Dated(None)
    if first < second:
        return Dated(second, TWICE) if second <= following + _CLOCK_ERROR else Dated(first, _FIRST)
    return Dated(first, SKIPPED if second < first else None)
