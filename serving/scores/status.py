"""How the last runs went: status.json, and the same as a textfile for Prometheus' node-exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from policy.risk_record import FORMAT, instant_words
from policy.tiers import TIERS, UNKNOWN
from serving.scores.reading import TEXTFILE
from serving.scores.writing import STATUS, ScoresFolder, read_json, write_json
from telemetry.atomic import write_bytes


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run, done or failed.

    ``result``: what it did; None: it failed.
    """

    at: datetime
    result: ScoringResult | None
    error: str | None = None


def record_attempt(scores: ScoresFolder, attempt: Attempt) -> dict[str, Any]:
    """Write status.json and the textfile after a run.

    Returns: the content of status.json: ``last_attempt``, ``last_success`` (null: never), ``error`` (null: the last
    attempt succeeded), ``failures_in_row``, ``decision`` (the newest that was scored), ``behind_s`` (of that decision
    at the last success) and ``notes`` of the last success. A run that found its decision scored already is a success.
    Raises ``InputError`` if the disk is full.
    """
    before = read_json(scores.path / STATUS) or {}
    newest = scores.newest()
    result = attempt.result
    failures = before.get("failures_in_row")
    status = {
        "format": FORMAT,
        "last_attempt": instant_words(attempt.at),
        "last_success": before.get("last_success") if result is None else instant_words(attempt.at),
        "error": attempt.error,
        "failures_in_row": 0 if result is not None else (failures if isinstance(failures, int) else 0) + 1,
        "decision": None if newest is None else newest.get("decision_time"),
        "behind_s": before.get("behind_s") if result is None else _behind_s(result, newest),
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
        return result.behind_s
    return max(result.behind_s - max((t - result.decision_time).total_seconds(), 0.0), 0.0)


def _page(status: Mapping[str, Any], newest: Mapping[str, Any] | None) -> str:
    """Write the metrics in Prometheus' text format 0.0.4; what is not known has no line."""
    name = "predrain_score_"
    lines: list[str] = []

    def gauge(what: str, words: str, samples: Iterable[tuple[str, float | None]]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# HELP {name}{what} {words}")
            lines.append(f"# TYPE {name}{what} gauge")
            lines.extend(f"{name}{what}{labels} {value:.10g}" for labels, value in known)

    def one(what: str, words: str, value: float | None) -> None:
        gauge(what, words, [("", value)])

    one("last_attempt_timestamp_seconds", "When the last run began.", _seconds(status["last_attempt"]))
    one("last_success_timestamp_seconds", "When the last run began that succeeded.", _seconds(status["last_success"]))
    one("success", "1 if the last run succeeded.", float(status["error"] is None))
    one("failures_in_row", "Runs that failed since the last success.", float(status["failures_in_row"]))
    one("behind_seconds", "By how much the data were too old for the decision that was due.", status["behind_s"])
    if newest is not None:
        one("decision_timestamp_seconds", "The newest decision time scored.", _seconds(newest["decision_time"]))
        one("expires_timestamp_seconds", "When its risks expire.", _seconds(newest["expires_at"]))
        one("duration_seconds", "How long scoring it took.", newest["took_s"])
        tiers = newest["tiers"]
        gauge(
            "units",
            "Units by tier at the newest decision time.",
            [(f'{{tier="{tier}"}}', float(tiers.get(tier, 0))) for tier in (*TIERS, UNKNOWN)],
        )
        one("alerts", "Units that the model alerts.", float(newest["alerts"]))
        one(
            "newest_sample_timestamp_seconds",
            "The newest sample that the newest decision used.",
            _seconds(newest["newest_sample"]),
        )
        one(
            "newest_sample_age_seconds",
            "How old the newest sample was at the newest decision time.",
            newest["newest_sample_age_s"],
        )
        one(
            "model_fitted_timestamp_seconds",
            "When the model of the newest decision was fitted.",
            _seconds(newest["model"]["fitted_at"]),
        )
    return "\n".join(lines) + "\n"


def _seconds(words: str | None) -> float | None:
    return None if words is None else datetime.fromisoformat(words).astimezone(UTC).timestamp()


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """What a run did.

    ``decision_time``: UTC.
    ``written``: False: it had been scored before, and nothing was changed.
    ``behind_s``: how much later the decision is that would be due by the clock alone: the data end before it, or an
    older one was asked for. 0: none.
    ``notes``: what a reader should know besides.
    """

    decision_time: datetime
    written: bool
    folder: Path
    summary: dict[str, Any]
    behind_s: float = 0.0
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
        every, delay = timedelta(seconds=newest["every_s"]), timedelta(seconds=newest["delay_s"])
        same = digest is None or newest["model"]["digest"] == digest
        missed = max((now - delay - t) // every, 0)  # the newest decision stands on the grid, so these do too
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # damaged, or of another version: looked at in full
    if not same or now < t or (missed and data_end() >= t + every):
        return None
    scores.point_to_newest()
    return ScoringResult(t, False, scores.folder_of(t), newest, missed * every.total_seconds())
