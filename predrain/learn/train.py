"""``predrain train``: fit the models on the newest span of a feature matrix and save them as a bundle."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import JsonOption, ParamsOption, RecordOption, read_params, refuse_inside


def train(
    matrix: Annotated[Path, typer.Option(help="Folder of a feature matrix.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle to write.")],
    params: ParamsOption = None,
    registry: RecordOption = None,
    until: Annotated[
        datetime | None,
        typer.Option(
            help="Fit as of this time (UTC), with labels as known then: the newest decisions stay untouched for "
            "`predrain promote`.  Default: the end of the data.",
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S%z"],
        ),
    ] = None,
    backtest: Annotated[
        Path | None, typer.Option(help="Output of a backtest whose measurements the model card shows.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit learners and ensembles as of the end of the data, and save the bundle that scoring loads.

    Example: predrain train --matrix matrix --out bundle --registry sqlite:///mlflow.db
    """
    if until is not None and until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    from telemetry.dataset.place import refuse_storage

    refuse_storage(out)
    refuse_storage(matrix)
    refuse_inside(out, matrix, "matrix")
    with progress("training") as advance:
        from features.matrix.matrix import FeatureMatrix
        from pipeline.stages import train_bundle

        summary = train_bundle(
            FeatureMatrix.open(matrix),
            read_params(params),
            out,
            registry=registry,
            until=until,
            backtest=backtest,
            progress=advance,
        )
        show(summary, as_json=as_json)
