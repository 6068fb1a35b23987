"""Features of more samples than fit into memory, from dataset to matrix.

By default 21.6 million generated samples of 20 channels (1,250 GPUs, 120 days, every ten minutes), a decision every six
hours, telemetry windows of 6, 24 and 72 hours. ``--all`` uses the feature groups and windows of params.yaml,
``--whole`` also the paper's size: 345 million samples of 20,000 GPUs (about 25 GB of disk). For comparison, reading the
same Parquet files with as many threads and copying memory are timed. Kernels are compiled, once per machine, and
reported first. A build is only reported if the window statistics of some rows equal those of a plain Python
implementation; other groups are verified by tests alone.

    python benchmarks/features_out_of_core.py [--quick] [--all] [--whole] [--work FOLDER]
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

import numpy as np
import numpy.typing as npt
import pandas as pd
from numba import njit

from benchmarks.shared.compiling import print_compile_time
from benchmarks.shared.generated import FAILURES, channels_of, generate
from benchmarks.shared.processes import peak_mb, run_json
from features.config import GROUPS, FeatureSection
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from foundation.times import duration_ms, instant_ms
from pipeline.params import load_params
from telemetry.dataset.store import Dataset
from tests.features import window_oracle

CHANNELS = {"gauges": 12, "counters": 6, "flags": 1, "enums": 1}
WINDOWS = (timedelta(hours=6), timedelta(hours=24), timedelta(hours=72))
REQUIRED_A_SECOND, REQUIRED_MB = 2e6, 2_000
"""Minimum samples per second, maximum memory."""
WHOLE_S, WHOLE_MB = 300, 4_000
"""The same for ``--whole``: maximum seconds, maximum memory."""
AIM = f"{REQUIRED_A_SECOND:,.0f} samples/s, under {REQUIRED_MB:,} MB"
WHOLE_AIM = f"{WHOLE_S} s (1.15 million samples/s), under {WHOLE_MB:,} MB"

CHECKED_ROWS, TOLERANCE = 8, 1e-4
"""Number of rows verified in plain Python, and the maximum relative difference."""

DIFFERENCES = ("delta", "rise_delta")
"""Statistics that are differences, and so lose precision; they are not compared."""

PHASES = ("rows and plan", "buckets: samples read and summed up", "parts: statistics of rows, parts written")


@njit(cache=True)
def ready(array: npt.NDArray[np.float64]) -> float:
    """Do almost nothing: the first kernel of a process makes the compiler load its tables."""
    return float(array[0])


def build(dataset: Path, out: Path, *, everything: bool) -> None:
    """Build the matrix in this process, and print its cost as JSON."""
    params = load_params([ROOT / "params.yaml"])
    features = params.features if everything else FeatureSection(groups=("telemetry",), windows=WINDOWS)
    opened = Dataset.open(dataset)
    start = time.perf_counter()
    ready(np.zeros(1))
    loading = time.perf_counter() - start
    samples = opened.meta.counts["samples"]
    marks = [_now()]

    def reached(done: int, _total: int) -> None:
        if len(marks) == 1 or (len(marks) == 2 and done >= samples):
            marks.append(_now())

    matrix = build_matrix(
        opened,
        out,
        decision=params.decision,
        labels=params.labels,
        features=features,
        training=params.training,
        seed=params.seed,
        progress=reached,
    )
    marks.append(_now())
    phases = {
        f"{name} {kind}": after[i] - before[i]
        for name, (before, after) in zip(PHASES, pairwise(marks), strict=True)
        for i, kind in enumerate(("wall", "cpu"))
    }
    report = {
        "loading": loading,
        "wall": marks[-1][0] - marks[0][0],
        "cpu": marks[-1][1] - marks[0][1],
        **phases,
        "peak_mb": peak_mb(),
        "rows": matrix.meta.counts["rows"],
        "columns": matrix.meta.counts["features"],
    }
    print(json.dumps(report))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def timed(run: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def reading(dataset: Dataset) -> float:
    """Return the seconds that reading every sample takes on all cores."""

    def read() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda bucket: sum(run.num_rows for run in dataset.read_runs(bucket)), dataset.buckets()))

    return timed(read)


def copying() -> float:
    """Return how many bytes per second all cores copy."""
    size = 200_000_000
    sources = [np.ones(size // 8) for _ in range(os.cpu_count() or 1)]
    targets = [np.empty_like(source) for source in sources]

    def copy() -> None:
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    copy()  # the first copy also allocates the pages
    return len(sources) * size / min(timed(copy) for _ in range(3))


def check_rows(dataset: Dataset, matrix: FeatureMatrix) -> None:
    """Exit unless the window statistics of one GPU, at times across the whole span, equal those in plain Python."""
    columns = [
        column for column in matrix.columns if column.group == "telemetry" and column.statistic not in DIFFERENCES
    ]
    gpu, node = (str(matrix.rows[name].iloc[0]) for name in ("gpu", "node"))
    mine = np.flatnonzero((matrix.rows["gpu"].astype(str) == gpu) & ~matrix.rows["augmented"])
    chosen = mine[np.linspace(0, len(mine) - 1, CHECKED_ROWS).astype(int)]
    own = dataset.read_bucket(dataset.bucket_of(node)).to_pandas()
    own = own[own["gpu"].astype(str) == gpu]
    times = own["timestamp"].dt.as_unit("ms").astype("int64")
    reach = 2 * duration_ms(matrix.config.features.windows[-1])
    for at, values in zip(chosen, matrix.values(chosen, [column.name for column in columns]), strict=True):
        when = matrix.rows["decision_time"].iloc[at]
        border = instant_ms(when - matrix.config.features.delay)
        seen = (times > border - reach) & (times <= border)
        samples = [
            {"time": time, **{name: None if pd.isna(value) else float(value) for name, value in reading.items()}}
            for time, reading in zip(
                times[seen], own.loc[seen, list(dataset.meta.channels)].to_dict("records"), strict=True
            )
        ]
        for column, value in zip(columns, values, strict=True):
            plain = window_oracle.statistic(column, samples, border, reach, window_oracle.BITS)
            if not np.isclose(value, plain, rtol=TOLERANCE, atol=TOLERANCE * 1e-3, equal_nan=True):
                sys.exit(f"{column.name} of {gpu} at {when} is {value}, plain reading says {plain}")
    print(f"equal to their plain reading: {CHECKED_ROWS} rows of {len(columns)} columns")


def main() -> None:
    """Generate, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--all", action="store_true", help="every feature group, as params.yaml has them")
    parser.add_argument("--whole", action="store_true", help="the paper's size: 345 million samples")
    parser.add_argument("--work", type=Path, help="where the files go, and stay; default: a folder that disappears")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build(args.build, args.out, everything=args.all)
        return
    gpus = 20_000 if args.whole else 125 if args.quick else 1_250
    with tempfile.TemporaryDirectory() as name:
        folder = args.work or Path(name)
        place = folder / f"generated-{gpus}{'-failing' if args.whole or args.all else ''}"
        whole = (place / "dataset.json").exists()
        dataset = (
            Dataset.open(place)
            if whole
            else generate(
                place,
                gpus=gpus,
                days=120,
                channels=channels_of(**CHANNELS),
                failures=FAILURES if args.whole or args.all else 0.0,
            )
        )
        samples = dataset.meta.counts["samples"]
        shutil.rmtree(folder / "matrix", ignore_errors=True)  # otherwise nothing would be built
        everything = ["--all"] if args.all or args.whole else []
        print_compile_time(GROUPS if everything else ("telemetry",))
        took = run_json(__file__, "--build", place, "--out", folder / "matrix", *everything)
        check_rows(dataset, FeatureMatrix.open(folder / "matrix"))
        read, copied = reading(dataset), copying()
    samples_bytes = samples * (len(dataset.meta.channels) * 8 + 8)
    made = f"{took['rows']:,.0f} rows of {took['columns']} columns"
    print(f"{samples:,} samples of {len(dataset.meta.channels)} channels to {made}")
    print(f"{took['wall']:.1f} s, {took['cpu']:.1f} s of CPU, peak {took['peak_mb']:.0f} MB")
    for phase in PHASES:
        print(f"- {phase}: {took[f'{phase} wall']:.1f} s, {took[f'{phase} cpu']:.1f} s of CPU")
    print(f"before that, {took['loading']:.1f} s until the process had loaded its compiler (once a process)")
    print(f"reading the files alone takes {read:.1f} s: {read / took['wall']:.0%} of it")
    print(
        f"copying the samples once as doubles takes {samples_bytes / copied:.1f} s at {copied / 1e9:.1f} GB/s: "
        f"{samples_bytes / copied / took['wall']:.0%} of it"
    )
    aim: str | None = AIM
    met: bool | None = samples / took["wall"] >= REQUIRED_A_SECOND and took["peak_mb"] < REQUIRED_MB
    if args.whole:
        aim, met = WHOLE_AIM, took["wall"] <= WHOLE_S and took["peak_mb"] < WHOLE_MB
    elif args.all:
        aim, met = None, None  # every group at the default size
    line = {
        "name": "features_out_of_core --whole" if args.whole else "features_out_of_core",
        "value": round(samples / took["wall"]),
        "unit": "samples/s",
        "peer": None,
        "ratio": None,
        "limit_share": round(read / took["wall"], 2),
        "checked": True,
        "aim": aim,
        "met": met,
    }
    print(json.dumps(line))
    if aim is not None and not met and not args.quick:
        sys.exit(f"{samples / took['wall']:,.0f} samples/s, {took['peak_mb']:,.0f} MB; aim: {aim}")


if __name__ == "__main__":
    main()
