"""Features and refits on one and on two Dask workers of this machine, beside the same work without Dask.

Every matrix and every backtest is compared first: byte for byte, bit for bit. Each worker has one thread, so that two
have twice the cores of one. A first build is not counted (kernels are compiled and loaded); starting workers is told
apart. Then the same again while a worker is killed (SIGKILL), one in the build and one in the backtest, as soon as its
first task is done. At the end stands what one bucket and one refit move through files, which the cost model of
docs/scale.md uses.

    python benchmarks/dask_scaling.py [--quick] [--gpus N] [--days D]

Needs the extra `dask`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import pandas as pd  # noqa: E402

from benchmarks.generated import channels_of, generate  # noqa: E402
from evaluation.backtest.frames import BacktestResult  # noqa: E402
from evaluation.backtest.run import run_backtest  # noqa: E402
from features.engine import Engine, Item, Result  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from pipeline.dask_engine import DaskEngine, require_dask  # noqa: E402
from pipeline.matrix_stage import make_matrix  # noqa: E402
from pipeline.params import Params, load_params  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from telemetry.dataset.store import Dataset  # noqa: E402
from telemetry.errors import InputError  # noqa: E402

BUCKETS = 16
REFITS = """
models:
  learners: [lightgbm, logistic]
  parallel: {members: [lightgbm, xgboost, logistic]}
  cascade: {stages: [lightgbm, logistic]}
features: {windows: [6h], history_windows: [7d, 30d]}
training: {span: 14d, refit_every: 3d, augmentation: 2}
"""


class WatchedEngine(DaskEngine):
    """Looks at what refits keep for the folds that follow them, and loses a worker where it is asked to."""

    losing = False
    """Set before a build or a backtest: a worker is killed as soon as a task is done. Dask starts another process."""
    lost = 0
    folds: Path | None = None
    """Where the backtest keeps its folds."""
    refits_bytes = 0
    """Of the refits, when the last of them was done."""
    done_at = 0.0
    """When that was, of :func:`time.perf_counter`."""

    def each(
        self,
        job: Callable[[Item], Result],
        items: Sequence[Item],
        told: Callable[[Item, Result], None],
        *,
        most: int,
    ) -> None:
        """Run a function over items."""
        process = next(iter(self.client.run(os.getpid).values()))

        def told_and_killed(item: Item, result: Result) -> None:
            if self.losing:
                os.kill(process, signal.SIGKILL)
                self.losing = False
                self.lost += 1
            told(item, result)

        super().each(job, items, told_and_killed, most=most)
        self.done_at = time.perf_counter()
        if self.folds is not None:
            self.refits_bytes = size(self.folds, "*-refits/*")


def built(
    dataset: Path, out: Path, params: Params, engine: Engine | None, *, losing: bool = False
) -> tuple[FeatureMatrix, float]:
    """Build a matrix twice, and give the second with its seconds."""
    wall = 0.0
    for counted in (False, True):
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(engine, WatchedEngine):
            engine.losing = losing and counted
        begin = time.perf_counter()
        matrix = make_matrix(dataset, params, out, engine=engine)
        wall = time.perf_counter() - begin
    return matrix, wall


def replayed(
    matrix: FeatureMatrix, params: Params, folder: Path, engine: Engine | None, *, losing: bool = False
) -> tuple[BacktestResult, float, float]:
    """Run a backtest, and give it with its seconds and with those of the folds after the last refit."""
    if isinstance(engine, WatchedEngine):
        engine.losing, engine.folds = losing, folder
    begin = time.perf_counter()
    result = run_backtest(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        checkpoint=folder,
        explain=20,
        engine=engine,
    )
    end = time.perf_counter()
    return result, end - begin, end - engine.done_at if isinstance(engine, WatchedEngine) else 0.0


def size(folder: Path, pattern: str) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.glob(pattern))


def same(one: FeatureMatrix, other: FeatureMatrix) -> None:
    """Leave with an error unless two matrices are the same, byte for byte."""
    names = sorted(path.name for path in one.path.iterdir())
    equal = names == sorted(path.name for path in other.path.iterdir())
    if not equal or any((one.path / name).read_bytes() != (other.path / name).read_bytes() for name in names):
        sys.exit(f"the matrices {one.path} and {other.path} differ")


def traffic(dataset: Dataset, matrix: FeatureMatrix) -> str:
    """Tell what a build moves through files."""
    samples, counts = dataset.meta.counts["samples"], matrix.meta.counts
    read, written = size(dataset.path, "telemetry/*/*"), size(matrix.path, "part-*")
    between = counts["rows"] * counts["features"] * 4
    return (
        f"read {read / samples:.1f} B a sample; between the halves {between / samples:.1f} B a sample at most, "
        f"written {written / samples:.1f} B"
    )


def main() -> None:
    """Generate, compare, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the samples")
    parser.add_argument("--gpus", type=int, help="GPUs of the generated dataset; default 256")
    parser.add_argument("--days", type=int, default=60, help="its days; default 60")
    args = parser.parse_args()
    try:
        require_dask()
    except InputError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpus = args.gpus or (64 if args.quick else 256)
        channels = channels_of(gauges=12, counters=6, flags=1, enums=1)
        dataset = generate(folder / "generated", gpus=gpus, days=args.days, channels=channels, buckets=BUCKETS)
        simulate(folder / "fleet", gpus=64, days=45, seed=105, scenario="base", acceleration=60.0)
        (folder / "refits.yaml").write_text(REFITS, encoding="utf-8")
        every, small = load_params([ROOT / "params.yaml"]), load_params([folder / "refits.yaml"])
        fleet, _ = built(folder / "fleet", folder / "fleet-matrix", small, None)
        here, build_s = built(dataset.path, folder / "here", every, None)
        replay, replay_s, in_order_s = replayed(fleet, small, folder / "folds-here", None)
        lost = refits_bytes = 0
        rows: list[tuple[str, float, float, float]] = [("this process", 0.0, build_s, replay_s)]
        for who, workers, losing in (("1 worker", 1, False), ("2 workers", 2, False), ("and killed", 2, True)):
            begin = time.perf_counter()
            with WatchedEngine(workers=workers, threads=1) as engine:
                started = time.perf_counter() - begin
                matrix, build_s = built(dataset.path, folder / f"there-{len(rows)}", every, engine, losing=losing)
                same(matrix, here)
                folds = folder / f"folds-{len(rows)}"
                result, replay_s, in_order_s = replayed(fleet, small, folds, engine, losing=losing)
                pd.testing.assert_frame_equal(result.predictions, replay.predictions, check_exact=True)
                pd.testing.assert_frame_equal(result.folds, replay.folds, check_exact=True)
                lost, refits_bytes = engine.lost, engine.refits_bytes
            rows.append((who, started, build_s, replay_s))
        if lost < 2:
            sys.exit(f"a worker was to be killed in the build and in the backtest, not {lost}: nothing is told")
        samples, refits = dataset.meta.counts["samples"], replay.folds["fold"].nunique()
        print(f"{samples:,} samples in {BUCKETS} buckets to {here.meta.counts['rows']:,} rows; {refits} refits")
        print(f"{'':<14}{'start':>8}{'features':>10}{'backtest':>10}   all results equal, byte for byte")
        for who, started, build_s, replay_s in rows:
            print(f"{who:<14}{started:>7.1f}s{build_s:>9.1f}s{replay_s:>9.1f}s")
        print(f"{lost} workers were killed, one in the build and one in the backtest")
        print(f"of a backtest, {in_order_s:.1f} s are in order, in this process")
        print(f"{traffic(dataset, here)}; a refit keeps {refits_bytes / refits / 1e3:.0f} kB")
        line = {
            "name": "dask_scaling",
            "value": round(rows[2][2], 2),
            "unit": "s",
            "peer": "one worker",
            "ratio": round(rows[1][2] / rows[2][2], 2),
            "limit_share": None,
            "checked": True,
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
