"""What a run of batch scoring did, and how to see in a moment that it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from serving.scores.writing import ScoresFolder


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
