"""The loop: every target is scraped once an interval, spread evenly, and the rows are written once an interval."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from foundation.errors import InputError
from telemetry.collect.exporters.targets import Target
from telemetry.collect.exporters.watch import ScrapeError, Scraper, TargetWatch
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind

_log = logging.getLogger(__name__)

LATE_S: Final = 1.0
"""A scrape that starts this long after it was due is late."""

REMEMBERED_BYTES: Final = 512 << 20
"""Text of lines that is remembered of all targets."""

_KINDS: Final[tuple[Kind, ...]] = ("events", "inventory", "samples")


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """Pace and bounds of a collector.

    ``timeout_s`` is for one scrape, from connecting to the last byte; ``concurrency`` bounds the scrapes under way, and
    a quarter of it those of targets that failed the last time, so that dead ones never delay the others. Rows are held
    up to ``max_buffered_rows`` while nothing can be written, then the oldest are dropped.
    """

    interval_s: float = 30.0
    timeout_s: float = 10.0
    concurrency: int = 512
    max_buffered_rows: int = 600_000

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise InputError(f"{value:g} s cannot be used", f"--{name[:-2]}", "Give a time between 1s and 1d.")
        if self.timeout_s > self.interval_s:
            raise InputError(
                f"a timeout of {self.timeout_s:g} s is longer than the interval of {self.interval_s:g} s",
                "--timeout",
                "Give a timeout of at most the interval: two scrapes of one target never overlap.",
            )


@dataclass(slots=True)
class Counts:
    """What the collector did so far; scrapes that its end cut off neither succeeded nor failed."""

    scrapes: int = 0
    scrapes_succeeded: int = 0
    scrapes_failed: int = 0
    scrapes_late: int = 0
    pages_repeated: int = 0
    rows_written: int = 0
    rows_dropped: int = 0
    events_written: int = 0


class Collector:
    """Scrapes targets until it is stopped.

    ``read_targets`` is called at the start and once an interval; ``run_blocking`` runs what waits for a disk or a
    server in another thread.
    """

    def __init__(
        self,
        *,
        read_targets: Callable[[], list[Target]],
        scraper: Scraper,
        landing: Landing,
        catalogue: SeriesCatalogue,
        settings: ScrapeSettings,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        run_blocking: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._read_targets = read_targets
        self._scraper = scraper
        self._landing = landing
        self._catalogue = catalogue
        self.settings = settings
        self.clock = clock
        self._run_blocking = run_blocking
        self.watches: dict[str, TargetWatch] = {}
        self.counts = Counts()
        self.problem: str | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._slots_of_failing = asyncio.Semaphore(max(1, settings.concurrency // 4))
        self._held: dict[Kind, list[pa.Table]] = {kind: [] for kind in _KINDS}

    @property
    def buffered_rows(self) -> int:
        """Rows of samples that wait to be written."""
        return sum(table.num_rows for table in self._held["samples"])

    def state(self) -> dict[str, Any]:
        """Return the collector's settings and totals."""
        return {
            "interval_s": self.settings.interval_s,
            "targets_owned": len(self.watches),
            **asdict(self.counts),
            "buffered_rows": self.buffered_rows,
            "problem": self.problem,
        }

    async def run(self, stop: asyncio.Event) -> bool:
        """Scrape until ``stop`` is set, then write what is held; return whether everything is on the disk.

        Raises InputError if the targets cannot be read at the start.
        """
        await self.refresh_targets()
        try:
            while True:
                for url in self.watches.keys() - self._tasks.keys():
                    self._tasks[url] = asyncio.create_task(self._follow(self.watches[url]))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.interval_s):
                        await stop.wait()
                        break
                await self.land()
                try:
                    await self.refresh_targets()
                except Exception as error:
                    # A broken list, or a client library's surprise, must not stop the scraping of the known targets.
                    _log.error("targets stay as they were: %s", error, exc_info=not isinstance(error, InputError))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            landed = await self.land()
        return landed

    async def once(self) -> bool:
        """Scrape every target once and write the rows; return whether everything is on the disk."""
        await self.refresh_targets()
        try:
            now_s = asyncio.get_running_loop().time()
            await asyncio.gather(*(self._scrape(watch, now_s) for watch in self.watches.values()))
        finally:
            landed = await self.land()
        return landed

    async def refresh_targets(self) -> None:
        """Read the targets again; raises InputError if they cannot be read."""
        wanted = {target.url: target for target in await self._run_blocking(self._read_targets)}
        for url, watch in list(self.watches.items()):
            if wanted.get(url) != watch.target:
                del self.watches[url]
                if url in self._tasks:
                    self._tasks.pop(url).cancel()
        for url, target in wanted.items():
            if url not in self.watches:
                self.watches[url] = TargetWatch(target, self._catalogue)
        for watch in self.watches.values():
            watch.lines.max_bytes = REMEMBERED_BYTES // len(self.watches)

    async def _follow(self, watch: TargetWatch) -> None:
        """Scrape one target on its own grid of times; a scrape that takes long skips the times that it missed."""
        interval_s = self.settings.interval_s
        phase_s = zlib.crc32(watch.target.url.encode()) / 2**32 * interval_s
        while True:
            now_s = asyncio.get_running_loop().time()
            due_s = phase_s + (math.floor((now_s - phase_s) / interval_s) + 1) * interval_s
            await asyncio.sleep(due_s - now_s)
            await self._scrape(watch, due_s)

    async def _scrape(self, watch: TargetWatch, due_s: float) -> None:
        failing = watch.consecutive_failures > 0
        async with self._slots_of_failing if failing else self._slots:
            started_s, now = asyncio.get_running_loop().time(), self.clock()
            self.counts.scrapes_late += not failing and started_s - due_s > LATE_S
            self.counts.scrapes += 1
            try:
                rows = watch.take(await self._scraper.fetch(watch.target.url), now, started_s)
            except Exception as error:
                # A page that breaks the collector's code must not stop the other thousand targets.
                if not isinstance(error, ScrapeError):
                    _log.exception("%s: its page could not be read", watch.target.address)
                    error = ScrapeError("parse", f"internal error: {type(error).__name__}")
                self.counts.scrapes_failed += 1
                watch.failed(error)
                return
        self.counts.scrapes_succeeded += 1
        self.counts.pages_repeated += "samples" not in rows
        for kind, table in rows.items():
            if table.num_rows:
                self._held[kind].append(table)
                self._drop_oldest(kind)

    async def land(self) -> bool:
        """Write one file a kind of what is held; return whether all of it is on the disk."""
        problem = None
        for kind in _KINDS:
            tables, self._held[kind] = self._held[kind], []
            if not tables:
                continue
            table = pa.concat_tables(tables, promote_options="default").combine_chunks()
            try:
                await self._run_blocking(self._landing.stage, kind, table)
            except (InputError, OSError) as error:
                problem = str(error)
                self._held[kind].insert(0, table)
                self._drop_oldest(kind)
            else:
                self.counts.rows_written += table.num_rows if kind == "samples" else 0
                self.counts.events_written += table.num_rows if kind == "events" else 0
        if problem is not None and self.problem is None:
            _log.error("rows cannot be written, retrying: %s", problem)
        elif problem is None and self.problem is not None:
            _log.warning("rows are written again")
        self.problem = problem
        return problem is None

    def _drop_oldest(self, kind: Kind) -> None:
        """Keep what is held within its bound, also while a write hangs; a tenth more goes, not a page at a time."""
        over = sum(table.num_rows for table in self._held[kind]) - self.settings.max_buffered_rows
        if over <= 0:
            return
        over += self.settings.max_buffered_rows // 10
        _log.error("%d rows of %s are dropped: nothing can be written for too long", over, kind)
        self.counts.rows_dropped += over
        whole = pa.concat_tables(self._held[kind], promote_options="default")
        self._held[kind] = [whole.slice(over)]
