"""Installations of units on nodes as arrays, and as-of lookups by unit and time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foundation.errors import InputError
from foundation.times import NEVER, Int64Array, is_null, milliseconds, text


def units_of(frame: pd.DataFrame) -> NDArray[np.object_]:
    """Return the unit of each row: its GPU, or its node if ``gpu`` is null."""
    gpu, node = text(frame["gpu"]), text(frame["node"])
    return np.where(is_null(gpu), node, gpu)


class Timeline:
    """Sorted times per group, for as-of lookups: the last entry at or before a time, or the next one after it.

    Entries must be sorted by (group, time in ms). A lookup is one vectorized binary search over ``group * (distinct
    times + 1) + rank of the time``, which cannot overflow for any time span.
    """

    __slots__ = ("_distinct", "_key", "_offsets", "_width")

    def __init__(self, group: Int64Array, time: Int64Array, groups: int) -> None:
        self._distinct = np.unique(time)
        self._width = len(self._distinct) + 1
        self._key = group.astype(np.int64) * self._width + np.searchsorted(self._distinct, time, side="right")
        self._offsets = np.searchsorted(group, np.arange(groups + 1))

    def upto(self, group: Int64Array, time: Int64Array) -> Int64Array:
        """Return the position after the last entry of ``group`` at or before ``time``; groups must be >= 0."""
        rank = np.searchsorted(self._distinct, time, side="right")
        return np.searchsorted(self._key, group.astype(np.int64) * self._width + rank, side="right")

    def last(self, group: Int64Array, time: Int64Array) -> Int64Array:
        """Return the index of the last entry of ``group`` at or before ``time``; -1 if none or ``group`` < 0."""
        return self._ask(group, time, step=-1)

    def next(self, group: Int64Array, time: Int64Array) -> Int64Array:
        """Return the index of the first entry of ``group`` strictly after ``time``; -1 if none or ``group`` < 0."""
        return self._ask(group, time, step=0)

    def _ask(self, group: Int64Array, time: Int64Array, step: int) -> Int64Array:
        valid = np.maximum(group, 0)
        if not len(self._key):
            return np.full(len(group), -1, dtype=np.int64)
        index = self.upto(valid, time) + step
        is_in_group = (group >= 0) & (index >= self._offsets[valid]) & (index < self._offsets[valid + 1])
        return np.where(is_in_group, index, -1)


@dataclass(frozen=True, slots=True)
class Installations:
    """An inventory as arrays, one entry per installation, sorted by (unit, installed_at).

    ``units``: distinct unit names, sorted; a unit's code is its position here.
    ``unit``, ``installed``, ``removed``: unit code, start and end of the installation (ms; :data:`NEVER` if open).
    ``node``, ``slot``, ``gpu``: location of the unit (slot None if unknown), and its GPU (None for a node without
    GPUs).
    ``row``: row of the inventory.
    """

    units: NDArray[np.object_]
    unit: Int64Array
    installed: Int64Array
    removed: Int64Array
    node: NDArray[np.object_]
    slot: NDArray[np.object_]
    gpu: NDArray[np.object_]
    row: Int64Array

    @classmethod
    def of(cls, inventory: pd.DataFrame, *, as_of_ms: int = NEVER) -> "Installations":
        """Convert an inventory as of a time: later installations are dropped, later removals are ignored."""
        names = units_of(inventory)
        if is_null(names).any():
            row = int(np.flatnonzero(is_null(names))[0])
            raise InputError(
                "the row names neither a GPU nor a node",
                f"inventory row {row}",
                "Fill the column gpu or the column node.",
            )
        installed = milliseconds(inventory["installed_at"], "installed_at")
        removed = milliseconds(inventory["removed_at"], "removed_at")
        # A missing start means that the unit was always there.
        installed = np.where(installed == NEVER, -NEVER, installed)
        removed = np.where(removed > as_of_ms, NEVER, removed)
        known = installed <= as_of_ms
        slots = inventory["slot"] if "slot" in inventory.columns else pd.Series([None] * len(inventory))
        code, units = pd.factorize(names, sort=True)
        code, units = code.astype(np.int64), np.asarray(units, dtype=object)
        order = np.lexsort((removed, installed, code))
        order = order[known[order]]
        return cls(
            units=units,
            unit=code[order],
            installed=installed[order],
            removed=removed[order],
            node=text(inventory["node"])[order],
            slot=text(slots)[order],
            gpu=text(inventory["gpu"])[order],
            row=order.astype(np.int64),
        )

    def codes(self, names: Any) -> Int64Array:
        """Return the unit codes of unit names; -1 for names that are not in the inventory."""
        return pd.Index(self.units, dtype=object).get_indexer(pd.Index(names, dtype=object)).astype(np.int64)

    def timeline(self) -> Timeline:
        """Return a timeline of installations by (unit, installed)."""
        return Timeline(self.unit, self.installed, len(self.units))

    def leaves(self) -> tuple[Int64Array, Int64Array]:
        """Return the unit codes and times at which units left service.

        An installation followed immediately by another one of the same unit (a move, or a rewritten row) does not
        count.
        """
        latest = pd.Series(self.removed).groupby(self.unit).cummax().to_numpy(np.int64)
        followed = (self.unit[1:] == self.unit[:-1]) & (self.installed[1:] <= latest[:-1])
        has_left = (latest < NEVER) & ~np.append(followed, False)[: latest.size]
        return self.unit[has_left], latest[has_left]

    def on_node(self, node: NDArray[np.object_], time: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return pairs (position in ``node``, unit code) of the units on each node at each time, ends inclusive."""
        queries = pd.DataFrame({"node": node, "time": time, "position": np.arange(len(node))})
        table = pd.DataFrame(
            {"node": self.node, "unit": self.unit, "installed": self.installed, "removed": self.removed}
        )
        pairs = queries.merge(table, on="node", how="inner")
        pairs = pairs[(pairs["installed"] <= pairs["time"]) & (pairs["time"] <= pairs["removed"])]
        pairs = pairs[["position", "unit"]].drop_duplicates().sort_values(["position", "unit"])
        return pairs["position"].to_numpy(np.int64), pairs["unit"].to_numpy(np.int64)
