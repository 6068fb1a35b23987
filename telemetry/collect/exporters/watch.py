"""One target over time: what its pages hold, how often it failed, since when its page has not changed."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import numpy as np
import pyarrow as pa

from telemetry.collect.exporters.scraping import FailureKind, Page, ScrapeError
from telemetry.collect.exporters.targets import PLACE_LABELS, Target
from telemetry.collect.series.exposition import LineReader, is_openmetrics, parse_line
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.inventory import InventoryNews, observed_at
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.rows import assemble
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channel import Channel
from telemetry.milliseconds import to_ms

_log = logging.getLogger(__name__)

MAX_PAGE_ROWS: Final = 4096
"""GPUs and MIG instances (and their times, if lines have time stamps) of one page: more is no exporter of one node."""

MAX_LINES: Final = 50_000
NO_DEVICE: Final = "series of a channel without a GPU or a node in its labels"
TOO_MANY_LINES: Final = "line over the limit of lines"

_TARGET: Final = "predrain_target_"
_NODE_FIRST, _NODE_LAST = f"{_TARGET}node", f"{_TARGET}host"
_XIDS_KEPT: Final = 10_000
_HALF_SECOND: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Unused:
    """A series that is not read; ``nameless`` is of a channel, without a device."""

    nameless: bool = False


def fleet_catalogue(channels: Mapping[str, Channel], mapping: SourceMapping) -> SeriesCatalogue:
    """Return the catalogue that all targets share: what a target's list tells has label names of its own.

    The node that the list names goes before the page's labels, the host of the URL after them. Raises InputError for an
    unknown channel.
    """
    labels = {name: [*mapping.label_names(name), _TARGET + name] for name in PLACE_LABELS}
    labels["node"] = [_NODE_FIRST, *mapping.label_names("node"), _NODE_LAST]
    return SeriesCatalogue(channels, mapping.model_copy(update={"labels": {**mapping.labels, **labels}}))


@dataclass(frozen=True, slots=True)
class ScrapedRows:
    """What a good scrape gives; ``samples`` is None if the page is the one before again."""

    samples: pa.Table | None
    events: pa.Table
    inventory: pa.Table


class TargetWatch:
    """The state of one target; a page unchanged for longer than ``hung_s`` is called hung.

    ``catalogue`` is of :func:`fleet_catalogue`.
    """

    def __init__(self, target: Target, catalogue: SeriesCatalogue, hung_s: float) -> None:
        self.target = target
        self._hung_s = hung_s
        self._catalogue = catalogue
        self._metrics = {*catalogue.metric_names(), XID_COUNT_METRIC}
        node = {} if target.node is None else {_NODE_FIRST: target.node}
        self._labels = {_TARGET + name: value for name, value in target.labels} | {_NODE_LAST: target.host} | node
        self.lines: LineReader[Series | XidCount | _Unused] = LineReader(self._identify)
        self._before: list[tuple[Series | XidCount, float | None, int | None]] = []
        self._news = InventoryNews()
        self._xids = XidCounts(timedelta(0))
        self._xid_keys: set[tuple[str, str, int, str | None]] = set()
        self.consecutive_failures = 0
        self.failures: Counter[FailureKind] = Counter()
        self.last_failure: ScrapeError | None = None
        self._changed_s: float | None = None
        self.is_hung = False
        self.duration_s: float | None = None
        self.skew_s: float | None = None
        self.channels_per_gpu: dict[str, int] = {}
        self.problems: Counter[str] = Counter()

    def take(self, page: Page, at: datetime, started_s: float) -> ScrapedRows:
        """Read a page scraped at ``at`` (monotonic ``started_s``); raises ScrapeError if it cannot be used."""
        found, whole = self._read(page)
        series = [(identity, value, ms) for identity, value, ms in found if isinstance(identity, Series)]
        entries, at_ms = [identity for identity, _, _ in series], to_ms(at)
        samples = assemble(
            entries,
            np.arange(len(series), dtype=np.int32),
            np.array([at_ms if ms is None else ms for _, _, ms in series], np.int64),
            np.array([value for _, value, _ in series], np.float64),
            problems=self.problems,
        )
        # NaN equals nothing, itself included.
        reading = [(identity, None if math.isnan(value) else value, ms) for identity, value, ms in found]
        same = bool(reading) and reading == self._before
        self._before = reading
        if not whole:
            raise ScrapeError("truncated", "the page ends within a line, or before its end mark")
        if samples.num_rows == 0:
            if self.problems:
                raise ScrapeError("parse", "; ".join(f"{why}: {n}" for why, n in sorted(self.problems.items()))[:160])
            raise ScrapeError("empty", "the page has no series of a device")
        if samples.num_rows > MAX_PAGE_ROWS:
            raise ScrapeError("too_large", f"the page has {samples.num_rows} GPUs, over {MAX_PAGE_ROWS}")
        self.channels_per_gpu = _channels_per_gpu(samples)
        self._succeeded(page, at)
        inventory = self._news.select(observed_at(entries, at))
        self._news.landed()
        events = self._xid_events([(each, n) for each, n, _ in found if isinstance(each, XidCount)], at_ms)
        if same and self._changed_s is not None:
            self._note_hung(started_s - self._changed_s)
            return ScrapedRows(None, events, inventory)
        age_s = self.page_age_s(started_s)
        if self.is_hung:
            self.is_hung = False
            _log.warning("%s moves again, after %.0f s", self.target.address, age_s or 0.0)
        self._changed_s = started_s
        return ScrapedRows(self._with_scrape_channels(samples, age_s), events, inventory)

    def failed(self, error: ScrapeError) -> None:
        """Take a failed scrape; the first in a row, and one of another kind, are logged."""
        if self.consecutive_failures == 0 or self.last_failure is None or self.last_failure.kind != error.kind:
            _log.warning("%s cannot be scraped: %s", self.target.address, error)
        self.failures[error.kind] += 1
        self.consecutive_failures += 1
        self.last_failure = error

    def page_age_s(self, now_s: float) -> float | None:
        """Return for how long the page has been the same; None before the first page."""
        return None if self._changed_s is None else now_s - self._changed_s

    def _read(self, page: Page) -> tuple[list[tuple[Series | XidCount, float, int | None]], bool]:
        """Return the page's values of ours, and whether it is whole."""
        text = page.body.decode("utf-8", "replace").replace("\r\n", "\n")
        ended = is_openmetrics(text)
        openmetrics = ended if page.openmetrics is None else page.openmetrics
        self.problems = Counter()
        lines = text.split("\n")
        if len(lines) > MAX_LINES + 1:
            self.problems[TOO_MANY_LINES] += len(lines) - MAX_LINES
        found: list[tuple[Series | XidCount, float, int | None]] = []
        for identity, value, ms in self.lines.read(lines[:MAX_LINES], openmetrics=openmetrics, problems=self.problems):
            if not isinstance(identity, _Unused):
                found.append((identity, value, ms))
            elif identity.nameless:
                self.problems[NO_DEVICE] += 1
        # Where only the end of the connection ends a page, a page that ends with a line is taken for whole.
        whole = page.framed or page.body.endswith(b"\n")
        return found, whole and (ended if openmetrics else _is_line(lines[-1]))

    def _identify(self, name: str, labels: dict[str, str]) -> Series | XidCount | _Unused:
        identity = self._catalogue.identify(name, {**labels, **self._labels})
        if identity is not None:
            return identity
        # Of AMD's one metric for all clocks, some are no channel of ours.
        return _Unused(nameless=name in self._metrics and "clock_type" not in labels)

    def _xid_events(self, counts: list[tuple[XidCount, float]], at_ms: int) -> pa.Table:
        """Return the rises of a page; an XID that is no longer on it has left the exporter's window: its count is 0."""
        now = dict.fromkeys(self._xid_keys, 0.0)
        now |= {(each.gpu, each.node, each.xid, each.mig_instance): count for each, count in counts}
        if len(now) > _XIDS_KEPT:  # pages with ever new GPUs must not fill the memory
            self._xids, now = XidCounts(timedelta(0)), {}
        self._xid_keys = set(now)
        return self._xids.follow(
            [XidCount(*key) for key in now],
            np.arange(len(now), dtype=np.int32),
            np.full(len(now), at_ms),
            np.array(list(now.values()), np.float64),
            watched=dict.fromkeys(self.channels_per_gpu, (at_ms, at_ms)),
        )

    def _note_hung(self, age_s: float) -> None:
        if age_s > self._hung_s and not self.is_hung:
            self.is_hung = True
            _log.warning("%s hangs: its page has been the same for %.0f s", self.target.address, age_s)

    def _with_scrape_channels(self, samples: pa.Table, age_s: float | None) -> pa.Table:
        """Add the channels that measure the scraping itself."""
        count = samples.num_rows
        channels = [self.channels_per_gpu.get(gpu) for gpu in samples.column("gpu").to_pylist()]
        for name, values, kind in (
            ("scrape_duration_s", [self.duration_s] * count, pa.float32()),
            ("page_age_s", [age_s] * count, pa.float32()),
            ("clock_skew_s", [self.skew_s] * count, pa.float32()),
            ("scrape_failures_total", [float(self.failures.total())] * count, pa.float64()),
            ("channels_reported", channels, pa.float32()),
        ):
            samples = samples.append_column(name, pa.array(values, kind))
        return samples

    def _succeeded(self, page: Page, at: datetime) -> None:
        if self.consecutive_failures:
            _log.warning("%s is scraped again, after %d failures", self.target.address, self.consecutive_failures)
        self.consecutive_failures = 0
        self.duration_s = page.duration_s
        self.skew_s = None
        if page.date is not None:
            # The date is cut to whole seconds: half a second is its mean error. It was written between the request
            # and the head's arrival, so the middle between them is compared.
            self.skew_s = page.date.timestamp() + _HALF_SECOND - (at.timestamp() + page.date_after_s / 2)


def _is_line(text: str) -> bool:
    """Whether a page may end so: the last line may lack its line end, but not a part of its number."""
    try:
        parse_line(text)
    except ValueError:
        return False
    return True


def _channels_per_gpu(samples: pa.Table) -> dict[str, int]:
    """Count the channels that have a value; MIG instances count with their GPU."""
    gpus = samples.column("gpu").to_pylist()
    channels: dict[str, set[str]] = {}
    for name in set(samples.column_names) - {"timestamp", "node", "gpu", "mig_instance"}:
        for gpu, is_valid in zip(gpus, samples.column(name).is_valid().to_pylist(), strict=True):
            if is_valid:
                channels.setdefault(gpu, set()).add(name)
    return {gpu: len(names) for gpu, names in channels.items()}
