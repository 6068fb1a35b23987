"""Assessment of a fleet: whether its failures are predictable, and what acting on risks would have saved."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import orjson
import pandas as pd
import yaml

from evaluation.metrics.oracle import TRUE_RISKS
from evaluation.value.ladder import Assumptions
from evaluation.value.verdict import COUNT_BASELINE, MIN_FAILURES_UNLESS_YES, Predictability, no_answer, predictability
from features.matrix.matrix import FeatureMatrix
from features.selection import examine_selection
from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.files import write_bytes
from foundation.place import Place
from pipeline.artefacts import VALUE, load_evaluation, write_json
from pipeline.assessment.policies import Begin, predictions_of, replay_policies
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, with_step
from pipeline.stages import backtest_matrix
from pipeline.tracking import code_revision
from policy.ladder.rungs import Rung
from policy.stages import Stage
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.files import sha256_of
from telemetry.dataset.store import Dataset
from telemetry.doctor.dataset_source import observe_dataset
from telemetry.doctor.diagnosis import diagnose
from telemetry.doctor.groups import Group
from telemetry.phrases import WORK

_SETTINGS: Final = """# Recommended by `predrain assess`. Use as `predrain act --settings` and, after your own
# parameters, as `predrain score --params`. Groups move up by measured precision, to the stage `ceiling` at most.
"""

_REPLAY, _STAMP = "replay", "replay.json"


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
    if selection:
        assessed = Predictability("cannot tell", 0, reason="; ".join(selection))
    else:
        assessed = _backtested(matrix, params, out, truth, incidents["common_cause"].nunique(), begin)
    content["predictable"] = dataclasses.asdict(assessed)
    if math.isfinite(assessed.chance):
        predictable = assessed.answer in ("yes", "weakly")
        content |= replay_policies(
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
        content |= replay_policies(
            Dataset.open(place), matrix, with_step(params, matrix.config.step, str(place)), backtest,
            Assumptions(), None, sizes=False, allowed=_ALLOWED.get(assessed.answer, ()), begin=begin,
        )  # fmt: skip
    _write_assessment(content, backtest / VALUE)


def _data(
    place: Place, dataset: Dataset, matrix: FeatureMatrix, incidents: pd.DataFrame, params: Params
) -> dict[str, Any]:
    channels = resolve_channels(params.channels)
    observed = observe_dataset(place, channels=channels, now=datetime.now(UTC), whole_history=True)
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
    n_failures = sum(failures.get(name, 0) for name in group.classes)
    names = ", ".join(name.replace("_", " and ") for name in group.classes)
    return f"{group.why}; precursors of {names} failures ({n_failures} of {total} here)"


def _backtested(
    matrix: FeatureMatrix, params: Params, out: Path, truth: Path | None, failures: int, begin: Begin
) -> Predictability:
    """Backtest the profile, unless it was done before with the same inputs, and evaluate it."""
    folder = out / _REPLAY
    if not failures:
        return no_answer(0)
    risks = truth / TRUE_RISKS if truth is not None else None
    known = sha256_of(risks) if risks is not None and risks.is_file() else None
    inputs = [matrix.digest, params.model_dump(mode="json"), code_revision(), known]
    stamp = {"inputs": hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()}
    stamp_file = folder / _STAMP
    if not (stamp_file.is_file() and json.loads(stamp_file.read_text(encoding="utf-8")) == stamp):
        try:
            stamp_file.unlink(missing_ok=True)  # a killed backtest may leave some files of each run
            backtest_matrix(matrix, params, folder, truth=truth, progress=begin("backtest"), full=False, brief=True)
        except InputError:
            if failures >= MIN_FAILURES_UNLESS_YES:
                raise
            return no_answer(failures)  # no refit had both positive and negative rows
        write_json(stamp, stamp_file)
    return _predictability_of(folder, params)


def _predictability_of(folder: Path, params: Params) -> Predictability:
    evaluation, context = load_evaluation(folder)
    predictions = predictions_of(folder, params.models.profile, COUNT_BASELINE)
    return predictability(
        evaluation, predictions, context.extras["unforeseen"], params.models.profile, seed=params.seed
    )


_ALLOWED: Final[Mapping[str, tuple[Rung, ...]]] = {
    "yes": ("avoid", "probe", "checkpoint", "swap", "drain"), "weakly": ("avoid", "probe", "checkpoint"),
}  # fmt: skip
"""Rungs that may be recommended, by answer; if predictions are no better than chance, only ``publish``."""

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
