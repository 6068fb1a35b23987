"""How many raw samples a second come out of a Prometheus server, beside the plain way of asking it.

Run it alone: ``python benchmarks/backfill_prometheus.py [--quick]``. A real server (Debian's ``prometheus``) is loaded
with a fleet's history. The peer is what a script would do: ``requests``, one query after the other, ``json``, pandas,
joined to one row for each GPU and time. Both ask for the same chunks, metrics and range selectors; before anything is
timed, both must have found the same values. The peer is left as it comes (``requests`` asks for gzip); ours also lands
its rows on the disk and notes its progress. ``limit_share`` is the time of a client that only reads the same bytes, one
answer after the other, over ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
from telemetry.dataset.channels import CATALOGUE
from telemetry.http import connect_to
from tests.system.prometheus_server import load_blocks, prometheus

START = datetime(2026, 1, 1, tzinfo=UTC)
STEP_S = 15
CHANNELS = (
    *("gpu_temp_c", "mem_temp_c", "power_w", "sm_clock_mhz", "gpu_util_pct", "fb_used_mib", "pcie_replay_total"),
    *("ecc_sbe_volatile_total", "row_remap_uncorrectable_total", "clocks_event_reasons"),
)
METRICS = {CATALOGUE[name].dcgm_names[-1]: name for name in CHANNELS}


def write_history(path: Path, gpus: int, span: timedelta) -> int:
    """Write a fleet's history as OpenMetrics text and return the number of its samples."""
    draw = np.random.default_rng(7)
    seconds = int(START.timestamp()) + np.arange(0, int(span.total_seconds()), STEP_S)
    with path.open("w") as stream:
        for metric, channel in METRICS.items():
            for gpu in range(gpus):
                steps = draw.integers(0, 3, len(seconds))
                values = np.cumsum(steps) if CATALOGUE[channel].kind == "counter" else 30 + np.cumsum(steps) % 60
                labels = (
                    f'gpu="{gpu % 8}",UUID="GPU-{gpu:08x}-1111-2222-3333-444455556666",'
                    f'pci_bus_id="00000000:{gpu % 8:02X}:00.0",device="nvidia{gpu % 8}",'
                    f'modelName="NVIDIA H100 80GB HBM3",Hostname="node{gpu // 8:03d}",'
                    f'DCGM_FI_DRIVER_VERSION="570.86.15",job="dcgm-exporter",instance="node{gpu // 8:03d}:9400"'
                )
                name = f"{metric}{{{labels}}}"
                stream.writelines(
                    f"{name} {value} {at}\n" for value, at in zip(values.tolist(), seconds.tolist(), strict=True)
                )
        stream.write("# EOF\n")
    return gpus * len(METRICS) * len(seconds)


def chunk_ends(span: timedelta, chunk: timedelta) -> list[int]:
    """Return the instants (s) at which the chunks end, as a script would count them."""
    return [int((START + chunk * number).timestamp()) for number in range(1, int(span / chunk) + 1)]


def plainly(url: str, span: timedelta, chunk: timedelta) -> pd.DataFrame:
    """Fetch with requests, json and pandas: a row for each GPU and time, a column for each channel."""
    session = requests.Session()
    length = int(chunk.total_seconds())
    made = []
    for end in chunk_ends(span, chunk):
        columns = []
        for metric, channel in METRICS.items():
            answer = session.get(
                f"{url}/api/v1/query", params={"query": f"{metric}[{length}s]", "time": str(end)}, timeout=120
            )
            frames = []
            for series in answer.json()["data"]["result"]:
                frame = pd.DataFrame(series["values"], columns=["timestamp", channel])
                frame[channel] = frame[channel].astype(float)
                frame["gpu"] = series["metric"]["UUID"]
                frames.append(frame[frame["timestamp"] > end - length])
            if frames:
                columns.append(pd.concat(frames).set_index(["gpu", "timestamp"])[channel])
        made.append(pd.concat(columns, axis=1))
    return pd.concat(made)


def read_only(url: str, span: timedelta, chunk: timedelta) -> int:
    """Read the same answers and throw them away: what the server and the wire need."""
    session = requests.Session()
    session.headers["Accept-Encoding"] = "identity"
    length = int(chunk.total_seconds())
    queries = [(f"{metric}[{length}s]", end) for end in chunk_ends(span, chunk) for metric in METRICS]
    return sum(
        len(session.get(f"{url}/api/v1/query", params={"query": query, "time": str(end)}, timeout=120).content)
        for query, end in queries
    )


def ours(url: str, span: timedelta, chunk: timedelta, root: Path) -> int:
    """Fetch with predrain into an empty landing folder and return the number of samples."""
    shutil.rmtree(root, ignore_errors=True)
    plan = BackfillPlan(START, START + span, chunk=chunk)
    return backfill(connect_to(url), plan, root, channels=CATALOGUE).samples


def assert_equal(frame: pd.DataFrame, root: Path) -> None:
    """Both found the same samples; the peer leaves out that of the start itself, the bound of its first chunk."""
    tables = [pq.read_table(path).to_pandas() for path in sorted((root / "samples").glob("*.parquet"))]
    mine = pd.concat(tables)
    mine["timestamp"] = mine["timestamp"].astype("int64") / 1000.0
    mine = mine[mine["timestamp"] > START.timestamp()].set_index(["gpu", "timestamp"]).sort_index()
    theirs = frame.sort_index()
    assert mine.index.equals(theirs.index), "the two found different samples"
    for channel in CHANNELS:
        assert np.array_equal(mine[channel].to_numpy(float), theirs[channel].to_numpy(float)), channel


def timed(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of some runs."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Load, compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller history")
    args = parser.parse_args()
    line: dict[str, object] = {"name": "backfill_prometheus", "value": None, "unit": "samples/s"}
    line |= {"peer": "requests + json + pandas", "ratio": None, "limit_share": None, "checked": False}
    program = shutil.which("prometheus")
    if program is None or shutil.which("promtool") is None:
        sys.exit("Prometheus is not installed (apt-get install prometheus): nothing is measured")
    gpus, span = (32, timedelta(hours=12)) if args.quick else (64, timedelta(hours=24))
    chunk, repeats = timedelta(hours=6), 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = write_history(folder / "history.om", gpus, span)
        load_blocks(folder / "history.om", folder / "data")
        (folder / "history.om").unlink()
        version = subprocess.run(  # noqa: S603 - the server that is measured
            [program, "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[2]
        with prometheus(folder / "data") as server:
            url, root = server.url, folder / "fleet.live"
            assert ours(url, span, chunk, root) == expected, "samples are missing"
            assert_equal(plainly(url, span, chunk), root)
            rows = [
                ("predrain", timed(lambda: ours(url, span, chunk, root), repeats)),
                ("requests + json + pandas", timed(lambda: plainly(url, span, chunk), repeats)),
                ("only reading, one by one", timed(lambda: read_only(url, span, chunk), repeats)),
            ]
    print(f"{expected:,} samples of {gpus} GPUs, {len(METRICS)} metrics, chunks of 6 h, Prometheus {version}")
    print(f"{'way':<28}{'seconds':>10}{'samples/s':>14}")
    for way, seconds in rows:
        print(f"{way:<28}{seconds:>10.2f}{expected / seconds:>14,.0f}")
    mine, peer, floor = (seconds for _, seconds in rows)
    line |= {"value": round(expected / mine), "ratio": round(peer / mine, 2)}
    print(json.dumps(line | {"limit_share": round(floor / mine, 2), "checked": True}))


if __name__ == "__main__":
    main()
