"""From rows and scores to risk records, one for every unit in service."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import numpy as np

from features.matrix.meta import MatrixConfig
from policy.risk_record import ModelName, RiskRecord
from policy.tiers import TierThresholds
from serving.scores.decision_times import expiry
from serving.scores.fleet_rows import FleetRows
from serving.scores.unit_scores import UnitScore

OUT_OF_USE = "out of use: known to be down or drained"
"""Why a unit in service that has no row has no risk."""


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
            tier=thresholds.tier(None if found is None else found.risk),
            decision_time=t,
            issued_at=issued_at,
            expires_at=expires_at,
            horizon=config.labels.horizon,
            model=model,
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
    return records
