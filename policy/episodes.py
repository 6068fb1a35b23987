"""Episodes of alerts: which alerts open one, and their outcomes.

An alert on a node opens an episode, which lasts for the drain horizon, gap included. Further alerts within it belong
to the episode, since the node is already drained; the next alert after it opens another. An episode is right if an
incident starts within the drain horizon of its opening, and unknown until that is decided.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import numpy.typing as npt

from foundation.durations import Duration
from policy.tiers import Tier

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

NEW_EVIDENCE = 2.0
"""Minimum ratio of a risk to that of the alert that opened the last episode, for it to count as new evidence."""


def openings(node: Ints, time: Ints, reach_ms: int | Ints) -> Bools:
    """Return which alerts open an episode.

    ``node``, ``time``: node and time (ms) of each alert, in any order; shape (n,).
    ``reach_ms``: duration of an episode, for all alerts or for each; 0: every alert opens one.
    Returns: true for the first alert of a node, and for each later one more than ``reach_ms`` after the opening of the
    previous episode; shape (n,).
    """
    is_opening = np.zeros(len(node), dtype=np.bool_)
    reach = np.broadcast_to(np.asarray(reach_ms, dtype=np.int64), is_opening.shape)
    if not reach.any():
        return ~is_opening
    place = np.unique(node, return_inverse=True)[1]
    start = int(time.min())
    width = int(time.max()) - start + int(reach.max()) + 1
    key = place * width + (time - start)  # width keeps episodes from reaching into the next node
    order = np.arange(len(key)) if (np.diff(key) >= 0).all() else np.argsort(key, kind="stable")
    key, place, reach = key[order], place[order], reach[order]
    starts = np.flatnonzero(np.diff(place, prepend=-1) != 0)
    while len(starts):  # iteration i finds the i-th episode of every node
        is_opening[order[starts]] = True
        next_start = np.searchsorted(key, key[starts] + reach[starts], side="right")
        in_range = next_start < len(key)
        starts = next_start[in_range][place[next_start[in_range]] == place[starts[in_range]]]
    return is_opening


Verdict = Literal["right", "wrong", "inconclusive", "open"]

OUTCOME_TIMEOUT = timedelta(days=7)
"""Time after the horizon to wait for a diagnostic of a drained unit, before its alert is inconclusive."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert on a node, at the time it was raised.

    ``unit``: unit that caused it; ``group``: ``cluster/group``.
    ``by_rule``: raised by a hard rule, so it does not count for the model's precision.
    """

    unit: str
    group: str
    tier: Tier
    at: datetime
    horizon: Duration
    node: str
    by_rule: bool = False
    held_out: bool = False


def opens_episode(alerts: Sequence[Alert]) -> Bools:
    """Return which alerts open an episode (:func:`openings`); each episode lasts for the alert's horizon."""
    node = np.unique(np.array([alert.node for alert in alerts], dtype=str), return_inverse=True)[1]
    time = np.array([alert.at.timestamp() * 1000 for alert in alerts]).astype(np.int64)
    reach = np.array([alert.horizon.total_seconds() * 1000 for alert in alerts]).astype(np.int64)
    return openings(node, time, reach)


OutcomeEventKind = Literal[
    "incident", "diagnostic_failed", "diagnostic_passed", "drained", "returned", "left"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutcomeEvent:
    """An event that bears on the outcome of an alert.

    ``kind``: ``incident``; ``diagnostic_failed``, ``diagnostic_passed``; ``drained`` and ``returned``: taken out of
    service and back, by anyone; ``left``: removed from the fleet. Aborted diagnostics are not included.
    """

    kind: OutcomeEventKind
    at: datetime


@dataclass(frozen=True, slots=True)
class AlertOutcome:
    """An alert with its verdict."""

    alert: Alert
    verdict: Verdict
    why: str


_FAILURES = {"incident": "an incident", "diagnostic_failed": "a failed diagnostic"}


def evaluate_alert(
    alert: Alert, events: Iterable[OutcomeEvent], now: datetime, *, timeout: timedelta = OUTCOME_TIMEOUT
) -> AlertOutcome:
    """Evaluate an alert.

    ``events``: events of all units of the node, in any order; earlier events only determine whether the node was in
    service at the alert.
    ``timeout``: time after the horizon until a drained unit without an outcome is inconclusive.
    Returns: ``right``: an incident or a failed diagnostic followed within the horizon, drained or not. ``wrong``: the
    unit stayed in service through the horizon, or passed a diagnostic and had no incident for a further horizon.
    ``inconclusive``: can no longer be decided. ``open``: not decided yet.
    """
    known = sorted((event for event in events if event.at <= now), key=lambda event: event.at)
    end = alert.at + alert.horizon
    after = [event for event in known if event.at > alert.at]
    for event in after:
        if event.kind in _FAILURES and event.at <= end:
            time_text = f"{event.at:%Y-%m-%d %H:%M} UTC"
            return AlertOutcome(alert, "right", f"{_FAILURES[event.kind]} followed at {time_text}")
    if now >= end and not _out_of_service(known, alert.at, end):
        return AlertOutcome(alert, "wrong", "the unit stayed in service through the horizon")
    for passed in (event for event in after if event.kind == "diagnostic_passed"):
        until = passed.at + alert.horizon
        if any(event.kind in (*_FAILURES, "left") and passed.at < event.at <= until for event in after):
            continue
        if now >= until:
            return AlertOutcome(alert, "wrong", "it passed a diagnostic, and no incident followed within a horizon")
        return AlertOutcome(alert, "open", f"it passed a diagnostic; its horizon ends at {until:%Y-%m-%d %H:%M} UTC")
    if any(event.kind == "left" for event in after):
        return AlertOutcome(alert, "inconclusive", "it left the fleet without a failure or a diagnostic")
    if now < end + timeout:
        return AlertOutcome(alert, "open", "the horizon or the wait for a diagnostic has not ended")
    return AlertOutcome(alert, "inconclusive", "it was out of service within the horizon, without a diagnostic")


def _out_of_service(known: list[OutcomeEvent], start: datetime, end: datetime) -> bool:
    """Return whether a unit was out of service at any time within a span."""
    out = False
    for event in (event for event in known if event.at <= end):
        if event.kind in ("drained", "left"):
            out = True
        elif event.kind != "returned":
            continue
        if out and event.at > start:
            return True
        out = event.kind != "returned"
    return out


def caught_causes(cause: Ints, caught: Bools) -> tuple[Ints, Bools]:
    """Group node incidents by common cause; a cause is caught if at least half of its incidents are.

    With a laxer rule, nearly any alert would catch a cause that hits many nodes.

    ``cause``, ``caught``: cause and outcome of each node incident; shape (n,).
    Returns: the causes, ascending, and whether each is caught.
    """
    causes, code, size = np.unique(cause, return_inverse=True, return_counts=True)
    return causes, 2 * np.bincount(code, weights=caught, minlength=len(causes)) >= size
