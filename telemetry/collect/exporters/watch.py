"""One target: its page fetched within bounds, what it holds, how often it failed, since when it has not changed."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.http import Answer, BodyTooLarge, Connection, HttpError, NoAnswerInTime, async_client, exchange
from foundation.instants import to_ms
from telemetry.collect.exporters.targets import PLACE_LABELS, Target
from telemetry.collect.series.batch import InventoryNews, read_batch
from telemetry.collect.series.exposition import LineReader, is_openmetrics, parse_line
from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.channels import Channel
from telemetry.landing.tables import Kind

_log = logging.getLogger(__name__)

FailureKind = Literal["unreachable", "timeout", "tls", "status", "truncated", "too_large", "protocol", "parse", "empty"]
"""Kinds of failed scrapes.

``unreachable``: no server, no such name, connection lost. ``status``: other than 200, redirects among them.
``truncated``: the page ends early. ``too_large``: over a bound of bytes or rows. ``protocol``: no plain or whole HTTP.
``parse``: no page of an exporter. ``empty``: no series of any device.
"""

PAGE_BYTES: Final = 8 << 20
"""Bytes of one page."""

PAGES_BYTES: Final = 256 << 20
"""Bytes of all pages under way, however many scrapes that are: the bound on memory."""

_ACCEPT: Final = "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"


class ScrapeError(Exception):
    """A scrape that gave no usable page; ``detail`` is one line that holds no secret and no part of the page."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Scraper:
    """Fetches pages; ``connection`` gives credentials and trust for every target.

    Each scrape has a connection of its own: one pool over a thousand targets is searched as a whole for each request.
    """

    def __init__(self, connection: Connection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._headers = connection.request_headers()
        self._tls = connection.tls()
        self._held = 0

    async def fetch(self, url: str) -> Answer:
        """Return the page at ``url``; raises ScrapeError."""
        with suppress(InputError):  # in the middle of a rotation: the credentials of before hold
            self._headers = self._connection.request_headers()
        timeout_s, held = self._timeout_s, 0

        def hold(size: int) -> None:
            nonlocal held
            held, self._held = held + size, self._held + size
            if self._held > PAGES_BYTES:
                raise ScrapeError("too_large", f"all pages under way have more than {PAGES_BYTES:,} bytes")

        try:
            async with async_client(self._connection, timeout_s=timeout_s, use_proxies=False, tls=self._tls) as client:
                headers = {"Accept": _ACCEPT, **self._headers}
                answer = await exchange(
                    client, "GET", url, timeout_s=timeout_s, max_bytes=PAGE_BYTES, hold=hold, headers=headers
                )
        except NoAnswerInTime:
            raise ScrapeError("timeout", f"no whole page within {timeout_s:g} s") from None
        except BodyTooLarge as error:
            raise ScrapeError("too_large", str(error)) from None
        except InputError as error:
            raise ScrapeError("tls", error.what) from None
        except HttpError as error:
            text = str(error).splitlines()[0][:160]
            raise ScrapeError("protocol" if text.startswith("RemoteProtocolError") else "unreachable", text) from error
        finally:
            self._held -= held
        if answer.status != 200:
            raise ScrapeError("status", f"HTTP status {answer.status}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise ScrapeError("protocol", "the page is compressed, which was not asked for")
        return answer


MAX_PAGE_ROWS: Final = 4096
"""GPUs and MIG instances (and their times, if lines have time stamps) of one page: more is no exporter of one node."""

MAX_LINES: Final = 50_000
_TARGET: Final = "predrain_target_"
_NODE_FIRST, _NODE_LAST = f"{_TARGET}node", f"{_TARGET}host"
_XIDS_KEPT: Final = 10_000
_HALF_SECOND: Final = 0.5
_KEYS: Final = ["timestamp", "node", "mig_instance"]

Reading = tuple[Series | XidCount, float, int | None]


def fleet_catalogue(channels: Mapping[str, Channel], mapping: SourceMapping) -> SeriesCatalogue:
    """Return the catalogue that all targets share: what a target's source names has label names of its own.

    The node that the source names goes before the page's labels, the host of the URL after them. Raises InputError for
    an unknown channel.
    """
    labels = {name: [*mapping.label_names(name), _TARGET + name] for name in PLACE_LABELS}
    mapping = mapping.model_copy(update={"labels": {**mapping.labels, **labels}})
    return SeriesCatalogue(channels, mapping, first_node=[_NODE_FIRST], last_node=[_NODE_LAST])


class TargetWatch:
    """The state of one target; ``catalogue`` is of :func:`fleet_catalogue`."""

    def __init__(self, target: Target, catalogue: SeriesCatalogue) -> None:
        self.target = target
        self._catalogue = catalogue
        node = {} if target.node is None else {_NODE_FIRST: target.node}
        self._labels = {_TARGET + name: value for name, value in target.labels} | {_NODE_LAST: target.host} | node
        self.lines: LineReader[Series | XidCount | None] = LineReader(self._identify)
        self._revision = catalogue.nodes.revision
        self._before: list[tuple[Series | XidCount, float | None, int | None]] = []
        self._news = InventoryNews()
        self._xids = XidCounts(timedelta(0))
        self._counted: dict[XidCount, float] = {}
        self.consecutive_failures = 0
        self.failures: Counter[FailureKind] = Counter()
        self.last_failure: ScrapeError | None = None
        self._changed_s: float | None = None

    def take(self, page: Answer, at: datetime, started_s: float) -> dict[Kind, pa.Table]:
        """Read a page scraped at ``at`` (monotonic ``started_s``); a repeated page has no samples.

        Raises ScrapeError if it cannot be used.
        """
        problems: Counter[str] = Counter()
        reading = self._read(page, problems)
        if self._catalogue.nodes.revision != self._revision:
            # The page, or one of another target, changed which label names the node.
            self._revision = self._catalogue.nodes.revision
            self.lines = LineReader(self._identify, self.lines.max_bytes)
            problems.clear()
            reading = self._read(page, problems)
            self._catalogue.report_nodes()
        # NaN equals nothing, itself included.
        comparable = [(series, None if math.isnan(value) else value, ms) for series, value, ms in reading]
        is_repeated, self._before = comparable == self._before, comparable
        at_ms = to_ms(at)
        entries = [series for series, _, _ in reading]
        tables = read_batch(
            entries,
            np.arange(len(entries), dtype=np.int32),
            np.array([at_ms if ms is None else ms for _, _, ms in reading], np.int64),
            np.array([value for _, value, _ in reading], np.float64),
            xids=self._xids,
            problems=problems,
        )
        count = tables.samples.num_rows
        if count == 0 and problems:
            raise ScrapeError("parse", "; ".join(f"{why}: {n}" for why, n in sorted(problems.items()))[:160])
        if count == 0:
            raise ScrapeError("empty", "the page has no series of a device")
        if count > MAX_PAGE_ROWS:
            raise ScrapeError("too_large", f"the page has {count} GPUs, over {MAX_PAGE_ROWS}")
        if self.consecutive_failures:
            _log.warning("%s is scraped again, after %d failures", self.target.address, self.consecutive_failures)
        self.consecutive_failures = 0
        inventory = self._news.select(tables.inventory)
        self._news.landed()
        rows: dict[Kind, pa.Table] = {"events": tables.events, "inventory": inventory}
        age_s = None if self._changed_s is None else started_s - self._changed_s
        if is_repeated and age_s is not None:
            return rows
        self._changed_s = started_s
        return rows | {"samples": self._with_scrape_channels(tables.samples, page, at, age_s)}

    def failed(self, error: ScrapeError) -> None:
        """Take a failed scrape; the first in a row, and one of another kind, are logged."""
        if self.consecutive_failures == 0 or self.last_failure is None or self.last_failure.kind != error.kind:
            _log.warning("%s cannot be scraped: %s", self.target.address, error)
        self.failures[error.kind] += 1
        self.consecutive_failures += 1
        self.last_failure = error

    def _read(self, page: Answer, problems: Counter[str]) -> list[Reading]:
        """Return the page's values; an XID that has left the exporter's window counts 0."""
        text = page.body.decode("utf-8", "replace").replace("\r\n", "\n")
        media = page.headers.get("content-type", "").partition(";")[0].strip().lower()
        has_end_mark = is_openmetrics(text)
        openmetrics = {"application/openmetrics-text": True, "text/plain": False}.get(media, has_end_mark)
        lines = text.split("\n")
        if len(lines) > MAX_LINES:
            raise ScrapeError("too_large", f"the page has more than {MAX_LINES} lines")
        # Where only the end of the connection ends a page, a page that ends with a line is taken for whole.
        is_framed = "content-length" in page.headers or "transfer-encoding" in page.headers
        is_whole = is_framed or page.body.endswith(b"\n")
        if not (is_whole and (has_end_mark if openmetrics else _is_line(lines[-1]))):
            raise ScrapeError("truncated", "the page ends within a line, or before its end mark")
        values = self.lines.read(lines, openmetrics=openmetrics, problems=problems)
        reading: list[Reading] = [(series, value, ms) for series, value, ms in values if series is not None]
        counted = {series: value for series, value, _ in reading if isinstance(series, XidCount)}
        reading += [(series, 0.0, None) for series in self._counted if series not in counted]
        self._counted |= dict.fromkeys(counted, 0.0)
        if len(self._counted) > _XIDS_KEPT:  # pages with ever new GPUs must not fill the memory
            self._xids, self._counted = XidCounts(timedelta(0)), {}
        return reading

    def _identify(self, name: str, labels: dict[str, str]) -> Series | XidCount | None:
        return self._catalogue.identify(name, {**labels, **self._labels})

    def _with_scrape_channels(self, samples: pa.Table, page: Answer, at: datetime, age_s: float | None) -> pa.Table:
        """Add the channels that measure the scraping itself."""
        skew_s = None
        with suppress(ValueError, OverflowError):
            date = parsedate_to_datetime(page.headers.get("date", ""))
            # The date is cut to whole seconds: half a second is its mean error. It was written between the request
            # and the answer's arrival, so the middle between them is compared.
            date = date.replace(tzinfo=date.tzinfo or UTC)
            skew_s = date.timestamp() + _HALF_SECOND - (at.timestamp() + page.duration_s / 2)
        values = samples.drop_columns(_KEYS).to_pandas().groupby("gpu")  # MIG instances count with their GPU
        reported = values.count().gt(0).sum(axis=1).loc[samples.column("gpu").to_pylist()]
        for name, value, kind in (
            ("scrape_duration_s", page.duration_s, pa.float32()),
            ("page_age_s", age_s, pa.float32()),
            ("clock_skew_s", skew_s, pa.float32()),
            ("scrape_failures_total", float(self.failures.total()), pa.float64()),
        ):
            samples = samples.append_column(name, pa.array([value] * samples.num_rows, kind))
        return samples.append_column("channels_reported", pa.array(reported, pa.float32()))


def _is_line(text: str) -> bool:
    """Whether a page may end so: the last line may lack its line end, but not a part of its number."""
    try:
        parse_line(text)
    except ValueError:
        return False
    return True
