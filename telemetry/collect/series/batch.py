"""Conversion of label sets and samples to staged tables: channel rows, inventory observations and XID events."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.channels import Kind as ChannelKind
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT
from telemetry.staging.folder import Kind, StagingFolder, rows_table
from telemetry.values.links import LinkTotals
from telemetry.values.numbers import WIDE_UNITS, is_sentinel

CONFLICT: Final = "two different values at one time"
INEXACT: Final = "too large to be exact"
INFINITE: Final = "not a finite number"
NOT_WHOLE: Final = "not a whole number"
OUT_OF_RANGE: Final = "outside the range of its type"
NO_NUMBER: Final = "not a number"
OTHER_SERIES: Final = "another series has the value"
SENTINEL: Final = "a value that means 'not supported'"
# Reasons why :func:`assemble` discards a value.
_EXACT: Final = 2.0**53
_INT32: Final = 2.0**31
_NO_PART: Final = -1


def assemble(
    series: Sequence[Series],
    index: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    *,
    problems: Counter[str],
    links: LinkTotals | None = None,
) -> pa.Table:
    """Pivot samples of series into one row per GPU and time; NaN (stale markers among them) and sentinels are dropped.

    ``index`` and ``ms`` are the position in ``series`` and the time (Unix ms) of each of ``values``; shape (n,).
    Discarded values are counted into ``problems``, by reason.
    Returns: staged samples with a column per channel that has a value, in the order of ``series``: one row for each
    (gpu, node, mig_instance, timestamp) that has a value, sorted by (gpu, timestamp).

    If a channel of a GPU has several samples at one time, the metric of the lowest rank is used; a total is preferred
    to its parts, and parts are summed, with the earlier value of a missing link (``links`` keeps them between batches).
    Duplicates of one series count once; if they differ, the largest value is used and the others are problems: with
    shared GPUs, dcgm-exporter gives the share of each pod under the GPU's metric.
    """
    reasons: Counter[str] = Counter()
    index, ms, values = np.asarray(index), np.asarray(ms, np.int64), np.asarray(values, np.float64)
    usable = _usable(series, index, values, reasons)
    index, ms, values = index[usable], ms[usable], values[usable]

    def by_sample(fact: Callable[[Series], float], kind: type = np.int32) -> npt.NDArray[Any]:
        return np.array([fact(entry) for entry in series], kind)[index]

    # A GPU has one row at a time; with MIG, one more for each instance.
    places = sorted({(entry.gpu, entry.mig_instance or "", entry.node) for entry in series})
    place_numbers = {place: number for number, place in enumerate(places)}
    gpu_numbers = {gpu: number for number, (gpu, _, _) in enumerate(places)}
    channels = {entry.channel: entry.kind for entry in series}
    channel_numbers = {name: number for number, name in enumerate(channels)}
    parts = sorted({entry.part for entry in series if entry.part})
    part_numbers = {part: number for number, part in enumerate(parts)}
    place = by_sample(lambda entry: place_numbers[entry.gpu, entry.mig_instance or "", entry.node])
    channel = by_sample(lambda entry: channel_numbers[entry.channel])
    part = by_sample(lambda entry: part_numbers[entry.part] if entry.part else _NO_PART)
    rank = by_sample(lambda entry: entry.rank)
    values = values * by_sample(lambda entry: entry.scale, np.float64)
    order = np.lexsort((-values, part, rank, channel, place, ms, by_sample(lambda entry: gpu_numbers[entry.gpu])))
    part, rank, channel, place, ms, values = _take(order, part, rank, channel, place, ms, values)

    is_row_start = _changes(place, ms)
    row_place, row_ms = place[is_row_start], ms[is_row_start]
    row = np.cumsum(is_row_start) - 1
    # A cell (row, channel) starts with its lowest rank, and within it with the total if there is one.
    is_cell_start = is_row_start | _changes(channel)
    cell = np.cumsum(is_cell_start) - 1
    is_preferred = (rank == rank[is_cell_start][cell]) & ((part == _NO_PART) | (part[is_cell_start][cell] != _NO_PART))
    reasons[OTHER_SERIES] += int((~is_preferred).sum())
    row, channel, part, cell, values = _take(is_preferred, row, channel, part, cell, values)
    is_first = _changes(cell, part)
    reasons[CONFLICT] += int((values != values[is_first][np.cumsum(is_first) - 1]).sum())
    row, channel, part, cell, values = _take(is_first, row, channel, part, cell, values)
    start = np.flatnonzero(_changes(cell))
    if len(start):
        sums = np.add.reduceat(values, start)
        if parts:
            counters = [number for number, kind in enumerate(channels.values()) if kind == "counter"]
            of_link = np.flatnonzero((part != _NO_PART) & np.isin(channel, counters))
            cells, turn = np.unique(cell[of_link], return_inverse=True)
            table = np.full((len(cells), len(parts)), np.nan)
            table[turn, part[of_link]] = values[of_link]
            names = [(place, name) for place in places for name in channels]
            code = row_place[row[start[cells]]] * len(channels) + channel[start[cells]]
            sums[cells] = (links or LinkTotals()).of_table(names, code, row_ms[row[start[cells]]], parts, table)
        row, channel, values = row[start], channel[start], sums
    exact = _exact(list(channels.values()), channel, values, reasons)
    problems.update(+reasons)
    return _table(places, channels, (row_place, row_ms), row[exact], channel[exact], values[exact])


def _table(
    places: list[tuple[str, str, str]],
    channels: Mapping[str, ChannelKind],
    rows: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]],
    row: npt.NDArray[np.int64],
    channel: npt.NDArray[np.int32],
    values: npt.NDArray[np.float64],
) -> pa.Table:
    """Return the values as a table; ``rows``: place and time by row; the values' row and channel have shape (n,)."""
    used, row = np.unique(row, return_inverse=True)
    row_place, row_ms = rows
    row_places = pa.array(row_place[used])
    arrays: dict[str, pa.Array] = {"timestamp": pa.array(row_ms[used]).cast(INSTANT)}
    for name, texts in (
        ("node", [node for _, _, node in places]),
        ("gpu", [gpu for gpu, _, _ in places]),
        ("mig_instance", [instance or None for _, instance, _ in places]),
    ):
        arrays[name] = pa.array(texts, pa.string()).take(row_places)
    for number, (name, kind) in enumerate(channels.items()):
        of_channel = channel == number
        if of_channel.any():
            column, is_missing = np.zeros(len(used)), np.ones(len(used), np.bool_)
            column[row[of_channel]], is_missing[row[of_channel]] = values[of_channel], False
            target = CHANNEL_TYPES[kind]
            with np.errstate(over="ignore"):  # a gauge beyond float32 becomes infinite and is quarantined
                arrays[name] = pa.array(column.astype(target.to_pandas_dtype()), type=target, mask=is_missing)
    return pa.table(arrays)


def _usable(
    series: Sequence[Series], index: npt.NDArray[np.int32], values: npt.NDArray[np.float64], reasons: Counter[str]
) -> npt.NDArray[np.bool_]:
    """Return the mask of finite, supported values; the others are counted into ``reasons``."""
    wide = np.array([_is_wide(entry.channel) for entry in series], np.bool_)[index]
    unsupported = np.where(wide, is_sentinel(values, unit="B/s"), is_sentinel(values))
    usable = ~unsupported & np.isfinite(values)
    for reason, mask in (
        (SENTINEL, unsupported),
        (INFINITE, np.isinf(values) & ~unsupported),
        (NO_NUMBER, np.isnan(values) & ~unsupported),
    ):
        reasons[reason] += int(mask.sum())
    return usable


@cache
def _is_wide(channel: str) -> bool:
    base = CATALOGUE.get(re.sub(r"_(?:min|max|rise)$", "", channel))
    return base is not None and base.unit in WIDE_UNITS


def _take(index: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [column[index] for column in columns]


def _changes(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return the mask of entries that differ from their predecessor in any of the sorted columns."""
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return changed


def _exact(
    kinds: list[str], channel: npt.NDArray[Any], values: npt.NDArray[np.float64], reasons: Counter[str]
) -> npt.NDArray[np.bool_]:
    """Return the mask of values that their column type can hold exactly; flags and enums are integers."""
    is_flags = np.array([kind == "flags" for kind in kinds], np.bool_)[channel]
    is_enum = np.array([kind == "enum" for kind in kinds], np.bool_)[channel]
    is_integer = is_flags | is_enum
    integral = np.isfinite(values) & (values == np.floor(values))
    in_range = np.where(is_flags, values >= 0.0, (values >= -_INT32) & (values < _INT32))
    exact = np.abs(values) < _EXACT
    for reason, mask in (
        (NOT_WHOLE, ~integral),
        (OUT_OF_RANGE, integral & ~in_range),
        (INEXACT, integral & in_range & ~exact),
    ):
        reasons[reason] += int((is_integer & mask).sum())
    return ~is_integer | (integral & in_range & exact)


_IDENTITIES: Final = 100_000  # about 2 kB each
_GPUS_KEPT = 200_000
_OBSERVED_EVERY_MS = 3_600_000
_Labels = tuple[tuple[str, str], ...]
_State = tuple[str | None, ...]
_Key = TypeVar("_Key", bound=Hashable)


class Tables(NamedTuple):
    """Inventory, events and samples of one time span, in the staging schemas."""

    inventory: pa.Table
    events: pa.Table
    samples: pa.Table

    def stage(self, staging: StagingFolder, name: str) -> Counter[Kind]:
        """Stage each table under an idempotent name; return the number of newly staged rows per kind."""
        staged: Counter[Kind] = Counter()
        # The inventory first: samples of GPUs missing from it would be quarantined.
        kinds: tuple[Kind, ...] = ("inventory", "events", "samples")
        for kind, table in zip(kinds, self, strict=True):
            if staging.stage(kind, table, name=name) is not None:
                staged[kind] = table.num_rows
        return staged


class SeriesValue(NamedTuple):
    """A value, its series, and the metric name at the source."""

    metric: str
    series: Series | XidCount
    value: float


class SeriesBook:
    """Label sets of a batch: numbered as they arrive, identified when the batch is complete.

    The label that names the node is chosen from the whole batch. ``series``: distinct identities of the label sets.
    ``nameless``: metrics with a series that was left out, and the labels of the first such series.
    """

    def __init__(self, catalogue: SeriesCatalogue) -> None:
        self.series: list[Series | XidCount] = []
        self.nameless: dict[str, Mapping[str, str]] = {}
        self._catalogue, self._revision = catalogue, catalogue.nodes.revision
        self._identities: dict[_Labels, Series | XidCount | None] = {}
        self._numbers: dict[_Labels, int] = {}
        self._places: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def clear(self) -> None:
        """Start the next batch; identities of label sets stay cached."""
        self._numbers = {}

    def number(self, labels: _Labels) -> int:
        """Return the number of a label set, which includes ``__name__``."""
        if labels not in self._numbers and labels not in self._identities:
            self._catalogue.observe((dict(labels),))
        return self._numbers.setdefault(labels, len(self._numbers))

    def identify(self) -> None:
        """Identify the numbered label sets."""
        if len(self._identities) > _IDENTITIES or self._catalogue.nodes.revision != self._revision:
            self._identities.clear()
            self._revision = self._catalogue.nodes.revision
        self._places = np.full(len(self._numbers), -1, np.int32)
        positions: dict[Series | XidCount, int] = {}
        for labels, number in self._numbers.items():
            if labels not in self._identities:
                named = dict(labels)
                self._identities[labels] = self._catalogue.identify(named.get("__name__", ""), named)
            identity = self._identities[labels]
            if identity is not None:
                self._places[number] = positions.setdefault(identity, len(positions))
        self.series = list(positions)

    def places(self, index: npt.NDArray[np.int32], left_out: Counter[str]) -> npt.NDArray[np.int32]:
        """Return each sample's position in ``series``, by its label set; -1 if it is left out and counted."""
        place = self._places[index]
        numbers, counts = np.unique(index[place < 0], return_counts=True)
        label_sets = list(self._numbers) if len(numbers) else []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            labels = dict(label_sets[number])
            name = labels.pop("__name__", "")
            self.nameless.setdefault(name, labels)
            left_out[self._catalogue.left_out_reason(name)] += count
        return place

    def read(
        self, index: npt.NDArray[np.int32], values: npt.NDArray[np.float64], left_out: Counter[str]
    ) -> Iterator[SeriesValue]:
        """Yield the values whose series is identified; the others are counted as in :meth:`places`.

        The catalogue has their targets then: an exporter that restarted had another address in older samples.
        """
        label_sets = [dict(labels) for labels in self._numbers]
        places = self.places(index, left_out)
        self._catalogue.targets.clear()
        for number, place, value in zip(index.tolist(), places.tolist(), values.tolist(), strict=True):
            if place >= 0:
                series, labels = self.series[place], label_sets[number]
                if "instance" in labels:
                    self._catalogue.targets[series.gpu].add(labels["instance"])
                yield SeriesValue(labels.get("__name__", ""), series, value)


def read_batch(
    entries: Sequence[Series | XidCount],
    index: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    *,
    xids: XidCounts,
    problems: Counter[str],
    links: LinkTotals | None = None,
) -> Tables:
    """Convert samples to tables; ``index`` (into ``entries``), ``ms`` (Unix) and ``values`` have shape (n,).

    ``xids`` and ``links`` keep state between batches, which must come in time order; ``problems``: discarded values.
    """
    used, place = np.unique(index, return_inverse=True)
    chosen = [entries[number] for number in used.tolist()]
    series = [entry for entry in chosen if isinstance(entry, Series)]
    counts = [entry for entry in chosen if isinstance(entry, XidCount)]
    is_count = np.array([isinstance(entry, XidCount) for entry in chosen], np.bool_)
    number = (np.where(is_count, np.cumsum(is_count), np.cumsum(~is_count)) - 1)[place].astype(np.int32)
    of_series = ~is_count[place]
    watched = first_and_last([entry.gpu for entry in series], number[of_series], ms[of_series])
    of_samples = number[of_series], ms[of_series], values[of_series]
    samples = assemble(series, *of_samples, problems=problems, links=links)
    inventory = observed_spans(series, number[of_series], ms[of_series])
    # Last: XidCounts advances its state, and would not return these events again if a later step failed.
    events = xids.follow(counts, number[~of_series], ms[~of_series], values[~of_series], watched=watched)
    return Tables(inventory, events, samples)


def first_and_last(
    keys: Sequence[_Key], index: npt.NDArray[np.int32], ms: npt.NDArray[np.int64]
) -> dict[_Key, tuple[int, int]]:
    """Return the times of each key's first and last sample; ``index`` refers to ``keys``, which may repeat."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    place = np.array([numbers[key] for key in keys], np.int64)[index]
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, place, ms)
    np.maximum.at(last, place, ms)
    return dict(zip(numbers, zip(first.tolist(), last.tolist(), strict=True), strict=True))


def observed_spans(series: Sequence[Series], index: npt.NDArray[np.int32], ms: npt.NDArray[np.int64]) -> pa.Table:
    """Return the first and last observation of each distinct set of inventory labels of a GPU.

    ``index`` and ``ms`` are the series and the time (Unix ms) of each sample; shape (n,). Each series has a sample.
    Returns: rows of ``STAGED_INVENTORY``, one or two for each distinct (gpu, node, inventory), sorted by time.
    """
    spans: dict[tuple[str, str], dict[_Labels, tuple[int, int]]] = {}
    keys = [(entry.gpu, entry.node, entry.inventory) for entry in series]
    for (gpu, node, labels), span in first_and_last(keys, index, ms).items():
        spans.setdefault((gpu, node), {})[labels] = span
    rows: list[dict[str, Any]] = [
        {**dict(labels), "gpu": gpu, "node": node, "seen_at": seen_ms}
        for (gpu, node), of_place in spans.items()
        for labels, span in of_place.items()
        if not _has_wider(labels, span, of_place)
        for seen_ms in sorted(set(span))
    ]
    return rows_table("inventory", sorted(rows, key=lambda row: (row["seen_at"], row["gpu"], row["node"])))


def _has_wider(labels: _Labels, span: tuple[int, int], of_place: dict[_Labels, tuple[int, int]]) -> bool:
    """Return whether another series has a superset of the labels over the same time: NVLink series have few labels."""
    return any(
        set(labels) < set(other) and low <= span[0] and span[1] <= high for other, (low, high) in of_place.items()
    )


class InventoryNews:
    """Selects the inventory observations to stage: changes, and each GPU once an hour of sample time."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_State, int]] = {}
        self._selected: dict[str, tuple[_State, int]] = {}

    def select(self, observations: pa.Table) -> pa.Table:
        """Return rows with a change, or an hour after the GPU's last selected one; call :meth:`staged` once written.

        A missing label is no change: recording rules keep few labels and arrive in separate requests.
        """
        names = ["node", *(name for name in observations.column_names if name not in ("gpu", "node", "seen_at"))]
        states = zip(*(observations.column(name).to_pylist() for name in names), strict=True)
        times = pc.cast(observations.column("seen_at"), pa.int64()).to_pylist()
        keep = []
        self._selected = {}
        for gpu, state, ms in zip(observations.column("gpu").to_pylist(), states, times, strict=True):
            known, known_at = self._selected.get(gpu) or self._known.get(gpu) or (state, ms - _OBSERVED_EVERY_MS)
            differs = any(new is not None and new != old for new, old in zip(state, known, strict=True))
            is_news = (differs and ms >= known_at) or ms - known_at >= _OBSERVED_EVERY_MS
            keep.append(is_news)
            if is_news:
                merged = tuple(old if new is None else new for new, old in zip(state, known, strict=True))
                self._selected[gpu] = (merged if state[0] == known[0] else state, ms)
        return observations.filter(pa.array(keep, pa.bool_()))

    def staged(self) -> None:
        """Mark the last selection as written."""
        if len(self._known) > _GPUS_KEPT:
            self._known.clear()
        self._known.update(self._selected)
