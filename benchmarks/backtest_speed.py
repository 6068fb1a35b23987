"""Duration and memory of a backtest, and the share of the evaluation.

2,000 simulated GPUs over 120 days are replayed with params.yaml at calibrated failure rates, and again with ``--full``:
the predictions must be byte-identical. With ``--whole``, 3.6 million rows are scored with 15 refits of one learner, on
30,000 generated units without telemetry. Each replay is a separate process. A second replay reuses the finished refits
of the first: its duration is that of the evaluation.

    python benchmarks/backtest_speed.py [--quick] [--whole]
"""

import argparse
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

from benchmarks.shared.generated import FAILURES, NODE, START, events_of
from benchmarks.shared.processes import peak_mb, run_json
from features.matrix.matrix import FeatureMatrix
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params
from pipeline.stages import backtest_matrix
from simulator.simulate import simulate
from telemetry.dataset.writer import DatasetWriter

GPUS, DAYS, SEED = 2_000, 120, 1
UNITS, SPAN = 30_000, timedelta(days=180)
LIMITS = {False: (180, 4096), True: (360, 4096)}
"""Maximum seconds and MB, without and with ``--whole``."""

MOST_SHARE = 0.2
"""Maximum share of the evaluation; only without ``--whole``, whose learner takes almost no time."""

ONE_LEARNER = """
decision: {every: 1d}
features: {static: [age, slot], history_scopes: [gpu, slot, node]}
labels: {horizon: 1d, merge_window: 1h, cooldown: 1d}
training: {window: 30d, refit_every: 8d}
models: {profile: lightgbm, learners: [lightgbm], calibration: {slice: 8d}}
"""


def lifetimes(path: Path, units: int) -> None:
    """Write a dataset of units that are always in service, with failures without precursors and no telemetry."""
    names = [(f"node-{unit // NODE:05d}", f"GPU-{unit:06d}", unit % NODE) for unit in range(units)]
    node, gpu, slot = zip(*names, strict=True)
    installed = pd.Series([START] * units, dtype="datetime64[ms, UTC]")
    inventory = pd.DataFrame({"node": node, "gpu": gpu, "slot": pd.array(slot, dtype="Int32"), "model": "H100"}).assign(
        driver="550.54", installed_at=installed, removed_at=pd.Series([pd.NaT] * units, dtype="datetime64[ms, UTC]")
    )
    span = START, START + SPAN
    with DatasetWriter(path, step=timedelta(minutes=10), channels={}, buckets=8) as writer:
        events = events_of(names, span, FAILURES, np.random.default_rng(SEED))
        writer.finish(events=events, inventory=inventory, span=span)


def measure(matrix: Path, out: Path, files: list[Path], *, full: bool) -> None:
    """Replay in this process, and print seconds and peak memory as JSON."""
    truth = matrix.with_name("dataset-truth")
    begin = time.perf_counter()
    backtest_matrix(
        FeatureMatrix.open(matrix), load_params(files), out, truth=truth if truth.is_dir() else None, full=full
    )
    print(json.dumps({"seconds": time.perf_counter() - begin, "peak": peak_mb()}))


def main() -> None:
    """Generate the fleet, replay it, check, and print the line of JSON; fail if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the units")
    parser.add_argument("--whole", action="store_true", help="3.6 million rows, 15 refits, one learner")
    parser.add_argument("--replay", nargs="+", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replay:
        measure(args.replay[0], args.replay[1], args.replay[2:], full=args.full)
        return
    part = 10 if args.quick else 1
    files = [ROOT / "params.yaml"]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        dataset, matrix, out, full = (work / name for name in ("dataset", "matrix", "out", "full"))
        if args.whole:
            (work / "one.yaml").write_text(ONE_LEARNER, encoding="utf-8")
            files += [ROOT / "params" / "lifetimes.yaml", work / "one.yaml"]
            lifetimes(dataset, UNITS // part)
        else:
            simulate(dataset, gpus=GPUS // part, days=DAYS, seed=SEED, scenario="base")
        make_matrix(dataset, load_params(files), matrix)
        first = run_json(__file__, "--replay", matrix, out, *files)
        again = run_json(__file__, "--replay", matrix, out, *files)
        rows = len(pd.read_parquet(out / "predictions.parquet", columns=["fold"]))
        print(f"{rows:,} rows: {first['seconds']:.0f} s, {first['peak']:,.0f} MB; again {again['seconds']:.0f} s")
        ratio = None
        if not args.whole:
            other = run_json(__file__, "--full", "--replay", matrix, full, *files)
            if (out / "predictions.parquet").read_bytes() != (full / "predictions.parquet").read_bytes():
                sys.exit("--full predicts something else: nothing is measured")
            ratio = round(other["seconds"] / first["seconds"], 2)
    share = again["seconds"] / first["seconds"]
    seconds, memory = LIMITS[args.whole]
    met = first["seconds"] <= seconds and (args.whole or share < MOST_SHARE) and first["peak"] <= memory
    line = {
        "name": "backtest_speed --whole" if args.whole else "backtest_speed",
        "value": round(first["seconds"], 1),
        "unit": f"s for a backtest of {rows:,} rows",
        "peer": None if ratio is None else "--full",
        "ratio": ratio,
        "limit_share": None,
        "checked": True,
        "aim": f"{seconds} s, {memory:,} MB{'' if args.whole else f', evaluation under {MOST_SHARE:.0%}'}",
        "met": met,
        "others": {"share of evaluation": round(share, 3), "peak MB": round(first["peak"])},
    }
    print(json.dumps(line))
    if not met and not args.quick:
        sys.exit("an aim is missed")


if __name__ == "__main__":
    main()
