"""``predrain train``: fit the models on the newest span of a feature matrix and save them as a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import JsonOption, ParamsOption, RecordOption, instant_option, read_params, refuse_inside


def train(
    matrix: Annotated[Path, typer.Option(help="Feature matrix.")],
    out: Annotated[Path, typer.Option(help="Output directory of the bundle.")],
    params: ParamsOption = None,
    registry: RecordOption = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Fit as of this time, with the labels known then; newer decisions remain unseen for "
            "`predrain promote`. Default: the end of the data."
        ),
    ] = None,
    backtest: Annotated[
        Path | None,
        typer.Option(help="Backtest with the measurements for the model card and the thresholds of the tiers."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit learners and ensembles to the end of the data, and save a bundle for scoring.

    Example: predrain train --matrix matrix --out bundle --registry sqlite:///mlflow.db
    """
    as_of = None if until is None else instant_option(until, "--until")
    from foundation.place import refuse_storage

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
            until=as_of,
            backtest=backtest,
            progress=advance,
        )
        show(summary, as_json=as_json)
