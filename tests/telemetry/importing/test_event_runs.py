"""Floods of one event: few rows whatever their size, the same answers, and no work that grows with its square."""

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from features.config import FeatureSection, LabelSection
from features.groups.history import EventHistory, history_columns
from features.labels.evidence import IncidentEvidence
from features.labels.incidents import find_incidents, known_onsets, out_of_use
from telemetry.importing.event_runs import KEPT_PER_MINUTE, dedupe_events, merge_floods, stack_events, total_count
from tests.telemetry.helpers import DAY, events_frame, gpu, run_import, write_csv

SPAN = timedelta(seconds=60)
Event = tuple[int, str, str, str, int]  # ms, gpu, code, source, known later by ms


def frame_of(rows: list[Event]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "timestamp": pd.to_datetime([DAY + timedelta(milliseconds=ms) for ms, *_ in rows], utc=True),
            "node": "n",
            "gpu": [gpu for _, gpu, *_ in rows],
            "type": "xid",
            "code": [code for _, _, code, *_ in rows],
            "detail": None,
            "source": [source for *_, source, _ in rows],
            "known_at": pd.to_datetime([DAY + timedelta(milliseconds=ms + later) for ms, *_, later in rows], utc=True),
        }
    ).astype({"timestamp": "datetime64[ms, UTC]", "known_at": "datetime64[ms, UTC]", "detail": object})


def flood(number: int, every_ms: int, source: str = "kernel.log", later: int = 600_000) -> pd.DataFrame:
    return frame_of([(index * every_ms, "g", "74", source, later) for index in range(number)])


def merged_plainly(rows: list[Event]) -> list[tuple[int, int, int, int, str, str, str]]:
    """The rules one event at a time: (first, last, count, known, gpu, code, source) of what is kept."""
    once: dict[tuple[str, str, str, int], Event] = {}
    for row in sorted(rows, key=lambda event: event[0] + event[4]):
        once.setdefault((*row[1:4], row[0]), row)
    minutes: dict[tuple[str, str, str, int, int], list[Event]] = {}
    for row in once.values():
        minutes.setdefault((*row[1:4], row[0] // 60_000, row[4] // 60_000), []).append(row)
    made = []
    runs: list[tuple[tuple[str, str, str], int, int, int]] = []
    for (name, code, source, _, delay), members in minutes.items():
        members.sort()
        alone, tail = members[:KEPT_PER_MINUTE], members[KEPT_PER_MINUTE:]
        made += [(row[0], row[0], 1, row[0] + row[4], name, code, source) for row in alone]
        if tail:
            known = max(row[0] + row[4] for row in tail)
            made.append((tail[0][0], tail[-1][0], len(tail), known, name, code, source))
            if len(tail) > 1:
                runs.append(((name, code, source), delay, tail[0][0], tail[-1][0]))
    made = [
        row
        for row in made
        if not any(
            kind == row[4:] and first <= row[0] and row[1] <= last and (row[3] - row[1]) // 60_000 > delay
            for kind, delay, first, last in runs
        )
    ]
    kept: list[tuple[int, int, int, int, str, str, str]] = []
    for row in sorted(made, key=lambda row: (row[3], row[0], row[4:])):
        near = [
            other
            for other in kept
            if other[4:6] == row[4:6]
            and other[6] != row[6]
            and other[0] - 60_000 <= row[1]
            and row[0] - 60_000 <= other[1]
        ]
        if not near:
            kept.append(row)
    return kept


floods = st.lists(
    st.tuples(
        st.integers(0, 200_000),
        st.sampled_from(["g1", "g2"]),
        st.sampled_from(["79", "48"]),
        st.sampled_from(["a.log", "b.log", "c.log"]),
        st.sampled_from([0, 5_000, 90_000]),
    )
    | st.tuples(st.integers(0, 900), st.just("g1"), st.just("79"), st.sampled_from(["a.log", "b.log"]), st.just(0)),
    min_size=1,
    max_size=120,
)


@given(rows=floods, seed=st.integers(0, 99))
def test_what_is_kept_is_what_the_rules_say_one_event_at_a_time(rows: list[Event], seed: int):
    events = frame_of(rows)
    kept = dedupe_events(events, SPAN)
    runs = stack_events([kept])
    start = int(DAY.timestamp() * 1000)
    for name in ("timestamp", "last_at", "known_at"):
        runs[name] = runs[name].astype("int64") - start
    columns = ["timestamp", "last_at", "count", "known_at", "gpu", "code", "source"]
    assert list(runs[columns].itertuples(index=False, name=None)) == merged_plainly(rows)
    pd.testing.assert_frame_equal(dedupe_events(events.sample(frac=1, random_state=seed), SPAN), kept)
    pd.testing.assert_frame_equal(dedupe_events(kept, SPAN), kept)


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 600_000),
            st.sampled_from(["g1", "g2"]),
            st.sampled_from(["79", "48"]),
            st.sampled_from(["a.log", "b.log", "c.log"]),
            st.integers(0, 900_000),
        ),
        max_size=30,
    ),
    minutes=st.integers(0, 25),
)
def test_what_is_known_at_a_time_does_not_depend_on_later_reports(rows: list[Event], minutes: int):
    events, then = frame_of(rows), DAY + timedelta(minutes=minutes)
    whole, early = dedupe_events(events, SPAN), dedupe_events(events[events["known_at"] <= then], SPAN)
    pd.testing.assert_frame_equal(stack_events([early]), stack_events([whole[whole["known_at"] <= then]]))


@settings(max_examples=6)  # each example is a second
@given(size=st.integers(0, 300), cuts=st.lists(st.integers(0, 300), max_size=3))
def test_a_flood_that_comes_in_pieces_is_the_flood_that_comes_at_once(size: int, cuts: list[int]):
    whole = flood(size, 700)
    stored = whole[:0]
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), size], strict=True):
        again = whole[max(0, min(begin, size) - 5) : end]  # what was reported before is reported again
        stored = dedupe_events(stack_events([stored, again]), SPAN)
    pd.testing.assert_frame_equal(stack_events([stored]), stack_events([dedupe_events(whole, SPAN)]))


def calls_for(number: int) -> int:
    events = pd.concat([flood(number, 3), flood(number, 3, "nvml", 601_000)], ignore_index=True)
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        kept = dedupe_events(events, SPAN)
    finally:
        sys.setprofile(None)
    assert total_count(kept) == number
    return calls


def test_the_work_grows_with_the_flood_and_not_with_its_square():
    calls_for(100)  # what is loaded lazily is loaded
    small, large = calls_for(5_000), calls_for(40_000)
    assert large < 8 * small


def test_a_flood_is_a_few_rows_on_disk_and_the_next_event_joins_it(tmp_path: Path):
    lines = [
        f"{(DAY + timedelta(milliseconds=ms)).isoformat()} node-0 kernel: NVRM: Xid (PCI:0000:10:00): 74, pid={ms}\n"
        for ms in range(30_000)
    ]
    log = tmp_path / "kernel.log"
    log.write_text("".join(lines))
    result = run_import(tmp_path, events=[log])
    events = result.dataset.events()
    assert (len(events), total_count(events)) == (KEPT_PER_MINUTE + 1, 30_000)
    assert result.counts["events_in_runs"] == 30_000 - len(events)
    (tmp_path / "more").mkdir()
    more = write_csv(tmp_path / "more" / "one.csv", events_frame([("05:00", gpu(2), "xid", "79")]))
    grown = run_import(tmp_path, events=[log, more]).dataset.events()
    assert (len(grown), total_count(grown)) == (KEPT_PER_MINUTE + 2, 30_001)


def test_whether_a_link_failed_for_good_is_kept_in_a_flood():
    events = flood(200, 10).assign(code="149", detail="NETIR_LINK_EVT Nonfatal link 03")
    events.loc[150, "detail"] = "NETIR_LINK_EVT Fatal link 03"
    assert set(merge_floods(events)["detail"]) == set(events["detail"])


@settings(max_examples=6)  # each example is a second
@given(
    bursts=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200), st.sampled_from([50, 900, 7_000])), max_size=3),
    code=st.sampled_from(["79", "74", "31"]),
)
def test_labels_and_counts_of_a_flood_are_those_of_its_events(bursts: list[tuple[int, int, int]], code: str):
    rows = sorted({
        (hour * 3_600_000 + index * every, "g", code, "kernel.log", 600_000)
        for hour, size, every in bursts
        for index in range(size)
    })  # fmt: skip
    events = frame_of(rows) if rows else frame_of([(0, "g", code, "kernel.log", 0)])[:0]
    merged = dedupe_events(events, SPAN)
    installed = pd.Series([pd.Timestamp("2025-01-01", tz="UTC")]).astype("datetime64[ms, UTC]")
    inventory = pd.DataFrame({"gpu": ["g"], "node": ["n"], "slot": ["0"], "installed_at": installed})
    inventory["removed_at"] = installed.where(installed.isna())
    labels = LabelSection()
    pd.testing.assert_frame_equal(*(find_incidents(frame, inventory, labels) for frame in (merged, events)))
    for view in (known_onsets, out_of_use):
        pd.testing.assert_frame_equal(
            *(view(IncidentEvidence.of(frame, inventory, labels)) for frame in (merged, events))
        )
    asked = pd.DataFrame(
        {"decision_time": [DAY + timedelta(days=day) for day in range(1, 14)], "node": "n", "unit": "g"}
    )
    asked["decision_time"] = asked["decision_time"].astype("datetime64[ms, UTC]")
    section = FeatureSection()
    values = [
        EventHistory.of(IncidentEvidence.of(frame, inventory, labels), section, inventory).values(asked)
        for frame in (merged, events)
    ]
    recency = np.array([column.statistic == "recency" for column in history_columns(section)])
    np.testing.assert_array_equal(values[0][:, ~recency], values[1][:, ~recency])
    # The members of a run have one age, at most a minute from their own.
    np.testing.assert_allclose(values[0][:, recency], values[1][:, recency], rtol=1e-3)
