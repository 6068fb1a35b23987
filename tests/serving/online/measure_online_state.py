"""Measure the online state at full size: memory, a scrape round, a decision, a snapshot. Run it as a script.

Synthetic samples of the worst kind for packing: gauges are random float32 (no value twice), counters rise by random
amounts from random levels, one of them (energy) by more than 32 bits hold. Nothing here is a test of correctness.

    python -m tests.serving.online.measure_online_state --gpus 10000 --days 30 --out results.json
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from features.config import DecisionSection, FeatureSection, LabelSection
from features.matrix_meta import MatrixConfig
from features.plan import FeaturePlan
from serving.online.state import OnlineState
from telemetry.channel import Channel
from telemetry.events import empty_events

STEP = timedelta(minutes=10)
START = datetime(2026, 1, 1, tzinfo=UTC)
GAUGES, COUNTERS, FLAGS, ENUMS = 11, 7, 1, 1


class Clock:
    """A clock that the measurement turns."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def channels() -> dict[str, Channel]:
    """Twenty channels: the mix of a GPU exporter's usual page."""
    kinds = [("gauge", GAUGES, "C"), ("counter", COUNTERS, "count"), ("flags", FLAGS, ""), ("enum", ENUMS, "")]
    names = [(f"{kind}_{i:02d}", kind, unit) for kind, n, unit in kinds for i in range(n)]
    return {name: Channel(name, kind, unit, None, None, "synthetic") for name, kind, unit in names}  # type: ignore[arg-type]


def config_of(days: float) -> MatrixConfig:
    """Settings whose features look ``days`` back."""
    longest = timedelta(days=days)
    features = FeatureSection(
        groups=("telemetry", "peers", "onset", "gaps", "workload"),
        onset=((timedelta(hours=1), timedelta(hours=24)), (timedelta(hours=24), longest)),
    )
    every = channels()
    plan = FeaturePlan.of(features, every, unit="gpu", step=STEP, decision=DecisionSection(), static=None, history=())
    return MatrixConfig(
        decision=DecisionSection(),
        labels=LabelSection(),
        features=features,
        augmentation=0,
        negative_ratio=1,
        seed=1,
        unit="gpu",
        step=STEP,
        span=(START, START + longest),
        channels=every,
        columns=plan.columns,
        dataset_digest="synthetic",
    )


class Source:
    """Makes one round of samples after the other."""

    def __init__(self, gpus: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.gpus = pa.array([f"gpu{i:05d}" for i in range(gpus)])
        self.nodes = pa.array([f"node{i // 8:04d}" for i in range(gpus)])
        self.level = np.floor(self.rng.uniform(0, 2e7, (COUNTERS, gpus)))
        self.n = gpus
        self.phase = self.rng.integers(0, 400_000, gpus)

    def round(self, at: datetime, seconds: float, *, jitter_ms: int) -> pa.Table:
        """One sample of every GPU, about ``at``."""
        rng, n = self.rng, self.n
        base = int(at.timestamp() * 1000)
        ms = base - (self.phase + rng.integers(0, jitter_ms, n) if jitter_ms else np.zeros(n, np.int64))
        columns: dict[str, Any] = {"timestamp": pa.array(ms, pa.timestamp("ms", tz="UTC"))}
        columns |= {"node": self.nodes, "gpu": self.gpus}
        for i in range(GAUGES):
            columns[f"gauge_{i:02d}"] = rng.normal(60, 15, n).astype(np.float32)
        for i in range(COUNTERS):
            most = 700_000 * seconds if i == 0 else 40  # energy in mJ
            self.level[i] += rng.integers(0, int(most), n)
            columns[f"counter_{i:02d}"] = self.level[i].copy()
        columns["flags_00"] = rng.integers(0, 256, n).astype(np.uint64)
        columns["enum_00"] = rng.integers(0, 5, n).astype(np.int32)
        return pa.table(columns)


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Give a result, its seconds of CPU (all threads) and of the wall."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    return found, time.process_time() - cpu, time.perf_counter() - wall


def rss_gb() -> float:
    """Memory of this process now, in units of 1e9 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


def measure(gpus: int, days: float, jitter_ms: int, scrape_s: int) -> dict[str, Any]:
    """Fill a state, and then measure."""
    config, clock, source = config_of(days), Clock(), Source(gpus, 1)
    inventory = pd.DataFrame(
        {
            "node": source.nodes.to_pylist(),
            "gpu": source.gpus.to_pylist(),
            "model": "H100",
            "installed_at": pd.Series([START - timedelta(days=99)] * gpus, dtype="datetime64[ms, UTC]"),
            "removed_at": pd.Series([None] * gpus, dtype="datetime64[ms, UTC]"),
        }
    )
    state = OnlineState.of(config, inventory, empty_events(), clock)
    begin = rss_gb()
    rounds = int((timedelta(days=days) + config.decision.every) / STEP)
    cpus, tidies = [], 0.0
    for _ in range(rounds):
        clock.now += STEP
        table = source.round(clock.now, STEP.total_seconds(), jitter_ms=jitter_ms)
        _, cpu, _ = timed(lambda table=table: state.push(table))
        cpus.append(cpu)
        _, cpu, _ = timed(state.tidy)
        tidies += cpu
    size = state.size
    found: dict[str, Any] = {
        "gpus": gpus,
        "channels": len(config.channels),
        "days": days,
        "jitter_ms": jitter_ms,
        "rows": size.rows,
        "frames": size.frames,
        "held_gb": round(size.bytes / 1e9, 3),
        "bytes_a_row": round(size.bytes / max(size.rows, 1), 1),
        "rss_before_gb": round(begin, 3),
        "rss_gb": round(rss_gb(), 3),
        "round_cpu_ms": {
            "mean": round(1000 * float(np.mean(cpus)), 1),
            "p99": round(1000 * float(np.quantile(cpus, 0.99)), 1),
            "max": round(1000 * max(cpus), 1),
        },
        "tidy_cpu_ms_a_round": round(1000 * tidies / rounds, 1),
    }
    for name in ("rows_first", "rows_again"):
        _, cpu, wall = timed(lambda: state.rows(clock.now))
        found[name] = {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2), "rss_gb": round(rss_gb(), 3)}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("snapshot_first", "snapshot_again"):
            clock.now += STEP
            state.push(source.round(clock.now, STEP.total_seconds(), jitter_ms=jitter_ms))
            written, cpu, wall = timed(lambda: state.snapshot(Path(folder) / "state"))
            found[name] = {"gb": round(written / 1e9, 3), "cpu_s": round(cpu, 2), "wall_s": round(wall, 2)}
        del state
        state, cpu, wall = timed(lambda: OnlineState.restore(Path(folder) / "state", clock=clock, config=config))
        found["restore"] = {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2)}
    cpus = []
    for _ in range(int(2 * STEP.total_seconds() / scrape_s)):
        clock.now += timedelta(seconds=scrape_s)
        table = source.round(clock.now, scrape_s, jitter_ms=0)
        _, cpu, _ = timed(lambda table=table: state.push(table))
        cpus.append(cpu)
    found["raw_scrapes"] = {
        "every_s": scrape_s,
        "mean_cpu_ms": round(1000 * float(np.mean(cpus)), 1),
        "median_cpu_ms": round(1000 * float(np.median(cpus)), 1),
        "closing_cpu_ms": round(1000 * max(cpus), 1),
    }
    found["rss_peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)
    return found


def main() -> None:
    """Read the arguments, measure, and print JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gpus", type=int, default=10_000)
    arguments.add_argument("--days", type=float, default=30.0)
    arguments.add_argument("--jitter-ms", type=int, default=3_000)
    arguments.add_argument("--scrape-s", type=int, default=60)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    text = json.dumps(measure(given.gpus, given.days, given.jitter_ms, given.scrape_s), indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
