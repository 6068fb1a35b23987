"""``predrain collect exporters`` and ``predrain collect gpud``: what each node serves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.collect.options import (
    DatasetOption,
    IntervalOption,
    ListenOption,
    OnceOption,
    RulesOption,
    SourceMappingOption,
    log_to_stderr,
    seconds,
)
from predrain.console import show
from predrain.options import ConnectionOptions, JsonOption, ParamsOption, grouped, read_params

if TYPE_CHECKING:
    from telemetry.collect.scraping.collector import ScrapeSettings

TimeoutOption = Annotated[
    str | None,
    typer.Option("--timeout", help="Timeout of one complete response. Default: 10s, or the interval if shorter."),
]


@grouped
def exporters(
    targets: Annotated[
        list[str],
        typer.Option(
            help="Targets to scrape: host:port or URL (comma-separated), a file (one target with an "
            "optional node per line, or Prometheus file_sd; reloaded on change), or "
            "kubernetes:NAMESPACE/SERVICE[:PORT]. Repeatable."
        ),
    ],
    dataset: DatasetOption,
    interval: IntervalOption = "30s",
    timeout: TimeoutOption = None,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Concurrent scrapes.")] = 512,
    *,
    access: ConnectionOptions,
    mapping: SourceMappingOption = None,
    listen: ListenOption = None,
    once: OnceOption = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Scrape dcgm-exporter and AMD's exporter until SIGTERM, including scrape metadata.

    Example: predrain collect exporters --targets gpu-nodes.txt --interval 30s --dataset fleet
    """
    from foundation.files import take_lock
    from telemetry.accounting import Accounting
    from telemetry.collect.buffer import RowBuffer
    from telemetry.collect.exporters import PageWatch, fleet_catalogue
    from telemetry.collect.scraping.collector import ScrapeCollector, run_collector
    from telemetry.collect.scraping.scraper import Scraper
    from telemetry.collect.scraping.targets import read_targets
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.landing.folder import Landing, landing_of

    settings = _settings(interval, timeout, concurrency)
    log_to_stderr()
    channels, accounting = resolve_channels(read_params(params).channels), Accounting()
    connection = access.to("http://targets")
    catalogue = fleet_catalogue(channels, load_source_mapping(mapping))
    landing = Landing(landing_of(dataset), writer="exporters", channels=channels)
    read_targets(targets)
    do = "Stop it first. A collector that a supervisor restarts takes over when the other ends."
    with take_lock(
        landing.state("exporters.lock"), "another exporter collector is running for this dataset", str(dataset), do
    ):
        collector = ScrapeCollector(
            read_targets=partial(read_targets, targets),
            fetch=Scraper(connection, timeout_s=settings.timeout_s).fetch,
            watch=lambda target: PageWatch(target, catalogue, accounting),
            sink=RowBuffer(landing, accounting, max_rows=settings.max_buffered_rows),
            settings=settings,
            accounting=accounting,
        )
        result = run_collector(collector, "exporters", listen=listen, once=once)
    show({"dataset": str(dataset), **result}, as_json=as_json, accounting=accounting)


@grouped
def gpud(
    targets: Annotated[
        list[str],
        typer.Option(
            help="Addresses of gpud: host, host:port (default 15132) or URL (comma-separated), or a file, "
            "as for `collect exporters`. Repeatable."
        ),
    ],
    dataset: DatasetOption,
    interval: IntervalOption = "60s",
    timeout: TimeoutOption = None,
    rules: RulesOption = None,
    *,
    access: ConnectionOptions,
    listen: ListenOption = None,
    once: OnceOption = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Poll gpud on each node for XIDs, boots and other faults until SIGTERM; the first round reads recent days.

    gpud creates a self-signed certificate at each start: use --insecure-skip-verify or a proxy.

    Example: predrain collect gpud --targets gpu-nodes.txt --insecure-skip-verify --dataset fleet
    """
    from telemetry.accounting import Accounting
    from telemetry.collect.gpud import CONCURRENCY, EVENTS, EventSink, EventsWatch
    from telemetry.collect.kubernetes.rules import load_rules
    from telemetry.collect.outbox import Outbox
    from telemetry.collect.scraping.collector import ScrapeCollector, run_collector
    from telemetry.collect.scraping.scraper import Scraper
    from telemetry.collect.scraping.targets import read_targets
    from telemetry.landing.folder import Landing, landing_of

    settings = _settings(interval, timeout, CONCURRENCY)
    log_to_stderr()
    connection = access.to("https://targets")
    accounting, delay, loaded = Accounting(), read_params(params).features.delay, load_rules(rules)
    with Outbox(Landing(landing_of(dataset), writer="gpud"), "gpud", accounting) as outbox:
        sink = EventSink(outbox)
        collector = ScrapeCollector(
            read_targets=partial(read_targets, targets, EVENTS),
            fetch=Scraper(connection, timeout_s=settings.timeout_s).fetch,
            watch=lambda target: EventsWatch(target, sink, accounting, delay=delay, rules=loaded),
            sink=sink,
            settings=settings,
            accounting=accounting,
        )
        result = run_collector(collector, "gpud", listen=listen, once=once)
    show({"dataset": str(dataset), **result}, as_json=as_json, accounting=accounting)


def _settings(interval: str, timeout: str | None, concurrency: int) -> ScrapeSettings:
    from telemetry.collect.scraping.collector import ScrapeSettings

    interval_s = seconds(interval, "--interval")
    timeout_s = min(interval_s, 10.0) if timeout is None else seconds(timeout, "--timeout")
    return ScrapeSettings(interval_s, timeout_s, concurrency)
