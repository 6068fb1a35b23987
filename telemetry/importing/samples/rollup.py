"""Deduplicates rows by unit and time, and downsamples finer data to the dataset's step.

Cells are right-closed and labeled by their end: the cell 00:10 holds the raw samples in (00:00, 00:10]. A label at the
start would leak samples from after the timestamp of the row.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.dataset.channels import ROLLUP_SUFFIXES, Channel
from telemetry.importing.samples.block import Block, ChannelValues

FINER_THAN = 0.9
"""A unit is rolled up if its median sampling interval is below this fraction of the step; allows for scrape jitter."""

IMPOSSIBLE_RISE: Final = "an impossible rise of a counter"
STALE: Final = "stale: a counter went back to an earlier value"

_SHORTEST_MS: Final = 60_000
"""Minimum interval for the rate check: exporters cache values, so a counter may jump by a minute's increase."""

_CACHED_MS: Final = 90_000
# Age of the values that a working exporter may serve.
_STALE_MS: Final = 3_600_000
# A counter that has counted on below an earlier value for longer has restarted at another value than zero.


def cell_end(ms: npt.NDArray[np.int64], step_ms: int) -> npt.NDArray[np.int64]:
    """Return the cell end of each timestamp (ms)."""
    return -(-ms // step_ms) * step_ms


def median_gaps(unit: npt.NDArray[Any], ms: npt.NDArray[np.int64]) -> pd.Series:
    """Return the median sampling interval (ms) by unit code, for units with at least two distinct timestamps."""
    order = np.lexsort((ms, unit))
    gaps, codes = np.diff(ms[order]), unit[order]
    is_gap = (codes[1:] == codes[:-1]) & (gaps > 0)
    return pd.Series(gaps[is_gap]).groupby(codes[1:][is_gap]).median()


def finer_units(unit: npt.NDArray[np.int32], ms: npt.NDArray[np.int64], step_ms: int) -> npt.NDArray[np.int32]:
    """Return the codes of units sampled more often than the step; repeated timestamps count once."""
    medians = median_gaps(unit, ms)
    return medians.index[medians < FINER_THAN * step_ms].to_numpy(np.int32)


def impossible_rises(
    values: npt.NDArray[np.float64],
    valid: npt.NDArray[np.bool_],
    unit: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    max_rise_per_s: float,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Mark counter values, sorted by (unit, time), that rise faster than possible since the last valid one.

    A counter that falls has restarted at zero. The allowed rise grows with the time since the last valid value, so that
    a real jump is accepted eventually. Shapes (n,).
    Returns: the mask of impossible values; of those among them that fell within an hour and are older than the last
    valid one; and the values, where the last valid one replaces a value that another source has cached.
    """
    masks = np.zeros((2, len(values)), np.bool_)
    plausible = values.astype(np.float64)
    reported = np.flatnonzero(valid)
    if len(reported) < 2:
        return masks[0], masks[1], plausible
    numbers, units, times = plausible[reported], unit[reported], ms[reported]
    refused, stale = np.zeros((2, len(reported)), np.bool_)
    same = units[1:] == units[:-1]
    per_ms = max_rise_per_s / 1000
    rises = np.where(np.diff(numbers) < 0, numbers[1:], np.diff(numbers))
    fast = same & (rises > per_ms * np.maximum(np.diff(times), _SHORTEST_MS))
    for place in (np.flatnonzero(fast) + 1).tolist():
        if refused[place]:
            continue
        # After an impossible value, compare with the last valid one until the counter is plausible again.
        previous = place - 1
        while refused[previous]:
            previous -= 1
        current = place
        while current < len(numbers) and units[current] == units[previous]:
            has_fallen, gap_ms = numbers[current] < numbers[previous], int(times[current] - times[previous])
            rise = numbers[current] - (0 if has_fallen else numbers[previous])
            counts_anew = has_fallen and numbers[current] > numbers[place]
            if rise <= per_ms * max(gap_ms, _SHORTEST_MS) or (counts_anew and gap_ms > _STALE_MS):
                if counts_anew:  # the counter has restarted, at another value than zero
                    refused[place:current] = numbers[place:current] >= numbers[previous]
                    stale[place:current] = False
                break
            if has_fallen and _is_cached(current, previous, numbers, times, units, refused):
                numbers[current] = numbers[previous]
            else:
                refused[current] = True
                stale[current] = has_fallen and gap_ms <= _STALE_MS
            current += 1
    masks[:, reported], plausible[reported] = (refused, stale), numbers
    return masks[0], masks[1], plausible


def _is_cached(
    current: int,
    previous: int,
    numbers: npt.NDArray[np.float64],
    times: npt.NDArray[np.int64],
    units: npt.NDArray[np.int32],
    refused: npt.NDArray[np.bool_],
) -> bool:
    """Return whether a counter had a value at most :data:`_CACHED_MS` earlier; between two values it rises evenly."""
    newer, older = previous, previous - 1
    while older >= 0 and units[older] == units[current] and times[current] - times[newer] <= _CACHED_MS:
        if not refused[older]:
            if numbers[older] <= numbers[current]:
                share = (numbers[newer] - numbers[current]) / (numbers[newer] - numbers[older])
                expected = times[newer] - share * (times[newer] - times[older])
                return bool(times[current] - expected <= _CACHED_MS)
            newer = older
        older -= 1
    return False


def reset_aware_rise(
    values: npt.NDArray[np.float64], valid: npt.NDArray[np.bool_], unit: npt.NDArray[np.int32]
) -> ChannelValues:
    """Return the increase of a counter, sorted by (unit, time), since the unit's previous value.

    Not valid at a unit's first value and where the counter is missing. A decrease is a reset, so the increase is the
    new value.
    """
    reported = np.flatnonzero(valid)
    rise = np.zeros(len(values), np.float64)
    known = np.zeros(len(values), dtype=bool)
    if len(reported) > 1:
        current, previous = reported[1:], reported[:-1]
        same = unit[current] == unit[previous]
        current, previous = current[same], previous[same]
        change = values[current] - values[previous]
        rise[current] = np.where(change >= 0, change, values[current])
        known[current] = True
    return ChannelValues(rise, known)


def rises_after_insertion(
    counter: ChannelValues, stored: ChannelValues, unit: npt.NDArray[np.int32], has_stored: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Return the stored rises minus the part now covered by rows inserted before them; never negative.

    ``counter``: values of stored and new rows, sorted by (unit, time); ``has_stored`` marks rows with a stored counter.

    Only the first stored row after new ones changes: its rise was relative to the previous stored row, and is now
    relative to the last new one. A stored row may be a whole step, of which only the last value and the rise are known,
    so the position of a reset is inferred: among the new rows if they decrease; after them if the stored rise started
    at zero or would become negative. This is exact for one reset in a gap, not for several.
    """
    rises = stored.values.astype(np.float64)
    reported = np.flatnonzero(counter.valid)
    if len(reported) < 2:
        return rises
    values = counter.values.astype(np.float64)
    same = unit[reported[1:]] == unit[reported[:-1]]
    after = 1 + np.flatnonzero(
        same & has_stored[reported[1:]] & ~has_stored[reported[:-1]] & stored.valid[reported[1:]]
    )
    last_stored = np.maximum.accumulate(np.where(has_stored[reported], np.arange(len(reported)), -1))
    falls = np.cumsum(np.concatenate(([False], same & (np.diff(values[reported]) < 0))))
    row, previous = reported[after], last_stored[after - 1]
    known = (previous >= 0) & (unit[reported[previous]] == unit[row])
    value, rise, latest = values[row], rises[row], values[reported[after - 1]]
    level = np.where(known, values[reported[previous]], np.maximum(value - rise, 0.0))
    slack = 1e-6 * np.maximum(np.abs(rise), 1.0)  # rises are stored as float32
    from_zero = known & (np.abs(value - rise) <= slack) & (np.abs(value - level - rise) > slack)
    fell = known & (falls[after - 1] > falls[previous])
    remaining_rise = np.where(fell, value - latest, np.where(from_zero, value, rise - (latest - level)))
    rises[row] = np.where(remaining_rise < -slack, value, np.maximum(remaining_rise, 0.0))
    return rises


def add_rollup_columns(
    block: Block, channels: Mapping[str, Channel], has_stored: Mapping[str, npt.NDArray[np.bool_]] | None = None
) -> None:
    """Fill missing ``X_min``, ``X_max`` and ``X_rise`` values in place.

    ``block``: sorted by (unit, ms), with series for every roll-up in ``channels``.
    ``has_stored``: by counter, the rows whose value is already stored; see :func:`rises_after_insertion`.
    """
    for channel in channels.values():
        for suffix in ROLLUP_SUFFIXES[channel.kind]:
            derived = block.series.get(channel.name + suffix)
            if derived is None:
                continue
            base = block.series[channel.name]
            known = derived.valid
            if suffix == "_rise":
                rise = reset_aware_rise(base.values.astype(np.float64), base.valid, block.unit)
                stored = derived.values.astype(np.float64)
                if has_stored is not None and channel.name in has_stored:
                    stored = rises_after_insertion(base, derived, block.unit, has_stored[channel.name])
                block.series[channel.name + suffix] = ChannelValues(
                    np.where(known, stored, rise.values), known | rise.valid
                )
            else:
                values = np.where(known, derived.values, base.values)
                block.series[channel.name + suffix] = ChannelValues(values, known | base.valid)


def roll_up(block: Block, channels: Mapping[str, Channel], rolled: npt.NDArray[np.bool_], step_ms: int) -> Block:
    """Downsample the rows marked by ``rolled`` to the step; ``block`` is sorted by (unit, ms).

    Gauges become the mean weighted by the number of raw samples, ``X_min`` and ``X_max`` the extremes, counters and
    enums the last value, ``X_rise`` and ``count`` the sum, and flags the bitwise OR.
    """
    if len(block) == 0:
        return block
    end = np.where(rolled, cell_end(block.ms, step_ms), block.ms)
    fresh = np.ones(len(block), dtype=bool)
    fresh[1:] = (block.unit[1:] != block.unit[:-1]) | (end[1:] != end[:-1]) | ~(rolled[1:] & rolled[:-1])
    start = np.flatnonzero(fresh)
    last = np.append(start[1:], len(block)) - 1
    base_of = {
        channel.name + suffix: suffix for channel in channels.values() for suffix in ROLLUP_SUFFIXES[channel.kind]
    }
    series = {
        name: _reduce(values, channels[name], base_of.get(name, ""), block.count, start)
        for name, values in block.series.items()
    }
    return Block(
        unit=block.unit[start],
        node=block.node[last],
        ms=end[start],
        order=block.order[start],
        mig=block.mig[start],
        count=np.add.reduceat(block.count, start).astype(np.int32),
        series=series,
    )


def _reduce(
    raw: ChannelValues, channel: Channel, suffix: str, count: npt.NDArray[np.int32], start: npt.NDArray[np.int64]
) -> ChannelValues:
    valid = np.logical_or.reduceat(raw.valid, start)
    values: npt.NDArray[np.generic]
    if suffix in ("_min", "_max"):
        worst = np.float32(np.inf if suffix == "_min" else -np.inf)
        pick = np.minimum if suffix == "_min" else np.maximum
        values = pick.reduceat(np.where(raw.valid, raw.values, worst), start)
    elif suffix == "_rise":
        values = np.add.reduceat(np.where(raw.valid, raw.values, 0).astype(np.float64), start).astype(np.float32)
    elif channel.kind == "flags":
        values = np.bitwise_or.reduceat(np.where(raw.valid, raw.values, np.uint64(0)), start)
    elif channel.kind == "gauge":
        weight = np.where(raw.valid, count, 0).astype(np.float64)
        total = np.add.reduceat(np.where(raw.valid, raw.values, 0).astype(np.float64) * weight, start)
        weights = np.add.reduceat(weight, start)
        values = (total / np.where(valid, weights, 1.0)).astype(np.float32)
    else:
        position = np.where(raw.valid, np.arange(len(raw.valid)), -1)
        newest = np.maximum.reduceat(position, start)
        values = raw.values[np.clip(newest, 0, None)]
    return ChannelValues(np.where(valid, values, np.zeros(1, values.dtype)), valid)


def merge_duplicates(block: Block) -> tuple[Block, int, npt.NDArray[np.int64]]:
    """Deduplicate by (unit, time); ``block`` is sorted by (unit, ms, order).

    The first row of a key is kept (stored rows first, then by file and row), and later rows fill in missing channels,
    which allows one file per metric. A row that contradicts an earlier value is quarantined as a whole. MIG instances
    do not conflict: the parent gets the maximum of gauges, counters and enums and the OR of flags, unless the GPU's
    own row reports the channel.

    Returns: the rows, the number of exact repeats, and the orders of conflicting rows.
    """
    start, group = _keys(block)
    if len(start) == len(block):
        return block, 0, np.empty(0, np.int64)
    block = block.take(np.lexsort((block.mig, group)))  # the GPU's own rows before those of MIG instances
    conflict = np.zeros(len(block), dtype=bool)
    for series in block.series.values():
        first = np.minimum(_first_own(series, block.mig, start), len(block) - 1)
        conflict |= series.valid & ~block.mig & (series.values != series.values[first][group])
    conflicting = block.order[conflict]
    block = block.take(np.flatnonzero(~conflict))
    start, group = _keys(block)
    merged = block.take(start)
    merged.count = np.maximum.reduceat(block.count, start)
    repeats = np.ones(len(block), dtype=bool)
    repeats[start] = False
    for name, series in block.series.items():
        first = _first_own(series, block.mig, start)
        has_own = first < len(block)
        repeats[first[has_own]] = False
        repeats &= ~(series.valid & ~has_own[group])
        first_values = series.values[np.minimum(first, len(block) - 1)]
        values = np.where(has_own, first_values, _highest(series, start)) if block.mig.any() else first_values
        valid = np.logical_or.reduceat(series.valid, start)
        merged.series[name] = ChannelValues(np.where(valid, values, np.zeros(1, values.dtype)), valid)
    return merged, int(repeats.sum()), conflicting


def _keys(block: Block) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first row of each key, and the key index of each row."""
    fresh = np.ones(len(block), dtype=bool)
    fresh[1:] = (block.unit[1:] != block.unit[:-1]) | (block.ms[1:] != block.ms[:-1])
    return np.flatnonzero(fresh), np.cumsum(fresh) - 1


def _first_own(
    series: ChannelValues, mig: npt.NDArray[np.bool_], start: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the first row per key in which the GPU itself reports the channel, ``len(mig)`` if none does."""
    rows = np.arange(len(mig))
    return np.minimum.reduceat(np.where(series.valid & ~mig, rows, len(mig)), start)


def _highest(series: ChannelValues, start: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    if np.issubdtype(series.values.dtype, np.unsignedinteger):
        return np.bitwise_or.reduceat(np.where(series.valid, series.values, np.uint64(0)), start)
    return np.maximum.reduceat(np.where(series.valid, series.values, series.values.min()), start)
