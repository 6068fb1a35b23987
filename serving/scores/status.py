"""How the last runs went: status.json, and the same as a textfile for Prometheus' node-exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from policy.risk_record import FORMAT, instant_words
from policy.tiers import TIERS, UNKNOWN
from serving.scores.reading import TEXTFILE, read_json
from serving.scores.writing import STATUS, ScoresFolder, write_json
from telemetry.atomic import write_bytes


def record_attempt(
    scores: ScoresFolder, at: datetime, result: ScoringResult | None, error: str | None = None
) -> dict[str, Any]:
    """Write status.json and the textfile after a run.

    ``result``: what it did; None: it failed, by ``error``.
    Returns: the content of status.json: ``last_attempt``, ``last_success`` (null: never), ``error`` (null: the last
    attempt succeeded), ``consecutive_failures``, ``decision`` (the newest that was scored), ``lag_seconds`` (of that
    decision at the last success) and its ``notes``. A run that found its decision scored already is a success.
    Raises ``InputError`` if the disk is full.
    """
    before = read_json(scores.path / STATUS) or {}
    newest = scores.newest()
    failures = before.get("consecutive_failures")
    status = {
        "format": FORMAT,
        "last_attempt": instant_words(at),
        "last_success": before.get("last_success") if result is None else instant_words(at),
        "error": error,
        "consecutive_failures": 0 if result is not None else (failures if isinstance(failures, int) else 0) + 1,
        "decision": None if newest is None else newest.get("decision_time"),
        "lag_seconds": before.get("lag_seconds") if result is None else _behind_s(result, newest),
        "notes": before.get("notes", []) if result is None else list(result.notes),
    }
    write_json(scores.path / STATUS, status)
    try:
        page = _page(status, newest)
    except (KeyError, TypeError, ValueError, AttributeError):  # somebody edited the summary
        page = _page(status, None)
    write_bytes(scores.path / TEXTFILE, page.encode())
    return status


def _behind_s(result: ScoringResult, newest: Mapping[str, Any] | None) -> float:
    """Give by how much the newest decision is behind: a run may have scored an older one."""
    try:
        t = datetime.fromisoformat((newest or {})["decision_time"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError):  # none, or somebody edited it
        return result.lag_seconds
    return max(result.lag_seconds - max((t - result.decision_time).total_seconds(), 0.0), 0.0)


def _page(status: Mapping[str, Any], newest: Mapping[str, Any] | None) -> str:
    """Write the metrics in Prometheus' text format 0.0.4; what is not known has no line."""
    gauges: list[tuple[str, str, float | None]] = [
        ("last_attempt_timestamp_seconds", "When the last run began.", _seconds(status["last_attempt"])),
        ("last_success_timestamp_seconds", "When the last successful run began.", _seconds(status["last_success"])),
        ("success", "1 if the last run succeeded.", float(status["error"] is None)),
        ("consecutive_failures", "Runs that failed since the last success.", status["consecutive_failures"]),
        ("lag_seconds", "By how much the data were too old for the decision that was due.", status["lag_seconds"]),
    ]
    if newest is not None:
        sampled, fitted = _seconds(newest["newest_sample"]), _seconds(newest["model"]["fitted_at"])
        gauges += [
            ("decision_timestamp_seconds", "The newest decision time scored.", _seconds(newest["decision_time"])),
            ("expires_timestamp_seconds", "When its risks expire.", _seconds(newest["expires_at"])),
            ("duration_seconds", "How long scoring it took.", newest["duration_seconds"]),
            ("alerts", "Units that the model alerts.", newest["alerts"]),
            ("newest_sample_timestamp_seconds", "The newest sample that the newest decision used.", sampled),
            ("newest_sample_age_seconds", "Its age at the newest decision time.", newest["newest_sample_age_seconds"]),
            ("model_fitted_timestamp_seconds", "When the model of the newest decision was fitted.", fitted),
        ]
    lines = []
    for name, text, value in gauges:
        if value is not None:
            lines += [f"# HELP predrain_score_{name} {text}", f"# TYPE predrain_score_{name} gauge"]
            lines.append(f"predrain_score_{name} {value:.10g}")
    if newest is not None:
        lines += ["# HELP predrain_score_units Units by tier at the newest decision time."]
        lines += ["# TYPE predrain_score_units gauge"]
        counts = newest["tiers"]
        lines += [f'predrain_score_units{{tier="{tier}"}} {counts.get(tier, 0)}' for tier in (*TIERS, UNKNOWN)]
    return "\n".join(lines) + "\n"


def _seconds(words: str | None) -> float | None:
    return None if words is None else datetime.fromisoformat(words).astimezone(UTC).timestamp()


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """What a run did.

    ``decision_time``: UTC.
    ``written``: False: it had been scored before, and nothing was changed.
    ``lag_seconds``: how much later the decision is that would be due by the clock alone: the data end before it, or an
    older one was asked for. 0: none.
    ``notes``: what a reader should know besides.
    """

    decision_time: datetime
    written: bool
    folder: Path
    summary: dict[str, Any]
    lag_seconds: float = 0.0
    notes: tuple[str, ...] = ()


def nothing_due(
    scores: ScoresFolder, now: datetime, *, digest: str | None, data_end: Callable[[], datetime]
) -> ScoringResult | None:
    """Tell that no decision is due since the newest one that was scored, without reading the model or the data.

    ``digest``: of the model that is to score; None: not known without asking for it, and taken to be the one before.
    ``data_end``: gives the end of the dataset, aware; asked only where the clock alone has another decision due.
    Returns: none where a decision may be due, or another model scored the newest one.
    """
    newest = scores.newest()
    if newest is None:
        return None
    try:
        t = datetime.fromisoformat(newest["decision_time"]).astimezone(UTC)
        every, delay = timedelta(seconds=newest["interval_seconds"]), timedelta(seconds=newest["delay_seconds"])
        same = digest is None or newest["model"]["digest"] == digest
        missed = max((now - delay - t) // every, 0)  # the newest decision stands on the grid, so these do too
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # damaged, or of another version: looked at in full
    if not same or now < t or (missed and data_end() >= t + every):
        return None
    scores.point_to_newest()
    return ScoringResult(t, False, scores.folder_of(t), newest, missed * every.total_seconds())
