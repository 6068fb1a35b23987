"""Which GPU or node the events of a compaction belong to, and which of them wait for theirs to be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from telemetry.dataset.schema import EVENTS, ms_of
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.importing.events import place_events
from telemetry.importing.inventory import Installations, unit_of
from telemetry.landing.tables import LANDED_EVENTS
from telemetry.xids.locating import locate

PENDING_COLUMNS: Final = (*LANDED_EVENTS.names, "since_ms")
"""Columns of events that wait: as they were events, and since when they wait."""

_NOT_SEEN_YET: Final = ("unknown gpu", "unknown node", "name of several nodes", "before installation")


@dataclass(frozen=True, slots=True)
class Placed:
    """What a compaction does with its events.

    ``events``: those to compact, in the layout of :data:`telemetry.dataset.schema.EVENTS`.
    ``waiting``: those that wait, with the columns :data:`PENDING_COLUMNS`.
    ``reasons``: what each of them waits for.
    ``without_gpu``: XIDs to compact of which no GPU was found at their address; they are their nodes'.
    """

    events: pd.DataFrame
    waiting: pd.DataFrame
    reasons: pd.Series
    without_gpu: int


def place_landed(events: pd.DataFrame, stays: pd.DataFrame, *, waited_ms: float) -> Placed:
    """Find the GPU or node of each event, and separate those that may still find it.

    ``events``: with the columns :data:`PENDING_COLUMNS`.
    ``stays``: in the layout of :data:`INVENTORY`; a missing ``installed_at`` is "always there".
    ``waited_ms``: an event that waits since then, in milliseconds since the epoch, has waited long enough.
    """
    known = stays.assign(installed_at=stays["installed_at"].fillna(pd.Timestamp(0, tz="UTC")))
    unit = unit_of(known)
    by_address = (events["gpu"].isna() & events["pci_bus_id"].notna()).to_numpy()
    text = {
        name: events[name].astype(object).where(events[name].notna(), None).to_numpy(copy=True)
        for name in ("node", "gpu", "type")
    }
    if by_address.any():
        unlocated = events[by_address]
        addresses = [normalise_pci_bus_id(address) or address for address in unlocated["pci_bus_id"]]
        located, _ = locate(unlocated.assign(pci_bus_id=addresses), known)
        text["node"][by_address] = located["node"].to_numpy(dtype=object)
        text["gpu"][by_address] = located["gpu"].astype(object).where(located["gpu"].notna(), None).to_numpy()
    ms = ms_of(events["timestamp"])
    where = Installations(known, unit)
    reasons = place_events(text, ms, where)
    placed = events.assign(node=text["node"], gpu=text["gpu"])
    without = by_address & pd.isna(text["gpu"])
    # Where no GPU has an address, none will come by itself, and its node should know of the event at once.
    may_come = unit == "gpu" and bool(known["pci_bus_id"].notna().any())
    unseen = np.isin(reasons.astype(str), _NOT_SEEN_YET) | (without & may_come)
    waits = unseen & (events["since_ms"] > waited_ms).to_numpy()
    return Placed(
        events=placed.loc[~waits, EVENTS.names].reset_index(drop=True),
        waiting=events.loc[waits, list(PENDING_COLUMNS)].reset_index(drop=True),
        reasons=pd.Series(reasons)[waits].where(pd.Series(reasons)[waits] != "", "no gpu at its PCI address"),
        without_gpu=int((without & ~waits & (events["type"] == "xid").to_numpy()).sum()),
    )
