"""How long pages of a fleet of 10,000 GPUs take: ``python -m tests.serving.pages.measure_fleet_page``.

No test: it prints a table. Scores are made up (seed 101): 1,250 nodes of 8 GPUs over 30 decisions, one GPU in twenty
raised or unknown. Times are from a request's first byte to its answer's last, over one connection, compressed as a
browser asks for it.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from policy.risk_record import RiskRecord
from tests.serving.http.world import DECIDED, Client, record, running
from tests.serving.pages.page_world import store


def fleet(nodes: int, number: int, names: list[str]) -> list[RiskRecord]:
    """Score a made-up fleet."""
    chance = random.Random(101 + number)
    decided = DECIDED - timedelta(hours=6 * number)
    found = []
    for at, name in enumerate(names):
        drawn = chance.random()
        risk: float | None = 10 ** chance.uniform(-4, -2.3)
        tier = "clear"
        for share, low, high, raised in (
            (0.004, 0.5, 0.9, "high"),
            (0.015, 0.1, 0.4, "elevated"),
            (0.04, 0.02, 0.09, "watch"),
        ):
            if drawn < share:
                risk, tier = chance.uniform(low, high), raised
                break
        else:
            risk = None if drawn < 0.05 else risk
        found.append(record(name, f"gpu-node-{at % nodes}", risk, tier, decided=decided, slot=str(at // nodes)))
    return found


def measure(client: Client, path: str, count: int) -> tuple[list[float], int, int]:
    """Ask a page some times; returns seconds (the first apart), and bytes sent and shown."""
    took, sent, shown = [], 0, 0
    for _ in range(count + 1):
        began = time.perf_counter()
        status, body, headers = client.send("GET", path, Accept_Encoding="gzip")
        took.append(time.perf_counter() - began)
        assert status == 200, body
        sent = len(body)
        shown = len(gzip.decompress(body)) if headers.get("Content-Encoding") == "gzip" else sent
    return took, sent, shown


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    chance = random.Random(101)
    names = [f"GPU-{chance.getrandbits(64):016x}" for _ in range(8 * given.nodes)]
    paths = ["/", "/?show=gpus", "/?q=node-12", "/?show=gpus&sort=name&offset=5000", "/?limit=1000", "/?tier=high",
             "/nodes/gpu-node-7", f"/gpus/{names[7]}"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for number in range(30):
            store(Path(folder), fleet(given.nodes, number, names), DECIDED - timedelta(hours=6 * number))
        with running(Path(folder)) as service:
            print(
                f"{len(names):,} GPUs, {given.requests} requests a page, "
                f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            )
            print(f"{'page':<36}{'first ms':>10}{'median':>9}{'p99':>9}{'kB sent':>9}{'kB':>8}")
            for path in paths:
                took, sent, shown = measure(service.client(), path, given.requests)
                first, rest = took[0] * 1e3, sorted(each * 1e3 for each in took[1:])
                middle, late = rest[len(rest) // 2], rest[min(len(rest) - 1, int(len(rest) * 0.99))]
                print(f"{path:<36}{first:>10.1f}{middle:>9.1f}{late:>9.1f}{sent / 1e3:>9.1f}{shown / 1e3:>8.1f}")


if __name__ == "__main__":
    main()
