"""What the recommended profile is made of: feature groups, learners, negatives and spans left out one at a time.

Walks forward over development fleets (seeds from 100 on; reports use 1 to 5): at every refit all variants are fitted on
the past and score the same later decisions. Fleets are pooled; intervals of the differences from the profile (or from
the variant that ``--against`` names) resample GPUs, the same ones for all variants. docs/profile.md quotes it. What a
refit gave is kept below ``--work``: a run that was killed goes on.

    python benchmarks/ablation.py [--scenarios base drift] [--seeds 101 102] [--quick] [--matrix FOLDER ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

from benchmarks.walking import Held, KeptRefits, Refit, fleet, predictions, report, walk  # noqa: E402
from features.config import GROUPS  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from features.times import duration_ms, instant_ms  # noqa: E402
from models.assessment import Assessment, assess  # noqa: E402
from models.bootstrap import resample_units  # noqa: E402
from models.combining import combine  # noqa: E402
from models.config import Combiner  # noqa: E402
from models.learners import fit_learners, make_learner  # noqa: E402
from models.odds import log_odds  # noqa: E402
from models.ranking import seed_of  # noqa: E402
from models.schedule import alert_budget, instant_of  # noqa: E402
from models.scored import split_predictions  # noqa: E402
from models.training_set import Labels, Rows, TrainingSet, choose_rows  # noqa: E402
from pipeline.params import Params, load_params  # noqa: E402

REFERENCE = "profile"
_MEMBERS = ("lightgbm", "xgboost", "random_forest")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to learn: feature groups, learners and how they are joined, negatives a positive, training span."""

    groups: tuple[str, ...] = GROUPS
    members: tuple[str, ...] = _MEMBERS
    combiner: Combiner = "mean_log_odds"
    ratio: int = 200
    span_days: int = 56


VARIANTS: dict[str, Variant] = {
    REFERENCE: Variant(),
    **{f"without {name}": Variant(tuple(group for group in GROUPS if group != name)) for name in GROUPS},
    **{
        f"without {first} and {second}": Variant(tuple(group for group in GROUPS if group not in (first, second)))
        for first, second in (("telemetry", "onset"), ("history", "peers"))
    },
    **{f"{name} alone": Variant((name,)) for name in ("telemetry", "history", "peers", "onset")},
    "telemetry and static (the paper's)": Variant(("telemetry", "static")),
    **{f"{name} alone as learner": Variant(members=(name,)) for name in (*_MEMBERS, "logistic", "mlp")},
    "with logistic": Variant(members=(*_MEMBERS, "logistic")),
    "with mlp": Variant(members=(*_MEMBERS, "mlp")),
    "mean of ranks": Variant(combiner="mean_rank"),
    "20 negatives": Variant(ratio=20),
    "60 negatives": Variant(ratio=60),
    "span 14 d": Variant(span_days=14),
    "span 28 d": Variant(span_days=28),
    "all history": Variant(span_days=3650),
}
"""Variants in the order of the table."""

QUICK = (REFERENCE, "without onset", "without history", "telemetry and static (the paper's)", "20 negatives")


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
    labels = Labels.of(held.matrix.labels(instant_of(refit)))
    group = np.array([column.group for column in held.matrix.columns])
    X = held.read(tested)
    scores, seconds = {}, {}
    read: dict[tuple[int, int], tuple[np.ndarray, TrainingSet]] = {}
    told: dict[tuple[object, ...], tuple[np.ndarray, float]] = {}
    for name, variant in variants.items():
        key = (variant.ratio, variant.span_days)
        if key not in read:
            chosen = choose_rows(
                rows,
                labels,
                start_ms=max(
                    refit - reach_ms - duration_ms(timedelta(days=variant.span_days)), instant_ms(held.matrix.span[0])
                ),
                complete_by_ms=refit,
                as_of_ms=refit,
                negative_ratio=variant.ratio,
                seed=params.seed,
            )
            read[key] = (held.read(chosen.rows), chosen)
        values, chosen = read[key]
        columns = np.flatnonzero(np.isin(group, variant.groups))
        for each in variant.members:
            one = (variant.groups, each, *key)
            if one not in told:
                told[one] = fit_one(each, values[:, columns], chosen, X[:, columns], seed_of(params.seed, each, refit))
        mine = [told[variant.groups, each, *key] for each in variant.members]
        seconds[name] = sum(took for _, took in mine)
        joined = np.column_stack([score for score, _ in mine])
        scores[name] = combine(joined, rows.time[tested], rows.tie[tested], k=1, combiner=variant.combiner).score
    return tested, scores, seconds


def fit_one(name: str, values: np.ndarray, chosen: TrainingSet, X: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """Fit a learner; give its log-odds of the rows of ``X``, and the seconds that the fit took."""
    began = time.perf_counter()
    fitted = fit_learners({name: make_learner(name, seed=seed)}, values, chosen.label, chosen.weight, chosen.facts)
    took = time.perf_counter() - began
    return log_odds(fitted[name], X), took


def main() -> None:
    """Walk forward over all fleets, pool them, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=["base", "drift"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102], help="from 100 on: development fleets")
    parser.add_argument("--gpus", type=int, default=2000)
    parser.add_argument("--days", type=int, default=120)
    parser.add_argument("--matrix", type=Path, nargs="+", help="feature matrices to use in place of simulated fleets")
    parser.add_argument("--only", nargs="+", help="variants, by name; the profile is always among them")
    parser.add_argument("--against", default=REFERENCE, help="the variant that differences are taken from")
    parser.add_argument("--refit-every", type=int, default=28, help="days")
    parser.add_argument("--bootstrap", type=int, default=300)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "ablation")
    parser.add_argument("--quick", action="store_true", help="one small fleet, fewer variants, two minutes")
    args = parser.parse_args()
    if min(args.seeds) < 100:
        sys.exit("seeds below 100 are reported on: a profile is not chosen on them")
    params = load_params([ROOT / "params.yaml"])
    if args.quick:
        args.scenarios, args.seeds, args.gpus, args.bootstrap = ["drift"], args.seeds[:1], 256, 100
    variants = {name: VARIANTS[name] for name in names_of(args)}
    args.work.mkdir(parents=True, exist_ok=True)
    if args.matrix:
        fleets = [Held(FeatureMatrix.open(folder), args.work) for folder in args.matrix]
    else:
        fleets = [
            fleet(seed, of_scenario(params, scenario), args.work, args.gpus, args.days)
            for scenario in args.scenarios
            for seed in args.seeds
        ]
    seconds = dict.fromkeys(variants, 0.0)
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in variants}
    budgets = []
    kept = KeptRefits(args.work / "refits", Path(__file__), variants, params)
    for place, held in enumerate(fleets):
        make = partial(refitted, held, variants, params)
        found = list(walk(held, 3, timedelta(days=args.refit_every), kept, make))
        tested = np.concatenate([rows for rows, _, _ in found])
        number = np.repeat(np.arange(len(found)), [len(rows) for rows, _, _ in found])
        rows = Rows.of(held.matrix.rows)
        began = int(rows.time[tested].min())
        labels = Labels.of(held.matrix.labels(instant_of(began)))
        budgets.append(alert_budget(rows, labels, params.backtest, as_of_ms=began))
        for name in variants:
            score = np.concatenate([scores[name] for _, scores, _ in found])
            frames[name].append(predictions(held, place, tested, score, number, budgets[-1]))
            seconds[name] += sum(took[name] for _, _, took in found) / len(found) / len(fleets)
        sys.stderr.write(f"fleet {place + 1} of {len(fleets)}: {len(found)} refits\n")
    assessed: dict[str, Assessment] = {}
    for name, mine in frames.items():
        scored = split_predictions(pd.concat(mine, ignore_index=True), max(budgets))[0]
        assessed[name] = assess(scored, weights := resample_units(scored.n_units, args.bootstrap, 1))
    report(assessed, seconds, max(budgets), weights, name="ablation", reference=args.against)


def names_of(args: argparse.Namespace) -> list[str]:
    """Give the names of the variants that were asked for, or say which name is wrong and stop."""
    names = list(QUICK if args.quick else VARIANTS)
    if args.only:
        names = [REFERENCE, *(name for name in args.only if name != REFERENCE)]
    for name in (*names, args.against):
        if name not in VARIANTS:
            sys.exit(f"unknown variant {name!r}: choose among {', '.join(VARIANTS)}")
    if args.against not in names:
        sys.exit(f"differences are taken from a variant that is shown: choose among {', '.join(names)}")
    return names


def of_scenario(params: Params, scenario: str) -> Params:
    """Give the parameters with another scenario of the simulator."""
    return params.model_copy(update={"simulate": params.simulate.model_copy(update={"scenario": scenario})})


if __name__ == "__main__":
    main()
