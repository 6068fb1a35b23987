"""The window statistics in plain, slow Python: one unit, one decision time, one column."""

import math
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import numpy as np

from features.vocabulary import FeatureColumn
from features.windows.window_plan import FLAG_BITS

NAN = math.nan
Sample = dict  # "time" (ms) and a value or None by channel

BITS = {f"{channel}_{part}": (channel, mask) for channel, parts in FLAG_BITS.items() for part, mask in parts}
"""Bitmask and bits by the channel name of a column that is made of some of its bits."""


def ms(span: timedelta) -> int:
    return round(span.total_seconds() * 1000)


def statistic(
    column: FeatureColumn, samples: Sequence[Sample], border: int, look_back: int, bits: dict[str, tuple[str, int]]
) -> float:
    """Compute one column's value from one unit's samples in ascending time."""
    samples_seen = [sample for sample in samples if 0 <= border - sample["time"] < look_back]
    window = ms(column.window)
    inside = [sample for sample in samples_seen if border - sample["time"] < window]
    earlier = [sample for sample in samples_seen if window <= border - sample["time"] < 2 * window]
    name = str(column.channel)
    return _STATISTICS[column.statistic](name, inside, earlier, samples_seen, border, window, bits)


def _known(name, samples):
    return [float(sample[name]) for sample in samples if sample.get(name) is not None]


def _last(name, inside, earlier, samples_seen, border, window, bits):
    if name.endswith("_total"):  # a level that persists: no age limit
        inside = samples_seen
    values = _known(name, inside)
    return values[-1] if values else NAN


def _mean(name, inside, *rest):
    values = _known(name, inside)
    return float(np.mean(values)) if values else NAN


def _std(name, inside, *rest):
    values = _known(name, inside)
    return float(np.std(values, ddof=1)) if len(values) > 1 else NAN


def _min(name, inside, *rest):
    values = _known(name, inside) + _known(name + "_min", inside)
    return min(values) if values else NAN


def _max(name, inside, *rest):
    values = _known(name, inside) + _known(name + "_max", inside)
    return max(values) if values else NAN


def _slope(name, inside, *rest):
    points = [(sample["time"] / 3_600_000, float(sample[name])) for sample in inside if sample.get(name) is not None]
    if len(points) < 2:
        return NAN
    hours, values = np.array(points).T
    hours = hours - hours.mean()
    return float((hours * (values - values.mean())).sum() / (hours**2).sum())


def _delta(name, inside, earlier, *rest):
    return _mean(name, inside) - _mean(name, earlier)


def _rises(name, samples_seen):
    """(time, rise) of each step, at the newer sample's time."""
    steps = []
    previous = None
    pending = []  # rises told by samples without a value, which the next value's step may cover
    for sample in samples_seen:
        value, rise = sample.get(name), sample.get(name + "_rise")
        if value is None:
            if rise is not None:
                pending.append((sample["time"], float(rise)))
            continue
        if rise is not None:
            steps += pending
            steps.append((sample["time"], float(rise)))
        elif previous is not None:
            steps.append((sample["time"], float(value - previous if value >= previous else value)))
        elif pending:
            pass  # a step of unknown size spans them
        pending = []
        previous = value
    return steps + pending


def _rise_of(name, samples_seen, chosen):
    times = {sample["time"] for sample in chosen}
    steps = [rise for time, rise in _rises(name, samples_seen) if time in times]
    return sum(steps) if steps else NAN


def _rise(name, inside, earlier, samples_seen, *rest):
    return _rise_of(name, samples_seen, inside)


def _rise_delta(name, inside, earlier, samples_seen, *rest):
    return _rise_of(name, samples_seen, inside) - _rise_of(name, samples_seen, earlier)


def _changes(name, inside, earlier, samples_seen, *rest):
    times = {sample["time"] for sample in inside}
    known = [(sample["time"], sample[name]) for sample in samples_seen if sample.get(name) is not None]
    if not any(time in times for time, _ in known):
        return NAN
    return float(sum(a[1] != b[1] and b[0] in times for a, b in pairwise(known)))


def _share(name, inside, earlier, samples_seen, border, window, bits):
    channel, mask = bits.get(name, (name, 2**64 - 1))
    values = [int(sample[channel]) for sample in inside if sample.get(channel) is not None]
    return sum((value & mask) != 0 for value in values) / len(values) if values else NAN


_STATISTICS = {
    "last": _last,
    "mean": _mean,
    "std": _std,
    "min": _min,
    "max": _max,
    "slope": _slope,
    "delta": _delta,
    "rise": _rise,
    "rise_delta": _rise_delta,
    "changes": _changes,
    "share": _share,
}
