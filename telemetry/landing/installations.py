"""From observations, and from what the operator says, to the inventory: who was where, when."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pandas as pd

from telemetry.dataset.schema import EVENTS, INVENTORY, Unit
from telemetry.landing.observations import ATTRIBUTES

SOURCE: Final = "inventory"
"""``source`` of driver events made here."""

FROM_THE_START: Final = timedelta(hours=1)
"""A GPU first seen this soon after its node was is taken for one that stood there before anybody looked.

So is a node first seen this soon after its fleet was.
"""

_CLEARLY_MS: Final = int(FROM_THE_START.total_seconds() * 1000)
# Sources lag: what was there at one time may be seen at times as far apart as this.


def derive_installations(runs: pd.DataFrame, given: pd.DataFrame | None, before: pd.DataFrame) -> pd.DataFrame:
    """Make the inventory.

    ``runs``: in the layout of :data:`telemetry.landing.observations.RUNS`.
    ``given``: stays that somebody told, in the layout of :data:`telemetry.dataset.schema.INVENTORY` with further static
    columns. They hold, and what was seen fills their gaps: attributes nobody gave, GPUs they do not name, moves after
    them.
    ``before``: what was made of earlier observations, in the layout of :data:`INVENTORY`. An end told
    there stays where it is until the GPU itself is seen again.
    Returns: stays without overlaps. ``installed_at`` is missing where a GPU was there from the first observation of its
    node. ``removed_at`` is when the GPU was seen elsewhere, or another GPU at its address; a GPU that merely fell
    silent is still there: that is how GPUs fail.
    """
    seen = _places(runs)
    # Observations of the node itself do not count: whoever watches nodes may have begun long before anybody saw GPUs.
    node_since = runs[runs["gpu"].notna()].groupby("node")["first_ms"].min().to_dict()
    statics = _node_statics(runs)
    stays: list[dict[str, Any]] = [] if given is None else [_plain(row) for row in given.to_dict("records")]
    of_gpu: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for stay in stays:
        if stay["gpu"] is not None:
            of_gpu[stay["gpu"]].append(stay)
    for gpu, places in seen.items():
        told = sorted(of_gpu.get(gpu, []), key=_start)
        for place in places:
            made = _see(told, place, node_since)
            if made is not None:
                told.append(made)
                stays.append(made)
    _close_replaced(stays, seen, before, told=0 if given is None else len(given))
    if any(stay["gpu"] is not None for stay in stays):
        stays = [stay for stay in stays if stay["gpu"] is not None]
    elif not stays or given is None:
        named = {stay["node"] for stay in stays}
        stays += [_new_stay(node, None) for node in sorted(set(runs["node"])) if node not in named]
    for stay in stays:
        for name, value in statics.get(stay["node"], {}).items():
            if stay.get(name) is None:
                stay[name] = value
    return _frame(stays, given)


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


def _places(runs: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Return each GPU's places in the order of time, runs of one place under several drivers as one."""
    runs = _by_gpu(runs)
    moved = (runs["gpu"] != runs["gpu"].shift()) | (runs["node"] != runs["node"].shift())
    grouped = runs.groupby(moved.cumsum())
    # The driver of a stay is the one it began with; all else the newest that was told.
    merged = grouped.last().assign(driver=grouped["driver"].first(), first_ms=grouped["first_ms"].first())
    places: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for place in map(_plain, merged.assign(last_ms=grouped["last_ms"].max()).to_dict("records")):
        places[place["gpu"]].append(place)
    return places


def _see(told: list[dict[str, Any]], place: dict[str, Any], node_since: dict[str, int]) -> dict[str, Any] | None:
    """Fit a place among a GPU's stays, which are in order; return the new stay if there is one."""
    covering = [stay for stay in told if _start(stay) <= place["last_ms"] and place["first_ms"] <= _end(stay)]
    if covering:
        stay = covering[-1]
        if stay["node"] == place["node"]:
            for name in ATTRIBUTES:
                if stay.get(name) is None:
                    stay[name] = place[name]
            return None
        if stay["removed_at"] is not None or _start(stay) >= place["first_ms"]:
            return None  # somebody said that it was elsewhere at that time
        stay["removed_at"] = _instant(place["first_ms"])
    elif told and _start(told[-1]) > place["last_ms"]:
        return None  # seen before the first stay that somebody told
    new = _new_stay(place["node"], place["gpu"])
    new.update({name: place[name] for name in ATTRIBUTES})
    there = place["first_ms"] - node_since[place["node"]] <= _CLEARLY_MS
    new["installed_at"] = None if there and not told else _instant(place["first_ms"])
    return new


def _close_replaced(
    stays: list[dict[str, Any]], seen: dict[str, list[dict[str, Any]]], before: pd.DataFrame, *, told: int
) -> None:
    """End the stays of GPUs at whose address another one was seen after them; the first so many stays are told."""
    own = {(gpu, place["node"]): place for gpu, places in seen.items() for place in places}
    at: dict[tuple[str, str | None], list[dict[str, Any]]] = defaultdict(list)
    for place in (place for places in seen.values() for place in places if place["pci_bus_id"] is not None):
        at[(place["node"], place["pci_bus_id"])].append(place)
    ended: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in map(_plain, before[before["removed_at"].notna()].to_dict("records")):
        ended[(row["gpu"], row["node"])].append(int(_end(row)))
    for number, stay in enumerate(stays):
        if stay["removed_at"] is not None or stay["gpu"] is None:
            continue
        mine = own.get((stay["gpu"], stay["node"]), {})
        if mine and mine["last_ms"] < _start(stay):
            mine = {}  # of an earlier stay there
        after = mine.get("last_ms", _start(stay))
        address = mine.get("pci_bus_id") or stay.get("pci_bus_id")
        others = [place for place in at.get((stay["node"], address), []) if place["gpu"] != stay["gpu"]]
        ends = [place["first_ms"] for place in others if place["first_ms"] > after]
        ends += [place["last_ms"] for place in others if mine and _outlasts(place, mine)]
        # Whoever told a stay may take its end back; the end of one that was only seen holds.
        if ends or number >= told:
            ends += [ms for ms in ended[(stay["gpu"], stay["node"])] if ms >= after and ms > _start(stay)]
        if ends:
            stay["removed_at"] = _instant(min(ends))


def _outlasts(place: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a GPU was clearly seen at an address later than another one, and came there at another time.

    GPUs that came together stand beside each other, and come under one address where a node numbers its bus anew: one
    of them that falls silent then was not replaced.
    """
    together = abs(place["first_ms"] - other["first_ms"]) <= _CLEARLY_MS
    return not together and place["last_ms"] - other["last_ms"] > _CLEARLY_MS


def _node_statics(runs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return what was last told of each node itself."""
    own = runs[runs["gpu"].isna()].sort_values("first_ms", kind="stable")
    last = own.groupby("node")[["cluster", "group", "rack", "nvlink_domain"]].last()
    return {str(node): _plain(values) for node, values in last.to_dict("index").items()}


def _new_stay(node: str, gpu: str | None) -> dict[str, Any]:
    return dict.fromkeys(INVENTORY.names) | {"node": node, "gpu": gpu}


def _plain(row: dict[Any, Any]) -> dict[str, Any]:
    return {str(name): None if pd.isna(value) else value for name, value in row.items()}


def _start(stay: dict[str, Any]) -> int:
    return 0 if stay["installed_at"] is None else int(stay["installed_at"].timestamp() * 1000)


def _end(stay: dict[str, Any]) -> float:
    return np.inf if stay["removed_at"] is None else int(stay["removed_at"].timestamp() * 1000)


def _instant(ms: int) -> pd.Timestamp:
    return pd.Timestamp(ms, unit="ms", tz="UTC")


def _instants(ms: pd.Series) -> pd.Series:
    return pd.to_datetime(ms, unit="ms", utc=True).astype("datetime64[ms, UTC]")


def _frame(stays: list[dict[str, Any]], given: pd.DataFrame | None) -> pd.DataFrame:
    extra = [] if given is None else [str(name) for name in given.columns if name not in INVENTORY.names]
    frame = pd.DataFrame(stays, columns=[*INVENTORY.names, *extra])
    for name in ("installed_at", "removed_at"):
        frame[name] = pd.to_datetime(frame[name], utc=True).astype("datetime64[ms, UTC]")
    texts = [field.name for field in INVENTORY if field.name not in ("installed_at", "removed_at")]
    frame[texts] = frame[texts].astype(object).where(frame[texts].notna(), None)
    if given is not None:
        for name in extra:
            frame[name] = frame[name].astype(given[name].dtype) if frame[name].notna().all() else frame[name]
    return frame.sort_values(["node", "gpu", "installed_at"], kind="stable", na_position="first").reset_index(drop=True)
