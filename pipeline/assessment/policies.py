"""Replays of policies and of the ladder on the fleet of an assessment: what acting on its risks is worth."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from joblib import Parallel, delayed

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.oracle import oracle_predictions, read_truth
from evaluation.value.controller_replay import Controlled, Diagnostic, ReportCache, rule_events
from evaluation.value.gpu_hours import ReplayOutcome, count_outcome, net_row
from evaluation.value.ladder import Assumptions, LadderReplay
from evaluation.value.load import Placements, ReplayedFleet, generated_load, jobs_of_table
from evaluation.value.marks import NO_ACTION
from evaluation.value.readings import Readings
from features.matrix.matrix import FeatureMatrix
from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.running import gc_paused
from foundation.times import instant_ms, milliseconds
from pipeline.artefacts import load_evaluation
from pipeline.params import Params
from policy.config import PolicyConfig
from policy.ladder.rungs import Rung
from policy.tiers import TierThresholds
from telemetry.dataset.store import Dataset

LOADS: Final = 5
"""Maximum number of generated loads to average over if the dataset has no jobs; large fleets need fewer."""

_SUFFICIENT_GPUS: Final = 10_000
"""GPUs that suffice, summed over loads; there are always at least two loads."""

SIZES: Final = (8, 64, 256, 1024)
"""Job sizes, in GPUs, for which actions are replayed to find the size at which they start to pay."""

_PARALLEL_GPUS: Final = 1000
"""Fleet size, in GPUs, from which policies are replayed in several processes."""

REPLICATES: Final = 1000
"""Bootstrap samples of nodes behind each interval of GPU-hours."""

Begin = Callable[[str], Callable[[int, int], None]]
"""Called with the name of a stage when it starts; returns its progress callback (done, total)."""


def predictions_of(folder: Path, *models: str) -> pd.DataFrame:
    """Read the sliding predictions of some models only, because those of all models can be gigabytes."""
    chosen = [("model", "in", models), ("variant", "==", SLIDING)]
    return pd.read_parquet(folder / "predictions_all.parquet", filters=chosen)


def replay_policies(
    dataset: Dataset,
    matrix: FeatureMatrix,
    params: Params,
    out: Path,
    assumed: Assumptions,
    truth: Path | None,
    *,
    sizes: bool,
    allowed: Collection[Rung],
    begin: Begin,
) -> dict[str, Any]:
    """Replay policies on the fleet's failures and jobs.

    ``sizes``: also replay jobs of each size in :data:`SIZES`, and of mixed sizes as in a real trace.
    """
    costs, gpus_per_job, on_request = assumed.costs, assumed.gpus_per_job, assumed.checkpoint_on_request
    predictions = predictions_of(out, params.models.profile)
    since, end = int(milliseconds(predictions["decision_time"]).min()), instant_ms(matrix.span[1])
    fleet = ReplayedFleet.of(dataset.inventory(), matrix.incidents(), since, end)
    table, interval, total = dataset.jobs(), costs.checkpoint_every, int(fleet.gpus.sum())
    for option, size in (("--gpus-per-job", gpus_per_job), ("--largest-job", assumed.largest_job)):
        if size is not None and size > total:
            raise InputError(f"{size} exceeds the {total} GPUs of the fleet", option, "Give a smaller size.")

    has_jobs = gpus_per_job is None and assumed.largest_job is None and table is not None and len(table) > 0
    evaluation, context = load_evaluation(out)
    labels, folds = params.labels, context.folds[context.folds["variant"] == SLIDING]
    horizon = labels.gap + labels.horizon
    lifetime = min(horizon, labels.gap + 2 * params.decision.every)

    def scores_of(frame: pd.DataFrame) -> Readings:
        return Readings(frame, folds, delay=labels.gap, lifetime=lifetime)

    reach = timedelta(hours=evaluation.drain_hours)
    replays = _Replays(fleet, rule_events(dataset.events(), fleet.boots()), assumed, horizon, reach, params.seed)
    if has_jobs and table is not None:
        loads = [replace(jobs_of_table(table, fleet.names, fleet.gpus, end, interval), on_request=on_request)]
    else:
        loads = replays.loads(gpus_per_job)
    scores = scores_of(predictions)
    policies: dict[str, _Policy] = {
        "no action": (None, "none"),
        "hard rules alone": (scores_of(predictions.assign(risk=0.0)), "none"),
        # ignores the controller's thresholds: these are the alerts whose precision is reported above
        "every alert drained": (scores_of(predictions.assign(risk=predictions["alert"].astype(np.float64))), "none"),
        "drains": (scores, "none"),
        "drains, a diagnostic that finds nothing": (scores, "blind"),
        "drains, a diagnostic that finds all": (scores, "perfect"),
    }
    if truth is not None and any(truth.iterdir()):
        best = oracle_predictions(predictions, read_truth(truth), evaluation.k)
        policies["oracle, a diagnostic that finds all"] = (scores_of(best), "perfect")
    sizes_shown: list[int | None] = [*(size for size in SIZES if size <= total), None] if sizes else []
    sizes_replayed = [size for size in sizes_shown if has_jobs or size != gpus_per_job]  # the main replay covers others
    report_progress = begin("policies")
    report_progress(0, 1 + len(sizes_replayed))
    tasks = [
        delayed(replays.replay_policies)(loads, policies, scores, allowed),
        *(delayed(replays.with_size)(size, scores, allowed) for size in sizes_replayed),
    ]
    results: list[dict[str, Any]] = []
    workers = min(os.cpu_count() or 1, len(tasks)) if total >= _PARALLEL_GPUS else 1
    for result in Parallel(n_jobs=workers, return_as="generator")(tasks):
        results.append(result)
        report_progress(len(results), len(tasks))
    played, *by_size = results
    main = {"gpus_per_job": gpus_per_job} | {key: played[key] for key in ("ladder", "recommended", "recommended_net")}
    job_gpus = np.concatenate([load.size for load in loads])
    hours = np.concatenate([load.gpus * (load.end - load.start) for load in loads])
    return played | {
        "by_job_size": [by_size.pop(0) if size in sizes_replayed else main for size in sizes_shown],
        "costs": {
            name: format_duration(getattr(costs, name))
            for name in ("checkpoint", "restart", "reset", "reboot", "verify", "planned_repair", "unplanned_repair")
        }
        | {"probe": format_duration(assumed.probes.duration)},
        "found": dict(assumed.probes.found),
        "idle_cost": assumed.probes.idle_cost,
        "spare_nodes": assumed.spare_nodes,
        "jobs": {
            "from": "the dataset" if has_jobs else "a generated load",
            "mean_gpus_by_gpu_hours": float(np.average(job_gpus, weights=hours)) if len(job_gpus) else 0.0,
            "checkpoint_every": format_duration(interval),
            "checkpoint_on_request": on_request,
            "planned_repair_saves_hours": (costs.unplanned_repair - costs.planned_repair) / timedelta(hours=1),
        },
    }


_Policy = tuple[Readings | None, Diagnostic]
"""Scores (None: no action), and the diagnostic after a drain."""


@dataclass(frozen=True, slots=True)
class _Replays:
    """Inputs of a replay that do not depend on the jobs."""

    fleet: ReplayedFleet
    events: Sequence[Mapping[str, Any]]
    assumed: Assumptions
    horizon: timedelta
    reach: timedelta
    seed: int
    reports: ReportCache = field(default_factory=dict)

    def loads(self, size: int | None) -> list[Placements]:
        """Generate loads, with jobs of one size (in GPUs) if it is given."""
        fleet, interval, largest = self.fleet, self.assumed.costs.checkpoint_every, self.assumed.largest_job
        return [
            replace(
                generated_load(fleet.gpus, fleet.begin, fleet.end, self.seed + k, interval, size, largest),
                on_request=self.assumed.checkpoint_on_request,
            )
            for k in range(min(LOADS, max(2, _SUFFICIENT_GPUS // int(fleet.gpus.sum()))))
        ]

    @gc_paused()
    def with_size(self, size: int | None, scores: Readings, allowed: Collection[Rung]) -> dict[str, Any]:
        """Replay the ladder under generated jobs, of one size if one is given."""
        return {"gpus_per_job": size} | self.ladder(self.loads(size), scores).rows(allowed)

    def ladder(self, loads: Sequence[Placements], scores: Readings) -> LadderReplay:
        """Create the replay of the ladder under some loads."""
        return LadderReplay(
            self.fleet, loads, scores, self.events, self.assumed, self.horizon, self.reach, self.seed, REPLICATES,
            self.reports,
        )  # fmt: skip

    @gc_paused()
    def replay_policies(
        self, loads: Sequence[Placements], policies: Mapping[str, _Policy], scores: Readings, allowed: Collection[Rung]
    ) -> dict[str, Any]:
        """Replay drain policies, the first of which is the baseline, and the ladder under some loads."""
        ladder = self.ladder(loads, scores)
        thresholds = ladder.thresholds("drain")
        costs = self.assumed.costs
        settings = PolicyConfig(
            TierThresholds(**thresholds), horizon=self.horizon, cost_benefit=costs, budget=self.assumed.budget
        )
        outcomes: dict[str, ReplayOutcome] = {}
        refused = 0
        for name, (readings, diagnostic) in policies.items():
            replayed = NO_ACTION
            if readings is not None:
                policy = self.fleet.stage(settings, "hard")
                controlled = Controlled(
                    self.fleet, readings, self.events, loads[0], policy, self.reach, diagnostic, reports=self.reports
                )
                replayed = controlled.marks()
            refused = replayed.refused if name == "drains" else refused
            outcomes[name] = count_outcome(self.fleet, loads, replayed, costs, reach=self.reach)
        no_action = next(iter(outcomes.values()))
        rows = ladder.rows(allowed)
        top: Rung = "swap" if "swap" in rows["recommended"] else "drain"
        return rows | {
            "probing": ladder.probing(),
            "policies": [_policy_row(name, outcome, no_action, self.seed) for name, outcome in outcomes.items()],
            "replayed": {
                "nodes": len(self.fleet.nodes),
                "failures": len(self.fleet.at),
                "thresholds": ladder.thresholds(top),
                "held_back": refused,
            },
        }


def _policy_row(name: str, outcome: ReplayOutcome, no_action: ReplayOutcome, seed: int) -> dict[str, Any]:
    lost = float(outcome.hit.sum(axis=1).mean())
    return {
        "policy": name,
        "drains": outcome.drains,
        "known": outcome.known,
        "right": outcome.right,
        "caught": outcome.caught,
        "lost": lost,
        "saved": float(no_action.hit.sum(axis=1).mean()) - lost,
        "repairs": float(outcome.repaired.sum(axis=1).mean()),
        "spent": float((outcome.spent + outcome.idle).sum(axis=1).mean()),
        **net_row(no_action, outcome, replicates=REPLICATES, seed=seed),
    }
