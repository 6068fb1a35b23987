"""Alerts as episodes: the rule of which alerts open one, and of the cool-down before a unit may open another.

A unit's alert opens an episode. It lasts for the drain horizon, gap included: the unit is drained then, so its alerts
in that time belong to the episode, and the next one opens another. An episode is right if an incident follows its
opening within the drain horizon, and unknown while that cannot be known yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

NEW_EVIDENCE = 2.0
"""Evidence is new when the risk is at least this many times that of the alert which opened the last episode."""

_DAY_MS = 86_400_000


def openings(unit: Ints, time: Ints, reach_ms: int | Ints) -> Bools:
    """Tell which alerts open an episode.

    ``unit``, ``time``: unit and time (milliseconds) of each alert; rows in any order; shape (n,).
    ``reach_ms``: how long an episode lasts (milliseconds), of all alerts or of each; 0: every alert opens one.
    Returns: true for the first alert of a unit, and for each later one more than ``reach_ms`` after the opening of the
    episode before it; shape (n,).
    """
    opened = np.zeros(len(unit), dtype=np.bool_)
    reach = np.broadcast_to(np.asarray(reach_ms, dtype=np.int64), opened.shape)
    if not reach.any():
        return ~opened
    place = np.unique(unit, return_inverse=True)[1]
    start = int(time.min())
    width = int(time.max()) - start + int(reach.max()) + 1
    key = place * width + (time - start)  # no episode reaches into the next unit
    order = np.arange(len(key)) if (np.diff(key) >= 0).all() else np.argsort(key, kind="stable")
    key, place, reach = key[order], place[order], reach[order]
    at = np.flatnonzero(np.diff(place, prepend=-1) != 0)
    while len(at):  # one round for the first episode of every unit, one for the second, and so on
        opened[order[at]] = True
        later = np.searchsorted(key, key[at] + reach[at], side="right")
        inside = later < len(key)
        at = later[inside][place[later[inside]] == place[at[inside]]]
    return opened


def newly_alerted(
    unit: Ints, time: Ints, rank: Ints, risk: Floats, budget: int, *, reach_ms: int, cooldown_ms: int
) -> Bools:
    """Alert so many new units a day, those of lowest rank, none again within the cool-down unless its evidence is new.

    ``unit``: positions from 0; ``time`` in milliseconds; ``rank``: lowest first; ``risk``: NaN is never new evidence;
    rows in any order; shape (n,).
    ``budget``: units alerted within any 24 hours, at most.
    ``reach_ms``: how long an episode lasts: its unit is not alerted again before that is over.
    ``cooldown_ms``: from an alert on; until then the unit is alerted again only on a risk of :data:`NEW_EVIDENCE` times
    that of the alert. Shorter than ``reach_ms``: as long as that.
    Returns: the alerts, each of which opens an episode; what is chosen at a time depends on nothing later; shape (n,).
    """
    chosen = np.zeros(len(unit), dtype=np.bool_)
    if not len(unit):
        return chosen
    order = np.lexsort((rank, time))
    never = int(time.min()) - max(reach_ms, cooldown_ms, _DAY_MS) - 1
    alerted_at = np.full(int(unit.max()) + 1, never, dtype=np.int64)
    alerted_risk = np.zeros(len(alerted_at))
    for rows in np.split(order, np.flatnonzero(np.diff(time[order])) + 1):
        who = unit[rows]
        now = time[rows[0]]
        since = now - alerted_at[who]
        risen = (since > reach_ms) & (risk[rows] >= NEW_EVIDENCE * alerted_risk[who])
        left = max(budget - np.count_nonzero(alerted_at > now - _DAY_MS), 0)
        taken = rows[(since > max(reach_ms, cooldown_ms)) | risen][:left]
        chosen[taken] = True
        alerted_at[unit[taken]], alerted_risk[unit[taken]] = now, risk[taken]
    return chosen
