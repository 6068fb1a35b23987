"""Batch scoring: the whole fleet at one decision time, once however often it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from features.matrix import MatrixConfig
from policy.risk_record import ModelName, RiskRecord
from policy.tiers import choose_thresholds
from serving.config import ScoringSettings
from serving.decision_times import asked_decision, behind_s, due_decision, expiry
from serving.fleet_rows import fleet_rows
from serving.live_config import live_config, window_plan
from serving.model_source import ServedModel
from serving.result import ScoringResult
from serving.summary import decision_summary
from serving.unit_scores import UnitScore, score_units
from serving.writing import ScoresFolder, write_decision
from telemetry.store import Dataset

OUT_OF_USE = "out of use: known to be down or drained"
"""Why a unit in service that has no row has no risk."""

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

    Parameters
    ----------
    dataset : Dataset
    model : ServedModel
    scores : ScoresFolder
        Where the decision is written.
    settings : ScoringSettings
    clock : callable
        Gives the present time, aware.
    at : datetime, optional
        Another decision time, aware.

    Returns
    -------
    ScoringResult

    Raises
    ------
    InputError
        If no decision is due, the bundle does not fit the dataset, another run is at work, or the disk is full.
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
                standing = summary | {"took_s": round(time.monotonic() - began, 3)}
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
        behind_s=behind_s(config, t, now) if at is None else 0.0,
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
    said = model.bundle.manifest.get("decisions") or {}
    chosen = choose_thresholds(settings.tiers, said.get("thresholds"), why_none=str(said.get("why") or ""))
    rows = fleet_rows(dataset, config, settings, t, window_plan(model.bundle, config))
    scored, unexplained = score_units(model.bundle, rows, chosen.thresholds, settings, t)
    expires_at = expiry(config, t, issued_at)
    name = ModelName(model.bundle.digest, model.bundle.profile, model.version)

    def record(
        unit: str, node: str, found: UnitScore | None, why: str | None, age_s: float | None, completeness: float
    ) -> RiskRecord:
        return RiskRecord(
            unit=unit,
            gpu=unit if config.unit == "gpu" else None,
            node=node,
            slot=rows.slots.get(unit),
            status="unknown" if found is None else "ok",
            why_unknown=why,
            risk=None if found is None else found.risk,
            risks={} if found is None else found.risks,
            score=None if found is None else found.score,
            rank=None if found is None else found.rank,
            alert=found is not None and found.alert,
            tier=chosen.thresholds.tier(None if found is None else found.risk),
            decision_time=t,
            issued_at=issued_at,
            expires_at=expires_at,
            horizon=config.labels.horizon,
            model=name,
            sample_age_s=age_s,
            completeness=completeness,
            reasons=() if found is None else found.reasons,
        )

    ages, shares = rows.fresh.sample_age_s, rows.fresh.completeness
    units = zip(rows.keys["unit"].tolist(), rows.keys["node"].tolist(), rows.why, strict=True)
    records = [
        record(
            unit,
            node,
            scored.get(at),
            why,
            None if np.isnan(ages[at]) else float(ages[at]),
            round(float(shares[at]), 4),
        )
        for at, (unit, node, why) in enumerate(units)
    ]
    idle = zip(rows.idle["unit"].tolist(), rows.idle["node"].tolist(), strict=True)
    records += [record(unit, node, None, OUT_OF_USE, None, 0.0) for unit, node in idle]
    records.sort(key=lambda each: (each.rank is None, each.rank or 0, each.unit))
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
