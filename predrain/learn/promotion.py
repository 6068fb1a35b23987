"""``predrain promote`` and ``retrain``: replace the champion with a new fit, through a gate."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foundation.text import quantity
from predrain.console import FAILED, progress, until_stopped
from predrain.options import (
    JsonOption,
    ModelNameOption,
    ParamsOption,
    RegistryOption,
    duration_option,
    read_params,
    store_uri,
)

if TYPE_CHECKING:
    from features.matrix.matrix import FeatureMatrix
    from pipeline.params import Params
    from pipeline.promotion import PromotionResult


def promote(
    dataset: Annotated[
        Path | None, typer.Option(help="Dataset with recent data; its features are written to DATASET-matrix.")
    ] = None,
    matrix: Annotated[Path | None, typer.Option(help="Feature matrix, instead of a dataset.")] = None,
    registry: RegistryOption = None,
    name: ModelNameOption = "predrain",
    to: Annotated[int | None, typer.Option(help="Version to promote. Default: the challenger.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Evaluate only; change and record nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Promote regardless of the gate; requires --reason.")] = False,
    reason: Annotated[str, typer.Option(help="Reason for --force or --rollback, recorded in the registry.")] = "",
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Restore the previous champion. Repeat to go further back.")
    ] = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare champion and challenger on unseen recent decisions; promote through a gate.

    Exit code 0: the champion was changed. Exit code 1: the gate rejected the challenger, or an error occurred. Exit
    code 2: wrong usage.

    Example: predrain promote --dataset fleet --registry sqlite:///mlflow.db
    """
    _refuse_nonsense(dataset, matrix, to, force, reason, rollback)
    from pipeline.promotion import promote as run_promote
    from pipeline.promotion import roll_back

    store = store_uri(registry)
    if rollback:
        decision = roll_back(registry=store, model=name, dry_run=dry_run, reason=reason)
    else:
        loaded = read_params(params)
        compared = dataset is not None or matrix is not None
        decision = run_promote(
            (lambda: recent_matrix(dataset, matrix, loaded)) if compared else None,
            loaded,
            registry=store,
            model=name,
            to=to,
            dry_run=dry_run,
            force_reason=reason if force else None,
        )
    sys.stdout.write(json.dumps(decision.to_json(), sort_keys=True) + "\n" if as_json else summary_text(decision))
    if not decision.done:
        raise typer.Exit(FAILED)


def _refuse_nonsense(
    dataset: Path | None, matrix: Path | None, to: int | None, force: bool, reason: str, rollback: bool
) -> None:
    if rollback and (dataset is not None or matrix is not None or to is not None or force):
        raise typer.BadParameter("--rollback takes no --dataset, --matrix, --to or --force: it goes back one step")
    if force and not reason.strip():
        raise typer.BadParameter("--force requires --reason")
    if dataset is not None and matrix is not None:
        raise typer.BadParameter("give either --dataset or --matrix")
    if not rollback and not force and dataset is None and matrix is None:
        raise typer.BadParameter("give either --dataset or --matrix: the gate compares on recent data")


def recent_matrix(dataset: Path | None, matrix: Path | None, params: "Params") -> "FeatureMatrix":
    """Open a matrix, or build or extend the one next to a dataset."""
    from features.matrix.matrix import FeatureMatrix
    from pipeline.matrix_stage import make_matrix

    if dataset is None:
        assert matrix is not None
        return FeatureMatrix.open(matrix)
    dataset = dataset.resolve()
    with progress("features") as advance:
        return make_matrix(dataset, params, dataset.with_name(dataset.name + "-matrix"), progress=advance)


def summary_text(decision: "PromotionResult") -> str:
    """Format the decision: the table of criteria, then the outcome."""
    from pipeline.report.tables import Cell, Table

    lines = []
    verdict = decision.verdict
    if verdict is not None:
        lines.append(
            f"{verdict.challenger} against {verdict.champion}: {quantity(verdict.rows, 'decision')} "
            f"on {quantity(verdict.nodes, 'node')}, "
            f"{verdict.first_time:%Y-%m-%d %H:%M} to {verdict.last_time:%Y-%m-%d %H:%M} UTC, "
            f"{quantity(verdict.incidents, 'incident')}, {quantity(verdict.k, 'alert')} per decision time"
        )
        rows = (
            (c.name, c.against, _number(c.champion), _number(c.challenger), c.limit, c.outcome, c.why)
            for c in verdict.criteria
        )
        header = ("criterion", "against", "other", "challenger", "limit", "", "finding")
        cells = tuple(tuple(map(Cell, row)) for row in rows)
        lines += Table("", header, cells, text_columns=frozenset(range(len(header)))).lines()
    lines += [f"note: {note}" for note in decision.notes]
    lines.append(_sentence(decision))
    return "\n".join(lines) + "\n"


def _sentence(decision: "PromotionResult") -> str:
    name = f"{decision.model} version {decision.version}"
    conditional = "would be " if decision.dry_run else ""
    previous = "none" if decision.champion_before is None else f"version {decision.champion_before}"
    verdict = decision.verdict
    if decision.action == "refused":
        reasons = decision.reason or "; ".join(() if verdict is None else verdict.reasons)
        return f"{name} {conditional or 'was '}rejected; champion: {previous}. {reasons}"
    if decision.action == "kept":
        return f"{name} is already the champion"
    if decision.action == "rolled back":
        return f"{name} {conditional or 'was '}rolled back to version {decision.champion}"
    manner = ""
    if decision.action == "forced":
        manner = f" by force ({decision.reason})"
    elif verdict is not None and verdict.passed:
        manner = " through the gate"
    return f"{name} {conditional or 'was '}promoted{manner}; previous champion: {previous}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def retrain(
    dataset: Annotated[Path, typer.Option(help="Dataset; its features are written to DATASET-matrix.")],
    registry: RegistryOption = None,
    params: ParamsOption = None,
    interval: Annotated[str | None, typer.Option(help="Repeat at this interval, such as 7d, until SIGTERM.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Extend the features, refit to the end of the data, and promote the fit through a gate.

    With the parameters of the champion, the new fit is promoted unless it fails a criterion of the gate. Other
    parameters must pass the gate of `predrain promote` with a fit that excludes the newest two weeks. The first fit is
    promoted.

    DATASET-retrain.prom reports the outcome for node-exporter's textfile collector. Exit code 0: the newest fit is
    champion. Exit code 1: the gate rejected it, or the (last) round failed.

    Example: predrain retrain --dataset fleet --registry sqlite:///mlflow.db --interval 7d
    """
    pause = None if interval is None else duration_option(interval, "--interval", least="1s")
    failed = False
    for _ in until_stopped(pause):
        try:
            failed = not _retrain_once(dataset, store_uri(registry), params, as_json)
        except Exception as error:
            if pause is None:
                raise
            failed = True
            sys.stderr.write(f"predrain retrain: round failed: {error}\n")
    if failed:
        raise typer.Exit(FAILED)


def _retrain_once(dataset: Path, registry: str, params: list[Path] | None, as_json: bool) -> bool:
    """Retrain; return whether the newest fit is the champion."""
    from foundation.files import write_bytes
    from pipeline.retraining import page_of
    from pipeline.retraining import retrain as run
    from pipeline.stages import MODEL

    started_at, decision = datetime.now(UTC), None
    loaded = read_params(params)
    try:
        matrix = recent_matrix(dataset, None, loaded)
        with progress("retraining") as advance:
            decision = run(matrix, loaded, registry=registry, model=MODEL, progress=advance)
    finally:
        write_bytes(dataset.with_name(f"{dataset.name}-retrain.prom"), page_of(started_at, decision).encode())
    sys.stdout.write(json.dumps(decision.to_json(), sort_keys=True) + "\n" if as_json else summary_text(decision))
    sys.stdout.flush()
    return decision.done
