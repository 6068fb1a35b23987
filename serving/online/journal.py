"""What was pushed since the last snapshot, on disk before it is acknowledged: a crash loses none of it.

::

    JOURNAL/
      00000012.log    records one after another; a snapshot begins the next file, and those before it are removed

A record is a header (length, time of arrival in milliseconds, kind, digest; little-endian) and an Arrow IPC stream. A
file may end in a record that was cut short by a crash: nobody was told that it was taken, and it is passed over. Where
whole records follow one that cannot be read, the disk has damaged what was taken: they are read, and it is said.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, get_args

import pyarrow as pa

from features.errors import InputError
from features.service import instant_ms
from telemetry.atomic import fsync_path

_LOG = logging.getLogger(__name__)

Kind = Literal["samples", "events"]
_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_HEADER: Final = struct.Struct("<4sIqB16s")
_MAGIC: Final = b"PDJ1"
_NAME: Final = re.compile(r"\d{8}\.log")
_LONGEST: Final = 2**30


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something that was pushed.

    ``at``: when it came, by the state's clock (UTC, whole milliseconds).
    """

    at: datetime
    kind: Kind
    table: pa.Table


class NotKeptError(InputError):
    """The disk does not take what was pushed."""


class Journal:
    """Files of arrivals. Not safe for several threads: its owner holds a lock.

    ``damaged``: files in which bytes before whole records could not be read, and how many; filled by :meth:`arrivals`.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self.damaged: dict[str, int] = {}
        self._folder = folder
        self._file: int | None = None
        self._size = 0
        numbers = self._numbers()
        self._next = max(numbers, default=0) + 1  # never into a file of an earlier life: its end may be torn
        for number in numbers:
            self.bytes += self._path(number).stat().st_size

    def append(self, kind: Kind, table: pa.Table, at: datetime) -> int:
        """Write an arrival, and force it to the disk.

        Returns: what :meth:`take_back` needs.
        Raises ``NotKeptError`` if it cannot be written; nothing of it stays.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        body = sink.getvalue()
        stamp = instant_ms(at)
        number = _KINDS.index(kind)
        header = _HEADER.pack(_MAGIC, body.size, stamp, number, _digest(stamp, number, body))
        before = self._size
        try:
            file = self._open()
            before = self._size
            _write(file, header + body.to_pybytes())
            os.fdatasync(file)
        except OSError as error:
            self.take_back(before)
            raise NotKeptError(
                f"what was pushed cannot be kept: {error.strerror}",
                str(self._folder),
                "Free space there, and push again: nothing of it was taken.",
            ) from error
        self._size += len(header) + body.size
        self.bytes += len(header) + body.size
        return before

    def take_back(self, before: int) -> None:
        """Remove the last arrival, which could not be used after all."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file, before)
            os.lseek(self._file, before, os.SEEK_SET)
        except OSError:  # what is left there is a torn record: go on in another file
            _LOG.exception("the journal %s cannot be cut back", self._folder)
            self.close()
            return
        self.bytes -= max(self._size - before, 0)
        self._size = before

    def cut(self) -> int:
        """Let further arrivals go to another file."""
        if self._size:
            self.close()
        return self._next if self._file is None else self._next - 1

    def forget_before(self, number: int) -> None:
        """Remove the files of smaller numbers: a snapshot holds what they hold."""
        for each in self._numbers():
            if each < number:
                path = self._path(each)
                size = path.stat().st_size
                path.unlink()
                self.bytes -= size

    def arrivals(self, first: int = 0, end: int | None = None) -> Iterator[Arrival]:
        """Read what has been written, in the order in which it came.

        ``first``, ``end``: numbers of the first file to read, and of the first not to; default: all there are.
        """
        for number in self._numbers():
            if number >= first and (end is None or number < end):
                yield from self._read(self._path(number))

    def _read(self, path: Path) -> Iterator[Arrival]:
        if not path.stat().st_size:
            return
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = lost = 0
            while start < len(content):
                found = _record(content, start)
                if found is not None:
                    arrival, start = found
                    yield arrival
                    continue
                further = _next_record(content, start + 1)
                if further is None:
                    _LOG.warning("the journal %s ends in %d bytes that are no record", path, len(content) - start)
                    break
                _LOG.error("the journal %s is damaged: %d bytes from byte %d on", path, further - start, start)
                lost += further - start
                start = further
        if lost:
            self.damaged = {**self.damaged, path.name: lost}

    def close(self) -> None:
        """Close the file; the next arrival begins another."""
        if self._file is not None:
            os.close(self._file)
            self._file, self._size = None, 0

    def _open(self) -> int:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path(self._next), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._next += 1
            self._size = 0
            fsync_path(self._folder)
        return self._file

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.log"

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return sorted(int(name[:8]) for name in names if _NAME.fullmatch(name))


def _write(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _record(content: mmap.mmap, start: int) -> tuple[Arrival, int] | None:
    """Read the record that begins at a place; give it with the place where it ends, None where there is none."""
    begin = start + _HEADER.size
    header = content[start:begin]
    if len(header) < _HEADER.size:
        return None
    magic, length, stamp, number, digest = _HEADER.unpack(header)
    if magic != _MAGIC or length > _LONGEST or number >= len(_KINDS):
        return None
    body = content[begin : begin + length]
    if len(body) < length or _digest(stamp, number, body) != digest:
        return None
    table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
    return Arrival(datetime.fromtimestamp(stamp / 1000, UTC), _KINDS[number], table), begin + length


def _next_record(content: mmap.mmap, start: int) -> int | None:
    """Find the next whole record at or after a place."""
    while (start := content.find(_MAGIC, start)) >= 0:
        if _record(content, start) is not None:
            return start
        start += 1
    return None


def _digest(stamp: int, number: int, body: bytes | pa.Buffer) -> bytes:
    found = hashlib.blake2b(struct.pack("<qB", stamp, number), digest_size=16)
    found.update(body)
    return found.digest()
