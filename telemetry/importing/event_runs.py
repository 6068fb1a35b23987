"""Deduplication of events: repeats and other sources' reports are dropped, floods are stored as runs.

A run is one row for many similar events: ``timestamp`` is the first, ``last_at`` the last, ``count`` their number. The
latter two columns are in ``events.parquet`` only if a dataset has runs. Per unit, code, source and minute, the first
:data:`KEPT_PER_MINUTE` XID events remain separate rows, and the rest become a run.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.dataset.schema import EVENT_RUNS, EVENTS, ms_of
from telemetry.importing.instants import times_of

KEPT_PER_MINUTE: Final = 10
"""Number of XID events per unit, code, source and minute that remain separate rows.

More than any rule on repeats considers (features use three), so that only the tail of a flood is merged.
"""

RUN_MS: Final = 60_000
"""Maximum span of a run: its events lie within one minute."""
_WITH_DETAIL: Final = frozenset(str(code) for code in (*range(144, 151), 154))
# The detail of these XIDs is part of the key: whether the link failed permanently, or which recovery action is needed.

_KEY_SHIFT = 42  # Milliseconds below 2**42 reach the year 2109.
_TIMES = ("known_at", "timestamp")
_SORT_KEY = [*_TIMES, "node", "gpu", "type", "code", "source", "detail"]


def event_frame(ms: npt.NDArray[np.int64], delay: timedelta, **columns: Any) -> pd.DataFrame:
    """Return events at times in milliseconds, known after ``delay``; ``columns``: the other columns."""
    times = times_of(ms)
    events = pd.DataFrame({"timestamp": times, **columns, "known_at": (times + delay).as_unit("ms")})
    return events.astype(dict.fromkeys(columns, object))[EVENTS.names]


def with_runs(events: pd.DataFrame) -> pd.DataFrame:
    """Add the run columns; a single event has a count of 1."""
    last = ms_of(events["timestamp"])
    if "last_at" in events:
        last = np.maximum(last, ms_of(events["last_at"]))
    count = events["count"].fillna(1).to_numpy(np.int64) if "count" in events else np.int64(1)
    return events.assign(last_at=times_of(last), count=count)


def stack_events(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate event frames, with the run columns; empty frames are skipped because their dtypes may differ."""
    full = [with_runs(frame) for frame in frames if len(frame)]
    names = EVENT_RUNS.names
    return pd.concat(full, ignore_index=True)[names] if full else EVENT_RUNS.empty_table().to_pandas()


def stored_layout(events: pd.DataFrame) -> pd.DataFrame:
    """Omit the run columns if there are no runs."""
    has_run = "count" in events and bool((events["count"] > 1).any())
    return events[EVENT_RUNS.names if has_run else EVENTS.names]


def total_count(events: pd.DataFrame) -> int:
    """Return the number of events that the rows represent."""
    return int(with_runs(events)["count"].sum())


def count_by_type(events: pd.DataFrame) -> dict[str, int]:
    """Return the number of events by type, most frequent first."""
    kinds = with_runs(events).groupby("type")["count"].sum().sort_values(ascending=False, kind="stable")
    return {str(kind): int(count) for kind, count in kinds.items()}


def affected_events(stored: pd.DataFrame, new: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return which stored events share a GPU or node with new events; no others can change."""
    of_gpu = stored["gpu"].isin(new["gpu"].dropna().unique())
    of_node = stored["gpu"].isna() & stored["node"].isin(new.loc[new["gpu"].isna(), "node"].unique())
    return (of_gpu | of_node).to_numpy(dtype=bool)


def sort_events(events: pd.DataFrame) -> pd.DataFrame:
    """Sort events by ``known_at``, then by all other fields, so that the order depends only on their content."""
    return events.sort_values(
        _SORT_KEY,
        kind="stable",
        ignore_index=True,
        key=lambda column: column if column.name in _TIMES else _text(column),
    )


def _text(column: pd.Series) -> pd.Series:
    return column.astype("str").fillna("")


def merge_floods(events: pd.DataFrame) -> pd.DataFrame:
    """Drop repeated reports by one source for one time, and merge the tail of each XID flood into a run per minute.

    Members of a run lie within one minute and were reported with the same delay (in minutes); the run's ``known_at`` is
    their latest. Further events of its source within its span, reported with that delay or a longer one, are members.
    Runs in ``events`` are extended. Idempotent; O(n log n).
    """
    events = _without_repeats(with_runs(events).reset_index(drop=True))
    rows = _run_rows(events[events["type"] == "xid"])
    by_group = rows.groupby("group", sort=False)
    size, has_run = by_group["count"].transform("size"), by_group["is_run"].transform("any")
    rows = rows[(size > KEPT_PER_MINUTE + 1) | (has_run & (size > 1))]
    rows = rows.sort_values(["group", "first", "is_run", "known"], ascending=[True, True, False, True])
    run_end = rows["last"].where(rows["is_run"], -1).groupby(rows["group"], sort=False).cummax()
    in_run = rows["first"] <= run_end.groupby(rows["group"], sort=False).shift(fill_value=-1)  # of an earlier run
    rank = (~in_run).groupby(rows["group"], sort=False).cumsum() - 1
    first_run = rank.where(rows["is_run"]).groupby(rows["group"], sort=False).transform("min")
    tail = rows[rank >= first_run.fillna(KEPT_PER_MINUTE).clip(upper=KEPT_PER_MINUTE)]
    if len(tail):
        counted = ~in_run[tail.index]
        tail = tail.assign(row=tail.index, known=tail["known"].where(counted, 0), count=tail["count"].where(counted, 0))
        runs = tail.groupby("group", sort=False).agg({"row": "first", "last": "max", "known": "max", "count": "sum"})
        merged = events.loc[runs["row"]].assign(
            last_at=times_of(runs["last"].to_numpy()),
            known_at=times_of(runs["known"].to_numpy()),
            count=runs["count"].to_numpy(),
        )
        events = pd.concat([events.drop(tail.index), merged])
    return _without_late_repeats(events)


def _run_rows(events: pd.DataFrame) -> pd.DataFrame:
    """Return the fields for merging runs: times in milliseconds, and a group number per potential run."""
    first, last, known = (ms_of(events[name]) for name in ("timestamp", "last_at", "known_at"))
    detail = events["detail"].where(events["code"].isin(_WITH_DETAIL))
    rows = pd.DataFrame({"first": first, "last": last, "known": known, "count": events["count"]}, index=events.index)
    rows["kind"] = _number(event_keys(events), events["source"], events["node"], detail, first // RUN_MS)
    rows["delay"] = (known - last) // RUN_MS  # for a run, the delay of its members
    rows["group"] = _number(rows["kind"], rows["delay"])
    return rows.assign(is_run=rows["count"] > 1)


def _without_late_repeats(events: pd.DataFrame) -> pd.DataFrame:
    """Drop events within a run of the same source that was reported sooner."""
    if not (events["count"] > 1).any():
        return events
    rows = _run_rows(events)
    rows["row"] = np.arange(len(rows))
    runs = rows[rows["is_run"]]
    pairs = rows[rows["kind"].isin(runs["kind"])].merge(runs, on="kind", suffixes=("", "_run"))
    in_run = (pairs["first"] >= pairs["first_run"]) & (pairs["last"] <= pairs["last_run"])
    repeated = pairs.loc[in_run & (pairs["delay"] > pairs["delay_run"]), "row"]
    return events[~np.isin(rows["row"], repeated)]


def _without_repeats(events: pd.DataFrame) -> pd.DataFrame:
    """Keep one row per source, unit, type, code and time: a run, or the row known first."""
    reports = events[["timestamp", "known_at"]].assign(
        event=_number(event_keys(events), events["source"]), single=events["count"] == 1
    )
    tied = reports.duplicated(["event", "timestamp"], keep=False)
    # Ties are broken by text, to be independent of row order.
    ordered = reports[tied].assign(**{name: _text(events[name][tied]) for name in ("node", "detail")})
    ordered = ordered.sort_values(["event", "timestamp", "single", "known_at", "node", "detail"], kind="stable")
    return events.drop(ordered.index[ordered.duplicated(["event", "timestamp"])])


def _number(*columns: Any) -> npt.NDArray[np.int64]:
    """Return a group number per row, equal for rows with equal values in all columns."""
    frame = pd.DataFrame({place: np.asarray(column) for place, column in enumerate(columns)})
    return frame.groupby(list(frame), dropna=False, sort=False).ngroup().to_numpy()


def dedupe_events(events: pd.DataFrame, dedupe: timedelta) -> pd.DataFrame:
    """Keep one of the events reported by several sources; return them sorted by ``known_at``, floods as runs.

    An event is dropped if another source reported the same unit, type and code earlier (by ``known_at``) with a
    ``timestamp`` within ``dedupe``. Reports of one source at two times are two events, because some XIDs are faults
    only if they repeat within minutes. Events derived from an exporter's count never drop another source's event.

    Ordering by ``known_at`` makes this causal: later reports do not change what was known at a time (except by up to
    two minutes, in a flood). The type is part of the key because a failure and its repair may both lack a code.
    """
    events = sort_events(merge_floods(events))
    key, source = event_keys(events), pd.factorize(events["source"])[0]
    has_several = pd.Series(source).groupby(key).transform("nunique").to_numpy() > 1
    from_counts = is_from_exporter(events["source"])
    keep = np.ones(len(events), dtype=bool)
    for index, neighbours in _neighbours(events, key, np.flatnonzero(has_several), dedupe):
        others = neighbours[(neighbours < index) & keep[neighbours] & (source[neighbours] != source[index])]
        keep[index] = not (from_counts[index] | ~from_counts[others]).any()
    return events[keep].reset_index(drop=True)


def _neighbours(
    events: pd.DataFrame, key: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], span: timedelta
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield each of ``rows`` with all events of its key within ``span``, including itself."""
    span_ms = int(span.total_seconds() * 1000)
    first, last = ms_of(events["timestamp"]), ms_of(events["last_at"])
    place = (key << _KEY_SHIFT) + first
    order = np.argsort(place, kind="stable")
    # A run that began up to a minute before the span may extend into it.
    low = np.searchsorted(place[order], place[rows] - span_ms - RUN_MS)
    high = np.searchsorted(place[order], (key[rows] << _KEY_SHIFT) + last[rows] + span_ms, side="right")
    for row, begin, end in zip(rows.tolist(), low.tolist(), high.tolist(), strict=True):
        candidates = order[begin:end]
        yield row, candidates[last[candidates] >= first[row] - span_ms]


def is_from_exporter(source: pd.Series) -> npt.NDArray[np.bool_]:
    """Return which sources are exporter counts (``exporter:METRIC``), which are late and miss events."""
    return _text(source).str.startswith("exporter:").to_numpy(dtype=bool)


def event_keys(events: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return a group number per event, equal for events of the same unit, type and code.

    The unit is the GPU, wherever it is, or the node if the event has no GPU.
    """
    return _number(events["gpu"], events["node"].where(events["gpu"].isna()), events["type"], events["code"])


def drop_known_edges(events: pd.DataFrame, interval: timedelta, source: str) -> pd.DataFrame:
    """Drop edges of the XID gauge, and increases of an exporter's count, that a better source reports.

    ``source``: ``source`` of edges.
    An edge is dropped if another source has an event of the same unit and code within ``interval``, known at most
    ``interval`` later; until then, the edge was all that was known. The same applies to increases of an exporter's
    count, except that edges do not replace them. The order is kept.
    """
    events = with_runs(events)
    is_xid = (events["type"] == "xid").to_numpy(dtype=bool)
    edge = is_xid & (events["source"] == source).to_numpy(dtype=bool)
    rise = is_xid & is_from_exporter(events["source"])
    rank = np.where(edge, 0, np.where(rise, 1, 2))
    if not (rank < 2).any() or len(np.unique(rank)) == 1:
        return events
    known = ms_of(events["known_at"])
    latest = known + int(interval.total_seconds() * 1000)
    keep = np.ones(len(events), dtype=bool)
    for index, neighbours in _neighbours(events, event_keys(events), np.flatnonzero(rank < 2), interval):
        keep[index] = not ((rank[neighbours] > rank[index]) & (known[neighbours] <= latest[index])).any()
    return events[keep].reset_index(drop=True)
