"""Logs that are packed: gzip, xz, bzip2, zstd and lz4, by the name of the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa

from foundation.errors import InputError

_CHUNK: Final = 1 << 20
DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowInvalid)
"""What reading a damaged file raises."""


def open_log(path: Path) -> IO[bytes]:
    """Open a log, packed or not, for reading."""
    opener = OPENERS.get(path.suffix)
    return path.open("rb") if opener is None else opener(path)


@contextmanager
def packing_errors(path: Path) -> Iterator[None]:
    """Turn what unpacking a damaged file raises into an error that names it."""
    try:
        yield
    except DAMAGED as error:
        raise InputError(f"the file cannot be read: {error}", str(path), "Check that it is whole.") from error


class _ArrowFile(io.RawIOBase):
    """A packed file that Arrow unpacks; to go back in it is to begin again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = path.open("rb")
        self._stream = pa.input_stream(str(path))
        self._offset = 0

    def readable(self) -> bool:
        """Return whether the file can be read."""
        return True

    def seekable(self) -> bool:
        """Return whether :meth:`seek` works."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the packed file."""
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int:
        """Read up to the length of a buffer."""
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._offset += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset from the beginning."""
        if whence == io.SEEK_CUR:
            offset += self._offset
        if offset < self._offset:
            self._stream.close()
            self._stream, self._offset = pa.input_stream(str(self._path)), 0
        while self._offset < offset and self.read(min(_CHUNK, offset - self._offset)):
            pass
        return self._offset

    def tell(self) -> int:
        """Return the offset."""
        return self._offset

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
            self._raw.close()
        super().close()


OPENERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _ArrowFile,
    ".lz4": _ArrowFile,
}
"""How to open a packed file, by its suffix."""
