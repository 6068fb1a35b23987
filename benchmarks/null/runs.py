"""The runs on simulated fleets: nothing is to be found in some, and something in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.null.finding import Outcome, measure
from benchmarks.null.incidents import with_incidents
from benchmarks.null.owners import ReadsTheFuture, ShuffledOwners
from benchmarks.null.sizes import Size
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from simulator.simulate import simulate

NAMES = ("shuffled", "leak shuffled", "independent", "leak", "planted")
"""The runs, in the order of the table."""


def run_checks(
    work: Path,
    size: Size,
    params: Params,
    names: Sequence[str] = ("shuffled", "independent", "planted", "leak"),
    *,
    done: Callable[[Outcome], None] | None = None,
) -> dict[str, Outcome]:
    """Run the checks asked for and give their outcomes by name; ``done`` is told each as soon as it is there."""
    out: dict[str, Outcome] = {}

    def look(name: str, matrix: Any) -> None:
        if name in names:
            out[name] = measure(name, matrix, params)
            if done is not None:
                done(out[name])

    if {"shuffled", "leak shuffled"} & set(names):
        fleet = work / "failing"
        simulate(fleet, gpus=size.gpus, days=size.days, seed=size.seed, scenario="base", acceleration=size.acceleration)
        shuffled = ShuffledOwners(make_matrix(fleet, params, work / "failing-matrix"), size.seed)
        look("shuffled", shuffled)
        if "leak shuffled" in names:
            look("leak shuffled", ReadsTheFuture(shuffled, size.seed))
    if {"independent", "planted", "leak"} & set(names):
        quiet = work / "quiet"
        simulate(quiet, gpus=size.gpus, days=size.days, seed=size.seed + 1, scenario="noprecursor", acceleration=1e-6)
        drawn: dict[str, Any] = {"count": size.incidents, "seed": size.seed + 2}
        if {"independent", "leak"} & set(names):
            flat = with_incidents(quiet, work / "independent", planted=False, **drawn)
            matrix = make_matrix(flat, params, work / "independent-matrix")
            look("independent", matrix)
            if "leak" in names:
                look("leak", ReadsTheFuture(matrix, size.seed))
        if "planted" in names:
            hot = with_incidents(quiet, work / "planted", planted=True, **drawn)
            look("planted", make_matrix(hot, params, work / "planted-matrix"))
    return out
