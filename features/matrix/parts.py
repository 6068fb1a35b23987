"""Parts of a matrix: spans of decision times for which the values of all buckets are joined and compared."""

import errno
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numba import njit

from features.config import DecisionSection
from features.fleet import Fleet
from features.groups.history import EventHistory
from features.groups.onset import FleetKinds
from features.groups.peers import fleet_medians, model_codes
from features.labels.evidence import IncidentEvidence
from features.matrix.filling import BucketStore, BucketWork, Float32Array, RowPositions, bucket_columns
from features.matrix.meta import ROW_COLUMNS, MatrixPart
from features.matrix.plan import FeaturePlan
from features.windows.blocks import IntArray
from foundation.times import duration_ms, instant_ms, instants
from telemetry.dataset.files import damage_reported
from telemetry.dataset.layout import normal_form

PART_ROWS = 32_768
"""Maximum rows of the decision grid in a part, unless a single decision time has more."""


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Boundaries of parts: fixed spans of absolute time, each starting at a grid time.

    A row and the last grid time before it are therefore in the same part, and rows that are added later do not move the
    boundaries.

    ``length``, ``origin``: parts are ``origin + [k * length, (k + 1) * length)``, milliseconds since 1970.
    """

    length: int
    origin: int

    @classmethod
    def of(cls, decision: DecisionSection, units: int) -> "PartTimes":
        """Choose parts of up to :data:`PART_ROWS` rows: a power of two of decision times."""
        times = 1
        while 2 * times * units <= PART_ROWS:
            times *= 2
        return cls(times * duration_ms(decision.every), instant_ms(decision.origin))

    def cut(self, rows: RowPositions) -> "list[PartRows]":
        """Split rows, sorted by time, into parts; omit empty parts."""
        number, begins = np.unique((rows.milliseconds - self.origin) // self.length, return_index=True)
        names = [f"part-{time:%Y%m%dT%H%M%S}.parquet" for time in instants(self.origin + number * self.length)]
        ends = np.append(begins, rows.time.size)[1:].tolist()
        return [PartRows(name, begin, end) for name, begin, end in zip(names, begins.tolist(), ends, strict=True)]


@dataclass(frozen=True, slots=True)
class PartRows:
    """Rows ``begin`` (included) to ``end`` (excluded), and the file they are written to."""

    file: str
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.begin


class PartJoiner:
    """Joins the values of all buckets and adds the comparisons with the whole fleet. Thread-safe.

    ``rows``, ``keys``: rows of the matrix, sorted by time.
    ``work``: all buckets; empty if no column depends on samples.
    """

    def __init__(
        self,
        plan: FeaturePlan,
        fleet: Fleet,
        rows: RowPositions,
        keys: pd.DataFrame,
        events: pd.DataFrame,
        inventory: pd.DataFrame,
        record: IncidentEvidence,
        work: Sequence[BucketWork],
        store: BucketStore,
    ) -> None:
        self._plan, self._fleet, self._rows, self._keys = plan, fleet, rows, keys
        self._work, self._store, self._history = work, store, None
        if "history" in plan.features.groups:
            self._history = EventHistory.of(record, plan.features, inventory, unit=plan.unit)
        self._buffers = threading.local()  # allocating arrays this large costs more than filling them
        self._columns = bucket_columns(plan)
        self._model, self._models = model_codes(fleet, inventory)
        self._static = plan.static.of_fleet(fleet, inventory, events) if plan.static else None
        self._kinds = FleetKinds.of(fleet, inventory, events) if plan.onset else None

    def columns(self, part: PartRows) -> Float32Array:
        """Return the values of a part, shape (columns, rows); the thread's next call overwrites them."""
        plan, rows = self._plan, self._rows.take(np.arange(part.begin, part.end))
        if not part.rows:
            return np.empty((len(plan.columns), 0), dtype=np.float32)
        size = len(plan.columns) * part.rows
        room: Float32Array = getattr(self._buffers, "room", np.empty(0, dtype=np.float32))
        if size > room.size:
            room = self._buffers.room = np.empty(size, dtype=np.float32)
        columns: Float32Array = room[:size].reshape(len(plan.columns), part.rows)
        out = columns.T
        if self._work:
            self._fill_sampled(part, rows, out)
        if self._history is not None:
            history = self._history.values(self._keys.iloc[part.begin : part.end])
            out[:, plan.offsets["history"] : plan.offsets["history"] + history.shape[1]] = history
        if self._static is not None:
            out[:, plan.offsets["static"] :] = self._static.values(rows.pair, rows.milliseconds)
        return columns

    def _fill_sampled(self, part: PartRows, rows: RowPositions, out: Float32Array) -> None:
        plan, read = self._plan, self._store.read
        grid_position = rows.last_grid_position
        first, last = int(grid_position[0]), int(grid_position[-1]) + 1
        compared = len(plan.peers.names) if plan.peers is not None else 0
        peers = np.empty((compared, last - first, len(self._fleet.pairs)), dtype=np.float32)
        amounts = np.empty((part.rows, len(plan.onset.amounts.columns) if plan.onset else 0), dtype=np.float32)
        for work in self._work:
            begin, end = np.searchsorted(work.rows, (part.begin, part.end)).tolist()
            part_rows = work.rows[begin:end] - part.begin
            _put_columns(read(work.bucket, "values", begin, end, self._columns.shape), part_rows, self._columns, out)
            amounts[part_rows] = read(work.bucket, "amounts", begin, end, amounts.shape[1:])
            bucket_peers = read(work.bucket, "peers", first, last, (compared, work.pairs.size))
            peers[:, :, work.pairs] = np.moveaxis(bucket_peers, 0, 1)
        if plan.peers is not None:
            medians = fleet_medians(peers, self._model, self._models)
            plan.peers.fill_fleet(medians, grid_position - first, self._model[rows.pair], out, plan.offsets["peers"])
        if plan.onset is not None:
            assert self._kinds is not None
            levels = self._kinds.levels(rows.pair, rows.milliseconds)
            augmented = self._keys["augmented"].to_numpy(dtype=bool)[part.begin : part.end]
            grid_times = rows.times[rows.grid][grid_position]
            hours = np.full(part.rows, np.inf)
            delay = duration_ms(plan.features.delay)
            chosen, ended_at = rows.since_maintenance(int(plan.onset.amounts.edges[-1]) + delay)
            hours[chosen] = (rows.milliseconds[chosen] - delay - ended_at) / duration_ms(timedelta(hours=1))
            plan.onset.fill(
                amounts, levels, rows.milliseconds, augmented, grid_times, hours, out, plan.offsets["onset"]
            )


@njit(cache=True, nogil=True)
def _put_columns(values: Float32Array, rows: IntArray, columns: IntArray, out: Float32Array) -> None:
    for j in range(columns.size):
        for i in range(rows.size):
            out[rows[i], columns[j]] = values[i, j]


BUILD_AGAIN = "The matrix is damaged: remove its folder and build it again with `predrain features`."


def write_part(path: Path, table: pa.Table) -> MatrixPart:
    """Write sorted rows atomically as one Parquet file whose bytes depend on the rows alone."""
    names = [name for name in table.column_names if name not in ROW_COLUMNS]
    temporary = path.with_name(f"{secrets.token_hex(8)}.partial")
    with pq.ParquetWriter(
        temporary,
        table.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["node", "gpu", "unit"],
        # byte-stream split compresses floats a quarter better at no cost in time
        column_encoding={**dict.fromkeys(names, "BYTE_STREAM_SPLIT"), "decision_time": "DELTA_BINARY_PACKED"},
        write_statistics=False,
    ) as writer:
        writer.write_table(normal_form(table))
    temporary.replace(path)
    last = max(int(pc.max(table.column(name).cast(pa.int64())).as_py()) for name in ("decision_time", "established_at"))
    augmented = int(pc.sum(table.column("augmented")).as_py())
    return MatrixPart(path.name, table.num_rows, augmented, datetime.fromtimestamp(last / 1000, UTC))


def read_file(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file of a matrix.

    Raises ``InputError`` if it is damaged.
    """
    with damage_reported(path, BUILD_AGAIN):
        if path.is_dir():  # Arrow would read the folder's files
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return pq.read_table(path, columns=None if columns is None else list(columns))


@dataclass(frozen=True, slots=True)
class ExistingParts:
    """Parts of the existing matrix that is extended.

    ``since``: rows decided and established before this instant (ms) are reused.
    """

    folder: Path
    parts: Mapping[str, MatrixPart]
    since: int

    def with_stale(self, computed: list[PartRows]) -> list[PartRows]:
        """Add existing parts that have stale rows but no computed ones; sorted by file."""
        named = {part.file for part in computed}
        stale = [
            PartRows(part.file, 0, 0)
            for part in self.parts.values()
            if part.file not in named and instant_ms(part.established) >= self.since
        ]
        return sorted([*computed, *stale], key=lambda part: part.file)

    def join(self, file: str, computed: pa.Table) -> pa.Table:
        """Merge computed rows with the reusable rows of an existing part; rows in both are identical."""
        if file not in self.parts:
            return computed
        existing = read_file(self.folder / file).replace_schema_metadata(None)
        times = [existing.column(name).cast(pa.int64()).to_numpy() for name in ("decision_time", "established_at")]
        reusable = np.maximum(*times) < self.since
        existing = existing.filter(pa.array(reusable))
        begin = computed.column("decision_time").cast(pa.int64()).to_numpy()[:1]
        if not begin.size or not reusable.any() or times[0][reusable].max() < begin[0]:
            return pa.concat_tables([existing, computed]).unify_dictionaries()  # computed rows come last
        is_stored = _row_index(computed).isin(_row_index(existing))
        rows = pa.concat_tables([existing, computed.filter(pa.array(~is_stored))]).unify_dictionaries()
        keys = rows.select(["decision_time", "augmented"]).append_column("unit", rows.column("unit").cast(pa.string()))
        order = pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names])
        return rows.take(order)


def _row_index(table: pa.Table) -> pd.MultiIndex:
    return pd.MultiIndex.from_arrays(
        [table.column("decision_time").cast(pa.int64()).to_numpy(), table.column("unit").cast(pa.string()).to_pandas()]
    )
