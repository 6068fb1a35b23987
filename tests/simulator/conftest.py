from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from simulator.fleet import SimulatedTime
from simulator.run import Simulation, run_fleet
from simulator.scenarios import SCENARIOS
from simulator.simulate import simulate

START_MS = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)


@pytest.fixture(scope="session")
def fleet() -> Callable[..., Simulation]:
    """Makes a simulation without telemetry; the same arguments give the same object."""
    known: dict[tuple[object, ...], Simulation] = {}

    def make(scenario: str, gpus: int, days: int, *, seed: int = 1, acceleration: float = 1.0) -> Simulation:
        key = (scenario, gpus, days, seed, acceleration)
        if key not in known:
            clock = SimulatedTime(START_MS, days, 600_000, SCENARIOS[scenario].parameters.warm_up_days)
            known[key] = run_fleet(SCENARIOS[scenario], clock, gpus=gpus, seed=seed, acceleration=acceleration)
        return known[key]

    return make


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small fleet on disk, with every kind of event in it."""
    out = tmp_path_factory.mktemp("simulated") / "fleet"
    return simulate(Path(out), gpus=156, days=24, seed=5, scenario="drift", acceleration=40.0, step=timedelta(hours=1))


def failure_rows(simulation: Simulation) -> np.ndarray:
    """All failures within the simulated time: node, then the columns of simulator.lives.FAILURE."""
    tables = [
        np.column_stack([np.full(len(life.failures), node.index), life.failures])
        for node, life in zip(simulation.nodes, simulation.lives, strict=True)
    ]
    rows = np.concatenate(tables)
    return rows[rows[:, 3] >= simulation.clock.start]


def gpu_years(simulation: Simulation) -> float:
    clock = simulation.clock
    total = 0
    for life in simulation.lives:
        began = np.maximum(life.installations[:, 2], clock.start)
        ended = np.minimum(life.installations[:, 3], clock.end)
        total += int(np.maximum(ended - began, 0).sum())
    return total / 86_400_000 / 365.25


def outcomes(time: np.ndarray, unit: np.ndarray, failures: pd.DataFrame, gap_ms: int, horizon_ms: int) -> np.ndarray:
    """Whether a failure of the unit starts in (t + gap, t + gap + horizon]."""
    asked = pd.DataFrame({"unit": unit, "at": time + gap_ms, "row": np.arange(len(time))}).sort_values("at")
    had = failures.assign(at=failures["start"]).sort_values("at")
    joined = pd.merge_asof(asked, had, on="at", by="unit", direction="forward", allow_exact_matches=False)
    failed = np.zeros(len(time), bool)
    failed[joined["row"].to_numpy()] = (joined["start"] - joined["at"] <= horizon_ms).to_numpy()
    return failed
