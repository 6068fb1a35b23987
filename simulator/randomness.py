"""Random numbers keyed by (seed, node, slot, purpose), independent of threads and of the order of nodes.

Compiled code uses SplitMix64 (Steele, Lea, Flood 2014) with a one-element state array; other code uses numpy's Philox
with equivalent keys.
"""

import math
from enum import IntEnum

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from foundation.hashing import GOLDEN_GAMMA, mix64

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Purpose(IntEnum):
    """Purpose of a random stream; streams of different purposes are independent."""

    LAYOUT = 1
    TRAITS = 2
    LEMON = 3
    PLAN = 4
    LIFE = 5
    JOBS = 6
    EVENTS = 7
    SAMPLES = 8
    EXCHANGES = 9
    AMBIENT = 10


_TO_UNIT = 1.0 / 9007199254740992.0

NORMAL_TABLE: NDArray[np.float32] = ndtri((np.arange(65536) + 0.5) / 65536.0).astype(np.float32)
"""Standard normal quantiles at the midpoints of 65,536 equal bins: one 64-bit number yields four noise values."""


mix = numba.njit(cache=True, nogil=True, inline="always")(mix64)
"""Scramble one 64-bit value."""


@numba.njit(cache=True, nogil=True)
def stream(seed: int, node: int, slot: int, purpose: int) -> NDArray[np.uint64]:
    """Return the initial state of a stream, an array of one uint64; arguments are taken modulo 2**64."""
    key = mix(np.uint64(seed) + GOLDEN_GAMMA)
    key = mix(key ^ (np.uint64(node) + GOLDEN_GAMMA))
    key = mix(key ^ (np.uint64(slot) * np.uint64(0x100) + np.uint64(purpose) + GOLDEN_GAMMA))
    state = np.empty(1, np.uint64)
    state[0] = key
    return state


@numba.njit(cache=True, nogil=True, inline="always")
def bits(state: NDArray[np.uint64]) -> np.uint64:
    """Draw 64 random bits."""
    state[0] += GOLDEN_GAMMA
    return mix(state[0])


@numba.njit(cache=True, nogil=True, inline="always")
def uniform(state: NDArray[np.uint64]) -> float:
    """Draw from [0, 1)."""
    return (bits(state) >> np.uint64(11)) * _TO_UNIT


@numba.njit(cache=True, nogil=True)
def exponential(state: NDArray[np.uint64]) -> float:
    """Draw an exponential with mean 1."""
    return -math.log(1.0 - uniform(state))


@numba.njit(cache=True, nogil=True)
def normal(state: NDArray[np.uint64]) -> float:
    """Draw a standard normal (Box and Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(state)))
    return radius * math.cos(2.0 * math.pi * uniform(state))


@numba.njit(cache=True, nogil=True)
def poisson(state: NDArray[np.uint64], mean: float, exp_minus_mean: float) -> float:
    """Draw from a Poisson distribution (normal approximation above 30); callers cache ``exp_minus_mean``."""
    if mean <= 0.0:
        return 0.0
    if mean > 30.0:
        return max(0.0, math.floor(mean + math.sqrt(mean) * normal(state) + 0.5))
    u = uniform(state)
    share = exp_minus_mean
    total = share
    count = 0.0
    while u > total and count < 200.0:
        count += 1.0
        share *= mean / count
        total += share
    return count


def generator(seed: int, node: int, purpose: Purpose, unit: int = 0) -> np.random.Generator:
    """Return a numpy generator for a node, a purpose and optionally a device of the node."""
    low = (seed & 0xFFFFFFFFFFFFFFFF) ^ 0x5EED
    high = ((node + 1) << 32) | (unit << 8) | int(purpose)
    return np.random.Generator(np.random.Philox(key=[low, high]))


_IRRATIONALS = tuple(math.sqrt(prime) % 1.0 for prime in (5, 2, 3, 7, 11, 13, 17, 19, 23, 29, 31, 37))


def low_discrepancy(index: int, seed: int, salt: int) -> float:
    """Return a low-discrepancy number in [0, 1) for an index.

    Multiples of an irrational number (one for each ``salt``, 0 to 11) plus an offset drawn from the seed. Shares in a
    small fleet stay close to their parameters, and different traits are uncorrelated.
    """
    offset = float(generator(seed, salt, Purpose.LAYOUT).random())
    return (offset + (index + 1) * _IRRATIONALS[salt]) % 1.0
