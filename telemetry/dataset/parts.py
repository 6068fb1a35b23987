"""The files of samples while a dataset is being written."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from telemetry.dataset.layout import bucket_name, footer, normal_form, sort_columns, sort_samples, write_part
from telemetry.dataset.meta import instant_text
from telemetry.dataset.runs import Runs
from telemetry.dataset.schema import Unit
from telemetry.errors import InputError


class PartWriter:
    """Writes a file for each bucket and run, whose bytes are a function of the run's samples alone.

    Tables that are not the last of their bucket wait in memory.
    """

    def __init__(self, root: Path, unit: Unit, runs: Runs) -> None:
        self._root, self._unit, self._runs = root, unit, runs
        self._waiting: dict[int, dict[int, list[pa.Table]]] = {}  # by bucket and run
        self._rows: Counter[int] = Counter()
        self._guard = threading.Lock()

    def add(self, bucket: int, table: pa.Table, *, last: bool = False) -> None:
        """Take a sorted table of one bucket; after one that is the ``last``, none of this bucket follows."""
        by_run = split_by_run(table, self._runs)
        with self._guard:
            self._rows[bucket] += table.num_rows
            waiting = self._waiting.setdefault(bucket, {})
            for run, part in by_run.items():
                waiting.setdefault(run, []).append(part)
        if last:
            self._merge(bucket)

    def finish(self) -> Counter[int]:
        """Merge what still waits, buckets side by side; returns the rows of each bucket that got any."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(self._merge, sorted(self._waiting)))
        return self._rows

    def _merge(self, bucket: int) -> None:
        with self._guard:
            waiting = self._waiting.pop(bucket)
        folder = self._root / bucket_name(bucket)
        for run in sorted(waiting):
            tables = waiting.pop(run)
            whole = tables[0] if len(tables) == 1 else sorted_whole(tables, self._unit)
            self._write(folder / self._runs.file_name(run), normal_form(whole))

    def _write(self, path: Path, table: pa.Table) -> None:
        if path.exists():  # perhaps another dataset's, by a link: to write into it would change that dataset
            raise ValueError(f"{path.parent.name}/{path.name} is there already")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_part(path, list(split_by_run(table, self._runs.groups).values()), footer(table))


def split_by_run(table: pa.Table, runs: Runs) -> dict[int, pa.Table]:
    """Cut a sorted table into its runs, ascending, each sorted and in one chunk with the dictionaries of the whole."""
    number = runs.of(table.column("timestamp").cast(pa.int64()).to_numpy())
    first, last = int(number.min()), int(number.max())
    table = table.unify_dictionaries().combine_chunks()
    if first == last:
        return {first: table}
    place = (number - first).astype(np.uint16 if last - first < 1 << 16 else np.int64)
    order = np.argsort(place, kind="stable")
    ordered = table.take(pa.array(order)).combine_chunks()
    found, begins = np.unique(place[order], return_index=True)
    ends = [*begins[1:].tolist(), len(order)]
    return {
        first + int(each): ordered.slice(begin, end - begin)
        for each, begin, end in zip(found.tolist(), begins.tolist(), ends, strict=True)
    }


def sorted_whole(tables: list[pa.Table], unit: Unit) -> pa.Table:
    """Join tables of one bucket into a sorted one.

    Raises ``InputError`` if they hold two samples of one unit at one time.
    """
    whole = pa.concat_tables(tables)
    whole, duplicate = sort_samples(whole.cast(tables[0].schema).unify_dictionaries(), unit)
    if duplicate is not None:
        raise duplicate_error(whole, duplicate, unit)
    return whole


def duplicate_error(table: pa.Table, row: int, unit: Unit) -> InputError:
    """Return the error for a row that has the key of the row before it."""
    name, _ = sort_columns(unit)
    said, instant = table.column(name)[row].as_py(), table.column("timestamp")[row].as_py()
    return InputError(
        f"two samples of one {name} at one time",
        f"{name} {said!r} at {instant_text(instant)}",
        "Keep one of them; `predrain import` does so and counts the others.",
    )
