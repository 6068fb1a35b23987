"""``predrain collect exporters`` put together: from targets and a dataset to a collector that runs until it is told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telemetry.channel import Channel
from telemetry.collect.series.mapping import SourceMapping
from telemetry.errors import InputError
from telemetry.exporters.collector import Collector, RunBlocking
from telemetry.exporters.credentials import Credentials
from telemetry.exporters.fetching import HttpFetcher
from telemetry.exporters.holding import Holding
from telemetry.exporters.listening import listening
from telemetry.exporters.node_names import TargetCatalogue, fleet_catalogue
from telemetry.exporters.ownership import Ownership
from telemetry.exporters.settings import NodeFrom, ScrapeSettings
from telemetry.exporters.status import LOCK_NAME, STATE_NAME, collector_name, collector_state, own_state, write_state
from telemetry.exporters.target_lists import AllTargets
from telemetry.exporters.targets import Target
from telemetry.exposition.page import PageReader
from telemetry.exposition.scanner import Limits
from telemetry.landing.folder import Landing, landing_of

_log = logging.getLogger(__name__)
_SPARE_FILES = 256
_MANY_FILES = 1 << 18


@dataclass(frozen=True, slots=True)
class ExporterOptions:
    """How exporters are collected.

    ``channels``: of :func:`telemetry.channels.resolve_channels`.
    ``listen``: ``host:port`` of the collector's own page.
    """

    dataset: Path
    targets: AllTargets
    channels: Mapping[str, Channel]
    mapping: SourceMapping = field(default_factory=SourceMapping)
    settings: ScrapeSettings = field(default_factory=ScrapeSettings)
    node_from: NodeFrom = "auto"
    credentials: Credentials = field(default_factory=Credentials)
    ca_file: Path | None = None
    listen: str | None = None


async def collect_exporters(options: ExporterOptions, *, once: bool) -> dict[str, Any]:
    """Collect until SIGTERM or SIGINT, or one round.

    ``once``: scrape each target once and return.
    Returns: the collector's totals, see :func:`telemetry.exporters.status.collector_state`.
    Raises ``InputError`` if an option cannot be used, the targets cannot be read, rows were scraped that could not be
    landed, or no target of the one round could be scraped.
    """
    landing = Landing(landing_of(options.dataset), writer="exporters", channels=options.channels)
    fleet = fleet_catalogue(options.channels, options.mapping)
    limits = Limits(lines=options.settings.max_lines)

    def reader_of(target: Target) -> PageReader:
        return PageReader(TargetCatalogue(fleet, target, options.node_from), limits=limits)

    # Name look-ups that hang fill the loop's own threads: landing has one of its own.
    with ThreadPoolExecutor(1, "landing") as disk, Ownership(landing.state(LOCK_NAME)) as ownership:
        run_blocking = _runner(disk)
        async with HttpFetcher(
            options.settings,
            credentials=options.credentials,
            ca_file=options.ca_file,
            max_kept=_raised_file_limit() - options.settings.concurrency - _SPARE_FILES,
        ) as fetcher:
            collector = Collector(
                targets=options.targets,
                fetcher=fetcher,
                holding=Holding(landing, max_rows=options.settings.max_held_rows),
                ownership=ownership,
                reader_of=reader_of,
                settings=options.settings,
                run_blocking=run_blocking,
                on_round=_state_writer(landing.state(STATE_NAME), run_blocking),
            )
            async with listening(collector, options.listen):
                landed = await (collector.once() if once else _until_told(collector))
        ended_at = collector.clock.now()
        with contextlib.suppress(InputError, OSError):  # the round before has told of a full disk
            ending = own_state(collector, ended_at)
            write_state(landing.state(STATE_NAME), ending, ended_at, leaving=collector_name())
    state = collector_state(collector, collector.clock.now())
    if not landed:
        raise InputError(
            f"{collector.holding.rows} rows could not be landed and are lost: {collector.holding.problem}",
            str(landing.root),
            "Free space and start the collector again.",
        )
    if once and state["scrapes"] and state["failed"] == state["scrapes"]:
        worst = next(watch for watch in collector.watches.values() if watch.last_failure is not None)
        example = f"{worst.target.address}: {worst.last_failure}"
        raise InputError(
            f"none of {state['scrapes']} targets could be scraped, such as {example}",
            "--targets",
            "Check the addresses, and that the exporters run.",
        )
    return state


async def _until_told(collector: Collector) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        return await collector.run(stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _runner(pool: ThreadPoolExecutor) -> RunBlocking:
    async def run(work: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    return run


def _state_writer(path: Path, run_blocking: RunBlocking) -> Callable[[Collector], Awaitable[None]]:
    failing = False

    async def write(collector: Collector) -> None:
        nonlocal failing
        now = collector.clock.now()
        own = own_state(collector, now)
        try:
            await run_blocking(functools.partial(write_state, path, own, now))
            failing = False
        except (InputError, OSError) as error:
            if not failing:
                _log.error("the state of the targets cannot be written: %s", error)
            failing = True

    return write


def _raised_file_limit() -> int:
    """Allow this process as many open files as the system does; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MANY_FILES
    if soft < min(hard, _MANY_FILES):
        soft = min(hard, _MANY_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft
