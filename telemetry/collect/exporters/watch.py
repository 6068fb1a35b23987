"""One target over time: what its last scrapes gave, how often it failed, since when its page has not changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from telemetry.collect.exporters.page import PageReader, PageRows
from telemetry.collect.exporters.scraping import FailureKind, Page, ScrapeError
from telemetry.collect.exporters.targets import Target
from telemetry.collect.series.xid_counts import SOURCE
from telemetry.landing.tables import LANDED_EVENTS, LANDED_INVENTORY

_log = logging.getLogger(__name__)

MAX_PAGE_ROWS: Final = 4096
"""GPUs and MIG instances (and their times, if lines have time stamps) of one page: more is no exporter of one node."""

REPEAT_S: Final = 3600.0
"""An observation of a GPU that did not change lands again after so many seconds."""

_MAX_KNOWN: Final = 10_000
_HALF_SECOND: Final = 0.5


class XidCountRises:
    """Events from ``DCGM_EXP_XID_ERRORS_COUNT`` of one target's GPUs, from page to page.

    A count rises with an XID and falls when one has left the exporter's window (5 minutes by default); a series is
    there only while its count is not zero. So a rise is an event, a fall is none, and a new series is a rise from 0.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], float] = {}
        self._gpus: set[str] = set()

    def events(self, counts: Iterable[tuple[str, str, int, float]], gpus: Iterable[str], at: datetime) -> pa.Table:
        """Return the events of a page that was fetched at ``at``.

        A GPU's first page gives none: its XIDs may be older than this process.
        """
        now: dict[tuple[str, int], float] = {}
        nodes: dict[str, str] = {}
        for gpu, node, xid, count in counts:  # a GPU's MIG instances have counts of their own
            now[gpu, xid] = now.get((gpu, xid), 0.0) + count
            nodes[gpu] = node
        rows = []
        for (gpu, xid), count in now.items():
            before = self._counts.get((gpu, xid), 0.0)
            if gpu in self._gpus and count > before and xid > 0:
                detail = f"the exporter's count of XID {xid} rose by {count - before:g} to {count:g}"
                rows.append(
                    {"timestamp": at, "node": nodes[gpu], "gpu": gpu, "type": "xid", "code": str(xid)}
                    | {"detail": detail, "source": SOURCE, "known_at": at}
                )
        self._counts = now
        here = {*gpus, *nodes}
        # A GPU that comes back is known; pages with ever new GPUs must not fill the memory.
        self._gpus = here if len(self._gpus) > _MAX_KNOWN else self._gpus | here
        return pa.Table.from_pylist(rows, schema=LANDED_EVENTS) if rows else LANDED_EVENTS.empty_table()


class InventoryDelta:
    """Which of a page's observations of GPUs land: what changed, and once an hour all.

    ``labels``: fields of ``LANDED_INVENTORY`` known of the target itself; they fill what the page leaves open.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._rows: dict[tuple[str | None, str], dict[str, Any]] = {}
        self._landed_s: float | None = None

    def changes(self, inventory: pa.Table, now_s: float) -> pa.Table:
        """Return the rows to land; ``now_s`` is monotonic."""
        every = self._landed_s is None or now_s - self._landed_s >= REPEAT_S or len(self._rows) > _MAX_KNOWN
        if every:
            self._landed_s, self._rows = now_s, {}
        changed: list[dict[str, Any]] = []
        for row in inventory.to_pylist():
            for name, value in self._labels.items():
                if row[name] is None:
                    row[name] = value
            content = {name: value for name, value in row.items() if name != "seen_at"}
            if self._rows.get((row["gpu"], row["node"])) != content:
                changed.append(row)
                self._rows[row["gpu"], row["node"]] = content
        return pa.Table.from_pylist(changed, schema=LANDED_INVENTORY) if changed else LANDED_INVENTORY.empty_table()


@dataclass(frozen=True, slots=True)
class ScrapedRows:
    """What a good scrape gives; ``samples`` is None if the page is the one before again."""

    samples: pa.Table | None
    events: pa.Table
    inventory: pa.Table


@dataclass(slots=True)
class TargetWatch:
    """The state of one target; a page unchanged for longer than ``hung_s`` is called hung."""

    target: Target
    reader: PageReader
    hung_s: float
    scrapes: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    consecutive_failures: int = 0
    repeats: int = 0
    last_scrape_at: datetime | None = None
    last_success_at: datetime | None = None
    last_failure: ScrapeError | None = None
    last_failure_at: datetime | None = None
    changed_at: datetime | None = None
    is_hung: bool = False
    duration_s: float | None = None
    skew_s: float | None = None
    page: PageRows | None = None
    _changed_s: float | None = None
    _xids: XidCountRises = field(default_factory=XidCountRises)
    _inventory: InventoryDelta = field(init=False)

    def __post_init__(self) -> None:
        self._inventory = InventoryDelta(dict(self.target.labels))

    def page_age_s(self, now_s: float) -> float | None:
        """Return for how long the page has been the same; None before the first page."""
        return None if self._changed_s is None else now_s - self._changed_s

    def take(self, fetched: Page, at: datetime, started_s: float) -> ScrapedRows:
        """Read a page scraped at ``at`` (monotonic ``started_s``); raises ScrapeError if it cannot be used."""
        # Where only the end of the connection ends a page, a page that ends with a line is taken for whole.
        whole = fetched.framed or fetched.body.endswith(b"\n")
        at_ms = round(at.timestamp() * 1000)
        page = self.page = self.reader.read(fetched.body, at_ms, openmetrics=fetched.openmetrics, whole=whole)
        if not page.complete:
            raise ScrapeError("truncated", "the page ends within a line, or before its end mark")
        if page.samples.num_rows == 0:
            if page.problems:
                raise ScrapeError("parse", "; ".join(f"{why}: {n}" for why, n in sorted(page.problems.items()))[:160])
            raise ScrapeError("empty", "the page has no series of a device")
        if page.samples.num_rows > MAX_PAGE_ROWS:
            raise ScrapeError("too_large", f"the page has {page.samples.num_rows} GPUs, over {MAX_PAGE_ROWS}")
        self._succeeded(fetched, at)
        events = self._xids.events(page.xid_counts, page.channels_per_gpu, at)
        inventory = self._inventory.changes(page.inventory, started_s)
        age_s = self.page_age_s(started_s)
        if page.same_as_before and age_s is not None:
            self.repeats += 1
            if age_s > self.hung_s and not self.is_hung:
                self.is_hung = True
                _log.warning("%s hangs: its page has been the same for %.0f s", self.target.address, age_s)
            return ScrapedRows(None, events, inventory)
        if self.is_hung:
            self.is_hung = False
            _log.warning("%s moves again, after %.0f s", self.target.address, age_s or 0.0)
        self._changed_s, self.changed_at = started_s, at
        return ScrapedRows(self._with_scrape_channels(page, age_s), events, inventory)

    def _with_scrape_channels(self, page: PageRows, age_s: float | None) -> pa.Table:
        """Add the channels that measure the scraping itself."""
        samples, count = page.samples, page.samples.num_rows
        channels = [page.channels_per_gpu.get(gpu) for gpu in samples.column("gpu").to_pylist()]
        for name, values, kind in (
            ("scrape_duration_s", [self.duration_s] * count, pa.float32()),
            ("page_age_s", [age_s] * count, pa.float32()),
            ("clock_skew_s", [self.skew_s] * count, pa.float32()),
            ("scrape_failures_total", [float(self.failures.total())] * count, pa.float64()),
            ("channels_reported", channels, pa.float32()),
        ):
            samples = samples.append_column(name, pa.array(values, kind))
        return samples

    def failed(self, error: ScrapeError, at: datetime) -> None:
        """Take a failed scrape; the first in a row, and one of another kind, are logged."""
        self.scrapes += 1
        self.last_scrape_at = self.last_failure_at = at
        if self.consecutive_failures == 0 or self.last_failure is None or self.last_failure.kind != error.kind:
            _log.warning("%s cannot be scraped: %s", self.target.address, error)
        self.failures[error.kind] += 1
        self.consecutive_failures += 1
        self.last_failure = error

    def _succeeded(self, fetched: Page, at: datetime) -> None:
        self.scrapes += 1
        if self.consecutive_failures:
            _log.warning("%s is scraped again, after %d failures", self.target.address, self.consecutive_failures)
        self.consecutive_failures = 0
        self.last_scrape_at = self.last_success_at = at
        self.duration_s = fetched.duration_s
        self.skew_s = None
        if fetched.date is not None:
            # The date is cut to whole seconds: half a second is its mean error. It was written between the request
            # and the head's arrival, so the middle between them is compared.
            self.skew_s = fetched.date.timestamp() + _HALF_SECOND - (at.timestamp() + fetched.date_after_s / 2)

    def as_state(self, now_s: float) -> dict[str, Any]:
        """Return the target's entry of ``state/exporters.json``; ``now_s`` is monotonic."""
        age_s, page = self.page_age_s(now_s), self.page
        return {
            "url": self.target.url.partition("?")[0],
            "node": self.target.node,
            "scrapes": self.scrapes,
            "last_scrape_at": _iso(self.last_scrape_at),
            "last_success_at": _iso(self.last_success_at),
            "page_changed_at": _iso(self.changed_at),
            "failures_total": self.failures.total(),
            "failures_in_row": self.consecutive_failures,
            "failures": dict(self.failures),
            "last_failure_kind": None if self.last_failure is None else self.last_failure.kind,
            "last_failure": None if self.last_failure is None else self.last_failure.detail,
            "last_failure_at": _iso(self.last_failure_at),
            "page_age_s": None if age_s is None else round(age_s, 3),
            "hung": self.is_hung,
            "repeats": self.repeats,
            "scrape_duration_s": self.duration_s,
            "clock_skew_s": self.skew_s,
            "gpus": {} if page is None else page.channels_per_gpu,
            "problems": {} if page is None else page.problems,
            "unexplained": [] if page is None else list(page.unexplained),
        }


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.astimezone(UTC).isoformat()
