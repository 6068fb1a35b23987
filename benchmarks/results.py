"""Five simulated fleets each of ``base`` and ``drift``: does what the paper proposes help? Writes docs/results.md.

Runs the pipeline's own stages with params.yaml on fleets that no parameter was chosen on (seeds 1 to 5; development
uses seeds from 100 on), pools the predictions, and resamples GPUs for the intervals. A finished fleet is kept under
benchmarks/work/results and taken from there as long as neither code nor parameters change.

    python benchmarks/results.py [--seeds 5] [--scenarios base drift] [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from features.building import build_matrix
from models.evaluation import Evaluation, evaluate
from models.oracle import read_truth
from models.sliding import run_backtest
from pipeline.params import Params, load_params
from simulator.simulate import simulate
from telemetry.store import Dataset

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("telemetry", "features", "models", "pipeline", "simulator")
APART = timedelta(days=3653)
"""Shift between the seeds' clocks: pooled fleets must not share decision times, because K is a budget of one fleet."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one fleet left: predictions of all models, the true risks, the budget."""

    predictions: pd.DataFrame
    truth: pd.DataFrame
    k: int
    incidents: int


def code_digest() -> str:
    """Return the SHA-256 over the sources of the rooms that shape a result."""
    total = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


def run_fleet(scenario: str, seed: int, params: Params, work: Path, key: str) -> Run:
    """Simulate, compute features, replay; or take what an earlier call with the same key left."""
    folder = work / f"{scenario}-{seed}"
    note = folder / "done.json"
    if not note.is_file() or json.loads(note.read_text())["key"] != key:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fleet = params.simulate
        summary = simulate(
            folder / "dataset",
            gpus=fleet.gpus,
            days=fleet.days,
            seed=seed,
            scenario=scenario,
            acceleration=fleet.acceleration,
        )
        matrix = build_matrix(
            Dataset.open(folder / "dataset"),
            folder / "matrix",
            decision=params.decision,
            labels=params.labels,
            features=params.features,
            training=params.training,
            seed=params.seed,
        )
        result = run_backtest(
            matrix, training=params.training, models=params.models, backtest=params.backtest, seed=params.seed
        )
        result.predictions.to_parquet(folder / "predictions.parquet", index=False)
        shutil.rmtree(folder / "matrix")
        shutil.rmtree(folder / "dataset")
        note.write_text(json.dumps({"key": key, "k": result.k, "incidents": summary.incidents}))
    told = json.loads(note.read_text())
    predictions = pd.read_parquet(folder / "predictions.parquet")
    return Run(predictions, read_truth(folder / "dataset-truth"), told["k"], told["incidents"])


def pool(runs: dict[int, Run], replicates: int) -> Evaluation:
    """Evaluate several fleets as one: alerts and hits add up, GPUs of all fleets are resampled."""
    predictions, truths = [], []
    for place, (seed, run) in enumerate(sorted(runs.items())):
        shift, name = place * APART, f"s{seed}-"
        mine = run.predictions.copy()
        mine["decision_time"] += shift
        mine["incident_start"] += shift
        mine["incident"] += place * 1_000_000
        for column in ("unit", "gpu"):
            mine[column] = name + mine[column].astype("str")
        truth = run.truth.copy()
        truth["timestamp"] += shift
        truth["gpu"] = name + truth["gpu"].astype("str")
        predictions.append(mine)
        truths.append(truth)
    budgets = {run.k for run in runs.values()}
    return evaluate(
        pd.concat(predictions, ignore_index=True),
        k=max(budgets),
        bootstrap=replicates,
        seed=1,
        truth=pd.concat(truths, ignore_index=True),
    )


def share(value: float) -> str:
    """Write a share in percent."""
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


def bracket(low: float, high: float, factor: float = 100.0) -> str:
    """Write an interval."""
    return "" if math.isnan(low) or math.isnan(high) else f" [{factor * low:.1f}, {factor * high:.1f}]"


def verdict(low: float, high: float) -> str:
    """Say what an interval of a difference allows to say."""
    if math.isnan(low) or math.isnan(high) or low <= 0 <= high:
        return "not shown"
    return "better" if low > 0 else "worse"


def model_table(evaluation: Evaluation) -> list[str]:
    """Every model: sliding, trained once, and the oracle's share."""
    lines = [
        "| model | precision@K, sliding | precision@K, trained once | recall | average precision | top 5 % capture "
        "| share of the oracle's precision@K |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, row in evaluation.table[evaluation.table["variant"] != "train_once"].iterrows():
        once = evaluation.row(row["model"], "train_once")
        cells = [
            str(row["model"]),
            share(row["precision_at_k"]) + bracket(row["precision_at_k_low"], row["precision_at_k_high"]),
            ""
            if once is None
            else share(once["precision_at_k"]) + bracket(once["precision_at_k_low"], once["precision_at_k_high"]),
            share(row["recall"]),
            f"{row['average_precision']:.4f}",
            share(row["capture"]),
            share(row["oracle_share_precision_at_k"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def paired_table(evaluation: Evaluation, comparison: str, statistic: str = "precision_at_k") -> list[str]:
    """Differences on the same resamples, with what they allow to say."""
    frame = evaluation.paired
    frame = frame[(frame["comparison"] == comparison) & (frame["statistic"] == statistic)]
    lines = ["| model | against | difference in points | verdict |", "|---|---|---|---|"]
    for _, row in frame.iterrows():
        other = row["other_model"] if row["other_model"] != row["model"] else row["other_variant"].replace("_", " ")
        difference = f"{100 * row['difference']:+.1f}{bracket(row['low'], row['high'])}"
        lines.append(f"| {row['model']} | {other} | {difference} | {verdict(row['low'], row['high'])} |")
    return lines


def equal_table(evaluation: Evaluation) -> list[str]:
    """Ensembles that alert less than K, beside every learner cut to as many alerts."""
    frame = evaluation.equal_alerts
    frame = frame[
        (frame["variant"] == "sliding")
        & frame["other_model"].isin(["lightgbm", "xgboost", "random_forest", "logistic", "mlp"])
    ]
    lines = [
        "| ensemble | alerts | its precision | against | at as many alerts | difference | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, row in frame.iterrows():
        difference = f"{100 * row['difference']:+.1f}{bracket(row['low'], row['high'])}"
        lines.append(
            f"| {row['model']} | {row['alerts']} | {share(row['precision'])} | {row['other_model']} | "
            f"{share(row['other_precision'])} | {difference} | {verdict(row['low'], row['high'])} |"
        )
    return lines


def month_table(runs: dict[int, Run], profile: str) -> list[str]:
    """Precision@K of the profile by month of the test, all seeds together, to see whether train-once decays."""
    frame = pd.concat([run.predictions for run in runs.values()], ignore_index=True)
    frame = frame[
        (frame["model"] == profile) & frame["label"].notna() & (frame["rank"] <= max(r.k for r in runs.values()))
    ]
    month = frame["decision_time"].dt.strftime("%Y-%m")
    hits = frame.groupby([month, "variant"], observed=True)["label"].agg(["sum", "count"]).unstack("variant")
    lines = ["| month | sliding | trained once |", "|---|---|---|"]
    for name, row in hits.iterrows():
        rates = [share(float(row["sum", each] / row["count", each])) for each in ("sliding", "train_once")]
        lines.append(f"| {name} | {rates[0]} | {rates[1]} |")
    return lines


def said(evaluation: Evaluation, scenario: str, profile: str) -> list[str]:
    """Say what may be claimed, in sentences made from the intervals."""
    paired = evaluation.paired[evaluation.paired["statistic"] == "precision_at_k"]
    sentences = []
    sliding = paired[paired["comparison"] == "sliding"]
    better = [row["model"] for _, row in sliding.iterrows() if verdict(row["low"], row["high"]) == "better"]
    worse = [row["model"] for _, row in sliding.iterrows() if verdict(row["low"], row["high"]) == "worse"]
    sentences.append(
        f"- Sliding against trained once, on `{scenario}`: better for {', '.join(better) or 'no model'}, worse for "
        f"{', '.join(worse) or 'none'}, no difference shown for the other {len(sliding) - len(better) - len(worse)}."
    )
    for _, row in paired[paired["comparison"] == "ensemble"].iterrows():
        sentences.append(
            f"- {row['model']} against the best single learner ({row['other_model']}): "
            f"{100 * row['difference']:+.1f} points"
            f"{bracket(row['low'], row['high'])}: {verdict(row['low'], row['high'])}."
        )
    best = evaluation.row("oracle", "oracle")
    mine = evaluation.row(profile, "sliding")
    if best is not None and mine is not None:
        sentences.append(
            f"- The oracle reaches a precision of {share(best['precision_at_k'])} at the same K; "
            f"the profile ({profile}) reaches {share(mine['oracle_share_precision_at_k'])} of it"
            f"{bracket(mine['oracle_share_precision_at_k_low'], mine['oracle_share_precision_at_k_high'])}."
        )
    return sentences


def page(found: dict[str, dict[int, Run]], params: Params, seconds: float, command: str, replicates: int) -> str:
    """Write the page in Markdown."""
    fleet = params.simulate
    profile = params.models.profile
    lines = [
        "# Results",
        "",
        f"Made by `{command}` in {seconds / 60:.0f} minutes of one machine; nothing here is typed by hand. All fleets "
        f"are **simulated**, {fleet.gpus} GPUs over {fleet.days} days, with failure rates multiplied by "
        f"{fleet.acceleration:g}; no parameter was chosen on these seeds. Brackets: 95 % intervals from {replicates} "
        "resamples of GPUs. The best single learner is chosen on the decisions it is compared on, which favours it "
        'against the ensembles. "Not shown" means that the interval of the difference holds zero: nothing is claimed.',
        "",
    ]
    for scenario, runs in found.items():
        evaluation = pool(runs, replicates)
        base = evaluation.table.iloc[0]
        incidents = ", ".join(str(run.incidents) for _, run in sorted(runs.items()))
        lines += [
            f"## `{scenario}`, seeds {', '.join(map(str, sorted(runs)))}",
            "",
            f"Incidents in each fleet: {incidents}; {int(base['incidents'])} of them in the replayed halves. Base rate "
            f"{share(base['base_rate'])}, K = {evaluation.k} alert{'s' if evaluation.k > 1 else ''} a decision time.",
            "",
            *said(evaluation, scenario, profile),
            "",
            *model_table(evaluation),
            "",
            "### Sliding against trained once, precision@K",
            "",
            *paired_table(evaluation, "sliding"),
            "",
            "### Ensembles against the best single learner, precision@K",
            "",
            *paired_table(evaluation, "ensemble"),
            "",
            "### At equal numbers of alerts",
            "",
            *equal_table(evaluation),
            "",
            f"### By month, {profile}",
            "",
            *month_table(runs, profile),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    """Run all fleets, pool them, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1, help="from 100 on for development")
    parser.add_argument("--scenarios", nargs="+", default=["base", "drift"])
    parser.add_argument("--params", type=Path, nargs="+", default=[ROOT / "params.yaml"])
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--quick", action="store_true", help="two seeds of drift with few resamples, to stdout only")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.scenarios = 2, ["drift"]
    params = load_params(args.params)
    replicates = 50 if args.quick else 500
    key = hashlib.sha256((code_digest() + params.model_dump_json()).encode()).hexdigest()
    begin = time.monotonic()
    found: dict[str, dict[int, Run]] = {}
    for scenario in args.scenarios:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            found.setdefault(scenario, {})[seed] = run_fleet(scenario, seed, params, args.work, key)
            sys.stderr.write(f"{scenario} {seed}: {time.monotonic() - begin:.0f} s\n")
    text = page(found, params, time.monotonic() - begin, "make results", replicates)
    if not args.quick:
        args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    facts: dict[str, Any] = {"name": "results", "value": None, "unit": "page", "peer": None, "ratio": None}
    sys.stdout.write(json.dumps(facts | {"limit_share": None, "checked": True}) + "\n")


if __name__ == "__main__":
    main()
