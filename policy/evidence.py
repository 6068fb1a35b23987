"""Decisions of the past whose outcome is known: what a threshold is chosen on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policy.bounds import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Evidence:
    """Scored decisions with known labels, each array of shape (n,).

    They must have been scored by models that had not seen their labels; else no bound holds.

    ``risk``: what thresholds are set on: the riskiest highest. Any monotone score does, except for costs.
    ``hit``: whether an incident followed within the horizon.
    ``unit``: whose decision it is; decisions of one unit may depend on each other.
    ``time``: decision times in milliseconds since the epoch.
    ``incident``: the incident behind a hit; -1: none, or unknown.
    ``repeat_ms``: an alert within this time (milliseconds) of the alert that began a drain of its unit belongs to that
    drain: a drained unit is not drained again. 0: every alert counts by itself.
    """

    risk: Floats
    hit: Bools
    unit: Ints
    time: Ints
    incident: Ints
    repeat_ms: int = 0

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.risk, self.hit, self.unit, self.time, self.incident)}
        if len(lengths) > 1:
            raise ValueError(f"evidence arrays differ in length: {sorted(lengths)}")
        if not np.isfinite(self.risk).all():
            raise ValueError("evidence holds a risk that is not a number")

    @property
    def times(self) -> int:
        """Number of distinct decision times."""
        return len(np.unique(self.time))

    @property
    def incidents(self) -> int:
        """Number of distinct incidents that a decision could have caught."""
        return len(np.unique(self.incident[self.hit & (self.incident >= 0)]))

    def recall(self, alert: Bools) -> float:
        """Give the share of incidents that at least one alert caught; NaN without incidents."""
        caught = np.unique(self.incident[alert & self.hit & (self.incident >= 0)])
        total = self.incidents
        return len(caught) / total if total else float("nan")


def drains_begun(unit: Ints, time: Ints, repeat_ms: int) -> Bools:
    """Tell which alerts begin a drain.

    ``unit``, ``time``: Alerts, ordered by unit and, within it, by time (milliseconds); shape (n,).
    ``repeat_ms``: as :attr:`Evidence.repeat_ms`.
    Returns: true for the first alert of a unit, and for each later one more than ``repeat_ms`` after the alert that
    began the drain before it; shape (n,).
    """
    begun = np.zeros(len(unit), dtype=np.bool_)
    if repeat_ms <= 0 or len(unit) == 0:
        begun[:] = True
        return begun
    place = np.unique(unit, return_inverse=True)[1]
    width = int(time.max() - time.min()) + repeat_ms + 1
    key = place * width + (time - time.min())  # ascending, and no window reaches into the next unit
    at = np.flatnonzero(np.diff(place, prepend=-1) != 0)
    while len(at):  # one round for the first drain of every unit, one for the second, and so on
        begun[at] = True
        later = np.searchsorted(key, key[at] + repeat_ms, side="right")
        inside = later < len(key)
        at = later[inside][place[later[inside]] == place[at[inside]]]
    return begun


def join(parts: list[Evidence]) -> Evidence:
    """Put evidence together; units and incidents must be numbered alike in all parts."""
    return Evidence(
        risk=np.concatenate([part.risk for part in parts]) if parts else np.zeros(0),
        hit=np.concatenate([part.hit for part in parts]) if parts else np.zeros(0, np.bool_),
        unit=np.concatenate([part.unit for part in parts]) if parts else np.zeros(0, np.int64),
        time=np.concatenate([part.time for part in parts]) if parts else np.zeros(0, np.int64),
        incident=np.concatenate([part.incident for part in parts]) if parts else np.zeros(0, np.int64),
    )
