"""CPU seconds of ``predrain collect prometheus`` for a history of 600 GPUs with 20 metrics: 31 million samples.

    python benchmarks/prometheus_backfill.py [--quick] [--every SECONDS] [--peer CHECKOUT]

The server is a separate process whose time is not counted. ``--peer`` runs another checkout of the repository on the
same history, and compares the datasets cell by cell.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

if __name__ == "__main__":  # not on sys.path when run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.processes import free_port, get_once

GPUS: Final = 600
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
SAMPLES: Final = 31_000_000
AIM_S: Final = 120.0
_HOSTS: Final = 8  # GPUs per node
_CYCLE: Final = 509  # period of the values in samples, a prime

_GAUGES: Final = {
    "GPU_TEMP": (40, 30),
    "MEMORY_TEMP": (45, 30),
    "SM_CLOCK": (1200, 700),
    "MEM_CLOCK": (1593, 1),
    "GPU_UTIL": (0, 100),
    "MEM_COPY_UTIL": (0, 60),
    "ENC_UTIL": (0, 1),
    "DEC_UTIL": (0, 1),
    "FB_USED": (2000, 60_000),
    "FB_FREE": (2000, 60_000),
    "XID_ERRORS": (0, 1),
    "ROW_REMAP_FAILURE": (0, 1),
    "PCIE_REPLAY_COUNTER": (3, 1),
    "CORRECTABLE_REMAPPED_ROWS": (0, 1),
    "UNCORRECTABLE_REMAPPED_ROWS": (0, 1),
    "POWER_VIOLATION": (5, 1),
    "NVLINK_BANDWIDTH_TOTAL": (0, 9000),
    "FAN_SPEED": (30, 40),
}
METRICS: Final = [f"DCGM_FI_DEV_{name}" for name in (*_GAUGES, "POWER_USAGE", "TOTAL_ENERGY_CONSUMPTION")]


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every", type=int, default=600)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--serve", type=int)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.every)
        return
    samples = SAMPLES // 15 if given.quick else SAMPLES
    span = timedelta(seconds=samples // (GPUS * len(METRICS)) * given.every)
    with tempfile.TemporaryDirectory(prefix="backfill-") as made, serving(given.every) as port:
        own_s, own = backfill(Path(__file__).resolve().parents[1], port, span, Path(made) / "own" / "fleet")
        peer_s = None
        if given.peer:
            peer_s, peer = backfill(given.peer, port, span, Path(made) / "peer" / "fleet")
            if not own.equals(peer):
                sys.exit("the datasets differ")
    rate = samples / own_s
    aim_s = AIM_S * samples / SAMPLES
    print(f"{samples:,} samples: {own_s:.1f} s of CPU, {rate:,.0f} samples a CPU second; peer {peer_s}")
    result: dict[str, Any] = {
        "name": "prometheus_backfill",
        "value": round(own_s, 1),
        "unit": f"s of CPU for {samples:,} samples",
        "peer": None if peer_s is None else round(peer_s, 1),
        "ratio": None if peer_s is None else round(peer_s / own_s, 2),
        "limit_share": round(own_s / aim_s, 2),
        "checked": own.num_rows,
        "aim": f"under {aim_s:.0f} s of CPU",
        "met": own_s < aim_s,
    }
    print(json.dumps(result))


@contextmanager
def serving(every_s: int) -> Iterator[int]:
    """Run a Prometheus stub with a sample every ``every_s`` seconds, and yield its port."""
    port = free_port()
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port), "--every", str(every_s)])
    try:
        while get_once(port, "/")[0] == 0:
            pass
        yield port
    finally:
        server.terminate()
        server.wait(10)


def backfill(tree: Path, port: int, span: timedelta, dataset: Path) -> tuple[float, Any]:
    """Return the CPU seconds of a backfill by a checkout, and the samples of the dataset, sorted."""
    dataset.parent.mkdir(parents=True)
    command = [sys.executable, "-c", "from predrain.command import main; main()", "collect", "prometheus"]
    command += ["--prometheus", f"http://127.0.0.1:{port}", "--dataset", str(dataset)]
    command += ["--since", START.isoformat(), "--until", (START + span).isoformat()]
    before = os.times()
    env = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL, env=env)
    after = os.times()
    table = ds.dataset(dataset / "telemetry", partitioning="hive").to_table()
    table = table.drop_columns([name for name in ("bucket", "run") if name in table.column_names])
    for name in ("gpu", "node"):
        table = table.set_column(table.column_names.index(name), name, table.column(name).cast(pa.string()))
    table = table.select(sorted(table.column_names))
    return (after.children_user + after.children_system) - (before.children_user + before.children_system), (
        table.sort_by([("gpu", "ascending"), ("timestamp", "ascending")]).combine_chunks()
    )


def serve(port: int, every_s: int) -> None:
    """Answer range selectors of the metrics with synthetic, periodic values."""
    texts = {metric: cycle(metric) for metric in METRICS}
    labels = [gpu_labels(number) for number in range(GPUS)]
    start_s = int(START.timestamp())

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            asked = re.fullmatch(r'\{__name__="([^"]*)"[^}]*\}\[(\d+)ms\]', query.get("query", ""))
            if asked:
                until_s = float(query["time"])
                first = max(start_s, until_s - int(asked[2]) / 1000)
                times = range(-(-int(first) // every_s) * every_s, int(until_s) + 1, every_s)
                data = matrix(asked[1], texts[asked[1]], labels, list(times))
            else:
                data = json.dumps(METRICS)
            body = f'{{"status":"success","data":{data}}}'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    ThreadingHTTPServer(("127.0.0.1", port), Answering).serve_forever()


def cycle(metric: str) -> list[str]:
    """Return one period of a metric's values as text."""
    rng = np.random.default_rng(len(metric))
    if metric.endswith("POWER_USAGE"):
        return [f"{value:.3f}" for value in rng.uniform(60, 700, _CYCLE)]
    if metric.endswith("ENERGY_CONSUMPTION"):
        return []
    low, width = _GAUGES[metric.removeprefix("DCGM_FI_DEV_")]
    return [str(value) for value in rng.integers(low, low + width, _CYCLE)]


def matrix(metric: str, texts: list[str], labels: list[str], times: list[int]) -> str:
    """Return the ``data`` of a response."""
    stamps = [f'[{time_s},"' for time_s in times]
    place = times[0] // 30 if times else 0
    entries = []
    for gpu, text in enumerate(labels):
        if texts:
            values = [texts[(place + gpu + number) % _CYCLE] for number in range(len(times))]
        else:
            values = [str(200_000_000_000 + gpu * 1_000_000 + (time_s - 1_767_225_600) * 412_345) for time_s in times]
        pairs = '"],'.join(map(str.__add__, stamps, values))
        entries.append(f'{{"metric":{{"__name__":"{metric}",{text}}},"values":[{pairs}"]]}}')
    return f'{{"resultType":"matrix","result":[{",".join(entries) if times else ""}]}}'


def gpu_labels(number: int) -> str:
    """Return the labels of a series from dcgm-exporter and service discovery, as the members of a JSON object."""
    node, slot = divmod(number, _HOSTS)
    pairs = {
        "DCGM_FI_DRIVER_VERSION": "550.144.03",
        "Hostname": f"gpu{node:03d}",
        "UUID": f"GPU-{number:08x}-5d2c-4d2e-9d0a-1f2e3d4c5b6a",
        "container": "dcgm-exporter",
        "device": f"nvidia{slot}",
        "endpoint": "metrics",
        "gpu": str(slot),
        "instance": f"10.0.{node // 250}.{node % 250}:9400",
        "job": "dcgm-exporter",
        "modelName": "NVIDIA A100-SXM4-80GB",
        "namespace": "gpu-operator",
        "pci_bus_id": f"00000000:{slot + 16:02X}:00.0",
        "pod": f"nvidia-dcgm-exporter-{node:05x}",
        "service": "nvidia-dcgm-exporter",
    }
    return json.dumps(pairs)[1:-1]


if __name__ == "__main__":
    main()
