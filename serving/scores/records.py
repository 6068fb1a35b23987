"""From rows and scores to risk records, one for every unit in service."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from features.matrix.meta import MatrixConfig
from models.bundle.store import Bundle
from policy.risk_record import FORMAT, ModelName, RiskRecord, instant_words
from policy.tiers import TIERS, UNKNOWN, ChosenThresholds, TierThresholds
from serving.scores.decision_times import ScoringSettings, expiry, stale_after
from serving.scores.feature_settings import missing_channels
from serving.scores.fleet_rows import FleetRows
from serving.scores.unit_scores import UnitScore
from telemetry.dataset.store import Dataset

OUT_OF_USE = "out of use: known to be down or drained"
"""Why a unit in service that has no row has no risk."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to score.

    ``version``: its version in the registry; None for a bundle from a folder.
    ``note``: why a newer one was not taken, in words; empty: this is what was asked for.
    """

    bundle: Bundle
    version: int | None = None
    note: str = ""


def risk_records(
    rows: FleetRows,
    scored: Mapping[int, UnitScore],
    *,
    thresholds: TierThresholds,
    config: MatrixConfig,
    t: datetime,
    issued_at: datetime,
    model: ModelName,
) -> list[RiskRecord]:
    """Write what is known of every unit in service at one decision time.

    ``scored``: by row; those that are missing are unknown.
    """
    expires_at = expiry(config, t, issued_at)

    def record(unit: str, node: str, score: UnitScore | None, why: str | None, **telemetry: Any) -> RiskRecord:
        known: dict[str, Any] = {"risk": None, "risks": {}, "score": None, "rank": None, "alert": False}
        if score is not None:
            known = {field.name: getattr(score, field.name) for field in fields(score)}
        return RiskRecord(
            unit=unit,
            gpu=unit if config.unit == "gpu" else None,
            node=node,
            slot=rows.slots.get(unit),
            status="unknown" if score is None else "ok",
            unknown_reason=why,
            tier=thresholds.tier(known["risk"]),
            decision_time=t,
            issued_at=issued_at,
            expires_at=expires_at,
            horizon=config.labels.horizon,
            model=model,
            **telemetry,
            **known,
        )

    ages, shares = rows.fresh.sample_age_seconds.tolist(), rows.fresh.completeness.tolist()
    units = zip(rows.keys["unit"].tolist(), rows.keys["node"].tolist(), rows.why, ages, shares, strict=True)
    records = [
        record(
            unit,
            node,
            scored.get(row),
            why,
            sample_age_seconds=None if math.isnan(age_s) else age_s,
            completeness=round(share, 4),
        )
        for row, (unit, node, why, age_s, share) in enumerate(units)
    ]
    idle = zip(rows.idle["unit"].tolist(), rows.idle["node"].tolist(), strict=True)
    records += [record(unit, node, None, OUT_OF_USE, sample_age_seconds=None, completeness=0.0) for unit, node in idle]
    records.sort(key=lambda entry: (entry.rank is None, entry.rank or 0, entry.unit))
    return records


_REASONS_COUNTED = 10


def decision_summary(
    records: Sequence[RiskRecord],
    *,
    dataset: Dataset,
    model: ServedModel,
    config: MatrixConfig,
    settings: ScoringSettings,
    chosen: ChosenThresholds,
    rows: FleetRows,
    unexplained: int,
) -> dict[str, Any]:
    """Count what was scored, and say by which thresholds and from which data.

    ``unexplained``: units without reasons because there are too many.
    Returns: JSON-able; without ``took_s``.
    """
    first, fitted = records[0], model.bundle.fitted
    newest = None if rows.newest_ms is None else datetime.fromtimestamp(rows.newest_ms / 1000, UTC)
    tiers = Counter(record.tier for record in records)
    why = Counter(record.unknown_reason for record in records if record.unknown_reason is not None)
    return {
        "format": FORMAT,
        "decision_time": instant_words(first.decision_time),
        "issued_at": instant_words(first.issued_at),
        "expires_at": instant_words(first.expires_at),
        "horizon_seconds": config.labels.horizon.total_seconds(),
        "labels": config.labels.model_dump(mode="json"),
        "interval_seconds": config.decision.every.total_seconds(),
        "delay_seconds": config.features.delay.total_seconds(),
        "unit": config.unit,
        "units": len(records),
        "status": {"ok": len(records) - tiers[UNKNOWN], "unknown": tiers[UNKNOWN]},
        "tiers": {name: tiers[name] for name in (*TIERS, UNKNOWN)},
        "alerts": sum(record.alert for record in records),
        "alert_budget": fitted.k,
        "unknown_reasons": dict(why.most_common(_REASONS_COUNTED)),
        "thresholds": chosen.thresholds.to_json(),
        "threshold_sources": dict(chosen.sources),
        "newest_sample": None if newest is None else instant_words(newest),
        "newest_sample_age_seconds": None if newest is None else (first.decision_time - newest).total_seconds(),
        "stale_after_seconds": stale_after(config, settings.stale_after).total_seconds(),
        "min_completeness": settings.min_completeness,
        "missing_channels": list(missing_channels(config, dataset.meta)),
        "unexplained": unexplained,
        "in_training_period": first.decision_time < fitted.refit_at,
        "model": {
            "digest": model.bundle.digest,
            "profile": model.bundle.profile,
            "version": model.version,
            "fitted_at": instant_words(fitted.refit_at),
        },
        "dataset": {"digest": dataset.digest, "end": instant_words(dataset.meta.span[1])},
    }
