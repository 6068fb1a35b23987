"""Whether a node may be emptied now: what stands on it, what people say, and what the decision still wants."""

from __future__ import annotations

from datetime import datetime, timedelta

from policy.fleet import Level
from policy.plan import NodeDecision
from scheduler.readings import NodeReading, Switches


def why_ended(reading: NodeReading | None) -> str | None:
    """Say why a node is not to be emptied any more at all; None: its drain mark stands, or nobody can tell."""
    if reading is None:
        return "there is no such node any more"
    if not reading.view.readable:
        return None
    return None if reading.view.marks.drained else "its drain mark is gone"


def why_held(
    reading: NodeReading,
    switches: Switches,
    decision: NodeDecision | None,
    passed_at: datetime | None,
    again_after: timedelta,
    now: datetime,
) -> str | None:
    """Say why nothing new may be done to empty a node now, though its mark stands.

    ``decision``: of this round; None: the decision does not speak of the node.
    Returns: in words; None: it may be emptied.
    """
    view = reading.view
    published = view.marks.published
    passed = passed_at is not None and now < passed_at + again_after
    reasons = (
        (switches.kill, "the kill switch is set"),
        (switches.release_all, "everything is to be released"),
        (view.foreign is not None, view.foreign),
        (not view.marks.drained, "its drain mark is gone"),
        (view.undone, "a person took our mark off"),
        (published is None or published.expires_at <= now, "what its drain rests on has expired"),
        (
            decision is None or decision.target is not Level.DRAINED,
            "the decision of this round does not want it drained any more",
        ),
        (
            passed and decision is not None and not decision.rules,
            f"it passed a diagnostic at {passed_at:%Y-%m-%d %H:%M} UTC: its jobs are not moved again so soon"
            if passed_at is not None
            else None,
        ),
    )
    return next((words for holds, words in reasons if holds), None)
