"""What boosted trees should learn when failures are rare: objectives, weights, hard negatives, doubtful rows, cascades.

Walks forward over development fleets (seeds from 100 on; reports use 1 to 5): at every refit all variants are fitted on
the same span and scored on the same later decisions, K alerts a decision time each. Fleets are pooled; intervals of the
differences from ``lightgbm`` resample GPUs, the same ones for all variants. Before anything is measured, each objective
is fitted twice and must give the same bits. What a refit gave is kept below ``--work``: a run that was killed goes on.

    python benchmarks/objectives.py [--seeds 101 102] [--gpus 1000] [--quick] [--matrix FOLDER ...] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from benchmarks.walking import Held, KeptRefits, Refit, fleet, predictions, report, walk  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from features.times import duration_ms, instant_ms  # noqa: E402
from models.assessment import Assessment, assess  # noqa: E402
from models.bootstrap import resample_units  # noqa: E402
from models.cascade import CascadeEnsemble  # noqa: E402
from models.config import OBJECTIVES  # noqa: E402
from models.doubtful import doubtful_rows  # noqa: E402
from models.hard_negatives import with_hard_negatives  # noqa: E402
from models.learners import fit_learners, make_learner  # noqa: E402
from models.odds import log_odds  # noqa: E402
from models.ranking import seed_of  # noqa: E402
from models.schedule import alert_budget, instant_of  # noqa: E402
from models.scored import split_predictions  # noqa: E402
from models.training_set import Labels, Rows, TrainingSet, choose_rows  # noqa: E402
from pipeline.params import Params, load_params  # noqa: E402

REFERENCE = "lightgbm"
SPAN = timedelta(days=56)


class RowChoice(NamedTuple):
    """What decides which rows a variant is fitted on; see :class:`Variant`."""

    hard: float
    margin: timedelta
    augmented: bool
    censored: bool


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to learn.

    ``stages``: a learner, or the learners of a cascade.
    ``settings``: overrides of the last stage's settings.
    ``hard``, ``margin``: ``training.hard_negatives`` and ``training.margin``.
    ``augmented``: whether it learns from rows off the decision grid.
    ``censored``: whether units that left without a word have no label (``labels.censor_leavers``); else they survived.
    ``score``: ``models.cascade.score``.
    """

    stages: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    hard: float = 0.0
    margin: timedelta = timedelta(0)
    augmented: bool = True
    censored: bool = True
    score: str = "last"

    @property
    def rows(self) -> RowChoice:
        """What decides which rows it is fitted on."""
        return RowChoice(self.hard, self.margin, self.augmented, self.censored)


VARIANTS: dict[str, Variant] = {
    "lightgbm": Variant(("lightgbm",)),
    "xgboost": Variant(("xgboost",)),
    "random_forest": Variant(("random_forest",)),
    **{name: Variant((name,)) for name in OBJECTIVES},
    "focal, gamma 2": Variant(("lightgbm_focal",), {"focal_gamma": 2.0}),
    "rank, xendcg": Variant(("lightgbm_rank",), {"objective": "rank_xendcg"}),
    "rank, by day": Variant(("lightgbm_rank",), {"group_hours": 24}),
    "rank, by week": Variant(("lightgbm_rank",), {"group_hours": 168}),
    "rank, pairwise": Variant(("xgboost_rank",), {"objective": "rank:pairwise"}),
    "xgboost_rank, by week": Variant(("xgboost_rank",), {"group_hours": 168}),
    "positives x 5": Variant(("lightgbm",), {"scale_pos_weight": 5.0}),
    "balanced": Variant(("lightgbm",), {"class_weight": "balanced"}),
    "hard negatives 20 %": Variant(("lightgbm",), hard=0.2),
    "hard negatives 40 %": Variant(("lightgbm",), hard=0.4),
    "no rows off the grid": Variant(("lightgbm",), augmented=False),
    "leavers taken for survivors": Variant(("lightgbm",), censored=False),
    "margin 12 h": Variant(("lightgbm",), margin=timedelta(hours=12)),
    "margin 48 h": Variant(("lightgbm",), margin=timedelta(hours=48)),
    "cascade lightgbm, mlp": Variant(("lightgbm", "mlp")),
    "cascade lightgbm, mlp, mean": Variant(("lightgbm", "mlp"), score="mean"),
    "cascade lightgbm, logistic": Variant(("lightgbm", "logistic")),
    "cascade lightgbm, logistic, mean": Variant(("lightgbm", "logistic"), score="mean"),
    "cascade lightgbm, random_forest": Variant(("lightgbm", "random_forest")),
    "cascade lightgbm, random_forest, mean": Variant(("lightgbm", "random_forest"), score="mean"),
    "cascade logistic, lightgbm, mean": Variant(("logistic", "lightgbm"), score="mean"),
}
"""Variants in the order of the table."""

QUICK = (
    "lightgbm",
    "xgboost",
    *OBJECTIVES,
    "hard negatives 20 %",
    "margin 12 h",
    "cascade lightgbm, random_forest, mean",
)


def training_sets(
    held: Held, rows: Rows, refit_ms: int, reach_ms: int, variants: Mapping[str, Variant], params: Params
) -> dict[RowChoice, TrainingSet]:
    """Choose the rows of every way to choose them."""
    start = refit_ms - reach_ms - duration_ms(SPAN)
    incidents = held.matrix.incidents(instant_of(refit_ms))
    found = {}
    for choice in {variant.rows: None for variant in variants.values()}:
        labels = held.labels(refit_ms, censored=choice.censored)
        if not choice.augmented:
            labels = replace(labels, label=np.where(rows.augmented, -1, labels.label))
        doubtful = doubtful_rows(rows, labels, incidents, margin_ms=duration_ms(choice.margin))
        chosen = choose_rows(
            rows,
            labels,
            start_ms=start,
            complete_by_ms=refit_ms,
            as_of_ms=refit_ms,
            negative_ratio=params.training.negative_ratio,
            seed=params.seed,
            doubtful=doubtful,
        )
        if choice.hard > 0:
            pool = ~rows.augmented & (labels.label == 0) & (rows.time >= start) & (labels.complete <= refit_ms)
            chosen = with_hard_negatives(
                chosen, held.read, rows, labels, pool & ~doubtful, share=choice.hard, seed=params.seed
            )
        found[choice] = chosen
    return found


def refitted(
    held: Held,
    variants: Mapping[str, Variant],
    params: Params,
    rows: Rows,
    refit: int,
    reach_ms: int,
    tested: np.ndarray,
) -> Refit:
    """Fit every variant as of a refit, and score the rows that it tests."""
    sets = training_sets(held, rows, refit, reach_ms, variants, params)
    values = {key: held.read(chosen.rows) for key, chosen in sets.items()}
    X = held.read(tested)
    scores, seconds = {}, {}
    for name, variant in variants.items():
        chosen, fitted_on = sets[variant.rows], values[variant.rows]
        began = time.perf_counter()
        stages = [
            (
                stage,
                make_learner(
                    stage,
                    seed=seed_of(params.seed, stage, refit),
                    settings=variant.settings if stage == variant.stages[-1] else None,
                ),
            )
            for stage in variant.stages
        ]
        if len(stages) == 1:
            model = fit_learners(dict(stages), fitted_on, chosen.label, chosen.weight, chosen.facts)[stages[0][0]]
            seconds[name] = time.perf_counter() - began
            scores[name] = log_odds(model, X) + chosen.prior_shift
        else:
            cascade = CascadeEnsemble(
                stages, params.models.cascade.recall_floor, timedelta(milliseconds=reach_ms), variant.score
            )
            cascade.fit(
                fitted_on,
                chosen.label,
                chosen.weight,
                times=chosen.facts.times,
                hours_to_incident=chosen.facts.hours_to_incident,
            )
            seconds[name] = time.perf_counter() - began
            scores[name] = cascade.score_rows(X)[0] + chosen.prior_shift
    return tested, scores, seconds


def same_bits(held: Held, params: Params) -> None:
    """Fit every objective twice on a few rows and stop if a bit differs."""
    rows, labels = Rows.of(held.matrix.rows), Labels.of(held.matrix.labels(None))
    chosen = choose_rows(
        rows,
        labels,
        start_ms=instant_ms(held.matrix.span[0]),
        complete_by_ms=instant_ms(held.matrix.span[1]),
        as_of_ms=instant_ms(held.matrix.span[1]),
        negative_ratio=1,
        seed=params.seed,
    )
    X = held.read(chosen.rows)
    for name in OBJECTIVES:
        first, second = (
            fit_learners(
                {name: make_learner(name, seed=1, settings={"n_estimators": 20})},
                X,
                chosen.label,
                chosen.weight,
                chosen.facts,
            )[name].predict_proba(X)
            for _ in range(2)
        )
        if not np.array_equal(first, second):
            sys.exit(f"{name} differs between two fits of the same rows: nothing is measured")


def main() -> None:
    """Walk forward over all fleets, pool them, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102], help="from 100 on: development fleets")
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--days", type=int, default=120)
    parser.add_argument("--params", type=Path, nargs="+", default=[ROOT / "params.yaml"])
    parser.add_argument("--matrix", type=Path, nargs="+", help="feature matrices to use in place of simulated fleets")
    parser.add_argument("--only", nargs="+", help="variants, by name; the reference is always among them")
    parser.add_argument("--refit-every", type=int, default=14, help="days")
    parser.add_argument("--bootstrap", type=int, default=300)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "objectives")
    parser.add_argument("--quick", action="store_true", help="one small fleet, fewer variants, two minutes")
    args = parser.parse_args()
    params = load_params(args.params)
    names = list(VARIANTS)
    if args.quick:
        args.seeds, args.gpus, args.days, args.bootstrap, names = args.seeds[:1], 192, 120, 100, list(QUICK)
    if args.only:
        names = [REFERENCE, *(name for name in args.only if name != REFERENCE)]
        unknown = [name for name in names if name not in VARIANTS]
        if unknown:
            sys.exit(f"unknown variant {unknown[0]!r}: choose among {', '.join(VARIANTS)}")
    variants = {name: VARIANTS[name] for name in names}
    args.work.mkdir(parents=True, exist_ok=True)
    if args.matrix:
        fleets = [Held(FeatureMatrix.open(folder), args.work) for folder in args.matrix]
    else:
        fleets = [fleet(seed, params, args.work, args.gpus, args.days) for seed in args.seeds]
    same_bits(fleets[0], params)

    seconds = dict.fromkeys(variants, 0.0)
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in variants}
    budgets = []
    kept = KeptRefits(args.work / "refits", Path(__file__), variants, params)
    for place, held in enumerate(fleets):
        make = partial(refitted, held, variants, params)
        found = list(walk(held, 2, timedelta(days=args.refit_every), kept, make, span=SPAN))
        tested = np.concatenate([rows for rows, _, _ in found])
        number = np.repeat(np.arange(len(found)), [len(rows) for rows, _, _ in found])
        began = int(Rows.of(held.matrix.rows).time[tested].min())
        labels = Labels.of(held.matrix.labels(instant_of(began)))
        budgets.append(alert_budget(Rows.of(held.matrix.rows), labels, params.backtest, as_of_ms=began))
        for name in variants:
            score = np.concatenate([scores[name] for _, scores, _ in found])
            frames[name].append(predictions(held, place, tested, score, number, budgets[-1]))
            seconds[name] += sum(took[name] for _, _, took in found) / len(found) / len(fleets)
        sys.stderr.write(f"fleet {place + 1} of {len(fleets)}: {len(found)} refits\n")
    assessed: dict[str, Assessment] = {}
    for name, mine in frames.items():
        scored = split_predictions(pd.concat(mine, ignore_index=True), max(budgets))[0]
        assessed[name] = assess(scored, weights := resample_units(scored.n_units, args.bootstrap, 1))
    report(assessed, seconds, max(budgets), weights, name="objectives", reference=REFERENCE)


if __name__ == "__main__":
    main()
