"""The runs of the null check on simulated fleets, and whether each has the expected result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.null.altered import ReadsTheFuture, ShuffledOwners, with_incidents
from benchmarks.null.finding import Outcome, measure
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, load_params
from simulator.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a check.

    ``acceleration``: failure rate factor of the fleet whose incidents are shuffled.
    ``seed``: seed of the fleets and all draws.
    """

    gpus: int
    days: int
    incidents: int
    acceleration: float
    seed: int = 151


QUICK = Size(gpus=64, days=45, incidents=150, acceleration=60.0)
"""Size that detects large leaks, in a minute of CPU time."""

MODERATE = Size(gpus=256, days=60, incidents=500, acceleration=25.0)
"""Size that detects moderate leaks, in a few minutes of CPU time per run."""


def small_params() -> Params:
    """Return the parameters of the quick check: few trees, few windows, every kind of learner and ensemble.

    Metrics are by GPU, because at these failure rates nearly every node of eight GPUs has a failure ahead.
    """
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(
        update={
            "window": timedelta(days=21),
            "candidate_windows": (timedelta(days=21),),
            "refit_every": timedelta(days=14),
            "augmentation": 2,
        }
    )
    features = base.features.model_copy(
        update={"windows": (timedelta(hours=6),), "history_windows": (timedelta(days=7), timedelta(days=30))}
    )
    learners = ("lightgbm", "xgboost", "logistic")
    models = base.models.model_copy(
        update={
            "learners": learners,
            "parallel": base.models.parallel.model_copy(update={"members": learners}),
            "cascade": base.models.cascade.model_copy(update={"stages": ("lightgbm", "logistic")}),
            "settings": {"lightgbm": {"n_estimators": 60}, "xgboost": {"n_estimators": 60}},
        }
    )
    backtest = base.backtest.model_copy(update={"k": 4, "bootstrap": 100})
    changed = {"training": training, "features": features, "models": models, "backtest": backtest}
    return base.model_copy(update=changed | {"labels": base.labels.model_copy(update={"acts_on": "unit"})})


def moderate_params() -> Params:
    """Return the parameters of params.yaml with a single training window."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(update={"window": timedelta(days=28), "refit_every": timedelta(days=14)})
    return base.model_copy(update={"training": training})


NAMES = ("shuffled", "leak shuffled", "independent", "leak", "planted")
"""The runs, in the order of the table."""


def run_checks(
    work: Path,
    size: Size,
    params: Params,
    names: Sequence[str] = ("shuffled", "independent", "planted", "leak"),
    *,
    done: Callable[[Outcome], None] | None = None,
) -> dict[str, Outcome]:
    """Run the requested checks and return their outcomes by name; ``done`` is called with each outcome."""
    out: dict[str, Outcome] = {}

    def check(name: str, matrix: Any) -> None:
        if name in names:
            out[name] = measure(name, matrix, params)
            if done is not None:
                done(out[name])

    if {"shuffled", "leak shuffled"} & set(names):
        fleet = work / "failing"
        simulate(fleet, gpus=size.gpus, days=size.days, seed=size.seed, scenario="base", acceleration=size.acceleration)
        shuffled = ShuffledOwners(make_matrix(fleet, params, work / "failing-matrix"), size.seed)
        check("shuffled", shuffled)
        if "leak shuffled" in names:
            check("leak shuffled", ReadsTheFuture(shuffled, size.seed))
    if {"independent", "planted", "leak"} & set(names):
        quiet = work / "quiet"
        simulate(quiet, gpus=size.gpus, days=size.days, seed=size.seed + 1, scenario="noprecursor", acceleration=1e-6)
        drawn: dict[str, Any] = {"count": size.incidents, "seed": size.seed + 2}
        if {"independent", "leak"} & set(names):
            flat = with_incidents(quiet, work / "independent", planted=False, **drawn)
            matrix = make_matrix(flat, params, work / "independent-matrix")
            check("independent", matrix)
            if "leak" in names:
                check("leak", ReadsTheFuture(matrix, size.seed))
        if "planted" in names:
            hot = with_incidents(quiet, work / "planted", planted=True, **drawn)
            check("planted", make_matrix(hot, params, work / "planted-matrix"))
    return out


AT_CHANCE = ("shuffled", "independent")
"""Runs that must be at chance."""


def passed(outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    """Return whether each run has the expected result: at chance, or above."""
    return {name: (not outcome.above) == (name in AT_CHANCE) for name, outcome in outcomes.items()}


def line(name: str, outcome: Outcome, good: bool) -> str:
    """Summarize a run's findings, and whether they are as expected."""
    above = f"{len(outcome.above)} of {len(outcome.findings)} measures above chance"
    return f"{name}: {outcome.incidents} incidents tested, {above}: {'as it must' if good else 'WRONG'}"
