"""What a window of 30 days costs beside one of a day: the same samples, the same columns, file to file.

Each is built twice in a process of its own, and the second build counts; compiling the kernels, once a machine, is told
before. Nothing is told of a build unless some rows of both equal their plain reading, sample by sample.

    python benchmarks/features_window_length.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

from benchmarks.compiling import tell_compiling  # noqa: E402
from benchmarks.generated import channels_of, generate  # noqa: E402
from benchmarks.own_process import told_by  # noqa: E402
from benchmarks.plain_check import check_rows  # noqa: E402
from features.config import DecisionSection, FeatureSection, LabelSection  # noqa: E402
from features.matrix.building import build_matrix  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from pipeline.params import TrainingSection  # noqa: E402
from telemetry.store import Dataset  # noqa: E402

DELAY = timedelta(minutes=10)

MOST = 1.3
"""How many times as long as a window of a day one of 30 days may take."""

AIM = f"{MOST:g} times at most"


def build(dataset: Path, out: Path, days: int) -> None:
    """Build twice in this process, and print the seconds of the second as JSON."""
    opened = Dataset.open(dataset)
    wall = 0.0
    for number in range(2):
        begin = time.perf_counter()
        build_matrix(
            opened,
            out / f"{days}-{number}",
            decision=DecisionSection(),
            labels=LabelSection(),
            features=FeatureSection(groups=("telemetry",), windows=(timedelta(days=days),), delay=DELAY),
            training=TrainingSection(augmentation=0),
            seed=1,
        )
        wall = time.perf_counter() - begin
    print(json.dumps({"wall": wall}))


def main() -> None:
    """Check, measure, print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--days", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build(args.build, args.out, args.days)
        return
    tell_compiling(("telemetry",))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpus = 16 if args.quick else 128
        dataset = generate(
            folder / "fleet", gpus=gpus, days=120, channels=channels_of(gauges=12, counters=6, flags=1, enums=1)
        )
        took = {}
        for days in (1, 30):
            took[days] = told_by(__file__, "--build", dataset.path, "--out", name, "--days", days)["wall"]
        for days in took:
            check_rows(dataset, FeatureMatrix.open(folder / f"{days}-1"))
    for days, wall in took.items():
        print(f"window of {days:>2} d: {wall:.2f} s")
    met = took[30] <= MOST * took[1]
    line = {
        "name": "features_window_length",
        "value": round(took[30] / took[1], 2),
        "unit": "times a day's window",
        "peer": None,
        "ratio": None,
        "limit_share": None,
        "checked": True,
        "aim": AIM,
        "met": met,
    }
    print(json.dumps(line))
    if not met and not args.quick:
        sys.exit(f"a window of 30 days takes {took[30] / took[1]:.2f} times as long as one of a day; aim: {AIM}")


if __name__ == "__main__":
    main()
