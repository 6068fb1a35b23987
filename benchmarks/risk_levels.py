"""Risk level at each refit: the rule that follows the newest failures, compared with the one that weights forecasts.

Synthetic fleets of 300 units over ten months have daily decisions and scores with a fixed separation, so that the rules
differ only in the level. Failures come in bursts of two weeks (with refits every week or every four weeks), at a steady
rate, at a rate that drifts fourfold, or at a rate that jumps threefold; rare or common. All decisions are pooled and
ranked by risk. Intervals resample fleets.

    python benchmarks/risk_levels.py [--quick] [--titan FOLDER]

``--titan`` adds weekly forecasts of the failures in olcf/TitanGPULife (``gc_full.csv``).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import poisson

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

from evaluation.metrics.metrics import Floats, Ranking
from models.rows.failure_rate import expected_rate, forecasts

WEEKS, FIRST, UNITS = 43, 12, 300
SEPARATION = 1.6
"""Distance between the mean scores of positive and negative rows, in standard deviations."""

RULES = ("newest", "weighed")
WORLDS = ("bursts", "bursts, monthly", "steady, rare", "steady", "drift, rare", "drift", "jump")
MEASURES = ("average precision", "precision at K", "log loss of weekly counts")


def weekly_rates(world: str, rng: np.random.Generator) -> Floats:
    """Return the expected number of failures per week; bursts add up to about 100."""
    rates = np.full(
        WEEKS, {"bursts": 1.0, "bursts, monthly": 1.0, "steady": 12.0, "drift": 12.0, "jump": 3.0}.get(world, 2.5)
    )
    if world.startswith("bursts"):
        for week in np.flatnonzero(rng.random(WEEKS) < 0.08):
            rates[week : week + 2] += rng.gamma(2.0, 5.0)
    if world.startswith("drift"):
        rates *= np.exp(np.linspace(-0.7, 0.7, WEEKS))
    if world == "jump":
        rates[WEEKS // 2 :] *= 3
    return rates


def levels(incidents: Floats, rows: Floats, ahead: int = 1) -> Floats:
    """Return the rate that each of :data:`RULES` expects in the weeks ahead."""
    return np.maximum([forecasts(incidents, rows)[0], expected_rate(incidents, rows, ahead)], 0.3 / rows.sum())


def measure(world: str, seed: int) -> Floats:
    """Replay one fleet; return the measures of each rule, shape (rules, measures)."""
    rng = np.random.default_rng([seed, WORLDS.index(world)])
    incidents = rng.poisson(weekly_rates(world, rng)).astype(np.float64)
    rows = np.full(WEEKS, UNITS * 7.0)
    risks: list[list[Floats]] = [[] for _ in RULES]
    labels, losses = [], []
    ahead = 4 if world.endswith("monthly") else 1
    expected = np.zeros(len(RULES))
    for week in range(FIRST, WEEKS):
        if (week - FIRST) % ahead == 0:
            expected = levels(incidents[:week], rows[:week], ahead)
        label = np.arange(int(rows[week])) < incidents[week]
        score = rng.normal(size=len(label)) + SEPARATION * label
        for rule, level in zip(risks, expected, strict=True):
            rule.append(np.log(level) + SEPARATION * score)
        losses.append(-poisson.logpmf(incidents[week], expected * rows[week]))
        labels.append(label)
    positive = np.concatenate(labels)
    out = []
    for rule, loss in zip(risks, np.mean(losses, axis=0), strict=True):
        risk = np.concatenate(rule)
        top = np.argsort(-risk, kind="stable")[: positive.sum()]
        out.append(
            (float(Ranking.build(risk, positive).precision_and_auc()[0][0]), float(positive[top].mean()), float(loss))
        )
    return np.array(out)


def titan(folder: Path) -> Floats:
    """Return each rule's loss on Titan's weekly failures, from the second year on; shape (rules, weeks)."""
    table = pd.read_csv(folder / "gc_full.csv", usecols=["insert", "remove", "event"], parse_dates=["insert", "remove"])
    edges = pd.date_range(table["insert"].min(), table["remove"].max(), freq="7D")
    failed = table.loc[table["event"].notna(), "remove"]
    incidents = np.histogram(failed.astype("int64"), edges.astype("int64"))[0].astype(np.float64)
    in_service = [((table["insert"] <= edge) & (table["remove"] > edge)).sum() for edge in edges[:-1]]
    rows = 7.0 * np.maximum(np.array(in_service, dtype=np.float64), 1.0)
    weeks = range(52, len(rows))
    return np.array(
        [-poisson.logpmf(incidents[week], levels(incidents[:week], rows[:week]) * rows[week]) for week in weeks]
    ).T


def interval(values: Floats) -> tuple[float, float, float]:
    """Return the mean of differences, and its 95 % interval by resampling."""
    drawn = np.random.default_rng(0).choice(values, (2_000, len(values))).mean(axis=1)
    return float(values.mean()), *np.quantile(drawn, [0.025, 0.975])


def main() -> None:
    """Print the comparison of the rules, and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 fleets of each kind instead of 60")
    parser.add_argument("--titan", type=Path, help="folder of gc_full.csv")
    arguments = parser.parse_args()
    fleets = 8 if arguments.quick else 60
    worst, gains = 0.0, {}
    print(f"{'':17}{'measure':28}{RULES[0]:>9}{RULES[1]:>9}   weighed - newest")
    for world in WORLDS:
        found = np.array([measure(world, seed) for seed in range(fleets)])
        for number, name in enumerate(MEASURES):
            newest, weighed = found[:, :, number].T
            mean, low, high = interval(weighed - newest)
            print(
                f"{world:17}{name:28}{newest.mean():9.4f}{weighed.mean():9.4f}   {mean:+.4f} [{low:+.4f}, {high:+.4f}]"
            )
            if name == MEASURES[0]:
                gains[world], worst = (newest.mean(), weighed.mean()), min(worst, high)
    if arguments.titan is not None:
        newest, weighed = titan(arguments.titan)
        mean, low, high = interval(weighed - newest)
        print(
            f"{'Titan':17}{MEASURES[2]:28}{newest.mean():9.4f}{weighed.mean():9.4f}"
            f"   {mean:+.4f} [{low:+.4f}, {high:+.4f}]"
        )
    peer, value = gains["bursts, monthly"]
    line = {
        "name": "risk_levels", "value": round(value, 4), "unit": "average precision, bursts, monthly refits",
        "peer": {"newest failures": round(peer, 4)}, "ratio": round(value / peer, 3), "limit_share": None,
        "checked": worst >= 0,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
