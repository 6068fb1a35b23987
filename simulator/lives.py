"""Lifetimes of GPUs: degradation, healing, failure, repair and replacement, sampled slot by slot.

Exact simulation of a continuous-time Markov chain: between instants at which rates change (midnight, boundaries of a
lemon period), the time to the next transition is exponential.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from simulator.fleet import DAY, HOUR, NEVER, SimulatedNode, SimulatedTime
from simulator.hazards import LOG_GRID, Chain, FailureCause, age_table, multiplier_index
from simulator.parameters import Parameters
from simulator.randomness import FloatArray, Int64Array, Purpose, exponential, generator, normal, stream, uniform

DOWN = -1
"""State of a segment from a failure until the GPU is back in service."""

SEGMENT = ("slot", "installation", "begin", "end", "state", "onset", "reset")
"""Columns of a segments table: ``onset`` is the start of the degradation, ``reset`` the last reset (-1: none yet)."""
FAILURE = ("slot", "installation", "start", "mechanism", "cause", "lemon", "repaired", "replaced", "onset")
"""Columns of a failures table; mechanism -1 is the fault that only the new health check detects."""
INSTALLATION = ("slot", "installation", "installed", "removed", "bad")
"""Columns of an installations table; ``removed`` is :data:`simulator.fleet.NEVER` if the GPU stays."""


class Laws(NamedTuple):
    """Constants of the compiled simulation, shared by all nodes."""

    chain: Chain
    ages: FloatArray
    epidemic: FloatArray
    check_day: int
    lemon_factor: float
    replaced: FloatArray
    recurrence: FloatArray
    repairs: FloatArray


@dataclass(frozen=True, slots=True)
class Lives:
    """Hidden history of one node, as int64 tables in ms; ``lemon``: its periods as a lemon, shape (n, 2)."""

    segments: Int64Array
    failures: Int64Array
    installations: Int64Array
    lemon: Int64Array


def make_laws(
    parameters: Parameters, chain: Chain, epidemic: FloatArray, clock: SimulatedTime, *, detects: bool
) -> Laws:
    """Collect the constants of the simulation."""
    hazards = parameters.hazards
    begins = clock.at_share(parameters.drift.check_begins)
    # Rounded up to midnight, so that rates never change within a day.
    check_day = clock.start + -(-(begins - clock.start) // DAY) * DAY if detects else NEVER
    return Laws(
        chain=chain,
        ages=age_table(parameters.heterogeneity),
        epidemic=epidemic,
        check_day=check_day,
        lemon_factor=parameters.heterogeneity.lemon_factor,
        replaced=np.array([mechanism.replaced for mechanism in hazards.mechanisms] + [0.3], np.float64),
        recurrence=np.array(
            [hazards.recurs, math.log(hazards.recurrence_median_h * HOUR), hazards.recurrence_sigma], np.float64
        ),
        repairs=np.array([(share, math.log(days * DAY)) for share, days in hazards.repair_days], np.float64),
    )


def lemon_periods(parameters: Parameters, clock: SimulatedTime, seed: int, node: int) -> Int64Array:
    """Sample the periods in which a node is a lemon, from a stationary two-state Markov process; shape (n, 2)."""
    mixed = parameters.heterogeneity
    if mixed.lemon_share <= 0:
        return np.empty((0, 2), np.int64)
    rng = generator(seed, node, Purpose.LEMON)
    installation = mixed.lemon_mean_days * DAY
    mean_gap = installation * (1 - mixed.lemon_share) / mixed.lemon_share
    periods = []
    time = float(clock.origin)
    lemon = bool(rng.random() < mixed.lemon_share)
    while time < clock.end:
        end = time + float(rng.exponential(installation if lemon else mean_gap))
        if lemon:
            periods.append((int(time), int(min(end, clock.end))))
        time, lemon = end, not lemon
    return np.asarray(periods, np.int64).reshape(-1, 2)


def live(node: SimulatedNode, parameters: Parameters, clock: SimulatedTime, laws: Laws, *, seed: int) -> Lives:
    """Simulate one node over the whole simulated time, warm-up included."""
    lemon = lemon_periods(parameters, clock, seed, node.index)
    tables = _live(
        seed, node.index, node.model, node.slots, node.installed, node.bad, node.position_factor,
        clock.origin, clock.end, lemon, node.plan, laws,
    )  # fmt: skip
    segments, failures, installations = (
        np.array(rows, np.int64).reshape(-1, len(names))
        for rows, names in zip(tables, (SEGMENT, FAILURE, INSTALLATION), strict=True)
    )
    return Lives(segments, failures, installations, lemon)


@numba.njit(cache=True, nogil=True)
def lemon_at(lemon: Int64Array, time: float) -> tuple[bool, float]:
    """Return whether a node is a lemon at a time, and the time of the next change."""
    for row in range(lemon.shape[0]):
        if time < lemon[row, 0]:
            return False, float(lemon[row, 0])
        if time < lemon[row, 1]:
            return True, float(lemon[row, 1])
    return False, float(NEVER)


@numba.njit(cache=True, nogil=True)
def repair_time(state: NDArray[np.uint64], quantiles: FloatArray) -> float:
    """Sample a repair duration in ms, log-linear between quantiles."""
    u = uniform(state)
    for row in range(1, quantiles.shape[0]):
        if u <= quantiles[row, 0]:
            share = (u - quantiles[row - 1, 0]) / (quantiles[row, 0] - quantiles[row - 1, 0])
            return math.exp(quantiles[row - 1, 1] + share * (quantiles[row, 1] - quantiles[row - 1, 1]))
    return math.exp(quantiles[-1, 1])


_CAUSES = np.array(
    [
        FailureCause.DIRECT,
        FailureCause.WEAK,
        FailureCause.STRONG,
        FailureCause.STRONG,
        FailureCause.STRUCTURAL,
        FailureCause.HEALTH_CHECK,
    ],
    np.int64,
)
# Cause of a failure, indexed by the phase before it.


@numba.njit(cache=True, nogil=True)
def _pick(state: NDArray[np.uint64], weights: FloatArray) -> int:
    target = uniform(state) * weights.sum()
    for index in range(len(weights)):
        target -= weights[index]
        if target < 0.0:
            return index
    return len(weights) - 1


@numba.njit(cache=True, nogil=True)
def _live(  # noqa: PLR0912, PLR0915 - one loop over a slot's transitions; pieces would share twenty variables
    seed: int,
    node: int,
    model: int,
    slots: int,
    node_installed: int,
    node_bad: NDArray[np.bool_],
    position: float,
    origin: int,
    end: int,
    lemon: Int64Array,
    plan: Int64Array,
    laws: Laws,
) -> tuple[Sequence[tuple[int, ...]], ...]:
    segments, failures, installations = [], [], []
    chain = laws.chain
    hours = float(HOUR)
    for slot in range(slots):
        rng = stream(seed, node, slot, Purpose.LIFE)
        installed, bad, installation = node_installed, node_bad[slot], 0
        time = float(max(origin, installed))
        state, degraded = 0, 0
        reset, recurs_at, recurs_as = -1, float(NEVER), 0
        begin = int(time)
        next_plan = 0
        while next_plan < plan.shape[0] and plan[next_plan, 0] != slot:
            next_plan += 1
        present = time < end
        while present:
            while next_plan < plan.shape[0] and plan[next_plan, 0] == slot and plan[next_plan, 1] <= time:
                next_plan += 1  # skip changes planned before this GPU was installed
            planned = float(NEVER)
            if next_plan < plan.shape[0] and plan[next_plan, 0] == slot:
                planned = float(plan[next_plan, 1])
            day = int((time - origin) // DAY)
            is_lemon, lemon_until = lemon_at(lemon, time)
            index = multiplier_index(origin + day * DAY, installed, bad, position, laws.epidemic[day], laws.ages)
            factor = math.exp(LOG_GRID * index) * (laws.lemon_factor if is_lemon else 1.0)
            regime = 1 if time >= laws.check_day else 0
            directly = factor * chain.direct[model].sum() / hours
            degrades = factor * chain.onset[model].sum() / hours if state == 0 else 0.0
            advances, heals, fails = (
                chain.advance[state] / hours,
                chain.heal[state] / hours,
                chain.fail[regime, state] / hours,
            )
            total = directly + degrades + advances + heals + fails
            until = min(origin + (day + 1.0) * DAY, lemon_until, recurs_at, planned, float(end))
            wait = exponential(rng) / total if total > 0.0 else float(NEVER)
            if time + wait < until:
                time = max(time + wait, begin + 1.0)
                u = uniform(rng) * total
                if u < directly:
                    cause, kind = FailureCause.DIRECT, _pick(rng, chain.direct[model])
                elif u < directly + degrades + advances + heals:
                    segments.append((slot, installation, begin, int(time), state, degraded, reset))
                    begin = int(time)
                    if u < directly + degrades:
                        state, degraded = _pick(rng, chain.onset[model]), begin
                    else:
                        state = state + 1 if u < directly + degrades + advances else 0
                    continue
                else:
                    cause, kind = _CAUSES[chain.phase[state]], chain.mechanism[state]
            else:
                time = until
                if time >= end:
                    segments.append((slot, installation, begin, end, state, degraded, reset))
                    installations.append((slot, installation, installed, NEVER, int(bad)))
                    break
                if time == planned:
                    segments.append((slot, installation, begin, int(time), state, degraded, reset))
                    installations.append((slot, installation, installed, int(time), int(bad)))
                    installed, bad, installation = plan[next_plan, 2], False, installation + 1
                    time, state, reset, recurs_at = float(installed), 0, -1, float(NEVER)
                    begin = installed
                    present = time < end
                    continue
                if time != recurs_at:
                    continue
                cause, kind = FailureCause.RECURRENCE, recurs_as
            # A failure, repaired by a reset or by replacing the GPU.
            start = int(time)
            segments.append((slot, installation, begin, start, state, degraded, reset))
            exchanged = uniform(rng) < laws.replaced[kind]
            returns = int(time + repair_time(rng, laws.repairs)) + 1
            comes_back, recurrence_noise = uniform(rng) < laws.recurrence[0], normal(rng)
            leaves = planned if planned <= returns and plan[next_plan, 2] == NEVER else float(NEVER)
            stays_there = leaves >= NEVER
            failures.append(
                (
                    slot, installation, start, int(kind), int(cause), int(is_lemon), returns if stays_there else NEVER,
                    int(exchanged and stays_there), degraded if state != 0 else -1,
                )
            )  # fmt: skip
            stop = int(min(float(returns), leaves, float(end)))
            segments.append((slot, installation, start, stop, DOWN, start, -1))
            end_time = int(leaves) if leaves < end else (returns if exchanged and returns < end else NEVER)
            if end_time < NEVER or stop == end:
                installations.append((slot, installation, installed, end_time, int(bad)))
            if stop == end or leaves < end:
                break
            time, state, begin = float(returns), 0, returns
            recurs_at = float(NEVER)
            if exchanged:
                installed, bad, installation, reset = returns, False, installation + 1, -1
            else:
                reset, recurs_as = returns, kind
                if comes_back:
                    recurs_at = time + max(1.0, math.exp(laws.recurrence[1] + laws.recurrence[2] * recurrence_noise))
    return segments, failures, installations
