"""The backfill: a server's history, span by span, into the landing folder.

The spans are fetched in the order of time. Within a span each metric is fetched by itself, several at once; when all
are there, the rows land under a name made of the job and the span, and only then is the span noted as done. A run that
is killed therefore repeats at most the span it was in, and what had landed of it does not land again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from telemetry.collect.prometheus.client import Bounds, PrometheusClient
from telemetry.collect.prometheus.fetch import (
    LEAST_WINDOW_MS,
    SpanSamples,
    SpanTooLarge,
    check_match,
    fetch_metric,
    find_metrics,
)
from telemetry.collect.prometheus.progress import Pieces, Progress, Span, chunks, job_id, without
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.errors import InputError
from telemetry.http import Connection
from telemetry.landing.folder import Landing

SETTLED_AFTER: Final = timedelta(minutes=2)
"""Newer samples may still be on their way: VictoriaMetrics shows none of its last 30 s, agents send in batches."""

MAX_SAMPLES: Final = 2_500_000
"""Samples held at once: 20 bytes each until they are rows, and 150 at the peak while they become rows (measured)."""

_MS: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """What to fetch.

    ``chunk``: time that is fetched at once; halved where the server or memory asks for it. ``match``: matchers in
    braces that every series must meet. ``delay``: from an XID to when it could first have been known.
    ``allow_partial``: whether answers count that the server says are not whole.
    """

    start: datetime
    end: datetime
    chunk: timedelta = timedelta(hours=6)
    match: str | None = None
    delay: timedelta = timedelta(minutes=10)
    concurrency: int = 4
    allow_partial: bool = False
    max_samples: int = MAX_SAMPLES


@dataclass(slots=True)
class BackfillResult:
    """What a backfill did.

    ``unknown``: metrics with series that name no GPU or no node, and the label names of one.
    ``problems``: values that are null for a reason.
    """

    metrics: list[str]
    chunks: int
    chunks_before: int
    end: datetime
    samples: int = 0
    rows: int = 0
    events: int = 0
    requests: int = 0
    retries: int = 0
    seconds: float = 0.0
    unknown: dict[str, str] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)


def backfill(
    connection: Connection,
    plan: BackfillPlan,
    root: Path,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    bounds: Bounds | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    progress: Callable[[int, int], None] | None = None,
) -> BackfillResult:
    """Fetch a server's history into a landing folder; started again, it goes on where it stopped.

    ``root``: the landing folder, see :func:`telemetry.landing.folder.landing_of`.
    Raises ``InputError`` if an argument is impossible, the server refuses, has nothing known, or does not answer for
    too long, or the disk is full. What had landed stays.
    """
    matchers = check_match(plan.match)
    mapping = SourceMapping() if mapping is None else mapping
    whole = _whole(plan, clock())
    job = job_id(connection.url, matchers, mapping, channels)
    landing = Landing(root, writer="prometheus", channels=channels)
    state = Progress.read(landing.state(f"prometheus-{job}.json"))
    # A recording rule may hold the extreme of a step: the name of a roll-up names it.
    catalogue = SeriesCatalogue(with_rollups(channels), mapping)
    run = _Run(plan, landing, catalogue, matchers, whole, job, state, progress)
    client = PrometheusClient(
        connection, bounds=bounds or Bounds(), concurrency=plan.concurrency, allow_partial=plan.allow_partial
    )
    return asyncio.run(run.go(client))


def _whole(plan: BackfillPlan, now: datetime) -> Span:
    if plan.chunk < timedelta(minutes=1):
        raise InputError(f"a chunk of {plan.chunk.total_seconds():g} s", "--chunk", "Give at least 1m.")
    end = min(plan.end, now - SETTLED_AFTER)
    # The instant of the start itself belongs to the history.
    whole = Span(_ms(plan.start) - 1, _ms(end))
    if whole.length_ms <= 0:
        late = plan.end > end
        raise InputError(
            f"there is nothing between {plan.start.isoformat()} and {end.isoformat()}",
            "--start and --end",
            "Start earlier: the newest two minutes are left out." if late else "Let the end be after the start.",
        )
    return whole


@dataclass(slots=True)
class _Run:
    """One run of a backfill."""

    plan: BackfillPlan
    landing: Landing
    catalogue: SeriesCatalogue
    matchers: str
    whole: Span
    job: str
    state: Progress
    progress: Callable[[int, int], None] | None
    labels_seen: bool = False

    async def go(self, opening: PrometheusClient) -> BackfillResult:
        began = time.monotonic()
        cut = chunks(self.whole, self.plan.chunk // _MS)
        left = [rest for chunk in cut for rest in without(chunk, self.state.done)]
        fetched = len(cut) - sum(1 for chunk in cut if without(chunk, self.state.done))
        result = BackfillResult([], len(cut), fetched, _EPOCH + self.whole.until_ms * _MS)
        async with opening as client:
            result.metrics = await find_metrics(client, self.catalogue, self.matchers, self.whole)
            self._tell(cut)
            spans = deque(left)
            while spans:
                span = spans.popleft()
                try:
                    await self._fetch(client, span, spans, result)
                finally:
                    result.requests, result.retries = client.requests, client.retries
                self._tell(cut)
        result.seconds = time.monotonic() - began
        return result

    async def _fetch(self, client: PrometheusClient, span: Span, spans: deque[Span], result: BackfillResult) -> None:
        """Fetch and land a span, or put pieces of it in front of what is left."""
        if self.state.span_ms is not None and span.length_ms > max(self.state.span_ms, LEAST_WINDOW_MS):
            spans.extendleft(reversed(span.pieces(max(self.state.span_ms, LEAST_WINDOW_MS))))
            return
        bound = self.plan.max_samples if span.length_ms > LEAST_WINDOW_MS else None
        harvest = SpanSamples(self.catalogue, bound, result.unknown)
        pieces = [(name, self.state.pieces.setdefault(name, Pieces())) for name in result.metrics]
        try:
            await _together(
                [fetch_metric(client, name, self.matchers, span, held, take=harvest.take) for name, held in pieces]
            )
        except SpanTooLarge:
            # Saved before anything of the pieces lands: a run after a kill must cut the same pieces.
            self.state.span_ms = -(-span.length_ms // 2)
            self.state.save()
            spans.appendleft(span)
            return
        self._check_known(harvest)
        await asyncio.to_thread(self._land, harvest, span, result)

    def _check_known(self, harvest: SpanSamples) -> None:
        if harvest.has_series:
            self.labels_seen = True
        elif harvest.unknown and not self.labels_seen and not self.state.done:
            name, labels = sorted(harvest.unknown.items())[0]
            raise InputError(
                f"no series names a GPU and its node; the labels of {name} are {labels or 'none'}",
                "the labels of the server's series",
                "Say which label is which in a --mapping file, such as "
                "`labels: {gpu: [device_uuid], node: [kubernetes_node]}`.",
            )

    def _land(self, harvest: SpanSamples, span: Span, result: BackfillResult) -> None:
        name = f"{self.job}-{span.after_ms}-{span.until_ms}"
        follower = XidCounts(self.plan.delay, self.state.xid)
        samples = harvest.samples
        tables = harvest.tables(follower, result.problems)
        self.landing.stage("samples", tables.samples, name=name)
        self.landing.stage("events", tables.events, name=name)
        self.landing.stage("inventory", tables.inventory, name=name)
        self.state.xid = follower.as_state()
        self.state.finish(span)
        result.samples += samples
        result.rows += tables.samples.num_rows
        result.events += tables.events.num_rows

    def _tell(self, cut: Sequence[Span]) -> None:
        if self.progress is not None:
            whole = sum(1 for chunk in cut if not without(chunk, self.state.done))
            self.progress(whole, len(cut))


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all to the end; at the first failure cancel the others, wait for them, and raise it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _ms(instant: datetime) -> int:
    return (instant - _EPOCH) // _MS
