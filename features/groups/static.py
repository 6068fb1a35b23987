"""Feature group ``static``: inventory data of a unit, as known at the decision time.

Codes of a categorical column number its values in the order in which they became known (ties: by name), so a value that
appears later never changes an earlier code. ``removed_at`` is never a feature: it is future knowledge until it happens.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from features.fleet import Fleet
from features.vocabulary import FeatureColumn
from features.windows.blocks import IntArray
from foundation.errors import InputError
from foundation.times import NEVER, milliseconds, text
from telemetry.dataset.installations import Timeline

_DAY_MS = 86_400_000.0
_AUTO = ("model", "driver", "age", "slot", "rack")
_DERIVED = ("age", "in_place", "moves")
"""Features derived from a unit's installations; all others are inventory columns."""

_IDENTITIES = frozenset({"gpu", "serial", "node", "installed_at", "removed_at", *_DERIVED})
_ORDINAL = re.compile(r"(\d+)\s*\Z")


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """The columns of the group.

    =========  =======================================================================================
    code       category code of a text column (model, driver, rack, ...)
    days       ``age``: days since the unit was first installed anywhere; ``in_place``: days since its
               current installation; a time column: days since that time
    ordinal    ``slot``: the number at the end of the slot's name
    value      a numeric column; ``moves``: number of earlier installations of the unit
    =========  =======================================================================================

    ``columns``: ``code`` columns include their categories.
    """

    columns: tuple[FeatureColumn, ...]

    @classmethod
    def of(
        cls, inventory: pd.DataFrame, events: pd.DataFrame, selection: Sequence[str] | Literal["auto", "all"]
    ) -> "StaticPlan":
        """Plan the group.

        ``selection``: inventory columns, ``age``, ``in_place`` or ``moves``; ``auto``: model, driver, age, slot and
        rack if filled; ``all``: these three and every filled column that does not identify the unit.
        Raises ``InputError`` if a named column does not exist or cannot be a feature.
        """
        if selection == "auto":
            names = [name for name in _AUTO if name == "age" or _filled(inventory, name)]
        elif selection == "all":
            names = [*_DERIVED, *(name for name in sorted(inventory.columns) if _describes(inventory, name))]
        else:
            names = list(selection)
            for name in names:
                _check(inventory, name)
        return cls(tuple(_column(inventory, events, name) for name in names))

    def of_fleet(self, fleet: Fleet, inventory: pd.DataFrame, events: pd.DataFrame) -> "StaticFacts":
        """Read the values of a fleet built from ``inventory``; categories missing from the plan are unknown."""
        facts: list[tuple[npt.NDArray[np.float64] | IntArray, DriverChanges | None]] = []
        for column in self.columns:
            name = str(column.channel)
            changes = None
            if name in _DERIVED:
                facts.append((_of_installations(fleet, name), None))
                continue
            if column.statistic == "days":
                of_row = milliseconds(inventory[name], name)
            elif column.statistic == "value":
                of_row = np.full(len(inventory), np.nan)
                if name in inventory.columns:
                    of_row = pd.to_numeric(inventory[name], errors="coerce").to_numpy(np.float64, na_value=np.nan)
            elif column.statistic == "ordinal":
                of_row = np.array([_ordinal(slot) for slot in _texts(inventory, name)], dtype=np.float64)
            else:
                codes: dict[str | None, int] = {category: code for code, category in enumerate(column.categories)}
                of_row = np.array([codes.get(value, np.nan) for value in _texts(inventory, name)], dtype=np.float64)
                changes = DriverChanges.of(fleet, events, codes) if name == "driver" else None
            facts.append((of_row[fleet.installation_row], changes))
        return StaticFacts(fleet, tuple(facts))


@dataclass(frozen=True, slots=True)
class StaticFacts:
    """Values of a plan's columns for one fleet; see :meth:`StaticPlan.of_fleet`.

    ``facts``: per column the value of each installation (for a column of days, the start in ms as an integer) and later
    changes; values use only what is known at a row's time.
    """

    fleet: Fleet
    facts: "tuple[tuple[npt.NDArray[np.float64] | IntArray, DriverChanges | None], ...]"

    def values(self, pair: IntArray, time: IntArray) -> npt.NDArray[np.float32]:
        """Return the values of rows by pair (-1: unknown) and decision time (ms); shape (rows, columns)."""
        out = np.full((pair.size, len(self.facts)), np.nan, dtype=np.float32)
        installation = self.fleet.installation_at(pair, time)
        known = installation >= 0
        for position, (of_installation, changes) in enumerate(self.facts):
            values = of_installation[installation[known]]
            if np.issubdtype(values.dtype, np.integer):
                usable = (values > -NEVER) & (values <= time[known])
                values = np.where(usable, (time[known] - values) / _DAY_MS, np.nan)
            out[known, position] = values
            if changes is not None:
                changes.overwrite(out[:, position], self.fleet, pair, time, installation)
        return out


def _filled(inventory: pd.DataFrame, name: str) -> bool:
    return name in inventory.columns and bool(inventory[name].notna().any())


def _describes(inventory: pd.DataFrame, name: str) -> bool:
    """Return whether a column describes units without identifying them: on average two rows share a text."""
    if name in _IDENTITIES or not _filled(inventory, name):
        return False
    if pd.api.types.is_numeric_dtype(inventory[name].dtype) or isinstance(inventory[name].dtype, pd.DatetimeTZDtype):
        return True
    return bool(inventory[name].nunique() <= max(len(inventory) // 2, 1))


def _check(inventory: pd.DataFrame, name: str) -> None:
    location = "parameter features.static"
    if name in ("removed_at", "installed_at"):
        raise InputError(
            f"{name!r} cannot be a feature",
            location,
            "Leave it out: a removal is not known before it happens."
            if name == "removed_at"
            else "Name 'in_place' instead: days since the installation.",
        )
    if name not in _DERIVED and name not in inventory.columns:
        raise InputError(
            f"the inventory has no column {name!r}",
            location,
            f"Choose among: {', '.join(sorted({*_DERIVED, *inventory.columns} - {'installed_at', 'removed_at'}))}.",
        )


def _column(inventory: pd.DataFrame, events: pd.DataFrame, name: str) -> FeatureColumn:
    if name in ("age", "in_place"):
        return FeatureColumn.of("static", name, "days", unit="d")
    if name == "moves":
        return FeatureColumn.of("static", name, "value")
    if name == "slot":
        return FeatureColumn.of("static", "slot", "ordinal")
    values = inventory[name]
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        return FeatureColumn.of("static", name, "days", unit="d")
    if pd.api.types.is_numeric_dtype(values.dtype):
        return FeatureColumn.of("static", name, "value")
    first: dict[str, int] = {}
    known_at = milliseconds(inventory["installed_at"], "installed_at")
    facts = list(zip(_texts(inventory, name), known_at.tolist(), strict=True))
    if name == "driver":
        facts += [(version, known) for _, _, version, _, known in _driver_events(events)]
    for value, known in facts:
        if value is not None:
            first[value] = min(known, first.get(value, NEVER))
    categories = tuple(sorted(first, key=lambda value: (first[value], value)))
    return FeatureColumn.of("static", name, "code", categories=categories)


def _texts(inventory: pd.DataFrame, name: str) -> list[str | None]:
    if name not in inventory.columns:
        return [None] * len(inventory)
    return [None if value is None else str(value) for value in text(inventory[name])]


def _ordinal(slot: str | None) -> float:
    number = _ORDINAL.search(slot) if slot is not None else None
    return float(number.group(1)) if number else np.nan


def _of_installations(fleet: Fleet, name: str) -> npt.NDArray[np.float64] | IntArray:
    """Return a value per installation that no later installation changes."""
    if name == "in_place":
        return fleet.installed
    unit = pd.Series([fleet.pairs[pair][1] for pair in fleet.installation_pair.tolist()], dtype=object)
    installed = pd.Series(fleet.installed).groupby(unit)
    if name == "age":
        return installed.transform("min").to_numpy(np.int64)
    return installed.rank(method="min").to_numpy(np.float64) - 1.0


def _driver_events(events: pd.DataFrame) -> list[tuple[str, str | None, str, int, int]]:
    """Return driver changes as (node, gpu or None, version, timestamp, known); version: code or detail."""
    chosen = events[events["type"] == "driver"]
    version = [code or detail for code, detail in zip(text(chosen["code"]), text(chosen["detail"]), strict=True)]
    rows = zip(
        text(chosen["node"]).tolist(),
        text(chosen["gpu"]).tolist(),
        version,
        milliseconds(chosen["timestamp"]).tolist(),
        milliseconds(chosen["known_at"], "known_at").tolist(),
        strict=True,
    )
    return [(node, gpu, str(value), time, known) for node, gpu, value, time, known in rows if value]


@dataclass(frozen=True, slots=True)
class DriverChanges:
    """Driver changes by pair and known-at time.

    ``time``, ``code``: timestamp (ms) and code of the latest change known by then.
    """

    known: Timeline
    time: IntArray
    code: npt.NDArray[np.float64]

    @classmethod
    def of(cls, fleet: Fleet, events: pd.DataFrame, codes: Mapping[str | None, int]) -> "DriverChanges | None":
        """Read driver changes from events; None if there are none."""
        changes = _driver_events(events)
        touched = [
            [number for number in _pairs_of(fleet, node) if gpu is None or fleet.pairs[number][1] in (gpu, node)]
            for node, gpu, *_ in changes
        ]
        pair = np.array(list(chain.from_iterable(touched)), dtype=np.int64)
        if not pair.size:
            return None
        event = np.repeat(np.arange(len(changes)), [len(numbers) for numbers in touched])
        time, known = (np.array([change[field] for change in changes], dtype=np.int64)[event] for field in (3, 4))
        code = np.array([codes.get(version, np.nan) for _, _, version, _, _ in changes], dtype=np.float64)[event]
        order = np.lexsort((time, known, pair))
        pair, time, code = pair[order], time[order], code[order]
        # position of the latest change known with each one: by timestamp, then by known-at time
        newest = pd.Series(time).groupby(pair, sort=False).cummax().to_numpy()
        latest = np.maximum.accumulate(np.where(time == newest, np.arange(pair.size), 0))
        return cls(Timeline(pair, known[order], len(fleet.pairs)), time[latest], code[latest])

    def overwrite(
        self, out: npt.NDArray[np.float32], fleet: Fleet, pair: IntArray, time: IntArray, installation: IntArray
    ) -> None:
        """Overwrite the driver at installation with the newest change known at each row's time."""
        last = self.known.last(pair, time)
        rows = np.flatnonzero((last >= 0) & (installation >= 0))
        change = last[rows]
        # the inventory's driver includes changes before the installation
        newer = self.time[change] >= fleet.installed[installation[rows]]
        out[rows[newer]] = self.code[change[newer]]


def _pairs_of(fleet: Fleet, node: str) -> range:
    first = bisect_left(fleet.pairs, (node, ""))
    if first == len(fleet.pairs) or fleet.pairs[first][0] != node:
        return range(0)
    return range(first, int(fleet.last_of_node[first]))
