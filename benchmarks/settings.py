"""Settings of the learners as the profile has them, beside settings searched before the first test.

``training.search`` tries settings of each learner on time-ordered folds of the history before the first test, and keeps
the best. Both backtests replay the same decisions of the same simulated fleets (development seeds, from 100 on) with
the same K; differences are paired, GPUs resampled within their fleets. Refits that are finished are kept below
``--work``: a run that was killed does only the others (and the search again, which is no refit).

    python benchmarks/settings.py [--seeds 101 102] [--scenarios base drift] [--gpus 1000] [--draws 10] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

from benchmarks.development_fleets import DevelopmentFleets, Kept, only  # noqa: E402
from benchmarks.scoreboard.pooled import Pool  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from models.assessment import Assessment, assess  # noqa: E402
from models.bootstrap import interval  # noqa: E402
from models.config import ModelsSection, SearchSection  # noqa: E402
from pipeline.params import Params, load_params  # noqa: E402
from pipeline.report.wording import between, number, percent, points, verdict  # noqa: E402

GIVEN, SEARCHED = "as given", "searched"


def replay(
    matrix: FeatureMatrix, params: Params, models: ModelsSection, draws: int, work: Path
) -> tuple[pd.DataFrame, int, dict[str, Any]]:
    """Replay a fleet with the given settings and with searched ones.

    Returns: predictions of all models with ``variant`` "as given" or "searched"; K; what the search tried and the CPU
    seconds of both.
    """
    parts, seconds, kept = [], {}, Kept(work)
    for variant, search in ((GIVEN, SearchSection()), (SEARCHED, SearchSection(draws=draws))):
        training = params.training.model_copy(update={"search": search})
        done, took = kept.backtest(variant, matrix, training=training, models=models, params=params)
        seconds[variant] = round(took, 1)
        mine = done.predictions
        mine = mine[(mine["variant"] == "sliding") & mine["model"].isin([*models.learners, models.profile])]
        parts.append(mine.assign(model=mine["model"].astype(str), variant=variant))
        sys.stderr.write(f"  {variant}: {seconds[variant]:.0f} s\n")
    compared = pd.DataFrame() if done.searched is None else done.searched.dropna(subset="mean")
    if compared.empty:
        sys.exit("before the first test there are too few incidents to search on: take more --gpus")
    trials = compared[["learner", "trial", "settings", "mean", "chosen"]].to_dict("records")
    return pd.concat(parts, ignore_index=True), done.k, {"seconds": seconds, "trials": trials}


def row(model: str, one: Assessment, two: Assessment) -> str:
    """Write one model's line: searched beside given."""
    cells = [model]
    for statistic, write, told in (
        ("precision_at_k", percent, points),
        ("average_precision", lambda value: number(value, 4), lambda value: f"{value:+.4f}"),
    ):
        bounds = interval(two.replicates[statistic] - one.replicates[statistic])
        gain = two.point[statistic] - one.point[statistic]
        cells += [
            write(one.point[statistic]),
            write(two.point[statistic]),
            f"{told(gain)} {between(told(bounds.low), told(bounds.high))}",
            verdict(bounds.low, bounds.high),
        ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Replay the fleets, pool them, print the table and a line of JSON for each scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102])
    parser.add_argument("--scenarios", nargs="+", default=["base", "drift"])
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--days", type=int, default=120)
    parser.add_argument("--acceleration", type=float, default=5.0)
    parser.add_argument("--draws", type=int, default=10, help="settings tried for each learner")
    parser.add_argument("--refit-every", type=int, default=28, help="days")
    parser.add_argument("--params", type=Path, nargs="+", default=[ROOT / "params.yaml"])
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "settings")
    parser.add_argument("--quick", action="store_true", help="one small fleet of drift, two settings a learner")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.scenarios, args.gpus, args.draws, args.acceleration = args.seeds[:1], ["drift"], 256, 2, 20.0
    params = load_params(args.params)
    training = params.training.model_copy(update={"refit_every": timedelta(days=args.refit_every)})
    params = params.model_copy(update={"training": training})
    models = only(list(params.models.parallel.members), params)
    asked = training.model_copy(update={"search": SearchSection(draws=args.draws)})  # so that a fleet is kept by it
    held = DevelopmentFleets(
        args.work,
        args.gpus,
        args.days,
        args.acceleration,
        params.model_copy(update={"training": asked}),
        models,
        Path(__file__),
    )
    for scenario in args.scenarios:
        parts = [
            held.of(scenario, seed, lambda matrix, work: replay(matrix, params, models, args.draws, work))
            for seed in args.seeds
        ]
        pool = Pool(parts, 300)
        found = {name: assess(pool.scored(*name), pool.weights) for name in pool.names}
        seen = [part.facts["fleet"] for part in parts]
        cost = {variant: sum(each["seconds"][variant] for each in seen) for variant in (GIVEN, SEARCHED)}
        sys.stdout.write(
            f"\n{scenario}, seeds {', '.join(map(str, args.seeds))}, {args.gpus} GPUs, {args.days} days, acceleration "
            f"{args.acceleration:g}, refits every {args.refit_every} days, {args.draws} settings a learner; "
            f"{cost[GIVEN]:.0f} CPU s without and {cost[SEARCHED]:.0f} with the search\n\n"
            "| model | precision@K | searched | difference, points | verdict "
            "| average precision | searched | difference | verdict |\n|---|---|---|---|---|---|---|---|---|\n"
        )
        names = [models.profile, *(name for name in models.learners if name != models.profile)]
        for name in names:
            sys.stdout.write(row(name, found[name, GIVEN], found[name, SEARCHED]) + "\n")
        for seed, each in zip(args.seeds, seen, strict=True):
            for trial in each["trials"]:
                if trial["chosen"]:
                    sys.stdout.write(f"\nseed {seed}, {trial['learner']}: trial {trial['trial']}, {trial['settings']}")
        sys.stdout.write("\n\n")
        one, two = (found[models.profile, variant].point["average_precision"] for variant in (GIVEN, SEARCHED))
        told = {
            "name": f"settings_{scenario}", "value": round(two, 5), "unit": "average precision", "peer": GIVEN,
            "ratio": round(two / one, 3) if one else None, "limit_share": None, "checked": True,
        }  # fmt: skip
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
