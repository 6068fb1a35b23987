from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.series.xid_counts import SOURCE as COUNT_SOURCE
from telemetry.dataset.schema import EVENTS
from telemetry.importing.event_runs import dedupe_events, drop_told_edges
from telemetry.xids.xid_gauge import SOURCE, event_rows, untold_edges, xid_edges
from tests.telemetry.helpers import DAY

DELAY = timedelta(minutes=10)


def gauge(rows: list[tuple[str, int, int | None]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "timestamp": pd.Series([DAY + timedelta(minutes=minute) for _, minute, _ in rows]).astype(
                "datetime64[ms, UTC]"
            ),
            "node": ["n" for _ in rows],
            "gpu": [name for name, *_ in rows],
            "xid_last": pd.array([value for *_, value in rows], dtype="Int32"),
        }
    )


def xid_events(samples: pd.DataFrame) -> pd.DataFrame:
    ordered = samples.sort_values(["gpu", "timestamp"], kind="stable").reset_index(drop=True)
    values = ordered["xid_last"].fillna(0).to_numpy(dtype=np.int32)
    units = pd.factorize(ordered["gpu"])[0].astype(np.int32)
    rows = xid_edges(units, values, ordered["xid_last"].notna().to_numpy())
    chosen = ordered.iloc[rows]
    return event_rows(chosen["timestamp"], chosen["node"], chosen["gpu"], values[rows], DELAY)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 50), st.sampled_from([None, 0, 0, 31, 79])),
        min_size=1,
        unique_by=lambda row: row[:2],
    )
)
def test_events_are_the_changes_to_another_xid(rows):
    expected = []
    for name in ("a", "b"):
        last = None
        for turn, (_, minute, value) in enumerate(
            sorted((row for row in rows if row[0] == name), key=lambda row: row[1])
        ):
            if value is None:
                continue
            if (last is not None or turn > 0) and value not in (0, last):
                expected.append((name, DAY + timedelta(minutes=minute), str(value)))
            last = value
    found = xid_events(gauge(rows))
    assert list(found.columns) == EVENTS.names
    assert list(zip(found["gpu"], found["timestamp"], found["code"], strict=True)) == expected
    assert (found["known_at"] - found["timestamp"]).eq(pd.Timedelta(DELAY)).all()


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([None, None, 79, 79], [2]),  # dcgm-exporter leaves the gauge out until the first XID
        ([79, 79], []),
        ([None, 0, 79], [2]),
        ([79, None, None, 79], []),
        ([79, None, 48], [2]),
    ],
)
def test_a_gauge_that_appears_tells_of_an_xid_where_the_gpu_was_seen_before(values, edges):
    found = xid_events(gauge([("a", minute, value) for minute, value in enumerate(values)]))
    assert [int((when - DAY) / timedelta(minutes=1)) for when in found["timestamp"]] == edges


def untold(rows: list[tuple[str, int | None]], told: dict[tuple[int, int], list[int]] | None = None) -> list[int]:
    """Rows are ("old" or "new", value), one a second; ``told`` in seconds."""
    old = np.array([who == "old" for who, _ in rows])
    valid = np.array([value is not None for _, value in rows])
    values = np.array([value or 0 for _, value in rows], np.int32)
    seconds = np.arange(len(rows)).astype(np.int64)
    return untold_edges(np.zeros(len(rows), np.int32), seconds, (values, valid), old, old & valid, told or {}).tolist()


def test_an_xid_is_told_once_when_its_first_rows_come_late():
    assert untold([("old", 0), ("new", 79), ("old", 79)]) == []
    assert untold([("old", 0), ("new", 0), ("old", 79)]) == []
    assert untold([("old", 0), ("new", 48), ("old", 79)]) == [1]
    assert untold([("old", None), ("new", 79), ("old", 79)]) == []
    assert untold([("old", 0), ("old", 0), ("new", 79)]) == [2]


def test_late_rows_can_make_an_old_row_an_edge():
    assert untold([("old", 79), ("new", 0), ("old", 79)]) == [2]
    assert untold([("old", 79), ("new", 0), ("new", 79), ("old", 79)]) == [2]
    assert untold([("new", 0), ("old", 79)]) == [1]


def test_an_edge_inside_a_rolled_up_step_is_not_told_again():
    rows: list[tuple[str, int | None]] = [("old", 0), ("new", 79), ("old", 48)]
    assert untold(rows) == [1]
    assert untold(rows, {(0, 79): [2]}) == []


def told_events(rows: list[tuple[int, str, int]]) -> pd.DataFrame:
    """Rows are (second of the XID, source, second it was known)."""
    times = [
        pd.Series([DAY + timedelta(seconds=row[place]) for row in rows]).astype("datetime64[ms, UTC]")
        for place in (0, 2)
    ]
    return pd.DataFrame(
        {
            "timestamp": times[0],
            "node": "n",
            "gpu": "a",
            "type": "xid",
            "code": "79",
            "detail": None,
            "source": [source for _, source, _ in rows],
            "known_at": times[1],
        }
    )


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([(30, COUNT_SOURCE, 30), (0, "kernel.log", 40)], ["kernel.log"]),
        ([(30, SOURCE, 30), (20, COUNT_SOURCE, 30)], [COUNT_SOURCE]),
        ([(30, SOURCE, 30), (20, COUNT_SOURCE, 30), (0, "kernel.log", 1)], ["kernel.log"]),
        ([(0, COUNT_SOURCE, 0), (50, COUNT_SOURCE, 50)], [COUNT_SOURCE, COUNT_SOURCE]),
        ([(30, COUNT_SOURCE, 30), (0, "kernel.log", 9000)], [COUNT_SOURCE, "kernel.log"]),
    ],
)
def test_the_exporters_count_gives_way_to_better_sources(rows, kept):
    left = drop_told_edges(told_events(rows), timedelta(minutes=10), SOURCE)
    assert dedupe_events(left, timedelta(seconds=60))["source"].tolist() == kept
