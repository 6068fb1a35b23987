"""``predrain features``: a dataset becomes a feature matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import JsonOption, ParamsOption, params_files, progress, refuse_inside, reported, show


def features(
    dataset: Annotated[Path, typer.Option(help="Folder of a dataset.")],
    out: Annotated[Path, typer.Option(help="Folder of the feature matrix to write.")],
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the feature matrix: a row for each GPU in service at each decision time.

    Example: predrain features --dataset fleet --out matrix
    """
    with reported(), progress("features") as advance:
        from pipeline.matrix_stage import make_matrix
        from pipeline.params import load_params

        refuse_inside(out, dataset)
        matrix = make_matrix(dataset, load_params(params_files(params)), out, progress=advance)
        show(
            {
                "matrix": str(out),
                "rows": len(matrix.rows),
                "features": len(matrix.columns),
                "incidents": len(matrix.incidents()),
            },
            as_json=as_json,
        )


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("features")(features)
