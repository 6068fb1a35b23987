"""``predrain prior``: build a prior, the model of many simulated fleets that a fleet's own models can start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.console import progress, show
from predrain.options import JsonOption

if TYPE_CHECKING:
    import numpy as np

    from simulator.draws import DrawnFleet

prior_app = typer.Typer(
    name="prior", help="Build a model of other fleets to start from.", no_args_is_help=True, add_completion=False
)

GROUPS = ("history", "peers", "onset", "gaps")
"""Feature groups that mean the same on another fleet: compared with the past, the peers or the cadence."""

_NEGATIVE_RATIO = 20


@prior_app.callback()
def options() -> None:
    """Make the verb a group, which one command alone would not be."""


@prior_app.command("build")
def build(
    out: Annotated[Path, typer.Option(help="Folder of the prior to write; replaced if it is one already.")],
    fleets: Annotated[int, typer.Option(help="Number of fleets to simulate.", min=1)] = 48,
    gpus: Annotated[int, typer.Option(help="GPUs of each fleet.", min=8)] = 256,
    days: Annotated[int, typer.Option(help="Length of each fleet in days.", min=14)] = 60,
    seed: Annotated[int, typer.Option(help="Seed; the same arguments give the same bytes.", min=0)] = 7,
    as_json: JsonOption = False,
) -> None:
    """Simulate fleets whose parameters are drawn at random, and fit one model on all of them.

    Name the folder in `training.prior`, and `predrain backtest` and `predrain train` start from it.

    Example: predrain prior build --out prior --fleets 48
    """
    import numpy as np

    from models.learners.prior import CARD, fit_prior, write_prior
    from simulator.draws import FACTORS, VALUES, draw_fleet
    from telemetry.atomic import FolderSwap, disk_errors
    from telemetry.errors import InputError

    if out.exists() and not (out / CARD).is_file():
        raise InputError(f"{out} exists and is no prior", "--out", "Choose another folder, or remove this one.")
    made_of = {"fleets": fleets, "gpus": gpus, "days": days, "seed": seed}
    with progress("fleets") as advance, FolderSwap(out) as swap:
        parts = []
        for number in range(fleets):
            columns, rows = _rows(draw_fleet(seed, number), gpus, days, swap.path)
            parts.append(rows)
            advance(number + 1, fleets)
        values, label, weight, incident = map(np.concatenate, zip(*parts, strict=True))
        if not label.any():
            raise InputError("no failure in any fleet", "--fleets, --gpus, --days", "Give more of them.")
        counted = {"incidents": int(incident.sum()), "positive_rows": int(label.sum()), "rows": len(label)}
        drawn = {"factors": FACTORS, "values": VALUES}
        prior = fit_prior(values, label, weight, columns, seed=seed, made_of=made_of | counted | drawn)
        with disk_errors(out):
            write_prior(prior, swap.path)
        swap.commit()
    show({"prior": str(out), **made_of, **counted}, as_json=as_json)


def _rows(fleet: DrawnFleet, gpus: int, days: int, work: Path) -> tuple[list[str], list[np.ndarray]]:
    """Simulate a fleet in a folder, and give its columns; values, labels and weights to fit on, number of incidents."""
    import numpy as np

    from features.times import instant_ms
    from models.rows.training_set import Labels, Rows, choose_rows
    from pipeline.matrix_stage import make_matrix
    from pipeline.params import Params
    from simulator.simulate import simulate

    simulate(
        work / "dataset",
        gpus=gpus,
        days=days,
        seed=fleet.seed,
        scenario=fleet.scenario,
        acceleration=fleet.acceleration,
        step=fleet.step,
    )
    params = Params.model_validate({"telemetry": {"step": fleet.step}, "features": {"groups": GROUPS}})
    matrix = make_matrix(work / "dataset", params, work / "matrix")
    begin, end = map(instant_ms, matrix.span)
    chosen = choose_rows(
        Rows.of(matrix.rows),
        Labels.of(matrix.labels(matrix.span[1])),
        start_ms=begin,
        complete_by_ms=end,
        as_of_ms=end,
        negative_ratio=_NEGATIVE_RATIO,
        seed=fleet.seed,
    )
    values = matrix.values(chosen.rows)
    values[:, [column.channel in fleet.hidden for column in matrix.columns]] = np.nan
    for folder in ("dataset", "dataset-truth", "matrix"):
        shutil.rmtree(work / folder)
    names = [column.name for column in matrix.columns]
    return names, [values, chosen.label, chosen.weight, np.array([chosen.n_incidents])]
