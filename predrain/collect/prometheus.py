"""``predrain collect prometheus``: the history that a Prometheus server has, into a dataset."""

from pathlib import Path
from typing import Annotated

import typer

from predrain.collect.compact import compact_once
from predrain.console import progress, show
from predrain.options import (
    PROMETHEUS,
    ConnectionOptions,
    JsonOption,
    ParamsOption,
    duration_option,
    grouped,
    instant_option,
    read_params,
)


@grouped
def collect_prometheus(
    prometheus: Annotated[
        str,
        typer.Option(envvar=PROMETHEUS, help="URL of the server (Prometheus, Thanos, VictoriaMetrics or Mimir)."),
    ],
    since: Annotated[str, typer.Option(help="Start time, such as 2026-01-01 or 90d (ago).")],
    until: Annotated[str, typer.Option(help="End time; at least two minutes ago.")],
    dataset: Annotated[Path, typer.Option(help="Dataset; rows are added to an existing dataset.")],
    mapping: Annotated[Path | None, typer.Option(help="Mapping file (YAML) for metrics, labels and units.")] = None,
    match: Annotated[str | None, typer.Option(help="Series selector, such as '{job=\"dcgm-exporter\"}'.")] = None,
    chunk: Annotated[str, typer.Option(help="Time span of one request; halved if the server refuses.")] = "6h",
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1, max=64)] = 4,
    *,
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
    """Fetch raw samples with their timestamps and merge them into the dataset. Resumes after an interruption.

    Example: predrain collect prometheus --prometheus http://prom:9090 --since 2026-01-01 --until 2026-03-01
    --dataset fleet
    """
    from foundation.errors import InputError
    from pipeline.sources import refuse_removed
    from telemetry.accounting import Accounting
    from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.landing.folder import landing_of

    if inventory is not None and no_compact:
        raise InputError(
            "the inventory would not be read",
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
    root = landing_of(dataset)
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
        result = compact_once(dataset, loaded, inventory)
        report["compacted files"] = dict(result.compacted)
        report["quarantined"] = dict(result.quarantined)
        report["waits for"] = result.waits_for or None
        accounting.add(result.accounting)
    show(report, as_json=as_json, accounting=accounting)
