"""``predrain collect exporters``, ``gpud``, ``receive`` and ``prometheus``: telemetry by scrape, push or backfill."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.console import progress, show
from predrain.options import (
    PROMETHEUS,
    ConnectionOptions,
    DatasetOption,
    IntervalOption,
    JsonOption,
    ListenOption,
    OnceOption,
    ParamsOption,
    RulesOption,
    SourceMappingOption,
    duration_option,
    grouped,
    instant_option,
    log_to_stderr,
    read_params,
    seconds,
)

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
    from telemetry.collect.exporters import PageWatch, fleet_catalogue
    from telemetry.collect.outbox import RowBuffer
    from telemetry.collect.scraping.collector import ScrapeCollector, Scraper, run_collector
    from telemetry.collect.scraping.targets import read_targets
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.staging.folder import StagingFolder, staging_of

    settings = _settings(interval, timeout, concurrency)
    log_to_stderr()
    channels, accounting = resolve_channels(read_params(params).channels), Accounting()
    connection = access.to("http://targets")
    catalogue = fleet_catalogue(channels, load_source_mapping(mapping))
    staging = StagingFolder(staging_of(dataset), writer="exporters", channels=channels)
    read_targets(targets)
    advice = "Stop it first. A collector that a supervisor restarts takes over when the other ends."
    problem = "another exporter collector is running for this dataset"
    with take_lock(staging.state("exporters.lock"), problem, str(dataset), advice):
        collector = ScrapeCollector(
            read_targets=partial(read_targets, targets),
            fetch=Scraper(connection, timeout_s=settings.timeout_s).fetch,
            watch=lambda target: PageWatch(target, catalogue, accounting),
            sink=RowBuffer(staging, accounting, max_rows=settings.max_buffered_rows),
            settings=settings,
            accounting=accounting,
        )
        run_collector(collector, "exporters", listen=listen, once=once)
    show({"dataset": str(dataset), "targets": len(collector.watches)}, as_json=as_json, accounting=accounting)


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
    from telemetry.collect.scraping.collector import ScrapeCollector, Scraper, run_collector
    from telemetry.collect.scraping.targets import read_targets
    from telemetry.staging.folder import StagingFolder, staging_of

    settings = _settings(interval, timeout, CONCURRENCY)
    log_to_stderr()
    connection = access.to("https://targets")
    accounting, delay, loaded = Accounting(), read_params(params).features.delay, load_rules(rules)
    with Outbox(StagingFolder(staging_of(dataset), writer="gpud"), "gpud", accounting) as outbox:
        sink = EventSink(outbox)
        collector = ScrapeCollector(
            read_targets=partial(read_targets, targets, EVENTS),
            fetch=Scraper(connection, timeout_s=settings.timeout_s).fetch,
            watch=lambda target: EventsWatch(target, sink, accounting, delay=delay, rules=loaded),
            sink=sink,
            settings=settings,
            accounting=accounting,
        )
        run_collector(collector, "gpud", listen=listen, once=once)
    show({"dataset": str(dataset), "targets": len(collector.watches)}, as_json=as_json, accounting=accounting)


def _settings(interval: str, timeout: str | None, concurrency: int) -> "ScrapeSettings":
    from telemetry.collect.scraping.collector import ScrapeSettings

    interval_s = seconds(interval, "--interval")
    timeout_s = min(interval_s, 10.0) if timeout is None else seconds(timeout, "--timeout")
    return ScrapeSettings(interval_s, timeout_s, concurrency)


def receive(
    dataset: DatasetOption,
    listen: Annotated[str, typer.Option(help="Address and port to listen on.")] = "127.0.0.1:9201",
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of bearer tokens, one per line; required unless the address is loopback. On "
            "loopback, the first start creates a token in DATASET.receive-token."
        ),
    ] = None,
    mapping: SourceMappingOption = None,
    params: ParamsOption = None,
) -> None:
    """Receive Prometheus remote write 1.0 (/api/v1/write) and pushed rows (/v1/telemetry) until SIGTERM.

    Both paths require a token, even on loopback.

    A request is acknowledged after an fsync, which takes up to a second. Configure Prometheus to send large
    requests (`queue_config: {max_samples_per_send: 10000}`) of GPU series only (`write_relabel_configs`).

    Example: predrain collect receive --listen 0.0.0.0:9201 --tokens tokens.txt --dataset fleet
    """
    from foundation.http import parse_listen
    from foundation.server.connections import refuse_open_port
    from foundation.server.token_file import own_token_file
    from telemetry.collect.remote_write.group_commit import ReceiverSettings
    from telemetry.collect.remote_write.receiver import Receiver, serve
    from telemetry.collect.series.identity import NODE_LABEL_STATE, SeriesCatalogue
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.staging.folder import StagingFolder, staging_of

    log_to_stderr()
    host, port = parse_listen(listen)
    refuse_open_port(host, has_tokens=tokens is not None)
    if tokens is None:
        tokens = own_token_file(dataset.with_name(f"{dataset.name}.receive-token"))
        typer.echo(f"writers need the token in {tokens}")
    channels = resolve_channels(read_params(params).channels)
    staging = StagingFolder(staging_of(dataset), writer="receive", channels=channels)
    catalogue = SeriesCatalogue(channels, load_source_mapping(mapping))
    catalogue.remember(staging.state(NODE_LABEL_STATE))
    receiver = Receiver(staging, ReceiverSettings(tokens=tokens), catalogue=catalogue)
    serve(receiver, host, port)
    show({"dataset": str(dataset)}, as_json=False, accounting=receiver.accounting)


@grouped
def collect_prometheus(
    *,
    prometheus: Annotated[
        str,
        typer.Option(
            envvar=PROMETHEUS,
            show_default=False,
            help="URL of Prometheus, Thanos, VictoriaMetrics or Mimir; required unless set in the environment.",
        ),
    ] = "",
    since: Annotated[str, typer.Option(help="Start time, such as 2026-01-01 or 90d (ago).")],
    until: Annotated[str, typer.Option(help="End time; at least two minutes ago.")],
    dataset: Annotated[Path, typer.Option(help="Dataset; rows are added to an existing dataset.")],
    mapping: Annotated[Path | None, typer.Option(help="Mapping file (YAML) for metrics, labels and units.")] = None,
    match: Annotated[str | None, typer.Option(help="Series selector, such as '{job=\"dcgm-exporter\"}'.")] = None,
    chunk: Annotated[str, typer.Option(help="Time span of one request; halved if the server refuses.")] = "6h",
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1, max=64)] = 4,
    access: ConnectionOptions,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Accept responses that the server marks as partial.")
    ] = False,
    inventory: Annotated[
        Path | None, typer.Option(help="Inventory of GPUs (Parquet or CSV); it overrides labels.")
    ] = None,
    no_compact: Annotated[
        bool, typer.Option("--no-compact", help="Leave the rows in DATASET.live for `collect compact`.")
    ] = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch raw samples from Prometheus and merge them into the dataset. Resumes after an interruption.

    Example: predrain collect prometheus --prometheus http://prom:9090 --since 2026-01-01 --until 2026-03-01
    --dataset fleet
    """
    from foundation.errors import InputError
    from pipeline.sources import compact_staged, refuse_removed
    from telemetry.accounting import Accounting
    from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.staging.folder import staging_of

    if not prometheus:
        raise InputError("no server is named", "--prometheus", f"Give its URL, or set {PROMETHEUS}.")
    if inventory is not None and no_compact:
        raise InputError(
            "the inventory is ignored",
            "--inventory with --no-compact",
            "Pass it to `predrain collect compact`.",
        )
    loaded = read_params(params)
    channels = resolve_channels(loaded.channels)
    plan = BackfillPlan(
        start=instant_option(since, "--since"),
        end=instant_option(until, "--until"),
        chunk=duration_option(chunk, "--chunk"),
        match=match,
        delay=loaded.features.delay,
        concurrency=concurrency,
        allow_partial=allow_partial,
    )
    connection = access.to_prometheus(prometheus)
    root = staging_of(dataset)
    refuse_removed(dataset)
    accounting = Accounting()
    with progress("fetching") as advance:
        report = {"dataset": str(dataset)} | backfill(
            connection,
            plan,
            root,
            channels=channels,
            mapping=load_source_mapping(mapping),
            accounting=accounting,
            progress=advance,
        )
    if not no_compact:
        with progress("compacting") as advance:
            result = compact_staged(dataset, loaded, inventory, advance)
        report["compacted files"] = dict(result.compacted)
        report["quarantined"] = dict(result.quarantined)
        report["waits for"] = result.waits_for or None
        accounting.add(result.accounting)
    show(report, as_json=as_json, accounting=accounting)
