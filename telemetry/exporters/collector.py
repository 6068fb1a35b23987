"""The collector: scrapes every target that it owns when it is due, and lands what the pages tell."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from telemetry.errors import InputError
from telemetry.exporters.failures import ScrapeError
from telemetry.exporters.fetching import Fetcher
from telemetry.exporters.holding import Holding
from telemetry.exporters.newest import NewestRows
from telemetry.exporters.ownership import Ownership
from telemetry.exporters.schedule import Schedule
from telemetry.exporters.set_back import without_future
from telemetry.exporters.settings import ScrapeSettings
from telemetry.exporters.target_lists import TargetList
from telemetry.exporters.targets import Target
from telemetry.exporters.wall_clock import WallClock
from telemetry.exporters.watch import Outcome, Reads, TargetWatch

_log = logging.getLogger(__name__)

LATE_S = 1.0
"""A scrape that starts this long after it was due is late."""

SET_BACK_S = 300.0
"""A clock set back by less drops what it stamps until it is where it was, so that a GPU's rows stay in order; one set
back by more had stamped rows in the future, and what they hold is forgotten."""

_TICK_S = 1.0
_EARLIEST_AGAIN_S = 5.0

RunBlocking = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs a function that waits for a disk or a server, beside the loop."""


async def in_thread(work: Callable[[], object]) -> object:
    """Run a function in a thread."""
    return await asyncio.to_thread(work)


@dataclass(slots=True)
class Counts:
    """What the collector did so far; scrapes that its end cut off are neither good nor failed."""

    scrapes: int = 0
    good: int = 0
    failed: int = 0
    late: int = 0
    repeated: int = 0
    worst_late_s: float = 0.0


@dataclass(slots=True)
class Pace:
    """The clocks of a collector; tests put their own in place.

    ``monotonic``: gives seconds that never go back; the loop's own time.
    ``random``: gives numbers in [0, 1).
    """

    clock: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    monotonic: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random


class Collector:
    """Scrapes targets until it is told to stop.

    ``targets``: read at the start and once an interval.
    ``run_blocking``: runs what waits for a disk. Landing has one thread of its own, so that name look-ups cannot hold
    it up.
    ``on_round``: called beside the loop's other work after each landing, with the collector: writes its state.
    """

    def __init__(
        self,
        *,
        targets: TargetList,
        fetcher: Fetcher,
        holding: Holding,
        ownership: Ownership,
        reader_of: Callable[[Target], Reads],
        settings: ScrapeSettings,
        pace: Pace | None = None,
        run_blocking: RunBlocking = in_thread,
        on_round: Callable[[Collector], Awaitable[None]] | None = None,
    ) -> None:
        self._targets = targets
        self._fetcher = fetcher
        self.holding = holding
        self.ownership = ownership
        self._reader_of = reader_of
        self.settings = settings
        pace = Pace() if pace is None else pace
        self.clock = WallClock(pace.clock, pace.monotonic)
        self.started_at = self.clock.now()
        self._schedule = Schedule(
            settings.interval_s, self.started_at.timestamp(), self.clock.monotonic_s(), pace.random
        )
        self._run_blocking = run_blocking
        self._on_round = on_round
        self.watches: dict[str, TargetWatch] = {}
        self.newest = NewestRows()
        self.counts = Counts()
        self._jumps_back = 0
        self.ticked_s = self.clock.monotonic_s()
        self._heap: list[tuple[float, int, str]] = []
        self._number = itertools.count()
        self._share: tuple[int, int] | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._under_way: set[asyncio.Task[None]] = set()
        self._full = asyncio.Event()
        self._landing_lock = asyncio.Lock()

    async def run(self, stop: asyncio.Event) -> bool:
        """Scrape until ``stop`` is set; then land what is held.

        Raises ``InputError`` if the targets cannot be read at the start.
        """
        await self.refresh_targets()
        landing = asyncio.create_task(self._keep_landing())
        others: list[asyncio.Task[Any]] = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self._pace()),
            asyncio.create_task(self._keep_refreshing()),
        ]
        try:
            done, _ = await asyncio.wait([landing, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a failure of ours must not pass in silence
        finally:
            ending = [*others, *self._under_way]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            async with self._landing_lock:  # a landing under way is let finish: its rows are in nobody else's hands
                landing.cancel()
            await asyncio.gather(landing, return_exceptions=True)
            landed = await self.land()
            self.ownership.close()
        return landed

    async def once(self) -> bool:
        """Scrape every target that is free once, at once; land it.

        Raises ``InputError`` if the targets cannot be read.
        """
        await self.refresh_targets()
        now_s = self.clock.monotonic_s()
        mine = [watch for url, watch in self.watches.items() if self._own(url, watch)]
        try:
            await asyncio.gather(*(self._scrape(watch, now_s) for watch in mine))
        finally:
            landed = await self.land()
            self.ownership.close()
        return landed

    async def refresh_targets(self) -> None:
        """Read the targets again; new ones are scraped from now on, others no more.

        Raises ``InputError`` if they cannot be read and never could.
        """
        targets = await self._run_blocking(self._targets.read)
        if targets is None:
            return
        assert isinstance(targets, list)
        wanted = {target.url: target for target in targets}
        now_s = self.clock.monotonic_s()
        for url, watch in list(self.watches.items()):
            if wanted.get(url) != watch.target:
                del self.watches[url]
                self.ownership.release(url)
        for url, target in wanted.items():
            if url not in self.watches:
                hung_s = self.settings.hung_intervals * self.settings.interval_s
                watch = self.watches[url] = TargetWatch(target, self._reader_of(target), hung_s)
                self._plan(watch, self._schedule.next_slot_s(url, now_s))

    async def land(self) -> bool:
        """Land what is held, and write the state; return whether all rows are on the disk."""
        async with self._landing_lock:
            self._now()  # a clock that was set back takes its future rows out first
            batch, jumps_back = self.holding.take(), self._jumps_back
            landed = bool(await self._run_blocking(functools.partial(self.holding.land, batch)))
            if not landed:
                self.holding.give_back(batch)
                if self._jumps_back != jumps_back:
                    self._forget_future(self.clock.now())
            if self._on_round is not None:
                await self._on_round(self)
            return landed

    async def _pace(self) -> None:
        while True:
            now_s = self.ticked_s = self.clock.monotonic_s()
            while self._heap and self._heap[0][0] <= now_s:
                due_s, _, url = heapq.heappop(self._heap)
                watch = self.watches.get(url)
                if watch is None or watch.due_s != due_s or watch.is_scraping:
                    continue  # removed, or planned anew since
                if self._own(url, watch):
                    watch.is_scraping = True
                    task = asyncio.create_task(self._scrape(watch, due_s))
                    self._under_way.add(task)
                    task.add_done_callback(self._under_way.discard)
                else:
                    self._plan(watch, self._schedule.next_slot_s(url, now_s))
            wait_s = min(self._heap[0][0] - now_s, _TICK_S) if self._heap else _TICK_S
            await asyncio.sleep(max(wait_s, 0.0))

    def _own(self, url: str, watch: TargetWatch) -> bool:
        owned = self.ownership.acquire(url)
        if owned and not watch.owned:
            _log.debug("%s is scraped by this process", watch.target.address)
        watch.owned = owned
        return owned

    async def _scrape(self, watch: TargetWatch, due_s: float) -> None:
        async with self._slots:
            started_s = self.clock.monotonic_s()
            late_s = started_s - due_s
            self.counts.worst_late_s = max(self.counts.worst_late_s, late_s)
            self.counts.late += late_s > LATE_S
            self.counts.scrapes += 1
            at, jumps_back = self._now(), self._jumps_back
            error: ScrapeError | None = None
            try:
                fetched = await self._fetcher.fetch(watch.target.url)
                now = self._now()
                if self._jumps_back != jumps_back:
                    at = now  # set back during the scrape: its start was told by the wrong clock
                self._take(watch.take(fetched, at, started_s), now)
            except ScrapeError as failure:
                error = failure
            except Exception as failure:
                # A page that breaks our own code must not stop the other thousand targets.
                _log.exception("%s: its page could not be read", watch.target.address)
                error = ScrapeError("parse", f"our own error: {type(failure).__name__}")
            finally:
                watch.is_scraping = False
            self._plan_again(watch, error, at, due_s)

    def _plan_again(self, watch: TargetWatch, error: ScrapeError | None, at: datetime, due_s: float) -> None:
        url, now_s = watch.target.url, self.clock.monotonic_s()
        if error is None:
            self.counts.good += 1
            again_s = self._schedule.next_slot_s(url, max(now_s, due_s))
        else:
            self.counts.failed += 1
            watch.failed(error, at)
            again_s = self._schedule.after_failure_s(url, due_s, watch.failures_in_row, error.retry_after_s, now_s)
        if self.watches.get(url) is watch:
            self._plan(watch, again_s)

    def _now(self) -> datetime:
        """Return the wall clock; once it was set back, forget what it had stamped in the future."""
        now = self.clock.now()
        if self.clock.jumps_back != self._jumps_back:
            self._jumps_back = self.clock.jumps_back
            self._forget_future(now)
        return now

    def _forget_future(self, now: datetime) -> None:
        latest_ms = round((now.timestamp() + SET_BACK_S) * 1000)
        dropped = without_future(self.holding, now, latest_ms)
        self.newest.dropped += dropped
        forgotten = self.newest.forget_after(latest_ms)
        if dropped or forgotten:
            _log.warning(
                "%d rows in the future had not landed and are dropped; %d GPUs go on at the time that was set",
                dropped,
                forgotten,
            )

    def _take(self, outcome: Outcome, now: datetime) -> None:
        if outcome.rows is None:
            self.counts.repeated += 1
        else:
            samples = self.newest.keep(outcome.rows.samples, round(now.timestamp() * 1000))
            self.holding.add(replace(outcome.rows, samples=samples))
        self.holding.add_table("events", outcome.events)
        self.holding.add_table("inventory", outcome.inventory)
        if self.holding.rows >= self.settings.land_rows and self.holding.problem is None:
            self._full.set()

    def _plan(self, watch: TargetWatch, due_s: float) -> None:
        watch.due_s = due_s
        heapq.heappush(self._heap, (due_s, next(self._number), watch.target.url))

    async def _keep_landing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), self.settings.landing_interval_s)
            self._full.clear()
            await self.land()
            self._tell_share()

    def _tell_share(self) -> None:
        share = (sum(watch.owned for watch in self.watches.values()), len(self.watches))
        if share != self._share:
            _log.info("%d of %d targets are scraped by this process", *share)
            self._share = share

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(max(self.settings.interval_s, _EARLIEST_AGAIN_S))
            try:
                await self.refresh_targets()
            except InputError as error:
                _log.error("targets stay as they were: %s", error)
            except Exception:
                # A client library's surprise must not stop the scraping of the targets that are known.
                _log.exception("targets stay as they were")
