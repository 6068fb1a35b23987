"""Reading a CSV in batches."""

import bz2
import gc
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pyarrow as pa
import pytest

from telemetry.importing.files.csv_tables import read_csv, read_header
from telemetry.importing.quarantine import Quarantine


def _handlers() -> int:
    """Count the functions in memory that Arrow calls for malformed rows."""
    functions = (item for item in gc.get_objects() if isinstance(item, FunctionType))
    return sum(function.__name__ == "skip" and function.__module__ == read_csv.__module__ for function in functions)


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress)])
def test_a_reader_that_is_left_early_leaves_no_callback_to_a_thread(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    """A thread that takes the GIL while the interpreter ends aborts the process: 4 of 160 commands ended with 134.

    A race: without the wait for the thread, this fails on most runs on a busy machine, not on all.
    """
    path = tmp_path / f"samples.csv{suffix}"
    path.write_bytes(pack(b"gpu,power\n" + b"a,1\n" * 10))
    header = read_header(path)
    gc.freeze()  # what is in memory already need not be searched each time
    try:
        for _ in range(50):
            reader = read_csv(path, header, "samples", Quarantine())
            next(reader)
            reader.close()
            assert _handlers() == 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("csv", bytes),
        ("csv.gz", gzip.compress),
        ("CSV.GZ", gzip.compress),
        ("csv.xz", lzma.compress),
        ("csv.bz2", bz2.compress),
        ("csv.zst", lambda content: pa.compress(content, "zstd", asbytes=True)),
    ],
)
def test_a_packed_table_has_the_rows_of_the_plain_one(tmp_path, suffix, pack):
    path = tmp_path / f"samples.{suffix}"
    path.write_bytes(pack(b"node,value\nn1,1\nn2,2\n"))
    (rows,) = read_csv(path, read_header(path), "samples", Quarantine())
    assert rows.table.to_pydict() == {"node": ["n1", "n2"], "value": ["1", "2"]}


@pytest.mark.parametrize("break_", ["\x1c", "\x85", "\u2028", "\x0c"])
def test_only_line_feed_and_carriage_return_end_the_header(tmp_path: Path, break_: str) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(f"node,power{break_}draw\r\nn1,1\r\n", newline="")
    (rows,) = read_csv(path, read_header(path), "samples", Quarantine())
    assert rows.table.to_pydict() == {"node": ["n1"], f"power{break_}draw": ["1"]}
