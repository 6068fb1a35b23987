"""How many jobs failures hit on a simulated fleet, without predrain and with it, and what that costs.

Run it alone: ``python benchmarks/jobs_saved.py [--quick] [--scenario announced base] [--seed 1] [--job-nodes 1]``. A
simulated fleet is scored as it would have been: a model that is refitted each week on what was known by then (LightGBM
alone, with the parameters of ``params.yaml``), never on what it scores. Then the controller's decisions on scores and
reported faults are replayed with the settings that are shipped (``deploy/act/act.yaml``), all groups in stage ``hard``,
and counted as ``predrain assess`` counts them (``evaluation.value``). Nothing was chosen on the seeds that are reported
(from 1 on). With ``--job-nodes N`` each job is taken for one node's part of a job on N nodes, which stops as a whole
and whose other nodes never fail; fleet and failures are the same.

Next to it, on the same fleet: no action; the hard rules alone (all risks taken for 0); a diagnostic of two hours after
each drain that never finds anything, so that the node comes back immediately; one that finds whatever is there or
shows within three days, the best that could be; ``high`` set by costs instead (``thresholds_from: costs``) with the
blind diagnostic; and draining each alert immediately for a day, without budgets, hysteresis or worth. Checked
before anything is told: in stage ``shadow`` nothing is marked, and the controller itself (:mod:`predrain.demo.cluster`)
drains the same nodes as the replay, at the same decisions.

These are results of a simulation: the scenario ``announced`` was made so that most failures announce themselves, and
the rates are accelerated. They say that the way from a score to an empty node works and what it trades, not what it
would save on a real fleet. Without a diagnostic, as shipped, a node stays out until its risk is calm or its scores
expire; a real one finds some of what is wrong, and lies between the blind and the perfect one. Repairs that a found
fault lets one plan are not among what is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import numpy as np
import pandas as pd

from evaluation.backtest.run import run_backtest
from evaluation.value.controller_replay import Controlled, Diagnostic, ReplayedFleet, rule_events
from evaluation.value.gpu_hours import ReplayOutcome, count_outcome
from evaluation.value.load import Placements, jobs_of_table
from evaluation.value.marks import NOBODY, ReplayMarks
from evaluation.value.readings import Readings
from features.times import NEVER, duration_ms, milliseconds
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params
from policy.config import PolicyConfig
from policy.stages import Stage
from predrain.demo.cluster import ReplayedCluster
from scheduler.controller.settings import read_settings
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset

DELAY: Final = timedelta(minutes=10)
"""From a decision time until its scores exist."""

LASTS: Final = timedelta(hours=12)
"""How long a score holds: two decision intervals."""

RIGHT_WITHIN: Final = timedelta(hours=72)
"""A drain was needed if its node fails within this (``models.precision_targets.horizon``)."""

_LIGHT: Final = """
models:
  profile: lightgbm
  learners: [lightgbm]
  parallel: {members: [lightgbm], combiner: mean_log_odds}
  cascade: {stages: [lightgbm]}
  horizons: []
backtest: {bootstrap: 20}
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """A fleet with the scores that it would have had.

    ``silent``: the scores with all risks taken for 0.
    ``alerts``: drains of a day for the GPUs alerted within the budget K, without any rule.
    """

    fleet: ReplayedFleet
    scores: Readings
    silent: Readings
    events: Sequence[Mapping[str, Any]]
    jobs: Placements
    alerts: ReplayMarks


def scored_fleet(
    folder: Path, *, gpus: int, days: int, scenario: str, seed: int, acceleration: float, job_nodes: int = 1
) -> Scored:
    """Simulate a fleet, and score it decision by decision with what was known by then."""
    place = folder / "dataset"
    simulate(place, gpus=gpus, days=days, seed=seed, scenario=scenario, acceleration=acceleration)
    light = folder / "light.yaml"
    light.write_text(_LIGHT, encoding="utf-8")
    params = load_params([ROOT / "params.yaml", light])
    matrix = make_matrix(place, params, folder / "matrix")
    result = run_backtest(
        matrix, training=params.training, models=params.models, backtest=params.backtest, seed=params.seed
    )
    frame = result.predictions
    frame = frame[(frame["model"] == "lightgbm") & (frame["variant"] == "sliding")]
    dataset, times = Dataset.open(place), milliseconds(frame["decision_time"])
    failures = pd.read_parquet(folder / "dataset-truth" / "failures.parquet")
    failures = failures.drop(columns="end", errors="ignore").rename(columns={"repaired": "end"})
    end = int(times.max()) + duration_ms(timedelta(hours=6))
    fleet = ReplayedFleet.of(dataset.inventory(), failures, int(times.min()), end)
    table = dataset.jobs()
    assert table is not None
    jobs = jobs_of_table(table, fleet.names, fleet.gpus, end, timedelta(hours=2))
    jobs = replace(jobs, size=jobs.size * job_nodes)
    folds = result.folds[result.folds["variant"] == "sliding"]
    scores, silent = (Readings(scored, folds, delay=DELAY, lasts=LASTS) for scored in (frame, frame.assign(risk=0.0)))
    return Scored(fleet, scores, silent, rule_events(dataset.events(), fleet.boots()), jobs, _every_alert(frame, fleet))


def _every_alert(frame: pd.DataFrame, fleet: ReplayedFleet, lasts: timedelta = timedelta(hours=24)) -> ReplayMarks:
    """Drain each alerted node immediately, until a day after its last alert."""
    rows = frame[frame["alert"].to_numpy(dtype=bool)]
    node, at = fleet.names.get_indexer(rows["node"].astype("str")), milliseconds(rows["decision_time"])
    spans: list[list[int]] = []
    for place, begin in sorted({*zip(node.tolist(), (at + duration_ms(DELAY)).tolist(), strict=True)}):
        if spans and spans[-1][0] == place and begin <= spans[-1][2]:
            spans[-1][2] = begin + duration_ms(lasts)
        else:
            spans.append([place, begin, begin + duration_ms(lasts), begin, NEVER])
    return ReplayMarks.of(
        [node, at, min(until, fleet.end), drained, found] for node, at, until, drained, found in spans
    )


def policy_of(fleet: ReplayedFleet, stage: Stage, *, by_costs: bool = False) -> PolicyConfig:
    """Give the shipped settings, with every group of a fleet in one stage; ``high`` by costs where asked for."""
    shipped = read_settings(ROOT / "deploy" / "act" / "act.yaml").policy
    if by_costs:
        shipped = replace(shipped, thresholds=replace(shipped.thresholds, high=None), thresholds_from="costs")
    return fleet.stage(shipped, stage)


def differing(one: ReplayMarks, other: ReplayMarks, decision: timedelta) -> list[str]:
    """Name the drains of one that the other has not on the same node within a decision, and those of the other."""
    wrong = []
    for mine, theirs, whose in ((one, other, "the controller"), (other, one, "the replay")):
        for node, at, until in zip(mine.node, mine.at, mine.until, strict=True):
            near = (theirs.node == node) & (np.abs(theirs.at - at) <= duration_ms(decision))
            if not (near & (np.abs(theirs.until - until) <= duration_ms(decision))).any():
                wrong.append(f"{whose} marks node {node} from {at} to {until}, the other does not")
    return wrong


def measured(scenario: str, seed: int, quick: bool, job_nodes: int = 1) -> dict[str, ReplayOutcome]:
    """Count all ways to act on one fleet."""
    size: dict[str, Any] = {"gpus": 512, "days": 120, "acceleration": 5.0}
    if quick:
        size = {"gpus": 256, "days": 60, "acceleration": 4.0}
    with tempfile.TemporaryDirectory(prefix="jobs-saved-") as folder:
        scored = scored_fleet(Path(folder), scenario=scenario, seed=seed, job_nodes=job_nodes, **size)
    fleet, jobs = scored.fleet, scored.jobs

    def marks(scores: Readings, diagnostic: Diagnostic = "none", **how: Any) -> ReplayMarks:
        policy = policy_of(fleet, **({"stage": "hard"} | how))
        return Controlled(fleet, scores, scored.events, jobs, policy, RIGHT_WITHIN, diagnostic).marks()

    acts = {
        "no action": NOBODY,
        "hard rules alone": marks(scored.silent),
        "predrain": marks(scored.scores),
        "and a blind test": marks(scored.scores, "blind"),
        "and a perfect test": marks(scored.scores, "perfect"),
        "high by costs, blind": marks(scored.scores, "blind", by_costs=True),
        "every alert immediately": scored.alerts,
    }
    if len(marks(scored.scores, stage="shadow").node):
        raise SystemExit("in stage shadow nodes were marked")
    cluster = ReplayedCluster(fleet, scored.scores, scored.events, jobs, policy_of(fleet, "hard"), reach=RIGHT_WITHIN)
    if wrong := differing(cluster.marks(), acts["predrain"], timedelta(hours=6)):
        raise SystemExit(f"the controller and the replay differ: {wrong[0]}")
    costs = policy_of(fleet, "hard").cost_benefit
    counts = {name: count_outcome(fleet, [jobs], act, costs, reach=RIGHT_WITHIN) for name, act in acts.items()}
    failures = int(((fleet.at >= fleet.begin) & (fleet.at < fleet.end)).sum())
    sys.stdout.write(
        f"simulated, {scenario}, seed {seed}: {len(fleet.nodes)} nodes of 8 GPUs, jobs of {job_nodes} nodes, "
        f"{size['days']:g} days, rates x {size['acceleration']:g}; {failures} failures while scored, "
        f"{(fleet.end - fleet.begin) / duration_ms(timedelta(days=1)):.0f} days\n"
    )
    head = ("jobs hit", "moved", "drains", "unneeded", "lost", "spent", "idle", "most out")
    sys.stdout.write(f"  {'':<22}" + "".join(f"{heading:>10}" for heading in head) + "\n")
    for name, count in counts.items():
        act = acts[name]
        most = max((int(((act.at <= at) & (at < act.until)).sum()) for at in act.at), default=0)
        whole = (count.hits, count.moved, count.drains, count.known - count.right)
        hours = (count.hit.sum(), count.spent.sum(), count.idle.sum(), most)
        sys.stdout.write(f"  {name:<22}" + "".join(f"{value:>10.0f}" for value in (*whole, *hours)) + "\n")
    return counts


def main() -> None:
    """Count, print the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small fleet")
    parser.add_argument("--scenario", nargs="+", default=["announced", "base"], help="scenarios of the simulator")
    parser.add_argument("--seed", type=int, default=1, help="seed of each fleet; development uses seeds from 100 on")
    parser.add_argument("--job-nodes", type=int, default=1, help="nodes of each job; all but one are elsewhere")
    args = parser.parse_args()
    if args.job_nodes < 1:
        parser.error(f"--job-nodes is {args.job_nodes}: give 1 or more")
    sys.stdout.write(
        "lost, spent, idle: GPU-hours of the jobs hit, of the jobs moved, of sound nodes kept out of service\n"
    )
    hits: dict[str, int] = {}
    for scenario in args.scenario[:1] if args.quick else args.scenario:
        for name, count in measured(scenario, args.seed, args.quick, args.job_nodes).items():
            hits[name] = hits.get(name, 0) + round(count.hits)
    spared = 1 - hits["predrain"] / hits["no action"] if hits["no action"] else 0.0
    report = {
        "name": "jobs_saved",
        "value": round(spared, 3),
        "unit": f"share of {hits['no action']} jobs hit by failures that are spared (simulated)",
        "peer": "hard rules alone",
        "ratio": round(hits["hard rules alone"] / hits["predrain"], 2) if hits["predrain"] else None,
        "limit_share": None,
        "checked": True,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
