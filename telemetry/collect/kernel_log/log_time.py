"""The instant of a log line whose stamp leaves something unsaid: the year, the zone, which of two equal hours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

from telemetry.log_stamp import Stamped

_AHEAD: Final = timedelta(days=1)
# Clocks and zones of a log and its reader differ a little; a stamp further ahead is of the year before.
_BACK: Final = timedelta(seconds=90)
# Lines of several writers come slightly out of order; falling back further is the change of the clocks.


class StampReader:
    """Reads the stamps of one log, in its order.

    ``zone``: of stamps without an offset; None is the zone of this machine.

    A stamp without a year is in the latest year that does not put it more than a day after the time of reading: right
    for a log that is read within a year of its writing. Of the hour that a change of the clocks repeats, the first is
    taken until the stamps fall back.
    """

    def __init__(self, zone: tzinfo | None) -> None:
        self._zone = zone
        self._before: datetime | None = None

    def instant(self, stamped: Stamped, reference: datetime) -> datetime | None:
        """Return the aware instant; None if the stamp gives none, as seconds since an unknown boot do."""
        if stamped.aware is not None:
            return stamped.aware.astimezone(UTC)
        if stamped.naive is None:
            return None
        when = self._dated(stamped.naive, reference) if stamped.yearless else self._aware(stamped.naive)
        if when is not None:
            self._before = when
        return when

    def _dated(self, naive: datetime, reference: datetime) -> datetime | None:
        limit = reference + _AHEAD
        for year in range(limit.year + 1, limit.year - 8, -1):  # 29 February comes every four years, or eight
            try:
                when = self._aware(naive.replace(year=year))
            except ValueError:
                continue
            if when <= limit:
                return when
        return None

    def _aware(self, naive: datetime) -> datetime:
        first = self._localised(naive.replace(fold=0))
        second = self._localised(naive.replace(fold=1))
        if second > first and self._before is not None and first < self._before - _BACK <= second:
            return second
        return first

    def _localised(self, naive: datetime) -> datetime:
        local = naive.astimezone() if self._zone is None else naive.replace(tzinfo=self._zone)
        return local.astimezone(UTC)
