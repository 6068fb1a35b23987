"""``predrain score``: score the fleet at the newest decision time that is due, once or at an interval."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import FAILED, show, until_stopped
from predrain.options import (
    DATASET_HELP,
    JsonOption,
    ModelNameOption,
    ParamsOption,
    RegistryOption,
    duration_option,
    instant_option,
    read_params,
    read_place,
    store_uri,
)

if TYPE_CHECKING:
    from foundation.place import Place
    from pipeline.params import Params
    from serving.champion import ModelSource
    from serving.scores.writing import ScoresFolder, ScoringResult

_NOTED = 3
"""Maximum number of reasons, or of channel names, in a note."""


def score(
    dataset: Annotated[str, typer.Option(help=DATASET_HELP)],
    model: Annotated[str, typer.Option(help="Bundle directory, or `champion` for the champion of the registry.")],
    out: Annotated[Path, typer.Option(help="Output directory of scores; new decisions are added.")],
    at: Annotated[
        str | None,
        typer.Option(help="Decision time to score (ISO 8601 with a zone). Default: the newest one due."),
    ] = None,
    interval: Annotated[
        str | None,
        typer.Option(
            help="Repeat at this interval, such as 5m, until SIGTERM. Rounds without a due decision are cheap."
        ),
    ] = None,
    registry: RegistryOption = None,
    name: ModelNameOption = "predrain",
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score each GPU at the newest due decision time, with risk, tier and reasons.

    GPUs without enough fresh telemetry are `unknown`. Exits with 1 if the (last) round failed; OUT/status.json and
    OUT/predrain_score.prom report it too.

    Example: predrain score --dataset fleet --model champion --out scores --interval 5m
    """
    from foundation.place import refuse_storage
    from serving.scores.writing import ScoresFolder

    refuse_storage(Path(model))
    decision_time = None if at is None else instant_option(at, "--at")
    pause = None if interval is None else duration_option(interval, "--interval", least="1s")
    if decision_time is not None and pause is not None:
        raise typer.BadParameter("--at and --interval cannot be combined")
    place = read_place(dataset, out)
    scores = ScoresFolder(out)
    started = _now()
    try:
        loaded = read_params(params)
    except Exception as error:
        _record_failure(scores, started, error)
        raise
    work = _round(place, model, store_uri(registry), name, scores, loaded, decision_time)
    failed = _run(scores, work, pause, as_json)
    if failed:
        raise typer.Exit(FAILED)


def _round(
    place: "Place",
    model: str,
    registry: str,
    name: str,
    scores: "ScoresFolder",
    params: "Params",
    requested: datetime | None,
) -> "Callable[[], ScoringResult]":
    """Return a round of scoring, which only imports heavy modules and loads the model if a decision is due."""
    source: ModelSource | None = None

    def score_once() -> "ScoringResult":
        nonlocal source
        from serving.scores.writing import nothing_due

        current = nothing_due(scores, _now()) if requested is None else None
        if current is not None:
            return current
        from foundation.errors import InputError, TooEarlyError
        from policy.tiers import TierThresholds
        from serving.champion import ModelSource
        from serving.scores.alert_outcomes import write_facts
        from serving.scores.batch import score_decision
        from telemetry.dataset.store import Dataset

        if source is None:
            source = ModelSource(model, registry=registry, name=name)
        try:
            served = source.current()
        except TooEarlyError as early:
            if scores.newest()[1] is None:
                raise
            # a champion has scored before: the registry lost it, or is a different one
            problem = f"the registry no longer has a champion ({early.problem})"
            raise InputError(problem, early.location, "Check --registry and --name.") from None
        data = Dataset.open(place)
        tiers = TierThresholds(**params.policy.thresholds.model_dump())
        result = score_decision(data, served, scores, params.serving, tiers=tiers, clock=_now, decision_time=requested)
        if result.written:
            try:
                write_facts(scores, data)
            except Exception as error:  # the scores are written; only the pages need the outcomes
                return replace(result, notes=(*result.notes, f"cannot write the outcomes of alerts: {error}"))
        return result

    return score_once


def _run(scores: "ScoresFolder", work: "Callable[[], ScoringResult]", pause: timedelta | None, as_json: bool) -> bool:
    """Score once, or until a stop signal, logging and retrying failed rounds; return whether the last one failed."""
    from foundation.errors import TooEarlyError
    from serving.scores.writing import record_attempt

    failed = False
    noted: tuple[str, ...] | None = None  # nothing has been reported yet
    for _ in until_stopped(pause):
        started = _now()
        try:
            result = work()
            record_attempt(scores, started, result)
        except TooEarlyError as early:  # no champion yet: nothing has failed
            failed = False
            if noted != (str(early),):
                _say(as_json, {"at": started.isoformat(), "waits": str(early)}, f"waiting: {early}", sys.stdout)
            noted = (str(early),)
            continue
        except Exception as error:  # whatever it is, the next round retries
            text = _record_failure(scores, started, error)
            if pause is None:
                raise
            failed, noted = True, None
            _say(as_json, {"at": started.isoformat(), "error": text}, f"round failed: {text}", sys.stderr)
            continue
        failed = False
        facts = summarize(result)
        if pause is None:
            show(facts, as_json=as_json)
        elif result.written or result.notes != noted:  # an unchanged state is not logged in every round
            _say(as_json, facts, ", ".join(f"{key} {value}" for key, value in facts.items()), sys.stdout)
        noted = result.notes
    return failed


def _record_failure(scores: "ScoresFolder", started: datetime, error: Exception) -> str:
    """Record the failure in the scores' status; return the error as text."""
    from serving.scores.writing import record_attempt

    text = str(error) or type(error).__name__
    try:
        record_attempt(scores, started, None, text)
    except Exception as full:  # e.g. a full disk, which must not end the loop
        sys.stderr.write(f"predrain score: cannot write the status: {full}\n")
        sys.stderr.flush()
    return text


def _say(as_json: bool, facts: dict[str, Any], message: str, stream: Any) -> None:
    line = json.dumps(facts, default=str, sort_keys=True) if as_json else f"predrain score: {message}"
    stream.write(line + "\n")
    stream.flush()


def summarize(result: "ScoringResult") -> dict[str, Any]:
    """Summarize a run for the terminal."""
    summary = result.summary
    notes = list(result.notes)
    if unknown := summary["tiers"]["unknown"]:
        reasons = list(summary["unknown_reasons"].items())[:_NOTED]
        reasons_text = "; ".join(f"{count:,}: {reason}" for reason, count in reasons)
        units = "GPUs" if summary["unit"] == "gpu" else "nodes"
        notes.append(f"{unknown:,} of {summary['units']:,} {units} are unknown ({reasons_text})")
    if missing := summary["missing_channels"]:
        named = ", ".join(missing[:_NOTED]) + (", …" if len(missing) > _NOTED else "")
        notes.append(f"channels of the model without data: {len(missing)} ({named}); run `predrain doctor`")
    if datetime.fromisoformat(summary["expires_at"]) < _now():
        notes.append("these scores have expired, because the dataset ended too long ago: add newer telemetry")
    if all(value is None for value in summary["thresholds"].values()):
        reasons_text = "; ".join(dict.fromkeys(summary["threshold_sources"].values()))
        notes.append(f"no tier has a threshold: every unit is clear ({reasons_text})")
    return {
        "decision": summary["decision_time"],
        "written": result.written,
        "folder": str(result.folder),
        "tiers": summary["tiers"],
        "alerts": summary["alerts"],
        "expires_at": summary["expires_at"],
        "lag_seconds": result.lag_seconds,
        "model": f"{summary['model']['profile']} {summary['model']['digest'][:12]}",
        "notes": "; ".join(notes) or None,
    }


def _now() -> datetime:
    return datetime.now(UTC)
