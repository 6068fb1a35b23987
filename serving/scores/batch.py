"""Batch scoring: the whole fleet at one decision time, once however often it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from features.matrix.meta import MatrixConfig
from policy.risk_record import ModelName, RiskRecord
from policy.tiers import choose_thresholds
from serving.scores.decision_times import ScoringSettings, asked_decision, due_decision, lag_seconds
from serving.scores.feature_settings import live_config, window_plan
from serving.scores.fleet_rows import fleet_rows
from serving.scores.records import OUT_OF_USE, ServedModel, decision_summary, risk_records
from serving.scores.status import ScoringResult
from serving.scores.unit_scores import score_units
from serving.scores.writing import ScoresFolder, write_decision
from telemetry.dataset.store import Dataset

__all__ = ["OUT_OF_USE", "Clock", "score_decision"]

Clock = Callable[[], datetime]
"""Gives the present time, aware."""


def score_decision(
    dataset: Dataset,
    model: ServedModel,
    scores: ScoresFolder,
    settings: ScoringSettings,
    *,
    clock: Clock,
    at: datetime | None = None,
) -> ScoringResult:
    """Score a dataset's fleet at the newest decision time that is due, unless that was done before.

    Raises ``InputError`` if no decision is due, the bundle does not fit the dataset, another run is at work, or the
    disk is full.
    """
    began = time.monotonic()
    now = clock()
    config = live_config(model.bundle, dataset.meta)
    t = due_decision(config, now) if at is None else asked_decision(config, at, now)
    standing, written = scores.summary_of(t), False
    if standing is None:
        with scores.building(t) as swap:
            standing = scores.summary_of(t)  # another run may just have ended
            if standing is None:
                issued_at = now.astimezone(UTC).replace(microsecond=0)
                records, summary = _score(dataset, model, config, settings, t, issued_at)
                standing = summary | {"duration_seconds": round(time.monotonic() - began, 3)}
                write_decision(swap.path, records, standing)
                swap.commit()
                written = True
    scores.point_to_newest()
    scores.prune(settings.retention)
    notes = [model.note] if model.note else []
    if not written and standing["model"]["digest"] != model.bundle.digest:
        notes.append("it was scored by another model before; this one scores the next decision")
    return ScoringResult(
        decision_time=t,
        written=written,
        folder=scores.folder_of(t),
        summary=standing,
        lag_seconds=lag_seconds(config, t, now),
        notes=tuple(notes),
    )


def _score(
    dataset: Dataset,
    model: ServedModel,
    config: MatrixConfig,
    settings: ScoringSettings,
    t: datetime,
    issued_at: datetime,
) -> tuple[list[RiskRecord], dict[str, Any]]:
    decisions = model.bundle.manifest.get("decisions") or {}
    chosen = choose_thresholds(settings.tiers, decisions.get("thresholds"), why_none=str(decisions.get("why") or ""))
    rows = fleet_rows(dataset, config, settings, t, window_plan(model.bundle, config))
    scored, unexplained = score_units(model.bundle, rows, chosen.thresholds, settings, t)
    records = risk_records(
        rows,
        scored,
        thresholds=chosen.thresholds,
        config=config,
        t=t,
        issued_at=issued_at,
        model=ModelName(model.bundle.digest, model.bundle.profile, model.version),
    )
    return records, decision_summary(
        records,
        dataset=dataset,
        model=model,
        config=config,
        settings=settings,
        chosen=chosen,
        rows=rows,
        unexplained=unexplained,
    )
