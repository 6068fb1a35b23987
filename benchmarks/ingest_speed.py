"""User CPU seconds of ingestion, compared with another checkout: imports, compaction, backfill, remote write, logs.

    python benchmarks/ingest_speed.py [--quick] [--peer CHECKOUT] [--only PART ...]

Each part runs in separate processes, alternating with the peer's. The minimum user time of two runs counts, minus that
of the same command on a tiny input. Times are only reported if the datasets and decoded samples are equal.
"""

import argparse
import hashlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.dataset as ds
import pyarrow.parquet as pq

ROOT: Final = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # not on sys.path when run as a file; PYTHONPATH goes first
    sys.path.append(str(ROOT))
from telemetry.collect.remote_write.decoding import RemoteWriteDecoder
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
GPUS: Final = 64
STEP_S: Final = 60
REPEATS: Final = 2
ALLOWED: Final = 1.05
"""Tolerance of a ratio for noise on a shared machine."""

CHANNELS: Final = ("gpu_temp_c", "mem_temp_c", "power_w", "energy_mj", "sm_clock_mhz", "gpu_util_pct", "fb_used_mib")
METRICS: Final = {f"DCGM_FI_DEV_{name}": value for name, value in zip(
    ("GPU_TEMP", "MEMORY_TEMP", "POWER_USAGE", "SM_CLOCK", "GPU_UTIL", "FB_USED"), (40, 50, 300, 1400, 90, 40_000),
    strict=True,
)}  # fmt: skip
MAPPING: Final = "kernel_log: {node: gpu000, boot_time: 2026-01-01T00:00:00Z}\n"


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "prometheus_backfill"])
    parser.add_argument("--decode", type=Path)
    given = parser.parse_args()
    if given.decode:
        decode(given.decode)
        return
    checkouts = [ROOT, *([given.peer.resolve()] if given.peer else [])]
    rows = 20_000 if given.quick else 600_000
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ingest-speed-") as made:
        for name, part in PARTS.items():
            if given.only is None or name in given.only:
                (Path(made) / name).mkdir()
                figures[name] = part(checkouts, Path(made) / name, rows)
        if given.only is None or "prometheus_backfill" in given.only:
            figures["prometheus_backfill"] = backfill(checkouts, Path(made), rows)
    for name, times in figures.items():
        ratio = f", peer {times[1]:.2f} s, ratio {times[1] / times[0]:.2f}" if given.peer else ""
        print(f"{name}: {times[0]:.2f} s of user CPU{ratio}")
    worst = min((times[1] / times[0] for times in figures.values()), default=1.0) if given.peer else None
    print(
        json.dumps(
            {
                "name": "ingest_speed",
                "value": round(sum(times[0] for times in figures.values()), 2),
                "unit": f"s of user CPU by {len(figures)} ways in, {rows:,} samples or {rows // 4:,} lines each",
                "peer": round(sum(times[1] for times in figures.values()), 2) if given.peer else None,
                "ratio": None if worst is None else round(worst, 2),
                "limit_share": None if worst is None else round(1 / (worst * ALLOWED), 2),
                "checked": bool(given.peer),
                "parts": {name: [round(seconds, 2) for seconds in times] for name, times in figures.items()},
            }
        )
    )


def import_samples(form: str) -> Callable[[list[Path], Path, int], list[float]]:
    """Return the part that imports samples from a file in a format."""

    def measure(checkouts: list[Path], folder: Path, rows: int) -> list[float]:
        inventory(folder / "inventory.csv")
        for name, count in (("all", rows), ("one", GPUS)):
            table = samples(count)
            if form == "csv":
                pv.write_csv(table, folder / f"{name}.csv")
            else:
                pq.write_table(table, folder / f"{name}.parquet")

        def run(checkout: Path, name: str, out: Path) -> float:
            files = ["--samples", f"{name}.{form}", "--inventory", "inventory.csv"]
            return user_s(checkout, folder, ["import", *files, "--out", str(out)])

        return compare(checkouts, folder, run, sorted_samples)

    return measure


def compact(checkouts: list[Path], folder: Path, rows: int) -> list[float]:
    """Time the compaction of staged samples in twenty files, one per period."""
    from telemetry.staging.folder import StagingFolder  # an older checkout, which runs this file to decode, lacks it

    seen = pa.table({
        "node": [f"gpu{number // 8:03d}" for number in range(GPUS)],
        "gpu": [f"GPU-{number + 1:06d}" for number in range(GPUS)],
        "seen_at": pa.array([START] * GPUS, pa.timestamp("ms", "UTC")),
    })  # fmt: skip
    for name, count, files in (("all", rows, 20), ("one", GPUS, 1)):
        staging = StagingFolder(folder / f"{name}.live", writer="bench")
        staging.stage("inventory", seen)
        table = samples(count)
        for chunk in np.array_split(np.arange(table.num_rows), files):
            staging.stage("samples", table.slice(int(chunk[0]), len(chunk)))

    def run(checkout: Path, name: str, out: Path) -> float:
        shutil.copytree(folder / f"{name}.live", out.with_name(out.name + ".live"))
        return user_s(checkout, folder, ["collect", "compact", "--dataset", str(out)])

    return compare(checkouts, folder, run, sorted_samples)


def import_log(line: Callable[[int], str]) -> Callable[[list[Path], Path, int], list[float]]:
    """Return the part that imports a kernel log with one XID per line."""

    def measure(checkouts: list[Path], folder: Path, rows: int) -> list[float]:
        inventory(folder / "inventory.csv")
        pv.write_csv(samples(GPUS * 10), folder / "samples.csv")
        (folder / "mapping.yaml").write_text(MAPPING)
        for name, count in (("all", rows // 4), ("one", 10)):
            (folder / f"{name}.log").write_text("".join(line(number) for number in range(count)))

        def run(checkout: Path, name: str, out: Path) -> float:
            files = ["--samples", "samples.csv", "--inventory", "inventory.csv", "--events", f"{name}.log"]
            return user_s(checkout, folder, ["import", *files, "--mapping", "mapping.yaml", "--out", str(out)])

        return compare(checkouts, folder, run, xid_events)

    return measure


def remote_write(*, new: bool) -> Callable[[list[Path], Path, int], list[float]]:
    """Return the part that decodes requests, each with new series, or all with the series of the first."""

    def measure(checkouts: list[Path], folder: Path, rows: int) -> list[float]:
        names, gpus = list(METRICS), GPUS * 8
        minutes = range(max(2, rows // (gpus * len(names))))
        bodies = [request(names, range(minute * new * gpus, (minute * new + 1) * gpus), minute) for minute in minutes]
        np.save(folder / "bodies.npy", np.array(bodies, object), allow_pickle=True)

        def run(checkout: Path, _name: str, out: Path) -> float:
            command = [sys.executable, __file__, "--decode", str(folder / "bodies.npy")]
            done = subprocess.run(command, env=environment(checkout), check=True, capture_output=True, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            out.write_text(result["samples"])
            return float(result["seconds"])

        return compare(checkouts, folder, run, lambda out: pa.table({"samples": [out.read_text()]}), startup=False)

    return measure


def decode(path: Path) -> None:
    """Decode requests with the modules on PYTHONPATH; print the time, and a digest of the samples."""
    decoder = RemoteWriteDecoder(SeriesCatalogue(CATALOGUE))
    bodies = np.load(path, allow_pickle=True)
    digest = hashlib.sha256()
    began = time.process_time()
    decoded = [decoder.decode(body, limit=1_000_000) for body in bodies]
    seconds = time.process_time() - began
    for batch in decoded:
        names = [f"{series.gpu} {series.node} {getattr(series, 'channel', '')}" for series in batch.series]
        digest.update(repr([names[number] for number in batch.index.tolist()]).encode())
        digest.update(batch.ms.tobytes() + batch.values.tobytes())
    print(json.dumps({"seconds": seconds, "samples": digest.hexdigest()}))


def backfill(checkouts: list[Path], folder: Path, rows: int) -> list[float]:
    """Time a backfill from the Prometheus stub of ``prometheus_backfill.py``."""
    from benchmarks import prometheus_backfill  # an older checkout may lack it

    step_s = 600
    span = timedelta(seconds=rows // (prometheus_backfill.GPUS * len(prometheus_backfill.METRICS)) * step_s)
    with prometheus_backfill.serving(step_s) as port:

        def run(checkout: Path, name: str, out: Path) -> float:
            length = span if name == "all" else timedelta(seconds=step_s)
            return prometheus_backfill.backfill(checkout, port, length, out / "fleet")[0]

        return compare(checkouts, folder, run, lambda out: sorted_samples(out / "fleet"))


def _dated(number: int) -> str:
    return _xid(f"{START + timedelta(seconds=number):%FT%T}+00:00 gpu000 kernel: ")


def _since_boot(number: int) -> str:
    return _xid(f"[{number + 1:>7}.{number % 1_000_000:06d}] ")


PARTS: Final = {
    "samples_csv": import_samples("csv"),
    "samples_parquet": import_samples("parquet"),
    "compaction": compact,
    "remote_write": remote_write(new=False),
    "remote_write_new_series": remote_write(new=True),
    "kernel_log_dated": import_log(_dated),
    "kernel_log_since_boot": import_log(_since_boot),
}


def compare(
    checkouts: list[Path],
    folder: Path,
    run: Callable[[Path, str, Path], float],
    read: Callable[[Path], pa.Table],
    *,
    startup: bool = True,
) -> list[float]:
    """Return the minimum seconds of each checkout, minus those of the small input, which also warms up caches.

    ``run``: called with the checkout, the name of the input (``all`` or ``one``), and the output path.
    Exits if the results differ.
    """
    numbers = itertools.count()
    base = [0.0] * len(checkouts)
    if startup:
        for place, checkout in enumerate(checkouts):
            base[place] = min(run(checkout, "one", folder / f"out{next(numbers)}") for _ in range(2))
    best = [float("inf")] * len(checkouts)
    results: list[pa.Table | None] = [None] * len(checkouts)
    for _ in range(REPEATS):
        for place, checkout in enumerate(checkouts):
            out = folder / f"out{next(numbers)}"
            best[place] = min(best[place], run(checkout, "all", out))
            results[place] = results[place] or read(out)
    if any(result is None or not result.num_rows or not result.equals(results[0]) for result in results):
        sys.exit(f"{folder.name}: the results differ")
    return [max(1e-6, seconds - less) for seconds, less in zip(best, base, strict=True)]


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports the modules of a checkout."""
    return {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": ""}


def user_s(checkout: Path, folder: Path, arguments: list[str]) -> float:
    """Run predrain of a checkout, and return the user CPU seconds that it took."""
    command = [sys.executable, "-c", "from predrain.command import main; main()", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, cwd=folder, env=environment(checkout), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def sorted_samples(dataset: Path) -> pa.Table:
    """Return the samples of a dataset, sorted."""
    table = ds.dataset(dataset / "telemetry", partitioning="hive").to_table()
    names = sorted(set(table.column_names) - {"bucket", "run"})
    columns = [
        table.column(name).cast(pa.string()) if name in ("gpu", "node") else table.column(name) for name in names
    ]
    return pa.table(columns, names).sort_by([("gpu", "ascending"), ("timestamp", "ascending")]).combine_chunks()


def xid_events(dataset: Path) -> pa.Table:
    """Return the XID events of a dataset, sorted, in columns that both checkouts write."""
    names = ["timestamp", "gpu", "code", "node", "type"]
    table = pq.read_table(dataset / "events.parquet", columns=names)
    texts = pa.table([table.column(name).cast(pa.string()) for name in names], names)
    return texts.sort_by([(name, "ascending") for name in names]).combine_chunks()


def inventory(path: Path) -> None:
    """Write the inventory of the fleet."""
    lines = ["node,gpu,slot,pci_bus_id,model,installed_at"]
    for gpu in range(GPUS):
        lines.append(
            f"gpu{gpu // 8:03d},GPU-{gpu + 1:06d},{gpu % 8},0000:{gpu % 8 + 16:02x}:00.0,H100,2025-12-01T00:00:00Z"
        )
    path.write_text("\n".join(lines) + "\n")


def samples(rows: int) -> pa.Table:
    """Return ``rows`` samples of the fleet, sorted by time."""
    rng = np.random.default_rng(1)
    number = np.arange(rows)
    start_ms = int(START.timestamp() * 1000)
    columns: dict[str, Any] = {
        "timestamp": pa.array(start_ms + number // GPUS * STEP_S * 1000, pa.timestamp("ms", "UTC")),
        "node": pa.array([f"gpu{gpu // 8:03d}" for gpu in (number % GPUS).tolist()]),
        "gpu": pa.array([f"GPU-{gpu + 1:06d}" for gpu in (number % GPUS).tolist()]),
    }
    for channel in CHANNELS:
        values = number * 7_000.0 if channel == "energy_mj" else np.round(40 + 30 * rng.random(rows), 1)
        columns[channel] = pa.array(values, mask=rng.random(rows) < 0.01)
    return pa.table(columns)


def _xid(stamp: str) -> str:
    return f"{stamp}NVRM: Xid (PCI:0000:10:00): 31, pid=4711, name=python3, Ch 00000008, intr 10000000.\n"


def request(names: list[str], gpus: range, minute: int) -> bytes:
    """Return a remote-write request with one sample per series, encoded as protobuf without a library."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    def varint(value: int) -> bytes:
        made = b""
        while value > 127:
            made += bytes([value & 127 | 128])
            value >>= 7
        return made + bytes([value])

    ms = int(START.timestamp() + minute * STEP_S) * 1000
    stamp = b"\x10" + varint(ms)
    series = []
    for gpu, name in itertools.product(gpus, names):
        labels = {
            "__name__": name,
            "Hostname": f"gpu{gpu // 8:03d}",
            "UUID": f"GPU-{gpu + 1:08x}-5d2c-4d2e-9d0a-1f2e3d4c5b6a",
            "gpu": str(gpu % 8),
            "instance": f"10.0.0.{gpu // 8}:9400",
            "job": "dcgm-exporter",
            "modelName": "NVIDIA A100-SXM4-80GB",
            "pci_bus_id": f"00000000:{gpu % 8 + 16:02X}:00.0",
        }
        encoded = b"".join(
            field(1, field(1, label.encode()) + field(2, text.encode())) for label, text in sorted(labels.items())
        )
        sample = b"\x09" + np.float64(METRICS[name] + gpu % 7).tobytes() + stamp
        series.append(field(1, encoded + field(2, sample)))
    return b"".join(series)


if __name__ == "__main__":
    main()
