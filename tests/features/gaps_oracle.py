"""The groups ``gaps`` and ``workload`` in plain, slow Python: one unit, one decision time; minutes throughout."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import numpy as np

from features.vocabulary import format_window

Sample = dict  # "minute" and a value or None by channel


@dataclass(frozen=True)
class Asked:
    """What the columns are made of: windows ascending, the dataset's step, the delay, and the channels by their use."""

    windows: tuple[int, ...]
    step: int
    delay: int
    watched: Sequence[str]
    gauges: Sequence[str]

    @property
    def look_back(self) -> int:
        return 2 * self.windows[-1]

    @property
    def larger(self) -> tuple[int, ...]:
        return self.windows[1:] or self.windows


def plain(samples: Sequence[Sample], border: float, since: float, query: Asked) -> dict[str, float]:
    """Every column but the node's, by name, from the samples of one unit in ascending time."""
    visible = [s for s in samples if 0 <= border - s["minute"] < query.look_back]
    small, large = query.windows[0], query.windows[-1]
    out = {}
    for window in query.windows:
        inside = [s for s in visible if border - s["minute"] < window]
        expected = min(window, border - since) // query.step
        missing = 1 - len(inside) / expected if expected > 0 else np.nan
        out[f"gaps__samples__missing__{_name(window)}"] = np.clip(missing, 0, 1)
    inside = [s["minute"] for s in visible if border - s["minute"] < large]
    start = border - min(large, max(border - since, 0))
    edges = [min(start, *inside), *inside, border] if inside else [start, border]
    out[f"gaps__samples__longest_gap__{_name(large)}"] = max(b - a for a, b in pairwise(edges)) / 60
    age = border - visible[-1]["minute"] if visible else query.look_back
    out["gaps__samples__age"] = (age + query.delay) / 60
    for window in query.larger:
        near = _steps(visible, border, window)
        repeated = [_same(a, b, query.gauges) for a, b in near]
        out[f"gaps__samples__repeated__{_name(window)}"] = np.mean(repeated) if near else np.nan
    now = {n for s in visible if border - s["minute"] < small for n in query.watched if s.get(n) is not None}
    reported = {n for s in visible if border - s["minute"] >= small for n in query.watched if s.get(n) is not None}
    out[f"gaps__channels__vanished__{_name(small)}"] = len(reported - now)
    return out | _workload(visible, border, query)


def _workload(visible, border, query):
    out = {}
    with_load = [s for s in visible if s.get("gpu_util_pct") is not None]
    powered = [s for s in visible if s.get("power_w") is not None]
    for window in query.larger:
        named = _name(window)
        levels = [s["gpu_util_pct"] for s in with_load if border - s["minute"] < window]
        out[f"workload__gpu_util_pct__idle_share__{named}"] = np.mean([u < 5 for u in levels]) if levels else np.nan
        out[f"workload__gpu_util_pct__busy_share__{named}"] = np.mean([u >= 80 for u in levels]) if levels else np.nan
        turns = [(a["gpu_util_pct"] < 5) != (b["gpu_util_pct"] < 5) for a, b in _steps(with_load, border, window)]
        out[f"workload__gpu_util_pct__transitions__{named}"] = sum(turns) if levels else np.nan
        moves = [abs(a["power_w"] - b["power_w"]) for a, b in _steps(powered, border, window)]
        out[f"workload__power_w__step_change__{named}"] = np.mean(moves) if moves else np.nan
    swing = {}
    for window in (query.windows[0], query.windows[-1]):
        inside = [s for s in visible if border - s["minute"] < window]
        lows = [s["power_w"] for s in inside if s.get("power_w") is not None]
        highs = lows + [s["power_w_max"] for s in inside if s.get("power_w_max") is not None]
        swing[window] = max(highs) - min(lows) if lows and max(highs) >= min(lows) else np.nan
    small, large = swing[query.windows[0]], swing[query.windows[-1]]
    out[f"workload__power_w__swing__{_name(query.windows[0])}"] = small
    out[f"workload__power_w__swing_ratio__{_name(query.windows[-1])}"] = small / large if large else np.nan
    return out


def _steps(samples, border, window):
    return [(a, b) for a, b in pairwise(samples) if border - b["minute"] < window]


def _name(minutes):
    return format_window(timedelta(minutes=minutes))


def _same(a, b, gauges):
    known = [n for n in gauges if a.get(n) is not None or b.get(n) is not None]
    return bool(known) and all(a.get(n) == b.get(n) for n in known)
