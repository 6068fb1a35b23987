"""Run the parts of the plan: simulate, features, replay, keep; finished ones are taken as they are."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scoreboard import store
from benchmarks.scoreboard.plan import Part, Plan, code_digest, key_of, params_of
from benchmarks.scoreboard.store import Stored
from features.matrix import FeatureMatrix
from models.config import SEQUENCE
from models.oracle import read_truth
from models.promises import walk_promises
from models.sliding import run_backtest
from pipeline.params import Params
from pipeline.stages import make_matrix
from simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class Ran:
    """What running the plan gave.

    Attributes
    ----------
    parts : dict of Part to Stored
        The finished parts.
    left_out : tuple of str
        Parts that could not be run, and why.
    fresh : int
        How many were run by this call rather than taken.
    """

    parts: dict[Part, Stored]
    left_out: tuple[str, ...]
    fresh: int


def run_plan(plan: Plan, files: Sequence[Path], work: Path) -> Ran:
    """Run every part that no earlier call left finished.

    Parameters
    ----------
    plan : Plan
        The parts.
    files : sequence of Path
        Parameter files of the recommended profile.
    work : Path
        Folder for fleets and results. A killed call leaves it so that the next goes on at the part that was cut off.

    Returns
    -------
    Ran
        The parts.
    """
    code = code_digest()
    done: dict[Part, Stored] = {}
    left_out: list[str] = []
    fresh = 0
    begin = time.monotonic()
    for at, part in enumerate(plan.parts):
        params = params_of(part.profile, files)
        why = _missing(params)
        if params is None or why:
            left_out.append(f"{part.name}: {why}")
            continue
        key = key_of(part, params, code)
        target = work / "parts" / part.name
        found = store.load(target, key)
        if found is None:
            shutil.rmtree(target, ignore_errors=True)
            found = _run(part, params, work, target, key)
            fresh += 1
        done[part] = found
        if not any(later.fleet == part.fleet for later in plan.parts[at + 1 :]):
            _forget(work / "fleets" / part.fleet)
        sys.stderr.write(f"{at + 1} of {len(plan.parts)}: {part.name}, {time.monotonic() - begin:.0f} s\n")
    return Ran(done, tuple(left_out), fresh)


def _missing(params: Params | None) -> str:
    if params is None:
        return "there is no params/paper.yaml"
    wanted = {*params.models.learners, *params.models.parallel.members, *params.models.cascade.stages}
    if wanted & set(SEQUENCE) and importlib.util.find_spec("torch") is None:
        return "its sequence learners need PyTorch (the extra `sequence`), which is not installed"
    return ""


def _run(part: Part, params: Params, work: Path, target: Path, key: str) -> Stored:
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    clock = _Clock(seconds, cpu)
    fleet = work / "fleets" / part.fleet
    dataset = fleet / "dataset"
    note, code = fleet / "simulated-by", code_digest(("simulator", "telemetry"))
    if not note.is_file() or note.read_text(encoding="utf-8") != code:
        _forget(fleet)
        fleet.mkdir(parents=True)
        simulate(
            dataset,
            gpus=part.size.gpus,
            days=part.size.days,
            seed=part.seed,
            scenario=part.scenario,
            acceleration=part.size.acceleration,
        )
        note.write_text(code, encoding="utf-8")  # last: a fleet without it was cut off
    clock.lap("simulate")
    # matrix and folds know their parameters but not the code that made them, so they lie under the part's key
    scratch = work / "unfinished" / part.name / key[:16]
    for other in scratch.parent.glob("*"):
        if other != scratch:
            _forget(other)
    matrix: FeatureMatrix = make_matrix(dataset, params, scratch / "matrix")
    clock.lap("features")
    result = run_backtest(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        checkpoint=scratch / "folds",
    )
    clock.lap("backtest")
    promises = walk_promises(result.predictions, result.folds, matrix, params.models.promises, k=result.k)
    clock.lap("promises")
    spans = result.folds[result.folds["variant"] == "sliding"].sort_values("fold")["span"]
    facts = {
        "key": key,
        "k": result.k,
        "profile": params.models.profile,
        "members": list(params.models.parallel.members),
        "stages": list(params.models.cascade.stages),
        "spans_days": [span.days for span in spans],
        "skipped": [str(each) for each in result.skipped],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "cores": os.cpu_count(),
    }
    extras = {"promises": promises.pooled, "promise_folds": promises.folds}
    target.mkdir(parents=True)
    kept = store.keep(target, result.predictions, read_truth(fleet / "dataset-truth"), facts, extras)
    _forget(scratch.parent)
    return kept


class _Clock:
    """Seconds of the wall and of all cores since the last lap."""

    def __init__(self, wall: dict[str, float], cpu: dict[str, float]) -> None:
        self._wall, self._cpu = wall, cpu
        self._from = time.monotonic(), _cpu_seconds()

    def lap(self, name: str) -> None:
        now = time.monotonic(), _cpu_seconds()
        self._wall[name] = round(now[0] - self._from[0], 1)
        self._cpu[name] = round(now[1] - self._from[1], 1)
        self._from = now


def _cpu_seconds() -> float:
    mine, children = os.times()[:2], os.times()[2:4]
    return sum(mine) + sum(children)


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
