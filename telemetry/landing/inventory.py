"""The inventory of a live fleet, from observations and from what operators gave: which GPU was where, and its moves."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pandas as pd

from telemetry.dataset.schema import EVENTS, INVENTORY, Unit, ms_of
from telemetry.landing.observations import ATTRIBUTES

SOURCE: Final = "inventory"
"""``source`` of driver events made here."""

FROM_THE_START: Final = timedelta(hours=1)
"""A GPU first seen this soon after its node was is taken for one that was there before the first observation.

So is a node first seen this soon after its fleet was.
"""

_CLEARLY_MS: Final = int(FROM_THE_START.total_seconds() * 1000)
# Sources lag: what was there at one time may be seen at times as far apart as this.

_ALWAYS, _OPEN, _NAT = -1, 1 << 62, np.iinfo(np.int64).min
# As ``start`` and ``end`` of a stay, in milliseconds: there from the first observation, and still there.

_TEXTS: Final = [name for name in INVENTORY.names if name not in ("installed_at", "removed_at")]
_STATICS: Final = ["cluster", "group", "rack", "nvlink_domain"]


def derive_inventory(runs: pd.DataFrame, given: pd.DataFrame | None, before: pd.DataFrame) -> pd.DataFrame:
    """Make the inventory.

    ``runs``: in the layout of :data:`telemetry.landing.observations.RUNS`.
    ``given``: stays that an operator gave, in the layout of :data:`telemetry.dataset.schema.INVENTORY` with further
    static columns. They hold, and observations fill their gaps: missing attributes, GPUs they do not name, moves after
    them.
    ``before``: what was made of earlier observations, in the layout of :data:`INVENTORY`. An end there holds until the
    GPU itself is seen again.
    Returns: stays without overlaps. ``installed_at`` is missing where a GPU was there from the first observation of its
    node. ``removed_at`` is when the GPU was seen elsewhere, or another GPU at its address; a GPU that merely fell
    silent is still there: that is how GPUs fail.
    """
    seen = _places(runs)
    # Observations of the node itself do not count: a node may be watched long before its GPUs are.
    node_since = runs[runs["gpu"].notna()].groupby("node")["first_ms"].min().to_dict()
    stays: list[dict[str, Any]] = []
    if given is not None:
        start, end = ms_of(given["installed_at"], unknown=_ALWAYS), ms_of(given["removed_at"], unknown=_OPEN)
        stays = _records(given[_TEXTS].assign(start=start, end=end))
    of_gpu: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
    for stay in sorted(stays, key=lambda stay: stay["start"]):
        of_gpu[stay["gpu"]].append(stay)
    for place in seen:
        new = _see(of_gpu[place["gpu"]], place, node_since)
        if new is not None:
            of_gpu[place["gpu"]].append(new)
            stays.append(new)
    _close_replaced(stays, seen, before, given=0 if given is None else len(given))
    if not stays:
        stays = [{"node": node, "start": _ALWAYS, "end": _OPEN} for node in sorted(set(runs["node"]))]
    frame = pd.DataFrame(stays, columns=[*INVENTORY.names, "start", "end"])
    frame["installed_at"] = _instants(frame["start"], unknown=_ALWAYS)
    frame["removed_at"] = _instants(frame.pop("end"), unknown=_OPEN)
    statics = runs[runs["gpu"].isna()].sort_values("first_ms", kind="stable").groupby("node")[_STATICS].last()
    for name in _STATICS:
        frame[name] = frame[name].where(frame[name].notna(), frame["node"].map(statics[name]))
    frame[_TEXTS] = frame[_TEXTS].astype(object).where(frame[_TEXTS].notna(), None)
    if given is not None:
        frame = frame.join(given.drop(columns=INVENTORY.names, errors="ignore").reset_index(drop=True))
    if frame["gpu"].notna().any():
        frame = frame[frame["gpu"].notna()]
    frame = frame.sort_values(["node", "gpu", "start"], kind="stable").drop(columns="start")
    return frame.reset_index(drop=True)


def late_nodes(runs: pd.DataFrame, events: pd.DataFrame, unit: Unit) -> dict[str, pd.Timestamp]:
    """Return the nodes first seen well after their fleet was, each with the first instant known of it.

    ``events``: those of clocks that can be right and with the node of their GPU.
    ``unit``: what the fleet is of: a node of GPUs is seen when the first of them is.
    """
    first_ms = (runs[runs["gpu"].notna()] if unit == "gpu" else runs).groupby("node")["first_ms"].min()
    late = _instants(first_ms[first_ms - first_ms.min() > _CLEARLY_MS])
    earliest = events[events["node"].isin(late.index)].groupby("node")["timestamp"].min()
    return dict(pd.concat([late, earliest]).groupby(level=0).min())


def driver_changes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a ``driver`` event for each change of a GPU's driver, known when the new one was first seen."""
    known = _by_gpu(runs[runs["driver"].notna()])
    before = known.groupby("gpu")["driver"].shift()
    changed = known[before.notna() & (before != known["driver"])]
    when = _instants(changed["first_ms"])
    detail = "driver " + before[changed.index].astype(object) + " before"
    made = changed[["node", "gpu"]].assign(timestamp=when, known_at=when, type="driver", code=changed["driver"])
    return made.assign(detail=detail, source=SOURCE).reindex(columns=EVENTS.names).reset_index(drop=True)


def _by_gpu(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["gpu"].notna()].sort_values(["gpu", "first_ms"], kind="stable")


def _places(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the places of GPUs, each GPU's in order of time; runs of one place under several drivers are one."""
    runs = _by_gpu(runs)
    moved = (runs["gpu"] != runs["gpu"].shift()) | (runs["node"] != runs["node"].shift())
    grouped = runs.groupby(moved.cumsum())
    # The driver of a stay is the one it began with; all else the newest that was reported.
    first = grouped[["driver", "first_ms"]].first()
    return _records(grouped.last().assign(**first, last_ms=grouped["last_ms"].max()))


def _see(stays: list[dict[str, Any]], place: dict[str, Any], node_since: dict[str, int]) -> dict[str, Any] | None:
    """Fit a place among a GPU's stays, which are in order; return the new stay if there is one."""
    covering = [stay for stay in stays if stay["start"] <= place["last_ms"] and place["first_ms"] <= stay["end"]]
    if covering:
        stay = covering[-1]
        if stay["node"] == place["node"]:
            stay.update({name: place[name] for name in ATTRIBUTES if stay.get(name) is None})
            return None
        if stay["end"] != _OPEN or stay["start"] >= place["first_ms"]:
            return None  # an operator says that it was elsewhere at that time
        stay["end"] = place["first_ms"]
    elif stays and stays[-1]["start"] > place["last_ms"]:
        return None  # seen before the first stay that an operator gave
    there = not stays and place["first_ms"] - node_since[place["node"]] <= _CLEARLY_MS
    attributes = {name: place[name] for name in ("node", "gpu", *ATTRIBUTES)}
    return attributes | {"start": _ALWAYS if there else place["first_ms"], "end": _OPEN}


def _close_replaced(
    stays: list[dict[str, Any]], seen: list[dict[str, Any]], before: pd.DataFrame, *, given: int
) -> None:
    """End the stays of GPUs at whose address another one was seen after them; the first ``given`` are an operator's."""
    place_of = {(place["gpu"], place["node"]): place for place in seen}
    at_address: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for place in seen:
        at_address[(place["node"], place["pci_bus_id"])].append(place)
    ended = before[before["removed_at"].notna()]
    ends_before = ended.assign(ms=ms_of(ended["removed_at"])).groupby(["gpu", "node"])["ms"].agg(list).to_dict()
    for number, stay in enumerate(stays):
        if stay["end"] != _OPEN or stay["gpu"] is None:
            continue
        key = (stay["gpu"], stay["node"])
        own = place_of.get(key)
        if own is not None and own["last_ms"] < stay["start"]:
            own = None  # of an earlier stay there
        after = stay["start"] if own is None else own["last_ms"]
        address = (own or stay)["pci_bus_id"] or stay.get("pci_bus_id")
        others = at_address.get((stay["node"], address), []) if address is not None else []
        others = [place for place in others if place["gpu"] != stay["gpu"]]
        ends = [place["first_ms"] for place in others if place["first_ms"] > after]
        ends += [place["last_ms"] for place in others if own is not None and _outlasts(place, own)]
        # An operator may take an end back; the end of a stay that was only seen holds.
        if ends or number >= given:
            ends += [ms for ms in ends_before.get(key, []) if ms >= after and ms > stay["start"]]
        if ends:
            stay["end"] = min(ends)


def _outlasts(place: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a GPU was clearly seen at an address later than another one, and came there at another time.

    GPUs that came together are next to each other, and come under one address where a node numbers its bus again: one
    of them that falls silent then was not replaced.
    """
    together = abs(place["first_ms"] - other["first_ms"]) <= _CLEARLY_MS
    return not together and place["last_ms"] - other["last_ms"] > _CLEARLY_MS


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _instants(ms: pd.Series, *, unknown: int = _NAT) -> pd.Series:
    values = ms.to_numpy(np.int64)
    return pd.Series(np.where(values == unknown, _NAT, values).astype("datetime64[ms]"), ms.index).dt.tz_localize("UTC")
