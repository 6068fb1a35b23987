"""Files that are packed: gzip, xz, bzip2, zstd and lz4, by their names; and what reading a damaged file raises."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from foundation.errors import InputError

DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)
UNPACKERS: Final[Mapping[str, Callable[[BinaryIO], Any]]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda raw: pa.CompressedInputStream(raw, "zstd"),
    ".lz4": lambda raw: pa.CompressedInputStream(raw, "lz4"),
}
"""What unpacks an open file, by its suffix; not all of them can go back."""

MAX_RATIO: Final = 400
# gzip reaches 340 for the same line of a log again and again, and 1000 for the same few bytes.
_UNBOUNDED: Final = 1 << 23  # bytes unpacked before the ratio counts
_BUFFER: Final = 1 << 18


def check_ratio(unpacked: int, packed: int, path: Path, max_ratio: float = MAX_RATIO) -> None:
    """Raise ``InputError`` for a decompression bomb: so many bytes from so few of the file."""
    if unpacked > max(_UNBOUNDED, max_ratio * packed):
        raise InputError(
            f"the file unpacks to more than {max_ratio} times its size, as a decompression bomb does",
            str(path),
            "If you trust the file, unpack it and give the unpacked one.",
        )


class _Unpacked(io.RawIOBase):
    """The unpacked content of an open file; raises ``InputError`` for a decompression bomb."""

    def __init__(self, raw: BinaryIO, unpack: Callable[[BinaryIO], Any], path: Path, max_ratio: float) -> None:
        self._raw, self._content, self._path, self._max_ratio = raw, unpack(raw), path, max_ratio
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._content.readinto(buffer)
        self._size += count
        check_ratio(self._size, self._raw.tell(), self._path, self._max_ratio)
        return count

    def close(self) -> None:
        self._content.close()
        super().close()


@contextmanager
def open_packed(path: Path, *, max_ratio: float = MAX_RATIO) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Open a file; give the file itself, and its unpacked content, which is read forwards.

    Reading raises ``InputError`` for a decompression bomb: content of more than ``max_ratio`` times the file.
    """
    unpack = UNPACKERS.get(path.suffix.lower())
    with path.open("rb") as raw:
        if unpack is None:
            yield raw, raw
        else:
            unpacked: Any = _Unpacked(raw, unpack, path, max_ratio)
            with io.BufferedReader(unpacked, _BUFFER) as content:
                yield raw, content


def lines_of(text: io.TextIOBase, path: Path, max_length: int) -> Iterator[str]:
    """Yield the lines of a text; raises ``InputError`` for one that is longer than ``max_length`` characters."""
    number = 0
    while line := text.readline(max_length):
        number += 1
        if len(line) == max_length:
            raise InputError(
                f"a line is longer than {max_length:,} characters",
                f"{path}, line {number}",
                "Check that the file is a table or a dump.",
            )
        yield line


def open_for_arrow(path: Path) -> pa.NativeFile:
    """Open the unpacked content of a file for Arrow, which knows neither xz nor suffixes in upper case.

    Arrow unpacks in a thread of its own, without Python except for xz: the caller checks the ratio.
    """
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return pa.PythonFile(lzma.open(path), mode="r")
    known = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
    return pa.input_stream(path, compression=known.get(suffix))


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn what the reader of a file raises, such as for a download cut short, into an error that names it."""
    try:
        yield
    except (*DAMAGED, UnicodeDecodeError, RecursionError) as error:
        is_text = not isinstance(error, UnicodeDecodeError) and "utf8" not in str(error).lower().replace("-", "")
        problem = "cannot be read" if is_text else "is not UTF-8 text"
        raise InputError(f"the file {problem}: {error}", str(path), "Check the file, or convert it.") from error
