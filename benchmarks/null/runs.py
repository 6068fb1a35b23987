"""The runs of the null check on simulated fleets and on a real trace, and whether each came out as it must."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.gpu_cluster_faults import EXPECTED, HONEST_CAPTURE, LEAK, NAME, counted, predrain, write_inventory
from benchmarks.null.altered import ReadsTheFuture, ShuffledOwners, with_incidents
from benchmarks.null.finding import CAPTURE, MEASURES, Finding, Outcome, measure
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, load_params
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a check is.

    ``acceleration``: of the fleet whose incidents are shuffled.
    ``seed``: of the fleets and all draws.
    """

    gpus: int
    days: int
    incidents: int
    acceleration: float
    seed: int = 151


QUICK = Size(gpus=64, days=45, incidents=150, acceleration=60.0)
"""A fleet that finds large leaks, in a minute of computing."""

MODERATE = Size(gpus=256, days=60, incidents=500, acceleration=25.0)
"""A fleet that finds moderate ones, at a few minutes of computing a run."""

LARGE = Size(gpus=512, days=90, incidents=900, acceleration=15.0)
"""A fleet that finds small ones, at a quarter of an hour a run."""


def small_params() -> Params:
    """Parameters of the quick check: few trees, few windows, every kind of learner and ensemble."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(
        update={
            "span": timedelta(days=21),
            "spans": (timedelta(days=21),),
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
    return base.model_copy(update={"training": training, "features": features, "models": models, "backtest": backtest})


def moderate_params() -> Params:
    """Take the parameters of params.yaml on one span."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(update={"span": timedelta(days=28), "refit_every": timedelta(days=14)})
    return base.model_copy(update={"training": training})


FILE = "fault_trace.json"
"""The file of the published InfiniteHBD-Trace (see ``benchmarks/gpu_cluster_faults.py``) that is read."""

_FILES = (ROOT / "params.yaml", ROOT / "params" / f"{NAME}.yaml")


def why_not(trace: Path | None) -> str | None:
    """Say why the real cluster cannot be looked at, None where it can."""
    if trace is None:
        return "--trace was not given"
    return None if (trace / FILE).is_file() else f"there is no {FILE} in {trace}"


def trace_params() -> Params:
    """Take the parameters of the trace, with the alerts of the profile that params.yaml recommends."""
    params = load_params(list(_FILES))
    profile = load_params([_FILES[0]]).models.profile
    return params.model_copy(update={"models": params.models.model_copy(update={"profile": profile})})


def run_trace(trace: Path, work: Path, seed: int, params: Params | None = None) -> dict[str, Outcome]:
    """Import the trace, check its counts, and run it as it is (``real``) and shuffled (``real shuffled``)."""
    dataset = work / "real"
    params = trace_params() if params is None else params
    predrain(
        "import", "--events", trace / FILE, "--inventory", write_inventory(trace, work),
        "--mapping", ROOT / "params" / f"{NAME}-mapping.yaml", "--out", dataset,
        "--params", _FILES[0], "--params", _FILES[1],
    )  # fmt: skip
    counts = counted(Dataset.open(dataset))
    if counts != EXPECTED:
        raise SystemExit(f"the imported counts are {counts}, expected {EXPECTED}: is this the published file?")
    matrix = make_matrix(dataset, params, work / "real-matrix")
    return {
        "real": measure("real", matrix, params, (*MEASURES, CAPTURE)),
        "real shuffled": measure("real shuffled", ShuffledOwners(matrix, seed), params),
    }


def beyond_honest(outcome: Outcome) -> tuple[Finding, ...]:
    """Give what a fault history alone cannot have told, as far as is known of this trace from outside.

    A ROC-AUC above :data:`benchmarks.gpu_cluster_faults.LEAK`; or a capture whose whole interval lies above that of
    counting the faults of the last 30 days.
    """
    return tuple(
        each
        for each in outcome.findings
        if (each.measure == "roc_auc" and each.value > LEAK)
        or (each.measure == CAPTURE and each.low > HONEST_CAPTURE and each.value > HONEST_CAPTURE)
    )


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
    """Run the checks asked for and give their outcomes by name; ``done`` is told each as soon as it is there."""
    out: dict[str, Outcome] = {}

    def look(name: str, matrix: Any) -> None:
        if name in names:
            out[name] = measure(name, matrix, params)
            if done is not None:
                done(out[name])

    if {"shuffled", "leak shuffled"} & set(names):
        fleet = work / "failing"
        simulate(fleet, gpus=size.gpus, days=size.days, seed=size.seed, scenario="base", acceleration=size.acceleration)
        shuffled = ShuffledOwners(make_matrix(fleet, params, work / "failing-matrix"), size.seed)
        look("shuffled", shuffled)
        if "leak shuffled" in names:
            look("leak shuffled", ReadsTheFuture(shuffled, size.seed))
    if {"independent", "planted", "leak"} & set(names):
        quiet = work / "quiet"
        simulate(quiet, gpus=size.gpus, days=size.days, seed=size.seed + 1, scenario="noprecursor", acceleration=1e-6)
        drawn: dict[str, Any] = {"count": size.incidents, "seed": size.seed + 2}
        if {"independent", "leak"} & set(names):
            flat = with_incidents(quiet, work / "independent", planted=False, **drawn)
            matrix = make_matrix(flat, params, work / "independent-matrix")
            look("independent", matrix)
            if "leak" in names:
                look("leak", ReadsTheFuture(matrix, size.seed))
        if "planted" in names:
            hot = with_incidents(quiet, work / "planted", planted=True, **drawn)
            look("planted", make_matrix(hot, params, work / "planted-matrix"))
    return out


AT_CHANCE = ("shuffled", "independent", "real shuffled")
"""Runs in which nothing may be found."""

REAL = "real"
"""The run in which something may be found, but no more than is known from outside."""


def passed(outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    """Tell of each run whether it came out as it must: at chance, found, or within what is known."""
    return {
        name: not beyond_honest(each) if name == REAL else (not each.above) == (name in AT_CHANCE)
        for name, each in outcomes.items()
    }


def line(name: str, outcome: Outcome, good: bool) -> str:
    """Say what a run found and whether that is as it must be."""
    if name == REAL:
        auc, capture = (
            max(each.value for each in outcome.findings if each.measure == wanted) for wanted in ("roc_auc", CAPTURE)
        )
        found = f"highest ROC-AUC {auc:.2f}, highest capture in the top 5 % {100 * capture:.1f} %"
        verdict = "within what is known from outside" if good else "MORE than is known from outside"
    else:
        found = f"{len(outcome.above)} of {len(outcome.findings)} measures above chance"
        verdict = "as it must" if good else "WRONG"
    return f"{name}: {outcome.incidents} incidents tested, {found}: {verdict}"
