"""How many jobs failures hit on a simulated fleet, without predrain and with it, and what that costs.

Run it alone: ``python benchmarks/jobs_saved.py [--quick] [--scenario announced base] [--seed 1] [--job-nodes 1]``. A
simulated fleet is scored as it would have been: a model that is refitted each week on what was known by then (LightGBM
alone, with the parameters of ``params.yaml``), never on what it scores. Then the fleet's jobs run on its nodes in
memory, its GPUs fail when they failed, and the controller acts on scores and reported faults with the settings that are
shipped (``deploy/act/act.yaml``), all groups in stage ``hard``. Nothing was chosen on the seeds that are reported (from
1 on). With ``--job-nodes N`` each job is taken for one node's part of a job on N nodes, which stops as a whole; fleet
and failures are the same.

Beside it, on the same fleet: nobody acts; the controller with the hard rules alone (all risks taken for 0); the
controller with a diagnostic of two hours after each drain that never finds anything, so that the node comes back at
once; with one that finds whatever is there or shows within three days, the best that could be; with ``high`` set by
costs instead (``thresholds_from: costs``) and the blind diagnostic; and draining each alert at once for a day, without
budgets, hysteresis or worth. Checked before anything is counted: in stage ``shadow`` the
controller moves nobody, and each job is hit that a plain look at the tables finds hit.

These are results of a simulation: the scenario ``announced`` was made so that most failures announce themselves, and
the rates are accelerated. They say that the way from a score to an empty node works and what it trades, not what it
would save on a real fleet. Without a diagnostic, as shipped, a node stays out until its risk is calm or its scores
expire; a real one finds some of what is wrong, and lies between the blind and the perfect one. Nothing is credited for
repairs that could be planned.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import pandas as pd  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from benchmarks.replayed_cluster import (  # noqa: E402
    HOUR,
    Assumed,
    Count,
    Failure,
    Fleet,
    Job,
    Place,
    ReplayedCluster,
    lost_in,
)
from evaluation.backtest.run import run_backtest  # noqa: E402
from pipeline.matrix_stage import make_matrix  # noqa: E402
from pipeline.params import load_params  # noqa: E402
from policy.assess import RULES  # noqa: E402
from policy.config import PolicyConfig  # noqa: E402
from policy.fleet import Score, UnitView  # noqa: E402
from policy.risk_record import ModelName  # noqa: E402
from policy.stages import Stage, StagesConfig  # noqa: E402
from scheduler.controller.facts import EventFacts  # noqa: E402
from scheduler.controller.settings import read_settings  # noqa: E402
from scheduler.ports.clock import ManualClock  # noqa: E402
from scheduler.ports.risks import NO_RISKS, Risks  # noqa: E402
from simulator.simulate import simulate  # noqa: E402

DELAY: Final = timedelta(minutes=10)
"""From a decision time until its scores are there."""

LASTS: Final = timedelta(hours=12)
"""How long a score holds: two decision intervals."""

RIGHT_WITHIN: Final = timedelta(hours=72)
"""A drain was needed if its node fails within this (``models.precision_targets.horizon``)."""

_MODEL: Final = ModelName("0" * 64, "lightgbm", None)
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

    ``alerts``: nodes of the GPUs alerted within the budget K.
    ``rounds``: when the controller has something new: scores, or a fault reported.
    """

    fleet: Fleet
    times: tuple[datetime, ...]
    risks: Mapping[datetime, Risks]
    alerts: Mapping[datetime, tuple[str, ...]]
    events: Path
    rounds: tuple[datetime, ...]


class Newest:
    """The scores that are there at the time.

    ``silent``: all risks are taken for 0: then only hard rules act.
    """

    def __init__(self, scored: Scored, clock: ManualClock, *, silent: bool) -> None:
        self._scored, self._clock, self._silent = scored, clock, silent
        self._held: tuple[datetime, Risks] | None = None

    def read(self) -> Risks:
        """Give them."""
        there = [time for time in self._scored.times if time + DELAY <= self._clock.now()]
        if not there:
            return NO_RISKS
        if self._held is None or self._held[0] != there[-1]:
            risks = self._scored.risks[there[-1]]
            self._held = there[-1], _silenced(risks) if self._silent else risks
        return self._held[1]


def _silenced(risks: Risks) -> Risks:
    return replace(
        risks,
        nodes={
            name: tuple(UnitView(u.name, replace(u.score, risk=0.0, reasons=()) if u.score else None) for u in units)
            for name, units in risks.nodes.items()
        },
    )


def scored_fleet(folder: Path, *, gpus: int, days: int, scenario: str, seed: int, acceleration: float) -> Scored:
    """Simulate a fleet, and score it decision by decision with what was known by then."""
    dataset = folder / "dataset"
    simulate(dataset, gpus=gpus, days=days, seed=seed, scenario=scenario, acceleration=acceleration)
    light = folder / "light.yaml"
    light.write_text(_LIGHT, encoding="utf-8")
    params = load_params([ROOT / "params.yaml", light])
    matrix = make_matrix(dataset, params, folder / "matrix")
    result = run_backtest(
        matrix, training=params.training, models=params.models, backtest=params.backtest, seed=params.seed
    )
    frame = result.predictions
    frame = frame[(frame["model"] == "lightgbm") & (frame["variant"] == "sliding")]
    folds = result.folds[result.folds["variant"] == "sliding"].set_index("fold")["refit_at"]
    risks: dict[datetime, Risks] = {}
    alerts: dict[datetime, tuple[str, ...]] = {}
    for instant, rows in frame.groupby("decision_time", observed=True):
        at = _aware(instant)
        risks[at] = _risks_at(at, rows, _aware(folds[rows["fold"].iloc[0]]))
        alerts[at] = tuple(sorted(set(rows.loc[rows["alert"], "node"].astype(str))))
    times = tuple(sorted(risks))
    fleet = _fleet(dataset, folder / "dataset-truth", times[0], times[-1] + timedelta(hours=6))
    events = dataset / "events.parquet"
    return Scored(fleet, times, risks, alerts, events, _rounds(times, events))


def _risks_at(at: datetime, rows: pd.DataFrame, fitted_at: datetime) -> Risks:
    nodes: dict[str, list[UnitView]] = {}
    for node, gpu, risk in zip(rows["node"].astype(str), rows["gpu"].astype(str), rows["risk"], strict=True):
        nodes.setdefault(node, []).append(UnitView(gpu, Score(float(risk), at, at + LASTS)))
    return Risks({name: tuple(units) for name, units in nodes.items()}, at, _MODEL, fitted_at)


def _fleet(dataset: Path, truth: Path, begin: datetime, end: datetime) -> Fleet:
    jobs = pq.read_table(dataset / "jobs.parquet").to_pylist()
    placed = pq.read_table(dataset / "inventory.parquet").to_pylist()
    failed = pq.read_table(truth / "failures.parquet").to_pylist()
    return Fleet(
        tuple(
            Job(job["job"], job["node"], job["gpus"], job["started_at"], job["ended_at"], job["checkpointed_at"])
            for job in jobs
            if job["started_at"] is not None and job["ended_at"] is not None
        ),
        tuple(
            sorted(
                (
                    Failure(failure["gpu"], failure["node"], failure["start"], failure["repaired"] or end)
                    for failure in failed
                ),
                key=lambda failure: failure.at,
            )
        ),
        tuple(Place(stay["gpu"], stay["node"], stay["installed_at"], stay["removed_at"]) for stay in placed),
        {stay["node"]: stay["group"] for stay in placed},
        {stay["node"]: stay["rack"] for stay in placed},
        begin,
        end,
    )


def _rounds(times: Iterable[datetime], events: Path) -> tuple[datetime, ...]:
    named = {rule.fact.removeprefix("xid ") for rule in RULES if rule.fact.startswith("xid ")}
    rows = pq.read_table(events, columns=["type", "code", "known_at"]).to_pylist()
    heard = {
        event["known_at"]
        for event in rows
        if (event["type"] == "xid" and event["code"] in named)
        or event["type"] in ("diagnostic", "repair", "replacement")
    }
    return tuple(sorted({at + DELAY for at in times} | heard))


def _aware(instant: Any) -> datetime:
    time: datetime = pd.Timestamp(instant).to_pydatetime()
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def policy_of(fleet: Fleet, stage: Stage, *, by_costs: bool = False) -> PolicyConfig:
    """Give the shipped settings, with every group of a fleet in one stage; ``high`` by costs where asked for."""
    shipped = read_settings(ROOT / "deploy" / "act" / "act.yaml").policy
    pinned = {f"cluster/{group}": stage for group in set(fleet.groups.values())}
    if by_costs:
        shipped = replace(shipped, thresholds=replace(shipped.thresholds, high=None), thresholds_from="costs")
    return replace(shipped, stages=StagesConfig(pinned=pinned))


def acted(
    scored: Scored,
    stage: Stage,
    *,
    silent: bool = False,
    diagnostic: timedelta | None = None,
    sighted: bool = False,
    by_costs: bool = False,
) -> Count:
    """Let the controller act on a fleet."""
    cluster = ReplayedCluster(
        scored.fleet, lambda clock: Newest(scored, clock, silent=silent), EventFacts(scored.events),
        policy_of(scored.fleet, stage, by_costs=by_costs), Assumed(), RIGHT_WITHIN, diagnostic, sighted=sighted,
    )  # fmt: skip
    return cluster.run(scored.rounds)


def untouched(scored: Scored) -> Count:
    """Count what happens where nobody acts, by a plain look at the tables."""
    count = Count()
    for failure in scored.fleet.failures:
        if not scored.fleet.begin <= failure.at < scored.fleet.end:
            continue
        count.failures += 1
        job = scored.fleet.hit(failure)
        if job is not None:
            count.hits += 1
            count.lost += lost_in(job, failure, Assumed())
    return count


def every_alert(scored: Scored, lasts: timedelta = timedelta(hours=24)) -> Count:
    """Count what happens where each alerted node is emptied at once, and kept so for a day after its last alert."""
    assumed, fleet, count = Assumed(), scored.fleet, untouched(scored)
    spans: dict[str, list[tuple[datetime, datetime]]] = {}
    for at in scored.times:
        for node in scored.alerts[at]:
            known, begin = spans.setdefault(node, []), at + DELAY
            if known and begin <= known[-1][1]:
                known[-1] = known[-1][0], begin + lasts
            else:
                known.append((begin, begin + lasts))
    ready = assumed.checkpoint + assumed.leave
    count.hits, count.lost = 0, 0.0
    for failure in fleet.failures:
        job = fleet.hit(failure) if fleet.begin <= failure.at < fleet.end else None
        away = any(begin + ready <= failure.at < end for begin, end in spans.get(failure.node, ()))
        if job is not None and not away:
            count.hits += 1
            count.lost += lost_in(job, failure, assumed)
    edges: list[tuple[datetime, int]] = []
    for node, listed in spans.items():
        gpus = sum(place.node == node and place.until is None for place in fleet.places)
        for begin, end in listed:
            count.drains += 1
            count.unneeded += not fleet.needed(node, begin, RIGHT_WITHIN)
            moved = [job for job in fleet.jobs if job.node == node and job.runs(begin)]
            count.moved += len(moved)
            work = [assumed.checkpoint if job.saved is not None else timedelta(0) for job in moved]
            count.spent += sum(
                job.gpus * ((redone + assumed.restart) / HOUR) for job, redone in zip(moved, work, strict=True)
            )
            count.idle += gpus * ((min(end, fleet.end) - begin) / HOUR)
            edges += [(begin, 1), (end, -1)]
    out = 0
    for _, step in sorted(edges):
        out += step
        count.most_out = max(count.most_out, out)
    return count


def measured(scenario: str, seed: int, quick: bool, job_nodes: int = 1) -> dict[str, Count]:
    """Count all ways to act on one fleet."""
    size = {"gpus": 128, "days": 60, "acceleration": 10.0} if quick else {"gpus": 512, "days": 120, "acceleration": 5.0}
    with tempfile.TemporaryDirectory(prefix="jobs-saved-") as folder:
        scored = scored_fleet(Path(folder), scenario=scenario, seed=seed, **size)  # type: ignore[arg-type]
        scored = replace(scored, fleet=scored.fleet.with_jobs_of(job_nodes))
        nothing, shadow = untouched(scored), acted(scored, "shadow")
        if shadow != nothing:
            raise SystemExit(f"in stage shadow {shadow} came out, and {nothing} where nobody acts")
        counts = {
            "nobody acts": nothing,
            "hard rules alone": acted(scored, "hard", silent=True),
            "predrain": acted(scored, "hard"),
            "and a blind test": acted(scored, "hard", diagnostic=timedelta(hours=2)),
            "and a perfect test": acted(scored, "hard", diagnostic=timedelta(hours=2), sighted=True),
            "high by costs, blind": acted(scored, "hard", diagnostic=timedelta(hours=2), by_costs=True),
            "every alert at once": every_alert(scored),
        }
    nodes = size["gpus"] // 8
    sys.stdout.write(
        f"simulated, {scenario}, seed {seed}: {nodes:g} nodes of 8 GPUs, jobs of {job_nodes} nodes, "
        f"{size['days']:g} days, rates x "
        f"{size['acceleration']:g}; {nothing.failures} failures while scored, "
        f"{(scored.fleet.end - scored.fleet.begin).days} days\n"
    )
    head = ("jobs hit", "moved", "drains", "unneeded", "lost", "spent", "idle", "most out")
    sys.stdout.write(f"  {'':<22}" + "".join(f"{heading:>10}" for heading in head) + "\n")
    for name, count in counts.items():
        whole = (count.hits, count.moved, count.drains, count.unneeded)
        hours = (count.lost, count.spent, count.idle)
        line = "".join(f"{value:>10}" for value in whole) + "".join(f"{value:>10.0f}" for value in hours)
        sys.stdout.write(f"  {name:<22}{line}{count.most_out:>10}\n")
    return counts


def main() -> None:
    """Count, print the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small fleet")
    parser.add_argument("--scenario", nargs="+", default=["announced", "base"], help="scenarios of the simulator")
    parser.add_argument("--seed", type=int, default=1, help="seed of each fleet; development uses seeds from 100 on")
    parser.add_argument("--job-nodes", type=int, default=1, help="nodes of each job; all but one stand elsewhere")
    args = parser.parse_args()
    if args.job_nodes < 1:
        parser.error(f"--job-nodes is {args.job_nodes}: give 1 or more")
    sys.stdout.write(
        "lost, spent, idle: GPU-hours of the jobs hit, of the jobs moved, of sound nodes kept out of service\n"
    )
    total: dict[str, Count] = {}
    for scenario in args.scenario[:1] if args.quick else args.scenario:
        for name, count in measured(scenario, args.seed, args.quick, args.job_nodes).items():
            known = total.setdefault(name, Count())
            known.hits += count.hits
            known.lost += count.lost
    hits = {name: count.hits for name, count in total.items()}
    spared = 1 - hits["predrain"] / hits["nobody acts"] if hits["nobody acts"] else 0.0
    report = {
        "name": "jobs_saved",
        "value": round(spared, 3),
        "unit": f"share of {hits['nobody acts']} jobs hit by failures that are spared (simulated)",
        "peer": "hard rules alone",
        "ratio": round(hits["hard rules alone"] / hits["predrain"], 2) if hits["predrain"] else None,
        "limit_share": None,
        "checked": True,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
