"""What one more hour, and one more day, of 2,000 GPUs costs to fold into 120 days of them.

Samples are generated as one Parquet file a day, as collectors land them, and imported. Then an hour is folded in, and
then the 24 hours after it. The peer is importing all files anew, which is what would have to be done without a store to
add to. What is counted is seconds of the processor and files of samples written; the others are links to the old ones.

    python benchmarks/fold_cost.py [--quick] [--work FOLDER]

Checked before anything is told: the grown dataset has the digest of the one that was imported at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from benchmarks.generated import NODE, START, channels_of  # noqa: E402
from telemetry.dataset.channels import CATALOGUE  # noqa: E402
from telemetry.dataset.store import Dataset  # noqa: E402
from telemetry.importing.importer import CompactionInput, import_dataset  # noqa: E402

GPUS = 2_000
DAYS = 120
STEP = timedelta(minutes=10)
STEPS_A_DAY = timedelta(days=1) // STEP
CHANNELS = {"gauges": 12, "counters": 6, "flags": 1, "enums": 1}
QUICK = {"gauges": 3, "counters": 1}

REQUIRED_RATIO = 5.0
"""How many times as cheap as importing all anew an hour must be."""

AIM = f"{REQUIRED_RATIO:g} times as cheap"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step took."""

    wall: float
    cpu: float
    written: int
    files: int


def write_inventory(path: Path) -> Path:
    """Write who is where."""
    frame = pd.DataFrame(
        {
            "gpu": [f"GPU-{number:06d}" for number in range(GPUS)],
            "node": [f"node-{number // NODE:05d}" for number in range(GPUS)],
            "slot": [str(number % NODE) for number in range(GPUS)],
            "model": "H100",
            "installed_at": pd.Timestamp(START),
        }
    )
    frame.to_parquet(path)
    return path


def write_samples(path: Path, channels: Sequence[str], first: int, steps: int) -> Path:
    """Write the samples of all GPUs in some steps, by time, as they come in."""
    rng = np.random.default_rng([7, first])
    count = GPUS * steps
    at = np.repeat(np.arange(first, first + steps, dtype=np.int64), GPUS)
    gpu = np.tile(np.arange(GPUS, dtype=np.int32), steps)
    begin = int(START.timestamp() * 1000)
    columns: dict[str, pa.Array] = {
        "timestamp": pa.array(begin + at * (STEP // timedelta(milliseconds=1))).cast(pa.timestamp("ms", tz="UTC")),
        "node": pa.DictionaryArray.from_arrays(gpu // NODE, [f"node-{each:05d}" for each in range(-(-GPUS // NODE))]),
        "gpu": pa.DictionaryArray.from_arrays(gpu, [f"GPU-{each:06d}" for each in range(GPUS)]),
    }
    for name in channels:
        kind = CATALOGUE[name].kind
        if kind == "gauge":
            columns[name] = pa.array(np.round(rng.normal(50, 8, count), 1).clip(0, 100).astype(np.float32))
        elif kind == "counter":
            columns[name] = pa.array((at // 7 + gpu % 5).astype(np.float64))
        elif kind == "flags":
            columns[name] = pa.array(rng.choice(np.array([0, 1, 4], np.uint64), count, p=[0.8, 0.15, 0.05]))
        else:  # a latched XID that changed all the time would be millions of events
            columns[name] = pa.array(np.zeros(count, np.int32))
    pq.write_table(pa.table(columns), path, compression="zstd")
    return path


def bring_in(out: Path, inventory: Path, samples: Sequence[Path], *, name: str) -> Cost:
    """Fold files into a dataset, or make it."""
    old = {path.stat().st_ino for path in out.rglob("part-*.parquet")}
    wall, cpu = time.perf_counter(), time.process_time()
    import_dataset(
        out,
        inventory=inventory,
        samples=samples,
        step=STEP,
        channels=CATALOGUE,
        dedupe=timedelta(seconds=60),
        delay=STEP,
        compaction=CompactionInput(landed=(name,), expected_rows=GPUS * STEPS_A_DAY * DAYS),
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    now = [path.stat().st_ino for path in out.rglob("part-*.parquet")]
    return Cost(wall, cpu, len(set(now) - old), len(now))


def main() -> None:
    """Generate, check, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the days, a fifth of the channels")
    parser.add_argument("--work", type=Path, help="folder for files and datasets; default: one that disappears")
    args = parser.parse_args()
    days = DAYS // 5 if args.quick else DAYS
    channels = list(channels_of(**(QUICK if args.quick else CHANNELS)))
    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        work = Path(temporary)
        inventory = write_inventory(work / "inventory.parquet")
        old = [
            write_samples(work / f"day-{day:03d}.parquet", channels, day * STEPS_A_DAY, STEPS_A_DAY)
            for day in range(days)
        ]
        end = days * STEPS_A_DAY
        hour = write_samples(work / "hour.parquet", channels, end, 6)
        day = write_samples(work / "more.parquet", channels, end + 6, STEPS_A_DAY)
        costs = {
            f"{days} days, to begin with": bring_in(work / "grown", inventory, old, name="old"),
            "one more hour": bring_in(work / "grown", inventory, [hour], name="hour"),
            "one more day": bring_in(work / "grown", inventory, [day], name="day"),
            "all of it anew": bring_in(work / "anew", inventory, [*old, hour, day], name="all"),
        }
        grown, anew = Dataset.open(work / "grown"), Dataset.open(work / "anew")
        if grown.digest != anew.digest:
            sys.exit("the grown dataset is not the one imported at once: nothing is told")
        samples, length = anew.meta.counts["samples"], anew.meta.run_days
    print(f"{samples:,} samples of {len(channels)} channels, runs of {length} days")
    print(f"\n{'':<28}{'wall s':>8}{'CPU s':>8}{'files written':>15}{'of':>6}")
    for name, cost in costs.items():
        print(f"{name:<28}{cost.wall:>8.2f}{cost.cpu:>8.2f}{cost.written:>15}{cost.files:>6}")
    print(f"load of the machine {os.getloadavg()[0]:.1f}")
    one, whole = costs["one more hour"], costs["all of it anew"]
    met = whole.cpu / one.cpu >= REQUIRED_RATIO
    line = {
        "name": "fold_cost",
        "value": round(one.cpu, 2),
        "unit": f"CPU s for an hour of {GPUS:,} GPUs onto {days} days",
        "peer": "importing all anew",
        "ratio": round(whole.cpu / one.cpu, 1),
        "limit_share": None,
        "checked": True,
        "aim": AIM,
        "met": met,
        "others": {"CPU s for a day": round(costs["one more day"].cpu, 2), "files written": one.written},
    }
    print(json.dumps(line))
    if not met and not args.quick:
        sys.exit(f"an hour is to be {REQUIRED_RATIO:g} times as cheap as importing all anew")


if __name__ == "__main__":
    main()
