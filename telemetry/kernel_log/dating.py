"""Instants of log lines: which of a line's stamps counts, its year and its zone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from telemetry.kernel_log.stamps import Stamp

_AHEAD: Final = timedelta(days=1)
# Clocks and zones of a log and its reader differ a little; a stamp further ahead is of the year before.
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
"""What an instant lacks, and what to do about it."""


@dataclass(frozen=True, slots=True)
class LogContext:
    """What a log leaves unsaid.

    ``zone``: of stamps without an offset.
    ``reference``: Aware; a moment after the last line, from which years are counted back.
    ``boot_time``: Aware; when the kernel of stamps in seconds since boot started.
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


def date_lines(lines: Sequence[Sequence[Stamp]], clock: LogContext) -> list[datetime | str | None]:
    """Return the instant of each line, what it lacks (a key of :data:`ADVICE`), or None where it has no stamp.

    ``lines``: the stamps of each line, in their order.

    From the last line to the first, none is over half a year later than the one after it, which gives the years.
    """
    instants: list[datetime | str | None] = []
    limit = (clock.reference or datetime.now(UTC)).astimezone(UTC)
    if clock.boot_time is not None:
        clock = replace(clock, boot_time=clock.boot_time.astimezone(UTC))
    for stamps in reversed(lines):
        when = _date(stamps, clock, limit)
        if isinstance(when, datetime) and when < limit:
            limit = min(limit, when + _DISORDER)
        instants.append(when)
    return instants[::-1]


def _date(stamps: Sequence[Stamp], clock: LogContext, limit: datetime) -> datetime | str | None:
    """Take the stamp nearest to the message: those before it are of the programs that passed the line on.

    The time since boot is nearer still, but which boot is rarely known.
    """
    lacking: str | None = None
    for stamp in reversed(stamps):
        if stamp.aware is not None:
            return stamp.aware
        if stamp.naive is None:
            continue
        if stamp.yearless and clock.reference is None:
            lacking = lacking or NO_YEAR
        elif clock.zone is None:
            lacking = lacking or NO_ZONE
        else:
            return _localised(stamp.naive, clock.zone, limit) if not stamp.yearless else _latest(stamp, clock, limit)
    if lacking is not None or not stamps:
        return lacking
    since_boot = stamps[-1].since_boot
    if since_boot is None or clock.boot_time is None:
        return NO_BOOT
    return clock.boot_time + timedelta(seconds=since_boot)


def _latest(stamp: Stamp, clock: LogContext, limit: datetime) -> datetime | None:
    """Return the instant in the latest year that does not put it more than a day after ``limit``."""
    assert stamp.naive is not None
    assert clock.zone is not None
    for year in range(limit.year + 1, limit.year - 8, -1):  # 29 February comes every four years, or eight
        try:
            when = _localised(stamp.naive.replace(year=year), clock.zone, limit)
        except ValueError:
            continue
        if when is not None and when <= limit + _AHEAD:
            return when
    return None


def _localised(naive: datetime, zone: tzinfo, limit: datetime) -> datetime | None:
    """Of the hour that a change of the clocks repeats, take the later one unless it is still to come."""
    try:
        first, second = (naive.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    except OverflowError:  # the first or the last day that there is
        return None
    return second if first < second <= limit + _CLOCK_ERROR else first
