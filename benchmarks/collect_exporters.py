"""What it costs to scrape 1,250 exporters (10,000 GPUs) every 30 seconds on one core.

Run it alone: ``python benchmarks/collect_exporters.py [--quick]``. A server process plays a fleet of exporters; the
collector is the command itself, pinned to one core. Every row is accounted for before a number is printed. There is no
peer: the limits are the core and 1 GB. ``--quick`` scrapes as many targets more often, for a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telemetry.config import TelemetrySection
from telemetry.dataset.channels import CATALOGUE
from telemetry.landing.compaction import FoldSettings, compact

TARGETS, GPUS, PORTS, VARIANTS = 1250, 8, 5, 8
MAX_RSS_MB, MAX_LATE_SHARE = 1000, 0.01
AIM = f"one core, {MAX_RSS_MB} MB, {MAX_LATE_SHARE:.0%} of scrapes late at most, none failed"
NODE = b"node@@@@"


def template(variant: int) -> bytes:
    """Return a page of 8 GPUs with NODE in the place of the node: about 57 kB, as dcgm-exporter writes it."""
    lines = []
    named = [channel for channel in CATALOGUE.values() if channel.dcgm_names][:28]
    for number, channel in enumerate(named):
        name = channel.dcgm_names[-1]
        low = channel.low or 0.0
        value = low + (number + 3 * variant) % 31 if channel.kind != "gauge" else low + 0.25 * ((variant + number) % 4)
        lines += [
            f"# HELP {name} {channel.help}",
            f"# TYPE {name} {'counter' if channel.kind == 'counter' else 'gauge'}",
        ]
        for gpu in range(GPUS):
            labels = (
                f'gpu="{gpu}",UUID="GPU-{NODE.decode()}-0000-4000-8000-{gpu:012d}",pci_bus_id="00000000:{gpu + 16:02X}'
                f':00.0",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{NODE.decode()}",'
                f'DCGM_FI_DRIVER_VERSION="580.105.08",pod="",namespace="",container=""'
            )
            lines.append(f"{name}{{{labels}}} {value:g}")
    return ("\n".join(lines) + "\n").encode()


def serve(pipe: Connection) -> None:
    """Play the fleet until the pipe closes; sends the ports, then, when asked, the pages served."""
    templates = [template(variant) for variant in range(VARIANTS)]
    turn = [0] * TARGETS
    served = 0

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                target = int(head.split(b" ", 2)[1].rsplit(b"/", 1)[1])
                turn[target] += 1
                body = templates[turn[target] % VARIANTS].replace(NODE, b"node%04d" % target)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                await writer.drain()
                served += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def fleet() -> None:
        servers = [await asyncio.start_server(client, "127.0.0.1", 0, backlog=1024) for _ in range(PORTS)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        while not await asyncio.to_thread(pipe.poll, 0.2):
            pass
        pipe.send((served, len(templates[0])))

    asyncio.run(fleet())


def collect(folder: Path, ports: list[int], interval_s: float, seconds: float) -> dict[str, Any]:
    """Run the collector for so long, pinned to one core; return what it and the system say of it."""
    targets = folder / "targets.txt"
    targets.write_text("".join(f"127.0.0.1:{ports[n % PORTS]}/t/{n} node{n:04d}\n" for n in range(TARGETS)))
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "from predrain.command import main; main()", "collect", "exporters"]
    options = ["--targets", str(targets), "--dataset", str(folder / "fleet"), "--json"]
    pace = ["--interval", f"{interval_s:g}s", "--timeout", f"{min(10.0, interval_s):g}s"]
    # Our own command, with our own options.
    with subprocess.Popen(  # noqa: S603
        [*command, *options, *pace], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.sched_setaffinity(process.pid, {core})
        ready = folder / "fleet.live" / "samples"
        started_s = time.monotonic()
        while not ready.is_dir() and time.monotonic() - started_s < 120:
            time.sleep(0.05)
        before_s, waited_s, since_s = cpu_s(process.pid), queued_s(process.pid), time.monotonic()
        time.sleep(seconds)
        measured_s = time.monotonic() - since_s
        cpu_share = (cpu_s(process.pid) - before_s) / measured_s
        waited_share = (queued_s(process.pid) - waited_s) / measured_s
        peak_mb = int(proc_field(process.pid, "VmHWM").split()[0]) / 1024
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        if process.returncode != 0:
            sys.exit(f"the collector failed: {err.decode()[-2000:]}")
    measured = {"cpu_share": cpu_share, "waited_share": waited_share, "peak_mb": peak_mb}
    return {**json.loads(out), **measured, "ran_s": time.monotonic() - started_s}


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def queued_s(pid: int) -> float:
    """Return the seconds that a process's threads stood ready while others had the core."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9


def proc_field(pid: int, name: str) -> str:
    """Return a field of the process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(name))


def check(folder: Path, told: dict[str, Any], served: int) -> tuple[int, int, int]:
    """Account for every row; return rows, files, and the rows that a dataset of 10-minute steps must have."""
    paths = sorted((folder / "fleet.live" / "samples").glob("*.parquet"))
    rows = pa.concat_tables([pq.read_table(path, columns=["gpu", "timestamp"]) for path in paths])
    good = told["good"]
    if rows.num_rows != GPUS * good or rows.num_rows != told["rows_landed"]:
        sys.exit(f"{rows.num_rows} rows landed of {good} good scrapes: nothing is measured")
    # Scrapes that the end cut off were served, but are no good scrapes.
    if not good <= served <= told["scrapes"]:
        sys.exit(f"{served} pages were served and {told['scrapes']} scraped: nothing is measured")
    if rows.group_by(["gpu", "timestamp"]).aggregate([]).num_rows != rows.num_rows:
        sys.exit("a GPU has two rows at one time: nothing is measured")
    if pc.count_distinct(rows.column("gpu")).as_py() != TARGETS * GPUS:
        sys.exit("GPUs are missing: nothing is measured")
    steps = pc.floor_temporal(rows.column("timestamp"), 10, "minute")
    folded = rows.set_column(1, "timestamp", steps).group_by(["gpu", "timestamp"]).aggregate([]).num_rows
    return rows.num_rows, len(paths), folded


def main() -> None:
    """Run, check, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of ten")
    interval_s, seconds = (30.0, 75.0) if parser.parse_args().quick else (30.0, 600.0)
    ours, theirs = multiprocessing.Pipe()
    # Started anew, not forked: the server must not hold what this process has loaded.
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = collect(folder, ours.recv(), interval_s, seconds)
        ours.send("end")
        served, page_bytes = ours.recv()
        rows, files, expected = check(folder, told, served)
        since_s = time.monotonic()
        settings = FoldSettings(TelemetrySection(), CATALOGUE, timedelta(seconds=60), timedelta(minutes=10))
        result = compact(folder / "fleet", settings=settings, now=datetime.now(UTC) + timedelta(hours=1))
        fold_s = time.monotonic() - since_s
        folded = 0 if result.meta is None else int(result.meta.counts["samples"])
    server.join(5)
    if folded != expected:
        sys.exit(f"{folded} rows were folded, {expected} should have been: nothing is measured")
    late_share = told["late"] / told["scrapes"]
    failed_share = told["failed"] / told["scrapes"]
    table = {
        f"{TARGETS} targets every {interval_s:g} s": f"{told['ran_s']:,.0f} s",
        "page": f"{page_bytes:,} bytes",
        "scrapes": f"{told['scrapes']:,} ({told['scrapes'] / told['ran_s']:.1f}/s)",
        "of one core": f"{told['cpu_share']:.1%}",
        "a scrape": f"{1000 * told['cpu_share'] * interval_s / TARGETS:.2f} ms of CPU",
        "stood ready without the core": f"{told['waited_share']:.1%} of the time",
        "peak memory": f"{told['peak_mb']:.0f} MB",
        "late scrapes": f"{late_share:.2%} (worst {told['worst_late_s']:.2f} s)",
        "failed scrapes": f"{failed_share:.2%}",
        "rows landed": f"{rows:,} in {files} files, all accounted for",
        "folded to 10 min": f"{folded:,} rows in {fold_s:.1f} s",
    }
    for label, text in table.items():
        print(f"{label:<32}{text:>48}")
    met = told["peak_mb"] <= MAX_RSS_MB and late_share <= MAX_LATE_SHARE and failed_share == 0
    line = {
        "name": "collect_exporters",
        "value": round(told["scrapes"] / told["ran_s"], 2),
        "unit": "scrapes/s",
        "peer": None,
        "ratio": None,
        "limit_share": round(told["cpu_share"], 3),
        "checked": True,
        "aim": AIM,
        "met": met,
        "late_share": round(late_share, 5),
        "waited_share": round(told["waited_share"], 4),
        "peak_mb": round(told["peak_mb"]),
        "fold_s": round(fold_s, 1),
    }
    print(json.dumps(line))
    if not met:
        sys.exit(f"the collector is over its limits: {AIM}")


if __name__ == "__main__":
    main()
