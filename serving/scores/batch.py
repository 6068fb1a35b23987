"""Batch scoring of the whole fleet, at most once per decision time, and the expiry of risks."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from features.matrix.meta import MatrixConfig
from foundation.errors import InputError
from foundation.files import FolderSwap
from foundation.instants import from_ms
from foundation.times import instant_ms
from models.bundle.store import Bundle
from models.config import ServingSection
from models.explanation.contributions import ReasonPlan, explained_by, largest_reasons
from models.rows.ranking import name_hashes
from models.rows.training_set import node_codes
from models.training.fitted import FittedModels
from policy.risk_record import FORMAT, MISSING_CHANNELS, ModelName, RiskReason, RiskRecord, format_utc
from policy.tiers import RAISED, TIERS, UNKNOWN, TierThresholds, choose_thresholds
from serving.scores.feature_settings import drain_horizon, live_config, missing_channels, window_plan
from serving.scores.fleet_rows import FleetRows, fleet_rows, stale_after
from serving.scores.writing import ScoresFolder, ScoringResult, write_decision
from telemetry.dataset.store import Dataset

Clock = Callable[[], datetime]
"""Returns the current time, timezone-aware."""

OUT_OF_USE: Final = "known to be down or drained"
"""Why a unit in service without a feature row has no risk."""

_REASONS_COUNTED: Final = 10


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to score.

    ``version``: registry version; None for a bundle from a folder.
    ``note``: why a newer model was not loaded; empty: it is the current one.
    """

    bundle: Bundle
    version: int | None = None
    note: str = ""


def score_decision(
    dataset: Dataset,
    model: ServedModel,
    scores: ScoresFolder,
    settings: ServingSection,
    *,
    tiers: TierThresholds | None = None,
    clock: Clock,
    decision_time: datetime | None = None,
) -> ScoringResult:
    """Score a dataset's fleet at the newest decision time that is due, unless it has been scored before.

    ``tiers``: thresholds that override the bundle's.
    Raises ``InputError`` if no decision is due, the bundle does not match the dataset, another run is in progress, or
    the disk is full.
    """
    started_s = time.monotonic()
    now = clock()
    config = live_config(model.bundle, dataset.meta)
    t = due_decision(config, now) if decision_time is None else asked_decision(config, decision_time, now)
    summary, written = scores.summary_of(t), False
    if summary is None:
        with FolderSwap(scores.folder_of(t)) as swap:
            summary = scores.summary_of(t)  # another run may just have finished
            if summary is None:
                issued_at = now.astimezone(UTC).replace(microsecond=0)
                records, summary = _score(dataset, model, config, settings, tiers or TierThresholds(), t, issued_at)
                summary = summary | {"duration_seconds": round(time.monotonic() - started_s, 3)}
                write_decision(swap.path, records, summary)
                swap.commit()
                written = True
    scores.point_to_newest()
    scores.prune(settings.retention)
    notes = [model.note] if model.note else []
    if not written and summary["model"]["digest"] != model.bundle.digest:
        notes.append("another model already scored this decision; this model scores the next one")
    return ScoringResult(
        decision_time=t,
        written=written,
        folder=scores.folder_of(t),
        summary=summary,
        lag_seconds=max((_floor(now - config.features.delay, config) - t).total_seconds(), 0.0),
        notes=tuple(notes),
    )


def _score(
    dataset: Dataset,
    model: ServedModel,
    config: MatrixConfig,
    settings: ServingSection,
    tiers: TierThresholds,
    t: datetime,
    issued_at: datetime,
) -> tuple[list[RiskRecord], dict[str, Any]]:
    """Return the risk records of all units in service, and the summary of the decision."""
    decisions = model.bundle.manifest.get("decisions") or {}
    if model.bundle.fitted.stand_in is not None:  # a stand-in has learned from no failure: no drains
        tiers = TierThresholds(watch=tiers.watch)
    chosen = choose_thresholds(tiers, decisions.get("thresholds"), why_none=str(decisions.get("why") or ""))
    rows = fleet_rows(dataset, config, settings, t, window_plan(model.bundle, config))
    scored, unexplained = score_units(model.bundle, rows, chosen.thresholds, settings, t)
    model_name = ModelName(model.bundle.digest, model.bundle.profile, model.version)
    expires_at = expiry(config, t, issued_at)

    def record(unit: str, node: str, row: int | None, **telemetry: Any) -> RiskRecord:
        score = scored.get(-1 if row is None else row)
        known = score or {"risk": None, "risks": {}, "score": None, "rank": None, "alert": False}
        return RiskRecord(
            unit=unit,
            gpu=unit if config.unit == "gpu" else None,
            node=node,
            slot=rows.slots.get(unit),
            status="unknown" if score is None else "ok",
            unknown_reason=OUT_OF_USE if row is None else rows.why[row],
            tier=chosen.thresholds.tier(known["risk"]),
            decision_time=t,
            issued_at=issued_at,
            expires_at=expires_at,
            horizon=config.labels.horizon,
            model=model_name,
            **telemetry,
            **known,
        )

    ages, shares = rows.sample_age_seconds.tolist(), rows.completeness.tolist()
    units = zip(rows.keys["unit"].tolist(), rows.keys["node"].tolist(), ages, shares, strict=True)
    records = [
        record(unit, node, row, sample_age_seconds=None if math.isnan(age_s) else age_s, completeness=round(share, 4))
        for row, (unit, node, age_s, share) in enumerate(units)
    ]
    idle = zip(rows.idle["unit"].tolist(), rows.idle["node"].tolist(), strict=True)
    records += [record(unit, node, None, sample_age_seconds=None, completeness=0.0) for unit, node in idle]
    records.sort(key=lambda entry: (entry.rank is None, entry.rank or 0, entry.unit))
    fitted = model.bundle.fitted
    usable = rows.values[[reason is None for reason in rows.why]]
    newest = None if rows.newest_ms is None else from_ms(rows.newest_ms)
    counted = Counter(record.tier for record in records)
    unknown_reasons = Counter(record.unknown_reason for record in records if record.unknown_reason is not None)
    summary = {
        "format": FORMAT,
        "decision_time": format_utc(t),
        "issued_at": format_utc(issued_at),
        "expires_at": format_utc(expires_at),
        "horizon_seconds": config.labels.horizon.total_seconds(),
        "labels": config.labels.model_dump(mode="json"),
        "drain_horizon_seconds": drain_horizon(model.bundle, config).total_seconds(),
        "interval_seconds": config.decision.every.total_seconds(),
        "delay_seconds": config.features.delay.total_seconds(),
        "unit": config.unit,
        "units": len(records),
        "status": {"ok": len(records) - counted[UNKNOWN], "unknown": counted[UNKNOWN]},
        "tiers": {name: counted[name] for name in (*TIERS, UNKNOWN)},
        "alerts": sum(record.alert for record in records),
        "alert_budget": fitted.k,
        "unknown_reasons": dict(unknown_reasons.most_common(_REASONS_COUNTED)),
        "thresholds": dict(chosen.thresholds.items()),
        "threshold_sources": dict(chosen.sources),
        "newest_sample": None if newest is None else format_utc(newest),
        "newest_sample_age_seconds": None if newest is None else (t - newest).total_seconds(),
        "stale_after_seconds": stale_after(config, settings.stale_after).total_seconds(),
        "min_completeness": settings.min_completeness,
        MISSING_CHANNELS: list(missing_channels(config, dataset.meta, fitted.reference, usable)),
        "unexplained": unexplained,
        "in_training_period": t < fitted.refit_at,
        "model": {
            "digest": model.bundle.digest,
            "profile": model.bundle.profile,
            "version": model.version,
            "fitted_at": format_utc(fitted.refit_at),
            "backtest": _backtest_of(model.bundle),
        },
        "dataset": {"digest": dataset.digest, "end": format_utc(dataset.meta.span[1])},
    }
    return records, summary


def _backtest_of(bundle: Bundle) -> dict[str, Any] | None:
    """Return the backtest metrics of the profile's drains; None: the bundle was trained without a backtest."""
    measured = bundle.manifest.get("metrics") or {}
    metrics = measured.get("models", {}).get(bundle.profile, {}).get("sliding")
    if metrics is None:
        return None
    names = ("episode_precision", "episode_precision_low", "episode_precision_high", "incidents", "caught")
    ends = {"since": measured["first_time"], "until": measured["last_time"]}
    return ends | {name: metrics.get(name) for name in (*names, "episodes_right", "episodes_known")}


def due_decision(config: MatrixConfig, now: datetime) -> datetime:
    """Return the newest decision time that can be scored, in UTC.

    It is the last time on the decision grid that is within the dataset and at least ``features.delay`` ago.
    Raises ``InputError`` if the dataset begins later than that.
    """
    first, last = config.span
    t = _floor(min(now - config.features.delay, last), config)
    if t < first:
        reach = f"from {format_utc(first)} to {format_utc(last)}"
        raise InputError(
            f"no decision is due yet: the dataset runs {reach}, and it is now {format_utc(now)}",
            "--dataset",
            "Wait for the first decision time in the dataset, or set one with --at.",
        )
    return t


def asked_decision(config: MatrixConfig, t: datetime, now: datetime) -> datetime:
    """Validate a requested decision time.

    Raises ``InputError`` if it is off the decision grid, outside the dataset, or in the future.
    """
    t = t.astimezone(UTC)
    decision = _floor(t, config)
    if decision != t:
        raise InputError(
            f"{format_utc(t)} is not a decision time of this model",
            "--at",
            f"Give {format_utc(decision)} or {format_utc(decision + config.decision.every)}.",
        )
    first, last = config.span
    if not first <= t <= last:
        reach = f"from {format_utc(first)} to {format_utc(last)}"
        raise InputError(
            f"{format_utc(t)} lies outside the dataset, which reaches {reach}",
            "--at",
            "Give a time inside it.",
        )
    if t > now:
        raise InputError(f"{format_utc(t)} is in the future; it is {format_utc(now)} now", "--at", "Wait for it.")
    return t


def expiry(config: MatrixConfig, t: datetime, issued_at: datetime) -> datetime:
    """Return when a risk expires.

    That is the end of the interval that it predicts (t + gap + horizon) or two decision intervals after it was issued,
    when newer decisions should have replaced it, whichever comes first.
    """
    return min(t + config.labels.gap + config.labels.horizon, issued_at + 2 * config.decision.every)


def _floor(t: datetime, config: MatrixConfig) -> datetime:
    origin, interval = config.decision.origin, config.decision.every
    return (origin + (t - origin) // interval * interval).astimezone(UTC)


FLEET_UNITS = 2048
"""Maximum number of units that percentiles are computed over, sampled evenly from the fleet."""


def score_units(
    bundle: Bundle, rows: FleetRows, thresholds: TierThresholds, settings: ServingSection, t: datetime
) -> tuple[dict[int, dict[str, Any]], int]:
    """Score the usable rows, with reasons for those that alert or have a raised tier.

    Rows with a ``why`` are excluded from ranks and alerts.
    Returns the score fields of a :class:`policy.risk_record.RiskRecord` by row, and the number of units that exceed
    ``settings.max_explained`` and so have no reasons.
    """
    known = np.flatnonzero([why is None for why in rows.why])
    if not known.size:
        return {}, 0
    fitted, profile = bundle.fitted, bundle.profile
    values = rows.values[known]
    times = np.full(len(values), instant_ms(t), dtype=np.int64)
    tie = name_hashes(rows.keys["unit"].to_numpy(dtype=object)[known])
    scored = fitted.score_arrays(values, times, tie, node_codes(rows.keys)[known])[profile]
    risk = fitted.risk(profile, scored.score)
    risks = fitted.risks(profile, scored.score)
    is_raised = np.array([thresholds.tier(plain(value)) in RAISED for value in risk], dtype=np.bool_)
    candidates = np.flatnonzero(is_raised | scored.alert)
    explained = candidates[np.lexsort((scored.rank[candidates], -risk[candidates]))][: settings.max_explained]
    noun = "GPUs" if rows.keys["gpu"].notna().any() else "nodes"
    unit_reasons = top_reasons(fitted, profile, values, explained, top=settings.max_reasons, noun=noun)
    reasons = dict(zip(explained.tolist(), unit_reasons, strict=True))
    scores = {
        row: {
            "risk": plain(risk[i]),
            "risks": {name.removeprefix("risk_"): plain(values[i]) for name, values in risks.items()},
            "score": plain(scored.score[i]),
            "rank": int(scored.rank[i]),
            "alert": bool(scored.alert[i]),
            "reasons": reasons.get(i, ()),
        }
        for i, row in enumerate(known.tolist())
    }
    return scores, len(candidates) - len(explained)


def top_reasons(
    fitted: FittedModels, profile: str, values: np.ndarray, rows: NDArray[np.int64], *, top: int, noun: str
) -> list[tuple[RiskReason, ...]]:
    """Explain units by the model that scored them, compared with the fleet at the same time.

    ``values``: all units of the decision time; ``rows``: positions of those to explain. Returns a tuple per row, the
    largest contribution first; empty if nothing raised the score. ``share`` is of the sum of positive contributions.
    """
    if len(rows) == 0 or top < 1:
        return [()] * len(rows)
    attributed, _ = explained_by(fitted, profile, values[rows])
    sampled = len(values) > FLEET_UNITS
    sample = np.unique(np.append(np.linspace(0, len(values) - 1, FLEET_UNITS).astype(np.int64), rows))
    fleet = values[sample] if sampled else values
    called = f"{noun} sampled" if sampled else noun
    plan = ReasonPlan.of(fitted.columns)
    by_name = {column.name: column for column in fitted.columns}
    reasons = []
    for number, row in enumerate(rows.tolist()):
        weightiest, increases = largest_reasons(
            attributed[number], values[row], plan, top=top, fleet=fleet, noun=called
        )
        reasons.append(
            tuple(
                RiskReason(
                    reason.text,
                    by_name[reason.column].group,
                    round(reason.contribution / increases, 4),
                    None if by_name[reason.column].group in ("history", "static") else by_name[reason.column].channel,
                )
                for reason in weightiest
            )
        )
    return reasons


def plain(value: Any) -> float:
    """Round a float32 to the nine digits that identify it, shorter than the 17 of a double."""
    return float(f"{float(value):.9g}")
