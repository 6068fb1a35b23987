"""Events derived from samples: changes of DCGM's latched XID gauge, and text values that report a lost GPU.

``xid_last`` keeps the last XID until the driver is reloaded, so an event is a change to another nonzero value.
dcgm-exporter omits the gauge until the first XID, so a first value after rows without one is a change too. Of two XIDs
between samples only the last is visible, and a repeated XID is not: kernel logs are more accurate. An edge is dropped
if a kernel log reports the same XID of the same GPU.
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
SOURCE = "xid_gauge"


def xid_edges(
    unit: npt.NDArray[np.int32], values: npt.NDArray[np.int32], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the rows at which a unit's latched XID changes to another one.

    ``unit``: shape (n,).
    ``values``, ``valid``: the gauge, sorted by (unit, time), including rows without a value; shape (n,).

    A unit's first row is never an edge, because its XID predates the data. A first value after rows without one is an
    edge, because the gauge is absent until the first XID. If another source of the unit starts earlier and never has
    the gauge, an old XID is mistaken for a new one. The same value before and after a gap is not an edge: the gauge may
    have been cleared or just missing.
    """
    reported = np.flatnonzero(valid)
    if len(reported) == 0:
        return np.empty(0, np.int64)
    previous = np.concatenate(([-1], reported[:-1]))
    follows = (previous >= 0) & (unit[reported] == unit[previous])
    seen_before = (reported > 0) & (unit[reported] == unit[reported - 1])
    changed = np.where(follows, values[reported] != values[previous], seen_before)
    return reported[changed & (values[reported] != 0)]


def new_edges(
    unit: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    gauge: tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]],
    old: npt.NDArray[np.bool_],
    has_stored: npt.NDArray[np.bool_],
    known: Mapping[tuple[int, int], Sequence[int]],
) -> npt.NDArray[np.int64]:
    """Return the edges that earlier imports, which had only the stored rows, have not reported.

    ``unit``, ``ms``: stored and new rows, sorted by (unit, ms); shape (n,).
    ``old``, ``has_stored``: marks stored rows, and those with a stored gauge value; shape (n,).
    ``known``: times (ms) of stored edges by unit and XID, which rolled-up rows do not show completely.

    An edge at a late row is skipped if the next stored row, or its step, has the edge to the same value: the event
    stays slightly late but is reported once. An edge at a stored row is returned if late rows created it. A stored
    event is kept even if late rows before a unit's first ones show that its XID is older.
    """
    values, valid = gauge
    edges = xid_edges(unit, values, valid)
    if len(edges) == 0 or not old.any():
        return edges
    rows = np.flatnonzero(old)
    was_edge = np.zeros(len(unit), dtype=bool)
    was_edge[rows[xid_edges(unit[rows], values[rows], has_stored[rows])]] = True
    reported = np.flatnonzero(valid)
    held_place = np.flatnonzero(has_stored[reported])
    events = []
    for edge in edges[~was_edge[edges]].tolist():
        place = int(np.searchsorted(reported, edge))
        position = int(np.searchsorted(held_place, place))
        next_place = int(held_place[position]) if position < len(held_place) else -1
        if next_place < 0 or unit[reported[next_place]] != unit[edge]:
            events.append(edge)
            continue
        between_rows, following = reported[place:next_place], int(reported[next_place])
        if (values[between_rows] != values[edge]).any():
            events.append(edge)
            continue
        since = int(ms[reported[next_place - 1]]) if next_place and unit[reported[next_place - 1]] == unit[edge] else -1
        times = known.get((int(unit[edge]), int(values[edge])), ())
        has_moved = bool(was_edge[following]) and values[following] == values[edge]
        if not has_moved and not any(since < time <= ms[following] for time in times):
            events.append(edge)
    return np.array(events, np.int64)


@dataclass(slots=True)
class GpuLosses:
    """Finds the onsets of unit loss reported by samples, from batches in time order."""

    _lost: dict[int, bool] = field(default_factory=dict)
    _onsets: list[tuple[int, int, int]] = field(default_factory=list)

    def add(
        self,
        unit: npt.NDArray[np.int32],
        node: npt.NDArray[np.int32],
        ms: npt.NDArray[np.int64],
        is_lost: npt.NDArray[np.bool_],
    ) -> None:
        """Add the rows of a batch; ``unit`` and ``node`` are codes of the import, shape (n,)."""
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
        """Return a failure event per onset; ``delay``: reporting delay; ``renamed``: that of the spill."""
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
