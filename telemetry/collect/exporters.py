"""Parser of dcgm-exporter and AMD device-metrics-exporter pages: samples, XID events and scrape metadata."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

import numpy as np
import pyarrow as pa

from foundation.http import HttpResponse
from foundation.instants import to_ms
from telemetry.accounting import Accounting
from telemetry.collect.scraping.collector import Fetch, ScrapeError, Watch
from telemetry.collect.scraping.targets import PLACE_LABELS, Target
from telemetry.collect.series.batch import InventoryNews, read_batch
from telemetry.collect.series.exposition import LineReader, is_openmetrics, parse_line
from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channels import Channel
from telemetry.staging.folder import Kind
from telemetry.values.links import LinkTotals

MAX_PAGE_ROWS: Final = 4096
"""Maximum rows of a page (GPU, MIG instance, timestamp); more cannot come from the exporter of one node."""

MAX_LINES: Final = 50_000
REMEMBERED_BYTES: Final = 512 << 20
"""Total size of the line caches of all targets."""

_TARGET: Final = "predrain_target_"
_NODE_FIRST, _NODE_LAST = f"{_TARGET}node", f"{_TARGET}host"
_XIDS_KEPT: Final = 10_000
_HALF_SECOND: Final = 0.5
_KEYS: Final = ["timestamp", "node", "mig_instance"]

Rows = Mapping[Kind, pa.Table]
Reading = tuple[Series | XidCount, float, int | None]


def fleet_catalogue(channels: Mapping[str, Channel], mapping: SourceMapping) -> SeriesCatalogue:
    """Return the catalogue shared by all targets, in which target labels have a prefix of their own.

    A node named by the target list takes precedence over the page's labels, and the URL's host is the fallback. Raises
    InputError for an unknown channel.
    """
    labels = {name: [*mapping.label_names(name), _TARGET + name] for name in PLACE_LABELS}
    mapping = mapping.model_copy(update={"labels": {**mapping.labels, **labels}})
    return SeriesCatalogue(channels, mapping, first_node=[_NODE_FIRST], last_node=[_NODE_LAST])


class PageWatch(Watch[Rows]):
    """Reads one target's page; ``catalogue`` is from :func:`fleet_catalogue`."""

    def __init__(self, target: Target, catalogue: SeriesCatalogue, accounting: Accounting) -> None:
        super().__init__(target)
        self._catalogue = catalogue
        self._accounting = accounting
        node = {} if target.node is None else {_NODE_FIRST: target.node}
        self._labels = {_TARGET + name: value for name, value in target.labels} | {_NODE_LAST: target.host} | node
        self.lines: LineReader[Series | XidCount | str] = LineReader(self._identify)
        self._revision = catalogue.nodes.revision
        self._last_page: list[tuple[Series | XidCount, float | None, int | None]] = []
        self._news = InventoryNews()
        self._xids = XidCounts(timedelta(0))
        self._links = LinkTotals()
        self._counted: dict[XidCount, float] = {}
        self._changed_s: float | None = None

    def share_memory(self, targets: int) -> None:
        """Limit the size of the line cache."""
        self.lines.max_bytes = REMEMBERED_BYTES // targets

    async def scrape(self, fetch: Fetch, now: datetime, started_s: float) -> Rows:
        """Scrape the page and return its rows."""
        return self.read(await fetch(self.target.url), now, started_s)

    def read(self, page: HttpResponse, requested_at: datetime, started_s: float) -> Rows:
        """Convert a page requested at ``requested_at`` (monotonic ``started_s``) to rows; raises ScrapeError."""
        faults: Counter[str] = Counter()
        unused: Counter[str] = Counter()
        reading = self._read(page, faults, unused)
        if self._catalogue.nodes.revision != self._revision:
            # This page, or another target's, changed the choice of node label.
            self._revision = self._catalogue.nodes.revision
            self.lines = LineReader(self._identify, self.lines.max_bytes)
            faults.clear()
            unused.clear()
            reading = self._read(page, faults, unused)
            self._catalogue.report_nodes()
        # NaN does not equal itself.
        comparable = [(series, None if math.isnan(value) else value, ms) for series, value, ms in reading]
        is_repeated, self._last_page = comparable == self._last_page, comparable
        lines = len(reading) + faults.total() + unused.total()
        # The count of an XID that has left the exporter's window is 0.
        reading += [(series, 0.0, None) for series in self._unlisted(reading)]
        at_ms = to_ms(requested_at)
        entries = [series for series, _, _ in reading]
        tables = read_batch(
            entries,
            np.arange(len(entries), dtype=np.int32),
            np.array([at_ms if ms is None else ms for _, _, ms in reading], np.int64),
            np.array([value for _, value, _ in reading], np.float64),
            xids=self._xids,
            problems=faults,
            links=self._links,
        )
        self._accounting.take("sample values", lines, faults + unused, self.target.address)
        count = tables.samples.num_rows
        if count == 0 and faults:
            raise ScrapeError("parse", "; ".join(f"{reason}: {n}" for reason, n in sorted(faults.items()))[:160])
        if count == 0:
            raise ScrapeError("empty", "the page has no series of a GPU")
        if count > MAX_PAGE_ROWS:
            raise ScrapeError("too_large", f"the page has {count} GPUs, over {MAX_PAGE_ROWS}")
        inventory = self._news.select(tables.inventory)
        self._news.staged()
        # Whether an unchanged page is stale is decided for all sources by `instruments.yaml`.
        age_s = None if self._changed_s is None else started_s - self._changed_s
        if not is_repeated or age_s is None:
            self._changed_s = started_s
        samples = self._with_scrape_channels(tables.samples, page, requested_at, age_s)
        return {"events": tables.events, "inventory": inventory, "samples": samples}

    def _read(self, page: HttpResponse, faults: Counter[str], unused: Counter[str]) -> list[Reading]:
        """Return the values of known series; other lines and series are counted by reason."""
        text = page.body.decode("utf-8", "replace").replace("\r\n", "\n")
        media = page.headers.get("content-type", "").partition(";")[0].strip().lower()
        has_end_mark = is_openmetrics(text)
        openmetrics = {"application/openmetrics-text": True, "text/plain": False}.get(media, has_end_mark)
        lines = text.split("\n")
        if len(lines) > MAX_LINES:
            raise ScrapeError("too_large", f"the page has more than {MAX_LINES} lines")
        # Without HTTP framing, a page that ends with a newline is considered complete.
        is_framed = "content-length" in page.headers or "transfer-encoding" in page.headers
        is_whole = is_framed or page.body.endswith(b"\n")
        if not (is_whole and (has_end_mark if openmetrics else _is_line(lines[-1]))):
            raise ScrapeError("truncated", "the page ends within a line, or before its end mark")
        reading: list[Reading] = []
        for series, value, ms in self.lines.read(lines, openmetrics=openmetrics, problems=faults):
            if isinstance(series, str):
                unused[series] += 1
            else:
                reading.append((series, value, ms))
        return reading

    def _unlisted(self, reading: list[Reading]) -> list[XidCount]:
        """Return the XID counts that earlier pages had and this one lacks; remember this page's."""
        listed = {series: 0.0 for series, _, _ in reading if isinstance(series, XidCount)}
        unlisted = [series for series in self._counted if series not in listed]
        self._counted |= listed
        if len(self._counted) > _XIDS_KEPT:  # bounds memory if pages keep naming new GPUs
            self._xids, self._counted = XidCounts(timedelta(0)), {}
        return unlisted

    def _identify(self, name: str, labels: dict[str, str]) -> Series | XidCount | str:
        labels = {**labels, **self._labels}
        self._catalogue.observe((labels,))
        series = self._catalogue.identify(name, labels)
        return self._catalogue.left_out_reason(name) if series is None else series

    def _with_scrape_channels(
        self, samples: pa.Table, page: HttpResponse, requested_at: datetime, age_s: float | None
    ) -> pa.Table:
        values = samples.drop_columns(_KEYS).to_pandas().groupby("gpu")  # per GPU, MIG instances included
        reported = values.count().gt(0).sum(axis=1).loc[samples.column("gpu").to_pylist()]
        for name, value, kind in (
            ("scrape_duration_s", page.duration_s, pa.float32()),
            ("page_age_s", age_s, pa.float32()),
            ("clock_skew_s", clock_skew_s(page, requested_at), pa.float32()),
            ("scrape_failures_total", float(self.failures.total()), pa.float64()),
        ):
            samples = samples.append_column(name, pa.array([value] * samples.num_rows, kind))
        return samples.append_column("channels_reported", pa.array(reported, pa.float32()))


def clock_skew_s(page: HttpResponse, requested_at: datetime) -> float | None:
    """Return the exporter's clock minus this host's, from the Date header; None without one."""
    with suppress(ValueError, OverflowError):
        date = parsedate_to_datetime(page.headers.get("date", ""))
        # Date is truncated to seconds, which is half a second too early on average. It was set between request and
        # response, so compare with their midpoint.
        date = date.replace(tzinfo=date.tzinfo or UTC)
        return date.timestamp() + _HALF_SECOND - (requested_at.timestamp() + page.duration_s / 2)
    return None


def _is_line(text: str) -> bool:
    """Return whether the last line is complete; it may lack a newline, but must parse."""
    try:
        parse_line(text)
    except ValueError:
        return False
    return True
