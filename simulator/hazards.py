"""Hidden states and the rates between them.

A GPU in service is healthy or in one of the degradations of one mechanism. From healthy it can fail directly or
degrade; a degradation advances, fails or heals. All rates out of healthy are proportional to the GPU's hazard
multiplier (batch, age, position, lemon node, acceleration); what happens inside a degradation is not: a degradation is
as long and as dangerous on every GPU, so that acceleration keeps the structure of the precursors.
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
"""Multipliers lie on a grid of this step in logarithm: few distinct values, so that true risks are exact and cheap."""


class Phase(IntEnum):
    """What a hidden state is."""

    HEALTHY = 0
    WEAK = 1
    MILD = 2
    ADVANCED = 3
    STRUCTURAL = 4
    UNDETECTED = 5


class FailureCause(IntEnum):
    """How a failure came about."""

    DIRECT = 0
    WEAK = 1
    STRONG = 2
    STRUCTURAL = 3
    RECURRENCE = 4
    HEALTH_CHECK = 5


PRECURSOR = ("none", "weak", "strong", "structural", "none", "weak")
"""Precursor of a failure by its :class:`FailureCause`."""


class Chain(NamedTuple):
    """Hidden states of a GPU in service, and their rates per hour.

    ``phase``, ``mechanism``: state 0 is healthy (mechanism -1); shape (n_states,).
    ``onset``: rate from healthy into each state, at multiplier 1, acceleration included; shape (n_models, n_states).
    ``direct``: rate of failing from any state without a degradation of that mechanism, at multiplier 1; shape
    (n_models, n_mechanisms).
    ``advance``, ``heal``: rate to the next state in order, and to healthy; shape (n_states,).
    ``fail``: rate of failing; row 1 holds once the new health check runs; shape (2, n_states).
    ``names``: of the states, with spaces between them.
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
        """Return each state's lump: states with one law of failing; lump 0 is healthy alone; shape (n_states,)."""
        known: dict[tuple[float, ...], int] = {(-1.0,): 0}
        lump = np.zeros(self.states, np.int64)
        for state in range(self.states - 1, 0, -1):
            following = float(lump[state + 1]) if self.advance[state] > 0 else -1.0
            law = (self.advance[state], self.heal[state], self.fail[0, state], self.fail[1, state], following)
            lump[state] = known.setdefault(tuple(map(float, law)), len(known))
        return lump


def mean_multiplier(mixed: HeterogeneityParameters) -> float:
    """Return the mean hazard of the calibrated fleet against a plain GPU, so that class rates are fleet averages."""
    # The bad batch's share of an epidemic is on top of the calibrated fleet, not part of it.
    bad_share = min(mixed.bad_share, HeterogeneityParameters().bad_share)
    lemons = 1.0 + mixed.lemon_share * (mixed.lemon_factor - 1.0)
    batch = 1.0 + bad_share * (mixed.mean_bad_factor - 1.0)
    position = 1.0 + mixed.stressed_share * (float(np.mean(mixed.position_factors)) - 1.0)
    return lemons * batch * position


def build_chain(parameters: Parameters, *, acceleration: float, detects: bool) -> Chain:
    """Make the chain of hidden states; ``detects``: whether the new health check starts (row 1 of ``fail``)."""
    hazards = parameters.hazards
    models = parameters.fleet.models
    nowhere = [0.0] * len(models)
    direct = np.zeros((len(models), len(hazards.mechanisms)))
    scale = acceleration / HOURS_PER_YEAR / mean_multiplier(parameters.heterogeneity)
    # Of each state: its phase, its mechanism, the rates into it from healthy, and of advancing, healing and failing.
    states: list[tuple[Phase, int, list[float], float, float, float]] = [(Phase.HEALTHY, -1, nowhere, 0.0, 0.0, 0.0)]
    for owner, mechanism in enumerate(hazards.mechanisms):
        # the share of its failures that are not recurrences: a geometric series of resets that did not cure
        first_share = 1.0 - hazards.recurs * (1.0 - mechanism.replaced)
        first = [scale * rate * first_share for rate in _rates(mechanism, parameters)]
        ends_badly = 0.0  # A path that never fails leaves its share to the direct failures: the class keeps its rate.
        for phase, share, mean_h, fails in (
            (Phase.WEAK, mechanism.weak, hazards.weak_mean_h, hazards.weak_fails),
            (Phase.MILD, mechanism.strong, hazards.mild_mean_h, hazards.mild_advances * hazards.advanced_fails),
            (Phase.STRUCTURAL, mechanism.structural, hazards.structural_mean_h, hazards.structural_fails),
        ):
            if share <= 0:
                continue
            ends_badly += share if fails > 0 else 0.0
            rate, into = 1.0 / mean_h, [entry * share / (fails if fails > 0 else _LOOKALIKE) for entry in first]
            if phase != Phase.MILD:
                states.append((phase, owner, into, 0.0, rate * (1 - fails), rate * fails))
                continue
            goes_on = hazards.mild_advances
            states.append((phase, owner, into, rate * goes_on, rate * (1 - goes_on), 0.0))
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
    makers = [*(mechanism.name for mechanism in hazards.mechanisms), "check"]  # the last, -1, is no mechanism
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
# Where degradations never fail (noprecursor), they begin as often as if this share of them did.


def _rates(mechanism: Mechanism, parameters: Parameters) -> list[float]:
    """Failures per GPU-year of each model."""
    if mechanism.name == "nvlink":
        return [model.nvlink_failure_rate for model in parameters.fleet.models]
    return [mechanism.rate for _ in parameters.fleet.models]


def age_table(mixed: HeterogeneityParameters) -> FloatArray:
    """Return what :func:`multiplier_index` needs: infant factor, infant ms, bad factor, power of age, reference ms."""
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


def epidemic_by_day(parameters: Parameters, clock: SimulatedTime, *, on: bool) -> FloatArray:
    """Return the bad batch's hazard for each day from the clock's origin; -1 where it follows its Weibull law."""
    total = clock.days + clock.warm_up_days + 2
    if not on:
        return np.full(total, -1.0)
    curve = np.array(parameters.drift.epidemic_curve)
    share = (np.arange(total) - clock.warm_up_days) / clock.days
    peak = parameters.heterogeneity.bad_factor
    return np.maximum(1.0, peak * np.exp(np.interp(share, curve[:, 0], np.log(curve[:, 1]))))


@numba.njit(cache=True, nogil=True)
def multiplier_index(day: int, installed: int, bad: bool, position: float, epidemic: float, ages: FloatArray) -> int:
    """Return the grid index of a GPU's multiplier (``exp(LOG_GRID * index)``) on the day that begins at ``day``.

    ``epidemic``: the bad batch's factor on this day; negative: its Weibull law. ``ages``: from :func:`age_table`.
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
