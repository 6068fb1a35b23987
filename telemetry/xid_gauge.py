"""XID events from the latched gauge that DCGM reports.

``xid_last`` shows the last XID until the driver is loaded again, so an event is a change of its value to another one
but zero. Two XIDs between two samples show as one, and a repeat of the same XID does not show at all: kernel logs are
better, and where one tells of the same XID of the same GPU, the edge is left out.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.events import same_thing

CHANNEL = "xid_last"
"""The channel that is read."""

SOURCE = "xid_gauge"
"""``source`` of the events made here."""


def xid_edges(
    unit: npt.NDArray[np.int32], values: npt.NDArray[np.int32], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the rows at which a unit's latched XID changes to another one.

    Parameters
    ----------
    unit : ndarray of int32, shape (n,)
    values, valid : ndarray, shape (n,)
        The gauge, sorted by (unit, time).

    Returns
    -------
    ndarray of int64
        A unit's first report is no edge, whatever it shows: its XID is older than the data.
    """
    reported = np.flatnonzero(valid)
    if len(reported) < 2:
        return np.empty(0, np.int64)
    now, before = reported[1:], reported[:-1]
    edge = (unit[now] == unit[before]) & (values[now] != values[before]) & (values[now] != 0)
    return now[edge]


def xid_events(samples: pd.DataFrame, *, delay: timedelta, unit: str = "gpu") -> pd.DataFrame:
    """Make XID events of samples.

    Parameters
    ----------
    samples : pandas.DataFrame
        ``timestamp``, ``node``, ``gpu`` and ``xid_last`` (null where not reported), in any order.
    delay : datetime.timedelta
        Reporting delay: ``known_at`` is the sample's time plus it.
    unit : {"gpu", "node"}
        What the gauge belongs to.

    Returns
    -------
    pandas.DataFrame
        Events in the layout of :data:`telemetry.schema.EVENTS`; their ``timestamp`` is that of the first sample that
        shows the XID, which is at most one interval late.
    """
    ordered = samples.sort_values([unit, "timestamp"], kind="stable").reset_index(drop=True)
    codes = pd.factorize(ordered[unit])[0].astype(np.int32)
    valid = ordered[CHANNEL].notna().to_numpy()
    values = ordered[CHANNEL].fillna(0).to_numpy(dtype=np.int32)
    rows = xid_edges(codes, values, valid)
    chosen = ordered.iloc[rows]
    return event_rows(chosen["timestamp"], chosen["node"], chosen["gpu"], values[rows], delay)


def drop_told_edges(events: pd.DataFrame, interval: timedelta) -> pd.DataFrame:
    """Leave out the edges of which another source tells.

    Parameters
    ----------
    events : pandas.DataFrame
        In the layout of :data:`telemetry.schema.EVENTS`: of this source and of others, new and stored.
    interval : datetime.timedelta
        Time between two samples.

    Returns
    -------
    pandas.DataFrame
        Without the edges that have an event of another source for the same GPU (or node) and code within ``interval``
        of them. What was known of it more than ``interval`` after the edge does not count: until then, the edge was
        all that one could know. The rest is in the order given.
    """
    edge = ((events["source"] == SOURCE) & (events["type"] == "xid")).to_numpy(dtype=bool)
    if not edge.any() or edge.all():
        return events
    span = int(interval.total_seconds() * 1000)
    key = same_thing(events)
    stamps, known = _ms(events["timestamp"]), _ms(events["known_at"])
    told: dict[int, list[int]] = {}
    for index in np.flatnonzero(~edge & np.isin(key, key[edge])).tolist():
        told.setdefault(int(key[index]), []).append(index)
    keep = np.ones(len(events), dtype=bool)
    for index in np.flatnonzero(edge).tolist():
        others = np.array(told.get(int(key[index]), []), np.int64)
        near = np.abs(stamps[others] - stamps[index]) <= span
        keep[index] = not (near & (known[others] <= known[index] + span)).any()
    return events[keep].reset_index(drop=True)


def _ms(times: pd.Series) -> npt.NDArray[np.int64]:
    return times.dt.tz_localize(None).to_numpy().astype("datetime64[ms]").astype(np.int64)


def event_rows(
    timestamp: pd.Series, node: pd.Series, gpu: pd.Series, values: npt.NDArray[np.int32], delay: timedelta
) -> pd.DataFrame:
    """Lay edges out as events."""
    return pd.DataFrame(
        {
            "timestamp": timestamp.to_numpy(),
            "node": node.to_numpy(dtype=object),
            "gpu": gpu.to_numpy(dtype=object),
            "type": "xid",
            "code": [str(value) for value in values.tolist()],
            "detail": "change of the latched XID gauge",
            "source": SOURCE,
            "known_at": (timestamp + delay).to_numpy(),
        }
    ).astype({"timestamp": "datetime64[ms, UTC]", "known_at": "datetime64[ms, UTC]"})
