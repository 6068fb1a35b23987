"""Several reports of one event: repeats and other sources' reports are dropped, floods are kept as runs.

A run is one row for many events of one kind: ``timestamp`` is the first, ``last_at`` the last, ``count`` how many. The
two columns are in ``events.parquet`` only where a dataset has a run. Ordinary repeats stay rows of their own: within a
minute, the first :data:`KEPT_PER_MINUTE` XID events of one unit, code and source do, and the further ones are the run.
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
"""XID events of one unit, code and source in one minute that stay rows of their own.

More than any rule on repeats looks at (the features' is three), so that only the tail of a flood is merged.
"""

RUN_MS: Final = 60_000
"""Span of a run at most: its events happened in one minute."""
_WITH_DETAIL: Final = frozenset(str(code) for code in (*range(144, 151), 154))
# Of these XIDs the detail says whether the link failed for good, or what the driver asks for: it is part of the key.

_KEY_SHIFT = 42  # Milliseconds below 2**42 reach the year 2109.
_TIMES = ("known_at", "timestamp")
_SORT_KEY = [*_TIMES, "node", "gpu", "type", "code", "source", "detail"]


def event_frame(ms: npt.NDArray[np.int64], delay: timedelta, **columns: Any) -> pd.DataFrame:
    """Return events at instants, in milliseconds, that are known after a delay; ``columns``: all others."""
    when = times_of(ms)
    events = pd.DataFrame({"timestamp": when, **columns, "known_at": (when + delay).as_unit("ms")})
    return events.astype(dict.fromkeys(columns, object))[EVENTS.names]


def with_runs(events: pd.DataFrame) -> pd.DataFrame:
    """Give events the columns of runs; an event without them is a run of one."""
    last = ms_of(events["timestamp"])
    if "last_at" in events:
        last = np.maximum(last, ms_of(events["last_at"]))
    count = events["count"].fillna(1).to_numpy(np.int64) if "count" in events else np.int64(1)
    return events.assign(last_at=times_of(last), count=count)


def stack_events(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate event frames, with the columns of runs; an empty frame has no values to agree on and is left out."""
    full = [with_runs(frame) for frame in frames if len(frame)]
    names = EVENT_RUNS.names
    return pd.concat(full, ignore_index=True)[names] if full else EVENT_RUNS.empty_table().to_pandas()


def stored_layout(events: pd.DataFrame) -> pd.DataFrame:
    """Leave the columns of runs out where there is no run."""
    has_run = "count" in events and bool((events["count"] > 1).any())
    return events[EVENT_RUNS.names if has_run else EVENTS.names]


def total_count(events: pd.DataFrame) -> int:
    """Return how many events the rows represent."""
    return int(with_runs(events)["count"].sum())


def count_by_type(events: pd.DataFrame) -> dict[str, int]:
    """Return how many events there are of each type, the commonest first."""
    kinds = with_runs(events).groupby("type")["count"].sum().sort_values(ascending=False, kind="stable")
    return {str(kind): int(count) for kind, count in kinds.items()}


def concerned(stored: pd.DataFrame, new: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return which stored events are of a GPU or node that new events are about: no other can change."""
    of_gpu = stored["gpu"].isin(new["gpu"].dropna().unique())
    of_node = stored["gpu"].isna() & stored["node"].isin(new.loc[new["gpu"].isna(), "node"].unique())
    return (of_gpu | of_node).to_numpy(dtype=bool)


def sort_events(events: pd.DataFrame) -> pd.DataFrame:
    """Sort events by when they were known, and everything else after it, so that the order is the content's alone."""
    return events.sort_values(
        _SORT_KEY,
        kind="stable",
        ignore_index=True,
        key=lambda column: column if column.name in _TIMES else _text(column),
    )


def _text(column: pd.Series) -> pd.Series:
    return column.astype("str").fillna("")


def merge_floods(events: pd.DataFrame) -> pd.DataFrame:
    """Drop what one source reports twice for one time, and merge the tail of each flood of an XID into a run a minute.

    The members of a run happened in one minute, and were reported with the same delay to the minute; the run is known
    from when the last of them was. A further event of its source inside its span that is reported as late or later is
    taken for one of its members. Runs among ``events`` grow; applied again, it changes nothing. The work is that of a
    sort.
    """
    events = _without_repeats(with_runs(events).reset_index(drop=True))
    rows = _run_rows(events[events["type"] == "xid"])
    by_group = rows.groupby("group", sort=False)
    size, has_run = by_group["count"].transform("size"), by_group["is_run"].transform("any")
    rows = rows[(size > KEPT_PER_MINUTE + 1) | (has_run & (size > 1))]
    rows = rows.sort_values(["group", "first", "is_run", "known"], ascending=[True, True, False, True])
    run_end = rows["last"].where(rows["is_run"], -1).groupby(rows["group"], sort=False).cummax()
    inside = rows["first"] <= run_end.groupby(rows["group"], sort=False).shift(fill_value=-1)  # of a run before it
    rank = (~inside).groupby(rows["group"], sort=False).cumsum() - 1
    first_run = rank.where(rows["is_run"]).groupby(rows["group"], sort=False).transform("min")
    tail = rows[rank >= first_run.fillna(KEPT_PER_MINUTE).clip(upper=KEPT_PER_MINUTE)]
    if len(tail):
        counted = ~inside[tail.index]
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
    """Return what merging runs looks at: times in milliseconds, and a number that possible members of a run share."""
    first, last, known = (ms_of(events[name]) for name in ("timestamp", "last_at", "known_at"))
    detail = events["detail"].where(events["code"].isin(_WITH_DETAIL))
    rows = pd.DataFrame({"first": first, "last": last, "known": known, "count": events["count"]}, index=events.index)
    rows["kind"] = _number(same_thing(events), events["source"], events["node"], detail, first // RUN_MS)
    rows["delay"] = (known - last) // RUN_MS  # of a run, that of one of its members
    rows["group"] = _number(rows["kind"], rows["delay"])
    return rows.assign(is_run=rows["count"] > 1)


def _without_late_repeats(events: pd.DataFrame) -> pd.DataFrame:
    """Leave out what lies inside a run of the same source that was reported sooner."""
    if not (events["count"] > 1).any():
        return events
    rows = _run_rows(events)
    rows["row"] = np.arange(len(rows))
    runs = rows[rows["is_run"]]
    pairs = rows[rows["kind"].isin(runs["kind"])].merge(runs, on="kind", suffixes=("", "_run"))
    inside = (pairs["first"] >= pairs["first_run"]) & (pairs["last"] <= pairs["last_run"])
    repeated = pairs.loc[inside & (pairs["delay"] > pairs["delay_run"]), "row"]
    return events[~np.isin(rows["row"], repeated)]


def _without_repeats(events: pd.DataFrame) -> pd.DataFrame:
    """Keep one row of what one source reports of one unit, code and time: a run, or the one known first."""
    reports = events[["timestamp", "known_at"]].assign(
        event=_number(same_thing(events), events["source"]), single=events["count"] == 1
    )
    tied = reports.duplicated(["event", "timestamp"], keep=False)
    # Among equals the text decides, so that the order of the rows does not.
    ordered = reports[tied].assign(**{name: _text(events[name][tied]) for name in ("node", "detail")})
    ordered = ordered.sort_values(["event", "timestamp", "single", "known_at", "node", "detail"], kind="stable")
    return events.drop(ordered.index[ordered.duplicated(["event", "timestamp"])])


def _number(*columns: Any) -> npt.NDArray[np.int64]:
    """Return a number for each row that is the same where all columns are."""
    frame = pd.DataFrame({place: np.asarray(column) for place, column in enumerate(columns)})
    return frame.groupby(list(frame), dropna=False, sort=False).ngroup().to_numpy()


def dedupe_events(events: pd.DataFrame, dedupe: timedelta) -> pd.DataFrame:
    """Keep one event of those that several sources report; sorted by ``known_at``, floods as runs.

    An event is dropped when one of the same unit, type and code, but of another source, that was known earlier lies
    within ``dedupe`` of its ``timestamp``. Reports of one source at two times are two events, for repeats within
    minutes are what makes some XIDs a fault. What a source made of an exporter's count never drops another source's
    event.

    Going by ``known_at`` makes it causal: what was known at a time does not depend on what was reported later (by more
    than two minutes, in a flood). The type is part of the key because a failure and its repair may both come without a
    code.
    """
    events = sort_events(merge_floods(events))
    key, source = same_thing(events), pd.factorize(events["source"])[0]
    several = pd.Series(source).groupby(key).transform("nunique").to_numpy() > 1
    from_counts = is_from_exporter(events["source"])
    keep = np.ones(len(events), dtype=bool)
    for index, near in _neighbours(events, key, np.flatnonzero(several), dedupe):
        others = near[(near < index) & keep[near] & (source[near] != source[index])]
        keep[index] = not (from_counts[index] | ~from_counts[others]).any()
    return events[keep].reset_index(drop=True)


def _neighbours(
    events: pd.DataFrame, key: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], span: timedelta
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield each of ``rows`` with all events of its key that lie within ``span`` of it, itself included."""
    span_ms = int(span.total_seconds() * 1000)
    first, last = ms_of(events["timestamp"]), ms_of(events["last_at"])
    place = (key << _KEY_SHIFT) + first
    order = np.argsort(place, kind="stable")
    # A run that began within a minute before the span may reach into it.
    low = np.searchsorted(place[order], place[rows] - span_ms - RUN_MS)
    high = np.searchsorted(place[order], (key[rows] << _KEY_SHIFT) + last[rows] + span_ms, side="right")
    for row, begin, end in zip(rows.tolist(), low.tolist(), high.tolist(), strict=True):
        near = order[begin:end]
        yield row, near[last[near] >= first[row] - span_ms]


def is_from_exporter(source: pd.Series) -> npt.NDArray[np.bool_]:
    """Return which sources are the exporters' counts (``exporter:METRIC``), that report late and not every event."""
    return _text(source).str.startswith("exporter:").to_numpy(dtype=bool)


def same_thing(events: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return a number for each event that is the same for events of one unit, type and code.

    A GPU keeps its identity when it moves; an event of the whole node is the node's.
    """
    return _number(events["gpu"], events["node"].where(events["gpu"].isna()), events["type"], events["code"])


def drop_known_edges(events: pd.DataFrame, interval: timedelta, source: str) -> pd.DataFrame:
    """Leave out the edges of the XID gauge, and the rises of an exporter's count, that a better source reports.

    ``source``: ``source`` of edges.
    An edge goes if another source has an event of the same GPU (or node) and code within ``interval``, known at most
    ``interval`` after it: until then, the edge was all that one could know. Rises of an exporter's count are treated
    equally, but edges are no better than they. The rest is in the order given.
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
    for index, near in _neighbours(events, same_thing(events), np.flatnonzero(rank < 2), interval):
        keep[index] = not ((rank[near] > rank[index]) & (known[near] <= latest[index])).any()
    return events[keep].reset_index(drop=True)
