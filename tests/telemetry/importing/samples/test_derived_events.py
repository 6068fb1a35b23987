from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.importing.event_runs import dedupe_events, drop_known_edges
from telemetry.importing.samples.derived_events import SOURCE, new_edges, xid_edges
from tests.telemetry.helpers import DAY

Report = tuple[str, int, int | None]  # unit, minute, the gauge

COUNT_SOURCE = "exporter:DCGM_EXP_XID_ERRORS_COUNT"


def edges_of(reports: list[Report]) -> list[Report]:
    ordered = sorted(reports, key=lambda report: report[:2])
    valid = np.array([value is not None for *_, value in ordered])
    values = np.array([value or 0 for *_, value in ordered], np.int32)
    units = np.array([ord(unit) for unit, *_ in ordered], np.int32)
    return [ordered[row] for row in xid_edges(units, values, valid)]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 50), st.sampled_from([None, 0, 0, 31, 79])),
        min_size=1,
        unique_by=lambda row: row[:2],
    )
)
def test_edges_are_the_changes_to_another_xid(rows):
    expected = []
    for unit in ("a", "b"):
        last = None
        for turn, report in enumerate(sorted((row for row in rows if row[0] == unit), key=lambda row: row[1])):
            if report[2] is None:
                continue
            if (last is not None or turn > 0) and report[2] not in (0, last):
                expected.append(report)
            last = report[2]
    assert edges_of(rows) == expected


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
def test_a_gauge_that_appears_reports_an_xid_where_the_gpu_was_seen_before(values, edges):
    assert [minute for _, minute, _ in edges_of([("a", *report) for report in enumerate(values)])] == edges


def new_rows(rows: list[tuple[str, int | None]]) -> list[int]:
    """Rows are ("old" or "new", value), one a second."""
    old = np.array([who == "old" for who, _ in rows])
    valid = np.array([value is not None for _, value in rows])
    values = np.array([value or 0 for _, value in rows], np.int32)
    seconds = np.arange(len(rows)).astype(np.int64)
    return new_edges(np.zeros(len(rows), np.int32), seconds, (values, valid), old, old & valid, {}).tolist()


def test_late_rows_can_make_an_old_row_an_edge():
    assert new_rows([("old", 79), ("new", 0), ("old", 79)]) == [2]
    assert new_rows([("old", 79), ("new", 0), ("new", 79), ("old", 79)]) == [2]
    assert new_rows([("new", 0), ("old", 79)]) == [1]


def reports_of(rows: list[tuple[int, str, int]]) -> pd.DataFrame:
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
    left = drop_known_edges(reports_of(rows), timedelta(minutes=10), SOURCE)
    assert dedupe_events(left, timedelta(seconds=60))["source"].tolist() == kept
