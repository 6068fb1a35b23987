"""Preview of a backfill: the server's GPUs, latest values, sampling interval and estimated number of samples."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median_high
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.http import Connection, shown_url
from telemetry.collect.prometheus.backfill import MIN_SPAN_MS, PAST_END_MS, BackfillPlan, find_metrics
from telemetry.collect.prometheus.client import (
    Bounds,
    PrometheusClient,
    RawSamples,
    TooMuch,
    check_match,
    quoted,
    selector,
)
from telemetry.collect.series.batch import SeriesBook, SeriesValue
from telemetry.collect.series.identity import Series, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel
from telemetry.importing.sampling import sampling_interval

_WINDOWS_MS: Final = (300_000, 1_800_000, 21_600_000, 86_400_000)
"""Window lengths, tried in order until one is long enough to determine the sampling interval."""

_INTERVALS: Final = 3
"""Minimum sampling intervals in a window, to extrapolate its samples to the whole period."""

_INSTANTS: Final = 12
"""Evenly spaced instants at which GPUs are listed, so that GPUs since removed are found too."""

_LOOKBACK_MS: Final = 300_000
"""A series without a sample for this long, and for two sampling intervals, has ended."""


@dataclass(slots=True)
class BackfillPreview:
    """Preview of a backfill plan.

    ``names``: metrics on the server in the period; ``metrics``: those to be fetched. ``newest``: latest values of
    series that have not ended; ``left_out``: counts of the ones not used, by reason. ``age``: of the newest sample at
    the end of the period. ``targets_down``: down targets of the jobs that scrape GPUs. ``samples``: estimated total.
    ``interval``: sampling interval, None if unknown. ``samples_per_second``: throughput of the preview.
    """

    catalogue: SeriesCatalogue
    names: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    newest: list[SeriesValue] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    age: timedelta = timedelta.max
    targets_down: int = 0
    samples: int = 0
    interval: timedelta | None = None
    samples_per_second: float = 0.0

    @property
    def facts(self) -> dict[str, str]:
        """Heading facts of a report on the server."""
        interval = "unknown" if self.interval is None else format_duration(self.interval)
        return {"node": str(self.catalogue.nodes.decision()), "sampling interval": interval}

    @property
    def gpus(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Inventory rows (``node``, ``gpu`` and the inventory labels) by node and GPU."""
        inventory_by_gpu = {(series.node, series.gpu): series.inventory for series in reversed(self.series)}
        return {
            (node, gpu): {"node": node, "gpu": gpu, **dict(labels)} for (node, gpu), labels in inventory_by_gpu.items()
        }


class _Window(NamedTuple):
    """Per series: number, count of samples, and time (Unix ms) and value of the newest; and the sampling interval."""

    numbers: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    interval: timedelta | None


def preview_backfill(
    connection: Connection,
    plan: BackfillPlan,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    bounds: Bounds | None = None,
    now: datetime,
) -> BackfillPreview:
    """Query a few windows of a plan without storing anything.

    Raises ``InputError`` as :func:`telemetry.collect.prometheus.backfill.backfill` does, or if the server cannot even
    return a minute of one metric.
    """
    matchers, period, jobs = check_match(plan.match), plan.span(now), set[str]()
    preview = BackfillPreview(SeriesCatalogue(channels, mapping))
    book = SeriesBook(preview.catalogue)
    client = PrometheusClient(connection, bounds=bounds or Bounds(), concurrency=1, allow_partial=plan.allow_partial)

    async def window(metric: str, end_ms: int, length_ms: int) -> _Window:
        answer = await client.samples(
            f"{selector(metric, [matchers])}[{length_ms + PAST_END_MS}ms]", end_ms + PAST_END_MS
        )
        jobs.update(labels["job"] for labels in answer.labels if labels.get("job"))
        return _newest(answer, np.array([book.number(tuple(labels.items())) for labels in answer.labels], np.int32))

    async def windows(length_ms: int) -> tuple[list[_Window], int]:
        """Return the newest non-empty window of all metrics, and its length, halved while the server refuses."""
        middle, oldest = (period.after_ms + period.until_ms + length_ms) // 2, period.after_ms + length_ms
        try:
            for end_ms in (period.until_ms, middle, oldest):
                newest_windows = [await window(metric, end_ms, length_ms) for metric in preview.metrics]
                if any(len(sampled.numbers) for sampled in newest_windows):
                    break
        except TooMuch:
            if length_ms <= MIN_SPAN_MS:
                raise
            return await windows(length_ms // 2)
        return newest_windows, length_ms

    async def measure() -> None:
        preview.metrics, preview.names = await find_metrics(client, preview.catalogue, matchers, period)
        fetched, started_s = 0, time.monotonic()
        for longest_ms in dict.fromkeys(min(length, period.length_ms) for length in _WINDOWS_MS):
            newest, length_ms = await windows(longest_ms)
            fetched += sum(int(sampled.counts.sum()) for sampled in newest)
            known = [sampled.interval for sampled in newest if sampled.interval is not None]
            preview.interval = median_high(known) if known else None
            if preview.interval is not None and _INTERVALS * preview.interval <= timedelta(milliseconds=length_ms):
                break
        preview.samples_per_second = fetched / max(time.monotonic() - started_s, 1e-3)
        interval_ms = int((preview.interval or timedelta(minutes=2)) / timedelta(milliseconds=1))
        reach_ms = min(period.length_ms, _INTERVALS * interval_ms)
        largest = preview.metrics[int(np.argmax([sampled.counts.sum() for sampled in newest]))]
        for end_ms in np.linspace(period.after_ms + reach_ms, period.until_ms, _INSTANTS).astype(np.int64).tolist():
            await window(largest, end_ms, reach_ms)
        book.identify()
        numbers, counts, ms, values = (np.concatenate(column) for column in list(zip(*newest, strict=True))[:4])
        preview.samples = int(counts[book.places(numbers, Counter()) >= 0].sum()) * period.length_ms // length_ms
        goes_on = ms >= ms.max(initial=0) - max(2 * interval_ms, _LOOKBACK_MS)
        preview.newest = [*book.read(numbers[goes_on], values[goes_on], preview.left_out)]
        preview.age = timedelta(milliseconds=int(period.until_ms - ms.max(initial=period.after_ms)))
        preview.series = [series for series in book.series if isinstance(series, Series)]

    async def connected() -> None:
        async with client:
            await measure()
            if jobs:
                exporters = quoted("|".join(map(re.escape, sorted(jobs))))
                down = await client.vector(f"count(up{{job=~{exporters}}} == 0)", period.until_ms)
                preview.targets_down = int(sum(value for _, value in down))

    try:
        asyncio.run(connected())
    except TooMuch as error:
        raise InputError(
            f"the server does not respond: {error}", shown_url(connection.url), "Select fewer series with --match."
        ) from error
    return preview


def _newest(answer: RawSamples, numbers: npt.NDArray[np.int32]) -> _Window:
    counts = np.bincount(answer.index, minlength=len(numbers))
    last = (np.cumsum(counts) - 1)[counts > 0]  # samples are grouped by series and sorted by time
    interval = sampling_interval(answer.index, answer.ms)
    return _Window(numbers[counts > 0], counts[counts > 0], answer.ms[last], answer.values[last], interval)
