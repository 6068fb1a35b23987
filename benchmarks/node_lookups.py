"""Latency of node lookups at 500 requests per second, each measured from the time at which it was due.

    python benchmarks/node_lookups.py [--quick]

``predrain serve`` runs in a separate process on the scores of 10,000 GPUs; node and tier of every response are checked.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np

if __name__ == "__main__":  # not on sys.path when run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.processes import free_port, get_once
from foundation.files import FolderSwap
from policy.risk_record import ModelName, RiskRecord
from policy.tiers import Tier
from serving.scores.writing import ScoresFolder, write_decision

NODES: Final = 1_250
GPUS: Final = 8
PER_S: Final = 500
CALLERS: Final = 16
AIM_MS: Final = 8.0


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    seconds = 2 if parser.parse_args().quick else 20
    with tempfile.TemporaryDirectory(prefix="node-lookups-") as made:
        folder = Path(made)
        write_scores(folder / "scores")
        port = free_port()
        command = [sys.executable, "-c", "from predrain.command import main; main()"]
        command += ["serve", "--scores", "scores", "--listen", f"127.0.0.1:{port}", "--no-extender"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            ends = time.monotonic() + 60
            while get_once(port, "/v1/nodes/n7")[0] != 200:
                if process.poll() is not None or time.monotonic() > ends:
                    sys.exit((folder / "log").read_text()[-3000:])
                time.sleep(0.1)
            before = cpu_s(process.pid)
            took = np.array(asyncio.run(ask_steadily(port, seconds))) * 1e3
            each_ms = (cpu_s(process.pid) - before) / len(took) * 1e3
        finally:
            process.terminate()
            process.wait(30)
    p99 = float(np.quantile(took, 0.99))
    print(f"median {np.median(took):.2f} ms, p99 {p99:.2f} ms, CPU {each_ms:.2f} ms, load {os.getloadavg()[0]:.1f}")
    result = {
        "name": "node_lookups", "value": round(p99, 2), "unit": f"ms, p99 of look-ups at {PER_S} a second",
        "peer": None, "ratio": None, "limit_share": round(p99 / AIM_MS, 2), "checked": len(took),
        "aim": f"p99 under {AIM_MS:g} ms", "met": p99 < AIM_MS,
    }  # fmt: skip
    print(json.dumps(result))


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its finished children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / float(os.sysconf("SC_CLK_TCK"))


async def ask_steadily(port: int, seconds: int) -> list[float]:
    """Request nodes at a steady rate; return the seconds from due time to response."""
    took: list[float] = []
    began = time.perf_counter() + 0.2

    async def caller(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(first, seconds * PER_S, CALLERS):
            due = began + number / PER_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            node = number * 7 % NODES
            writer.write(f"GET /v1/nodes/n{node} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")
            )
            answer = json.loads(await reader.readexactly(length))
            if (answer["node"], answer["tier"]) != (f"n{node}", tier_of(node)):
                sys.exit(f"a wrong answer for n{node}: {answer}")
            took.append(time.perf_counter() - due)
        writer.close()

    await asyncio.gather(*(caller(first) for first in range(CALLERS)))
    return took


def tier_of(node: int) -> Tier:
    """Return the tier of a node's GPUs."""
    return "high" if node % 50 == 0 else "clear"


def write_scores(folder: Path) -> None:
    """Write a decision about all nodes."""
    scores, now = ScoresFolder(folder), datetime.now(UTC).replace(microsecond=0)
    records = [
        RiskRecord(
            unit=f"GPU-{node}-{slot}", gpu=f"GPU-{node}-{slot}", node=f"n{node}", slot=str(slot), status="ok",
            unknown_reason=None, risk=0.5 if tier_of(node) == "high" else 0.001, risks={}, score=-7.0,
            rank=node * GPUS + slot + 1, alert=False, tier=tier_of(node), decision_time=now, issued_at=now,
            expires_at=now + timedelta(hours=12), horizon=timedelta(hours=24), model=ModelName("0" * 64, "lightgbm"),
            sample_age_seconds=60.0, completeness=1.0,
        )
        for node in range(NODES) for slot in range(GPUS)
    ]  # fmt: skip
    with FolderSwap(scores.folder_of(now)) as swap:
        write_decision(swap.path, records, {"format": 2, "units": len(records)})
        swap.commit()
    scores.point_to_newest()


if __name__ == "__main__":
    main()
