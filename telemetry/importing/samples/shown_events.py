"""Events that samples show: changes of the latched XID gauge that DCGM reports, and words that a GPU is lost.

``xid_last`` shows the last XID until the driver is loaded again, so an event is a change of its value to another one
but zero. dcgm-exporter leaves the gauge out until the first XID, so a first value after rows without one is a change
too. Two XIDs between two samples show as one, and a repeat of the same XID does not show at all: kernel logs are
better, and where one reports the same XID of the same GPU, the edge is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.importing.event_runs import event_frame
from telemetry.importing.inventory import InstallationIndex
from telemetry.kernel_log.catalogue import FALLEN_OFF

CHANNEL = "xid_last"
"""The channel that is read."""

SOURCE = "xid_gauge"
"""``source`` of the events made here."""


def xid_edges(
    unit: npt.NDArray[np.int32], values: npt.NDArray[np.int32], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the rows at which a unit's latched XID changes to another one.

    ``unit``: shape (n,).
    ``values``, ``valid``: the gauge, sorted by (unit, time); a row without it counts as one in which the unit was seen;
    shape (n,).
    Returns: a unit's first row is no edge, whatever it shows: its XID is older than the data. A first value after rows
    without one is an edge, for the gauge is absent until there is an XID; where another source of the same unit began
    earlier and never carries the gauge, an older XID is taken for a new one. The same value before and after rows
    without one is no edge: the gauge may have been cleared, or only left out of a page.
    """
    reported = np.flatnonzero(valid)
    if len(reported) == 0:
        return np.empty(0, np.int64)
    before = np.concatenate(([-1], reported[:-1]))
    follows = (before >= 0) & (unit[reported] == unit[before])
    seen_before = (reported > 0) & (unit[reported] == unit[reported - 1])
    changed = np.where(follows, values[reported] != values[before], seen_before)
    return reported[changed & (values[reported] != 0)]


def new_edges(
    unit: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    gauge: tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]],
    old: npt.NDArray[np.bool_],
    held: npt.NDArray[np.bool_],
    known: Mapping[tuple[int, int], Sequence[int]],
) -> npt.NDArray[np.int64]:
    """Return the edges that an earlier import, which had only the old rows, has not reported.

    ``unit``, ``ms``: rows of an existing dataset and new ones, sorted by (unit, ms); shape (n,).
    ``old``, ``held``: rows of the existing dataset, and those of them in which it held the gauge; shape (n,).
    ``known``: instants (ms) of the existing dataset's edges by unit and XID: inside a step that was rolled up, its rows
    do not show them all.
    Returns: an edge of a late row is left out where the next old row was the edge to the same value, or its step has
    one: the event then stays a little late, and is reported once. An edge at an old row is returned where late rows
    made it one. An event that late rows before a unit's first ones make untrue (the XID was older) stays.
    """
    values, valid = gauge
    edges = xid_edges(unit, values, valid)
    if len(edges) == 0 or not old.any():
        return edges
    rows = np.flatnonzero(old)
    was_edge = np.zeros(len(unit), dtype=bool)
    was_edge[rows[xid_edges(unit[rows], values[rows], held[rows])]] = True
    reported = np.flatnonzero(valid)
    held_place = np.flatnonzero(held[reported])
    events = []
    for edge in edges[~was_edge[edges]].tolist():
        place = int(np.searchsorted(reported, edge))
        turn = int(np.searchsorted(held_place, place))
        next_place = int(held_place[turn]) if turn < len(held_place) else -1
        if next_place < 0 or unit[reported[next_place]] != unit[edge]:
            events.append(edge)
            continue
        between, following = reported[place:next_place], int(reported[next_place])
        if (values[between] != values[edge]).any():
            events.append(edge)
            continue
        since = int(ms[reported[next_place - 1]]) if next_place and unit[reported[next_place - 1]] == unit[edge] else -1
        times = known.get((int(unit[edge]), int(values[edge])), ())
        moved = bool(was_edge[following]) and values[following] == values[edge]
        if not moved and not any(since < time <= ms[following] for time in times):
            events.append(edge)
    return np.array(events, np.int64)


@dataclass(slots=True)
class GpuLosses:
    """Finds the rows at which a unit's samples begin to say that it is lost, from batches in the order of time."""

    _lost: dict[int, bool] = field(default_factory=dict)
    _onsets: list[tuple[int, int, int]] = field(default_factory=list)

    def add(
        self,
        unit: npt.NDArray[np.int32],
        node: npt.NDArray[np.int32],
        ms: npt.NDArray[np.int64],
        is_lost: npt.NDArray[np.bool_],
    ) -> None:
        """Take the rows of a batch; codes of the import's units and nodes, shape (n,)."""
        if not is_lost.any() and not self._lost:
            return
        order = np.lexsort((ms, unit))
        unit, node, ms, is_lost = unit[order], node[order], ms[order], is_lost[order]
        for place in np.flatnonzero(is_lost).tolist():
            code = int(unit[place])
            is_first = place == 0 or unit[place - 1] != code
            if not (self._lost.get(code, False) if is_first else is_lost[place - 1]):
                self._onsets.append((code, int(node[place]), int(ms[place])))
        last = np.append(unit[1:] != unit[:-1], True) if len(unit) else np.empty(0, np.bool_)
        self._lost |= dict(zip(unit[last].tolist(), is_lost[last].tolist(), strict=True))

    def events(
        self, installations: InstallationIndex, delay: timedelta, renamed: Mapping[tuple[int, int], int]
    ) -> pd.DataFrame:
        """Return a failure at each onset; ``delay`` is until it is known, ``renamed`` that of the spill."""
        onsets = [(renamed.get((unit, node), unit), node, ms) for unit, node, ms in self._onsets]
        units, nodes, times = zip(*onsets, strict=True) if onsets else ((), (), ())
        return event_frame(
            np.array(times, np.int64),
            delay,
            node=[installations.node_names[code] for code in nodes],
            gpu=[installations.units[code] if installations.unit == "gpu" else None for code in units],
            type="failure",
            code=FALLEN_OFF,
            detail="samples report: GPU is lost",
            source="sample_words",
        )
