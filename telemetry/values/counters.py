"""Rises of counters that no device can make: one garbage reading is not an error burst, and no reset follows it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

IMPOSSIBLE_RISE: Final = "a rise of a counter that no device makes"
"""Reason for which a value is no value."""

_SHORTEST_MS: Final = 60_000
"""Exporters cache values: within this time a counter may show the rise of a minute at once."""


def impossible_rises(
    values: npt.NDArray[np.float64],
    valid: npt.NDArray[np.bool_],
    unit: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    max_rise_per_s: float,
) -> npt.NDArray[np.bool_]:
    """Mark the values of a counter, sorted by (unit, time), that rise faster than possible since the last usable one.

    The allowed rise grows with the time since that value, so that a counter which really changed is not refused for
    ever. Shapes (n,).
    """
    refused = np.zeros(len(values), np.bool_)
    reported = np.flatnonzero(valid)
    if len(reported) < 2:
        return refused
    numbers, units, times = values[reported].astype(np.float64), unit[reported], ms[reported]
    same = units[1:] == units[:-1]
    per_ms = max_rise_per_s / 1000
    fast = same & (np.diff(numbers) > per_ms * np.maximum(np.diff(times), _SHORTEST_MS))
    for place in np.flatnonzero(fast) + 1:
        if refused[reported[place]]:
            continue
        # From the first impossible value on, compare with the last usable one until the counter is back.
        before = place - 1
        while refused[reported[before]]:
            before -= 1
        current = int(place)
        while current < len(numbers) and units[current] == units[before]:
            allowed = per_ms * max(int(times[current] - times[before]), _SHORTEST_MS)
            if numbers[current] - numbers[before] <= allowed:
                break
            refused[reported[current]] = True
            current += 1
    return refused
