"""Fleets of the results page: plans, simulates and replays them, and caches finished ones.

::

    WORK/FLEET/KEY/profile.parquet   predictions of the profile, its members and the baselines
    WORK/FLEET/KEY/alone.parquet     of the profile without a prior
    WORK/FLEET/KEY/young.parquet     of the profile in weeks 3 to 6, with young-alone.parquet; for some fleets only
    WORK/FLEET/KEY/once.parquet      of the profile trained once
    WORK/FLEET/KEY/paper.parquet     of the paper's ensembles; for some fleets only
    WORK/FLEET/KEY/truth.parquet     the true risks
    WORK/FLEET/KEY/facts.json        budget, promises; written last, when the fleet is finished
"""

import hashlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from evaluation.backtest.frames import BacktestResult
from evaluation.backtest.promises import walk_promises
from evaluation.backtest.run import ROOMS, run_backtest
from evaluation.metrics.aggregation import COLUMNS
from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.oracle import read_truth
from features.engine import source_digest
from features.matrix.matrix import FeatureMatrix
from models.config import CASCADE
from models.learners.prior import load_prior
from pipeline.artefacts import write_frame, write_json
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, load_params
from predrain.learn.prior import build
from simulator.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
PROFILE, ALONE, ONCE, PAPER = "profile", "alone", "once", "paper"
"""Replays of a fleet: with params.yaml, the same without a prior, trained once, and with params/paper.yaml."""

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Start of every fleet's telemetry."""

YOUNG, YOUNG_ALONE = "young", "young-alone"
"""Replays of the first weeks of a fleet's telemetry: with the prior and without."""

YOUNG_DAYS = (14, 42)
"""First and last day of these replays: weeks 3 to 6."""

LEFT_OUT = (0.35, 0.65)
"""Range of the share of failures without a precursor whose fleets are excluded from the prior."""

SEEDS = {"base": 5, "drift": 5, "announced": 2, "noprecursor": 1}
"""Number of fleets per scenario with accelerated failure rates: as many as the intervals of comparisons need."""

OWN_SEEDS = {"base": 3}
"""Number of fleets at calibrated failure rates."""

QUICK_SEEDS = {"base": 1, "announced": 1, "noprecursor": 1}
PAPER_SCENARIOS = YOUNG_SCENARIOS = ("base", "drift")
"""Scenarios whose first fleet is also replayed with the paper's profile, and whose first weeks are replayed."""

DEVELOPMENT = 100
"""Seeds from here on are for development; parameters may have been chosen on them."""

FACTS = "facts.json"


@dataclass(frozen=True, slots=True)
class Fleet:
    """A simulated fleet.

    ``acceleration``: factor on all failure rates.
    ``paper``: whether it is replayed with the paper's profile too.
    """

    scenario: str
    seed: int
    gpus: int
    days: int
    acceleration: float
    paper: bool = False

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.scenario}-{self.seed}-{self.gpus}x{self.days}-x{self.acceleration:g}"

    @property
    def young(self) -> bool:
        """Whether its first weeks are replayed too."""
        return self.acceleration > 1 and self.scenario in YOUNG_SCENARIOS

    @property
    def group(self) -> str:
        """Name of its group of fleets on the page."""
        return f"`{self.scenario}`{' un-accelerated' if self.acceleration == 1 else ''}"


def plan(
    *,
    quick: bool = False,
    first_seed: int | None = None,
    scenarios: Sequence[str] | None = None,
    seeds: int | None = None,
    gpus: int | None = None,
    days: int | None = None,
) -> tuple[Fleet, ...]:
    """List the fleets.

    ``first_seed``: first seed of each scenario; default: 1, with ``quick`` :data:`DEVELOPMENT`.
    ``seeds``: maximum number of seeds per scenario.
    """
    first_seed = first_seed or (DEVELOPMENT if quick else 1)
    accelerated, factor, usual = (QUICK_SEEDS, 10.0, (256, 60)) if quick else (SEEDS, 5.0, (2000, 120))
    own = dict.fromkeys(OWN_SEEDS, 1) if quick else OWN_SEEDS
    return tuple(
        Fleet(
            scenario,
            seed,
            gpus or usual[0],
            days or usual[1],
            rate,
            paper=rate > 1 and seed == first_seed and scenario in PAPER_SCENARIOS,
        )
        for rate, table in ((factor, accelerated), (1.0, own))
        for scenario, count in table.items()
        if scenarios is None or scenario in scenarios
        for seed in range(first_seed, first_seed + min(count, seeds or count))
    )


def build_prior(work: Path) -> str:
    """Build the prior of the replays, without fleets like those measured, unless this code has built it before."""
    out = work / f"prior-{source_digest('simulator', *ROOMS)[:16]}"
    if not out.is_dir():
        with redirect_stdout(sys.stderr):
            build(out, fleets=60, without_silent=LEFT_OUT)
    return str(out)


def replays_of(fleet: Fleet, prior: str) -> dict[str, Params]:
    """Return the parameters of each replay of a fleet.

    ``prior``: ``training.prior`` of the replays with a prior.
    """
    shipped = load_params([ROOT / "params.yaml"])

    def usual(**training: Any) -> Params:
        return shipped.model_copy(update={"training": shipped.training.model_copy(update=training)})

    replays = {
        PROFILE: usual(prior=prior),
        ALONE: usual(prior=None),
        ONCE: usual(prior=prior, refit_every=timedelta(days=36500)),
    }
    if fleet.young:
        first, last = (START + timedelta(days=days) for days in YOUNG_DAYS)
        weeks = shipped.backtest.model_copy(update={"first_test": first, "last_test": last})
        replays[YOUNG] = usual(prior=prior).model_copy(update={"backtest": weeks})
        replays[YOUNG_ALONE] = usual(prior=None).model_copy(update={"backtest": weeks})
    if fleet.paper:
        paper = load_params([ROOT / "params.yaml", ROOT / "params" / "paper.yaml"])
        members = tuple(dict.fromkeys((*paper.models.parallel.members, *paper.models.cascade.stages)))
        models = paper.models.model_copy(update={"learners": members})  # only those that an ensemble needs
        replays[PAPER] = paper.model_copy(update={"models": models})
    return replays


def run_fleet(fleet: Fleet, work: Path, prior: str) -> Path:
    """Simulate and replay a fleet and return its folder; finished fleets are reused, interrupted ones resumed.

    The key of the cache is made of code, parameters and fleet.
    """
    replays = replays_of(fleet, prior)
    content = {name: params.model_dump(mode="json", exclude={"simulate", "data"}) for name, params in replays.items()}
    for dumped in content.values():
        dumped["training"]["prior"] = dumped["training"]["prior"] and load_prior(prior).card.sha256
    inputs = json.dumps([source_digest("simulator", *ROOMS), content, fleet.name], sort_keys=True)
    folder = work / fleet.name / hashlib.sha256(inputs.encode()).hexdigest()[:16]
    if (folder / FACTS).is_file():
        return folder
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    scratch = folder / "unfinished"
    dataset, truth = scratch / "dataset", scratch / "dataset-truth"
    laps = [fleet.name]
    begin = time.process_time()

    def lap(stage: str) -> None:
        nonlocal begin
        laps.append(f"{stage} {time.process_time() - begin:.0f}")
        begin = time.process_time()

    if not truth.is_dir():  # written last
        simulate(
            dataset, gpus=fleet.gpus, days=fleet.days, seed=fleet.seed, scenario=fleet.scenario,
            acceleration=fleet.acceleration, start=START,
        )  # fmt: skip
    lap("simulate")
    facts: dict[str, Any] = {}
    for name, params in replays.items():
        matrix = make_matrix(dataset, params, scratch / ("matrix-paper" if name == PAPER else "matrix"))
        lap(f"features of {name}")
        result = run_backtest(
            matrix,
            training=params.training,
            models=params.models,
            backtest=params.backtest,
            seed=params.seed,
            cache=scratch / (PAPER if name == PAPER else PROFILE),  # so that a learner is fitted once
            full=name == PAPER,  # includes the cascade
        )
        keep(result, _kept(name, params), folder / f"{name}.parquet")
        if name == PROFILE:
            facts = facts_of(result, matrix, params)
        if name == YOUNG:
            facts["young_k"] = result.k
        lap(f"replay of {name}")
    write_frame(read_truth(truth), folder / "truth.parquet")
    shutil.rmtree(scratch)
    write_json(facts, folder / FACTS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stderr.write(f"{', '.join(laps)} s of CPU; up to {peak:,.0f} MB so far\n")
    return folder


def _kept(replay: str, params: Params) -> set[str]:
    profile = params.models.profile
    members = params.models.parallel.members
    models_by_profile = {PROFILE: {profile, *members, "history_count", "vendor_rules"}, PAPER: {profile, CASCADE}}
    return models_by_profile.get(replay, {profile})


def keep(result: BacktestResult, models: set[str], path: Path) -> None:
    """Write the sliding predictions of some models of a backtest."""
    rows = result.predictions
    wanted = (rows["variant"] == SLIDING) & rows["model"].isin(models)
    write_frame(rows.loc[wanted, [*COLUMNS, "drain_label"]], path)


def facts_of(result: BacktestResult, matrix: FeatureMatrix, params: Params) -> dict[str, Any]:
    """Return what the measurement needs: budget, models, length of an episode, and promises.

    ``promises``: by target precision and fold, the risk threshold from which drains were promised to reach it.
    """
    profile = params.models.profile
    mine = result.predictions[result.predictions["model"] == profile]
    made = walk_promises(mine, result.folds, matrix, params.models.precision_targets, k=result.k).folds
    promises: dict[str, dict[str, float]] = {}
    for row in made[made["promised"].to_numpy(dtype=bool)].itertuples():
        promises.setdefault(f"{row.target:g}", {})[str(row.fold)] = float(row.threshold)
    return {
        "k": result.k,
        "profile": profile,
        "members": list(params.models.parallel.members),
        "reach_s": result.drain_reach / timedelta(seconds=1),
        "promises": promises,
    }
