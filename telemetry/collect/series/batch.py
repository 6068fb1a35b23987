"""From the samples of a span of time to the tables that land: rows of channels, sights of GPUs, XID events."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.identity import Series, XidCount
from telemetry.collect.series.inventory import first_and_last, observed_spans
from telemetry.collect.series.rows import assemble
from telemetry.collect.series.xid_counts import XidCounts


class Tables(NamedTuple):
    """What samples of one span hold, in the layouts in which it lands."""

    inventory: pa.Table
    events: pa.Table
    samples: pa.Table


def read_batch(
    entries: Sequence[Series | XidCount],
    index: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    *,
    xids: XidCounts,
    problems: MutableMapping[str, int],
) -> Tables:
    """Make tables of samples: ``index``, ``ms``, ``values`` are the entry, time and value of each; shape (n,).

    ``xids`` follows the counts, so batches come in the order of time; ``problems`` counts values without a use.
    """
    used, place = np.unique(index, return_inverse=True)
    chosen = [entries[number] for number in used.tolist()]
    series = [entry for entry in chosen if isinstance(entry, Series)]
    counts = [entry for entry in chosen if isinstance(entry, XidCount)]
    is_count = np.array([isinstance(entry, XidCount) for entry in chosen], np.bool_)
    number = (np.where(is_count, np.cumsum(is_count), np.cumsum(~is_count)) - 1)[place].astype(np.int32)
    of_series = ~is_count[place]
    watched: dict[str, tuple[int, int]] = {}
    for at, (low, high) in first_and_last(series, number[of_series], ms[of_series]).items():
        held = watched.get(series[at].gpu, (low, high))
        watched[series[at].gpu] = (min(held[0], low), max(held[1], high))
    samples = assemble(series, number[of_series], ms[of_series], values[of_series], problems=problems)
    inventory = observed_spans(series, number[of_series], ms[of_series])
    # Last: what is followed once is not told again if something before it fails.
    events = xids.follow(counts, number[~of_series], ms[~of_series], values[~of_series], watched=watched)
    return Tables(inventory, events, samples)
