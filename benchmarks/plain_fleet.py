"""The groups ``peers`` and ``onset`` in slow, plain NumPy: some nodes held against a whole fleet at one decision time.

For generated fleets: nobody moves or leaves, and no driver changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np
import pandas as pd

from features.groups.onset import ALL, MIN_UNITS, QUANTILE
from features.matrix.matrix import FeatureMatrix
from features.times import duration_ms, instant_ms
from telemetry.dataset.store import Dataset
from tests.features.window_oracle import BITS

Values = tuple[dict[str, float], dict[str, float]]
"""A row's values by column, and what near zero means for a column, where that is more than one."""

_MS = timedelta(milliseconds=1)


def compared(dataset: Dataset, matrix: FeatureMatrix, t: datetime, nodes: Sequence[str]) -> dict[str, Values]:
    """Give the values of the GPUs of some nodes at a decision time of the grid, by GPU."""
    inventory = dataset.inventory()
    place = pd.DataFrame({"node": inventory["node"].astype(str), "model": inventory["model"].astype(str)})
    place.index = pd.Index(inventory["gpu"].astype(str))
    amounts = _amounts(dataset, matrix, t, list(place.index))
    here = place.index[place["node"].isin(nodes)]
    there = matrix.rows[(matrix.rows["decision_time"] == t) & ~matrix.rows["augmented"]]["gpu"].astype(str)
    return {gpu: _row(matrix, gpu, place, amounts, set(there)) for gpu in here}


def _amounts(dataset: Dataset, matrix: FeatureMatrix, t: datetime, gpus: Sequence[str]) -> pd.DataFrame:
    """Read what peers and onset compare: a row a GPU, a column a (group, channel, window in ms)."""
    features = matrix.config.features
    border = t - features.delay
    spans = sorted({span for pair in features.onset for span in pair})
    reach = max(2 * features.peer_window, spans[-1])
    channels = dataset.meta.channels
    peers = list(dict.fromkeys(str(each.channel) for each in matrix.columns if each.group == "peers"))
    surges = list(dict.fromkeys(str(each.channel) for each in matrix.columns if each.statistic == "surge"))
    read = sorted({BITS.get(name, (name, 0))[0] for name in (*peers, *surges)})
    found: dict[str, dict[tuple[str, str, int], float]] = {gpu: {} for gpu in gpus}
    for bucket in dataset.buckets():
        table = dataset.read_bucket(bucket, ["timestamp", "gpu", *read], since=border - reach + _MS, until=border + _MS)
        frame = table.to_pandas()
        for gpu, own in frame.groupby(frame["gpu"].astype(str)):
            ages = instant_ms(border) - own["timestamp"].dt.as_unit("ms").astype("int64").to_numpy()
            told = found[str(gpu)]
            window = duration_ms(features.peer_window)
            for name in peers:
                values = own[name].to_numpy(np.float64)
                if channels[name].kind == "gauge":
                    inside = values[(ages < window) & ~np.isnan(values)]
                    told["peers", name, window] = float(np.mean(inside)) if len(inside) else math.nan
                else:
                    near = ages < 2 * window
                    told["peers", name, window] = _rise(ages[near], values[near], window, alone=math.nan)
            for name in surges:
                channel, mask = BITS.get(name, (name, 0))
                values = own[channel].to_numpy(np.float64)
                for span in map(duration_ms, spans):
                    if mask:  # how many samples have the bit, of as many as the span has room for
                        bits = values[(ages < span) & ~np.isnan(values)].astype(np.int64)
                        share = float(np.mean((bits & mask) != 0)) if len(bits) else math.nan
                        told["onset", name, span] = share * span / duration_ms(matrix.config.step)
                    else:
                        near = ages < duration_ms(spans[-1])
                        told["onset", name, span] = _rise(ages[near], values[near], span, alone=0.0)
    return pd.DataFrame.from_dict(found, orient="index")


def _rise(ages: np.ndarray, values: np.ndarray, window: int, *, alone: float) -> float:
    """Sum up what a counter rose by, given ages in ms (descending); ``alone``: where there is one value to go by."""
    known = ~np.isnan(values)
    ages, values = ages[known], values[known]
    if not (ages < window).any():
        return math.nan
    steps = np.diff(values)
    chosen = np.where(steps >= 0, steps, values[1:])[ages[1:] < window]
    return float(chosen.sum()) if len(chosen) else alone


def _row(matrix: FeatureMatrix, gpu: str, place: pd.DataFrame, amounts: pd.DataFrame, there: set[str]) -> Values:
    found: dict[str, float] = {}
    sizes: dict[str, float] = {}
    here, model = place["node"] == place.at[gpu, "node"], place["model"] == place.at[gpu, "model"]
    others = place.index[here & (place.index != gpu)]
    window = duration_ms(matrix.config.features.peer_window)
    for column in matrix.columns:
        if column.group != "peers":
            continue
        every = amounts["peers", str(column.channel), window]
        own = every[gpu]
        if column.statistic == "node_rank":
            beside = every[others].dropna()
            below = [0.5 if value == own else float(value < own) for value in beside]
            found[column.name] = float(np.mean(below)) if below and not math.isnan(own) else math.nan
        else:
            beside = every[others if column.statistic == "node_deviation" else place.index[model]].dropna()
            found[column.name] = own - float(np.median(beside)) if len(beside) else math.nan
            sizes[column.name] = max(1.0, abs(own))
    alike = [each for each in place.index[model] if each in there]
    for span, past in matrix.config.features.onset:
        surges, excesses = [], []
        name = ""
        for column in matrix.columns:
            if column.statistic != "surge" or column.window != span:
                continue
            logs = np.log1p(amounts["onset", str(column.channel), duration_ms(span)])
            kinds = [logs[alike].dropna(), logs[sorted(there)].dropna()]
            usual = next((np.quantile(each, QUANTILE) for each in kinds if len(each) >= MIN_UNITS), math.nan)
            now = amounts.at[gpu, ("onset", str(column.channel), duration_ms(span))]
            before = max(amounts.at[gpu, ("onset", str(column.channel), duration_ms(past))] - now, 0.0)
            excesses.append(logs[gpu] - usual)
            surges.append(min(excesses[-1], logs[gpu] - math.log1p(before / ((past - span) / span))))
            found[column.name], name = surges[-1], column.name.rpartition("__")[2]
        for what, values in (("surge", surges), ("excess", excesses)) if surges else ():
            known = [value for value in values if not math.isnan(value)]
            found[f"onset__{ALL}__{what}_max__{name}"] = max(known) if known else math.nan
            found[f"onset__{ALL}__{what}_sum__{name}"] = sum(max(each, 0.0) for each in known) if known else math.nan
    # logs are of a few, which float32 holds to 1e-6
    sizes |= {name: 10.0 for name in found if name.startswith("onset__")}
    return found, sizes
