"""``predrain assess``: whether a fleet's failures are predictable, and what acting on risks would have saved it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from predrain.collect.prometheus import collect_prometheus
from predrain.console import FAILED, print_json, progress
from predrain.import_files import import_files, tables_of, write_suggestion
from predrain.options import (
    DATASET_HELP,
    BasicAuthOption,
    BearerTokenOption,
    CaFileOption,
    ClientCertOption,
    ClientKeyOption,
    HeaderOption,
    JsonOption,
    ParamsOption,
    SkipVerifyOption,
    duration_option,
    instant_option,
    params_files,
    prometheus_address,
    prometheus_token,
    read_params,
    read_place,
)

if TYPE_CHECKING:
    from foundation.http import Connection
    from pipeline.params import Params
    from telemetry.dataset.meta import DatasetMeta


def assess(
    dataset: Annotated[str | None, typer.Option(help=DATASET_HELP)] = None,
    samples: Annotated[
        list[Path] | None, typer.Option(help="Instead of a dataset: samples, as `predrain import` takes them.")
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            help="Instead of a dataset: address of a Prometheus, Thanos or VictoriaMetrics.  Default: "
            "PREDRAIN_PROMETHEUS."
        ),
    ] = None,
    since: Annotated[str, typer.Option(help="With --prometheus: how much history is fetched, or from when.")] = "90d",
    match: Annotated[
        str | None, typer.Option(help="With --prometheus: take only series that match, such as '{cluster=\"a\"}'.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option(help="Who was where, when: Parquet or CSV.  Files without a Prometheus need it.")
    ] = None,
    events: Annotated[list[Path] | None, typer.Option(help="Tickets and other events: Parquet or CSV.")] = None,
    kernel_log: Annotated[list[Path] | None, typer.Option(help="Kernel logs (.log, .txt, .jsonl).")] = None,
    jobs: Annotated[Path | None, typer.Option(help="What ran where: Parquet or CSV.")] = None,
    mapping: Annotated[
        list[Path] | None,
        typer.Option(help="YAML file that maps your columns, or a Prometheus' metrics, units and zone; one of each."),
    ] = None,
    checkpoint_every: Annotated[
        str, typer.Option(help="How often a job writes a checkpoint, where its table does not tell.")
    ] = "1h",
    checkpoint_on_request: Annotated[
        bool, typer.Option(help="Whether a job writes a checkpoint when it is asked to, before it is moved.")
    ] = True,
    gpus_per_job: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a typical training job. Instead of the dataset's jobs, if any.")
    ] = None,
    bearer_token_file: BearerTokenOption = None,
    basic_auth_file: BasicAuthOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
    client_key: ClientKeyOption = None,
    insecure_skip_verify: SkipVerifyOption = False,
    header: HeaderOption = None,
    out: Annotated[Path, typer.Option(help="Folder of all that is written.")] = Path("assessment"),
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer whether failures are predictable here, and what predrain would have saved. Reads, and acts on nothing.

    Example: predrain assess --dataset fleet
    """
    prometheus = prometheus_address(prometheus, dataset, samples, inventory)
    files = bool(samples or (inventory and prometheus is None))
    if sum((dataset is not None, prometheus is not None, files)) != 1:
        raise typer.BadParameter("give one of --dataset, --prometheus, and --samples with --inventory")
    logs = [*(events or ()), *(kernel_log or ())]
    if dataset is not None and (logs or jobs or inventory or mapping):
        raise typer.BadParameter("files go with --samples or --prometheus; a dataset has its own")
    if files and inventory is None:
        raise typer.BadParameter("who was where must be known: give --inventory", param_hint="--samples")
    from foundation.http import connect_to
    from pipeline.assessment import assess_fleet
    from policy.cost_benefit import CostBenefitConfig
    from telemetry.dataset.store import Dataset
    from telemetry.importing.importer import expected_rows
    from telemetry.importing.reading import expand_sources

    every = _more_than_0(duration_option(checkpoint_every, "--checkpoint-every"))
    loaded = read_params(params)
    made = out / "dataset"
    of_files, of_metrics = _mappings(mapping or (), metrics=prometheus is not None)
    _refuse_unknown(tables_of(samples, logs, inventory, jobs), of_files, out, loaded, params)
    if prometheus is not None:
        access: dict[str, Any] = {
            "bearer_token_file": prometheus_token(bearer_token_file, basic_auth_file),
            "basic_auth_file": basic_auth_file,
            "ca_file": ca_file,
            "client_cert": client_cert,
            "client_key": client_key,
            "insecure_skip_verify": insecure_skip_verify,
        }
        connection = connect_to(prometheus, option="--prometheus", headers=header or (), **access)
        start, end = _period(connection, since, match, out, of_metrics, loaded)
        with redirect_stdout(sys.stderr):
            collect_prometheus(
                prometheus,
                start,
                end,
                made,
                of_metrics,
                match,
                header=header,
                inventory=inventory,
                params=params,
                **access,
            )
        if logs or jobs:
            inventory = out / "inventory.parquet"
            Dataset.open(made).inventory().to_parquet(inventory, index=False)
    elif files:
        rows = expected_rows(expand_sources(tuple(samples or ()), "samples"))
        _announce(f"about {rows:,} samples", rows, loaded, rows / _IMPORTED)
    if inventory is not None and (files or logs or jobs):
        with redirect_stdout(sys.stderr):
            import_files(inventory, made, samples, logs, jobs, of_files, params=params)
    place = read_place(dataset or str(made), out if dataset else out / "matrix")
    if dataset is not None:
        _announce_dataset(Dataset.open(place).meta, loaded)
    with ExitStack() as shown:

        def begin(stage: str) -> Callable[[int, int], None]:
            shown.close()
            return shown.enter_context(progress(stage))

        beside = place.resolve().with_name(f"{place.name}-truth") if isinstance(place, Path) else None
        content = assess_fleet(
            place,
            loaded,
            out,
            costs=CostBenefitConfig(checkpoint_every=every),
            truth=beside if beside is not None and beside.is_dir() else None,
            begin=begin,
            gpus_per_job=gpus_per_job,
            checkpoint_on_request=checkpoint_on_request,
        )
    _show(content, out, dataset or str(made), params_files(params), as_json=as_json)


def _show(content: dict[str, Any], out: Path, dataset: str, params: list[Path], *, as_json: bool) -> None:
    """Write the page, and print the verdict."""
    from pipeline.assessment_page import write_page
    from pipeline.assessment_text import verdict_text

    write_page(content, out, dataset, params)
    if as_json:
        print_json(content)
    else:
        sys.stdout.write(verdict_text(content, out, dataset, params))


def _more_than_0(every: timedelta) -> timedelta:
    if not every:
        raise typer.BadParameter("give more than 0", param_hint="--checkpoint-every")
    return every


def _mappings(paths: Sequence[Path], *, metrics: bool) -> tuple[Path | None, Path | None]:
    """Tell the mapping of files from that of metrics, if there may be one, by their keys."""
    from telemetry.importing.mapping import ImportMapping, mapping_content

    found: dict[bool, Path] = {}
    for path in paths:
        content = mapping_content(path) if metrics else None
        of_files = not isinstance(content, dict) or not content.keys().isdisjoint(ImportMapping.model_fields)
        if of_files in found:
            raise typer.BadParameter("give one of columns and one of metrics at most", param_hint="--mapping")
        found[of_files] = path
    return found.get(True), found.get(False)


def _refuse_unknown(
    tables: Mapping[str, Sequence[Path]],
    mapping: Path | None,
    out: Path,
    loaded: Params,
    params: list[Path] | None,
) -> None:
    """Write a mapping for review where columns are not known, and end; nothing is imported by a guess."""
    from telemetry.dataset.channels import resolve_channels
    from telemetry.importing.mapping import load_mapping
    from telemetry.importing.suggestion import suggest

    guesses = suggest(tables, load_mapping(mapping), resolve_channels(loaded.channels))
    if any(guess.role != "inventory" for guess in guesses):
        names = ["mapping.yaml", *(f"mapping-{number}.yaml" for number in range(2, 1000))]
        write_suggestion(tables, mapping, next(out / name for name in names if not (out / name).exists()), params)
        raise typer.Exit(FAILED)


_IMPORTED: Final = 400e3
_FETCHED: Final = 1e6
"""Samples imported, and values fetched, a second: as measured on two cores, and less than a server near by gives."""


def _announce_dataset(meta: DatasetMeta, params: Params) -> None:
    name, samples = {"gpu": "GPUs", "node": "nodes"}[meta.unit], int(meta.counts["samples"])
    size, days = int(meta.counts[f"{meta.unit}s"]), (meta.span[1] - meta.span[0]).days
    _announce(f"{size:,} {name}, {samples:,} samples of {days:,} days", samples, params)


def _announce(what: str, samples: int, params: Params, before_s: float = 0.0) -> None:
    """Say how large the work is, and about how long it takes on two cores, before it begins."""
    from telemetry.importing.sampling import STEPS

    rows = samples * ((params.telemetry.step or STEPS[0]) / params.decision.every)
    minutes = 0.5 + before_s / 60 + samples / 30e6 + rows / 500e3
    gigabytes = (rows * 400 + samples * 15) / 1e9
    told = f"{minutes:.0f} minutes" if minutes >= 1.5 else "a minute"
    sys.stderr.write(f"predrain: {what}: about {told} on two cores, and {gigabytes:.1f} GB of disk\n")


def _period(
    connection: Connection, since: str, match: str | None, out: Path, mapping: Path | None, params: Params
) -> tuple[str, str]:
    """Give the period to fetch, that of the first run where another goes on with it, and say how much that is."""
    import json

    from foundation.files import write_bytes
    from telemetry.collect.prometheus.backfill import BackfillPlan, outlook
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.importing.sampling import STEPS

    period, wanted = out / "prometheus.json", {"url": connection.url, "since": since, "match": match}
    held = json.loads(period.read_text(encoding="utf-8")) if period.is_file() else {}
    if any(held.get(key) != value for key, value in wanted.items()):
        held = wanted | {"end": (datetime.now(UTC) - timedelta(minutes=5)).isoformat()}
    end = datetime.fromisoformat(held["end"])
    plan = BackfillPlan(start=instant_option(since, "--since", end), end=end, match=match)
    channels = resolve_channels(params.channels)
    gpus, values = outlook(connection, plan, channels=channels, mapping=load_source_mapping(mapping))
    out.mkdir(parents=True, exist_ok=True)  # only now that the server has answered
    write_bytes(period, json.dumps(held).encode())
    span = plan.end - plan.start
    samples = int(gpus * (span / (params.telemetry.step or STEPS[0])))
    _announce(f"{gpus:,} GPUs, at most {values:,} values of {span.days:,} days", samples, params, values / _FETCHED)
    return plan.start.isoformat(), plan.end.isoformat()
