"""A look at a server before its history is fetched: its GPUs, their sampling interval, the number of samples."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foundation.http import Connection
from telemetry.collect.prometheus.backfill import PAST_END_MS, BackfillPlan, find_metrics
from telemetry.collect.prometheus.client import Bounds, PrometheusClient, check_match, selector
from telemetry.collect.prometheus.progress import Span
from telemetry.collect.series.batch import SeriesBook
from telemetry.collect.series.identity import Series, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel
from telemetry.importing.sampling import sampling_interval

_WINDOWS_MS: Final = (1_800_000, 21_600_000, 86_400_000)
"""Lengths of history that are looked at: the next longer one where a shorter one shows no interval."""

_INTERVALS: Final = 3
"""Sampling intervals that a window must hold to count the samples of the whole period by it."""

_INSTANTS: Final = 12
"""Instants of the period, evenly spread, at which GPUs are counted: those that are gone today are in the tickets."""


@dataclass(slots=True)
class Outlook:
    """What a server holds of a plan.

    ``gpus``: rows of an inventory (``node``, ``gpu``, and what labels give) by node and GPU. ``samples``: an estimate
    for the plan. ``interval``: between two samples of a series, None if unknown. ``samples_per_second``: of the look.
    """

    gpus: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    samples: int = 0
    interval: timedelta | None = None
    samples_per_second: float = 0.0


class _Window(NamedTuple):
    """The series of an answer by their number, how many samples each has, and the interval between two."""

    numbers: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    interval: timedelta | None


def look_ahead(
    connection: Connection, plan: BackfillPlan, *, channels: Mapping[str, Channel], mapping: SourceMapping | None = None
) -> Outlook:
    """Look at a few windows of a plan, and keep nothing.

    Raises ``InputError`` as :func:`telemetry.collect.prometheus.backfill.backfill` does.
    """
    matchers, whole = check_match(plan.match), plan.span(datetime.now(UTC))
    catalogue = SeriesCatalogue(channels, mapping)
    outlook, book = Outlook(), SeriesBook(catalogue)

    async def look() -> None:
        async with PrometheusClient(
            connection, bounds=Bounds(), concurrency=1, allow_partial=plan.allow_partial
        ) as client:
            metrics = await find_metrics(client, catalogue, matchers, whole)

            async def window(metric: str, end_ms: int, length_ms: int) -> _Window:
                query = f"{selector(metric, [matchers])}[{length_ms + PAST_END_MS}ms]"
                answer = await client.samples(query, end_ms + PAST_END_MS)
                numbers = np.array([book.number(tuple(labels.items())) for labels in answer.labels], np.int32)
                counts = np.bincount(answer.index, minlength=len(numbers))
                return _Window(numbers, counts, sampling_interval(answer.index, answer.ms))

            largest, fetched, started_s, length_ms = metrics[0], 0, time.monotonic(), whole.length_ms
            for length_ms in _lengths(whole):
                for end_ms in _ends(whole, length_ms):
                    newest = {metric: await window(metric, end_ms, length_ms) for metric in metrics}
                    total = sum(int(seen.counts.sum()) for seen in newest.values())
                    fetched += total
                    if total:
                        break
                largest = max(newest, key=lambda metric: newest[metric].counts.sum())
                known = sorted(seen.interval for seen in newest.values() if seen.interval is not None)
                outlook.interval = known[len(known) // 2] if known else None
                if outlook.interval is not None and _INTERVALS * outlook.interval <= timedelta(milliseconds=length_ms):
                    break
            outlook.samples_per_second = fetched / max(time.monotonic() - started_s, 1e-3)
            interval_ms = int((outlook.interval or timedelta(minutes=2)) / timedelta(milliseconds=1))
            reach_ms = min(whole.length_ms, _INTERVALS * interval_ms)
            for end_ms in np.linspace(whole.after_ms + reach_ms, whole.until_ms, _INSTANTS).astype(np.int64).tolist():
                await window(largest, end_ms, reach_ms)
            book.identify()
            known_series = [(book.places(seen.numbers, Counter()) >= 0, seen.counts) for seen in newest.values()]
            samples = sum(int(counts[is_known].sum()) for is_known, counts in known_series)
            outlook.samples = samples * whole.length_ms // length_ms
            for series in book.series:
                if isinstance(series, Series):
                    row = {"node": series.node, "gpu": series.gpu, **dict(series.inventory)}
                    outlook.gpus.setdefault((series.node, series.gpu), row)

    asyncio.run(look())
    return outlook


def _lengths(whole: Span) -> Iterator[int]:
    yield min(_WINDOWS_MS[0], whole.length_ms)
    yield from (length for length in _WINDOWS_MS[1:] if length <= whole.length_ms)


def _ends(whole: Span, length_ms: int) -> tuple[int, ...]:
    """Return ends of windows: the newest first, that in the middle and the oldest where it is empty."""
    return whole.until_ms, (whole.after_ms + whole.until_ms + length_ms) // 2, whole.after_ms + length_ms
