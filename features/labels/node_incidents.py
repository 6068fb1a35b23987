"""Node incidents and common causes: which incidents of units are one failure of a node, and which nodes fail together.

Draining empties a node, so the failures of its units within minutes are one event to predict. A failed switch or power
feed takes many nodes at one instant: however many incidents it makes, it is one piece of evidence.
"""

from datetime import timedelta

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.labels.maintenance import Maintenance
from foundation.times import BoolArray, Int64Array, absent, duration_ms
from telemetry.dataset.installations import Installations

SAME_INSTANT = timedelta(seconds=30)
"""Node incidents that begin no further apart than this begin at one instant. Clocks under NTP agree to milliseconds and
logs to a second; what one cause does to many nodes is logged within seconds. In a fleet with ten node incidents a day
a pair falls this close by chance once in 290, and then only widens an interval. The controller takes the same span."""

_QUARTER_HOUR = duration_ms(timedelta(minutes=15))


def is_dated_by_day(time: Int64Array) -> BoolArray:
    """Tell which times are a day's last millisecond in some time zone: so an import dates what names only a day."""
    return (time + 1) % _QUARTER_HOUR == 0  # zones lie whole quarters of an hour apart


def number_node_incidents(
    installations: Installations,
    maintenance: Maintenance,
    unit: Int64Array,
    start: Int64Array,
    window: timedelta,
    *,
    by_unit: bool = False,
) -> tuple[Int64Array, Int64Array]:
    """Find the node incident and the common cause of each incident of a unit.

    Incidents of units of one node belong together if each begins at most ``window`` after the one before. The chain has
    no fixed origin, so that learning of one more incident can join what was apart and never separates what was joined.
    Incidents in a planned maintenance form node incidents of their own. A unit without a node is alone.

    Node incidents share a common cause if each begins at most :data:`SAME_INSTANT` after the one before, or if they lie
    in maintenances that do. One that is dated by day begins at no known instant.

    ``unit``, ``start``: unit code and start (ms) of each incident, sorted by start.
    ``by_unit``: each unit represents itself (``labels.acts_on``).
    Returns: both numbered 0, 1, ... in the order of their first incidents.
    """
    place = installations.node[installations.timeline().last(unit, start)] if len(unit) else np.zeros(0, dtype=object)
    node = pd.factorize(place)[0].astype(np.int64)
    alone = absent(place) | (place == "") | by_unit
    node[alone] = len(place) + unit[alone]
    planned = maintenance.within(unit, start)
    node_incident = _numbered(_chained(2 * node + planned, start, duration_ms(window)))
    first = np.unique(node_incident, return_index=True)[1]
    begin = start[first]
    instant = _chained(np.where(is_dated_by_day(begin), 1 + np.arange(len(first)), 0), begin, duration_ms(SAME_INSTANT))
    work = np.full(len(first), -1, dtype=np.int64)
    inside = planned[first]
    since = maintenance.begin(unit[first][inside], begin[inside])
    work[inside] = _chained(np.zeros(len(since), dtype=np.int64), since, duration_ms(SAME_INSTANT))
    return node_incident, _numbered(_joined(instant, work))[node_incident]


def _chained(group: Int64Array, time: Int64Array, longest: int) -> Int64Array:
    """Find the chains of times of each group in which no step is longer than ``longest``."""
    order = np.lexsort((time, group))
    breaks = (np.diff(group[order]) != 0) | (np.diff(time[order]) > longest)
    out = np.empty(len(time), dtype=np.int64)
    out[order] = np.cumsum(np.r_[False, breaks][: len(time)])
    return out


def _joined(one: Int64Array, other: Int64Array) -> Int64Array:
    """Join entries that share a number of either kind, of ``other`` unless it is -1; the lowest number is used."""
    while True:
        lowest = pd.Series(one).groupby(np.where(other < 0, -1 - np.arange(len(one)), other)).transform("min")
        joined = lowest.groupby(one).transform("min").to_numpy(np.int64)
        if np.array_equal(joined, one):
            return one
        one = joined


def _numbered(values: NDArray[np.int64]) -> Int64Array:
    return pd.factorize(values)[0].astype(np.int64)
