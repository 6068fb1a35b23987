"""What the online state knows of the fleet besides samples: the inventory and the events."""

from __future__ import annotations

from datetime import timedelta

import pandas as pd
import pyarrow as pa

from features.errors import InputError
from features.fleet import Fleet
from features.service import units_of
from telemetry.config import EventsSection
from telemetry.events import dedupe_events, sort_events
from telemetry.kernel_log import locate
from telemetry.pci import normalise_pci_bus_id
from telemetry.schema import EVENT_TYPES, EVENTS, conform

_INVENTORY_KEYS = ("node", "gpu", "installed_at", "removed_at")


def checked_inventory(inventory: pd.DataFrame | pa.Table) -> pd.DataFrame:
    """Take an inventory, in the layout of a dataset's.

    Raises ``InputError`` if a key column is missing, or a row names neither a GPU nor a node.
    """
    frame = _frame(inventory)
    for name in _INVENTORY_KEYS:
        if name not in frame.columns:
            raise InputError(
                f"the inventory has no column {name!r}", "a pushed inventory", "Give it as a dataset holds it."
            )
    if pd.isna(units_of(frame)).any():
        raise InputError(
            "a row of the inventory names neither a GPU nor a node",
            "a pushed inventory",
            "Fill the column gpu or node.",
        )
    Fleet.of(frame)  # its times are aware, or it says which are not
    return frame.reset_index(drop=True)


def joined_events(held: pd.DataFrame, new: pd.DataFrame | pa.Table, delay: timedelta) -> pd.DataFrame:
    """Add events to those that are known.

    ``new``: ``timestamp``, ``node`` and ``type`` at least; ``known_at`` is ``timestamp`` plus the delay where it is
    missing.
    ``delay``: ``features.delay``.
    Returns: in the layout of :data:`telemetry.schema.EVENTS`. What several sources say within the span that an import
    allows is one event.
    Raises ``InputError`` if a required column is missing or null, times have no zone, or a type is none of ours.
    """
    frame = _frame(new)
    where, do = "pushed events", "Give events as a dataset holds them."
    for name in ("timestamp", "node", "type"):
        if name not in frame.columns:
            raise InputError(f"the events have no column {name!r}", where, do)
        if frame[name].isna().any():
            raise InputError(f"{int(frame[name].isna().sum())} events have no {name!r}", where, do)
    for name in ("timestamp", "known_at"):
        if name in frame.columns and frame[name].notna().any():
            if not isinstance(frame[name].dtype, pd.DatetimeTZDtype):
                raise InputError(f"{name} of type {frame[name].dtype} has no time zone", where, "Give aware times.")
        elif name == "timestamp" and len(frame):
            raise InputError("the events have no times", where, do)
    odd = sorted(set(frame["type"].astype(str)) - set(EVENT_TYPES))
    if odd:
        raise InputError(f"{odd[0]!r} is no type of event", where, f"Give one of: {', '.join(EVENT_TYPES)}.")
    if not len(frame):
        return held
    usual = frame["timestamp"] + delay
    known = frame["known_at"] if "known_at" in frame.columns else usual
    frame = frame.assign(known_at=known.where(known.notna(), usual).astype(usual.dtype))
    frame = conform(frame[[name for name in EVENTS.names if name in frame.columns]], EVENTS).to_pandas()
    both = pd.concat([held, frame], ignore_index=True) if len(held) else frame
    return sort_events(dedupe_events(both, EventsSection().dedupe)).reset_index(drop=True)


def placed_events(events: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """Keep the events of GPUs and nodes that an inventory has, and find the GPU of those that name an address only.

    ``events``: in the layout of :data:`telemetry.landing.tables.LANDED_EVENTS`.
    Returns: in the layout of :data:`telemetry.schema.EVENTS`. An address that is no GPU's at that time, or that of
    several, makes it the node's event.
    """
    events = events.reset_index(drop=True)
    by_address = events["gpu"].isna() & events["pci_bus_id"].notna()
    if by_address.any() and "pci_bus_id" in inventory.columns:
        asked = events[by_address]
        addresses = [normalise_pci_bus_id(text) or text for text in asked["pci_bus_id"]]
        placed, _ = locate(asked.assign(pci_bus_id=addresses), inventory)
        events.loc[by_address, "gpu"] = placed["gpu"].to_numpy()
        events.loc[by_address, "node"] = placed["node"].to_numpy()
    pairs = set(zip(inventory["node"], units_of(inventory), strict=True))
    nodes = {node for node, _ in pairs}
    gpu = events["gpu"].where(events["gpu"].notna(), None)
    kept = [
        node in nodes if unit is None else (node, unit) in pairs for node, unit in zip(events["node"], gpu, strict=True)
    ]
    return events.loc[kept, list(EVENTS.names)].reset_index(drop=True)


def _frame(given: pd.DataFrame | pa.Table) -> pd.DataFrame:
    return given.to_pandas() if isinstance(given, pa.Table) else given.copy()
