"""Small events, inventories and clocks for the tests of features."""

from datetime import UTC, datetime, timedelta

import pandas as pd

T0 = datetime(2025, 3, 1, tzinfo=UTC)
"""The instant from which :func:`at` counts."""

EVENT_COLUMNS = ("timestamp", "node", "gpu", "type", "code", "detail", "source", "known_at")


def at(hours: float = 0.0, *, days: float = 0.0, minutes: float = 0.0, seconds: float = 0.0) -> datetime:
    """Instant after :data:`T0`, to the millisecond."""
    span = timedelta(hours=hours, days=days, minutes=minutes, seconds=seconds)
    return T0 + timedelta(milliseconds=round(span / timedelta(milliseconds=1)))


def event(time, type_="xid", code="", *, gpu="g0", node="n0", known=None, detail="", source="kernel") -> dict:
    """One event; known ten minutes after it happened by default."""
    return {
        "timestamp": time,
        "node": node,
        "gpu": gpu,
        "type": type_,
        "code": code,
        "detail": detail,
        "source": source,
        "known_at": time + timedelta(minutes=10) if known is None else known,
    }


def events(*rows: dict) -> pd.DataFrame:
    """Events as a dataset holds them."""
    frame = pd.DataFrame(list(rows), columns=list(EVENT_COLUMNS))
    for name in ("timestamp", "known_at"):
        frame[name] = stamps(frame[name])
    for name in ("node", "gpu", "type", "code", "detail", "source"):
        frame[name] = frame[name].astype("str")
    return frame


def installation(gpu="g0", node="n0", slot="0", since=None, until=None, **extra) -> dict:
    """One installation of the inventory; from ten days before T0 and for ever by default."""
    since = at(days=-10) if since is None else since
    return {"gpu": gpu, "node": node, "slot": slot, "installed_at": since, "removed_at": until, **extra}


def inventory(*rows: dict) -> pd.DataFrame:
    """Inventory with the columns that labels and history read."""
    frame = pd.DataFrame(list(rows))
    for name in ("installed_at", "removed_at"):
        frame[name] = stamps(frame[name])
    for name in ("gpu", "node", "slot"):
        frame[name] = frame[name].astype("str")
    return frame


def stamps(values) -> pd.DatetimeIndex:
    return pd.DatetimeIndex(pd.to_datetime(list(values), utc=True)).as_unit("ms")


def rows(*pairs, node="n0") -> pd.DataFrame:
    """Decision rows of (time, unit)."""
    units = [unit for _, unit in pairs]
    return pd.DataFrame(
        {
            "decision_time": stamps([time for time, _ in pairs]),
            "node": pd.array([node] * len(units), dtype="str"),
            "gpu": pd.array(units, dtype="str"),
            "unit": pd.array(units, dtype="str"),
        }
    )
