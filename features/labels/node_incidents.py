"""Node incidents and common causes: unit incidents that are one node failure, and nodes that fail together.

A drain evacuates the whole node, so failures of its units within minutes are one event to predict. A failed switch or
power feed takes down many nodes simultaneously: however many incidents it causes, it is one independent observation.
"""

from datetime import timedelta

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.labels.maintenance import Maintenance
from foundation.times import BoolArray, Int64Array, duration_ms, is_null
from telemetry.dataset.installations import Installations

SAME_INSTANT = timedelta(seconds=30)
"""Node incidents that start at most this far apart start at the same time. Clocks under NTP agree to milliseconds, logs
have a resolution of a second, and one cause is logged by all its nodes within seconds. In a fleet with ten node
incidents a day, one in 290 is this close to the next by chance, which only widens a confidence interval. The controller
uses the same span."""

_QUARTER_HOUR = duration_ms(timedelta(minutes=15))


def is_dated_by_day(time: Int64Array) -> BoolArray:
    """Return which times are the last millisecond of a day in some time zone, as imports set for a bare date."""
    return (time + 1) % _QUARTER_HOUR == 0  # UTC offsets are multiples of 15 minutes


def number_node_incidents(
    installations: Installations,
    maintenance: Maintenance,
    unit: Int64Array,
    start: Int64Array,
    window: timedelta,
    *,
    by_unit: bool = False,
) -> tuple[Int64Array, Int64Array]:
    """Return the number of the node incident and of the common cause of each unit incident.

    Incidents of units of one node belong together if each starts at most ``window`` after the previous one. The chain
    has no fixed origin: learning of another incident can merge node incidents but never split one. Incidents in planned
    maintenance form node incidents of their own. A unit without a node is its own node.

    Node incidents share a common cause if each starts at most :data:`SAME_INSTANT` after the previous one, or if they
    lie in maintenances that do. The exact start of a node incident dated by day is unknown and matches no other.

    ``unit``, ``start``: unit code and start (ms) of each incident, sorted by start.
    ``by_unit``: treat each unit as its own node (``labels.acts_on``).
    Returns: both numbered 0, 1, ... in the order of their first incidents.
    """
    place = installations.node[installations.timeline().last(unit, start)] if len(unit) else np.zeros(0, dtype=object)
    node = pd.factorize(place)[0].astype(np.int64)
    is_own_node = is_null(place) | (place == "") | by_unit
    node[is_own_node] = len(place) + unit[is_own_node]
    planned = maintenance.within(unit, start)
    node_incident = _numbered(_chained(2 * node + planned, start, duration_ms(window)))
    first = np.unique(node_incident, return_index=True)[1]
    begin = start[first]
    instant = _chained(np.where(is_dated_by_day(begin), 1 + np.arange(len(first)), 0), begin, duration_ms(SAME_INSTANT))
    work = np.full(len(first), -1, dtype=np.int64)
    in_maintenance = planned[first]
    since = maintenance.begin(unit[first][in_maintenance], begin[in_maintenance])
    work[in_maintenance] = _chained(np.zeros(len(since), dtype=np.int64), since, duration_ms(SAME_INSTANT))
    return node_incident, _numbered(_merged(instant, work))[node_incident]


def _chained(group: Int64Array, time: Int64Array, longest: int) -> Int64Array:
    """Assign chain numbers to times: within a group, a chain breaks at gaps longer than ``longest``."""
    order = np.lexsort((time, group))
    breaks = (np.diff(group[order]) != 0) | (np.diff(time[order]) > longest)
    out = np.empty(len(time), dtype=np.int64)
    out[order] = np.cumsum(np.r_[False, breaks][: len(time)])
    return out


def _merged(numbers: Int64Array, links: Int64Array) -> Int64Array:
    """Merge entries that share a number in ``numbers`` or in ``links`` (-1: none); the lowest number wins."""
    while True:
        lowest = pd.Series(numbers).groupby(np.where(links < 0, -1 - np.arange(len(numbers)), links)).transform("min")
        merged = lowest.groupby(numbers).transform("min").to_numpy(np.int64)
        if np.array_equal(merged, numbers):
            return numbers
        numbers = merged


def _numbered(values: NDArray[np.int64]) -> Int64Array:
    return pd.factorize(values)[0].astype(np.int64)
