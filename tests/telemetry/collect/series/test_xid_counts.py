"""XID counts: what is skipped for speed changes nothing, and spans may be cut anywhere."""

from datetime import timedelta

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.series.identity import XidCount
from telemetry.collect.series.xid_counts import FORGOTTEN_AFTER_MS, XidCounts

MINUTE = 60_000
counts = st.dictionaries(st.integers(0, 90), st.integers(0, 3), max_size=25)
SeriesSamples = list[tuple[int, str, str]]


def slowly(series: list[dict[int, int]], watched_minutes: set[int]) -> SeriesSamples:
    """Every sample looked at, one after the other."""
    rises: SeriesSamples = []
    for number, samples in enumerate(series):
        last: tuple[int, int] | None = None
        for minute, count in sorted(samples.items()):
            before: int | None = None
            if last is not None and (minute - last[0]) * MINUTE <= FORGOTTEN_AFTER_MS:
                before = last[1]
            elif any(0 < (minute - other) * MINUTE <= FORGOTTEN_AFTER_MS for other in watched_minutes):
                before = 0
            elif last is not None:
                before = last[1]
            if before is not None and count > before:
                rises.append((minute * MINUTE, f"GPU-{number % 2}", str(31 + number)))
            last = (minute, count)
    return sorted(rises)


def follow(series: list[dict[int, int]], watched: set[int], cuts: list[int], *, saved: bool) -> SeriesSamples:
    follower = XidCounts(timedelta(minutes=10))
    rises: SeriesSamples = []
    for after, until in zip([-1, *cuts], [*cuts, 200], strict=True):
        names, index, ms, values = [], [], [], []
        for number, samples in enumerate(series):
            names.append(XidCount(f"GPU-{number % 2}", "n1", 31 + number))
            for minute, count in samples.items():
                if after < minute <= until:
                    index.append(number)
                    ms.append(minute * MINUTE)
                    values.append(count)
        seen = [minute for minute in watched if after < minute <= until]
        spans = {f"GPU-{n}": (min(seen) * MINUTE, max(seen) * MINUTE) for n in (0, 1)} if seen else {}
        table = follower.follow(
            names, np.array(index, np.int32), np.array(ms, np.int64), np.array(values, np.float64), watched=spans
        ).to_pylist()
        rises += [(int(row["timestamp"].timestamp() * 1000), row["gpu"], row["code"]) for row in table]
        if saved:
            follower = XidCounts(timedelta(minutes=10), follower.as_state())
    return sorted(rises)


@given(st.lists(counts, min_size=1, max_size=3), st.lists(st.integers(0, 95), max_size=4), st.booleans())
def test_events_are_those_of_looking_at_every_sample(
    series: list[dict[int, int]], cuts: list[int], saved: bool
) -> None:
    watched = set(range(96))  # a GPU that is always there
    assert follow(series, watched, sorted(set(cuts)), saved=saved) == slowly(series, watched)
