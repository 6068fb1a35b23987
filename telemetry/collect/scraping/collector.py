"""Scrape loop: scrapes are spread evenly over the interval, and rows are staged once an interval."""

import asyncio
import contextlib
import logging
import math
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar

from foundation.errors import InputError
from foundation.http import (
    BodyTooLarge,
    Connection,
    HttpError,
    HttpResponse,
    NoAnswerInTime,
    ProtocolError,
    async_client,
    exchange,
)
from foundation.running import Failing, stop_loop_on_signals
from telemetry.accounting import Accounting
from telemetry.collect.exposure import exposing
from telemetry.collect.scraping.targets import Target

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)

FailureKind = Literal["unreachable", "timeout", "tls", "status", "truncated", "too_large", "protocol", "parse", "empty"]
"""Kinds of scrape failures.

``unreachable``: connection or name resolution failed. ``status``: not 200, redirects included. ``truncated``: the page
ends early. ``too_large``: over a limit of bytes or rows. ``protocol``: malformed or incomplete HTTP. ``parse``: not the
source's format. ``empty``: no series of any device.
"""

PAGE_BYTES: Final = 8 << 20
PAGES_BYTES: Final = 256 << 20
"""Maximum total size of the responses being read, which bounds memory."""

_ACCEPT: Final = (
    "text/plain;version=0.0.4, application/json;q=0.9, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"
)


class ScrapeError(Exception):
    """A failed scrape; ``detail`` is one line without secrets or content of the response."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Scraper:
    """HTTP client of a collector; ``connection`` has the credentials and CA for every target.

    Each scrape opens its own connection: a pool is searched linearly for each request, which is slow for 1,000 targets.
    """

    def __init__(self, connection: Connection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._headers = connection.request_headers()
        self._tls = connection.tls()
        self._held_bytes = 0

    async def fetch(self, url: str) -> HttpResponse:
        """Return the response of ``url``; raises ScrapeError."""
        with suppress(InputError):  # during a rotation, keep the old credentials
            self._headers = self._connection.request_headers()
        timeout_s, held_bytes = self._timeout_s, 0

        def hold(size: int) -> None:
            nonlocal held_bytes
            held_bytes, self._held_bytes = held_bytes + size, self._held_bytes + size
            if self._held_bytes > PAGES_BYTES:
                raise ScrapeError("too_large", f"the pages being read exceed {PAGES_BYTES:,} bytes in total")

        try:
            async with async_client(self._connection, timeout_s=timeout_s, use_proxies=False, tls=self._tls) as client:
                headers = {"Accept": _ACCEPT, **self._headers}
                answer = await exchange(
                    client, "GET", url, timeout_s=timeout_s, max_bytes=PAGE_BYTES, hold=hold, headers=headers
                )
        except NoAnswerInTime:
            raise ScrapeError("timeout", f"no complete page within {timeout_s:g} s") from None
        except BodyTooLarge as error:
            raise ScrapeError("too_large", str(error)) from None
        except InputError as error:
            raise ScrapeError("tls", error.problem) from None
        except HttpError as error:
            kind: FailureKind = "protocol" if isinstance(error, ProtocolError) else "unreachable"
            raise ScrapeError(kind, str(error).splitlines()[0][:160]) from error
        finally:
            self._held_bytes -= held_bytes
        if answer.status != 200:
            raise ScrapeError("status", f"HTTP status {answer.status}")
        return answer


_Batch = TypeVar("_Batch")
_Batch_contra = TypeVar("_Batch_contra", contravariant=True)


SCRAPES: Final = "scrapes"
"""Accounting table of scrapes; its reasons are the failure kinds."""

Fetch = Callable[[str], Awaitable[HttpResponse]]


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """Interval and limits of a collector.

    ``timeout_s``: for one scrape, from connecting to the last byte. ``concurrency``: maximum concurrent scrapes;
    targets whose last scrape failed have slots of their own, a quarter as many, so they never delay the others.
    ``max_buffered_rows``: rows kept while writes fail; beyond it, the oldest are dropped.
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
                "Give a timeout of at most the interval, because scrapes of a target must not overlap.",
            )


class Watch(Generic[_Batch]):
    """State of one target: its parser and failures; ``advice`` is printed if no target can be scraped."""

    advice = "Check the addresses, and that the exporters run."

    def __init__(self, target: Target) -> None:
        self.target = target
        self.failures: Counter[FailureKind] = Counter()
        self.last_failure: ScrapeError | None = None
        self.is_failing = False

    def share_memory(self, targets: int) -> None:
        """Limit this target's caches to its share among ``targets``."""

    @abstractmethod
    async def scrape(self, fetch: Fetch, now: datetime, started_s: float) -> _Batch:
        """Fetch and parse a response at ``now`` (monotonic ``started_s``); raises ScrapeError."""


class Sink(Protocol[_Batch_contra]):
    """Destination of batches, for example :class:`telemetry.collect.outbox.RowBuffer`."""

    def add(self, batch: _Batch_contra) -> None:
        """Buffer a batch, within the limits."""

    def write(self) -> None:
        """Write the buffered batches; on failure keep them and raise ``InputError`` or ``OSError``."""


class ScrapeCollector(Generic[_Batch]):
    """Scrapes targets until it is stopped.

    ``read_targets`` is called at the start and once an interval; ``run_blocking`` runs blocking I/O in a thread.
    """

    def __init__(
        self,
        *,
        read_targets: Callable[[], list[Target]],
        fetch: Fetch,
        watch: Callable[[Target], Watch[_Batch]],
        sink: Sink[_Batch],
        settings: ScrapeSettings,
        accounting: Accounting,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        run_blocking: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._read_targets, self._fetch, self._watch, self._sink = read_targets, fetch, watch, sink
        self.settings, self.accounting, self._clock = settings, accounting, clock
        self._run_blocking = run_blocking
        self.watches: dict[str, Watch[_Batch]] = {}
        self.problem: str | None = None
        self._failing = Failing(_log)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._slots_of_failing = asyncio.Semaphore(max(1, settings.concurrency // 4))

    async def run(self, stop: asyncio.Event) -> None:
        """Scrape until ``stop`` is set, then write the buffered rows.

        Raises InputError if the targets cannot be read at the start, or the last rows cannot be written.
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
                await self._write()
                try:
                    await self.refresh_targets()
                except Exception as error:
                    # A broken target list or an unexpected client error must not stop scraping of the known targets.
                    self._failing.failed("targets", error, kind=str(error))
                    if not isinstance(error, InputError):
                        _log.exception("targets")
                else:
                    self._failing.recovered("targets")
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._write()
        self._check_written()

    async def once(self) -> None:
        """Scrape every target once; raises InputError if all scrapes fail or the rows cannot be written."""
        await self.refresh_targets()
        try:
            await asyncio.gather(*map(self._scrape, self.watches.values()))
        finally:
            await self._write()
        self._check_written()
        if self.watches and all(watch.is_failing for watch in self.watches.values()):
            watch = next(iter(self.watches.values()))
            raise InputError(
                f"none of {len(self.watches)} targets could be scraped, such as {watch.target.address}: "
                f"{watch.last_failure}",
                "--targets",
                watch.advice,
            )

    async def refresh_targets(self) -> None:
        """Reload the targets; raises InputError if they cannot be read."""
        listed = {target.url: target for target in await self._run_blocking(self._read_targets)}
        for url, watch in list(self.watches.items()):
            if listed.get(url) != watch.target:
                del self.watches[url]
                if url in self._tasks:
                    self._tasks.pop(url).cancel()
        for url, target in listed.items():
            if url not in self.watches:
                self.watches[url] = self._watch(target)
        for watch in self.watches.values():
            watch.share_memory(len(self.watches))

    async def _follow(self, watch: Watch[_Batch]) -> None:
        """Scrape one target once an interval; intervals that pass during a slow scrape are skipped."""
        interval_s = self.settings.interval_s
        # From the URL, so that a restart leaves a target's scrapes evenly spaced.
        phase_s = zlib.crc32(watch.target.url.encode()) / 2**32 * interval_s
        while True:
            now_s = asyncio.get_running_loop().time()
            due_s = phase_s + (math.floor((now_s - phase_s) / interval_s) + 1) * interval_s
            await asyncio.sleep(due_s - now_s)
            await self._scrape(watch)

    async def _scrape(self, watch: Watch[_Batch]) -> None:
        address = watch.target.address
        async with self._slots_of_failing if watch.is_failing else self._slots:
            started_s = asyncio.get_running_loop().time()
            try:
                # Buffer the batch before other tasks run: a source's position must never be ahead of its rows.
                self._sink.add(await watch.scrape(self._fetch, self._clock(), started_s))
            except Exception as error:
                # A response that triggers a bug must not stop the other targets.
                if not isinstance(error, ScrapeError):
                    _log.exception("%s: cannot read the response", address)
                    error = ScrapeError("parse", f"internal error: {type(error).__name__}")
                self.accounting.read(SCRAPES)
                self.accounting.left_out(SCRAPES, error.kind, example=f"{address}: {error}")
                self._failing.failed(address, error, kind=error.kind)
                watch.failures[error.kind] += 1
                watch.last_failure, watch.is_failing = error, True
                return
        self.accounting.take(SCRAPES, 1, {})
        self._failing.recovered(address)
        watch.is_failing = False

    async def _write(self) -> None:
        try:
            await self._run_blocking(self._sink.write)
        except (InputError, OSError) as error:
            self._failing.failed("writing rows", error, level=logging.ERROR)
            self.problem = str(error)
        else:
            self._failing.recovered("writing rows")
            self.problem = None

    def _check_written(self) -> None:
        if self.problem is not None:
            raise InputError(
                f"the last rows could not be written and are lost: {self.problem}",
                "the staging folder",
                "Free space and start the collector again.",
            )


def run_collector(collector: ScrapeCollector[Any], name: str, *, listen: str | None, once: bool) -> None:
    """Collect until SIGTERM or SIGINT, or for one round.

    ``name``: the source's name in metric names.
    Raises InputError as :meth:`ScrapeCollector.run` and :meth:`ScrapeCollector.once` do, or if ``listen`` is unusable.
    """

    async def run() -> None:
        stop = stop_loop_on_signals()
        await (collector.once() if once else collector.run(stop))

    with exposing(
        listen,
        lambda: collector.accounting,
        problem=lambda: collector.problem,
        extra=lambda: _metrics(collector, name),
    ):
        asyncio.run(run())


def _metrics(collector: ScrapeCollector[Any], name: str) -> "Iterator[Metric]":
    from prometheus_client.core import GaugeMetricFamily

    watches = list(collector.watches.values())
    yield GaugeMetricFamily(f"predrain_{name}_targets_owned", "Targets that this process scrapes.", len(watches))
    states = GaugeMetricFamily(f"predrain_{name}_targets", "Targets by state.", labels=["state"])
    counts = Counter("failing" if watch.is_failing else "good" for watch in watches)
    for state in ("failing", "good"):
        states.add_metric([state], counts[state])
    yield states
