"""Window features from Parquet to Parquet, compared with pandas and Polars on the same samples.

Two million generated samples, 10 gauges x 3 windows (1, 3, 7 days) x 5 statistics, a decision every six hours. predrain
writes more columns than its peers (the difference to the previous window, the newest value). Each side runs twice in a
separate process, and the second run counts; the first, which also loads libraries and compiled code, is reported
separately. Kernels are compiled, once per machine, and reported first. Times are only reported if all values agree.

    python benchmarks/features_file_to_file.py [--quick]
"""

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

import numpy as np
import pandas as pd

from benchmarks.peers.task import STATISTICS, Task, hours
from benchmarks.shared.compiling import print_compile_time
from benchmarks.shared.generated import channels_of, generate
from benchmarks.shared.processes import peak_mb, run_json
from features.config import DecisionSection, FeatureSection, LabelSection
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from models.config import TrainingSection
from telemetry.dataset.store import Dataset

WINDOWS = (timedelta(days=1), timedelta(days=3), timedelta(days=7))
CHANNELS = 10
DELAY = timedelta(minutes=10)
PEERS = ("pandas", "polars")

REQUIRED = {"polars": 10, "pandas": 25}
"""Minimum duration of a peer, as a multiple of predrain's."""

AIM = f"{REQUIRED['polars']} times Polars, {REQUIRED['pandas']} times pandas"


def make_task(dataset: Dataset, out: Path) -> Task:
    """Define the task for a dataset."""
    every = timedelta(hours=6)
    first, last = dataset.meta.span
    start = first.replace(hour=0, minute=0, second=0, microsecond=0)
    times = [start + every * i for i in range(int((last - start) / every) + 1)]
    gauges = [name for name, channel in dataset.meta.channels.items() if channel.kind == "gauge"][:CHANNELS]
    files = sorted((dataset.path / "telemetry").glob("*/*.parquet"))
    return Task(
        files, gauges, WINDOWS, [decision_time for decision_time in times if decision_time >= first], DELAY, out
    )


def run_predrain(dataset: Dataset, task: Task) -> None:
    """Build the features of the task with predrain."""
    features = FeatureSection(
        groups=("telemetry",),
        channels=tuple(task.channels),
        windows=(timedelta(hours=6), *task.windows),
        delay=task.delay,
    )
    build_matrix(
        dataset,
        task.out,
        decision=DecisionSection(every=task.every),
        labels=LabelSection(),
        features=features,
        training=TrainingSection(augmentation=0),
        seed=1,
    )


def run_one(who: str, dataset: Dataset, out: Path) -> None:
    """Run the task twice in this process, and print the cost of both runs as JSON."""
    task = make_task(dataset, out)
    if who == "predrain":
        run = functools.partial(run_predrain, dataset)
    else:
        run = __import__(f"benchmarks.peers.with_{who}", fromlist=["run"]).run
    report = {}
    for which in ("first", "second"):
        begin = time.perf_counter(), time.process_time()
        run(dataclasses.replace(task, out=out.with_name(f"{which}-{out.name}")))
        report[which] = time.perf_counter() - begin[0]
        report["cpu"] = time.process_time() - begin[1]
    print(json.dumps({**report, "peak_mb": peak_mb()}))


def side(who: str, dataset: Path, out: Path) -> dict[str, float]:
    """Run one side in a separate process."""
    return run_json(__file__, "--one", who, "--dataset", dataset, "--out", out)


def ours(out: Path, channels: list[str]) -> pd.DataFrame:
    """Read predrain's matrix with the peers' column names."""
    matrix = FeatureMatrix.open(out)
    names = {
        column.name: f"{column.channel}__{column.statistic}__{hours(column.window)}h"
        for column in matrix.columns
        if column.channel in channels and column.statistic in STATISTICS and column.window in WINDOWS
    }
    if len(names) != len(channels) * len(STATISTICS) * len(WINDOWS):
        sys.exit(f"predrain has {len(names)} of the columns")
    frame = pd.DataFrame(matrix.values(None, list(names)), columns=list(names.values()))
    return pd.concat([matrix.rows[["unit", "decision_time"]].rename(columns={"unit": "gpu"}), frame], axis=1)


def differing(mine: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """Return the largest relative difference over the rows that predrain has; NaNs must coincide."""
    theirs = theirs.copy()
    theirs["decision_time"] = pd.to_datetime(theirs["decision_time"], utc=True).dt.as_unit("ms")
    mine = mine.copy()
    mine["gpu"] = mine["gpu"].astype(str)
    both = mine.merge(theirs, on=["gpu", "decision_time"], how="left", suffixes=("", "__peer"))
    worst = 0.0
    for name in mine.columns[2:]:
        a, b = both[name].to_numpy(float), both[f"{name}__peer"].to_numpy(float)
        scale = (
            np.nanmax(np.abs(b)) * 1e-3 if np.isfinite(b).any() else 1.0
        )  # near zero: relative to a thousandth of the largest
        known = np.isfinite(a) & np.isfinite(b)
        alone = int((np.isfinite(a) != np.isfinite(b)).sum())
        if alone:
            sys.exit(f"{name}: {alone} of {len(a)} rows are known to one side only: nothing is measured")
        if known.any():
            worst = max(worst, float(np.max(np.abs(a - b)[known] / np.maximum(np.abs(b[known]), scale))))
    return worst


def run_sides(folder: Path, *, gpus: int, days: float) -> tuple[dict[str, dict[str, float]], int]:
    """Run the task with predrain and its peers; exit with an error if their results differ.

    Returns: cost of each side by name, and the number of samples.
    """
    dataset = generate(folder / "fleet", gpus=gpus, days=days, channels=channels_of(gauges=CHANNELS, counters=0))
    channels = list(make_task(dataset, folder).channels)
    took = {"predrain": side("predrain", dataset.path, folder / "predrain")}
    mine = ours(folder / "second-predrain", channels)
    for peer in PEERS:
        took[peer] = side(peer, dataset.path, folder / f"{peer}.parquet")
        worst = differing(mine, pd.read_parquet(folder / f"second-{peer}.parquet"))
        print(f"{peer}: largest relative difference {worst:.1e} over {len(mine):,} rows")
        if worst > 1e-4:
            sys.exit(f"{peer} computes something else: nothing is measured")
    return took, sum(dataset.read_bucket(bucket, ["timestamp"]).num_rows for bucket in dataset.buckets())


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--dataset", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, Dataset.open(args.dataset), args.out)
        return
    print_compile_time(("telemetry",))
    with tempfile.TemporaryDirectory() as name:
        took, samples = run_sides(Path(name), gpus=16 if args.quick else 116, days=120)
    print(f"{samples:,} samples, {CHANNELS} channels x {len(WINDOWS)} windows x {len(STATISTICS)} statistics")
    print(f"{'':<10}{'wall s':>9}{'CPU s':>9}{'first s':>9}{'peak MB':>9}{'ratio':>8}")
    wall = {who: costs["second"] for who, costs in took.items()}
    for who, costs in took.items():
        ratio = wall[who] / wall["predrain"]
        print(
            f"{who:<10}{wall[who]:>9.2f}{costs['cpu']:>9.2f}{costs['first']:>9.2f}{costs['peak_mb']:>9.0f}{ratio:>8.1f}"
        )
    met = all(wall[who] >= times * wall["predrain"] for who, times in REQUIRED.items())
    line = {
        "name": "features_file_to_file",
        "value": round(samples / wall["predrain"]),
        "unit": "samples/s",
        "peer": "Polars",
        "ratio": round(wall["polars"] / wall["predrain"], 1),
        "limit_share": None,
        "checked": True,
        "aim": AIM,
        "met": met,
        "others": {"pandas": round(wall["pandas"] / wall["predrain"], 1)},
    }
    print(json.dumps(line))
    if not met and not args.quick:
        sys.exit(f"it is to be {AIM}")


if __name__ == "__main__":
    main()
