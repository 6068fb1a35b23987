"""Where a value is in the fleet at the same time, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.vocabulary import FeatureColumn, amount
from features.wording import percent


@dataclass(frozen=True, slots=True)
class FleetPercentile:
    """One feature's value among all units at one decision time.

    ``low``, ``median``, ``high``: first percentile, median and 99th percentile of the known values; NaN where no unit
    has one.
    ``above``, ``below``, ``same``, ``known``, ``units``: units whose value is higher, lower and equal (the unit itself
    among these; a row without a value equals those without one), units with a value, and all.
    """

    low: float
    median: float
    high: float
    above: int
    below: int
    same: int
    known: int
    units: int

    @classmethod
    def of(cls, fleet: NDArray[np.float32], value: float) -> FleetPercentile:
        """Place a value among those of the fleet, shape (n_units,), the unit's own among them; NaN: unknown."""
        known = fleet[~np.isnan(fleet)]
        # percentiles that a unit has: half an error is none
        edges = np.percentile(known, [1, 50, 99], method="nearest") if known.size else np.full(3, np.nan)
        low, median, high = (float(each) for each in edges)
        same = fleet.size - known.size if math.isnan(value) else int((known == np.float32(value)).sum())
        return cls(
            low,
            median,
            high,
            above=int((known > np.float32(value)).sum()),
            below=int((known < np.float32(value)).sum()),
            same=same,
            known=int(known.size),
            units=int(fleet.size),
        )


def describe_percentile(column: FeatureColumn, value: float, position: FleetPercentile, noun: str = "GPUs") -> str:
    """Say where a value is in the fleet: its median, a percentile beyond which it lies, and the rank of the value."""
    if math.isnan(value) or column.categories or column.unit == "bool" or position.known == 0:
        return f"as of {percent(position.same / max(position.units, 1))} of the fleet at that time"
    middle = f"fleet at that time: median {amount(column, position.median)}"
    if value == position.median:
        return f"{middle}, the same"
    high = value > position.median
    edge = f"{'99th' if high else '1st'} percentile {amount(column, position.high if high else position.low)}"
    others = (position.above if high else position.below) + position.same - 1
    word = "highest" if high else "lowest"
    if others <= 0:
        place = f"the {word} of {position.known:,} {noun}"
    elif others < position.known / 100:
        place = f"among the {others + 1:,} {word} of {position.known:,} {noun}"
    else:
        beaten = (position.below if high else position.above) / position.known
        place = f"{'higher' if high else 'lower'} than {percent(beaten)} of {position.known:,} {noun}"
    return f"{middle}, {edge}; {place}"
