"""``predrain collect exporters`` put together: one collector a dataset, own /metrics and /healthz, signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.errors import InputError
from foundation.files import take_lock
from foundation.http import Connection, parse_listen
from telemetry.collect.exporters.collector import Collector, ScrapeSettings
from telemetry.collect.exporters.targets import read_targets
from telemetry.collect.exporters.watch import FailureKind, Scraper, fleet_catalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel
from telemetry.landing.folder import Landing, landing_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric


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
    written, or no target of the one round could be scraped.
    """
    landing = Landing(landing_of(dataset), writer="exporters", channels=channels)
    collector = Collector(
        read_targets=lambda: read_targets(targets),
        scraper=Scraper(connection, timeout_s=settings.timeout_s),
        landing=landing,
        catalogue=fleet_catalogue(channels, mapping),
        settings=settings,
    )
    read_targets(targets)
    do = "Stop it first; one that a supervisor starts again and again takes over when the other ends."
    what = "another collector scrapes for this dataset"
    with take_lock(landing.state("exporters.lock"), what, str(dataset), do):
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with _listening(collector, listen):
            landed = await (collector.once() if once else collector.run(stop))
    if not landed:
        raise InputError(
            f"{collector.buffered_rows} rows could not be written and are lost: {collector.problem}",
            str(landing.root),
            "Free space and start the collector again.",
        )
    if once and collector.counts.scrapes and collector.counts.scrapes_failed == collector.counts.scrapes:
        watch = next(watch for watch in collector.watches.values() if watch.last_failure is not None)
        raise InputError(
            f"none of {collector.counts.scrapes} targets could be scraped, such as "
            f"{watch.target.address}: {watch.last_failure}",
            "--targets",
            "Check the addresses, and that the exporters run.",
        )
    return collector.state()


class _Metrics:
    """The collector's numbers as ``prometheus_client`` collects them."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        state, watches = self._collector.state(), list(self._collector.watches.values())
        for name in asdict(self._collector.counts):
            text = name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"predrain_exporters_{name}", f"{text}.", value=state[name])
        for name, text in (
            ("targets_owned", "Targets that this process scrapes."),
            ("buffered_rows", "Rows of samples that wait to be written."),
        ):
            yield GaugeMetricFamily(f"predrain_exporters_{name}", text, value=state[name])
        failures = CounterMetricFamily("predrain_exporters_failures", "Failed scrapes by kind.", labels=["kind"])
        kinds: Counter[FailureKind] = sum((watch.failures for watch in watches), Counter())
        for kind, count in kinds.items():
            failures.add_metric([kind], count)
        yield failures
        states = GaugeMetricFamily("predrain_exporters_targets", "Targets by state.", labels=["state"])
        counts = Counter("failing" if watch.consecutive_failures else "good" for watch in watches)
        for name in ("failing", "good"):
            states.add_metric([name], counts[name])
        yield states


@contextlib.asynccontextmanager
async def _listening(collector: Collector, address: str | None) -> AsyncIterator[None]:
    """Serve the collector's ``/metrics`` and ``/healthz`` at ``host:port`` while the context lasts.

    It is unhealthy only while nothing can be written, not for failing targets. Raises InputError if the address cannot
    be used.
    """
    if address is None:
        yield
        return
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import PlainTextResponse, Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    from telemetry.collect.remote_write.connections import serving  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(_Metrics(collector))

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(_: Request) -> Response:
        if collector.problem is not None:
            return PlainTextResponse(f"nothing can be written: {collector.problem}\n", 503)
        return PlainTextResponse("ok\n")

    app = Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz)])
    host, port = parse_listen(address if not address.startswith(":") else f"127.0.0.1{address}")
    async with serving(app, host, port):
        yield
