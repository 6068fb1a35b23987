"""How long a fleet's rows take to score, beside the libraries that trained the models.

Run it alone: ``python benchmarks/score_fleet.py [--quick]``. The model's own evaluation and nothing else, on one
thread, in seconds of the processor: 10,000 rows of 300 features, and a request's 512 and 1. The models are the
repository's learners with their default settings, fitted here on made-up counters and gauges with gaps, and LightGBM
models of larger trees, for which another part of the kernel works. Every score is compared with the library's before
anything is timed. What compiling costs, once a machine, is measured apart, in a process of its own with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import skops.io
from threadpoolctl import threadpool_limits

from models.learners import THREADS, fit_learners, make_learner
from models.trees.evaluate import TreeEvaluator, read_evaluator

REQUIRED: Final = 2.5
"""How many times as fast as LightGBM's predict it must be for a fleet."""

AIM: Final = f"{REQUIRED:g} times LightGBM's predict"

TOLERANCE: Final = 1e-6
"""How far a probability may be from the library's."""

FLEET: Final = 10_000
FEATURES: Final = 300
SIZES: Final = (FLEET, 512, 1)
_SEED: Final = 101


@dataclass(frozen=True, slots=True)
class Contender:
    """A model, as its library scores it and as ours does; each gives the probability of the positive class."""

    name: str
    peer: str
    library: Callable[[np.ndarray], np.ndarray]
    ours: TreeEvaluator


def telemetry_rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make rows of counters with ties, gauges and gaps, and labels that some of them foretell."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, FEATURES), dtype=np.float32)
    counters = X[:, : FEATURES // 2]
    np.round(np.exp(2 * counters), out=counters)
    X[rng.random(X.shape, dtype=np.float32) < 0.05] = np.nan
    signal = np.log1p(np.nan_to_num(X[:, :5])).sum(axis=1) + np.nan_to_num(X[:, -5:]).sum(axis=1)
    return X, (rng.random(n) < 1 / (1 + np.exp(9 - signal))).astype(np.int64)


def contenders(quick: bool) -> list[Contender]:
    """Fit the models, and give each as its library and as ours."""
    X, y = telemetry_rows(5_000 if quick else 20_000, _SEED)
    larger = {"lightgbm, 31 leaves": 31, "lightgbm, 255 leaves": 255}
    learners = {
        **{name: make_learner(name, seed=_SEED) for name in ("lightgbm", "xgboost", "random_forest")},
        **{
            name: make_learner("lightgbm", seed=_SEED, settings={"num_leaves": leaves, "min_child_samples": 5})
            for name, leaves in larger.items()
        },
    }
    return [_contender(name, learner) for name, learner in fit_learners(learners, X, y).items()]


def _contender(name: str, learner: Any) -> Contender:
    if name == "xgboost":
        booster = learner.get_booster()
        booster.set_param({"nthread": THREADS})
        ours = read_evaluator(bytes(booster.save_raw("ubj")), "xgboost.ubj", FEATURES)
        return Contender(name, "XGBoost's inplace_predict", booster.inplace_predict, ours)
    if name == "random_forest":
        ours = read_evaluator(skops.io.dumps(learner), "forest.skops", FEATURES)
        return Contender(name, "scikit-learn's predict_proba", lambda X: learner.predict_proba(X)[:, 1], ours)
    booster = learner.booster_
    ours = read_evaluator(booster.model_to_string().encode(), "lightgbm.txt", FEATURES)
    return Contender(name, "LightGBM's predict", lambda X: booster.predict(X, num_threads=THREADS), ours)


def check(contender: Contender, X: np.ndarray) -> bool:
    """End the run where scores differ by more than the tolerance; tell whether they are equal bit for bit."""
    theirs, ours = contender.library(X), contender.ours.positive(X)
    if not (np.abs(theirs - ours) <= TOLERANCE).all():
        sys.exit(f"{contender.name}: scores differ by {np.abs(theirs - ours).max():.3g}: nothing is measured")
    return np.array_equal(theirs, ours)


def seconds_a_call(calls: dict[str, Callable[[], Any]], rounds: int, at_least: float = 0.002) -> dict[str, float]:
    """Give each call's best mean time on the processor.

    They take turns, so that a slow moment of the machine meets all of them; and a clock on the wall would favour the
    shorter call on a busy machine, which the scheduler interrupts less.
    """
    best = dict.fromkeys(calls, math.inf)
    repeats = {}
    for name, call in calls.items():
        start = time.process_time()
        call()
        repeats[name] = max(1, math.ceil(at_least / max(time.process_time() - start, 1e-7)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (time.process_time() - start) / repeats[name])
    return best


def compile_seconds() -> tuple[float, float]:
    """Give the seconds that importing the kernel takes with an empty cache and with the cache that this leaves.

    Both are what it takes beyond importing numba itself.
    """
    code = "import time, numba\nat = time.process_time()\nimport models.trees.kernel\nprint(time.process_time() - at)"
    with tempfile.TemporaryDirectory() as cache:
        found = [
            float(
                subprocess.run(  # noqa: S603 - our own code
                    [sys.executable, "-c", code],
                    env={**os.environ, "NUMBA_CACHE_DIR": cache},
                    cwd=Path(__file__).resolve().parents[1],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(2)
        ]
    return found[0], found[1]


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="models of fewer rows, fewer rounds")
    quick = parser.parse_args().quick
    rounds = 7 if quick else 25
    cold, warm = compile_seconds()
    print(f"compiling the kernel: {cold:.1f} s once, {warm:.2f} s from its cache\n")
    models = contenders(quick)
    X, _ = telemetry_rows(FLEET, _SEED + 1)
    with threadpool_limits(limits=THREADS):
        equal = {each.name: check(each, X) for each in models}
        print(f"{'model':<22}{'rows':>7}{'ours ms':>11}{'library ms':>12}{'ratio':>8}{'us/row':>9}  beside")
        measured = {}
        for model in models:
            for size in SIZES:
                rows = X[:size]
                seconds = seconds_a_call(
                    {
                        "ours": lambda m=model, r=rows: m.ours.positive(r),
                        "library": lambda m=model, r=rows: m.library(r),
                    },
                    rounds,
                )
                measured[model.name, size] = seconds
                mine, theirs = seconds["ours"], seconds["library"]
                print(
                    f"{model.name:<22}{size:>7,}{mine * 1e3:>11.3f}{theirs * 1e3:>12.3f}{theirs / mine:>8.1f}"
                    f"{mine / size * 1e6:>9.2f}  {model.peer}{', bit-equal' if equal[model.name] else ''}"
                )
    fleet = measured["lightgbm", FLEET]
    ratio = fleet["library"] / fleet["ours"]
    met = ratio >= REQUIRED
    line = {
        "name": "score_fleet",
        "value": round(fleet["ours"], 5),
        "unit": "CPU s for 10,000 rows",
        "peer": "LightGBM's predict",
        "ratio": round(ratio, 1),
        "limit_share": None,
        "checked": True,
        "aim": AIM,
        "met": met,
        "others": {
            f"{name}, {size} rows": round(each["library"] / each["ours"], 1) for (name, size), each in measured.items()
        },
    }
    print(json.dumps(line))
    if not met:
        sys.exit(f"ours is {ratio:.1f} times as fast as LightGBM's predict; it must be {REQUIRED} times")


if __name__ == "__main__":
    main()
