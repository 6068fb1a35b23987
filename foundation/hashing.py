"""The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a fixed bijection on 64-bit integers that mixes all bits."""

import numpy as np
from numpy.typing import NDArray

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each 64-bit value; the shape is unchanged. The simulator compiles this function for scalars."""
    z = values
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
