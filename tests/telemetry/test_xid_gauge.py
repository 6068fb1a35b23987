from datetime import timedelta

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from telemetry.schema import EVENTS
from telemetry.xid_gauge import xid_events
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
        for _, minute, value in sorted((row for row in rows if row[0] == name), key=lambda row: row[1]):
            if value is None:
                continue
            if last is not None and value not in (0, last):
                expected.append((name, DAY + timedelta(minutes=minute), str(value)))
            last = value
    found = xid_events(gauge(rows), delay=DELAY)
    assert list(found.columns) == EVENTS.names
    assert list(zip(found["gpu"], found["timestamp"], found["code"], strict=True)) == expected
    assert (found["known_at"] - found["timestamp"]).eq(pd.Timedelta(DELAY)).all()
