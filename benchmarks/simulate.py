"""How many samples a second the simulator writes, from nothing to Parquet on disk.

Run it alone: ``python benchmarks/simulate.py [--quick]``. The time is that of a whole call of ``simulate``
(lives, jobs, events, samples, Parquet, digest, true risks) after one small run that loads the compiled code. Before the
time counts, two runs with one seed and different numbers of threads must have written the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from simulator.simulate import SimulationSummary, simulate
from telemetry.dataset.store import Dataset

CHANNELS = 20


def run(folder: Path, name: str, *, gpus: int, days: int, threads: int | None) -> tuple[SimulationSummary, float]:
    """Simulate one fleet and return what was written and the seconds it took."""
    began = time.perf_counter()
    summary = simulate(folder / name, gpus=gpus, days=days, seed=7, scenario="drift", acceleration=4.6, threads=threads)
    return summary, time.perf_counter() - began


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller fleet")
    quick = parser.parse_args().quick
    gpus, days, repeats = (256, 60, 3) if quick else (512, 120, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, _ = run(folder, "one", gpus=32, days=5, threads=1)
        second, _ = run(folder, "two", gpus=32, days=5, threads=2)
        same = files(first.dataset) == files(second.dataset) and files(first.truth) == files(second.truth)
        if not same:
            sys.exit("two runs with one seed wrote different bytes: nothing is measured")
        print(f"{'run':<6}{'samples':>12}{'seconds':>10}{'samples/s':>14}{'values/s':>14}{'bytes/sample':>14}")
        best = 0.0
        for number in range(repeats):
            summary, seconds = run(folder, "fleet", gpus=gpus, days=days, threads=None)
            size = sum(path.stat().st_size for path in (summary.dataset / "telemetry").rglob("*.parquet"))
            rate = summary.samples / seconds
            best = max(best, rate)
            print(
                f"{number + 1:<6}{summary.samples:>12,}{seconds:>10.2f}{rate:>14,.0f}{rate * CHANNELS:>14,.0f}"
                f"{size / summary.samples:>14.1f}"
            )
        print(f"{os.cpu_count()} cores, {CHANNELS} channels, digest {Dataset.open(summary.dataset).digest[:16]}")
    line = {
        "name": "simulate",
        "value": round(best),
        "unit": "samples/s",
        "peer": None,
        "ratio": None,
        "limit_share": None,
        "checked": same,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
