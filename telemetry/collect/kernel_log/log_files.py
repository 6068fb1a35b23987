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
from dataclasses import dataclass
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
_MOST_LINE: Final = 1 << 16
_OPENERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
_DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, slots=True)
class Place:
    """Where reading stopped.

    ``head_bytes``, ``head``: hash of the first so many bytes read: what identifies the content when it gets another
    name or inode.
    """

    inode: int
    offset: int
    head_bytes: int
    head: str

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {"inode": self.inode, "offset": self.offset, "head_bytes": self.head_bytes, "head": self.head}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Place:
        """Return what :meth:`to_json` gave."""
        return cls(int(kept["inode"]), int(kept["offset"]), int(kept["head_bytes"]), str(kept["head"]))


class LogFile:
    """Reads the whole lines of one path, whatever file stands there.

    ``path``: it may not exist yet, or be gone for the moment of a rotation.
    ``place``: where an earlier process stopped; None begins at the start of what is there now.

    Rotated files are looked for beside ``path``: names that begin with its name (``syslog.1``, ``syslog-20260301.gz``)
    or with its stem (``kern-20260301.log``). The one we were in is known by inode or, being compressed or copied, by
    its first bytes; it is read to its end, then those newer than it, oldest first, then the new file.
    """

    def __init__(self, path: Path, place: Place | None = None) -> None:
        self.path = path
        self.oversized = 0
        self._place = place
        self._queue: list[Path] | None = None
        self._held: tuple[Path, IO[bytes]] | None = None
        self._skipping = False

    @property
    def place(self) -> Place | None:
        """Where reading stopped: after the lines given so far."""
        return self._place

    def read(self, *, final: bool = False) -> tuple[list[bytes], bool]:
        """Return some lines without their ends, and whether nothing more is waiting.

        ``final``: whether a last line without an end is taken as it is: the writer is known to be done.
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
                self._release()
                self._queue.pop(0)
                self._place = None
            if lines:
                return lines, False
        try:
            lines, done = self._read_from(self.path, final=final)
        except FileNotFoundError:
            lines, done = [], True
        if done:
            self._release()
            self._queue = None  # look again for a rotation the next time
        return lines, done

    def close(self) -> None:
        """Close what is open; the place stays."""
        self._release()

    def _rotated(self) -> list[Path]:
        """Return the files to read before the one at the path, oldest first."""
        place = self._place
        if place is None:
            return []
        try:
            if self._holds(self.path, place):
                return []
        except FileNotFoundError:
            pass
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
        self._place = None
        return []

    def _holds(self, path: Path, place: Place) -> bool:
        """Whether a file has the content that was read."""
        try:
            with _opened(path) as stream:
                return _matches(stream, path, place)
        except FileNotFoundError:
            return False
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
        place = self._place
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
        self._place = Place(os.fstat(stream.fileno()).st_ino, offset + whole, place.head_bytes, place.head)
        return lines, whole == 0 or len(content) < _CHUNK

    def _split(self, content: bytes, *, final: bool) -> tuple[list[bytes], int]:
        """Return the whole lines of some content, and the bytes that they and their ends take."""
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) >= _MOST_LINE:
            self._skipping = True
            self.oversized += 1
            return [], len(content)
        if final and len(content) < _CHUNK:
            whole = len(content)
        lines = content[:whole].split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        if self._skipping and whole:
            lines, self._skipping = lines[1:], False
        kept = [line for line in lines if len(line) < _MOST_LINE]
        self.oversized += len(lines) - len(kept)
        return kept, whole

    def _stream(self, path: Path) -> IO[bytes]:
        """Return the open file; it stays open until read to its end, for a compressed one cannot be entered midway."""
        if self._held is None or self._held[0] != path:
            self._release()
            self._held = (path, _opened(path))
        return self._held[1]

    def _release(self) -> None:
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
