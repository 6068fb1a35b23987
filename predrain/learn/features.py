"""``predrain features``: a dataset becomes a feature matrix."""

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import (
    DATASET_HELP,
    EngineOptions,
    JsonOption,
    ParamsOption,
    grouped,
    read_params,
    read_place,
)


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
    with engine.opened() as chosen, progress("features") as advance:
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
