"""Development fleets on which benchmarks replay whole backtests, each of which goes on where it was killed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.scoreboard import store
from features.matrix.matrix import FeatureMatrix
from models.backtest_frames import BacktestResult
from models.checkpoint import code_digest
from models.config import ModelsSection, TrainingSection
from models.oracle import read_truth
from models.sliding import run_backtest
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from simulator.simulate import simulate
from telemetry.atomic import write_bytes

Replay = Callable[[FeatureMatrix, Path], tuple[pd.DataFrame, int, Mapping[str, Any]]]
"""Gives the predictions on a fleet, its alert budget, and facts that JSON can hold; keeps what is done in a folder."""


class Kept:
    """What a replay has finished, in a folder: one that was killed does only the rest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """Give what JSON can hold, made once."""
        file = self._folder / f"{name}.json"
        if not file.exists():
            write_bytes(file, json.dumps(make()).encode())
        return json.loads(file.read_text(encoding="utf-8"))

    def backtest(
        self, name: str, matrix: FeatureMatrix, *, training: TrainingSection, models: ModelsSection, params: Params
    ) -> tuple[BacktestResult, float]:
        """Replay a fleet, fold by fold, and tell the CPU seconds that all of its folds took."""
        spent = float(self.value(f"{name} seconds", lambda: 0.0))
        began = time.process_time()

        def note(*_: Any) -> None:
            told = spent + time.process_time() - began
            write_bytes(self._folder / f"{name} seconds.json", json.dumps(told).encode())

        done = run_backtest(
            matrix,
            training=training,
            models=models,
            backtest=params.backtest,
            seed=params.seed,
            checkpoint=self._folder / name,
            progress=note,
        )
        note()
        return done, spent + time.process_time() - began


def only(members: Sequence[str], params: Params) -> ModelsSection:
    """Fit no more than some learners; the profile is their mean of log-odds, or the only one."""
    return ModelsSection.model_validate(
        {
            "profile": "mean_log_odds" if len(members) > 1 else members[0],
            "learners": members,
            "parallel": {"members": members},
            "cascade": {"stages": members[:1]},
            "calibration": params.models.calibration.model_dump(mode="json"),
        }
    )


@dataclass(frozen=True, slots=True)
class DevelopmentFleets:
    """Simulated fleets of seeds that nothing is reported on."""

    work: Path
    gpus: int
    days: int
    acceleration: float
    params: Params
    models: ModelsSection
    benchmark: Path

    def of(self, scenario: str, seed: int, replay: Replay) -> store.Stored:
        """Take what was seen on a fleet, or simulate it, replay it and keep what was seen.

        Raises ``SystemExit`` if results are reported on the seed.
        """
        if seed < 100:
            raise SystemExit(f"seed {seed} is one that results are reported on: take seeds from 100 on")
        folder = self.work / f"{scenario}-{seed}"
        found = store.load(folder / "part", self._key)
        if found:
            return found
        begun = folder / "begun"
        if not begun.exists() or begun.read_text(encoding="utf-8") != self._key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            simulate(
                folder / "dataset",
                gpus=self.gpus,
                days=self.days,
                seed=seed,
                scenario=scenario,
                acceleration=self.acceleration,
            )
            write_bytes(begun, self._key.encode())
        sys.stderr.write(f"{scenario} {seed}\n")
        matrix = make_matrix(folder / "dataset", self.params, folder / "matrix")
        predictions, k, seen = replay(matrix, folder / "finished")
        members = list(self.models.parallel.members)
        facts = {"key": self._key, "k": k, "profile": self.models.profile, "members": members, "stages": []}
        part = store.keep(folder / "part", predictions, read_truth(folder / "dataset-truth"), {**facts, "fleet": seen})
        for name in ("dataset", "matrix", "finished"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return part

    @property
    def _key(self) -> str:
        content = [
            self.params.model_dump(mode="json"),
            self.models.model_dump(mode="json"),
            self.gpus,
            self.days,
            self.acceleration,
        ]
        told = json.dumps([code_digest(), *content], sort_keys=True).encode() + self.benchmark.read_bytes()
        return hashlib.sha256(told).hexdigest()
