"""What was scraped and has not landed yet: bounded, landed in one file a kind, kept while nothing can be written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from telemetry.errors import InputError
from telemetry.landing.tables import Kind

_log = logging.getLogger(__name__)
_KINDS: Final[tuple[Kind, ...]] = ("events", "inventory", "samples")
_MAX_NEWS: Final = 200_000


@dataclass(frozen=True, slots=True)
class ScrapedRows:
    """The rows of one page with what is known of its scrape.

    ``page_age_s``: seconds that the values before these had stood; None for the first page.
    ``skew_s``: the target's clock minus ours; None if it did not tell.
    """

    samples: pa.Table
    duration_s: float
    failures: int
    page_age_s: float | None
    skew_s: float | None
    channels: Mapping[str, int]


class Lands(Protocol):
    """What takes the tables: :class:`telemetry.landing.folder.Landing`."""

    def land(self, kind: Kind, table: pa.Table) -> object:
        """Write a table; raise :class:`~telemetry.errors.InputError` if the disk is full."""
        ...


@dataclass(slots=True)
class Batch:
    """What is landed together."""

    pages: list[ScrapedRows] = field(default_factory=list)
    tables: dict[Kind, list[pa.Table]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})

    @property
    def rows(self) -> int:
        """Rows of samples."""
        return sum(page.samples.num_rows for page in self.pages) + sum(t.num_rows for t in self.tables["samples"])


class Holding:
    """The rows that wait to be landed.

    ``max_rows``: rows of samples held at most while nothing can be landed; past it the oldest landings-to-be are
    dropped.
    ``landed_rows``, ``dropped_rows``: rows of samples landed, and dropped for want of room, so far.
    ``problem``: why the last landing failed; None if it did not.
    """

    def __init__(self, landing: Lands, *, max_rows: int) -> None:
        self._landing = landing
        self._max_rows = max_rows
        self._batch = Batch()
        self._rows = 0
        self.landed_rows = 0
        self.landed_events = 0
        self.dropped_rows = 0
        self.problem: str | None = None
        self._is_dropping = False

    @property
    def rows(self) -> int:
        """Rows of samples held."""
        return self._rows

    def add(self, page: ScrapedRows) -> None:
        """Hold the rows of a page."""
        if page.samples.num_rows:
            self._batch.pages.append(page)
            self._rows += page.samples.num_rows

    def add_table(self, kind: Kind, table: pa.Table) -> None:
        """Hold events or inventory."""
        if table.num_rows:
            self._batch.tables[kind].append(table)

    def take(self) -> Batch:
        """Return what is held, and hold nothing any more."""
        batch, self._batch, self._rows = self._batch, Batch(), 0
        return batch

    def land(self, batch: Batch) -> bool:
        """Write a batch; safe in another thread than the holder's, one at a time.

        Returns: whether all is on the disk. What is not stays in the batch: :meth:`give_back` holds it again.
        """
        if batch.pages:
            batch.tables["samples"].append(combined(batch.pages))
            batch.pages = []
        for kind in _KINDS:
            tables = batch.tables[kind]
            if kind != "samples" and tables:
                tables[:] = [_one(tables)]
            # Samples that waited while the disk was full land table by table: no file then holds an hour.
            while tables:
                if not self._written(kind, tables[0]):
                    return False
                tables.pop(0)
        if self.problem is not None:
            _log.warning("landing works again")
            self.problem = None
            self._is_dropping = False
        return True

    def give_back(self, batch: Batch) -> None:
        """Hold again what could not be landed, before what was scraped since."""
        for kind in _KINDS:
            self._batch.tables[kind] = batch.tables[kind] + self._batch.tables[kind]
            if kind != "samples":
                kept = self._batch.tables[kind]
                while sum(table.num_rows for table in kept) > _MAX_NEWS:
                    kept.pop(0)
        waiting = self._batch.tables["samples"]
        while waiting and self._batch.rows > self._max_rows:
            oldest = waiting.pop(0)
            if not self._is_dropping:
                _log.error("rows are dropped: %d are held and nothing can be landed", self._max_rows)
                self._is_dropping = True
            self.dropped_rows += oldest.num_rows
        self._rows = self._batch.rows

    def _written(self, kind: Kind, table: pa.Table) -> bool:
        try:
            self._landing.land(kind, table)
        except InputError as error:
            self._failed(str(error))
            return False
        except OSError as error:
            self._failed(f"{error.strerror or error}")
            return False
        except ValueError:
            # A table that can never land must not keep all others from landing.
            _log.exception("%d rows of %s cannot land and are dropped", table.num_rows, kind)
            self.dropped_rows += table.num_rows
            return True
        if kind == "samples":
            self.landed_rows += table.num_rows
        elif kind == "events":
            self.landed_events += table.num_rows
        return True

    def _failed(self, problem: str) -> None:
        if self.problem is None:
            _log.error("nothing can be landed, it is tried again: %s", problem)
        self.problem = problem


def combined(pages: list[ScrapedRows]) -> pa.Table:
    """Return the rows of all pages as one table, with the channels that tell of the scrapes."""
    samples = _one([page.samples for page in pages])
    counts = np.array([page.samples.num_rows for page in pages])
    skew = np.array([np.nan if page.skew_s is None else page.skew_s for page in pages])
    age = np.array([np.nan if page.page_age_s is None else page.page_age_s for page in pages])
    channels: list[int | None] = []
    for page in pages:
        channels += [page.channels.get(gpu) for gpu in page.samples.column("gpu").to_pylist()]
    gauges = {
        "scrape_duration_s": np.array([page.duration_s for page in pages]),
        "page_age_s": age,
        "clock_skew_s": skew,
    }
    for name, values in gauges.items():
        samples = samples.append_column(name, pa.array(np.repeat(values, counts), pa.float32(), from_pandas=True))
    failures = np.repeat(np.array([float(page.failures) for page in pages]), counts)
    samples = samples.append_column("scrape_failures_total", pa.array(failures, pa.float64()))
    return samples.append_column("channels_reported", pa.array(channels, pa.float32()))


def _one(tables: list[pa.Table]) -> pa.Table:
    """Concatenate tables whose columns may differ; most are of few layouts, and those are joined cheaply first."""
    layouts: dict[tuple[str, ...], list[pa.Table]] = {}
    for table in tables:
        layouts.setdefault(tuple(table.column_names), []).append(table)
    joined = [pa.concat_tables(group).combine_chunks() for group in layouts.values()]
    if len(joined) == 1:
        return joined[0]
    return pa.concat_tables(joined, promote_options="default").combine_chunks()
