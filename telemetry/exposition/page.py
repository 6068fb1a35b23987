"""One exporter's pages as rows of samples, observations of GPUs, and counts of XIDs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.rows import assemble, observed
from telemetry.collect.series.unused import unused_reason
from telemetry.exposition.filling import Filling
from telemetry.exposition.scanner import NO_TIMESTAMP, Limits, Scanned, Scanner
from telemetry.schema import INSTANT

NO_DEVICE: Final = "series of a channel without a GPU or a node in its labels"
"""Reason of problems, beside those of a scan and of the rows."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Exporters that give time stamps give few different ones; a page with more is a dump.
_TIMES_FILLED: Final = 16
_UNEXPLAINED_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class PageRows:
    """What a page tells.

    ``samples``: rows of landed samples: one for each GPU, and one for each of its MIG instances; sorted by (gpu,
    timestamp). The channels that say how the scraping went are not among them.
    ``inventory``: rows of ``LANDED_INVENTORY``: one for each (gpu, node) of the page.
    ``xid_counts``: how often each GPU had each XID within the exporter's window.
    ``channels_per_gpu``: how many channels have a value, by GPU; its MIG instances count with it.
    ``same_as_before``: whether each value (and time stamp, if the page has any) of the devices' series equals that of
    the page before: the exporter has not measured since. False for the first page, and for one without such series.
    ``problems``: lines and values that could not be used, by reason.
    ``unexplained``: metrics that are neither a channel of ours nor known and unused;
    at most 100.
    """

    samples: pa.Table
    inventory: pa.Table
    xid_counts: list[tuple[str, str, int, float]]
    channels_per_gpu: dict[str, int]
    same_as_before: bool
    complete: bool
    problems: dict[str, int]
    unexplained: tuple[str, ...]


@dataclass(slots=True)
class _Plan:
    """What the series of a page are, whatever their order on it."""

    sorted_keys: npt.NDArray[np.int64]
    series: list[Series]
    of_series: npt.NDArray[np.int64]
    xids: list[XidCount]
    of_xids: npt.NDArray[np.int64]
    device_keys: npt.NDArray[np.int64]
    filling: Filling
    inventory: pa.Table
    problems: Counter[str]
    unexplained: tuple[str, ...]
    keys: list[int]
    order: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the devices' series of a page said."""

    keys: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    stamps: npt.NDArray[np.int64] | None

    def equals(self, other: _Reading) -> bool:
        if len(self.values) == 0 or not np.array_equal(self.values, other.values, equal_nan=True):
            return False
        if self.keys is not other.keys and not np.array_equal(self.keys, other.keys):
            return False
        if self.stamps is None or other.stamps is None:
            return self.stamps is other.stamps
        return bool(np.array_equal(self.stamps, other.stamps))


class PageReader:
    """Reads the pages of one target.

    ``catalogue``: tells what series are; may be shared by all readers.
    ``limits``: what a page may cost.

    Not for use by several threads at once.
    """

    def __init__(self, catalogue: SeriesCatalogue, *, limits: Limits | None = None) -> None:
        self._catalogue = catalogue
        self._scanner = Scanner(limits)
        self._plan: _Plan | None = None
        self._before: _Reading | None = None
        self._identities: dict[int, Series | XidCount | str | None] = {}

    def read(self, body: bytes, at_ms: int, *, openmetrics: bool | None = None, whole: bool = True) -> PageRows:
        """Read a page.

        ``at_ms``: when it was fetched, in milliseconds since 1970, UTC: the time of all lines without a time stamp.
        ``openmetrics``: which format it is, as the Content-Type says. Default: OpenMetrics if it has a line ``# EOF``.
        """
        scanned = self._scanner.scan(body, openmetrics=openmetrics, whole=whole)
        plan = self._plan_of(scanned)
        places = plan.order[plan.of_series]
        values = scanned.values[places]
        texts = [scanned.texts[place] for place in places.tolist()]
        stamps = None
        if scanned.timestamps_ms is not None:
            stamps = scanned.timestamps_ms[places]
        found = Counter(scanned.problems)
        found.update(plan.problems)
        samples, channels = _rows(plan, values, texts, stamps, at_ms, found)
        counts = scanned.values[plan.order[plan.of_xids]]
        reading = _Reading(plan.device_keys, np.concatenate((values, counts)), stamps)
        same = self._before is not None and reading.equals(self._before)
        self._before = reading
        return PageRows(
            samples,
            _seen(plan.inventory, at_ms),
            [
                (each.gpu, each.node, each.xid, float(count))
                for each, count in zip(plan.xids, counts, strict=True)
                if not np.isnan(count)
            ],
            channels,
            same,
            scanned.complete,
            {reason: count for reason, count in found.items() if count},
            plan.unexplained,
        )

    def _plan_of(self, scanned: Scanned) -> _Plan:
        plan = self._plan
        if plan is not None and plan.keys is scanned.keys:
            return plan
        keys = np.array(scanned.keys, np.int64)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        if plan is not None and np.array_equal(ordered, plan.sorted_keys):
            plan.keys, plan.order = scanned.keys, order
            return plan
        self._plan = self._new_plan(scanned.keys, ordered, order)
        return self._plan

    def _new_plan(self, keys: list[int], ordered: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> _Plan:
        identities = self._identities
        if len(identities) > 2 * self._scanner.limits.series:
            identities.clear()
        series: list[Series] = []
        xids: list[XidCount] = []
        of_series: list[int] = []
        of_xids: list[int] = []
        problems: Counter[str] = Counter()
        unexplained: dict[str, None] = {}
        known: set[str] = set()
        for place, key in enumerate(ordered.tolist()):
            if key not in identities:
                identities[key] = self._identify(key, known)
            identity = identities[key]
            if isinstance(identity, Series):
                series.append(identity)
                of_series.append(place)
            elif isinstance(identity, XidCount):
                xids.append(identity)
                of_xids.append(place)
            elif identity == NO_DEVICE:
                problems[NO_DEVICE] += 1
            elif identity is not None and len(unexplained) < _UNEXPLAINED_KEPT:
                unexplained[identity] = None
        return _Plan(
            ordered,
            series,
            np.array(of_series, np.int64),
            xids,
            np.array(of_xids, np.int64),
            ordered[np.array(of_series + of_xids, np.int64)],
            Filling(series),
            observed(series, _EPOCH),
            problems,
            tuple(unexplained),
            keys,
            order,
        )

    def _identify(self, key: int, known: set[str]) -> Series | XidCount | str | None:
        """Return what a series is; None if it is known and unused, else why it is not used: a metric or a reason."""
        name, labels = self._scanner.labels(key)
        identity = self._catalogue.identify(name, labels)
        if identity is not None or unused_reason(name) is not None:
            return identity
        if not known:
            known.update((*self._catalogue.metric_names(), XID_COUNT_METRIC))
        if name in known:
            # Of AMD's one metric for all clocks, some are no channel of ours.
            return None if "clock_type" in labels else NO_DEVICE
        return name


def _rows(
    plan: _Plan,
    values: npt.NDArray[np.float64],
    texts: list[bytes],
    stamps: npt.NDArray[np.int64] | None,
    at_ms: int,
    found: Counter[str],
) -> tuple[pa.Table, dict[str, int]]:
    if stamps is None:
        return plan.filling.fill(values, texts, at_ms, found)
    times = np.where(stamps == NO_TIMESTAMP, at_ms, stamps)
    instants = np.unique(times)
    if len(instants) == 1:
        return plan.filling.fill(values, texts, int(instants[0]), found)
    if len(instants) > _TIMES_FILLED:
        index = np.arange(len(values), dtype=np.int32)
        channels: dict[str, set[str]] = {}
        for each, value in zip(plan.series, values, strict=True):
            if not np.isnan(value):
                channels.setdefault(each.gpu, set()).add(each.channel)
        table = assemble(plan.series, index, times, values, problems=found)
        return table, {gpu: len(names) for gpu, names in channels.items()}
    tables, counts = [], Counter[str]()
    for instant in instants.tolist():
        then, reported = plan.filling.fill(np.where(times == instant, values, np.nan), texts, instant, found)
        tables.append(then)
        for gpu, count in reported.items():
            counts[gpu] += count
    table = pa.concat_tables(tables, promote_options="default")
    return table.sort_by([("gpu", "ascending"), ("timestamp", "ascending")]), dict(counts)


def _seen(inventory: pa.Table, at_ms: int) -> pa.Table:
    rows = inventory.num_rows
    stamps = pa.Array.from_buffers(INSTANT, rows, [None, pa.py_buffer(np.full(rows, at_ms, np.int64))])
    place = inventory.schema.get_field_index("seen_at")
    return inventory.set_column(place, inventory.schema.field(place), stamps)
