"""``predrain collect exporters`` put together: one collector a dataset, own /metrics and /healthz, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock, Timeout

from telemetry.atomic import disk_errors
from telemetry.collect.exporters.collector import Collector, ScrapeSettings
from telemetry.collect.exporters.scraping import FAILURE_KINDS, Scraper
from telemetry.collect.exporters.target_lists import TargetLists
from telemetry.collect.exporters.watch import fleet_catalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel
from telemetry.errors import InputError
from telemetry.http import Connection
from telemetry.landing.folder import Landing, landing_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)


async def collect_exporters(
    dataset: Path,
    targets: Sequence[str],
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping,
    settings: ScrapeSettings,
    connection: Connection,
    listen: str | None = None,
    once: bool = False,
) -> dict[str, Any]:
    """Collect until SIGTERM or SIGINT, or one round; return the collector's totals.

    ``connection`` holds credentials and trust, ``listen`` is the address of the collector's own page.
    Raises InputError if an option cannot be used, the targets cannot be read, rows were scraped that could not be
    landed, or no target of the one round could be scraped.
    """
    landing = Landing(landing_of(dataset), writer="exporters", channels=channels)
    collector = Collector(
        read_targets=TargetLists(targets).read,
        scraper=Scraper(connection, timeout_s=settings.timeout_s),
        landing=landing,
        catalogue=fleet_catalogue(channels, mapping),
        settings=settings,
    )
    lock = FileLock(landing.state("exporters.lock"), fallback_to_soft=False)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _listening(collector, listen):
        while not _acquire(lock):
            if once:
                raise InputError("another collector scrapes for this dataset", str(dataset), "Stop it first.")
            if not collector.is_standby:
                collector.is_standby = True
                _log.info("standby: another collector scrapes for this dataset")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.interval_s):
                    await stop.wait()
                    return collector_state(collector)
        collector.is_standby = False
        landed = await (collector.once() if once else collector.run(stop))
    if not landed:
        raise InputError(
            f"{collector.buffered_rows} rows could not be landed and are lost: {collector.problem}",
            str(landing.root),
            "Free space and start the collector again.",
        )
    if once and collector.counts.scrapes and collector.counts.scrapes_failed == collector.counts.scrapes:
        worst = next(watch for watch in collector.watches.values() if watch.last_failure is not None)
        raise InputError(
            f"none of {collector.counts.scrapes} targets could be scraped, such as "
            f"{worst.target.address}: {worst.last_failure}",
            "--targets",
            "Check the addresses, and that the exporters run.",
        )
    return collector_state(collector)


def _acquire(lock: FileLock) -> bool:
    try:
        with disk_errors(Path(lock.lock_file)):
            lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def collector_state(collector: Collector) -> dict[str, Any]:
    """Return a collector's own totals."""
    return {
        "interval_s": collector.settings.interval_s,
        "targets_configured": len(collector.watches),
        "targets_owned": len(collector.watches),
        **asdict(collector.counts),
        "buffered_rows": collector.buffered_rows,
        "problem": collector.problem,
    }


class _Metrics:
    """The collector's numbers as ``prometheus_client`` collects them."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        state = collector_state(self._collector)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"predrain_exporters_{name}", text, value=state[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"predrain_exporters_{name}", text, value=state[name])
        watches = list(self._collector.watches.values())
        failures = CounterMetricFamily("predrain_exporters_failures", "Failed scrapes by kind.", labels=["kind"])
        for kind in FAILURE_KINDS:
            failures.add_metric([kind], sum(watch.failures[kind] for watch in watches))
        yield failures
        failing = sum(watch.consecutive_failures > 0 for watch in watches)
        hung = sum(watch.is_hung and not watch.consecutive_failures for watch in watches)
        states = GaugeMetricFamily("predrain_exporters_targets", "Targets by state.", labels=["state"])
        for name, count in (("failing", failing), ("hung", hung), ("good", len(watches) - failing - hung)):
            states.add_metric([name], count)
        yield states


_COUNTERS: Final = {
    "scrapes": "Scrapes started.",
    "scrapes_failed": "Scrapes that gave no usable page.",
    "scrapes_late": "Scrapes that started more than 1 s after they were due.",
    "pages_repeated": "Pages that were the one before again.",
    "rows_written": "Rows of samples written to the landing folder.",
    "rows_dropped": "Rows dropped because nothing could be written for too long.",
    "events_written": "Events written to the landing folder.",
}
_GAUGES: Final = {
    "targets_configured": "Targets that are named.",
    "targets_owned": "Targets that this process scrapes.",
    "buffered_rows": "Rows of samples that wait to be written.",
}


@contextlib.asynccontextmanager
async def _listening(collector: Collector, address: str | None) -> AsyncIterator[None]:
    """Serve the collector's ``/metrics`` and ``/healthz`` at ``host:port`` while the context lasts.

    Failing targets are not the collector's illness: it is unhealthy only while nothing can be landed. Raises InputError
    if the address cannot be used.
    """
    if address is None:
        yield
        return
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import PlainTextResponse, Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    from telemetry.collect.remote_write.connections import parse_listen, serving  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(_Metrics(collector))

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(_: Request) -> Response:
        if collector.problem is not None:
            return PlainTextResponse(f"nothing can be landed: {collector.problem}\n", 503)
        return PlainTextResponse("standby\n" if collector.is_standby else "ok\n")

    app = Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz)])
    host, port = parse_listen(address if not address.startswith(":") else f"127.0.0.1{address}")
    async with serving(app, host, port):
        yield
