"""True risk: probability that a GPU fails in the label's interval, given its hidden state; exact, without sampling.

The hidden state is the degradation, whether the node is a lemon, the hazard multiplier, and the time since the last
reset. The multiplier is constant within a UTC day, so survival is a product of matrix exponentials of the sub-generator
over (lemon, degradation). Recurrence after a reset is an independent competing risk with a known distribution.
"""

import math
from dataclasses import dataclass
from functools import cache

import numba
import numpy as np
from scipy.linalg import expm
from scipy.special import ndtr

from simulator.fleet import DAY, HOUR, SimulatedNode, SimulatedTime
from simulator.hazards import LOG_GRID, multiplier_index
from simulator.lives import DOWN, Laws, Lives
from simulator.parameters import Parameters
from simulator.randomness import FloatArray, Int64Array


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states of all GPUs that are up, at the times of a grid; arrays of shape (n_rows,)."""

    time: Int64Array
    node: Int64Array
    slot: Int64Array
    installation: Int64Array
    model: Int64Array
    state: Int64Array
    lemon: Int64Array
    multiplier: Int64Array
    multiplier_next_day: Int64Array
    reset: Int64Array


def segments_at(segments: Int64Array, slot: Int64Array, time: Int64Array, origin: int) -> Int64Array:
    """Return the row of one node's sorted segments that contains each (slot, time); -1 if none does."""
    width = 1 << 44
    keys = segments[:, 0] * width + (segments[:, 2] - origin)
    row = np.searchsorted(keys, slot * width + (time - origin), side="right") - 1
    index = np.maximum(row, 0)
    if not len(segments):
        return np.full(len(slot), -1)
    is_alive = (row >= 0) & (segments[index, 0] == slot) & (time < segments[index, 3])
    return np.where(is_alive, row, -1)


def hidden_rows(
    nodes: list[SimulatedNode], lives: list[Lives], laws: Laws, clock: SimulatedTime, *, interval: int
) -> HiddenRows:
    """Return the hidden states of all GPUs at every ``interval`` ms of the simulated time."""
    times = np.arange(clock.start, clock.end, interval, dtype=np.int64)
    columns: list[list[Int64Array]] = [[] for _ in range(10)]
    for node, life in zip(nodes, lives, strict=True):
        slot = np.repeat(np.arange(node.slots, dtype=np.int64), len(times))
        time = np.tile(times, node.slots)
        row = segments_at(life.segments, slot, time, clock.origin)
        is_up = row >= 0
        is_up[is_up] = life.segments[row[is_up], 4] != DOWN
        slot, time, row = slot[is_up], time[is_up], row[is_up]
        segments = life.segments[row]
        installation_rows = {
            (int(installation[0]), int(installation[1])): number
            for number, installation in enumerate(life.installations)
        }
        pairs, inverse = np.unique(segments[:, :2], axis=0, return_inverse=True)
        index = np.array([installation_rows[(int(a), int(b))] for a, b in pairs], np.int64)[inverse.reshape(-1)]
        lemon = np.zeros(len(time), np.int64)
        for begin, end in life.lemon:
            lemon |= (time >= begin) & (time < end)
        installed, bad = life.installations[index, 2], life.installations[index, 4]
        today, tomorrow = _multipliers(
            time, installed, bad, node.position_factor, clock.origin, laws.epidemic, laws.ages
        )
        values = (
            time, np.full(len(time), node.index), slot, segments[:, 1], np.full(len(time), node.model),
            segments[:, 4], lemon, today, tomorrow, segments[:, 6],
        )  # fmt: skip
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return HiddenRows(*(np.concatenate(column) if column else np.empty(0, np.int64) for column in columns))


@numba.njit(cache=True, nogil=True)
def _multipliers(
    time: Int64Array,
    installed: Int64Array,
    bad: Int64Array,
    position: float,
    origin: int,
    epidemic: FloatArray,
    ages: FloatArray,
) -> tuple[Int64Array, Int64Array]:
    today = np.empty(len(time), np.int64)
    tomorrow = np.empty(len(time), np.int64)
    for row in range(len(time)):
        day = (time[row] - origin) // DAY
        day_start = origin + day * DAY
        today[row] = multiplier_index(day_start, installed[row], bad[row] != 0, position, epidemic[day], ages)
        tomorrow[row] = multiplier_index(
            day_start + DAY, installed[row], bad[row] != 0, position, epidemic[day + 1], ages
        )
    return today, tomorrow


def generator_matrix(laws: Laws, parameters: Parameters, *, model: int, regime: int, multiplier: int) -> FloatArray:
    """Return the sub-generator per hour over ``lemon * n + lump``; row deficits are failure rates; shape (2 n, 2 n)."""
    chain, mixed = laws.chain, parameters.heterogeneity
    lump = chain.lumps()
    n = int(lump.max()) + 1
    matrix = np.zeros((2 * n, 2 * n))
    fails = np.zeros(n)
    leaves = 1.0 / (mixed.lemon_mean_days * 24.0)
    enters = leaves * mixed.lemon_share / (1.0 - mixed.lemon_share)
    states = np.arange(n)
    for lemon, factor in enumerate((1.0, laws.lemon_factor)):
        block = matrix[lemon * n : (lemon + 1) * n, lemon * n : (lemon + 1) * n]
        strength = math.exp(LOG_GRID * multiplier) * factor
        np.add.at(block[0], lump[1:], strength * chain.onset[model, 1:])
        for state in range(1, chain.states):
            block[lump[state]] = 0.0
            if chain.advance[state] > 0:
                block[lump[state], lump[state + 1]] = chain.advance[state]
            block[lump[state], 0] = chain.heal[state]
            fails[lump[state]] = chain.fail[regime, state]
        switch = leaves if lemon else enters
        block[states, states] -= block.sum(axis=1) + strength * chain.direct[model].sum() + fails + switch
        matrix[lemon * n + states, (1 - lemon) * n + states] += switch
    return matrix


def recurrence_survival(age: FloatArray, recurrence: FloatArray) -> FloatArray:
    """Return the probability that a fault has not recurred ``age`` ms after a reset."""
    with np.errstate(divide="ignore"):
        z = (np.log(np.maximum(age, 0.0)) - recurrence[1]) / recurrence[2]
    return 1.0 - recurrence[0] * ndtr(z)


def true_risk(rows: HiddenRows, laws: Laws, parameters: Parameters, clock: SimulatedTime) -> FloatArray:
    """Return P(next failure starts in (t + gap, t + gap + horizon] | hidden state at t); shape (n_rows,).

    Ignores removal without a failure, since such rows have no label, and a second failure after a repair within the
    interval, which is rarer than one in a thousand.
    """
    gap, horizon = parameters.gap_s * 1000, parameters.horizon_s * 1000
    day = (rows.time - clock.origin) // DAY * DAY + clock.origin
    into_day = rows.time - day
    # The last row of a day is at 18:00, so each interval ends before the second midnight.
    regime = (day >= laws.check_day).astype(np.int64)
    regime_next = (day + DAY >= laws.check_day).astype(np.int64)
    # One integer per row sorts far faster than six columns; multipliers lie well within +-2048 grid steps.
    key = (rows.model * 2 + regime) * 2 + regime_next
    key = ((key << 12 | rows.multiplier + 2048) << 12 | rows.multiplier_next_day + 2048) << 28 | into_day
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    fields = (rows.model, regime, rows.multiplier, regime_next, rows.multiplier_next_day, into_day)
    groups = np.column_stack([column[first] for column in fields])

    @cache
    def powers(model: int, regime: int, multiplier: int, duration: int) -> FloatArray:
        unit = 6 * HOUR
        if duration > unit:
            times, remainder = divmod(duration, unit)
            matrix = np.linalg.matrix_power(powers(model, regime, multiplier, unit), times)
            return matrix @ powers(model, regime, multiplier, remainder) if remainder else matrix
        rates = generator_matrix(laws, parameters, model=model, regime=regime, multiplier=multiplier)
        return expm(rates * (duration / HOUR))

    lump = laws.chain.lumps()
    n = int(lump.max()) + 1
    to_gap = np.empty((len(groups), 2 * n))
    to_end = np.empty((len(groups), 2 * n))
    for number, (model, now, today, later, tomorrow, offset) in enumerate(groups.tolist()):
        day_left = DAY - offset
        to_gap[number] = powers(model, now, today, min(gap, day_left)).sum(axis=1)
        if gap > day_left:
            to_gap[number] = powers(model, now, today, day_left) @ powers(model, later, tomorrow, gap - day_left).sum(
                axis=1
            )
        if gap + horizon <= day_left:
            to_end[number] = powers(model, now, today, gap + horizon).sum(axis=1)
        else:
            next_day = powers(model, later, tomorrow, gap + horizon - day_left).sum(axis=1)
            to_end[number] = powers(model, now, today, day_left) @ next_day
    index = rows.lemon * n + lump[rows.state]
    alive_gap, alive_end = to_gap[inverse, index], to_end[inverse, index]
    age = (rows.time - rows.reset).astype(np.float64)
    has = rows.reset >= 0
    now_alive = np.where(has, recurrence_survival(age, laws.recurrence), 1.0)
    at_gap = np.where(has, recurrence_survival(age + gap, laws.recurrence), 1.0)
    at_end = np.where(has, recurrence_survival(age + gap + horizon, laws.recurrence), 1.0)
    return np.clip((alive_gap * at_gap - alive_end * at_end) / now_alive, 0.0, 1.0)
