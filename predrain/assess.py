"""``predrain assess``: whether a fleet's failures are predictable, and what acting on risks would have saved."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.act.assembly import SchedulerKind
from predrain.console import FAILED, Stages, print_json
from predrain.import_files import tables_of
from predrain.options import (
    DATASET_HELP,
    ConnectionOptions,
    JsonOption,
    ParamsOption,
    duration_option,
    grouped,
    instant_option,
    params_files,
    prometheus_address,
    read_params,
    read_place,
)

if TYPE_CHECKING:
    import pandas as pd

    from foundation.http import Connection
    from pipeline.params import Params
    from telemetry.accounting import Accounting
    from telemetry.importing.suggestion.questions import Tables


@grouped
def assess(
    dataset: Annotated[str | None, typer.Option(help=DATASET_HELP)] = None,
    samples: Annotated[
        list[Path] | None, typer.Option(help="Sample files, as for `predrain import`, instead of a dataset.")
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            help="URL of a Prometheus, Thanos or VictoriaMetrics server, instead of a dataset. Default: "
            "PREDRAIN_PROMETHEUS."
        ),
    ] = None,
    since: Annotated[
        str, typer.Option(help="With --prometheus: start of the history, as an age (90d) or a time.")
    ] = "90d",
    match: Annotated[
        str | None, typer.Option(help="With --prometheus: series selector, such as '{cluster=\"a\"}'.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option(help="Inventory of GPUs (Parquet or CSV). Default: derived from the samples.")
    ] = None,
    events: Annotated[list[Path] | None, typer.Option(help="Tickets and other events: Parquet or CSV.")] = None,
    kernel_log: Annotated[list[Path] | None, typer.Option(help="Kernel logs (.log, .txt, .jsonl).")] = None,
    jobs: Annotated[Path | None, typer.Option(help="Jobs with their nodes and times (Parquet or CSV).")] = None,
    mapping: Annotated[
        list[Path] | None,
        typer.Option(help="Mapping file (YAML) for columns or for Prometheus metrics; at most one of each."),
    ] = None,
    checkpoint_every: Annotated[
        str, typer.Option(help="Checkpoint interval of jobs, if the jobs table has no column for it.")
    ] = "1h",
    checkpoint_on_request: Annotated[
        bool, typer.Option(help="Whether jobs write a checkpoint on request before a drain.")
    ] = True,
    gpus_per_job: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a typical training job; replaces the jobs of the dataset.")
    ] = None,
    largest_job: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum GPUs of a job; draws job sizes from a real trace and replaces the jobs of the dataset."
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Duration of a checkpoint on request.")] = "5m",
    restart: Annotated[str, typer.Option(help="Time to restart a job on other nodes.")] = "15m",
    diagnostic: Annotated[str, typer.Option(help="Duration of the diagnostic of an evacuated node.")] = "2h",
    probe: Annotated[str, typer.Option(help="Duration of the diagnostic of an idle node.")] = "15m",
    spare_nodes: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of nodes out of service at once. Default: a tenth of the nodes."),
    ] = None,
    *,
    access: ConnectionOptions,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("assessment"),
    scheduler: Annotated[
        SchedulerKind | None,
        typer.Option(help="Scheduler for OUT/act.yaml. Default: a prompt on a terminal, else kubernetes."),
    ] = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Assess a fleet: are failures predictable, and what would acting have saved? Read-only.

    Example: predrain assess --dataset fleet
    """
    prometheus = prometheus_address(prometheus, dataset, samples, inventory)
    files = bool(samples or (inventory and prometheus is None))
    if sum((dataset is not None, prometheus is not None, files)) != 1:
        raise typer.BadParameter("give one of --dataset, --prometheus, and --samples (or --inventory with --events)")
    logs = [*(events or ()), *(kernel_log or ())]
    if dataset is not None and (logs or jobs or inventory or mapping):
        raise typer.BadParameter("cannot be combined with --dataset, which has its own")
    from evaluation.value.ladder import Assumptions
    from pipeline.assessment.workflow import assess_fleet
    from pipeline.sources import Work, import_tables, truth_beside
    from policy.ladder.cost_benefit import CostBenefitConfig
    from policy.ladder.probes import ProbeConfig
    from telemetry.dataset.store import Dataset

    if scheduler is None and sys.stdin.isatty() and not as_json:
        scheduler = _asked_scheduler()
    assumed = Assumptions(
        CostBenefitConfig(
            checkpoint_every=duration_option(checkpoint_every, "--checkpoint-every", least="1s"),
            checkpoint=duration_option(checkpoint, "--checkpoint"),
            restart=duration_option(restart, "--restart"),
            verify=duration_option(diagnostic, "--diagnostic", least="1s"),
        ),
        ProbeConfig(duration=duration_option(probe, "--probe", least="1s")),
        gpus_per_job,
        checkpoint_on_request,
        spare_nodes,
        largest_job,
    )
    loaded = read_params(params)
    own_dataset = out / "dataset"
    of_files, of_metrics = _mappings(mapping or (), metrics=prometheus is not None)
    tables = tables_of(samples, logs, inventory, jobs)
    stages = Stages()
    account: Accounting | None = None
    with stages:
        if prometheus is not None:
            connection = access.to_prometheus(prometheus)
            account = _from_prometheus(connection, since, match, tables, of_files, of_metrics, out, loaded, stages)
        elif dataset is None:
            _ask_first(tables, of_files, loaded, out, None)
            begin = stages.begin("importing")
            account = import_tables(tables, own_dataset, loaded, mapping=of_files, progress=begin).accounting
        place = read_place(dataset or str(own_dataset), out if dataset else out / "matrix")
        sys.stderr.write(f"predrain: {Work.of_dataset(Dataset.open(place).meta, loaded)}\n")
        content = assess_fleet(
            place,
            loaded,
            out,
            assumed=assumed,
            truth=truth_beside(place),
            begin=stages.begin,
            scheduler=(scheduler or SchedulerKind.KUBERNETES).value,
        )
    _show(content, account, out, dataset or str(own_dataset), params_files(params), as_json=as_json)


def _asked_scheduler() -> SchedulerKind:
    kinds = [kind.value for kind in SchedulerKind]
    answer = typer.prompt(f"Which scheduler runs the nodes ({', '.join(kinds)})", default="kubernetes", err=True)
    if answer not in kinds:
        raise typer.BadParameter(f"{answer!r} is not one of {', '.join(kinds)}", param_hint="--scheduler")
    return SchedulerKind(answer)


def _from_prometheus(
    connection: "Connection",
    since: str,
    match: str | None,
    tables: "Tables",
    mapping: Path | None,
    metrics: Path | None,
    out: Path,
    params: "Params",
    stages: Stages,
) -> "Accounting":
    """Check the files, then fetch the history and import the files into the same dataset; return the accounting."""
    from pipeline.sources import Work, fetch_history, import_tables, inventory_of, keep_period, known_gpus, period_of
    from telemetry.collect.prometheus.preview import preview_backfill
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels

    plan = period_of(out, connection, since, match, lambda end: instant_option(since, "--since", end))
    source_mapping = load_source_mapping(metrics)
    channels = resolve_channels(params.channels)
    preview = preview_backfill(connection, plan, channels=channels, mapping=source_mapping, now=datetime.now(UTC))
    given_tables = {role: paths for role, paths in tables.items() if role != "inventory"}
    _ask_first(given_tables, mapping, params, out, known_gpus(preview, plan.start))
    keep_period(out, connection, since, plan)
    work = Work.of_history(preview, plan, params)
    facts = "; ".join(f"{name}: {fact}" for name, fact in preview.facts.items())
    sys.stderr.write(f"predrain: {work}\npredrain: {facts}\n")
    dataset, inventory = out / "dataset", next(iter(tables.get("inventory", ())), None)
    account = fetch_history(
        connection,
        plan,
        dataset,
        params,
        mapping=source_mapping,
        begin=stages.begin,
        measured=lambda rate: sys.stderr.write(
            f"predrain: estimate after the first chunk: {work.measured(rate).time_text} remaining\n"
        ),
        inventory=inventory,
    ).accounting
    if any(given_tables.values()):
        given_tables["inventory"] = [inventory_of(dataset, out / "inventory.parquet")]
        imported = import_tables(given_tables, dataset, params, mapping=mapping, progress=stages.begin("importing"))
        account.add(imported.accounting)
    return account


def _ask_first(
    tables: "Tables", mapping: Path | None, params: "Params", out: Path, known: "pd.DataFrame | None"
) -> None:
    """Report all questions that an import of the files raises, and exit if there are any."""
    from pipeline.sources import check_sources
    from telemetry.importing.suggestion.trial import write_inquiry

    if not any(tables.values()):
        return
    inquiry = check_sources(tables, mapping, params, known=known)
    if not inquiry.is_clear:
        sys.stderr.write(inquiry.report(write_inquiry(inquiry, out)))
        raise typer.Exit(FAILED)


def _show(
    content: dict[str, Any], account: "Accounting | None", out: Path, dataset: str, params: list[Path], *, as_json: bool
) -> None:
    """Write the page, and print the verdict; the accounting is a table on stderr, or part of the JSON."""
    from pipeline.assessment.text import verdict_text, write_page
    from telemetry.accounting import as_text

    write_page(content, out, dataset, params)
    if as_json:
        print_json(content if account is None else content | {"accounting": account.as_dict()})
        return
    sys.stdout.write(verdict_text(content, out, dataset, params))
    if account is not None:
        sys.stderr.write(as_text(account))


def _mappings(paths: Sequence[Path], *, metrics: bool) -> tuple[Path | None, Path | None]:
    """Distinguish the mapping of files from that of metrics, if allowed, by their keys."""
    from foundation.settings import settings_content
    from telemetry.importing.mapping import ImportMapping

    by_kind: dict[bool, Path] = {}
    for path in paths:
        content = settings_content(path) if metrics else None
        of_files = not isinstance(content, dict) or not content.keys().isdisjoint(ImportMapping.model_fields)
        if of_files in by_kind:
            raise typer.BadParameter("give at most one mapping of columns and one of metrics", param_hint="--mapping")
        by_kind[of_files] = path
    return by_kind.get(True), by_kind.get(False)
