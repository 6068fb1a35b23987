"""Log files as a source of kernel messages: syslog formats, ``dmesg --time-format iso``, saved journals.

A file is tailed across rotation by rename, compression or copytruncate.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, BinaryIO, Final

from foundation.errors import InputError
from foundation.files import check_regular
from telemetry.kernel_log.catalogue import MessageCatalogue, shipped
from telemetry.kernel_log.entries import MAX_LINE, EntryReader
from telemetry.kernel_log.reader import Lines, LogLine, log_lines
from telemetry.kernel_log.stamps import LogContext, machine_zone
from telemetry.packing import DAMAGED, UNPACKERS, open_packed

_log = logging.getLogger(__name__)
_HEAD: Final = 1024
# Bytes that identify a log: they hold a timestamp and a few lines.
_CHUNK: Final = 1 << 20
_WRITER_DONE: Final = timedelta(minutes=1)
# With ``once``, an unterminated last line is read if the file has not been modified for this long.


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Read offset in a log file; ``head``, the hash of its first ``head_bytes``, identifies it after rotation."""

    inode: int
    offset: int
    head_bytes: int
    head: str


class LogFile:
    """Tails one path by complete lines, across rotation.

    Rotated files are siblings of ``path`` that share its name (``syslog.1``, ``syslog-20260301.gz``) or stem
    (``kern-20260301.log``). The last one read is recognized by its first bytes, even if compressed or copied, or by
    inode if it was empty. It is read to its end, then newer ones, oldest first, then ``path``.
    """

    def __init__(self, path: Path, place: LogPosition | None = None) -> None:
        self.path = path
        self.place = place
        self.is_new = place is None
        self._batches: Iterator[list[bytes]] | None = None

    def read(self, *, final: bool = False) -> list[bytes]:
        """Return the next batch of lines without newlines; empty at the end.

        ``final``: the writer has finished, so an unterminated last line is returned too.
        """
        lines = [] if self._batches is None else next(self._batches, [])
        if not lines:
            self.is_new &= self._batches is None
            self._batches = self._walk(final=final)
            lines = next(self._batches, [])
        return lines

    def _walk(self, *, final: bool) -> Iterator[list[bytes]]:
        for path in self._rotated():
            try:
                yield from self._read_from(path, final=True)
            except DAMAGED as error:
                _log.warning("cannot finish the rotated log %s: %s", path, error)
            self.place = None
        with suppress(FileNotFoundError):
            yield from self._read_from(self.path, final=final)

    def _rotated(self) -> list[Path]:
        """Return the rotated file that was being read and newer ones, oldest first; empty if it was not rotated."""
        place = self.place
        if place is None or _holds(self.path, place):
            return []
        rotated: list[tuple[float, str, Path]] = []
        for sibling in self._siblings():
            with suppress(FileNotFoundError):
                rotated.append((sibling.stat().st_mtime, sibling.name, sibling))
        paths = [path for _, _, path in sorted(rotated)]
        for index, path in enumerate(paths):
            if _holds(path, place):
                _log.info("%s was rotated to %s", self.path, path.name)
                # While a log is being compressed, both copies exist.
                return [path, *(newer for newer in paths[index + 1 :] if not _holds(newer, place))]
        if place.offset:
            _log.warning("%s was replaced; lines of the old file may be lost", self.path)
        self.place = None
        return []

    def _siblings(self) -> Iterator[Path]:
        name, stem, suffix = self.path.name, self.path.stem, self.path.suffix
        for sibling in self.path.parent.glob("*"):
            other = sibling.name
            is_dated = other.startswith(f"{stem}-") and suffix != "" and suffix in other[len(stem) :]
            if other != name and (other.startswith((f"{name}.", f"{name}-")) or is_dated) and sibling.is_file():
                yield sibling

    def _read_from(self, path: Path, *, final: bool) -> Iterator[list[bytes]]:
        with open_packed(path, max_ratio=math.inf) as (raw, stream):  # a log of this node, read in chunks
            head, offset = b"", 0
            if self.place is not None:
                # The path may have been rotated before it was opened: check the open file.
                known = _known_head(raw, stream, path, self.place)
                if known is None:
                    return
                head, offset = known, self.place.offset
                if stream is raw:
                    raw.seek(offset)
                else:
                    _skip(stream, offset - len(head))
            incomplete, at_end = b"", False
            while not at_end:
                chunk = stream.read(_CHUNK)
                at_end = len(chunk) < _CHUNK
                content = incomplete + chunk
                end = content.rfind(b"\n") + 1
                if (at_end and final) or len(content) - end > _CHUNK:  # a line this long is not a kernel message
                    end = len(content)
                incomplete = content[end:]
                offset += end
                head += content[: min(end, _HEAD - len(head))]
                if end or self.place is None:
                    inode = os.fstat(raw.fileno()).st_ino
                    self.place = LogPosition(inode, offset, len(head), _hash(head))
                if end:
                    yield content[:end].removesuffix(b"\n").split(b"\n")


def _skip(stream: BinaryIO, count: int) -> None:
    while count > 0 and (skipped := stream.read(min(count, _CHUNK))):
        count -= len(skipped)


def _holds(path: Path, place: LogPosition) -> bool:
    try:
        with open_packed(path) as (raw, stream):
            return _known_head(raw, stream, path, place) is not None
    except DAMAGED:
        return False


def _known_head(raw: BinaryIO, stream: BinaryIO, path: Path, place: LogPosition) -> bytes | None:
    """Read the first bytes of an open file; None if it is not the file of ``place``.

    Content decides because inodes are reused and a copied log has a new one.
    """
    stat = os.fstat(raw.fileno())
    if place.head_bytes == 0:
        return b"" if stat.st_ino == place.inode else None
    if path.suffix not in UNPACKERS and stat.st_size < place.offset:
        return None
    head = stream.read(place.head_bytes)
    return head if _hash(head) == place.head else None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


class LogFiles:
    """Tails one or more log files; implements :class:`LogSource`.

    ``zone``: zone of timestamps without an offset (default: the zone of this machine). ``once``: every file must
    exist, and its last line may be unterminated. Raises ``InputError`` if a file is missing or cannot be read.
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
        catalogue: MessageCatalogue | None = None,
    ) -> None:
        self._clock, self._zone, self._once, self._sleep = clock, zone or machine_zone(), once, sleep
        self._catalogue = catalogue or shipped()
        self._splitters = {path: EntryReader(self._catalogue.mentions) for path in paths}
        self._position = dict(position)
        self._files: list[LogFile] = []
        for path in dict.fromkeys(paths):
            if once and not path.exists():
                raise InputError("the log file does not exist", str(path), "Check the path.")
            check_regular(path)
            saved = position.get(str(path))
            self._files.append(LogFile(path, None if saved is None else LogPosition(**saved)))

    def read(self, wait_s: float) -> Lines:
        """Return the available lines; see :class:`LogSource`."""
        lines: list[LogLine] = []
        drained, n_lines = True, 0
        for file in self._files:
            try:
                raw = file.read(final=self._once and self._is_done(file.path))
            except PermissionError as error:
                raise InputError(
                    "no permission to read the log file",
                    str(error.filename or file.path),
                    "Run as a user of the group adm, or use `--source journal`.",
                ) from None
            drained &= not raw
            splitter = self._splitters[file.path]
            entries_before = splitter.number + splitter.extra
            entries = [
                entry for line in raw for entry in splitter.read(line[:MAX_LINE].decode("utf-8", errors="replace"))
            ]
            if self._once and not raw:
                entries += splitter.close()
            n_lines += splitter.number + splitter.extra - entries_before
            lines += log_lines(entries, self._catalogue, LogContext(self._zone, self._clock()), history=file.is_new)
            if file.place is not None:
                self._position = self._position | {str(file.path): asdict(file.place)}
        if drained:
            self._sleep(wait_s)
        return Lines(lines, self._position, drained, n_lines)

    def close(self) -> None:
        """Close the files."""
        self._files.clear()

    def _is_done(self, path: Path) -> bool:
        try:
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except FileNotFoundError:
            return True
        return self._clock() - written > _WRITER_DONE
