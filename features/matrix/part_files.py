"""The files of a matrix's rows: written part by part, taken over from another matrix, or joined with what it has."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from features.matrix.meta import ROW_COLUMNS, MatrixPart
from features.matrix.parts import PartRows
from features.times import instant_ms
from telemetry.dataset.files import damage_told
from telemetry.dataset.layout import normal_form

BUILD_AGAIN = "The matrix is damaged: remove its folder and build it again with `predrain features`."


def write_part(path: Path, table: pa.Table) -> MatrixPart:
    """Write rows, sorted, as one Parquet file whose bytes are a function of the rows alone; the whole file appears."""
    names = [name for name in table.column_names if name not in ROW_COLUMNS]
    temporary = path.with_name(f"{secrets.token_hex(8)}.partial")
    with pq.ParquetWriter(
        temporary,
        table.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["node", "gpu", "unit"],
        # floats compress by a quarter better when their bytes are split into streams, at no cost in time
        column_encoding={**dict.fromkeys(names, "BYTE_STREAM_SPLIT"), "decision_time": "DELTA_BINARY_PACKED"},
        write_statistics=False,
    ) as writer:
        writer.write_table(normal_form(table))
    temporary.replace(path)
    last = max(int(pc.max(table.column(name).cast(pa.int64())).as_py()) for name in ("decision_time", "established_at"))
    augmented = int(pc.sum(table.column("augmented")).as_py())
    return MatrixPart(path.name, table.num_rows, augmented, datetime.fromtimestamp(last / 1000, UTC))


def read_file(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one of a matrix's files, a part or a table.

    Raises ``InputError`` if it is damaged.
    """
    with damage_told(path, BUILD_AGAIN):
        if path.is_dir():  # Arrow would read the files in it
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return pq.read_table(path, columns=None if columns is None else list(columns))


@dataclass(frozen=True, slots=True)
class ExistingParts:
    """The parts of the matrix that is extended.

    ``since``: rows decided and established before this instant (ms) hold.
    """

    folder: Path
    parts: Mapping[str, MatrixPart]
    since: int

    def with_stale(self, computed: list[PartRows]) -> list[PartRows]:
        """Add to the parts of computed rows those existing ones that have rows that do not hold; in order."""
        named = {part.file for part in computed}
        stale = [
            PartRows(part.file, 0, 0)
            for part in self.parts.values()
            if part.file not in named and instant_ms(part.established) >= self.since
        ]
        return sorted([*computed, *stale], key=lambda part: part.file)

    def join(self, file: str, computed: pa.Table) -> pa.Table:
        """Put computed rows among those of an existing part that hold; rows in both are the same."""
        if file not in self.parts:
            return computed
        existing = read_file(self.folder / file).replace_schema_metadata(None)
        times = [existing.column(name).cast(pa.int64()).to_numpy() for name in ("decision_time", "established_at")]
        held = np.maximum(*times) < self.since
        existing = existing.filter(pa.array(held))
        begin = computed.column("decision_time").cast(pa.int64()).to_numpy()[:1]
        if not begin.size or not held.any() or times[0][held].max() < begin[0]:
            return pa.concat_tables([existing, computed]).unify_dictionaries()  # what is computed comes after all else
        twice = _row_index(computed).isin(_row_index(existing))
        both = pa.concat_tables([existing, computed.filter(pa.array(~twice))]).unify_dictionaries()
        keys = both.select(["decision_time", "augmented"]).append_column("unit", both.column("unit").cast(pa.string()))
        order = pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names])
        return both.take(order)

    def take_over(self, file: str, folder: Path) -> None:
        """Give a folder an existing part as it is: the same file, or a copy where the file system has no links."""
        try:
            os.link(self.folder / file, folder / file)
        except OSError:
            shutil.copyfile(self.folder / file, folder / file)


def _row_index(table: pa.Table) -> pd.MultiIndex:
    return pd.MultiIndex.from_arrays(
        [table.column("decision_time").cast(pa.int64()).to_numpy(), table.column("unit").cast(pa.string()).to_pandas()]
    )
