"""Events that say the same: repeats and other sources' reports are dropped, floods are kept as runs.

A run is one row for many events of one kind: ``timestamp`` is the first, ``last_at`` the last, ``count`` how many. The
two columns are in ``events.parquet`` only where a dataset has a run. Ordinary repeats stay rows of their own: within a
minute, the first :data:`KEPT_PER_MINUTE` XID events of one unit, code and source do, and the further ones are the run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
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

_KEY = ("known_at", "timestamp", "node", "gpu", "type", "code", "source", "detail")


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
    """Return how many events the rows stand for."""
    return int(events["count"].fillna(1).sum()) if "count" in events else len(events)


def count_by_type(events: pd.DataFrame) -> dict[str, int]:
    """Return how many events there are of each type, the commonest first."""
    number = events["count"] if "count" in events else pd.Series(1, index=events.index)
    kinds = number.groupby(events["type"]).sum().sort_values(ascending=False, kind="stable")
    return {str(kind): int(count) for kind, count in kinds.items()}


def concerned(stored: pd.DataFrame, new: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return which stored events are of a GPU or node that new events are about: no other can change."""
    of_gpu = stored["gpu"].isin(new["gpu"].dropna().unique())
    of_node = stored["gpu"].isna() & stored["node"].isin(new.loc[new["gpu"].isna(), "node"].unique())
    return (of_gpu | of_node).to_numpy(dtype=bool)


def sort_events(events: pd.DataFrame) -> pd.DataFrame:
    """Sort events by when they were known, and everything else after it, so that the order is the content's alone."""
    keys = {
        name: events[name] if name in ("known_at", "timestamp") else events[name].astype("str").fillna("")
        for name in _KEY
    }
    order = pd.DataFrame(keys).sort_values(list(_KEY), kind="stable").index
    return events.loc[order].reset_index(drop=True)


def merge_floods(events: pd.DataFrame) -> pd.DataFrame:
    """Drop what one source says twice of one time, and merge the tail of each flood of an XID into a run a minute.

    The members of a run happened in one minute, and were reported with the same delay to the minute; the run is known
    from when the last of them was. A further event of its source inside its span that is reported as late or later is
    taken for one of its members. Runs among ``events`` grow; applied again, it changes nothing. The work is that of a
    sort.
    """
    if len(events) < 2:
        return events
    events = with_runs(events)
    key, source = same_thing(events), pd.factorize(events["source"])[0]
    stamps, known = ms_of(events["timestamp"]), ms_of(events["known_at"])
    last, count = ms_of(events["last_at"]), events["count"].to_numpy(np.int64)
    once = _without_repeats(events, _together(key, source), stamps, known, count > 1)
    rows = once[(events["type"] == "xid").to_numpy(dtype=bool)[once]]
    delay = (known[rows] - last[rows]) // RUN_MS  # of a run, that of one of its members
    group = _together(_mergeable(events, key, source, rows), stamps[rows] // RUN_MS, delay)
    is_run = count[rows] > 1
    size, runs = np.bincount(group), np.bincount(group[is_run], minlength=int(group.max(initial=0)) + 1)
    chosen = ((size > KEPT_PER_MINUTE + 1) | ((runs > 0) & (size > 1)))[group]
    if not chosen.any():
        return _without_retold(events.iloc[np.sort(once)])
    rows, group, is_run = rows[chosen], group[chosen], is_run[chosen]
    order = np.lexsort((known[rows], ~is_run, stamps[rows], group))
    rows, group, is_run = rows[order], group[order], is_run[order]
    ends = pd.Series(np.where(is_run, last[rows], -1)).groupby(group, sort=False).cummax()
    inside = stamps[rows] <= ends.groupby(group, sort=False).shift(fill_value=-1).to_numpy()  # of a run before it
    rank = pd.Series(~inside).groupby(group, sort=False).cumsum().to_numpy() - 1
    run_rank = pd.Series(np.where(is_run, rank, len(rows))).groupby(group, sort=False).transform("min").to_numpy()
    tail = rank >= np.minimum(KEPT_PER_MINUTE, run_rank)
    rest, rest_group, rest_inside = rows[tail], group[tail], inside[tail]
    starts = np.flatnonzero(np.r_[True, rest_group[1:] != rest_group[:-1]])
    merged = events.iloc[rest[starts]].copy()
    merged["last_at"] = times_of(np.maximum.reduceat(last[rest], starts))
    merged["known_at"] = times_of(np.maximum.reduceat(np.where(rest_inside, 0, known[rest]), starts))
    merged["count"] = np.add.reduceat(np.where(rest_inside, 0, count[rest]), starts)
    untouched = np.setdiff1d(once, rows, assume_unique=True)
    return _without_retold(pd.concat([events.iloc[untouched], events.iloc[rows[~tail]], merged]))


def _without_retold(events: pd.DataFrame) -> pd.DataFrame:
    """Leave out what lies inside a run of the same source that was reported sooner."""
    is_run = (events["count"] > 1).to_numpy()
    if not is_run.any():
        return events
    first, last = ms_of(events["timestamp"]), ms_of(events["last_at"])
    source = pd.factorize(events["source"])[0]
    kind = _mergeable(events, same_thing(events), source, np.arange(len(events)))
    told = pd.DataFrame(
        {
            "kind": _together(kind, first // RUN_MS),
            "delay": (ms_of(events["known_at"]) - last) // RUN_MS,
            "first": first,
            "last": last,
            "row": np.arange(len(events)),
        }
    )
    runs = told[is_run]
    pairs = told[told["kind"].isin(runs["kind"])].merge(runs, on="kind", suffixes=("", "_run"))
    inside = (pairs["first"] >= pairs["first_run"]) & (pairs["last"] <= pairs["last_run"])
    retold = pairs.loc[inside & (pairs["delay"] > pairs["delay_run"]), "row"]
    return events[~np.isin(np.arange(len(events)), retold)]


def _without_repeats(
    events: pd.DataFrame,
    said: npt.NDArray[np.int64],
    stamps: npt.NDArray[np.int64],
    known: npt.NDArray[np.int64],
    is_run: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Return one row of those that one source says of one unit, code and time: the one known first."""
    order = np.lexsort((known, ~is_run, stamps, said))
    same = np.zeros(len(order), dtype=bool)
    same[1:] = (said[order][1:] == said[order][:-1]) & (stamps[order][1:] == stamps[order][:-1])
    if not same.any():
        return order
    tied = np.zeros(len(order), dtype=bool)
    tied[order] = same | np.r_[same[1:], False]
    # Among equals the text decides, so that the order of the rows does not.
    words = np.zeros((2, len(order)), np.int64)
    for place, name in enumerate(("node", "detail")):
        words[place, tied] = pd.factorize(events[name][tied].astype("str").fillna(""), sort=True)[0]
    order = np.lexsort((words[1], words[0], known, ~is_run, stamps, said))
    return order[~same]


def _mergeable(
    events: pd.DataFrame, key: npt.NDArray[np.int64], source: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return a number for each of ``rows`` that is the same for events that may be one run, apart from their times."""
    chosen = events.iloc[rows]
    detail = chosen["detail"].where(chosen["code"].isin(_WITH_DETAIL))
    return _together(key[rows], source[rows], pd.factorize(chosen["node"])[0], pd.factorize(detail)[0])


def _together(*parts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return a number for each row that is the same where all parts are."""
    whole = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        codes = pd.factorize(part)[0].astype(np.int64)
        whole = pd.factorize(whole * (int(codes.max(initial=0)) + 1) + codes)[0].astype(np.int64)
    return whole


def dedupe_events(events: pd.DataFrame, dedupe: timedelta) -> pd.DataFrame:
    """Keep one event of those in which several sources tell the same; sorted by ``known_at``, floods as runs.

    An event is dropped when one of the same unit, type and code, but of another source, that was known earlier lies
    within ``dedupe`` of its ``timestamp``. What one source says at two times are two events, for repeats within minutes
    are what makes some XIDs a fault. What a source made of an exporter's count never drops another source's event.

    Going by ``known_at`` makes it causal: what was known at a time does not depend on what was reported later (by more
    than two minutes, in a flood). The type is part of the key because a failure and its repair may both come without a
    code.
    """
    given = list(events.columns)
    events = sort_events(merge_floods(events))
    if "count" in events and not (events["count"] > 1).any():
        events = events[given]
    if len(events) < 2:
        return events
    span = int(dedupe.total_seconds() * 1000)
    stamps = ms_of(events["timestamp"])
    last = ms_of(events["last_at"]) if "last_at" in events else stamps
    key = same_thing(events)
    source = pd.factorize(events["source"])[0]
    weak = is_from_exporter(events["source"])
    made_of_counts = set(source[weak].tolist())
    several = pd.Series(source).groupby(key).transform("nunique").to_numpy() > 1
    keep = np.ones(len(events), dtype=bool)
    kept: dict[int, dict[int, _Heard]] = {}
    for index in np.flatnonzero(several).tolist():
        by_source = kept.setdefault(int(key[index]), {})
        first, end, said_by = int(stamps[index]), int(last[index]), int(source[index])
        keep[index] = not any(
            heard.within(first - span, end + span)
            for other, heard in by_source.items()
            if other != said_by and (weak[index] or other not in made_of_counts)
        )
        if keep[index]:
            by_source.setdefault(said_by, _Heard()).add(first, end)
    return events[keep].reset_index(drop=True)


class _Heard:
    """What one source has said of one unit and code: instants, and runs of at most a minute, both sorted."""

    def __init__(self) -> None:
        self._instants: list[int] = []
        self._runs: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        if first == last:
            insort(self._instants, first)
        else:
            insort(self._runs, (first, last))

    def within(self, since: int, until: int) -> bool:
        """Whether anything lies in ``since <= t <= until``."""
        at = bisect_left(self._instants, since)
        if at < len(self._instants) and self._instants[at] <= until:
            return True
        low = bisect_left(self._runs, (since - RUN_MS, 0))
        high = bisect_right(self._runs, (until, 1 << 62))
        return any(last >= since for _, last in self._runs[low:high])


def is_from_exporter(source: pd.Series) -> npt.NDArray[np.bool_]:
    """Return which sources are the exporters' counts (``exporter:METRIC``), that tell late and not of every event."""
    return source.astype("str").fillna("").str.startswith("exporter:").to_numpy(dtype=bool)


def same_thing(events: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return a number for each event that is the same for events of one unit, type and code.

    A GPU keeps its identity when it moves; an event of the whole node is the node's.
    """
    parts = {name: pd.factorize(events[name])[0] for name in ("node", "gpu", "type", "code")}
    of_node = np.where(parts["gpu"] < 0, parts["node"], -1)
    return _together(parts["gpu"], of_node, parts["type"], parts["code"])


def drop_told_edges(events: pd.DataFrame, interval: timedelta, source: str) -> pd.DataFrame:
    """Leave out the edges of the XID gauge, and the rises of an exporter's count, of which a better source tells.

    ``source``: ``source`` of edges.
    An edge goes if another source has an event of the same GPU (or node) and code within ``interval``, known at most
    ``interval`` after it: until then, the edge was all that one could know. Rises of an exporter's count are treated
    alike, but edges are no better than they. The rest is in the order given.
    """
    is_xid = (events["type"] == "xid").to_numpy(dtype=bool)
    edge = is_xid & (events["source"] == source).to_numpy(dtype=bool)
    rise = is_xid & is_from_exporter(events["source"])
    rank = np.where(edge, 0, np.where(rise, 1, 2))
    weak = rank < 2
    if not weak.any() or len(np.unique(rank)) == 1:
        return events
    span = int(interval.total_seconds() * 1000)
    key = same_thing(events)
    stamps, known = ms_of(events["timestamp"]), ms_of(events["known_at"])
    last = ms_of(events["last_at"]) if "last_at" in events else stamps
    told = np.flatnonzero(~edge & np.isin(key, key[weak]))
    told = told[np.lexsort((stamps[told], key[told]))]
    told_key, told_at = key[told], stamps[told]
    begins = dict(zip(*np.unique(told_key, return_index=True), strict=True))
    ends = {each: begins[each] + size for each, size in zip(*np.unique(told_key, return_counts=True), strict=True)}
    keep = np.ones(len(events), dtype=bool)
    for index in np.flatnonzero(weak).tolist():
        begin, end = begins.get(key[index], 0), ends.get(key[index], 0)
        times = told_at[begin:end]
        low = np.searchsorted(times, stamps[index] - span - RUN_MS)
        high = np.searchsorted(times, last[index] + span, side="right")
        others = told[begin + low : begin + high]
        near = (rank[others] > rank[index]) & (last[others] >= stamps[index] - span)
        keep[index] = not (near & (known[others] <= known[index] + span)).any()
    return events[keep].reset_index(drop=True)
