"""Backfill of a server's history into the staging folder, span by span.

Spans are fetched in time order. Within a span, metrics are fetched by separate, concurrent requests; the rows of all of
them are then staged under a name made of job and span, and the span is recorded as done. A killed run therefore repeats
at most one span, and stages no row twice.
"""

import asyncio
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from foundation.errors import InputError
from foundation.http import Connection
from foundation.instants import from_ms
from telemetry.accounting import Accounting
from telemetry.collect.outbox import Outbox
from telemetry.collect.prometheus.client import Bounds, PrometheusClient, RawSamples, TooMuch, check_match, selector
from telemetry.collect.series.batch import SeriesBook, read_batch
from telemetry.collect.series.identity import NODE_LABEL_STATE, XID_COUNT_METRICS, Series, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channels import Channel, is_unused
from telemetry.staging.folder import StagingFolder
from telemetry.values.links import LinkTotals

_log = logging.getLogger(__name__)

SETTLED_AFTER: Final = timedelta(minutes=2)
"""Newer samples may still arrive: VictoriaMetrics hides the last 30 s by default, and agents send batches."""

MAX_SAMPLES: Final = 2_500_000
"""Maximum samples in memory: 20 bytes each as fetched, and 150 at the peak of conversion to rows (measured)."""

MIN_SPAN_MS: Final = 60_000
"""Spans up to this length are not split."""

PAST_END_MS: Final = 1
# VictoriaMetrics skips a block of samples that starts exactly at the end of a query, so queries end 1 ms later.

_MS: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_NAMED: Final = 12
_Samples = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64]]


class Span(NamedTuple):
    """The interval (``after_ms``, ``until_ms``], in Unix milliseconds."""

    after_ms: int
    until_ms: int

    @property
    def length_ms(self) -> int:
        """Length in milliseconds."""
        return self.until_ms - self.after_ms

    def halves(self) -> "tuple[Span, Span]":
        """Split the span in the middle."""
        middle = (self.after_ms + self.until_ms) // 2
        return Span(self.after_ms, middle), Span(middle, self.until_ms)


def chunks(period: Span, chunk_ms: int) -> list[Span]:
    """Split a span at multiples of ``chunk_ms`` since the epoch, so that later runs split at the same instants.

    If the first included millisecond (``after_ms`` + 1) is such a multiple, the first chunk has full length.

    >>> chunks(Span(5, 23), 10)
    [Span(after_ms=5, until_ms=10), Span(after_ms=10, until_ms=20), Span(after_ms=20, until_ms=23)]
    """
    parts = []
    after = period.after_ms
    while after < period.until_ms:
        until = min(period.until_ms, ((after + 1) // chunk_ms + 1) * chunk_ms)
        parts.append(Span(after, until))
        after = until
    return parts


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans as the fewest spans, sorted."""
    union: list[Span] = []
    for span in sorted(spans):
        if union and span.after_ms <= union[-1].until_ms:
            union[-1] = Span(union[-1].after_ms, max(union[-1].until_ms, span.until_ms))
        else:
            union.append(span)
    return union


def without(span: Span, covered: Iterable[Span]) -> list[Span]:
    """Return the parts of a span that no span in ``covered`` covers, sorted."""
    gaps = []
    after = span.after_ms
    for other in sorted(covered):
        gaps.append(Span(after, min(other.after_ms, span.until_ms)))
        after = max(after, other.until_ms)
    return [part for part in [*gaps, Span(after, span.until_ms)] if part.length_ms > 0]


class BackfillProgress(BaseModel):
    """Saved progress of a backfill.

    ``span_ms``: maximum span, halved after each TooMuch of the server or of memory; None before the first.
    """

    done: list[Span] = []
    span_ms: int | None = None
    xid: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """What to fetch, and how.

    ``chunk``: time span of one request; halved if the server or memory requires it. ``match``: series matchers in
    braces. ``delay``: between an XID and the time when it was known.
    ``allow_partial``: whether to accept responses that the server reports as incomplete.
    """

    start: datetime
    end: datetime
    chunk: timedelta = timedelta(hours=6)
    match: str | None = None
    delay: timedelta = timedelta(minutes=10)
    concurrency: int = 4
    allow_partial: bool = False
    max_samples: int = MAX_SAMPLES

    def span(self, now: datetime) -> Span:
        """Return the period to fetch; raises ``InputError`` if it is empty or the chunk is too short."""
        if self.chunk < timedelta(minutes=1):
            raise InputError(f"{self.chunk.total_seconds():g} s is too short", "--chunk", "Give at least 1m.")
        end = min(self.end, now - SETTLED_AFTER)
        # start is inclusive
        span = Span((self.start - _EPOCH) // _MS - 1, (end - _EPOCH) // _MS)
        if span.length_ms <= 0:
            is_capped = self.end > end
            raise InputError(
                f"the period from {self.start.isoformat()} to {end.isoformat()} is empty",
                "--since and --until",
                "Start earlier: the newest two minutes are left out." if is_capped else "Give an end after the start.",
            )
        return span


def backfill(
    connection: Connection,
    plan: BackfillPlan,
    root: Path,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    bounds: Bounds | None = None,
    accounting: Accounting | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Fetch a server's history into a staging folder and return a report; a restarted run resumes.

    ``root``: the staging folder, see :func:`telemetry.staging.folder.staging_of`. ``accounting`` counts samples
    (``sample values``).
    Raises ``InputError`` if an argument is invalid, the server rejects the query, has no known metric or stops
    responding, or the disk is full. Staged rows are kept.
    """
    matchers, span = check_match(plan.match), plan.span(clock())
    catalogue = SeriesCatalogue(channels, mapping)
    staging = StagingFolder(root, writer="prometheus", channels=channels)
    catalogue.remember(staging.state(NODE_LABEL_STATE))
    # Everything that determines the rows of a span.
    job = hashlib.sha256(f"{connection.url} {matchers} ".encode() + catalogue.rules()).hexdigest()[:16]
    client = PrometheusClient(
        connection, bounds=bounds or Bounds(), concurrency=plan.concurrency, allow_partial=plan.allow_partial
    )
    with Outbox(staging, f"prometheus-{job}") as outbox:
        account = Accounting() if accounting is None else accounting
        state, book = BackfillProgress(**outbox.position), SeriesBook(catalogue)
        run = _Run(plan, staging, catalogue, matchers, job, outbox, state, client, account, book)
        return asyncio.run(run.fetch_all(span, progress))


@dataclass(slots=True)
class _Run:
    """One run of a backfill; ``samples``: numbers in ``book``, times and values of the current span."""

    plan: BackfillPlan
    staging: StagingFolder
    catalogue: SeriesCatalogue
    matchers: str
    job: str
    outbox: Outbox
    state: BackfillProgress
    client: PrometheusClient
    accounting: Accounting
    book: SeriesBook
    links: LinkTotals = field(default_factory=LinkTotals)
    labels_seen: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[_Samples] = field(default_factory=list)

    async def fetch_all(self, period: Span, progress: Callable[[int, int], None]) -> dict[str, Any]:
        cut = chunks(period, self.plan.chunk // _MS)

        def count_done() -> int:
            return sum(not without(chunk, self.state.done) for chunk in cut)

        spans = deque(gap for chunk in cut for gap in without(chunk, self.state.done))
        done_before = count_done()
        async with self.client as client:
            metrics, _ = await find_metrics(client, self.catalogue, self.matchers, period)
            while spans:
                progress(count_done(), len(cut))
                span = spans.popleft()
                is_short = span.length_ms <= MIN_SPAN_MS
                if self.state.span_ms is not None and span.length_ms > self.state.span_ms and not is_short:
                    spans.extendleft(reversed(span.halves()))
                    continue
                self.book.clear()
                self.samples = []
                try:
                    await self._fetch(span, metrics, None if is_short else self.plan.max_samples)
                except TooMuch as refusal:
                    _log.info("%s: refused; continuing with %d s per request", refusal, span.length_ms // 2000)
                    # Saved before a half is staged: a run resumed after a kill must split identically.
                    self.state.span_ms = -(-span.length_ms // 2)
                    self._save()
                    spans.appendleft(span)
                    continue
                self.book.identify()
                await asyncio.to_thread(self._stage, span)
        progress(len(cut), len(cut))
        until = _EPOCH + period.until_ms * _MS
        newest = {"left out": "the newest two minutes, whose samples may still arrive"}
        return {
            "until": until.isoformat(),
            "metrics": len(metrics),
            "chunks": len(cut),
            "chunks fetched before": done_before,
            "samples": self.counts["samples"],
            "rows": self.counts["rows"],
            "XID count rises": self.counts["events"],
            "asked again": client.retries,
            "node": str(self.catalogue.report_nodes()),
            "GPUs by place": self.catalogue.placed(),
            **(newest if until < self.plan.end else {}),
        }

    async def _fetch(self, span: Span, metrics: Sequence[str], max_samples: int | None) -> None:
        """Fetch all metrics of a span; the first error cancels the others and is raised."""

        async def fetch(metric: str) -> None:
            query = f"{selector(metric, [self.matchers])}[{span.length_ms + PAST_END_MS}ms]"
            try:
                self._take(await self.client.samples(query, span.until_ms + PAST_END_MS), span, max_samples)
            except TooMuch as refusal:
                if span.length_ms > MIN_SPAN_MS:
                    raise TooMuch(f"{metric}: {refusal}") from refusal
                raise InputError(
                    f"the server refuses even one minute of a metric: {refusal}",
                    f"metric {metric}",
                    "Raise its limits (Prometheus: --query.max-samples, --query.timeout), or fetch parts by --match.",
                ) from refusal

        try:
            async with asyncio.TaskGroup() as tasks:
                for metric in metrics:
                    tasks.create_task(fetch(metric))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def _take(self, answer: RawSamples, span: Span, max_samples: int | None) -> None:
        """Add a response's samples within the span; raises ``TooMuch`` above ``max_samples``."""
        numbers = np.array([self.book.number(tuple(labels.items())) for labels in answer.labels], np.int32)
        # Drop stale markers: servers omit them from range selectors, but not all exports do.
        chosen = (answer.ms > span.after_ms) & (answer.ms <= span.until_ms) & ~np.isnan(answer.values)
        self.samples.append((numbers[answer.index[chosen]], answer.ms[chosen], answer.values[chosen]))
        if max_samples is not None and sum(len(ms) for _, ms, _ in self.samples) > max_samples:
            raise TooMuch(f"more than {max_samples} samples")

    def _check_known(self) -> None:
        if any(isinstance(series, Series) for series in self.book.series):
            self.labels_seen = True
        elif self.book.nameless and not self.labels_seen and not self.state.done:
            name, named = min(self.book.nameless.items())
            labels = ", ".join(sorted(named))
            rejected = "; ".join(
                f"`{label}`: {reason}" for label, reason in self.catalogue.nodes.decision().rejected.items()
            )
            raise InputError(
                f"no series names a GPU and its node; the labels of {name} are {labels or 'none'}",
                f"the labels of the server's series{f' (rejected as node: {rejected})' if rejected else ''}",
                "Map labels in a --mapping file, such as `labels: {gpu: [device_uuid], node: [kubernetes_node]}`.",
            )

    def _stage(self, span: Span) -> None:
        left_out: Counter[str] = Counter()
        index, ms, values = (np.concatenate(column) for column in zip(*self.samples, strict=True))
        self.samples = []
        place = self.book.places(index, left_out)
        self._check_known()
        usable = place >= 0
        columns = place[usable], ms[usable], values[usable]
        xids = XidCounts(self.plan.delay, self.state.xid)
        tables = read_batch(self.book.series, *columns, xids=xids, problems=left_out, links=self.links)
        tables.stage(self.staging, f"{self.job}-{span.after_ms}-{span.until_ms}")
        self.state.xid = xids.as_state()
        self.state.done = merged([*self.state.done, span])
        self._save()
        examples = {self.catalogue.left_out_reason(name): labels for name, labels in self.book.nameless.items()}
        self.accounting.take("sample values", len(index), +left_out, examples)
        rows, events = tables.samples.num_rows, tables.events.num_rows
        self.counts.update(samples=int(usable.sum()), rows=rows, events=events)

    def _save(self) -> None:
        self.outbox.commit(self.state.model_dump(mode="json"))


async def find_metrics(
    client: PrometheusClient, catalogue: SeriesCatalogue, matchers: str, period: Span
) -> tuple[list[str], list[str]]:
    """Return the known metrics of the server, and all metrics; ``matchers``: without braces.

    Raises ``InputError`` if none is known; the message lists some of the server's metrics.
    """
    try:
        names = await client.metric_names("{" + matchers + "}" if matchers else None, period.after_ms, period.until_ms)
    except TooMuch as error:
        raise InputError(
            f"the server does not list its metrics: {error}",
            "--match",
            "Narrow it down, such as --match '{job=\"dcgm\"}'.",
        ) from error
    known = sorted({*catalogue.metric_names(), *XID_COUNT_METRICS} & set(names))
    if not XID_COUNT_METRICS.issuperset(known):
        return known, names
    location = f"--match {{{matchers}}}" if matchers else ""
    if not names:
        raise InputError(
            "the server has no metrics in this period",
            location or f"{from_ms(period.after_ms)} to {from_ms(period.until_ms)}",
            "Check the period against the retention of the server, and --match against its labels.",
        )
    candidates = [name for name in names if not is_unused(name)] or list(names)
    # Names that look like GPU metrics come first, then the others, each alphabetically.
    usual = ("gpu", "dcgm", "nvidia", "nvml", "amd", "xid")
    candidates.sort(key=lambda name: (not any(part in name.lower() for part in usual), name))
    further = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    raise InputError(
        f"none of the server's {len(names)} metrics is known; there are {', '.join(candidates[:_MAX_NAMED])}{further}",
        location or "the server's metric names",
        "Map metrics to channels in a --mapping file, such as `metrics: {my_gpu_temperature: gpu_temp_c}`.",
    )
