"""The assessment of a fleet: whether its failures are predictable, and what acting on risks would have saved it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pandas as pd
import yaml

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.oracle import oracle_predictions, read_truth
from evaluation.value.acting import NOBODY, Controlled, Diagnostic, Fleet, Marks, Reading, readings, rule_events
from evaluation.value.load import generated_load, jobs_of_table
from evaluation.value.replay import Outcome, break_even, net_interval
from evaluation.value.replay import replay as replay_policy
from evaluation.value.verdict import ENOUGH, Predictability, predictability, unanswered
from features.matrix.matrix import FeatureMatrix
from features.times import instant_ms, milliseconds
from pipeline.artefacts import load_evaluation, write_json
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from pipeline.provenance import code_revision
from pipeline.stages import replay
from policy.config import PolicyConfig
from policy.cost_benefit import CostBenefitConfig
from policy.fleet import Level
from policy.stages import Stage, StagesConfig
from policy.tiers import TierThresholds
from telemetry.atomic import write_bytes
from telemetry.config import format_duration
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.place import Place
from telemetry.dataset.store import Dataset
from telemetry.doctor.dataset_source import observe_dataset
from telemetry.doctor.diagnosis import diagnose
from telemetry.errors import InputError

LOADS: Final = 5
"""Generated loads that are averaged where the dataset has no jobs."""

REPLICATES: Final = 1000
"""Bootstrap samples of nodes behind each interval of GPU-hours."""

_SETTINGS: Final = """# Written by `predrain assess`. `predrain act --settings` takes it, and after your own parameters
# `predrain score --params`. Stages have to be earned by measured precision; `ceiling` is the highest.
"""

_REPLAY, _STAMP = "replay", "replay.json"

Begin = Callable[[str], Callable[[int, int], None]]
"""Called with the name of a stage that begins; gives what is called with the work done and all work."""


def assess_fleet(
    place: Place, params: Params, out: Path, *, costs: CostBenefitConfig, truth: Path | None = None, begin: Begin
) -> dict[str, Any]:
    """Assess a dataset; all that is written lies in ``out``, and what is there and still holds is not made again.

    ``truth``: the simulator's, for the row of the oracle.
    Returns: what ``assessment.json`` holds.
    """
    dataset = Dataset.open(place)
    matrix = make_matrix(place, params, out / "matrix", progress=begin("features"))
    incidents = matrix.incidents()
    content: dict[str, Any] = {"data": _data(place, dataset, matrix, incidents, params)}
    judged = _replayed(matrix, params, out, truth, len(incidents), begin)
    content["predictable"] = dataclasses.asdict(judged)
    if math.isfinite(judged.chance):
        content |= _value(dataset, matrix, params, out / _REPLAY, costs, truth)
    content["recommended"] = recommended(judged, content.get("policies", []), content.get("break_even"))
    _write_settings(out / "recommended.yaml", content["recommended"], params, costs)
    plain: dict[str, Any] = orjson.loads(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))  # NaN is null
    write_json(plain, out / "assessment.json")
    return plain


def _data(
    place: Place, dataset: Dataset, matrix: FeatureMatrix, incidents: pd.DataFrame, params: Params
) -> dict[str, Any]:
    channels = resolve_channels(params.channels)
    found = diagnose(observe_dataset(place, channels=channels, now=datetime.now(UTC)), None, "", channels)
    why = {state.group.name: state.group.why for state in found.states}
    first, last = dataset.meta.span
    return {
        "simulated": any(source.get("kind") == "simulated" for source in matrix.config.sources),
        "unit": dataset.meta.unit,
        "units": int(matrix.rows["unit"].nunique()),
        "nodes": int(matrix.rows["node"].nunique()),
        "days": round((last - first) / timedelta(days=1), 1),
        "samples": int(dataset.meta.counts["samples"]),
        "failures": {str(name): int(size) for name, size in incidents["failure_class"].value_counts().items()},
        "jobs": int(dataset.meta.counts["jobs"]),
        "missing_channels": list(found.lacking),
        "to_do": [
            {"what": todo.title, "shows": why.get(todo.title.split(":")[0], ""), "steps": list(todo.steps)}
            for todo in found.todos
            if todo.used
        ],
    }


def _replayed(
    matrix: FeatureMatrix, params: Params, out: Path, truth: Path | None, failures: int, begin: Begin
) -> Predictability:
    """Backtest the profile, unless that was done with the same inputs, and judge it."""
    folder = out / _REPLAY
    if not failures:
        return unanswered(0)
    made_of = [matrix.digest, params.model_dump(mode="json"), code_revision(), str(truth)]
    stamp = {"inputs": hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()}
    mark = folder / _STAMP
    if not (mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == stamp):
        try:
            replay(matrix, params, folder, truth=truth, progress=begin("backtest"), full=False)
        except InputError:
            if failures >= ENOUGH:
                raise
            return unanswered(failures)  # no refit saw a failure and a healthy GPU
        write_json(stamp, mark)
    evaluation, context = load_evaluation(folder)
    predictions = pd.read_parquet(folder / "predictions_all.parquet")
    return predictability(
        evaluation, predictions, context.extras["unforeseen"], params.models.profile, seed=params.seed
    )


def _value(
    dataset: Dataset, matrix: FeatureMatrix, params: Params, out: Path, costs: CostBenefitConfig, truth: Path | None
) -> dict[str, Any]:
    """Replay policies on the fleet's failures and jobs."""
    predictions = pd.read_parquet(out / "predictions_all.parquet")
    mine = (predictions["model"] == params.models.profile) & (predictions["variant"] == SLIDING)
    predictions = predictions[mine.to_numpy()]
    begin, end = int(milliseconds(predictions["decision_time"]).min()), instant_ms(matrix.span[1])
    fleet = Fleet.of(dataset.inventory(), matrix.incidents(), begin, end)
    table, every = dataset.jobs(), costs.checkpoint_every
    own = table is not None and len(table) > 0
    loads = [generated_load(fleet.gpus, begin, end, params.seed + k, every) for k in range(0 if own else LOADS)]
    loads += [jobs_of_table(table, fleet.names, fleet.gpus, end, every)] if own else []
    evaluation, context = load_evaluation(out)
    labels, reach = params.labels, timedelta(hours=evaluation.drain_hours)
    even = break_even(fleet, loads, costs)
    thresholds = _thresholds(None if even is None else even.break_even)
    horizon = labels.gap + labels.horizon
    settings = PolicyConfig(TierThresholds(**thresholds), horizon=horizon, cost_benefit=costs)
    folds = context.folds[context.folds["variant"] == SLIDING]
    events, lasts = rule_events(dataset.events()), min(horizon, labels.gap + 2 * params.decision.every)

    def scores_of(frame: pd.DataFrame) -> tuple[Reading, ...]:
        return readings(frame, folds, delay=labels.gap, lasts=lasts)

    def marks(scores: Sequence[Reading], diagnostic: Diagnostic = "none", stage: Stage = "hard") -> Marks:
        least = Level.SOFT if stage == "soft" else Level.TAINTED
        policy = fleet.stage(settings, stage)
        return Controlled(fleet, scores, events, loads[0], policy, reach, diagnostic, least).marks()

    scores = scores_of(predictions)
    planned = {
        "nobody acts": NOBODY,
        "hard rules alone": marks(scores_of(predictions.assign(risk=0.0))),
        "soft taints": marks(scores, stage="soft"),
        "drains": marks(scores),
        "drains, a diagnostic that finds nothing": marks(scores, "blind"),
        "drains, a diagnostic that finds all": marks(scores, "perfect"),
    }
    if truth is not None and any(truth.iterdir()):
        best = oracle_predictions(predictions, read_truth(truth), evaluation.k)
        planned["oracle, a diagnostic that finds all"] = marks(scores_of(best), "perfect")
    outcomes = {name: replay_policy(fleet, loads, act, costs, reach=reach) for name, act in planned.items()}
    rows = [_policy_row(name, outcome, outcomes["nobody acts"], params.seed) for name, outcome in outcomes.items()]
    sizes = np.concatenate([load.size for load in loads])
    hours = np.concatenate([load.gpus * (load.end - load.start) for load in loads])
    return {
        "policies": rows,
        "break_even": None if even is None else even.break_even,
        "jobs": {
            "from": "the dataset" if own else "a generated load",
            "mean_gpus_by_gpu_hours": float(np.average(sizes, weights=hours)) if len(sizes) else 0.0,
            "checkpoint_every": format_duration(every),
            "planned_repair_saves_hours": (costs.unplanned_repair - costs.planned_repair) / timedelta(hours=1),
        },
        "replayed": {
            "nodes": len(fleet.nodes),
            "failures": len(fleet.at),
            "thresholds": thresholds,
            "held_back": planned["drains"].refused,
        },
    }


def _thresholds(even: float | None) -> dict[str, float | None]:
    """Give the thresholds that policies are replayed at, from costs and the stages' own bars, never from outcomes."""
    stages = StagesConfig()
    high = None if even is None else max(even, stages.hard.demote_below)
    elevated = stages.soft.demote_below if high is None else min(stages.soft.demote_below, high)
    return {"watch": elevated / 2, "elevated": elevated, "high": high}


def _policy_row(name: str, outcome: Outcome, nobody: Outcome, seed: int) -> dict[str, Any]:
    net, bounds = net_interval(nobody, outcome, replicates=REPLICATES, seed=seed)
    lost = float(outcome.hit.sum(axis=1).mean())
    return {
        "policy": name,
        "drains": outcome.drains,
        "known": outcome.known,
        "right": outcome.right,
        "caught": outcome.caught,
        "lost": lost,
        "saved": float(nobody.hit.sum(axis=1).mean()) - lost,
        "repairs": float(outcome.repaired.sum()),
        "spent": float((outcome.spent + outcome.idle).sum(axis=1).mean()),
        "net": net,
        "net_low": bounds.low,
        "net_high": bounds.high,
    }


def recommended(judged: Predictability, policies: list[dict[str, Any]], even: float | None) -> dict[str, Any]:
    """Choose the stage: what is not sure to save GPU-hours is only observed."""
    rows = {row["policy"]: row for row in policies}
    drains = [row for name, row in rows.items() if name.startswith("drains")]
    stage, needs, on_repairs = "shadow", None, False
    if judged.answer == "yes" and any(row["net_low"] > 0 for row in drains):
        stage = "hard"
        on_repairs = all(row["saved"] <= row["spent"] for row in drains)
        if not rows["drains"]["net_low"] > 0:
            blind, perfect = drains[1]["net"], drains[2]["net"]
            needs = min(max(0.0, -blind / (perfect - blind)), 1.0)
    elif judged.answer in ("yes", "weakly") and rows and rows["soft taints"]["net_low"] > 0:
        stage = "soft"
    return {
        "stage": stage,
        "diagnostic_finds_at_least": needs,
        "rests_on_planned_repairs": on_repairs,
        "thresholds": _thresholds(even),
    }


def _write_settings(path: Path, recommended: dict[str, Any], params: Params, costs: CostBenefitConfig) -> None:
    tiers = {name: float(f"{value:.4g}") for name, value in recommended["thresholds"].items() if value is not None}
    policy = {
        "thresholds": tiers,
        "horizon": format_duration(params.labels.gap + params.labels.horizon),
        "stages": {"ceiling": recommended["stage"]},
        "cost_benefit": {"checkpoint_every": format_duration(costs.checkpoint_every)},
    }
    write_bytes(path, (_SETTINGS + yaml.safe_dump({"policy": policy}, sort_keys=False)).encode())
