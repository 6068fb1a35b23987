"""Cost of compiling the feature kernels, once per machine: features of a tiny fleet with an empty Numba cache."""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.shared.generated import channels_of, generate
from benchmarks.shared.processes import run_json
from features.matrix.building import build_matrix
from pipeline.params import load_params

LONG = timedelta(hours=72)


def print_compile_time(groups: Sequence[str]) -> None:
    """Print the compilation time of feature groups' kernels, and leave them compiled for the next measurements.

    It is the difference in CPU seconds between two builds of a tiny fleet in separate processes, the first with an
    empty cache.
    """
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (run_json(__file__, *groups, compiled=Path(cache))["cpu"] for _ in range(2))
    run_json(__file__, *groups)
    print(f"compiling the kernels, once a machine and in none of these times: {cold - warm:.1f} s of CPU")


def main(groups: Sequence[str]) -> None:
    """Build the groups' features of a tiny fleet, and print the CPU seconds as JSON."""
    params = load_params([ROOT / "params.yaml"])
    with tempfile.TemporaryDirectory() as name:
        channels = channels_of(gauges=12, counters=6, flags=1, enums=1)
        tiny = generate(Path(name) / "fleet", gpus=24, days=9, channels=channels, failures=40.0)
        begin = time.process_time()
        build_matrix(
            tiny,
            Path(name) / "matrix",
            decision=params.decision,
            labels=params.labels,
            # long windows are joined from partial sums, short ones are not
            features=params.features.model_copy(
                update={"groups": tuple(groups), "windows": (*params.features.windows, LONG)}
            ),
            training=params.training,
            seed=params.seed,
        )
        print(json.dumps({"cpu": time.process_time() - begin}))


if __name__ == "__main__":
    main(sys.argv[1:])
