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


@contextmanager
def open_packed(path: Path) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Open a file; give the file itself, and its unpacked content, which is read forwards."""
    with path.open("rb") as raw:
        unpack = UNPACKERS.get(path.suffix.lower())
        if unpack is None:
            yield raw, raw
        else:
            with io.BufferedReader(unpack(raw)) as content:
                yield raw, content


def open_for_arrow(path: Path) -> pa.NativeFile:
    """Open the unpacked content of a file for Arrow, which knows neither xz nor suffixes in upper case."""
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
