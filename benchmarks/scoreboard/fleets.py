"""Run the parts of the plan: simulate, features, replay, keep; finished ones are taken as they are."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scoreboard import store
from benchmarks.scoreboard.plan import FULL, Part, Plan, code_digest, key_of, params_of
from benchmarks.scoreboard.promised import keep_labels
from benchmarks.scoreboard.store import Stored
from evaluation.backtest.run import run_backtest
from evaluation.metrics.oracle import read_truth
from features.matrix.matrix import FeatureMatrix
from models.config import SEQUENCE
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class Ran:
    """What running the plan gave.

    ``left_out``: parts that could not be run, and why.
    ``fresh``: how many were run by this call rather than taken.
    """

    parts: dict[Part, Stored]
    left_out: tuple[str, ...]
    fresh: int


NOT_YET = "not run yet"
"""Why a part is missing from the table of what is finished."""


def run_plan(plan: Plan, files: Sequence[Path], work: Path, *, jobs: int = 2, finished: bool = False) -> Ran:
    """Run every part that no earlier call left finished, several fleets at a time.

    The first seed of every scenario comes first, then the second: what a run that is cut off leaves is a smaller table
    of the same shape. Of each seed the largest fleets come first, so that none is left to run alone for long at the
    end.

    ``work``: folder for fleets and results. A killed call leaves it so that the next goes on at the parts that were cut
    off.
    ``jobs``: fleets at a time, each in a process of its own; one of 2,000 GPUs needs up to 6 GB. Larger ones run one at
    a time beside those.
    ``finished``: run nothing: take what is finished, and name the rest as left out.
    """
    code = code_digest()
    keys: dict[Part, str] = {}
    left_out: list[str] = []
    for part in plan.parts:
        params = params_of(part.profile, files)
        why = _missing(params)
        if params is None or why:
            left_out.append(f"{part.name}: {why}")
        else:
            keys[part] = key_of(part, params, code)
    wanting: dict[str, list[Part]] = {}
    for part, key in sorted(keys.items(), key=lambda keyed: (keyed[0].seed, -keyed[0].size.gpus)):
        if store.load(work / "parts" / part.name, key) is None:
            wanting.setdefault(part.fleet, []).append(part)
    if finished:
        parts = {part: store.load(work / "parts" / part.name, key) for part, key in keys.items()}
        left_out += [f"{part.name}: {NOT_YET}" for part, stored in parts.items() if stored is None]
        return Ran({part: stored for part, stored in parts.items() if stored is not None}, tuple(left_out), 0)
    begin = time.monotonic()
    tasks = [[(part, keys[part]) for part in parts] for parts in wanting.values()]
    for at, fleet in enumerate(_run_fleets(tasks, files, work, jobs, FULL.gpus), 1):
        sys.stderr.write(f"{at} of {len(wanting)} fleets: {fleet}, {time.monotonic() - begin:.0f} s\n")
        sys.stderr.flush()
    done = {part: store.load(work / "parts" / part.name, key) for part, key in keys.items()}
    missing = [part.name for part, stored in done.items() if stored is None]
    if missing:
        raise RuntimeError(f"these parts were run and left nothing that can be read: {', '.join(missing)}")
    fresh = sum(len(parts) for parts in wanting.values())
    return Ran({part: stored for part, stored in done.items() if stored is not None}, tuple(left_out), fresh)


_Task = Sequence[tuple[Part, str]]
"""The parts of one fleet, and their keys."""


def _run_fleets(tasks: Sequence[_Task], files: Sequence[Path], work: Path, jobs: int, usual: int) -> Iterator[str]:
    """Run fleets, give each one's name when it is done; of those of more than ``usual`` GPUs one at a time."""
    if jobs == 1:
        for task in tasks:
            yield _run_fleet(task, files, work)
        return
    waiting, running = list(tasks), dict[Future[str], _Task]()
    context = multiprocessing.get_context("spawn")
    # One fleet a process: what it took of memory is given back.
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context, max_tasks_per_child=1) as pool:
        while waiting or running:
            while len(running) < jobs and (task := _next_of(waiting, list(running.values()), usual)):
                waiting.remove(task)
                running[pool.submit(_run_fleet, task, tuple(files), work)] = task
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                del running[done]
                yield done.result()


def _next_of(waiting: Sequence[_Task], running: Sequence[_Task], usual: int) -> _Task | None:
    """Give the first that may run now; a large one waits while another runs."""
    large = any(task[0][0].size.gpus > usual for task in running)
    return next((task for task in waiting if not large or task[0][0].size.gpus <= usual), None)


def _run_fleet(parts: _Task, files: Sequence[Path], work: Path) -> str:
    """Run the parts of one fleet one after the other, then forget the fleet; give its name."""
    for part, key in parts:
        params = params_of(part.profile, files)
        assert params is not None
        target = work / "parts" / part.name
        shutil.rmtree(target, ignore_errors=True)
        _run(part, params, work, target, key)
    fleet = parts[0][0].fleet
    _forget(work / "fleets" / fleet)
    return fleet


def _missing(params: Params | None) -> str:
    if params is None:
        return "there is no params/paper.yaml"
    wanted = {*params.models.learners, *params.models.parallel.members, *params.models.cascade.stages}
    if wanted & set(SEQUENCE) and importlib.util.find_spec("torch") is None:
        return "its sequence learners need PyTorch (the extra `sequence`), which is not installed"
    return ""


def _run(part: Part, params: Params, work: Path, target: Path, key: str) -> None:
    # matrix and folds know their parameters but not the code that made them, so they lie under the part's key
    scratch = work / "unfinished" / part.name / key[:16]
    for other in scratch.parent.glob("*"):
        if other != scratch:
            _forget(other)
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
    matrix: FeatureMatrix = make_matrix(dataset, params, scratch / "matrix")
    result = run_backtest(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        checkpoint=scratch / "folds",
    )
    spans = result.folds[result.folds["variant"] == "sliding"].sort_values("fold")["span"]
    facts = {
        "key": key,
        "k": result.k,
        "profile": params.models.profile,
        "members": list(params.models.parallel.members),
        "stages": list(params.models.cascade.stages),
        "spans_days": [span.days for span in spans],
        "skipped": list(result.skipped),
    }
    target.mkdir(parents=True)
    keep_labels(matrix, target)
    store.keep(target, result.predictions, read_truth(fleet / "dataset-truth"), facts)
    _forget(scratch.parent)


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
