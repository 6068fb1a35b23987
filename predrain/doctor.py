"""``predrain doctor``: what a telemetry source lacks and how to enable it; drift of a trained model."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.console import FAILED
from predrain.options import (
    ConnectionOptions,
    JsonOption,
    ParamsOption,
    duration_option,
    grouped,
    instant_option,
    prometheus_address,
    read_params,
)

if TYPE_CHECKING:
    from features.config import LabelSection
    from foundation.place import Place
    from telemetry.dataset.channels import Channel
    from telemetry.doctor.diagnosis import Observation

_BUNDLE = Path("data/models/candidate")


@grouped
def doctor(
    source: Annotated[
        str | None,
        typer.Argument(help="Exporter page (URL, host:port or saved file) or dataset (folder or s3://BUCKET/PREFIX)."),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            help="URL of a Prometheus, Thanos or VictoriaMetrics server, instead of SOURCE. Default: "
            "PREDRAIN_PROMETHEUS."
        ),
    ] = None,
    channels: Annotated[
        bool, typer.Option("--channels", help="Print the catalogue of channels (docs/reference/channels.md) and exit.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Trained bundle whose channels are required (default: data/models/candidate); with "
            "--matrix, the model to check for drift."
        ),
    ] = None,
    match: Annotated[
        str | None, typer.Option(help="With --prometheus: series selector, such as '{job=\"dcgm-exporter\"}'.")
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option(help="Mapping file (YAML) from metrics and labels to channels and units.")
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(help="With --model, instead of SOURCE: feature matrix with decisions after the fit."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="With --matrix: time of the check. Default: the end of the matrix.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(help="Timeout of one response. Default: 10s, for Prometheus 60s.")
    ] = None,
    *,
    access: ConnectionOptions,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a source of telemetry: available and missing channels, and how to enable them.

    With --model and --matrix, check a trained model for drift of fleet, telemetry, workload or failures.

    Exit code 0: every channel of the model is available and there is no drift; 1: a channel is missing or a check
    failed; 2: wrong usage.

    Example: predrain doctor http://node07:9400/metrics
    """
    prometheus = prometheus_address(prometheus, source, channels, matrix)
    if sum((source is not None, prometheus is not None, channels, matrix is not None)) != 1:
        raise typer.BadParameter("give one of SOURCE, --prometheus, --channels and --matrix")
    if matrix is None and until is not None:
        raise typer.BadParameter("requires --matrix", param_hint="--until")
    if matrix is not None:
        if model is None:
            raise typer.BadParameter("requires --model", param_hint="--matrix")
        sound = _drift(model, matrix, until, as_json=as_json)
        if not sound:
            raise typer.Exit(FAILED)
        return
    from telemetry.dataset.channels import resolve_channels

    settings = read_params(params)
    known = resolve_channels(settings.channels)
    if channels:
        from telemetry.doctor.groups import channels_page

        sys.stdout.write(channels_page(known))
        return
    timeout_s = None if timeout is None else duration_option(timeout, "--timeout").total_seconds()
    if prometheus is not None:
        from telemetry.collect.series.mapping import load_source_mapping
        from telemetry.doctor.series_source import observe_prometheus

        observation = observe_prometheus(
            access.to_prometheus(prometheus),
            channels=known,
            mapping=load_source_mapping(mapping),
            match=match,
            timeout_s=timeout_s or 60.0,
            now=datetime.now(UTC),
        )
    else:
        assert source is not None
        observation = _source(source, mapping, known, settings.labels, access, timeout_s or 10.0)
    healthy = _report(observation, model, known, as_json=as_json)
    if not healthy:
        raise typer.Exit(FAILED)


def _drift(model: Path, matrix: Path, until: str | None, *, as_json: bool) -> bool:
    import json

    from pipeline.health import check_health

    health = check_health(model, matrix, until=None if until is None else instant_option(until, "--until"))
    sys.stdout.write(json.dumps(health.to_json(), sort_keys=True) + "\n" if as_json else health.to_text())
    return health.healthy


def _source(
    source: str,
    mapping: Path | None,
    known: "Mapping[str, Channel]",
    labels: "LabelSection",
    access: ConnectionOptions,
    timeout_s: float,
) -> "Observation":
    from foundation.errors import InputError
    from foundation.place import place_of
    from telemetry.staging.folder import staging_of

    now = datetime.now(UTC)
    path = Path(source)
    if not path.exists() and "://" not in source and staging_of(path).is_dir():
        raise InputError(
            "the dataset does not exist yet; there are only staged files",
            source,
            f"Compact it first: `predrain collect compact --dataset {source}`.",
        )
    if source.startswith("s3://") or path.is_dir():
        from telemetry.doctor.dataset_source import observe_dataset

        place = place_of(source, "SOURCE")
        return _with_selection(observe_dataset(place, channels=known, now=now), place, labels)

    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.doctor.series_source import observe_file, observe_page

    source_mapping = load_source_mapping(mapping)
    if path.exists():
        return observe_file(path, channels=known, mapping=source_mapping, now=now)

    from telemetry.collect.scraping.targets import parse_target

    target = parse_target(source, "SOURCE, which is not a file")
    try:
        return observe_page(access.to(target.url), channels=known, mapping=source_mapping, timeout_s=timeout_s, now=now)
    except InputError as error:
        if ":" in source:
            raise
        problem = f"there is no file or folder {source!r}, and it is not the address of an exporter: {error.problem}"
        raise InputError(problem, error.location, "Check the path or the address.") from error


def _with_selection(observation: "Observation", place: "Place", labels: "LabelSection") -> "Observation":
    from dataclasses import replace

    from features.selection import examine_selection
    from telemetry.dataset.store import Dataset
    from telemetry.doctor.diagnosis import TelemetryFinding

    reasons = examine_selection(Dataset.open(place), labels)
    if not reasons:
        return observation
    problem = f"telemetry was collected because of failures: {'; '.join(reasons)}"
    advice = "Import all nodes over one period, whether they failed or not: until then `assess` returns 'cannot tell'."
    return replace(observation, findings=(TelemetryFinding(problem, advice), *observation.findings))


def _report(observation: "Observation", model: Path | None, known: "Mapping[str, Channel]", *, as_json: bool) -> bool:
    import json

    from foundation.errors import InputError
    from telemetry.doctor.diagnosis import as_dict, as_text, diagnose
    from telemetry.doctor.model_channels import read_used_channels

    if model is not None and not model.is_dir():
        raise InputError(f"there is no folder {model}", "--model", "Give the output of `predrain train`.")
    diagnosis = diagnose(
        observation, *read_used_channels(model or (_BUNDLE if _BUNDLE.is_dir() else None), known), known
    )
    sys.stdout.write(json.dumps(as_dict(diagnosis), sort_keys=True) + "\n" if as_json else as_text(diagnosis))
    return diagnosis.healthy
