"""Log files as a source of kernel messages: syslog in its forms, ``dmesg --time-format iso``, saved journals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Final

from telemetry.collect.kernel_log.lines import Lines, LogLine
from telemetry.collect.kernel_log.log_file import LogFile, Place
from telemetry.errors import InputError
from telemetry.xids.log_stamp import Stamped, split_line

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


_POLL_S: Final = 0.25
_WRITER_DONE: Final = timedelta(minutes=1)
# A last line without an end is taken when nobody has added to it for so long.


class LogFiles:
    """Follows one or more log files.

    ``position``: what :class:`Lines` of an earlier process ended with; empty for none.
    ``zone``: of stamps without an offset; None is the zone of this machine.
    ``once``: whether what is there is all that is wanted: a file must then exist, and may end without a line end.
    Raises ``InputError``: If, with ``once``, a file does not exist, or if a file may not be read.
    """

    name = "file"

    def __init__(
        self,
        paths: Sequence[Path],
        position: Mapping[str, Any],
        *,
        clock: Callable[[], datetime],
        zone: tzinfo | None = None,
        once: bool = False,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._clock, self._once, self._sleep = clock, once, sleep
        self._files: list[LogFile] = []
        self._stamps: list[StampReader] = []
        self._new: list[bool] = []
        self._others = {key: value for key, value in position.items() if key not in {str(path) for path in paths}}
        for path in dict.fromkeys(paths):
            if once and not path.exists():
                raise InputError("the log file does not exist", str(path), "Check the path.")
            kept = position.get(str(path))
            self._files.append(LogFile(path, None if kept is None else Place.from_json(kept)))
            self._stamps.append(StampReader(zone))
            self._new.append(kept is None)

    def read(self, wait_s: float) -> Lines:
        """Return what is there; see :class:`LogSource`."""
        deadline = time.monotonic() + wait_s
        while True:
            lines: list[LogLine] = []
            drained = True
            for index, file in enumerate(self._files):
                try:
                    raw, done = file.read(final=self._once and self._is_done(file.path))
                except PermissionError as error:
                    raise InputError(
                        "the log file may not be read",
                        str(error.filename or file.path),
                        "Run as a user of the group adm, or take `--source journal`.",
                    ) from None
                lines += self._lines(raw, index)
                drained &= done
                if done:
                    self._new[index] = False
            left_s = deadline - time.monotonic()
            if lines or not drained or left_s <= 0:
                return Lines(lines, self._position(), drained)
            self._sleep(min(_POLL_S, left_s))

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _position(self) -> dict[str, Any]:
        own = {str(file.path): file.place.to_json() for file in self._files if file.place is not None}
        return self._others | own

    def _is_done(self, path: Path) -> bool:
        try:
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except FileNotFoundError:
            return True
        return self._clock() - written > _WRITER_DONE

    def _lines(self, raw: list[bytes], index: int) -> list[LogLine]:
        made: list[LogLine] = []
        now = self._clock()
        for line in raw:
            # Only the driver and the kernel's first words matter, and a central syslog has very many others.
            if b"NVRM" not in line and b"Linux version" not in line:
                continue
            text = line.decode("utf-8", errors="replace").rstrip("\r")
            stamped = split_line(text)
            if stamped is None:
                made.append(LogLine(text, None, history=self._new[index]))
                continue
            when = self._stamps[index].instant(stamped, now)
            made.append(LogLine(stamped.message, when, stamped.host, None, self._new[index]))
        return made
