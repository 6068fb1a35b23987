"""When a fact counts as known."""

from datetime import timedelta

import pandas as pd

from features.labels.facts import reported


def test_nothing_is_known_before_the_delay_of_now_and_a_late_ticket_keeps_its_entry_time():
    happened = pd.Timestamp("2026-01-01T00:00:00Z")
    events = pd.DataFrame(
        {
            "timestamp": [happened, happened],
            "known_at": [happened + timedelta(minutes=10), happened + timedelta(days=2)],
        }
    ).astype("datetime64[ms, UTC]")
    assert list(reported(events, timedelta(0))["known_at"]) == list(events["known_at"])
    slow = reported(events, timedelta(hours=12))
    assert list(slow["known_at"]) == [happened + timedelta(hours=12), happened + timedelta(days=2)]
    assert slow["known_at"].dtype == events["known_at"].dtype
    assert events["known_at"].iloc[0] == happened + timedelta(minutes=10), "the frame that came in is as it was"
