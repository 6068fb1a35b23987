"""``predrain prepare``, ``features``, ``backtest`` and ``train``: the stages of ``dvc repro``, which also run alone."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import (
    DATASET_HELP,
    EngineOptions,
    JsonOption,
    ParamsOption,
    RecordOption,
    grouped,
    instant_option,
    read_params,
    read_place,
    refuse_inside,
)


def prepare(
    out: Annotated[Path, typer.Option(help="Dataset directory; the truth, if any, is written to OUT-truth.")],
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the demo fleet, or use the dataset of `data.dataset` in params.yaml.

    Example: predrain prepare --params params.yaml --out data/dataset
    """
    with progress("preparing") as advance:
        loaded = read_params(params)
        if loaded.data.dataset is not None:
            show(_take(Path(loaded.data.dataset), out), as_json=as_json)
            return
        from simulator.simulate import simulate

        show(simulate(out.resolve(), **dict(loaded.simulate), progress=advance), as_json=as_json)


def _take(source: Path, out: Path) -> dict[str, object]:
    """Hard-link an existing dataset to ``out`` (copy it across file systems), and its truth next to it."""
    from foundation.errors import InputError
    from foundation.files import FolderSwap, disk_errors, link_or_copy, refuse_other_content
    from telemetry.dataset.store import Dataset

    dataset = Dataset.open(source)
    source, out = source.resolve(), out.resolve()
    truth, truth_out = source.with_name(source.name + "-truth"), out.with_name(out.name + "-truth")
    for one, other in ((source, out), (truth, out), (source, truth_out)):
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise InputError(
                f"{one} and {other} are the same folder, or nested",
                "params.yaml data.dataset and --out",
                "Choose another folder.",
            )
    refuse_other_content(out, "dataset.json", "a dataset")
    refuse_other_content(truth_out, "truth.json", "the truth of a simulation")
    # DVC requires each output to exist; an empty folder means no truth
    for folder, copied in ((out, source), (truth_out, truth if truth.is_dir() else None)):
        with FolderSwap(folder) as swap, disk_errors(folder):
            if copied is not None:
                shutil.copytree(copied, swap.path, copy_function=link_or_copy, dirs_exist_ok=True)
            swap.commit()
    return {"dataset": str(out), "from": str(source), "counts": dataset.meta.counts}


@grouped
def features(
    dataset: Annotated[str, typer.Option(help=DATASET_HELP)],
    out: Annotated[Path, typer.Option(help="Output directory of the feature matrix.")],
    params: ParamsOption = None,
    *,
    engine: EngineOptions,
    as_json: JsonOption = False,
) -> None:
    """Compute the feature matrix: one row per GPU in service and decision time.

    Example: predrain features --dataset fleet --out matrix
    """
    with engine.open_engine() as chosen, progress("features") as advance:
        from pipeline.matrix_stage import make_matrix

        matrix = make_matrix(read_place(dataset, out), read_params(params), out, progress=advance, engine=chosen)
        in_maintenance = int(matrix.all_incidents()["in_maintenance"].sum())
        show(
            {
                "matrix": str(out),
                "rows": len(matrix.rows),
                "features": len(matrix.columns),
                "incidents": len(matrix.incidents()),
                "incidents_in_maintenance": in_maintenance,
            },
            as_json=as_json,
        )


@grouped
def backtest(
    out: Annotated[Path, typer.Option(help="Output directory for metrics.json, predictions and report.")],
    dataset: Annotated[str | None, typer.Option(help=f"{DATASET_HELP} Its features are written to OUT/matrix.")] = None,
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
    with engine.open_engine() as chosen:
        from features.matrix.matrix import FeatureMatrix
        from pipeline.matrix_stage import make_matrix
        from pipeline.report.terminal import summary_of
        from pipeline.sources import truth_beside
        from pipeline.stages import backtest_matrix, write_report_for

        loaded = read_params(params)
        place = None if dataset is None else read_place(dataset, out)
        if place is not None:
            with progress("features") as advance:
                feature_matrix = make_matrix(place, loaded, out / "matrix", progress=advance, engine=chosen)
            truth = truth or truth_beside(place)
        else:
            assert matrix is not None
            refuse_inside(out, matrix, "matrix")
            feature_matrix = FeatureMatrix.open(matrix)
        with progress("backtest") as advance:
            backtest_matrix(
                feature_matrix, loaded, out, truth=truth, registry=registry, progress=advance, full=full, engine=chosen
            )
        if report:
            write_report_for(out)
        show(summary_of(out), as_json=as_json)


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
        typer.Option(help="Backtest whose results go into the model card and set the tier thresholds."),
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
