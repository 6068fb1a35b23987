"""``predrain prior``: build a prior, a model of many simulated fleets that is pooled with a fleet's own models."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import progress, show
from predrain.options import JsonOption

if TYPE_CHECKING:
    import numpy as np

    from features.matrix.matrix import FeatureMatrix
    from models.rows.training_set import TrainingSet
    from simulator.scenarios import DrawnFleet

prior_app = typer.Typer(
    name="prior",
    help="Build a prior: a model of other fleets for a fleet with few failures.\n\n"
    "Example: predrain prior build --out prior --fleets 48",
    no_args_is_help=True,
    add_completion=False,
)

GROUPS = ("history", "peers", "onset", "gaps")
"""Feature groups that transfer to other fleets: they compare with the past, the peers or the cadence."""

_NEGATIVE_RATIO = 20


@prior_app.callback()
def options() -> None:
    """Make Typer keep the single verb as a subcommand."""


@prior_app.command("build")
def build(
    out: Annotated[Path, typer.Option(help="Output directory of the prior; an existing prior is replaced.")],
    fleets: Annotated[int, typer.Option(help="Number of simulated fleets.", min=1)] = 48,
    gpus: Annotated[int, typer.Option(help="GPUs per fleet.", min=8)] = 256,
    days: Annotated[int, typer.Option(help="Days per fleet.", min=14)] = 60,
    seed: Annotated[int, typer.Option(help="Seed; results are reproducible byte by byte.", min=0)] = 7,
    without_silent: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Omit fleets whose share of failures without a precursor is in this range."),
    ] = None,
    matrix: Annotated[
        list[Path] | None,
        typer.Option(help="Feature matrix of another cluster, instead of simulated fleets. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a prior: one model of many simulated fleets with random parameters.

    With --matrix, the fleets are your other clusters. Columns are matched by name. Static columns are omitted, because
    they identify the cluster. With the folder in `training.prior`, `predrain backtest` and
    `predrain train` pool the prior with their own models. To evaluate a prior on a simulated fleet, omit similar fleets
    with --without-silent.

    Example: predrain prior build --out prior --fleets 48
    """
    import numpy as np

    from features.matrix.matrix import FeatureMatrix
    from foundation.errors import InputError
    from foundation.files import FolderSwap, disk_errors, refuse_other_content
    from models.learners.prior import CARD, fit_prior, write_prior
    from simulator.scenarios import FACTORS, VALUES, draw_fleet

    refuse_other_content(out, CARD, "a prior")
    matrices = [FeatureMatrix.open(path) for path in matrix or ()]
    draws = [] if matrices else [draw_fleet(seed, number) for number in range(fleets)]
    if without_silent is not None:
        draws = [fleet for fleet in draws if not without_silent[0] < fleet.silent < without_silent[1]]
    if not matrices and not draws:
        raise InputError("every fleet is omitted", "--without-silent", "Give a narrower range, or more fleets.")
    made_of: dict[str, Any] = {"fleets": len(matrices or draws), "seed": seed}
    made_of |= {} if without_silent is None else {"without_silent": list(without_silent)}
    made_of |= (
        {"matrices": [feature_matrix.digest for feature_matrix in matrices]}
        if matrices
        else {"gpus": gpus, "days": days}
    )
    with progress("fleets") as advance, FolderSwap(out) as swap:
        parts = []
        for number in range(made_of["fleets"]):
            simulated = None if matrices else _simulated(draws[number], gpus, days, swap.path)
            parts.append(simulated or _rows(matrices[number], seed))
            advance(number + 1, made_of["fleets"])
        names = list(dict.fromkeys(name for columns, *_ in parts for name in columns))
        values = np.full((sum(len(rows) for *_, rows in parts), len(names)), np.nan, np.float32)
        end = 0
        for columns, _, rows in parts:
            values[end : end + len(rows), [names.index(name) for name in columns]] = rows
            end += len(rows)
        label, weight = (np.concatenate([getattr(part[1], name) for part in parts]) for name in ("label", "weight"))
        if not label.any() or label.all():
            raise InputError(
                "the fleets have no failures, or failures in every row", "prior build", "Give more or larger fleets."
            )
        made_of |= {"incidents": sum(chosen.n_incidents for _, chosen, _ in parts)}
        made_of |= {"positive_rows": int(label.sum()), "rows": len(label)}
        variations = {} if matrices else {"factors": FACTORS, "values": VALUES}
        prior = fit_prior(values, label, weight, names, seed=seed, made_of=made_of | variations)
        with disk_errors(out):
            write_prior(prior, swap.path)
        swap.commit()
    show({"prior": str(out), **made_of}, as_json=as_json)


def _simulated(fleet: "DrawnFleet", gpus: int, days: int, work: Path) -> "tuple[list[str], TrainingSet, np.ndarray]":
    """Simulate a fleet in a folder, and return its rows without the channels that it does not report."""
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
    rows = _rows(make_matrix(work / "dataset", params, work / "matrix"), fleet.seed, fleet.hidden)
    for folder in ("dataset", "dataset-truth", "matrix"):
        shutil.rmtree(work / folder)
    return rows


def _rows(
    matrix: "FeatureMatrix", seed: int, hidden: frozenset[str] = frozenset()
) -> "tuple[list[str], TrainingSet, np.ndarray]":
    """Return column names, training rows, and their values, which are NaN in columns of hidden channels."""
    from foundation.times import instant_ms
    from models.rows.training_set import Labels, TrainingRows, choose_rows

    end = instant_ms(matrix.span[1])
    chosen = choose_rows(
        TrainingRows.of(matrix.rows),
        Labels.of(matrix.labels(matrix.span[1])),
        start_ms=instant_ms(matrix.span[0]),
        complete_by_ms=end,
        as_of_ms=end,
        negative_ratio=_NEGATIVE_RATIO,
        seed=seed,
    )
    values = matrix.values(chosen.rows)
    values[:, [column.channel in hidden for column in matrix.columns]] = float("nan")
    usable = [i for i, column in enumerate(matrix.columns) if column.group in GROUPS]
    return [matrix.columns[i].name for i in usable], chosen, values[:, usable]
