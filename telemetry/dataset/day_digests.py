"""A digest of each day in a file of samples: when a file is not the one it was, they say from which day on.

A file of samples holds days of many units, and the newest one is written anew by every fold. Its SHA-256 says that
something is different; the digests of its days, which stand in its footer, say which days are still the same.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.dataset.layout import node_hash
from telemetry.dataset.runs import DAY_MS
from telemetry.dataset.schema import NAME

FOOTER_KEY: Final = "predrain.days"
"""Key of the digests among a Parquet file's own metadata."""

_HEX: Final = 16


def day_digests(table: pa.Table) -> dict[int, str]:
    """Digest each day of a table of samples.

    ``table``: sorted as a file is (:func:`telemetry.dataset.layout.sort_columns`), in the layout of
    :func:`telemetry.dataset.schema.samples_schema`.
    Returns: by day of UTC since 1970-01-01: the first 64 bits, hexadecimal, of a SHA-256 over the day's samples in
    their order. It does not depend on what other days or units' names the table holds.
    """
    if not table.num_rows:
        return {}
    day = table.column("timestamp").cast(pa.int64()).to_numpy() // DAY_MS
    first, last = int(day.min()), int(day.max())
    if first < last:
        place = (day - first).astype(np.uint16 if last - first < 1 << 16 else np.int64)  # two bytes sort in one pass
        order = np.argsort(place, kind="stable")
        table, day = table.take(pa.array(order)), day[order]
    days, begins = np.unique(day, return_index=True)
    ends = [*begins[1:].tolist(), len(day)]
    sums = [hashlib.sha256() for _ in days]
    for name in table.column_names:
        held, known = _bytes_of(table.column(name))
        for each, begin, end in zip(sums, begins.tolist(), ends, strict=True):
            missing = known is not None and not known[begin:end].all()
            each.update(f"{name}\0{held.dtype.str}\0{end - begin}\0{missing:d}\0".encode())
            if known is not None and missing:
                each.update(np.packbits(known[begin:end]).data)
            each.update(held[begin:end].data)
    return {number: each.hexdigest()[:_HEX] for number, each in zip(days.tolist(), sums, strict=True)}


def footer(table: pa.Table) -> dict[str, str]:
    """Return what the Parquet file of a table says about its days, as metadata of the file."""
    return {FOOTER_KEY: json.dumps(day_digests(table), separators=(",", ":"))}


def read_day_digests(source: Path | pa.NativeFile) -> dict[int, str] | None:
    """Read the digests of a file of samples from its footer alone; None in a file that an older version wrote."""
    found = (pq.read_metadata(source).metadata or {}).get(FOOTER_KEY.encode())
    return None if found is None else {int(day): digest for day, digest in json.loads(found).items()}


def _bytes_of(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Return a column as numbers, the same for what is null, and which are known; None: all."""
    whole = column.combine_chunks()
    known = whole.is_valid().to_numpy(zero_copy_only=False) if whole.null_count else None
    if whole.type == NAME:
        hashes = np.array([node_hash(name) for name in whole.dictionary.to_pylist()] or [0], dtype=np.uint64)
        codes = whole.indices if known is None else whole.indices.fill_null(0)
        return hashes[codes.to_numpy()], known
    if pa.types.is_timestamp(whole.type):
        whole = whole.cast(pa.int64())
    if known is not None:
        whole = whole.fill_null(False if pa.types.is_boolean(whole.type) else 0)
    return np.ascontiguousarray(whole.to_numpy(zero_copy_only=False)), known
