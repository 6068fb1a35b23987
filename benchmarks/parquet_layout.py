"""How many bytes a sample takes in the store, beside what pandas writes by default.

Run it alone: ``python benchmarks/parquet_layout.py [--quick]``. Both sides hold the same rows, checked by reading both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from simulator.simulate import simulate
from telemetry.dataset.store import Dataset


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller fleet")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpus, days = (128, 30) if quick else (512, 120)
        simulate(folder / "fleet", gpus=gpus, days=days, seed=7, scenario="drift")
        dataset = Dataset.open(folder / "fleet")
        ours = theirs = rows = 0
        for bucket in dataset.buckets():
            table = dataset.read_bucket(bucket)
            plain = folder / "plain.parquet"
            frame = table.to_pandas()
            frame.to_parquet(plain)
            if not pd.read_parquet(plain).equals(frame):
                sys.exit(f"bucket {bucket} is not the same after pandas wrote it: nothing is measured")
            theirs += plain.stat().st_size
            parts = sorted((dataset.path / "telemetry" / f"bucket={bucket:02d}").glob("*.parquet"))
            ours += sum(path.stat().st_size for path in parts)
            rows += table.num_rows
            if sum(pq.read_metadata(path).num_rows for path in parts) > table.num_rows:
                sys.exit(f"bucket {bucket} holds more rows than were read: nothing is measured")
    print(f"{'layout':<10}{'samples':>14}{'bytes/sample':>14}")
    print(f"{'store':<10}{rows:>14,}{ours / rows:>14.1f}")
    print(f"{'pandas':<10}{rows:>14,}{theirs / rows:>14.1f}")
    line = {
        "name": "parquet_layout",
        "value": round(ours / rows, 2),
        "unit": "bytes/sample",
        "peer": "pandas' default",
        "ratio": round(theirs / ours, 3),
        "limit_share": None,
        "checked": True,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
