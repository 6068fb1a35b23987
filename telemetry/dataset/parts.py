"""The files of samples while a dataset is being written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from telemetry.dataset.layout import bucket_name, footer, normal_form, write_part
from telemetry.dataset.runs import Runs


def write_runs(root: Path, bucket: int, table: pa.Table, runs: Runs) -> None:
    """Write a bucket's samples, sorted: a file for each run, whose bytes are a function of the run's samples alone."""
    folder = root / bucket_name(bucket)
    folder.mkdir(parents=True, exist_ok=True)
    for run, part in split_by_run(table, runs).items():
        path = folder / runs.file_name(run)
        if path.exists():  # perhaps another dataset's, by a link: to write into it would change that dataset
            raise ValueError(f"{folder.name}/{path.name} is there already")
        whole = normal_form(part)
        write_part(path, list(split_by_run(whole, runs.groups).values()), footer(whole))


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
