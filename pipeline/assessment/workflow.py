"""Assessment of a fleet: whether its failures are predictable, and what acting on risks would have saved."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pandas as pd
import yaml
from joblib import Parallel, delayed

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.oracle import oracle_predictions, read_truth
from evaluation.value.controller_replay import Controlled, Diagnostic, rule_events
from evaluation.value.gpu_hours import ReplayOutcome, count_outcome, net_row
from evaluation.value.ladder import Assumptions, LadderReplay
from evaluation.value.load import Placements, ReplayedFleet, generated_load, jobs_of_table
from evaluation.value.marks import NO_ACTION
from evaluation.value.readings import Readings
from evaluation.value.verdict import COUNTING, ENOUGH, Predictability, predictability, unanswered
from features.matrix.matrix import FeatureMatrix
from features.selection import examine_selection
from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.files import write_bytes
from foundation.place import Place
from foundation.running import gc_paused
from foundation.times import instant_ms, milliseconds
from pipeline.artefacts import VALUE, load_evaluation, write_json
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, with_step
from pipeline.stages import replay
from pipeline.tracking import code_revision
from policy.config import PolicyConfig
from policy.ladder.rungs import Rung
from policy.stages import Stage
from policy.tiers import TierThresholds
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.store import Dataset
from telemetry.doctor.dataset_source import observe_dataset
from telemetry.doctor.diagnosis import diagnose
from telemetry.doctor.groups import Group
from telemetry.phrases import WORK

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

_SETTINGS: Final = """# Recommended by `predrain assess`. Use as `predrain act --settings` and, after your own
# parameters, as `predrain score --params`. Groups move up by measured precision, to the stage `ceiling` at most.
"""

_REPLAY, _STAMP = "replay", "replay.json"

Begin = Callable[[str], Callable[[int, int], None]]
"""Called with the name of a stage when it starts; returns its progress callback (done, total)."""


def assess_fleet(
    place: Place,
    params: Params,
    out: Path,
    *,
    assumed: Assumptions,
    truth: Path | None = None,
    begin: Begin,
    scheduler: str = "kubernetes",
) -> dict[str, Any]:
    """Assess a dataset; write to ``out`` only, and reuse results there that are still valid.

    ``truth``: the simulator's ground truth, for the oracle's row.
    Returns: the content of ``assessment.json``.
    """
    dataset = Dataset.open(place)
    params = with_step(params, dataset.meta.step, str(place))
    matrix = make_matrix(place, params, out / "matrix", progress=begin("features"))
    incidents = matrix.incidents()
    content: dict[str, Any] = {"data": _data(place, dataset, matrix, incidents, params)}
    selection = examine_selection(dataset, params.labels)
    if selection is not None and selection.reasons:
        assessed = Predictability("cannot tell", 0, reason="; ".join(selection.reasons))
    else:
        assessed = _backtested(matrix, params, out, truth, incidents["common_cause"].nunique(), begin)
    content["predictable"] = dataclasses.asdict(assessed)
    if math.isfinite(assessed.chance):
        predictable = assessed.answer in ("yes", "weakly")
        content |= _value(
            dataset, matrix, params, out / _REPLAY, assumed, truth, sizes=predictable,
            allowed=_ALLOWED.get(assessed.answer, ()), begin=begin,
        )  # fmt: skip
    content = _NO_REPLAY | content
    content["settings"] = settings_of(content["recommended"], content["replayed"]["thresholds"])
    content["settings"]["scheduler"] = scheduler
    write_settings(out / "act.yaml", content["settings"], params, assumed)
    return _write_assessment(content, out / "assessment.json")


def _write_assessment(content: dict[str, Any], path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = orjson.loads(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))  # NaN becomes null
    write_json(plain, path)
    return plain


def write_value(backtest: Path, place: Place, matrix: FeatureMatrix, params: Params, begin: Begin) -> None:
    """Write ``BACKTEST/value.json``: the value of acting on the risks of a finished backtest, in GPU-hours."""
    assessed = _predictability_of(backtest, params)
    content: dict[str, Any] = _NO_REPLAY | {"predictable": dataclasses.asdict(assessed)}
    if math.isfinite(assessed.chance):
        content |= _value(
            Dataset.open(place), matrix, with_step(params, matrix.config.step, str(place)), backtest,
            Assumptions(), None, sizes=False, allowed=_ALLOWED.get(assessed.answer, ()), begin=begin,
        )  # fmt: skip
    _write_assessment(content, backtest / VALUE)


def _data(
    place: Place, dataset: Dataset, matrix: FeatureMatrix, incidents: pd.DataFrame, params: Params
) -> dict[str, Any]:
    channels = resolve_channels(params.channels)
    observed = observe_dataset(place, channels=channels, now=datetime.now(UTC), whole=True)
    diagnosis = diagnose(observed, None, "", channels)
    groups = {state.group.name: state.group for state in diagnosis.states}
    failures = _by_class(incidents)
    node_failures = incidents["common_cause"].nunique()
    first, last = dataset.meta.span
    return {
        "simulated": any(source.get("kind") == "simulated" for source in matrix.config.sources),
        "unit": dataset.meta.unit,
        "units": int(matrix.rows["unit"].nunique()),
        "nodes": int(matrix.rows["node"].nunique()),
        "days": round((last - first) / timedelta(days=1), 1),
        "samples": int(dataset.meta.counts["samples"]),
        "failures": failures,
        "node_failures": node_failures,
        "unit_failures": len(incidents),
        "jobs": int(dataset.meta.counts["jobs"]),
        "set_aside": dict(dataset.meta.quarantine),
        "repairs": repairs(dataset.events(), dataset.meta.unit),
        "missing_channels": [name for todo in diagnosis.todos if todo.used for name in todo.channels],
        "to_do": [
            {
                "what": todo.title,
                "shows": _describe_missing(groups.get(todo.title.split(":")[0]), failures, node_failures),
                "steps": list(todo.steps),
            }
            for todo in diagnosis.todos
            if todo.used
        ],
    }


def repairs(events: pd.DataFrame, unit: str) -> dict[str, int]:
    """Count repairs and replacements, and in a fleet of GPUs those that name no GPU."""
    work = events[events["type"].isin(WORK)]
    return {"all": len(work), "without_gpu": int(work["gpu"].isna().sum()) if unit == "gpu" else 0}


def _by_class(incidents: pd.DataFrame) -> dict[str, int]:
    """Count node failures by class: a common cause counts once, a failure of several classes in each of them."""
    distinct = incidents.drop_duplicates(["common_cause", "failure_class"])["failure_class"]
    return {str(name): int(size) for name, size in distinct.value_counts().items()}


def _describe_missing(group: Group | None, failures: Mapping[str, int], total: int) -> str:
    """Describe what a missing group of channels would show, and how many failures are of its classes."""
    if group is None or not group.classes:
        return "" if group is None else group.why
    here = sum(failures.get(name, 0) for name in group.classes)
    names = ", ".join(name.replace("_", " and ") for name in group.classes)
    return f"{group.why}; precursors of {names} failures ({here} of {total} here)"


def _backtested(
    matrix: FeatureMatrix, params: Params, out: Path, truth: Path | None, failures: int, begin: Begin
) -> Predictability:
    """Backtest the profile, unless it was done before with the same inputs, and evaluate it."""
    folder = out / _REPLAY
    if not failures:
        return unanswered(0)
    inputs = [matrix.digest, params.model_dump(mode="json"), code_revision(), str(truth)]
    stamp = {"inputs": hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()}
    stamp_file = folder / _STAMP
    if not (stamp_file.is_file() and json.loads(stamp_file.read_text(encoding="utf-8")) == stamp):
        try:
            stamp_file.unlink(missing_ok=True)  # a killed backtest may leave some files of each run
            replay(matrix, params, folder, truth=truth, progress=begin("backtest"), full=False, brief=True)
        except InputError:
            if failures >= ENOUGH:
                raise
            return unanswered(failures)  # no refit had both positive and negative rows
        write_json(stamp, stamp_file)
    return _predictability_of(folder, params)


def _predictability_of(folder: Path, params: Params) -> Predictability:
    evaluation, context = load_evaluation(folder)
    predictions = _predictions(folder, params.models.profile, COUNTING)
    return predictability(
        evaluation, predictions, context.extras["unforeseen"], params.models.profile, seed=params.seed
    )


def _predictions(folder: Path, *models: str) -> pd.DataFrame:
    """Read the sliding predictions of some models only, because those of all models can be gigabytes."""
    chosen = [("model", "in", models), ("variant", "==", SLIDING)]
    return pd.read_parquet(folder / "predictions_all.parquet", filters=chosen)


def _value(
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
    predictions = _predictions(out, params.models.profile)
    since, end = int(milliseconds(predictions["decision_time"]).min()), instant_ms(matrix.span[1])
    fleet = ReplayedFleet.of(dataset.inventory(), matrix.incidents(), since, end)
    table, every, total = dataset.jobs(), costs.checkpoint_every, int(fleet.gpus.sum())
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
        loads = [replace(jobs_of_table(table, fleet.names, fleet.gpus, end, every), on_request=on_request)]
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
    done: list[dict[str, Any]] = []
    workers = min(os.cpu_count() or 1, len(tasks)) if total >= _PARALLEL_GPUS else 1
    for result in Parallel(n_jobs=workers, return_as="generator")(tasks):
        done.append(result)
        report_progress(len(done), len(tasks))
    played, *by_size = done
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
            "checkpoint_every": format_duration(every),
            "checkpoint_on_request": on_request,
            "planned_repair_saves_hours": (costs.unplanned_repair - costs.planned_repair) / timedelta(hours=1),
        },
    }


_Policy = tuple[Readings | None, Diagnostic]
"""Scores (None: no action), and the diagnostic after a drain."""

_ALLOWED: Final[Mapping[str, tuple[Rung, ...]]] = {
    "yes": ("avoid", "probe", "checkpoint", "swap", "drain"), "weakly": ("avoid", "probe", "checkpoint"),
}  # fmt: skip
"""Rungs that may be recommended, by answer; if predictions are no better than chance, only ``publish``."""


@dataclass(frozen=True, slots=True)
class _Replays:
    """Inputs of a replay that do not depend on the jobs."""

    fleet: ReplayedFleet
    events: Sequence[Mapping[str, Any]]
    assumed: Assumptions
    horizon: timedelta
    reach: timedelta
    seed: int

    def loads(self, size: int | None) -> list[Placements]:
        """Generate loads, with jobs of one size (in GPUs) if it is given."""
        fleet, every, largest = self.fleet, self.assumed.costs.checkpoint_every, self.assumed.largest_job
        return [
            replace(
                generated_load(fleet.gpus, fleet.begin, fleet.end, self.seed + k, every, size, largest),
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
            self.fleet, loads, scores, self.events, self.assumed, self.horizon, self.reach, self.seed, REPLICATES
        )

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
                controlled = Controlled(self.fleet, readings, self.events, loads[0], policy, self.reach, diagnostic)
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


_NO_REPLAY: Final[dict[str, Any]] = {
    "ladder": [],
    "recommended": ["publish"],
    "recommended_net": {"value": 0.0, "low": 0.0, "high": 0.0},
    "replayed": {"thresholds": {"watch": 0.05, "elevated": 0.1, "high": None}},
}
"""Reported if no replay was possible."""


def settings_of(recommended: Sequence[Rung], thresholds: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the controller settings for the recommended rungs; ``stage``: the lowest stage that allows them all."""
    hard = {"swap", "drain"} & {*recommended}
    stage: Stage = "hard" if hard else "soft" if {"avoid", "probe", "checkpoint"} & {*recommended} else "shadow"
    return {"stage": stage, "rungs": [*recommended], "thresholds": dict(thresholds)}


def write_settings(path: Path, settings: dict[str, Any], params: Params, assumed: Assumptions) -> None:
    """Write the file for `predrain act --settings`; ``settings``: from :func:`settings_of`, plus ``scheduler``."""
    tiers = {name: float(f"{value:.4g}") for name, value in settings["thresholds"].items() if value is not None}
    policy: dict[str, Any] = {
        "thresholds": tiers,
        "horizon": format_duration(params.labels.horizon),  # the controller compares it with that of the scores
        "rungs": settings["rungs"],
        "stages": {"ceiling": settings["stage"]},
        "cost_benefit": {
            name: format_duration(getattr(assumed.costs, name))
            for name in ("checkpoint_every", "checkpoint", "restart", "verify")
        },
        "probes": {"duration": format_duration(assumed.probes.duration)},
    }
    if assumed.spare_nodes is not None:
        budgets = [dataclasses.asdict(budget) for budget in assumed.budget.disruption_budgets]
        policy["budget"] = {
            "disruption_budgets": [
                {name: limit for name, limit in budget.items() if limit is not None} for budget in budgets
            ]
        }
    written: dict[str, Any] = {"policy": policy}
    if settings["scheduler"] == "slurm":  # state shared by all controllers
        written["slurm"] = {"folder": str(path.parent.resolve() / "slurm")}
    write_bytes(path, (_SETTINGS + yaml.safe_dump(written, sort_keys=False)).encode())
