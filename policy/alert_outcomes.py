"""What became of an alert: right, wrong, inconclusive, or not known yet; and which alerts open an episode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np

from policy.episodes import Bools, openings
from policy.tiers import Tier

Verdict = Literal["right", "wrong", "inconclusive", "open"]


@dataclass(frozen=True, slots=True)
class Alert:
    """The beginning of an alert on a unit.

    ``unit``, ``group``: the group as ``cluster/group``.
    ``tier``: ``elevated`` or ``high``: what the alert asked for.
    ``horizon``: what the model looks ahead, gap included.
    ``by_rule``: a hard rule raised it: it says nothing of the model.
    """

    unit: str
    group: str
    tier: Tier
    at: datetime
    horizon: timedelta
    by_rule: bool = False
    held_out: bool = False


def opens_episode(alerts: Sequence[Alert]) -> Bools:
    """Tell which alerts open an episode (:func:`policy.episodes.openings`); each would last for its horizon."""
    unit = np.unique(np.array([alert.unit for alert in alerts], dtype=str), return_inverse=True)[1]
    time = np.array([alert.at.timestamp() * 1000 for alert in alerts]).astype(np.int64)
    reach = np.array([alert.horizon.total_seconds() * 1000 for alert in alerts]).astype(np.int64)
    return openings(unit, time, reach)


HappeningKind = Literal[
    "incident", "diagnostic_failed", "diagnostic_passed", "drained", "returned", "left"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that tells of an alert's outcome.

    ``kind``: ``incident``; ``diagnostic_failed``, ``diagnostic_passed``; ``drained``
    and ``returned``: out of service and back, by anybody's hand; ``left``: removed from the fleet. A diagnostic that
    was aborted is none of these and tells nothing.
    """

    kind: HappeningKind
    at: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """An alert with what became of it."""

    alert: Alert
    verdict: Verdict
    why: str


_FAILURES = {"incident": "an incident", "diagnostic_failed": "a failed diagnostic"}


def judge(  # noqa: PLR0911 - one line an outcome
    alert: Alert, happenings: Iterable[Happening], now: datetime, *, timeout: timedelta
) -> Outcome:
    """Say what became of an alert.

    ``happenings``: of its unit, in any order; those before the alert count only for whether the unit was in service at
    it.
    ``now``: Aware; what lies after it is not looked at.
    ``timeout``: how long after the horizon an outcome may still come before a drained unit is given up as
    inconclusive.
    Returns: ``right``: within the horizon an incident or a failed diagnostic followed, drained or
    not. ``wrong``: the unit served on through the whole horizon, or passed a diagnostic and went a further horizon
    without an incident. ``inconclusive``: neither can be said any more. ``open``: not yet.
    """
    seen = sorted((event for event in happenings if event.at <= now), key=lambda event: event.at)
    end = alert.at + alert.horizon
    after = [event for event in seen if event.at > alert.at]
    for event in after:
        if event.kind in _FAILURES and event.at <= end:
            when = f"{event.at:%Y-%m-%d %H:%M} UTC"
            return Outcome(alert, "right", f"{_FAILURES[event.kind]} followed at {when}")
    if now >= end and not _out_of_service(seen, alert.at, end):
        return Outcome(alert, "wrong", "the unit served on through the horizon")
    for passed in (event for event in after if event.kind == "diagnostic_passed"):
        until = passed.at + alert.horizon
        if any(event.kind in (*_FAILURES, "left") and passed.at < event.at <= until for event in after):
            continue
        if now >= until:
            return Outcome(alert, "wrong", "it passed a diagnostic and a further horizon without an incident")
        return Outcome(alert, "open", f"it passed a diagnostic and is watched until {until:%Y-%m-%d %H:%M} UTC")
    if any(event.kind == "left" for event in after):
        return Outcome(alert, "inconclusive", "it left the fleet, neither failed nor cleared")
    if now < end + timeout:
        return Outcome(alert, "open", "the horizon, or the time to wait for a diagnostic, is not over")
    return Outcome(alert, "inconclusive", "it was out of service in the horizon, and no diagnostic told why")


def _out_of_service(seen: list[Happening], start: datetime, end: datetime) -> bool:
    """Tell whether a unit was out of service at some time of a span."""
    out = False
    for event in (event for event in seen if event.at <= end):
        if event.kind in ("drained", "left"):
            out = True
        elif event.kind != "returned":
            continue
        if out and event.at > start:
            return True
        out = event.kind != "returned"
    return out
