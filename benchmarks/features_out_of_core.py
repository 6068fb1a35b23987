"""Features of more samples than fit into memory, end to end: dataset in, matrix out.

By default 21.6 million generated samples of 20 channels (1,250 GPUs, 120 days, every ten minutes), a decision every six
hours, telemetry windows of 6, 24 and 72 hours. ``--all`` takes the feature groups and windows of params.yaml,
``--whole`` the paper's size as well: 345 million samples of 20,000 GPUs (some 25 GB of disk). Beside it, on the same
files: what reading the Parquet files alone takes on as many threads, how fast memory is copied, and, but for
``--whole``, what the same build takes by one thread on one core, step by step. Compiling the kernels, once a machine,
is done and told before. Nothing is told of a build unless some rows of every feature group that it has equal their
plain reading.

    python benchmarks/features_out_of_core.py [--quick] [--all] [--whole] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import pyarrow as pa  # noqa: E402
from numba import njit  # noqa: E402

from benchmarks.apart import STEPS, Apart  # noqa: E402
from benchmarks.compiling import tell_compiling  # noqa: E402
from benchmarks.generated import FAILURES, channels_of, generate  # noqa: E402
from benchmarks.own_process import peak_mb, told_by  # noqa: E402
from benchmarks.plain_check import check_rows  # noqa: E402
from features.config import GROUPS, FeatureSection  # noqa: E402
from features.engine import Item, LocalEngine, Result  # noqa: E402
from features.matrix.building import build_matrix  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from pipeline.params import load_params  # noqa: E402
from telemetry.dataset.store import Dataset  # noqa: E402

CHANNELS = {"gauges": 12, "counters": 6, "flags": 1, "enums": 1}
WINDOWS = (timedelta(hours=6), timedelta(hours=24), timedelta(hours=72))
REQUIRED_A_SECOND, REQUIRED_MB = 2e6, 2_000
"""Samples a second at least, memory at most."""
WHOLE_S, WHOLE_MB = 300, 4_000
"""The same of ``--whole``: seconds at most, memory at most."""
AIM = f"{REQUIRED_A_SECOND:,.0f} samples/s, under {REQUIRED_MB:,} MB"
WHOLE_AIM = f"{WHOLE_S} s (1.15 million samples/s), under {WHOLE_MB:,} MB"


class OneThread(LocalEngine):
    """Runs one task after the other."""

    def run(
        self,
        job: Callable[[Item], Result],
        items: Sequence[Item],
        on_result: Callable[[Item, Result], None],
        *,
        max_workers: int,
    ) -> None:
        """Run a function over items, by one thread."""
        super().run(job, items, on_result, max_workers=min(max_workers, 1))


PHASES = ("rows and plan", "buckets: samples read, summed up and spilled", "slabs: statistics of rows, parts written")


@njit(cache=True)
def ready(array: npt.NDArray[np.float64]) -> float:
    """Do next to nothing: the compiler loads its tables for it, as for the first kernel of any process."""
    return float(array[0])


def build(
    dataset: Path, out: Path, *, everything: bool, windows: tuple[timedelta, ...] = WINDOWS, alone: bool = False
) -> None:
    """Build the matrix in this process, by one thread on one core if ``alone``, and print what it took as JSON."""
    apart = None
    if alone:
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        pa.set_cpu_count(1)
        apart = Apart()
    params = load_params([ROOT / "params.yaml"])
    features = params.features if everything else FeatureSection(groups=("telemetry",), windows=windows)
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
        engine=OneThread() if alone else None,
    )
    marks.append(_now())
    phases = {
        f"{name} {kind}": after[at] - before[at]
        for name, (before, after) in zip(PHASES, pairwise(marks), strict=True)
        for at, kind in enumerate(("wall", "cpu"))
    }
    told = {
        "loading": loading,
        "wall": marks[-1][0] - marks[0][0],
        "cpu": marks[-1][1] - marks[0][1],
        **phases,
        "peak_mb": peak_mb(),
        "rows": matrix.meta.counts["rows"],
        "columns": matrix.meta.counts["features"],
        **({} if apart is None else apart.spent),
    }
    print(json.dumps(told))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def timed(run: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def reading(dataset: Dataset) -> float:
    """Return the seconds that reading every sample takes on all cores, and nothing else."""

    def read() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda bucket: sum(run.num_rows for run in dataset.read_runs(bucket)), dataset.buckets()))

    return timed(read)


def copying() -> float:
    """Return how many bytes a second all cores copy."""
    size = 200_000_000
    sources = [np.ones(size // 8) for _ in range(os.cpu_count() or 1)]
    targets = [np.empty_like(source) for source in sources]

    def copy() -> None:
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    copy()  # the first one also gets the pages
    return len(sources) * size / min(timed(copy) for _ in range(3))


def tell_apart(alone: dict[str, float], together: float) -> None:
    """Print what a build by one thread takes beside one as shipped, and where its time goes."""
    print(f"by one thread on one core {alone['wall']:.1f} s: {alone['wall'] / together:.2f} times as long")
    for step in STEPS:
        print(f"- {step}: {alone[step]:.1f} s, {alone[step] / alone['wall']:.0%}")
    rest = alone["wall"] - sum(alone[step] for step in STEPS)
    print(f"- rows, plan and what is left: {rest:.1f} s, {rest / alone['wall']:.0%}")


def main() -> None:
    """Generate, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--all", action="store_true", help="every feature group, as params.yaml has them")
    parser.add_argument("--whole", action="store_true", help="the paper's size: 345 million samples")
    parser.add_argument("--work", type=Path, help="where the files go, and stay; default: a folder that disappears")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-core", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build(args.build, args.out, everything=args.all, alone=args.one_core)
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
        for standing in ("matrix", "matrix-alone"):
            shutil.rmtree(folder / standing, ignore_errors=True)  # or nothing would be built
        everything = ["--all"] if args.all or args.whole else []
        tell_compiling(GROUPS if everything else ("telemetry",))
        took = told_by(__file__, "--build", place, "--out", folder / "matrix", *everything)
        check_rows(dataset, FeatureMatrix.open(folder / "matrix"))
        read, copied = reading(dataset), copying()
        alone = None
        if not args.whole:
            alone = told_by(__file__, "--build", place, "--out", folder / "matrix-alone", "--one-core", *everything)
    held = samples * (len(dataset.meta.channels) * 8 + 8)
    made = f"{took['rows']:,.0f} rows of {took['columns']} columns"
    print(f"{samples:,} samples of {len(dataset.meta.channels)} channels to {made}")
    print(f"{took['wall']:.1f} s, {took['cpu']:.1f} s of CPU, peak {took['peak_mb']:.0f} MB")
    for phase in PHASES:
        print(f"- {phase}: {took[f'{phase} wall']:.1f} s, {took[f'{phase} cpu']:.1f} s of CPU")
    if alone is not None:
        tell_apart(alone, took["wall"])
    print(f"before that, {took['loading']:.1f} s until the process had loaded its compiler (once a process)")
    print(f"reading the files alone takes {read:.1f} s: {read / took['wall']:.0%} of it")
    print(
        f"copying the samples once as doubles takes {held / copied:.1f} s at {copied / 1e9:.1f} GB/s: "
        f"{held / copied / took['wall']:.0%} of it"
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
