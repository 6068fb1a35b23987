"""Random small fleets for property tests: three GPUs on two nodes, events of every kind, known early or late."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import pandas as pd
from hypothesis import strategies as st

from tests.features.builders import at, event, events, installation, inventory

DAYS = 6
"""Length of a world, from T0."""

_CODES = {
    "xid": ("48", "79", "63", "31", "74", "74", "149", "46"),
    "failure": ("DBE", "gone"),
    "repair": ("", "reset", "DBE", "gone"),
    "replacement": ("", "planned"),
    "diagnostic": ("passed", "failed"),
    "drain": ("drain", "release", "planned"),
    "driver": ("550",),
    "other": ("reboot", "note"),
    "maintenance": ("begin", "end", at(days=2).isoformat(), at(days=4).isoformat()),
}
UNPLANNED = tuple(kind for kind in _CODES if kind != "maintenance")
"""Kinds of events without planned maintenance."""


@dataclass(frozen=True)
class World:
    """What happened, who was where, and an instant R somewhere in it."""

    events: pd.DataFrame
    inventory: pd.DataFrame
    r: datetime


# Whole quarters of an hour, so that times meet each other and the borders of spans often.
instants = st.integers(0, DAYS * 96).map(lambda quarter: at(minutes=15 * quarter))
# A ticket may be entered before the time that it is dated.
delays = st.sampled_from([-90, 0, 10, 10, 60, 300, 2000]).map(lambda minutes: timedelta(minutes=minutes))


@st.composite
def some_events(draw, *, most=14, kinds=tuple(_CODES), delay=delays):
    """Events of g0 and g1 on n0, of g2 on n1, and of whole nodes."""
    out = []
    for _ in range(draw(st.integers(0, most))):
        kind = draw(st.sampled_from(kinds))
        gpu, node = draw(st.sampled_from([("g0", "n0"), ("g0", "n0"), ("g1", "n0"), ("g2", "n1"), (None, "n0")]))
        time = draw(instants)
        out.append(
            event(
                time,
                kind,
                draw(st.sampled_from(_CODES[kind])),
                gpu=gpu,
                node=node,
                known=time + draw(delay),
                detail=draw(st.sampled_from(["NETIR_LINK_EVT Fatal XC0", "NETIR_BER_EVENT Nonfatal XC0"])),
                source=draw(st.sampled_from(["kernel", "predrain-controller"])),
            )
        )
    return out


@st.composite
def some_inventory(draw):
    """g0 may leave and come back or be replaced by g3, g1 always stays, g2 may leave for good."""
    rows = [installation("g1", "n0", "1")]
    gone = draw(st.none() | instants)
    rows.append(installation("g0", "n0", "0", until=gone))
    if gone is not None:
        back = gone + timedelta(hours=draw(st.sampled_from([0, 1, 30])))
        rows.append(
            draw(
                st.sampled_from([installation("g0", "n1", "3", since=back), installation("g3", "n0", "0", since=back)])
            )
        )
    rows.append(installation("g2", "n1", "0", until=draw(st.none() | instants)))
    return rows


@st.composite
def worlds(draw, **options):
    """A world."""
    return World(events(*draw(some_events(**options))), inventory(*draw(some_inventory())), draw(instants))


@st.composite
def twins(draw, **options):
    """Two worlds with one R, alike in everything that was known at R and in nothing else."""
    shared_events, r = draw(some_events(**options)), draw(instants)
    shared_rows = draw(some_inventory())

    def version(more: list[dict], later) -> World:
        known = [e for e in shared_events if max(e["known_at"], e["timestamp"]) <= r]
        unknown = [e for e in more if max(e["known_at"], e["timestamp"]) > r]
        rows = [dict(row) for row in shared_rows if row["installed_at"] <= r]
        for row in rows:
            if row["removed_at"] is None or row["removed_at"] > r:
                row["removed_at"] = later
        extra = [] if later is None else [installation("g9", "n0", "5", since=r + timedelta(minutes=1))]
        return World(events(*known, *unknown), inventory(*rows, *extra), r)

    other_events = draw(some_events(**options))
    later = draw(st.none() | st.integers(1, 300).map(lambda quarter: r + timedelta(minutes=15 * quarter)))
    return version(shared_events, None), version(other_events, later)
