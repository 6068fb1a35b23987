"""Slabs: stretches of decision times, in which all buckets' values meet and rows are held against the fleet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from numba import njit

from features.config import DecisionSection
from features.fleet import Fleet
from features.groups.history import History
from features.groups.onset import FleetKinds
from features.groups.peers import fleet_medians, model_codes
from features.matrix.bucket_values import BucketWork, own_columns
from features.matrix.filling import Rows
from features.matrix.plan import FeaturePlan
from features.matrix.spill import Spill
from features.times import duration_ms, instant_ms, instants
from features.windows.blocks import IntArray

Float32Array = npt.NDArray[np.float32]


SLAB_ROWS = 32_768
"""Rows of the decision grid in a slab, at most, unless one decision time alone has more."""


@dataclass(frozen=True, slots=True)
class SlabTimes:
    """How decision times are cut into slabs: stretches of absolute time that begin with a time of the grid.

    What is looked up at the last time of the grid so lies in the same slab, and rows that come later, or are found out
    later, leave the borders where they are.

    ``length``, ``origin``: slabs are ``origin + [k * length, (k + 1) * length)``, milliseconds since 1970.
    """

    length: int
    origin: int

    @classmethod
    def of(cls, decision: DecisionSection, units: int) -> SlabTimes:
        """Choose slabs of :data:`SLAB_ROWS` for a fleet of so many units: a power of two of decision times."""
        times = 1
        while 2 * times * units <= SLAB_ROWS:
            times *= 2
        return cls(times * duration_ms(decision.every), instant_ms(decision.origin))

    def number(self, time: IntArray) -> IntArray:
        """Return the number of the slab that each decision time (ms) lies in."""
        return (time - self.origin) // self.length

    def file_name(self, number: int) -> str:
        """Name the part that a slab becomes."""
        begin = instants(np.array([self.origin + number * self.length], dtype=np.int64))[0]
        return f"part-{begin:%Y%m%dT%H%M%S}.parquet"


@dataclass(frozen=True, slots=True)
class Slab:
    """Rows of a stretch of decision times.

    ``file``: the part that they become.
    ``begin``, ``end``: Rows, the last one excluded.
    """

    file: str
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.begin


def cut_slabs(rows: Rows, times: SlabTimes) -> list[Slab]:
    """Cut rows, sorted by time, into slabs; those without rows are left out."""
    number, begins = np.unique(times.number(rows.milliseconds), return_index=True)
    ends = np.append(begins, rows.time.size)[1:].tolist()
    return [
        Slab(times.file_name(each), begin, end)
        for each, begin, end in zip(number.tolist(), begins.tolist(), ends, strict=True)
    ]


class SlabJoiner:
    """Joins what the buckets gave, and adds what needs the whole fleet at a time. Several threads may use one.

    ``rows``: of the matrix, sorted by time.
    ``augmented``: shape (rows,).
    ``work``: every bucket; none where no column is made of samples.
    """

    def __init__(
        self,
        plan: FeaturePlan,
        fleet: Fleet,
        rows: Rows,
        keys: pd.DataFrame,
        augmented: npt.NDArray[np.bool_],
        events: pd.DataFrame,
        inventory: pd.DataFrame,
        history: History | None,
        work: Sequence[BucketWork],
        spill: Spill,
    ) -> None:
        self._plan, self._fleet, self._rows, self._keys, self._augmented = plan, fleet, rows, keys, augmented
        self._history = history
        self._work, self._spill = work, spill
        self._kept = threading.local()  # arrays this large cost more to get from the system than to fill
        self._own = own_columns(plan)
        self._models, self._model = model_codes(fleet, inventory)
        self._static = plan.static.of_fleet(fleet, inventory, events) if plan.static else None
        static = (plan.static, self._static) if plan.static and self._static else None
        self._kinds = FleetKinds.of(fleet, inventory, events, static) if plan.onset else None

    def columns(self, slab: Slab) -> Float32Array:
        """Give the values of a slab, shape (columns, rows); the same thread's next call writes over them."""
        plan, rows = self._plan, self._rows.take(np.arange(slab.begin, slab.end))
        if not slab.rows:
            return np.empty((len(plan.columns), 0), dtype=np.float32)
        size = len(plan.columns) * slab.rows
        room: Float32Array = getattr(self._kept, "room", np.empty(0, dtype=np.float32))
        if size > room.size:
            room = self._kept.room = np.empty(size, dtype=np.float32)
        columns: Float32Array = room[:size].reshape(len(plan.columns), slab.rows)
        out = columns.T
        if self._work:
            self._fill_sampled(slab, rows, out)
        if self._history is not None:
            history = self._history.values(self._keys.iloc[slab.begin : slab.end])
            out[:, plan.at["history"] : plan.at["history"] + history.shape[1]] = history
        if self._static is not None:
            out[:, plan.at["static"] :] = self._static.values(rows.pair, rows.milliseconds)
        return columns

    def _fill_sampled(self, slab: Slab, rows: Rows, out: Float32Array) -> None:
        plan = self._plan
        at = rows.last_grid
        first, last = int(at[0]), int(at[-1]) + 1
        names = plan.peers.names if plan.peers is not None else ()
        peers = np.empty((len(names), last - first, len(self._fleet.pairs)), dtype=np.float32)
        amounts = np.empty((slab.rows, len(plan.onset.amounts.columns) if plan.onset else 0), dtype=np.float32)
        for work in self._work:
            begin, end = np.searchsorted(work.rows, (slab.begin, slab.end)).tolist()
            here = work.rows[begin:end] - slab.begin
            read, bucket = self._spill.read, work.bucket
            _place(read(bucket, "values", begin, end, self._own.shape), here, self._own, out)
            amounts[here] = read(bucket, "amounts", begin, end, amounts.shape[1:])
            found = read(bucket, "peers", first, last, (len(names), work.pairs.size))
            peers[:, :, work.pairs] = np.moveaxis(found, 0, 1)
        if plan.peers is not None:
            medians = fleet_medians(peers, self._model, len(self._models))
            plan.peers.fill_fleet(medians, at - first, self._model[rows.pair], out, plan.at["peers"])
        if plan.onset is not None:
            self._compare_onsets(slab, rows, amounts, out)

    def _compare_onsets(self, slab: Slab, rows: Rows, amounts: Float32Array, out: Float32Array) -> None:
        onset, time = self._plan.onset, rows.milliseconds
        assert onset is not None
        assert self._kinds is not None
        kinds = self._kinds.kinds(rows.pair, time)
        grid: IntArray = np.flatnonzero(~self._augmented[slab.begin : slab.end])
        reference = onset.reference(amounts[grid], kinds.take(grid), time[grid])
        last = rows.times[rows.grid][rows.last_grid]
        onset.finish(amounts, kinds, last, reference, out, self._plan.at["onset"])


@njit(cache=True, nogil=True)
def _place(values: Float32Array, rows: IntArray, columns: IntArray, out: Float32Array) -> None:
    for j in range(columns.size):
        for i in range(rows.size):
            out[rows[i], columns[j]] = values[i, j]
