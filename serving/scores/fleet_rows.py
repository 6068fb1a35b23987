"""Feature rows of the fleet at one decision time, computed by the kernels of training, with their freshness."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from features.matrix.grid import decision_rows
from features.matrix.live_rows import live_plan, live_rows
from features.matrix.meta import ACTED_ON, ROW_COLUMNS, MatrixConfig
from features.matrix.sequences import SequencePlan, layout_of, live_windows
from features.windows.blocks import epoch_ms, key_columns, pair_codes
from foundation.errors import InputError
from foundation.times import duration_ms, instant_ms, instants, milliseconds, text
from models.config import ServingSection
from serving.scores.reading import span
from telemetry.dataset.store import Dataset

Floats = NDArray[np.float64]


MIN_STEPS_STALE = 2
"""Minimum tolerance for the age of a sample, in steps, in addition to the delay: one step due, one late."""


@dataclass(frozen=True, slots=True)
class FleetRows:
    """All units in service at one decision time.

    ``keys``: units with a row: :data:`features.matrix.meta.ROW_COLUMNS`, sorted by unit.
    ``values``: their features; NaN: unknown; shape (n_rows, n_features).
    ``sample_age_seconds``: age of each row's newest usable sample at the decision time; NaN: there is none.
    ``completeness``: share of the samples expected in the last decision interval, 0 to 1.
    ``why``: why a row must not be scored; None: it may be.
    ``idle``: ``unit`` and ``node`` of units that are in service but known to be down or drained, and have no row.
    ``newest_ms``: time of the newest usable sample, in milliseconds since the epoch.
    """

    keys: pd.DataFrame
    values: NDArray[np.float32]
    sample_age_seconds: Floats
    completeness: Floats
    why: list[str | None]
    idle: pd.DataFrame
    slots: dict[str, str | None]
    newest_ms: int | None


def fleet_rows(
    dataset: Dataset,
    config: MatrixConfig,
    settings: ServingSection,
    t: datetime,
    windows: SequencePlan | None = None,
) -> FleetRows:
    """Compute the row of every unit in service.

    ``dataset``: at most three buckets are in memory: one being read, one filtered, one computed. Without raw windows,
    only the features' look-back is read.
    Raises ``InputError`` if no unit is in service, or the dataset is damaged.
    """
    t_ms = instant_ms(t)
    stale = stale_after(config, settings.stale_after)
    # Raw windows need a counter's last value before them, however old.
    plan = live_plan(config)
    oldest = t - max(plan.look_back, stale + config.step, config.features.delay + config.decision.every)
    since = oldest if windows is None and dataset.meta.span[0] < oldest else None
    events, inventory = dataset.events(), dataset.inventory()
    everyone = in_service(inventory, t_ms)
    if not len(everyone):
        raise InputError(
            f"no unit is in service at {t.isoformat()}",
            f"dataset {dataset.place}",
            "Check the inventory's installed_at and removed_at.",
        )
    watch = FreshnessWatch(config, t_ms)
    sampled = plan.reads_samples or windows is not None
    raw = None if windows is None else RawWindows(windows, config, everyone, inventory, t)
    read = _buckets(dataset, config, since, raw) if sampled else iter(())
    tables = watch.pass_recent(read, t_ms - duration_ms(plan.look_back))
    frame = live_rows(tables, events, inventory, t, config)
    deque(tables, maxlen=0)  # count the tables that features did not read, too
    keys = frame[list(ROW_COLUMNS)]
    if config.labels.acts_on == "unit":
        keys = keys.assign(**{ACTED_ON: keys["unit"]})
    values: Any = frame.drop(columns=list(ROW_COLUMNS)).to_numpy(np.float32)
    if raw is not None:
        values = np.concatenate([values, raw.of(keys["unit"].tolist())], axis=1)
    ages, shares = np.full(len(keys), np.nan), np.ones(len(keys))  # no samples needed, none missing
    why: list[str | None] = [None] * len(keys)
    if sampled:
        ages, shares = watch.of(keys["node"].tolist(), keys["unit"].tolist())
        why = _unknown_reasons(
            ages,
            shares,
            stale_after=stale,
            min_completeness=settings.min_completeness,
            interval=config.decision.every,
            looked_back=None if since is None else t - since,
        )
    return FleetRows(
        keys=keys,
        values=values,
        sample_age_seconds=ages,
        completeness=shares,
        why=why,
        idle=everyone[~everyone["unit"].isin(set(keys["unit"]))],
        slots=_slots_at(inventory, t_ms, config.unit),
        newest_ms=watch.newest_ms,
    )


def in_service(inventory: pd.DataFrame, t_ms: int) -> pd.DataFrame:
    """Return a row for each unit installed at a time, including units that are down, sorted by unit."""
    none = np.zeros(0, dtype=np.int64)
    no_downtime = pd.DataFrame(
        {"unit": pd.array([], dtype="str"), "down_from": instants(none), "down_until": instants(none)}
    )
    return decision_rows(instants(np.array([t_ms], dtype=np.int64)), inventory, no_downtime)


def stale_after(config: MatrixConfig, requested: timedelta) -> timedelta:
    """Return the age at which a sample becomes stale: ``requested``, but at least two steps plus the delay."""
    return max(requested, config.features.delay + MIN_STEPS_STALE * config.step)


def _buckets(
    dataset: Dataset, config: MatrixConfig, since: datetime | None, raw: "RawWindows | None"
) -> Iterator[Sequence[pa.Table]]:
    """Read bucket by bucket, each as the runs on disk, or as one table if raw windows are extracted from it."""
    columns = [*key_columns(config.unit), *(name for name in config.channels if name in dataset.meta.channels)]
    for bucket in dataset.buckets():
        if raw is None:
            yield dataset.read_runs(bucket, columns, since=since)
        else:
            table = dataset.read_bucket(bucket, columns, since=since)
            raw.take(table)
            yield [table]


class RawWindows:
    """Collects the raw windows of all units in service."""

    def __init__(
        self, plan: SequencePlan, config: MatrixConfig, everyone: pd.DataFrame, inventory: pd.DataFrame, t: datetime
    ) -> None:
        self._plan, self._config = plan, config
        self._everyone, self._inventory, self._t = everyone, inventory, t
        self._rows = everyone.reset_index(drop=True).groupby("node").indices
        self._position = {unit: i for i, unit in enumerate(everyone["unit"].tolist())}
        self._values = np.full((len(everyone), plan.steps * len(plan.channels)), np.nan, dtype=np.float32)

    def take(self, table: pa.Table) -> None:
        """Extract the windows of a table's nodes; the table must hold all their samples."""
        columns = {*key_columns(self._config.unit), *layout_of(self._plan, self._config.channels).numbers}
        rows = [self._rows[node] for node in pc.unique(table.column("node")).to_pylist() if node in self._rows]
        row_positions = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *rows]))
        windows = live_windows(
            table.select([name for name in table.column_names if name in columns]),
            self._everyone.iloc[row_positions],
            self._inventory,
            self._t,
            self._config,
        )
        self._values[row_positions] = windows.reshape(len(row_positions), -1)

    def of(self, units: Sequence[str]) -> NDArray[np.float32]:
        """Return the windows of units, shape (len(units), steps * channels); NaN: unknown."""
        return self._values[[self._position[unit] for unit in units]]


def _unknown_reasons(
    ages: Floats,
    shares: Floats,
    *,
    stale_after: timedelta,
    min_completeness: float,
    interval: timedelta,
    looked_back: timedelta | None,
) -> list[str | None]:
    """Return for each row why it must not be scored; None: it may be.

    ``looked_back``: how far back samples were read; None: all were.
    """
    silent = "no sample yet" if looked_back is None else f"no sample in the last {span(looked_back.total_seconds())}"
    limit = stale_after.total_seconds()
    reasons: list[str | None] = []
    for age, share in zip(ages.tolist(), shares.tolist(), strict=True):
        reason = None
        if np.isnan(age):
            reason = silent
        elif age > limit:
            reason = f"the newest sample is {span(age)} old, more than {span(limit)}"
        elif share < min_completeness:
            expected = f"of the samples expected in the last {span(interval.total_seconds())}"
            reason = f"{share:.0%} {expected}, less than {min_completeness:.0%}"
        reasons.append(reason)
    return reasons


class FreshnessWatch:
    """Counts samples by (node, unit) as tables stream through.

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
        """Time of the newest usable sample, in milliseconds since the epoch; None: there was none."""
        return max(self._newest.values(), default=None)

    def pass_recent(self, buckets: Iterable[Sequence[pa.Table]], oldest_ms: int) -> Iterator[list[pa.Table]]:
        """Count the samples of buckets, and yield those that are usable and newer than ``oldest_ms``.

        A row without any value is not counted: an exporter may list a GPU that it cannot read.
        """
        for runs in buckets:
            recent = []
            for table in runs:
                times = epoch_ms(table.column("timestamp"))
                self._count(table, times)
                is_recent = (times > oldest_ms) & (times <= self._border_ms)
                recent.append(table if is_recent.all() else table.filter(pa.array(is_recent)))
            yield recent

    def of(self, nodes: Sequence[str], units: Sequence[str]) -> tuple[Floats, Floats]:
        """Return ``sample_age_seconds`` and ``completeness`` of units on the given nodes."""
        pairs = list(zip(nodes, units, strict=True))
        newest = np.array([self._newest.get(pair, np.nan) for pair in pairs], dtype=np.float64)
        counted = np.array([self._counted.get(pair, 0) for pair in pairs], dtype=np.float64)
        return (self._t_ms - newest) / 1000.0, np.minimum(counted / self._expected, 1.0)

    def _count(self, table: pa.Table, times: NDArray[np.int64]) -> None:
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


def _slots_at(inventory: pd.DataFrame, t_ms: int, unit: str) -> dict[str, str | None]:
    """Return the slot of each unit installed at a time; None if the inventory has none."""
    installed = milliseconds(inventory["installed_at"], "installed_at")
    removed = milliseconds(inventory["removed_at"], "removed_at")
    in_service = np.flatnonzero((installed <= t_ms) & (removed > t_ms))
    in_service = in_service[np.argsort(installed[in_service], kind="stable")]
    names = text(inventory["node" if unit == "node" else "gpu"])
    slots = text(inventory["slot"]) if "slot" in inventory else np.full(len(inventory), None, dtype=object)
    return {str(names[index]): None if slots[index] is None else str(slots[index]) for index in in_service.tolist()}
