"""How fresh each unit's telemetry is at a decision time, counted while its samples pass by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from features.matrix.meta import MatrixConfig
from features.times import duration_ms, milliseconds, text
from features.windows.blocks import epoch_ms, key_columns, pair_codes
from serving.scores.reading import span

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Freshness:
    """What the samples of some units are like, each array of shape (n_units,).

    ``sample_age_seconds``: age of the newest usable sample at the decision time in seconds; NaN: there is none.
    ``completeness``: share of the samples expected in the last decision interval, 0 to 1.
    """

    sample_age_seconds: Floats
    completeness: Floats

    def unknown_reasons(
        self, *, stale_after: timedelta, least: float, interval: timedelta, looked_back: timedelta | None = None
    ) -> list[str | None]:
        """Say for each unit in words why it must not be scored; None: it may be.

        ``interval``: that ``completeness`` is over.
        ``looked_back``: how old the oldest sample is that would have been seen; None: there is none that was not.
        """
        silent = "no sample yet"
        if looked_back is not None:
            silent = f"no sample in the last {span(looked_back.total_seconds())}"
        limit = stale_after.total_seconds()
        words: list[str | None] = []
        for age, share in zip(self.sample_age_seconds.tolist(), self.completeness.tolist(), strict=True):
            if np.isnan(age):
                words.append(silent)
            elif age > limit:
                words.append(f"the newest sample is {span(age)} old, more than {span(limit)}")
            elif share < least:
                words.append(
                    f"{share:.0%} of the samples expected in the last {span(interval.total_seconds())}, "
                    f"less than {least:.0%}"
                )
            else:
                words.append(None)
        return words


class FreshnessWatch:
    """Counts samples by (node, unit) as they pass by.

    ``config``: decision interval, step, delay, unit.
    ``t_ms``: decision time in milliseconds since the epoch; a sample is usable up to ``features.delay`` before it.
    """

    def __init__(self, config: MatrixConfig, t_ms: int) -> None:
        self._unit = config.unit
        self._channels = tuple(config.channels)
        self._t_ms = t_ms
        self._border_ms = t_ms - duration_ms(config.features.delay)
        self._since_ms = self._border_ms - duration_ms(config.decision.every)
        self._expected = max(duration_ms(config.decision.every) // duration_ms(config.step), 1)
        self._newest: dict[tuple[str, str], int] = {}
        self._counted: dict[tuple[str, str], int] = {}

    @property
    def newest_ms(self) -> int | None:
        """The newest usable sample of all, in milliseconds since the epoch; None: there was none."""
        return max(self._newest.values(), default=None)

    def pass_recent(self, buckets: Iterable[Sequence[pa.Table]], oldest_ms: int) -> Iterator[list[pa.Table]]:
        """Count the samples of buckets, and pass on those that are usable and newer than ``oldest_ms``.

        A row without any value is no sample: an exporter that lists a GPU it cannot read tells nothing about it.
        """
        for runs in buckets:
            yield [self._recent(table, oldest_ms) for table in runs]

    def _recent(self, table: pa.Table, oldest_ms: int) -> pa.Table:
        times = epoch_ms(table.column("timestamp"))
        self._count(table, times)
        recent = (times > oldest_ms) & (times <= self._border_ms)
        return table if recent.all() else table.filter(pa.array(recent))

    def of(self, nodes: Sequence[str], units: Sequence[str]) -> Freshness:
        """Give the freshness of units at their present nodes."""
        pairs = list(zip(nodes, units, strict=True))
        newest = np.array([self._newest.get(pair, np.nan) for pair in pairs], dtype=np.float64)
        counted = np.array([self._counted.get(pair, 0) for pair in pairs], dtype=np.float64)
        return Freshness((self._t_ms - newest) / 1000.0, np.minimum(counted / self._expected, 1.0))

    def _count(self, table: pa.Table, times: Ints) -> None:
        if not table.num_rows:
            return
        codes, nodes, units = pair_codes(table, self._unit)
        usable = (times <= self._border_ms) & self._has_value(table)
        starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        none = np.iinfo(np.int64).min
        newest = np.maximum.reduceat(np.where(usable, times, none), starts)
        counted = np.add.reduceat((usable & (times > self._since_ms)).astype(np.int64), starts)
        for code, last, count in zip(codes[starts].tolist(), newest.tolist(), counted.tolist(), strict=True):
            unit = nodes[code] if self._unit == "node" else units[code // len(nodes)]
            pair = (nodes[code % len(nodes)], unit)
            if last != none:
                self._newest[pair] = max(last, self._newest.get(pair, last))
            self._counted[pair] = self._counted.get(pair, 0) + count

    def _has_value(self, table: pa.Table) -> NDArray[np.bool_]:
        present = np.zeros(table.num_rows, dtype=np.bool_)
        for name in self._channels:
            if name not in table.column_names:
                continue
            column = table.column(name)
            if column.null_count == 0:
                return np.ones(table.num_rows, dtype=np.bool_)
            present |= pc.is_valid(column).to_numpy()
            if present.all():
                break
        return present


def always_fresh(units: int) -> Freshness:
    """Give the freshness of units that need no samples: nothing is expected, so nothing is missing."""
    return Freshness(np.full(units, np.nan), np.ones(units))


def sample_columns(config: MatrixConfig, present: Iterable[str]) -> list[str]:
    """List the columns of a dataset's samples that scoring reads: the keys, and the channels that are there."""
    have = set(present)
    return [*key_columns(config.unit), *(name for name in config.channels if name in have)]


def stays_at(inventory: pd.DataFrame, t_ms: int, unit: str) -> dict[str, str | None]:
    """Give the slot of each unit that is installed at a time; None where the inventory does not say."""
    installed = milliseconds(inventory["installed_at"], "installed_at")
    removed = milliseconds(inventory["removed_at"], "removed_at")
    here = np.flatnonzero((installed <= t_ms) & (removed > t_ms))
    here = here[np.argsort(installed[here], kind="stable")]
    names = text(inventory["node" if unit == "node" else "gpu"])
    slots = text(inventory["slot"]) if "slot" in inventory else np.full(len(inventory), None, dtype=object)
    return {str(names[at]): None if slots[at] is None else str(slots[at]) for at in here.tolist()}
