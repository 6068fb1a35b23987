"""One target over time: what its last scrapes gave, how often it failed, since when its page has not changed."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol

import pyarrow as pa

from telemetry.exporters.failures import FailureKind, ScrapeError
from telemetry.exporters.fetching import Fetched
from telemetry.exporters.holding import ScrapedRows
from telemetry.exporters.sighting_news import SightingNews
from telemetry.exporters.targets import Target
from telemetry.exporters.xid_rises import XidRises
from telemetry.exposition.page import PageRows

_log = logging.getLogger(__name__)
_HALF_SECOND = 0.5

MAX_PAGE_ROWS: Final = 4096
"""GPUs and MIG instances (and their times, if lines have time stamps) of one page: more is no exporter of one node."""


class Reads(Protocol):
    """What turns pages into rows: :class:`telemetry.exposition.page.PageReader`."""

    def read(self, body: bytes, at_ms: int, *, openmetrics: bool | None = None, whole: bool = True) -> PageRows:
        """Return what a page tells."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a good scrape gives.

    ``rows``: none if the page is the one before again.
    ``events``, ``inventory``: landed tables, often empty.
    """

    rows: ScrapedRows | None
    events: pa.Table
    inventory: pa.Table


@dataclass(slots=True)
class TargetWatch:
    """The state of one target. Instants are aware; ``_s`` are monotonic seconds unless said otherwise."""

    target: Target
    reader: Reads
    hung_s: float
    owned: bool = False
    is_scraping: bool = False
    due_s: float = 0.0
    scrapes: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    failures_in_row: int = 0
    repeats: int = 0
    last_scrape_at: datetime | None = None
    last_success_at: datetime | None = None
    last_failure: ScrapeError | None = None
    last_failure_at: datetime | None = None
    changed_at: datetime | None = None
    is_hung: bool = False
    duration_s: float | None = None
    skew_s: float | None = None
    channels: dict[str, int] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)
    unexplained: tuple[str, ...] = ()
    _changed_s: float | None = None
    _xids: XidRises = field(default_factory=XidRises)
    _news: SightingNews = field(init=False)

    def __post_init__(self) -> None:
        self._news = SightingNews(dict(self.target.labels))

    def page_age_s(self, now_s: float) -> float | None:
        """Return for how long the page has been the same; None before the first page."""
        return None if self._changed_s is None else now_s - self._changed_s

    def take(self, fetched: Fetched, at: datetime, started_s: float) -> Outcome:
        """Read a page.

        ``at``: the wall clock when the scrape started: the time of the rows.
        Raises ``ScrapeError`` if the page cannot be used.
        """
        # Where only the end of the connection ends a page, a page that ends with a line is taken for whole.
        whole = fetched.framed or fetched.body.endswith(b"\n")
        page = self.reader.read(
            fetched.body, round(at.timestamp() * 1000), openmetrics=fetched.openmetrics, whole=whole
        )
        self.problems = page.problems
        self.unexplained = page.unexplained
        if not page.complete:
            raise ScrapeError("truncated", "the page ends within a line, or before its end mark")
        if page.samples.num_rows == 0:
            if page.problems:
                raise ScrapeError("parse", "; ".join(f"{why}: {n}" for why, n in sorted(page.problems.items()))[:160])
            raise ScrapeError("empty", "the page has no series of a device")
        if page.samples.num_rows > MAX_PAGE_ROWS:
            raise ScrapeError("too_large", f"the page tells of {page.samples.num_rows} GPUs, over {MAX_PAGE_ROWS}")
        self._succeeded(fetched, at)
        self.channels = page.channels_per_gpu
        events = self._xids.events(page.xid_counts, page.channels_per_gpu, at)
        inventory = self._news.news(page.inventory, started_s)
        age_s = self.page_age_s(started_s)
        if page.same_as_before and age_s is not None:
            self.repeats += 1
            if age_s > self.hung_s and not self.is_hung:
                self.is_hung = True
                _log.warning("%s hangs: its page has been the same for %.0f s", self.target.address, age_s)
            return Outcome(None, events, inventory)
        if self.is_hung:
            self.is_hung = False
            _log.warning("%s moves again, after %.0f s", self.target.address, age_s or 0.0)
        self._changed_s, self.changed_at = started_s, at
        rows = ScrapedRows(
            page.samples, fetched.duration_s, self.failures.total(), age_s, self.skew_s, page.channels_per_gpu
        )
        return Outcome(rows, events, inventory)

    def failed(self, error: ScrapeError, at: datetime) -> None:
        """Take a failed scrape; the first in a row, and one of another kind, are logged."""
        self.scrapes += 1
        self.last_scrape_at = self.last_failure_at = at
        if self.failures_in_row == 0 or self.last_failure is None or self.last_failure.kind != error.kind:
            _log.warning("%s cannot be scraped: %s", self.target.address, error)
        self.failures[error.kind] += 1
        self.failures_in_row += 1
        self.last_failure = error

    def _succeeded(self, fetched: Fetched, at: datetime) -> None:
        self.scrapes += 1
        if self.failures_in_row:
            _log.warning("%s is scraped again, after %d failures", self.target.address, self.failures_in_row)
        self.failures_in_row = 0
        self.last_scrape_at = self.last_success_at = at
        self.duration_s = fetched.duration_s
        self.skew_s = None
        if fetched.date is not None:
            # The date is cut to whole seconds: half a second is its mean error. It was written between the request
            # and the head's arrival, so the middle between them is compared.
            ours_s = at.timestamp() + fetched.date_after_s / 2
            self.skew_s = fetched.date.timestamp() + _HALF_SECOND - ours_s
