"""A frame: the samples of a stretch of time, packed, sorted by unit and time, and never changed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.online.packing import Packed, pack
from telemetry.block import DTYPES, Block, Series
from telemetry.channel import Channel

_MS = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Frame:
    """Samples of all units over a stretch of time.

    ``number``: of two frames that say the same instant of a unit the one with the higher number counts.
    ``units``: units with rows, ascending.
    ``starts``: where each one's rows begin; shape (units + 1,).
    """

    name: str
    number: int
    tier: int
    units: NDArray[np.int32]
    starts: NDArray[np.int64]
    times: Packed
    columns: dict[str, Packed]

    @classmethod
    def of(cls, block: Block, *, number: int, tier: int, step_ms: int) -> Frame:
        """Pack a block that is sorted by (unit, time), none twice."""
        fresh = np.flatnonzero(np.concatenate(([True], block.unit[1:] != block.unit[:-1])))
        known = np.ones(len(block), dtype=np.bool_)
        return cls(
            name=secrets.token_hex(8),
            number=number,
            tier=tier,
            units=block.unit[fresh].astype(np.int32),
            starts=np.append(fresh, len(block)).astype(np.int64),
            times=pack(Series(block.ms, known), fresh, unit_scale=step_ms),
            columns={name: pack(series, fresh) for name, series in block.series.items()},
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        own = self.units.nbytes + self.starts.nbytes + self.times.nbytes
        return own + sum(packed.nbytes for packed in self.columns.values())

    def read(
        self,
        units: NDArray[np.int32] | None,
        channels: Mapping[str, Channel],
        *,
        after_ms: int | None = None,
        upto_ms: int | None = None,
    ) -> Block:
        """Unpack the rows of some units.

        ``units``: Ascending; None: all.
        ``after_ms``, ``upto_ms``: only rows after (not at) and up to these times.
        Returns: sorted by (unit, time); ``order`` is such that a later frame's rows come first.
        """
        if units is None:
            runs = np.arange(self.units.size, dtype=np.int64)
        else:
            at = np.searchsorted(self.units, units)
            inside = at < self.units.size
            inside[inside] = self.units[at[inside]] == units[inside]
            runs = at[inside].astype(np.int64)
        sizes = self.starts[runs + 1] - self.starts[runs]
        run = np.repeat(runs, sizes)
        before = np.cumsum(sizes) - sizes
        rows = np.arange(run.size, dtype=np.int64) + np.repeat(self.starts[runs] - before, sizes)
        ms = self.times.unpack(rows, run, _MS).values.astype(np.int64, copy=False)
        if after_ms is not None or upto_ms is not None:
            kept = np.ones(ms.size, dtype=np.bool_)
            if after_ms is not None:
                kept &= ms > after_ms
            if upto_ms is not None:
                kept &= ms <= upto_ms
            if not kept.all():
                rows, run, ms = rows[kept], run[kept], ms[kept]
        unit = self.units[run]
        return Block(
            unit=unit,
            node=unit,
            ms=ms,
            order=np.full(ms.size, -self.number, np.int64),
            mig=np.zeros(ms.size, dtype=np.bool_),
            count=np.ones(ms.size, np.int32),
            series={
                name: self.columns[name].unpack(rows, run, DTYPES[channel.kind]) for name, channel in channels.items()
            },
        )
