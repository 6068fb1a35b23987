"""Log files as a source of kernel messages: syslog in its forms, ``dmesg --time-format iso``, saved journals.

One growing file is followed across rotations: what was read, what it was renamed to, compressed to, or copied to.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import logging
import lzma
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import IO, Any, Final

from telemetry.collect.kernel_log.lines import Lines, LogLine
from telemetry.errors import InputError
from telemetry.xids.log_stamp import Stamped, split_line

_log = logging.getLogger(__name__)
_HEAD: Final = 1024
# So many first bytes tell one log from another: a stamp and some lines.
_CHUNK: Final = 1 << 20
_MAX_LINE: Final = 1 << 16
_OPENERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
_DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class Place:
    """Where reading stopped.

    ``head``: hash of the first ``head_bytes``: what identifies the content when it gets another name or inode.
    """

    inode: int
    offset: int
    head_bytes: int
    head: str


class LogFile:
    """Reads the whole lines of one path, whatever file stands there.

    Rotated files are looked for beside ``path``: names that begin with its name (``syslog.1``, ``syslog-20260301.gz``)
    or with its stem (``kern-20260301.log``). The one we were in is known by inode or, being compressed or copied, by
    its first bytes; it is read to its end, then those newer than it, oldest first, then the new file.
    """

    def __init__(self, path: Path, place: Place | None = None) -> None:
        self.path = path
        self.place = place
        self._queue: list[Path] | None = None
        self._held: tuple[Path, IO[bytes]] | None = None
        self._skipping = False

    def read(self, *, final: bool = False) -> tuple[list[bytes], bool]:
        """Return some lines without their ends, and whether nothing more is waiting.

        ``final``: the writer is known to be done, so a last line without an end is taken as it is.
        """
        if self._queue is None:
            self._queue = self._rotated()
        while self._queue:
            path = self._queue[0]
            try:
                lines, done = self._read_from(path, final=True)
            except _DAMAGED as error:
                _log.warning("the rotated log %s cannot be read on: %s", path, error)
                lines, done = [], True
            if done:
                self.close()
                self._queue.pop(0)
                self.place = None
            if lines:
                return lines, False
        try:
            lines, done = self._read_from(self.path, final=final)
        except FileNotFoundError:
            lines, done = [], True
        if done:
            self.close()
            self._queue = None  # look again for a rotation the next time
        return lines, done

    def _rotated(self) -> list[Path]:
        place = self.place
        if place is None:
            return []
        if self._holds(self.path, place):
            return []
        found: list[tuple[float, str, Path]] = []
        for other in self._siblings():
            try:
                found.append((other.stat().st_mtime, other.name, other))
            except FileNotFoundError:
                continue
        rotated = [path for _, _, path in sorted(found)]
        for index, other in enumerate(rotated):
            if self._holds(other, place):
                _log.info("%s was rotated to %s", self.path, other.name)
                # A log that is being compressed stands there twice for a while.
                return [other, *(path for path in rotated[index + 1 :] if not self._holds(path, place))]
        if place.offset:
            _log.warning("%s was replaced, and what became of its old content is not known", self.path)
        self.place = None
        return []

    def _holds(self, path: Path, place: Place) -> bool:
        try:
            with _opened(path) as stream:
                return _matches(stream, path, place)
        except _DAMAGED:
            return False

    def _siblings(self) -> list[Path]:
        name, stem, suffix = self.path.name, self.path.stem, self.path.suffix
        found = []
        try:
            entries = list(os.scandir(self.path.parent))
        except FileNotFoundError:
            return []
        for entry in entries:
            other = entry.name
            dated = other.startswith(f"{stem}-") and suffix != "" and suffix in other[len(stem) :]
            if other != name and (other.startswith((f"{name}.", f"{name}-")) or dated) and entry.is_file():
                found.append(Path(entry.path))
        return found

    def _read_from(self, path: Path, *, final: bool) -> tuple[list[bytes], bool]:
        stream = self._stream(path)
        place = self.place
        # The file may have been rotated since we looked: what is open is what counts.
        if place is not None and stream.tell() == 0 and not _matches(stream, path, place):
            return [], True
        offset = 0 if place is None else place.offset
        stream.seek(offset)
        content = stream.read(_CHUNK)
        lines, whole = self._split(content, final=final)
        head_bytes = min(_HEAD, offset + whole)
        if place is None or place.head_bytes < head_bytes:
            stream.seek(0)
            place = Place(0, 0, head_bytes, _hash(stream.read(head_bytes)))
            stream.seek(offset + whole)
        self.place = Place(os.fstat(stream.fileno()).st_ino, offset + whole, place.head_bytes, place.head)
        return lines, whole == 0 or len(content) < _CHUNK

    def _split(self, content: bytes, *, final: bool) -> tuple[list[bytes], int]:
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) >= _MAX_LINE:
            self._skipping = True
            return [], len(content)
        if final and len(content) < _CHUNK:
            whole = len(content)
        lines = content[:whole].split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        if self._skipping and whole:
            lines, self._skipping = lines[1:], False
        return [line for line in lines if len(line) < _MAX_LINE], whole

    def _stream(self, path: Path) -> IO[bytes]:
        """Return the open file; it stays open until read to its end, for a compressed one cannot be entered midway."""
        if self._held is None or self._held[0] != path:
            self.close()
            self._held = (path, _opened(path))
        return self._held[1]

    def close(self) -> None:
        """Close what is open; the place stays."""
        if self._held is not None:
            self._held[1].close()
            self._held = None


def _matches(stream: IO[bytes], path: Path, place: Place) -> bool:
    """Whether an open file, at its beginning, has the content that was read.

    The content decides, not the inode: that is soon used again, and a copy put in place is the same log.
    """
    stat = os.fstat(stream.fileno())
    if place.head_bytes == 0:
        return stat.st_ino == place.inode
    if path.suffix not in _OPENERS and stat.st_size < place.offset:
        return False
    return _hash(stream.read(place.head_bytes)) == place.head


def _opened(path: Path) -> IO[bytes]:
    opener = _OPENERS.get(path.suffix)
    return path.open("rb") if opener is None else opener(path)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


_AHEAD: Final = timedelta(days=1)
# Clocks and zones of a log and its reader differ a little; a stamp further ahead is of the year before.
_CLOCK_ERROR: Final = timedelta(minutes=5)


def instant_of(stamped: Stamped, zone: tzinfo | None, now: datetime) -> datetime | None:
    """Return the aware instant of a stamp; None if it gives none, as seconds since an unknown boot do.

    ``zone``: of stamps without an offset; None is the zone of this machine.

    A stamp without a year is in the latest year that does not put it more than a day after ``now``: right for a log
    that is read within a year of its writing. Of the hour that a change of the clocks repeats, the later one is taken
    that is not to come yet: right for a log that is followed.
    """
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


_POLL_S: Final = 0.25
_WRITER_DONE: Final = timedelta(minutes=1)
# A last line without an end is taken when nobody has added to it for so long.


class LogFiles:
    """Follows one or more log files; a :class:`LogSource`.

    ``zone``: of stamps without an offset; None is the zone of this machine.
    ``once``: a file must exist, and may end without a line end.
    Raises ``InputError`` if, with ``once``, a file does not exist, or if a file may not be read.
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
        self._clock, self._zone, self._once, self._sleep = clock, zone, once, sleep
        self._files: list[LogFile] = []
        self._new: list[bool] = []
        self._others = {key: value for key, value in position.items() if key not in {str(path) for path in paths}}
        for path in dict.fromkeys(paths):
            if once and not path.exists():
                raise InputError("the log file does not exist", str(path), "Check the path.")
            kept = position.get(str(path))
            self._files.append(LogFile(path, None if kept is None else Place(**kept)))
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
        own = {str(file.path): asdict(file.place) for file in self._files if file.place is not None}
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
            when = instant_of(stamped, self._zone, now)
            made.append(LogLine(stamped.message, when, stamped.host, None, self._new[index]))
        return made
