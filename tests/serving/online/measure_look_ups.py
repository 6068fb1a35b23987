"""Measure how long look-ups wait while a decision about a whole fleet is made from the online state.

One thread decides again and again; an event loop looks a node up every 2 ms and notes how late each answer is: what
holds the interpreter shows. Both settings of the interpreter are measured, Python's own and the service's. On a busy
machine the wait for a processor is in the numbers, too: compare them with those of an idle state in the same run.

    python -m tests.serving.online.measure_look_ups --dataset fleet --model bundle --gpus 10000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from policy.risk_record import ModelName
from policy.tiers import TierThresholds
from serving.config import ScoringSettings
from serving.http.fleet import Fleet, frame, node_with_units
from serving.http.interpreter import be_responsive
from serving.http.model import load_model
from serving.http.strict_json import write_json
from serving.live_config import live_config
from serving.online.deciding import OnlineDecision, OnlineModel, decide
from serving.online.state import OnlineState
from telemetry.events import empty_events
from telemetry.store import Dataset

STEP = timedelta(minutes=10)
START = datetime(2026, 3, 1, tzinfo=UTC)


class Clock:
    """A clock that the measurement turns."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def state_of(config: Any, gpus: int, clock: Clock, steps: int = 40) -> OnlineState:
    """Fill a state with random samples of a fleet of nodes of eight."""
    since = pd.Series([START - timedelta(days=9)] * gpus, dtype="datetime64[ms, UTC]")
    none = pd.Series([None] * gpus, dtype="datetime64[ms, UTC]")
    nodes, names = [f"n{at // 8}" for at in range(gpus)], [f"GPU-{at}" for at in range(gpus)]
    keys = {"node": nodes, "gpu": names, "slot": [str(at % 8) for at in range(gpus)], "model": "H100"}
    places = {"rack": [f"r{at // 64}" for at in range(gpus)], "cluster": "c"}
    inventory = pd.DataFrame(keys | places | {"installed_at": since, "removed_at": none})
    state, rng = OnlineState.of(config, inventory, empty_events(), clock), np.random.default_rng(1)
    for _ in range(steps):
        clock.now += STEP
        ms = int(clock.now.timestamp() * 1000) - 1000
        columns: dict[str, Any] = {"timestamp": pa.array([ms] * gpus, pa.timestamp("ms", "UTC"))}
        for channel in config.channels.values():
            low = 0.0 if channel.low is None else channel.low
            high = low + 100 if channel.high is None else min(channel.high, low + 100)
            columns[channel.name] = np.round(rng.uniform(low, high, gpus))
        state.push(pa.table(columns | {"node": nodes, "gpu": names}))
    state.tidy()
    return state


async def late_by(fleet: Fleet, now: datetime, going: Any) -> list[float]:
    """Look a node up every 2 ms as long as ``going`` says; give by how many milliseconds each was late."""
    found: list[float] = []
    while going():
        due = time.perf_counter() + 0.002
        await asyncio.sleep(0.002)
        node = fleet.state("n7", now)
        assert node is not None
        write_json(frame(fleet, now) | node_with_units(node, fleet.scores.nodes["n7"], now))
        found.append((time.perf_counter() - due) * 1e3)
    return found


def told(what: str, late: list[float]) -> dict[str, Any]:
    """Print and give quantiles."""
    values = np.array(late)
    median, p99 = np.quantile(values, [0.5, 0.99])
    line = {
        "what": what,
        "count": len(late),
        "median_ms": round(float(median), 2),
        "p99_ms": round(float(p99), 2),
        "most_ms": round(float(values.max()), 1),
        "share_over_5_ms": round(float((values > 5).mean()), 4),
    }
    print(json.dumps(line), flush=True)
    return line


def measure(fleet: Fleet, now: datetime, work: Any, label: str) -> None:
    """Measure look-ups beside nothing, and beside a decision."""
    end = time.perf_counter() + 2
    told(f"{label}, idle", asyncio.run(late_by(fleet, now, lambda: time.perf_counter() < end)))
    thread = threading.Thread(target=work)
    thread.start()
    told(f"{label}, deciding", asyncio.run(late_by(fleet, now, thread.is_alive)))
    thread.join()


def main() -> None:
    """Measure both settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=10_000)
    given = parser.parse_args()
    loaded, clock = load_model(given.model), Clock()
    state = state_of(live_config(loaded.bundle, Dataset.open(given.dataset).meta), given.gpus, clock)
    name = ModelName(loaded.digest, loaded.profile, None)
    model = OnlineModel.of(loaded.bundle, loaded.scorer, name, TierThresholds(None, None, None))
    now = clock.now
    kept: list[OnlineDecision] = []

    def work() -> OnlineDecision:
        for _ in range(2):
            kept[:] = [decide(state, model, ScoringSettings(), now, time.monotonic)]
        return kept[0]

    decision = work()
    print(f"{given.gpus:,} GPUs, a decision {decision.took_s:.1f} s, load average {os.getloadavg()[0]:.1f}")
    fleet = Fleet(decision.scores)
    assert sys.getswitchinterval() > 0.001
    measure(fleet, now, work, "Python's own settings")
    gc.collect()
    be_responsive()
    measure(fleet, now, work, "the service's settings")


if __name__ == "__main__":
    main()
