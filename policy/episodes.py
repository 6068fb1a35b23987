"""Alerts as episodes: which alerts open one, when a node may open another, and what became of each.

A node's alert opens an episode. It lasts for the drain horizon, gap included: the node is drained then, so its alerts
in that time belong to the episode, and the next one opens another. An episode is right if an incident follows its
opening within the drain horizon, and unknown while that cannot be known yet.
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
"""Evidence is new when the risk is at least this many times that of the alert which opened the last episode."""


def openings(node: Ints, time: Ints, reach_ms: int | Ints) -> Bools:
    """Tell which alerts open an episode.

    ``node``, ``time``: node and time (milliseconds) of each alert; rows in any order; shape (n,).
    ``reach_ms``: how long an episode lasts (milliseconds), of all alerts or of each; 0: every alert opens one.
    Returns: true for the first alert of a node, and for each later one more than ``reach_ms`` after the opening of the
    episode before it; shape (n,).
    """
    opened = np.zeros(len(node), dtype=np.bool_)
    reach = np.broadcast_to(np.asarray(reach_ms, dtype=np.int64), opened.shape)
    if not reach.any():
        return ~opened
    place = np.unique(node, return_inverse=True)[1]
    start = int(time.min())
    width = int(time.max()) - start + int(reach.max()) + 1
    key = place * width + (time - start)  # no episode reaches into the next node
    order = np.arange(len(key)) if (np.diff(key) >= 0).all() else np.argsort(key, kind="stable")
    key, place, reach = key[order], place[order], reach[order]
    starts = np.flatnonzero(np.diff(place, prepend=-1) != 0)
    while len(starts):  # one round for the first episode of every node, one for the second, and so on
        opened[order[starts]] = True
        later = np.searchsorted(key, key[starts] + reach[starts], side="right")
        inside = later < len(key)
        starts = later[inside][place[later[inside]] == place[starts[inside]]]
    return opened


Verdict = Literal["right", "wrong", "inconclusive", "open"]

OUTCOME_TIMEOUT = timedelta(days=7)
"""How long after the horizon a diagnostic of a drained unit is waited for before its alert is inconclusive."""


@dataclass(frozen=True, slots=True)
class Alert:
    """The beginning of an alert on a node.

    ``unit``: the unit that it is due to; ``group``: as ``cluster/group``.
    ``tier``: ``elevated`` or ``high``: what the alert asked for.
    ``horizon``: what the model looks ahead, gap included.
    ``by_rule``: a hard rule raised it: it says nothing of the model.
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
    """Tell which alerts open an episode (:func:`openings`); each would last for its horizon."""
    node = np.unique(np.array([alert.node for alert in alerts], dtype=str), return_inverse=True)[1]
    time = np.array([alert.at.timestamp() * 1000 for alert in alerts]).astype(np.int64)
    reach = np.array([alert.horizon.total_seconds() * 1000 for alert in alerts]).astype(np.int64)
    return openings(node, time, reach)


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
class AlertOutcome:
    """An alert with what became of it."""

    alert: Alert
    verdict: Verdict
    why: str


_FAILURES = {"incident": "an incident", "diagnostic_failed": "a failed diagnostic"}


def evaluate_alert(
    alert: Alert, happenings: Iterable[Happening], now: datetime, *, timeout: timedelta = OUTCOME_TIMEOUT
) -> AlertOutcome:
    """Say what became of an alert.

    ``happenings``: of all units of its node, in any order; those before the alert count only for whether the node was
    in service at it.
    ``now``: Aware; what lies after it is not looked at.
    ``timeout``: how long after the horizon an outcome may still come before a drained unit is given up as
    inconclusive.
    Returns: ``right``: within the horizon an incident or a failed diagnostic followed, drained or
    not. ``wrong``: the unit served on through the whole horizon, or passed a diagnostic and went a further horizon
    without an incident. ``inconclusive``: no longer decidable. ``open``: not yet.
    """
    seen = sorted((event for event in happenings if event.at <= now), key=lambda event: event.at)
    end = alert.at + alert.horizon
    after = [event for event in seen if event.at > alert.at]
    for event in after:
        if event.kind in _FAILURES and event.at <= end:
            when = f"{event.at:%Y-%m-%d %H:%M} UTC"
            return AlertOutcome(alert, "right", f"{_FAILURES[event.kind]} followed at {when}")
    if now >= end and not _out_of_service(seen, alert.at, end):
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


def caught_causes(cause: Ints, caught: Bools) -> tuple[Ints, Bools]:
    """Group node incidents by common cause. A cause is caught if at least half of its incidents are.

    A cause that hits many nodes would else be caught by nearly any alert.

    ``cause``, ``caught``: of each node incident; shape (n,).
    Returns: the causes, ascending, and whether each is caught.
    """
    causes, code, size = np.unique(cause, return_inverse=True, return_counts=True)
    return causes, 2 * np.bincount(code, weights=caught, minlength=len(causes)) >= size
