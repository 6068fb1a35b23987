"""The backfill: a server's history, span by span, into the landing folder.

The spans are fetched in the order of time. Within a span each metric is fetched by itself, several at once; when all
are there, the rows are staged under a name made of the job and the span, and only then is the span noted as done. A run
that is killed therefore repeats at most the span it was in, and what it had staged of that is not staged again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foundation.errors import InputError
from foundation.http import Connection
from telemetry.accounting import Accounting
from telemetry.collect.outbox import Outbox
from telemetry.collect.prometheus.client import Bounds, PrometheusClient, RawSamples, TooMuch, check_match, selector
from telemetry.collect.prometheus.progress import BackfillProgress, Span, chunks, merged, without
from telemetry.collect.series.batch import Tables, read_batch
from telemetry.collect.series.identity import NODE_LABEL_STATE, XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channels import Channel, is_unused
from telemetry.landing.folder import Landing

_log = logging.getLogger(__name__)

SETTLED_AFTER: Final = timedelta(minutes=2)
"""Newer samples may still be on their way: VictoriaMetrics shows none of its last 30 s, agents send in batches."""

MAX_SAMPLES: Final = 2_500_000
"""Samples held at once: 20 bytes each until they are rows, and 150 at the peak while they become rows (measured)."""

NAMELESS: Final = "labels that name no GPU or no node"
"""Reason of samples that are left out."""

MIN_SPAN_MS: Final = 60_000
"""A span of at most this length is not halved."""

PAST_END_MS: Final = 1
# VictoriaMetrics leaves out a block of samples that begins at the very instant a query ends, so the end is put past it.

_MS: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN: Final = 12
_IDENTITIES: Final = 100_000  # of some 2 kB


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """What to fetch.

    ``chunk``: time that is fetched at once; halved where the server or memory asks for it. ``match``: matchers in
    braces that every series must meet. ``delay``: from an XID to when it could first have been known.
    ``allow_partial``: whether answers count that the server reports as incomplete.
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
        """Return the time to fetch; raises ``InputError`` if there is none, or the chunk is too short."""
        if self.chunk < timedelta(minutes=1):
            raise InputError(f"a chunk of {self.chunk.total_seconds():g} s", "--chunk", "Give at least 1m.")
        end = min(self.end, now - SETTLED_AFTER)
        # The instant of the start itself belongs to the history.
        span = Span((self.start - _EPOCH) // _MS - 1, (end - _EPOCH) // _MS)
        if span.length_ms <= 0:
            late = self.end > end
            raise InputError(
                f"there is nothing between {self.start.isoformat()} and {end.isoformat()}",
                "--since and --until",
                "Start earlier: the newest two minutes are left out." if late else "Let the end be after the start.",
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
    """Fetch a server's history into a landing folder, and report; started again, it goes on where it stopped.

    ``root``: the landing folder, see :func:`telemetry.landing.folder.landing_of`. ``accounting`` counts the
    samples (``sample values``).
    Raises ``InputError`` if an argument is impossible, the server refuses, has nothing known, or does not answer for
    too long, or the disk is full. What had been staged stays.
    """
    matchers, span = check_match(plan.match), plan.span(clock())
    catalogue = SeriesCatalogue(channels, mapping)
    landing = Landing(root, writer="prometheus", channels=channels)
    catalogue.remember(landing.state(NODE_LABEL_STATE))
    # What decides which rows a span of time gives.
    job = hashlib.sha256(f"{connection.url} {matchers} ".encode() + catalogue.rules()).hexdigest()[:16]
    client = PrometheusClient(
        connection, bounds=bounds or Bounds(), concurrency=plan.concurrency, allow_partial=plan.allow_partial
    )
    with Outbox(landing, f"prometheus-{job}") as outbox:
        account = Accounting() if accounting is None else accounting
        run = _Run(
            plan, landing, catalogue, matchers, job, outbox, BackfillProgress(**outbox.position), client, account
        )
        return asyncio.run(run.fetch_all(span, progress))


@dataclass(slots=True)
class _Run:
    """One run of a backfill.

    ``unknown``: metrics with series that name no GPU or no node, and the label names of one.
    """

    plan: BackfillPlan
    landing: Landing
    catalogue: SeriesCatalogue
    matchers: str
    job: str
    outbox: Outbox
    state: BackfillProgress
    client: PrometheusClient
    accounting: Accounting
    labels_seen: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    unknown: dict[str, str] = field(default_factory=dict)
    identities: Identities = field(default_factory=dict)

    async def fetch_all(self, whole: Span, progress: Callable[[int, int], None]) -> dict[str, Any]:
        began_s = time.monotonic()
        cut = chunks(whole, self.plan.chunk // _MS)

        def count_done() -> int:
            return sum(not without(chunk, self.state.done) for chunk in cut)

        spans = deque(rest for chunk in cut for rest in without(chunk, self.state.done))
        done_before = count_done()
        async with self.client as client:
            metrics = await find_metrics(client, self.catalogue, self.matchers, whole)
            while spans:
                progress(count_done(), len(cut))
                span = spans.popleft()
                is_short = span.length_ms <= MIN_SPAN_MS
                if self.state.span_ms is not None and span.length_ms > self.state.span_ms and not is_short:
                    spans.extendleft(reversed(span.halves()))
                    continue
                max_samples = None if is_short else self.plan.max_samples
                samples = SpanSamples(self.catalogue, max_samples, self.unknown, self.identities)
                try:
                    await self._fetch(span, samples, metrics)
                except TooMuch as refusal:
                    _log.info("%s: refused, from now on %d s at once", refusal, span.length_ms // 2000)
                    # Saved before anything of the halves is staged: a run after a kill must cut the same.
                    self.state.span_ms = -(-span.length_ms // 2)
                    self._save()
                    spans.appendleft(span)
                    continue
                samples.identify()
                self._check_known(samples)
                await asyncio.to_thread(self._stage, samples, span)
        progress(len(cut), len(cut))
        seconds, until = time.monotonic() - began_s, _EPOCH + whole.until_ms * _MS
        newest = {"left out": "the newest two minutes, whose samples may still be on their way"}
        return {
            "until": until.isoformat(),
            "metrics": len(metrics),
            "chunks": len(cut),
            "chunks fetched before": done_before,
            "samples": self.counts["samples"],
            "rows": self.counts["rows"],
            "XID count rises": self.counts["events"],
            "samples a second": round(self.counts["samples"] / seconds) if seconds else 0,
            "requests": client.requests,
            "asked again": client.retries,
            "node": str(self.catalogue.report_nodes()),
            "GPUs by place": self.catalogue.placed(),
            **(newest if until < self.plan.end else {}),
        }

    async def _fetch(self, span: Span, samples: SpanSamples, metrics: Sequence[str]) -> None:
        """Fetch all metrics of a span; at the first failure cancel the others, and raise it."""

        async def fetch(metric: str) -> None:
            query = f"{selector(metric, [self.matchers])}[{span.length_ms + PAST_END_MS}ms]"
            try:
                samples.take(await self.client.samples(query, span.until_ms + PAST_END_MS), span)
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

    def _check_known(self, samples: SpanSamples) -> None:
        if any(isinstance(series, Series) for series in samples.numbers):
            self.labels_seen = True
        elif samples.unknown and not self.labels_seen and not self.state.done:
            name, labels = min(samples.unknown.items())
            rejected = "; ".join(f"`{label}`: {why}" for label, why in self.catalogue.nodes.decision().rejected.items())
            raise InputError(
                f"no series names a GPU and its node; the labels of {name} are {labels or 'none'}",
                f"the labels of the server's series{f' (rejected as node: {rejected})' if rejected else ''}",
                "Say which label is which in a --mapping file, such as "
                "`labels: {gpu: [device_uuid], node: [kubernetes_node]}`.",
            )

    def _stage(self, samples: SpanSamples, span: Span) -> None:
        name = f"{self.job}-{span.after_ms}-{span.until_ms}"
        xids = XidCounts(self.plan.delay, self.state.xid)
        left_out = Counter({NAMELESS: samples.nameless})
        name_of_one, labels = next(iter(self.unknown.items()), ("", ""))
        read = samples.count + samples.nameless
        tables = samples.tables(xids, left_out)
        self.landing.stage("samples", tables.samples, name=name)
        self.landing.stage("events", tables.events, name=name)
        self.landing.stage("inventory", tables.inventory, name=name)
        self.state.xid = xids.as_state()
        self.state.done = merged([*self.state.done, span])
        self._save()
        self.accounting.take("sample values", read, +left_out, {NAMELESS: f"{name_of_one} with the labels {labels}"})
        self.counts.update(samples=samples.count, rows=tables.samples.num_rows, events=tables.events.num_rows)

    def _save(self) -> None:
        self.outbox.commit(self.state.model_dump(mode="json"))


Identities = dict[tuple[tuple[str, str], ...], Series | XidCount | None]
"""What sets of labels are, in the order in which the server writes them."""


class SpanSamples:
    """Gathers what answers hold of a span, up to ``max_samples`` (None: without a bound).

    The series are identified when all are there: which label names the node is decided on the whole span.

    ``numbers``: the series that were identified, numbered. ``nameless``: samples of the others.
    ``identities``: what label sets were found to be, also before.
    ``unknown`` takes metrics of which a series names no GPU or no node, and the label names of one such series.
    """

    def __init__(
        self, catalogue: SeriesCatalogue, max_samples: int | None, unknown: dict[str, str], identities: Identities
    ) -> None:
        self._catalogue = catalogue
        self._identities, self._revision = identities, catalogue.nodes.revision
        self._max_samples = max_samples
        self.unknown = unknown
        self.count = self.nameless = 0
        self.numbers: dict[Series | XidCount, int] = {}
        self._raw: dict[tuple[tuple[str, str], ...], int] = {}
        self._parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64]]] = []

    def take(self, matrix: RawSamples, span: Span) -> None:
        """Take an answer's samples within the span: after its lower bound and up to its upper.

        Raises ``TooMuch`` where more than ``max_samples`` come together.
        """
        places = np.full(len(matrix.labels), -1, np.int32)
        for number, labels in enumerate(matrix.labels):
            key = tuple(labels.items())
            if key not in self._identities:
                self._catalogue.observe((labels,))
            places[number] = self._raw.setdefault(key, len(self._raw))
        # A stale marker is no sample; servers leave it out of range selectors, but not all exports do.
        chosen = (matrix.ms > span.after_ms) & (matrix.ms <= span.until_ms) & ~np.isnan(matrix.values)
        self._parts.append((places[matrix.index[chosen]], matrix.ms[chosen], matrix.values[chosen]))
        self.count += int(chosen.sum())
        if self._max_samples is not None and self.count > self._max_samples:
            raise TooMuch(f"more than {self._max_samples} samples")

    def identify(self) -> None:
        """Find out what the series are, once all are there; samples of others are left out."""
        places = np.full(len(self._raw), -1, np.int32)
        if len(self._identities) > _IDENTITIES or self._catalogue.nodes.revision != self._revision:
            self._identities.clear()
        for key, number in self._raw.items():
            labels = dict(key)
            name = labels.get("__name__", "")
            if key not in self._identities:
                self._identities[key] = self._catalogue.identify(name, labels)
            known = self._identities[key]
            if known is None:
                self.unknown.setdefault(name, ", ".join(sorted(set(labels) - {"__name__"})))
            else:
                places[number] = self.numbers.setdefault(known, len(self.numbers))
        parts = [(places[raw], ms, values) for raw, ms, values in self._parts]
        self._parts = [(index[index >= 0], ms[index >= 0], values[index >= 0]) for index, ms, values in parts]
        found = sum(len(index) for index, _, _ in self._parts)
        self.count, self.nameless = found, self.count - found
        self._raw = {}

    def tables(self, xids: XidCounts, problems: Counter[str]) -> Tables:
        """Return the tables of the span, whose samples are freed."""
        parts, self._parts = self._parts, []
        index, ms, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return read_batch(list(self.numbers), index, ms, values, xids=xids, problems=problems)


async def find_metrics(client: PrometheusClient, catalogue: SeriesCatalogue, matchers: str, whole: Span) -> list[str]:
    """Return the names of the server's metrics that hold channels; ``matchers``: the user's, without braces.

    Raises ``InputError`` if none is known: the message names some of those that are there.
    """
    try:
        names = await client.metric_names("{" + matchers + "}" if matchers else None, whole.after_ms, whole.until_ms)
    except TooMuch as error:
        raise InputError(
            f"the server does not list its metrics: {error}",
            "--match",
            "Narrow it down, such as --match '{job=\"dcgm\"}'.",
        ) from error
    known = sorted({*catalogue.metric_names(), XID_COUNT_METRIC} & set(names))
    if known and known != [XID_COUNT_METRIC]:
        return known
    where = f"--match {{{matchers}}}" if matchers else ""
    if not names:
        raise InputError(
            "the server has no metrics in this time",
            where or "--since and --until",
            "Check the time against the server's retention, and --match against its labels.",
        )
    candidates = [name for name in names if not is_unused(name)] or list(names)
    # What a GPU exporter or a recording rule over it is called, before the rest in alphabetical order.
    usual = ("gpu", "dcgm", "nvidia", "nvml", "amd", "xid")
    candidates.sort(key=lambda name: (not any(part in name.lower() for part in usual), name))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise InputError(
        f"none of the server's {len(names)} metrics is known; there are {', '.join(candidates[:_SHOWN])}{more}",
        where or "the server's metric names",
        "Say which metric is which channel in a --mapping file, such as `metrics: {my_gpu_temperature: gpu_temp_c}`.",
    )
