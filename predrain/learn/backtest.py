"""``predrain backtest``: replay a dataset as if predrain had run on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.console import progress, show
from predrain.options import (
    DATASET_HELP,
    EngineOptions,
    JsonOption,
    ParamsOption,
    RecordOption,
    grouped,
    read_params,
    read_place,
    refuse_inside,
)

if TYPE_CHECKING:
    from foundation.place import Place


@grouped
def backtest(
    out: Annotated[Path, typer.Option(help="Output directory for metrics.json, predictions and report.")],
    dataset: Annotated[
        str | None, typer.Option(help=f"{DATASET_HELP}  Its features are written to OUT/matrix.")
    ] = None,
    matrix: Annotated[Path | None, typer.Option(help="Feature matrix, instead of a dataset.")] = None,
    truth: Annotated[
        Path | None,
        typer.Option(help="Truth of the simulator, for the evaluation only. Default: DATASET-truth, if it exists."),
    ] = None,
    params: ParamsOption = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Also fit and compare all other learners and combiners, the cascade, and static models. "
            "The predictions of the profile do not change.",
        ),
    ] = False,
    report: Annotated[bool, typer.Option(help="Write OUT/report/index.html.")] = True,
    registry: RecordOption = None,
    *,
    engine: EngineOptions,
    as_json: JsonOption = False,
) -> None:
    """Replay history: score each decision time with models fitted on data known then, and compare models.

    Example: predrain backtest --dataset fleet --out replay --full
    """
    if (dataset is None) == (matrix is None):
        raise typer.BadParameter("give either --dataset or --matrix")
    with engine.opened() as chosen:
        from features.matrix.matrix import FeatureMatrix
        from pipeline.matrix_stage import make_matrix
        from pipeline.report.terminal import summary_of
        from pipeline.stages import replay, write_report_for

        loaded = read_params(params)
        place = None if dataset is None else read_place(dataset, out)
        if place is not None:
            with progress("features") as advance:
                feature_matrix = make_matrix(place, loaded, out / "matrix", progress=advance, engine=chosen)
            truth = truth or _truth_beside(place)
        else:
            assert matrix is not None
            refuse_inside(out, matrix, "matrix")
            feature_matrix = FeatureMatrix.open(matrix)
        with progress("backtest") as advance:
            replay(
                feature_matrix, loaded, out, truth=truth, registry=registry, progress=advance, full=full, engine=chosen
            )
        if report:
            write_report_for(out)
        show(summary_of(out), as_json=as_json)


def _truth_beside(dataset: Place) -> Path | None:
    """Find the simulator's truth; it lies next to the folder of a dataset, and never in a bucket."""
    if not isinstance(dataset, Path):
        return None
    dataset = dataset.resolve()
    sibling = dataset.with_name(dataset.name + "-truth")
    return sibling if sibling.is_dir() else None
