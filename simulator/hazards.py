"""Hidden states and their transition rates.

A GPU in service is healthy or in a degradation of one mechanism. A healthy GPU can fail directly or degrade; a
degradation advances, fails or heals. All rates out of healthy are proportional to the GPU's hazard multiplier (batch,
age, position, lemon node, acceleration). Rates within a degradation are not: its duration and outcome are the same on
every GPU, so acceleration preserves the structure of precursors.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from simulator.fleet import DAY, SimulatedTime
from simulator.parameters import HOURS_PER_YEAR, HeterogeneityParameters, Mechanism, Parameters
from simulator.randomness import FloatArray

LOG_GRID = 0.02
"""Step of the log grid of multipliers; few distinct values make exact true risks cheap to compute."""


class Phase(IntEnum):
    """Phase of a hidden state."""

    HEALTHY = 0
    WEAK = 1
    MILD = 2
    ADVANCED = 3
    STRUCTURAL = 4
    UNDETECTED = 5


class FailureCause(IntEnum):
    """Origin of a failure."""

    DIRECT = 0
    WEAK = 1
    STRONG = 2
    STRUCTURAL = 3
    RECURRENCE = 4
    HEALTH_CHECK = 5


PRECURSOR = ("none", "weak", "strong", "structural", "none", "weak")
"""Precursor of a failure, indexed by its :class:`FailureCause`."""


class Chain(NamedTuple):
    """Continuous-time Markov chain of the hidden states of a GPU in service; rates per hour.

    ``phase``, ``mechanism``: state 0 is healthy (mechanism -1); shape (n_states,).
    ``onset``: rate from healthy to each state, at multiplier 1, acceleration included; shape (n_models, n_states).
    ``direct``: rate of failures without a precursor, from any state, at multiplier 1; shape (n_models, n_mechanisms).
    ``advance``, ``heal``: rate to the next state, and to healthy; shape (n_states,).
    ``fail``: failure rate; row 1 applies once the new health check runs; shape (2, n_states).
    ``names``: names of the states, separated by spaces.
    """

    phase: NDArray[np.int64]
    mechanism: NDArray[np.int64]
    onset: FloatArray
    direct: FloatArray
    advance: FloatArray
    heal: FloatArray
    fail: FloatArray
    names: str

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.phase)

    def lumps(self) -> NDArray[np.int64]:
        """Lump states with equal future rates; lump 0 is the healthy state alone; shape (n_states,)."""
        known: dict[tuple[float, ...], int] = {(-1.0,): 0}
        lump = np.zeros(self.states, np.int64)
        for state in range(self.states - 1, 0, -1):
            following = float(lump[state + 1]) if self.advance[state] > 0 else -1.0
            law = (self.advance[state], self.heal[state], self.fail[0, state], self.fail[1, state], following)
            lump[state] = known.setdefault(tuple(map(float, law)), len(known))
        return lump


def mean_multiplier(mixed: HeterogeneityParameters) -> float:
    """Return the mean hazard multiplier of the calibrated fleet, by which class rates become fleet averages."""
    # The additional bad GPUs of an epidemic are not part of the calibrated fleet.
    bad_share = min(mixed.bad_share, HeterogeneityParameters().bad_share)
    lemons = 1.0 + mixed.lemon_share * (mixed.lemon_factor - 1.0)
    batch = 1.0 + bad_share * (mixed.mean_bad_factor - 1.0)
    position = 1.0 + mixed.stressed_share * (float(np.mean(mixed.position_factors)) - 1.0)
    return lemons * batch * position


def build_chain(parameters: Parameters, *, acceleration: float, detects: bool) -> Chain:
    """Build the chain; ``detects``: whether the new health check is introduced (row 1 of ``fail``)."""
    hazards = parameters.hazards
    models = parameters.fleet.models
    nowhere = [0.0] * len(models)
    direct = np.zeros((len(models), len(hazards.mechanisms)))
    scale = acceleration / HOURS_PER_YEAR / mean_multiplier(parameters.heterogeneity)
    # Per state: phase, mechanism, rates from healthy into it (by GPU model), and rates to advance, heal and fail.
    states: list[tuple[Phase, int, list[float], float, float, float]] = [(Phase.HEALTHY, -1, nowhere, 0.0, 0.0, 0.0)]
    for owner, mechanism in enumerate(hazards.mechanisms):
        # share of failures that are not recurrences: failed resets form a geometric series
        first_share = 1.0 - hazards.recurs * (1.0 - mechanism.replaced)
        first = [scale * rate * first_share for rate in _rates(mechanism, parameters)]
        ends_badly = 0.0  # The share of a path that never fails goes to direct failures, so the class keeps its rate.
        for phase, share, mean_h, fails in (
            (Phase.WEAK, mechanism.weak, hazards.weak_mean_h, hazards.weak_fails),
            (Phase.MILD, mechanism.strong, hazards.mild_mean_h, hazards.mild_advances * hazards.advanced_fails),
            (Phase.STRUCTURAL, mechanism.structural, hazards.structural_mean_h, hazards.structural_fails),
        ):
            if share <= 0:
                continue
            ends_badly += share if fails > 0 else 0.0
            rate, branching = 1.0 / mean_h, [entry * share / (fails if fails > 0 else _LOOKALIKE) for entry in first]
            if phase != Phase.MILD:
                states.append((phase, owner, branching, 0.0, rate * (1 - fails), rate * fails))
                continue
            goes_on = hazards.mild_advances
            states.append((phase, owner, branching, rate * goes_on, rate * (1 - goes_on), 0.0))
            count = hazards.advanced_phases
            rate, goes_on = count / hazards.advanced_mean_h, hazards.advanced_fails ** (1.0 / count)
            leave = rate * goes_on, rate * (1 - goes_on)
            states += [(Phase.ADVANCED, owner, nowhere, *leave, 0.0)] * (count - 1)
            states.append((Phase.ADVANCED, owner, nowhere, 0.0, leave[1], leave[0]))
        direct[:, owner] = np.array(first) * (1.0 - ends_badly)
    undetected = [scale * hazards.undetected_rate] * len(models)
    states.append((Phase.UNDETECTED, -1, undetected, 0.0, 1.0 / hazards.undetected_mean_h, 0.0))
    phases, owners, onset, advance, heal, fail = zip(*states, strict=True)
    detected = (*fail[:-1], 1.0 / hazards.detection_mean_h if detects else 0.0)
    makers = [*(mechanism.name for mechanism in hazards.mechanisms), "check"]  # index -1: no mechanism
    return Chain(
        phase=np.array(phases, np.int64),
        mechanism=np.array(owners, np.int64),
        onset=np.array(onset, np.float64).T.copy(),
        direct=direct,
        advance=np.array(advance, np.float64),
        heal=np.array(heal, np.float64),
        fail=np.array([fail, detected], np.float64),
        names=" ".join(["healthy", *(f"{makers[owner]}_{phase.name.lower()}" for phase, owner, *_ in states[1:])]),
    )


_LOOKALIKE = 0.15
# Degradations that never fail (scenario noprecursor) start as often as if this share of them failed.


def _rates(mechanism: Mechanism, parameters: Parameters) -> list[float]:
    """Failures per GPU-year of each model."""
    if mechanism.name == "nvlink":
        return [model.nvlink_failure_rate for model in parameters.fleet.models]
    return [mechanism.rate for _ in parameters.fleet.models]


def age_table(mixed: HeterogeneityParameters) -> FloatArray:
    """Return ``ages`` for :func:`multiplier_index`: infant factor, infant ms, bad factor, exponent, reference ms."""
    return np.array(
        [
            mixed.infant_factor,
            mixed.infant_days * DAY,
            mixed.bad_factor,
            mixed.bad_shape - 1.0,
            mixed.bad_reference_days * DAY,
        ],
        np.float64,
    )


def epidemic_by_day(parameters: Parameters, clock: SimulatedTime, *, enabled: bool) -> FloatArray:
    """Return the bad batch's hazard multiplier per day from the clock's origin; -1: Weibull hazard instead."""
    total = clock.days + clock.warm_up_days + 2
    if not enabled:
        return np.full(total, -1.0)
    curve = np.array(parameters.drift.epidemic_curve)
    share = (np.arange(total) - clock.warm_up_days) / clock.days
    peak = parameters.heterogeneity.bad_factor
    return np.maximum(1.0, peak * np.exp(np.interp(share, curve[:, 0], np.log(curve[:, 1]))))


@numba.njit(cache=True, nogil=True)
def multiplier_index(day: int, installed: int, bad: bool, position: float, epidemic: float, ages: FloatArray) -> int:
    """Return the grid index of a GPU's multiplier (``exp(LOG_GRID * index)``) on the day that starts at ``day``.

    ``epidemic``: multiplier of the bad batch on this day; negative: Weibull hazard. ``ages``: from :func:`age_table`.
    """
    age = max(day - installed, 0)
    factor = position
    if age < ages[1]:
        factor *= ages[0]
    if bad:
        if epidemic >= 0.0:
            factor *= epidemic
        else:
            factor *= max(1.0, ages[2] * (age / ages[4]) ** ages[3])
    return math.floor(math.log(factor) / LOG_GRID + 0.5)
