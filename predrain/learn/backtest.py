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
    out: Annotated[
        Path, typer.Option(help="Folder for metrics.json, predictions.parquet, predictions_all.parquet, report/.")
    ],
    dataset: Annotated[
        str | None, typer.Option(help=f"{DATASET_HELP}  Its features are computed into OUT/matrix.")
    ] = None,
    matrix: Annotated[Path | None, typer.Option(help="Folder of a feature matrix, instead of a dataset.")] = None,
    truth: Annotated[
        Path | None,
        typer.Option(
            help="The simulator's truth, read by the evaluation only. Default: DATASET-truth next to it, if any."
        ),
    ] = None,
    params: ParamsOption = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Also fit and compare what the profile does not need: other learners and combiners, the cascade, and "
            "each model trained once. What the profile predicts stays the same.",
        ),
    ] = False,
    report: Annotated[bool, typer.Option(help="Also write OUT/report/.")] = True,
    registry: RecordOption = None,
    *,
    engine: EngineOptions,
    as_json: JsonOption = False,
) -> None:
    """Replay history: at each decision time, score with models fitted only on what was known then, and compare.

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
