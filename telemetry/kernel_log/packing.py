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
from typing import Any, BinaryIO, Final

import pyarrow as pa

from foundation.errors import InputError

DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)
"""What reading a damaged file raises."""

UNPACKERS: Final[Mapping[str, Callable[[BinaryIO], Any]]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda raw: pa.CompressedInputStream(raw, "zstd"),
    ".lz4": lambda raw: pa.CompressedInputStream(raw, "lz4"),
}
"""What unpacks an open file, by its suffix; not all of them can go back."""


@contextmanager
def open_log(path: Path) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Open a log; give the file itself, and its unpacked content, which is read forwards."""
    with path.open("rb") as raw:
        unpack = UNPACKERS.get(path.suffix)
        if unpack is None:
            yield raw, raw
        else:
            with io.BufferedReader(unpack(raw)) as content:
                yield raw, content


@contextmanager
def packing_errors(path: Path) -> Iterator[None]:
    """Turn what unpacking a damaged file raises into an error that names it."""
    try:
        yield
    except DAMAGED as error:
        raise InputError(f"the file cannot be read: {error}", str(path), "Check that it is whole.") from error
