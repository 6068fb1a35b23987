"""Detection of telemetry that was collected because of failures, which would make any evaluation circular.

A dataset of windows cut around incidents, or of nodes monitored only once they had failed, holds far more failures per
day than the fleet. In such data the start of telemetry is itself a sign of a failure, and precision is meaningless.

Three tests at significance level :data:`LEVEL`, in UTC days, on nodes rather than GPUs:

* Coverage. Of the failures from sources that also report failures without telemetry, more fall on days with telemetry
  than by chance. The chance of a failure is the higher of two shares: of the node's own days with telemetry, and of the
  other nodes with telemetry on that day. Neither nodes that are monitored more closely nor a collector rolled out to
  all nodes at once raise a false alarm, however failure rates differ between nodes or over time.
* Windows. Nodes have telemetry on less than half of their days, most other nodes have none on those days, and more
  windows of telemetry (gaps up to :data:`OUTAGE` days do not split one) contain a failure than if each node failed
  every :data:`MTBF_DAYS` days.
* Starts. More nodes start reporting within :data:`MAX_DAYS_AFTER` days after a failure than by chance.
"""

from datetime import date
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc

from features.config import LabelSection
from features.labels.evidence import CONDITIONAL_XIDS, xid_classes
from telemetry.dataset.store import Dataset

LEVEL: Final = 0.001
"""Significance level of each test: upper limit of its false-positive rate."""

OUTAGE: Final = 31
"""Days. A gap up to this long does not split a window, and a node's failures within it count once. In StepFun's
InfiniteHBD trace, 95 % of repairs take less."""

MTBF_DAYS: Final = 60.0
"""Mean days between failures of one node, below that of any fleet in service: Llama 3's eight-GPU H100 nodes had about
260."""

MAX_DAYS_AFTER: Final = 3
"""Longest time from a failure to a start of telemetry that is attributed to it, in days."""

_SPARSE: Final = 0.5
_MAX_ROWS: Final = 40_000_000
_MIN_FAILURES: Final = 3

_EPOCH: Final = date(1970, 1, 1).toordinal()

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def examine_selection(dataset: Dataset, labels: LabelSection) -> tuple[str, ...]:
    """Test a dataset for selection; return the reasons to assume it, empty if no test is significant.

    Reads buckets up to :data:`_MAX_ROWS` samples in total; each bucket is a random share of the nodes.
    """
    first, last = (instant.date().toordinal() for instant in dataset.meta.span)
    inventory, sizes = dataset.inventory(), dataset.meta.counts["samples_by_bucket"]
    buckets: list[int] = []
    rows = 0
    for bucket in dataset.buckets():
        if not buckets or rows + int(sizes[str(bucket)]) <= _MAX_ROWS:
            buckets.append(bucket)
            rows += int(sizes[str(bucket)])
    nodes = pd.Index(sorted(n for n in inventory["node"].dropna().unique() if dataset.bucket_of(n) in set(buckets)))
    days = last - first + 1
    present = np.zeros((len(nodes), days), dtype=bool)
    for bucket in buckets:
        for table in dataset.read_runs(bucket, ["node", "timestamp"]):
            day = pc.floor_temporal(table["timestamp"], unit="day")
            node_days = (
                table.select(["node"]).append_column("day", day).group_by(["node", "day"]).aggregate([]).to_pandas()
            )
            node, day = nodes.get_indexer(node_days["node"].astype("str")), _days(node_days["day"]) - first
            is_known = (node >= 0) & (day >= 0) & (day < days)
            present[node[is_known], day[is_known]] = True
    failures = _failures(dataset.events(), labels, nodes, first, days)
    if not present.any() or failures.empty:
        return ()
    return find_selection(present, _in_service(inventory, nodes, first, days) | present, failures)


def find_selection(present: Bools, service: Bools, failures: pd.DataFrame) -> tuple[str, ...]:
    """Run the three tests of :func:`examine_selection`.

    ``present``, ``service``: whether a node had telemetry, and was in service, on a day; shape (nodes, days).
    ``failures``: ``node`` and ``day`` (positions), ``source`` and ``timestamp``.
    """
    failures = failures.sort_values(["node", "day"], ignore_index=True)
    has_telemetry = present.copy()  # telemetry on the day or the day before
    has_telemetry[:, 1:] |= present[:, :-1]
    reasons = [
        *_by_coverage(has_telemetry, service, _separate(failures, ["node", "source"])),
        *_by_windows(present, service, failures),
        *_by_beginnings(present, service, failures),
    ]
    if not reasons:
        return ()
    single = _separate(failures, ["node"])
    share, covered = present.sum() / service.sum(), has_telemetry[single["node"], single["day"]].mean()
    return (f"telemetry covers {share:.0%} of node-days and {covered:.0%} of {len(single)} node failures", *reasons)


def _by_coverage(has_telemetry: Bools, service: Bools, failures: pd.DataFrame) -> list[str]:
    """Test the number of failures with telemetry, for sources that also report failures without it."""
    is_covered = has_telemetry[failures["node"], failures["day"]]
    missed = pd.Series(~is_covered).groupby(failures["source"].to_numpy()).transform("sum").to_numpy()
    usable = failures[missed >= _MIN_FAILURES].drop_duplicates("timestamp")  # one cause may fail many nodes
    node, day = usable["node"].to_numpy(), usable["day"].to_numpy()
    observed = has_telemetry & service
    coverage_elsewhere = (observed.sum(axis=0)[day] - observed[node, day]) / np.maximum(service.sum(axis=0)[day] - 1, 1)
    chance = np.maximum(observed.sum(axis=1)[node] / service.sum(axis=1)[node], coverage_elsewhere)
    hits = int(has_telemetry[node, day].sum())
    if hits < _MIN_FAILURES or hits < 2 * chance.sum() or _tail(chance, hits) >= LEVEL:
        return []
    return [f"of {len(usable)} failures known without telemetry, {hits} have telemetry ({chance.sum():.1f} by chance)"]


def _by_windows(present: Bools, service: Bools, failures: pd.DataFrame) -> list[str]:
    """Test the number of windows that contain a failure, if windows are sparse and differ between nodes."""
    node, day = np.nonzero(present)
    begins = np.r_[True, (np.diff(node) != 0) | (np.diff(day) > OUTAGE)]
    of, first, last = node[begins], day[begins], day[np.append(begins[1:], True)]
    coverage_elsewhere = (present.sum(axis=0)[day] - 1).mean() / max(present.shape[0] - 1, 1)
    length = last - first + 1
    if len(day) >= _SPARSE * service[np.unique(node)].sum() or coverage_elsewhere >= _SPARSE:
        return []
    width = present.shape[1] + 1
    window = np.searchsorted(of * width + first, failures["node"] * width + failures["day"], side="right") - 1
    window = np.maximum(window, 0)
    holds = (
        (of[window] == failures["node"]) & (first[window] <= failures["day"]) & (failures["day"] <= last[window] + 1)
    )
    hits = len(np.unique(window[holds]))
    if _tail(1 - np.exp(-length / MTBF_DAYS), hits) >= LEVEL:
        return []
    return [
        f"{hits} of {len(of)} windows of telemetry contain a failure of their node; they last {np.median(length):.0f} "
        "days (median), with a month or more between them"
    ]


def _by_beginnings(present: Bools, service: Bools, failures: pd.DataFrame) -> list[str]:
    """Test the number of nodes that start reporting just after a failure, long after entering service."""
    begin, since = present.argmax(axis=1), service.argmax(axis=1)
    is_late = present.any(axis=1) & (begin - since > OUTAGE)
    in_rollout = np.bincount(begin[is_late], minlength=present.shape[1])[begin] > _MIN_FAILURES
    nodes = np.flatnonzero(is_late & ~in_rollout)  # a rollout to many nodes at once is no response to a failure
    tied = np.zeros_like(present)  # days 1 to MAX_DAYS_AFTER after a failure
    for days_after in range(1, MAX_DAYS_AFTER + 1):
        day = failures["day"] + days_after
        tied[failures["node"][day < tied.shape[1]], day[day < tied.shape[1]]] = True
    hits = int(tied[nodes, begin[nodes]].sum())
    chance = np.array([tied[node, since[node] : begin[node] + 1].mean() for node in nodes])
    if hits < _MIN_FAILURES or _tail(chance, hits) >= LEVEL:
        return []
    return [
        f"{hits} of {len(nodes)} nodes that began to send late did so within {MAX_DAYS_AFTER} days after a failure "
        f"({chance.sum():.1f} by chance)"
    ]


def _tail(chance: Floats, hits: int) -> float:
    """Return the probability of at least ``hits`` successes (Poisson binomial distribution)."""
    exactly = np.zeros(len(chance) + 1)
    exactly[0] = 1.0
    for count, p in enumerate(chance):
        exactly[1 : count + 2] = exactly[1 : count + 2] * (1 - p) + exactly[: count + 1] * p
        exactly[0] *= 1 - p
    return float(exactly[hits:].sum())


def _separate(failures: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Drop failures within :data:`OUTAGE` days of the previous retained one of the same group."""
    selected: list[int] = []
    for _, days in failures.groupby(keys, sort=False)["day"]:
        newest = -OUTAGE - 1
        for position, day in days.items():
            if day - newest > OUTAGE:
                selected.append(int(str(position)))
                newest = day
    return failures.loc[sorted(selected)]


def _failures(events: pd.DataFrame, labels: LabelSection, nodes: pd.Index, first: int, days: int) -> pd.DataFrame:
    """Return failure events and unconditional failure XIDs by node and day."""
    hard = {str(xid) for xid in set(xid_classes(labels)) - CONDITIONAL_XIDS}
    chosen = events[(events["type"] == "failure") | ((events["type"] == "xid") & events["code"].isin(hard))]
    node, day = nodes.get_indexer(chosen["node"]), _days(chosen["timestamp"]) - first
    table = pd.DataFrame(
        {"node": node, "day": day, "source": chosen["source"].fillna(""), "timestamp": chosen["timestamp"]}
    )
    return table[(node >= 0) & (day >= 0) & (day < days)]


def _in_service(inventory: pd.DataFrame, nodes: pd.Index, first: int, days: int) -> Bools:
    out = np.zeros((len(nodes), days), dtype=bool)
    begin = _days(inventory["installed_at"]) - first
    end = _days(inventory["removed_at"]) - first
    for node, since, until in zip(nodes.get_indexer(inventory["node"]), begin, end, strict=True):
        if node >= 0:
            out[node, max(since, 0) : days if until < -first + 1 else max(until + 1, 0)] = True
    return out


def _days(times: Any) -> Ints:
    """Return the ordinal of each day; null: 0."""
    ordinal = pd.DatetimeIndex(times).tz_convert("UTC").as_unit("s").asi8 // 86_400 + _EPOCH
    return np.where(pd.isna(times), 0, ordinal)
