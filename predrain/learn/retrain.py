"""``predrain retrain``: the newest fit in the champion's place, past a gate; once or on an interval."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import FAILED, progress, until_stopped
from predrain.learn.promote import recent_matrix, summary_text
from predrain.options import JsonOption, ParamsOption, RegistryOption, duration_option, read_params, store_uri


def retrain(
    dataset: Annotated[Path, typer.Option(help="Dataset; its features are written to DATASET-matrix.")],
    registry: RegistryOption = None,
    params: ParamsOption = None,
    interval: Annotated[str | None, typer.Option(help="Repeat at this interval, such as 7d, until SIGTERM.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Extend the features, refit to the end of the data, and promote the fit through a gate.

    With the parameters of the champion, the new fit goes live unless it is significantly worse.  Other parameters must
    pass the gate of `predrain promote` with a fit that excludes the newest two weeks.  The first fit goes live.

    DATASET-retrain.prom reports the outcome for node-exporter's textfile collector.  Exit code 0: the newest fit is
    champion.  Exit code 1: the gate rejected it, or the (last) round failed.

    Example: predrain retrain --dataset fleet --registry sqlite:///mlflow.db --interval 7d
    """
    pause = None if interval is None else duration_option(interval, "--interval", least="1s")
    failed = False
    for _ in [None] if pause is None else until_stopped(pause):
        try:
            failed = not _once(dataset, store_uri(registry), params, as_json)
        except Exception as error:
            if pause is None:
                raise
            failed = True
            sys.stderr.write(f"predrain retrain: round failed: {error}\n")
    if failed:
        raise typer.Exit(FAILED)


def _once(dataset: Path, registry: str, params: list[Path] | None, as_json: bool) -> bool:
    """Retrain; whether the champion is the newest fit."""
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
