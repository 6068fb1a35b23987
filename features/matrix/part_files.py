"""The files of a matrix's rows: written by slab, taken over from a matrix that stands, or joined with what it has."""

from __future__ import annotations

import errno
import json
import os
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
from features.matrix.slabs import Slab
from features.times import instant_ms
from telemetry.dataset.files import damage_told
from telemetry.dataset.layout import normal_form

BUILD_AGAIN = "The matrix is damaged: remove its folder and build it again with `predrain features`."

_FOOTER_KEY = b"predrain.part"


def write_part(path: Path, table: pa.Table) -> None:
    """Write rows, sorted, as one Parquet file whose bytes are a function of the rows alone."""
    names = [name for name in table.column_names if name not in ROW_COLUMNS]
    last = (int(pc.max(table.column(name).cast(pa.int64())).as_py()) for name in ("decision_time", "established_at"))
    told = {"rows": table.num_rows, "augmented": pc.sum(table.column("augmented")).as_py(), "established": max(last)}
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["node", "gpu", "unit"],
        column_encoding=_encodings(names),
        write_statistics=False,
    ) as writer:
        writer.write_table(normal_form(table))
        writer.add_key_value_metadata({_FOOTER_KEY: json.dumps(told).encode()})


def read_file(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one of a matrix's files, a part or a table.

    Raises ``InputError`` if it is damaged.
    """
    with damage_told(path, BUILD_AGAIN):
        if path.is_dir():  # Arrow would read the files in it
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return pq.read_table(path, columns=None if columns is None else list(columns))


def read_frame(path: Path) -> pd.DataFrame:
    """Read one of a matrix's tables as a frame; errors as :func:`read_file`."""
    with damage_told(path, BUILD_AGAIN):
        return read_file(path).to_pandas()


def read_part_facts(path: Path) -> MatrixPart:
    """Read what a part says about itself, from its footer alone."""
    with damage_told(path, BUILD_AGAIN):
        told = json.loads(pq.read_metadata(path).metadata[_FOOTER_KEY])
    established = datetime.fromtimestamp(told["established"] / 1000, UTC)
    return MatrixPart(path.name, told["rows"], told["augmented"], established)


@dataclass(frozen=True, slots=True)
class ExistingParts:
    """The parts of a matrix that stands, and up to when they hold for another one.

    ``since``: rows decided and established before this instant (ms) hold.
    """

    folder: Path
    parts: Mapping[str, MatrixPart]
    since: int

    def slabs(self, computed: list[Slab]) -> list[Slab]:
        """Add to the slabs of computed rows those in which an existing part has rows that do not hold; in order."""
        named = {slab.file for slab in computed}
        stale = [
            Slab(part.file, 0, 0)
            for part in self.parts.values()
            if part.file not in named and instant_ms(part.established) >= self.since
        ]
        return sorted([*computed, *stale], key=lambda slab: slab.file)

    def join(self, file: str, computed: pa.Table) -> pa.Table:
        """Put computed rows among those of an existing part that hold; what stands both here and there is the same."""
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


def _encodings(names: list[str]) -> Mapping[str, str]:
    # Floats compress by a quarter better when their bytes are split into streams, at no cost in time.
    return {**dict.fromkeys(names, "BYTE_STREAM_SPLIT"), "decision_time": "DELTA_BINARY_PACKED"}
