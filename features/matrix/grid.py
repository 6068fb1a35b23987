"""Decision rows: the units scored at each time, and the augmented training rows off the decision grid."""

import hashlib
from datetime import datetime

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.config import DecisionSection
from features.matrix.meta import MatrixConfig
from foundation.hashing import mix64
from foundation.times import NEVER, Int64Array, duration_ms, instant_ms, instants, milliseconds, text
from telemetry.dataset.installations import Installations, Timeline

MIN_COMPANIONS = 4
"""Minimum number of other units that get a row with each augmented one, so that its time does not reveal its label."""

_PAIRS = 65_536
"""Units times decision times that are looked up in one batch, to bound memory."""


def decision_times(decision: DecisionSection, span: tuple[datetime, datetime]) -> pd.DatetimeIndex:
    """Return the grid's decision times between two instants, both included, as ``datetime64[ms, UTC]``."""
    interval, origin = duration_ms(decision.every), instant_ms(decision.origin)
    first, last = instant_ms(span[0]), instant_ms(span[1])
    start = origin - (origin - first) // interval * interval
    return instants(np.arange(start, last + 1, interval, dtype=np.int64))


def grid_time(decision: DecisionSection, times: Int64Array) -> Int64Array:
    """Return the last grid time at or before each instant; all in milliseconds."""
    return times - (times - instant_ms(decision.origin)) % duration_ms(decision.every)


def decision_rows(times: pd.DatetimeIndex, inventory: pd.DataFrame, down: pd.DataFrame) -> pd.DataFrame:
    """Return the units to score at each time: in service and not known to be down.

    ``inventory``: of a dataset. An installation counts from ``installed_at`` (included) to ``removed_at`` (excluded),
    so a row depends on no later removal.
    ``down``: from :func:`features.labels.incidents.out_of_use`.
    Returns: ``decision_time``, ``node``, ``gpu`` (null for a node), ``unit``, ``augmented`` (False), ``established_at``
    (equal to the decision time); sorted by (decision_time, unit).
    """
    population = _Population(inventory, down)
    times_ms = milliseconds(times, "decision time")
    units = len(population.installations.units)
    batch = max(1, _PAIRS // max(units, 1))
    pieces = [_in_service(population, times_ms[first : first + batch]) for first in range(0, len(times_ms), batch)]
    empty = np.zeros(0, dtype=np.int64)
    installation, decided = (np.concatenate([empty, *(piece[k] for piece in pieces)]) for k in range(2))
    return population.frame(decided, installation, augmented=False, established=decided)


def augmented_rows(
    onsets: pd.DataFrame,
    inventory: pd.DataFrame,
    down: pd.DataFrame,
    config: MatrixConfig,
) -> pd.DataFrame:
    """Return extra training rows off the decision grid, in the horizon before each known onset, with companions.

    Each onset gets up to ``augmentation`` times, spread evenly over the multiples of ``step`` (from 00:00 UTC) with the
    onset in (t + gap, t + gap + horizon], except grid times. At each time the failing unit gets a row, and so do
    ``max(MIN_COMPANIONS, negative_ratio)`` other units in service, drawn by a seeded hash of unit and time: as many as
    a training set keeps for a positive, so that a model cannot learn that off-grid times mean failure. Labels are not
    consulted: a companion may turn out positive or censored.

    Rows derive from *known onsets* rather than incidents, because onsets never change once known: rows with
    ``established_at <= R`` depend only on facts known at R. A training set as of R must use only those.

    ``onsets``, ``down``: from :func:`features.labels.incidents.known_onsets` and
    :func:`features.labels.incidents.out_of_use`.
    Returns: as :func:`decision_rows` with ``augmented`` True; ``established_at`` is when the first onset behind the row
    was known. No (decision_time, unit) occurs twice.
    """
    population = _Population(inventory, down)
    decided, unit, known = _extra_times(onsets, population, config)
    companions = max(MIN_COMPANIONS, config.negative_ratio)
    keys = _unit_hashes(population.installations.units, config.seed)
    parts: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    shuffled_at: dict[int, Int64Array] = {}
    for time, failing, established in zip(decided.tolist(), unit.tolist(), known.tolist(), strict=True):
        if time not in shuffled_at:
            installation, _ = _in_service(population, np.asarray([time], dtype=np.int64))
            rank = mix64(keys[population.installations.unit[installation]] ^ mix64(np.asarray([time], dtype=np.uint64)))
            shuffled_at[time] = installation[np.argsort(rank, kind="stable")]
        shuffled = shuffled_at[time]
        is_failing = population.installations.unit[shuffled] == failing
        installation = np.r_[shuffled[is_failing], shuffled[~is_failing][:companions]]
        parts.append(
            (
                np.full(len(installation), time, dtype=np.int64),
                installation,
                np.full(len(installation), established, dtype=np.int64),
            )
        )
    empty = np.zeros(0, dtype=np.int64)
    times, installations, since = (np.concatenate([empty, *(part[k] for part in parts)]) for k in range(3))
    order = np.lexsort((since, population.installations.unit[installations], times))
    times, installations, since = times[order], installations[order], since[order]
    units = population.installations.unit[installations]
    fresh = np.r_[True, (times[1:] != times[:-1]) | (units[1:] != units[:-1])][: len(times)]
    return population.frame(times[fresh], installations[fresh], augmented=True, established=since[fresh])


class _Population:
    """Units in service and not known to be down, at any time."""

    __slots__ = ("_down", "_down_until", "_timeline", "installations")

    def __init__(self, inventory: pd.DataFrame, down: pd.DataFrame) -> None:
        self.installations = Installations.of(inventory)
        self._timeline = self.installations.timeline()
        unit = self.installations.codes(text(down["unit"]))
        start, until = milliseconds(down["down_from"], "down_from"), milliseconds(down["down_until"], "down_until")
        order = np.lexsort((start, unit))
        order = order[unit[order] >= 0]
        self._down = Timeline(unit[order], start[order], len(self.installations.units))
        self._down_until = np.append(until[order], -NEVER)

    def installation(self, unit: Int64Array, time: Int64Array) -> Int64Array:
        """Return the installation in which each unit is in service and not known down; -1: none."""
        installation = self._timeline.last(unit, time)
        is_installed = (installation >= 0) & (np.append(self.installations.removed, -NEVER)[installation] > time)
        is_up = self._down_until[self._down.last(unit, time)] <= time
        return np.where(is_installed & is_up, installation, -1)

    def frame(
        self, decided: Int64Array, installation: Int64Array, *, augmented: bool, established: Int64Array
    ) -> pd.DataFrame:
        installations = self.installations

        def names(values: NDArray[np.object_], index: Int64Array) -> pd.api.extensions.ExtensionArray:
            return pd.array(values, dtype="str").take(index)

        return pd.DataFrame(
            {
                "decision_time": instants(decided),
                "node": names(installations.node, installation),
                "gpu": names(installations.gpu, installation),
                "unit": names(installations.units, installations.unit[installation]),
                "augmented": np.full(len(installation), augmented),
                "established_at": instants(established),
            }
        )


def _in_service(population: _Population, times: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the installations of units in service and not known to be down, by time, and those times."""
    units = len(population.installations.units)
    decided = np.repeat(times, units)
    installation = population.installation(np.tile(np.arange(units, dtype=np.int64), len(times)), decided)
    is_in_service = installation >= 0
    return installation[is_in_service], decided[is_in_service]


def _extra_times(
    onsets: pd.DataFrame, population: _Population, config: MatrixConfig
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the times, units and known-at times of the augmented rows of failing units."""
    step_ms = duration_ms(config.step)
    gap, horizon = duration_ms(config.labels.gap), duration_ms(config.labels.horizon)
    first, last = map(instant_ms, config.span)
    onset_unit = population.installations.codes(text(onsets["unit"]))
    starts, knowns = milliseconds(onsets["timestamp"]), milliseconds(onsets["known_at"], "known_at")
    rows: list[tuple[int, int, int]] = []
    for unit, start, known in zip(onset_unit.tolist(), starts.tolist(), knowns.tolist(), strict=True):
        low, high = max(start - gap - horizon, first), min(start - gap - 1, last)
        times = np.arange(-(-low // step_ms) * step_ms, high + 1, step_ms, dtype=np.int64)
        times = times[times != grid_time(config.decision, times)]
        if unit < 0 or not len(times):
            continue
        times = times[population.installation(np.full(len(times), unit, dtype=np.int64), times) >= 0]
        times = times[_spread(len(times), config.augmentation)]
        rows += [(int(time), unit, known) for time in times]
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _spread(available: int, limit: int) -> Int64Array:
    """Return up to ``limit`` positions out of ``available``, in the middles of equal parts."""
    count = min(available, limit)
    return ((2 * np.arange(count) + 1) * available) // (2 * max(count, 1))


def _unit_hashes(units: NDArray[np.object_], seed: int) -> NDArray[np.uint64]:
    def digest(unit: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{seed}:{unit}".encode(), digest_size=8).digest(), "big")

    return np.asarray([digest(unit) for unit in units], dtype=np.uint64)
