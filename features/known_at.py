"""From when an event counts: what was not known at a decision time plays no part in its row."""

from __future__ import annotations

from datetime import timedelta

import pandas as pd


def reported(events: pd.DataFrame, delay: timedelta) -> pd.DataFrame:
    """Give events their known-at times under a reporting delay.

    A dataset fixes ``known_at`` when it is imported. A ticket's entry time stands; but nothing is known earlier than
    the delay of now after it happened, whatever the delay was at the import.

    ``delay``: ``features.delay``.
    Returns: a copy with ``known_at`` at least ``timestamp + delay``.
    """
    last = events["timestamp"] if "last_at" not in events else events["last_at"].fillna(events["timestamp"])
    earliest = last + delay
    later = events["known_at"].where(events["known_at"] >= earliest, earliest)
    return events.assign(known_at=later.astype(events["known_at"].dtype))
