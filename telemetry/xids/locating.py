"""Which GPU an event means that names a node and a PCI address."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import pandas as pd

from telemetry.dataset.schema import EVENTS, ms_of
from telemetry.identity.devices import device_key
from telemetry.identity.nodes import NodeNames
from telemetry.identity.pci import normalise_pci_bus_id

_FOREVER: Final = 1 << 62


def locate(
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    *,
    delay: timedelta = timedelta(0),
    names: NodeNames | None = None,
) -> tuple[pd.DataFrame, int]:
    """Find the GPU of each event by its node and PCI address at its time.

    ``events``: with the columns :data:`telemetry.kernel_log.importing.COLUMNS`.
    ``inventory``: installations in the layout of :data:`telemetry.dataset.schema.INVENTORY`.
    ``delay``: ``known_at`` is the event's time plus this. ``names``: of nodes; default: those of the inventory.
    Returns ``events``: in the layout of :data:`EVENTS`, the node as the inventory writes it. An event
    whose address is not in the inventory at that time, or that of several GPUs, has a null ``gpu``: it is the node's.
    """
    names = names or NodeNames(inventory["node"])
    nodes = events["node"].map({node: names.written(node) for node in events["node"].unique()}).astype(object)
    places = inventory[["gpu", "node"]].astype(object)
    places["bus"] = inventory["pci_bus_id"].map(lambda bus: normalise_pci_bus_id(bus) or bus, na_action="ignore")
    places["start"] = ms_of(inventory["installed_at"], unknown=-_FOREVER)
    places["end"] = ms_of(inventory["removed_at"], unknown=_FOREVER)
    by_address = places.assign(key=places["node"] + "\n" + places["bus"])
    by_gpu = places.assign(key=places["gpu"].map(device_key, na_action="ignore"))
    gpu_keys = events["gpu"].astype(object).map(device_key, na_action="ignore")
    is_known = gpu_keys.isin(by_gpu["key"].dropna())
    key = gpu_keys.where(is_known, nodes + "\n" + events["pci_bus_id"].astype(object))
    queries = pd.DataFrame({"event": range(len(events)), "ms": ms_of(events["timestamp"]), "key": key.to_numpy()})
    pairs = queries.dropna(subset="key").merge(pd.concat([by_gpu, by_address]), on="key")
    pairs = pairs[(pairs["start"] <= pairs["ms"]) & (pairs["ms"] <= pairs["end"])]
    # At the instant of a swap both installations cover it; the newer one is in the slot.
    inner = pairs["ms"] < pairs["end"]
    pairs = pairs[inner | ~pairs["event"].isin(pairs.loc[inner, "event"])]
    match = pairs.groupby("event").agg(gpu=("gpu", "first"), gpus=("gpu", "nunique"), node=("node", "last"))
    match = match.reindex(range(len(events))).set_axis(events.index)
    gpus = match["gpu"].astype(object).where(match["gpus"] == 1, None)
    # The sum is in microseconds, which do not stack with the milliseconds of every other source.
    known_at = (events["timestamp"] + delay).astype("datetime64[ms, UTC]")
    located = events.assign(gpu=gpus, node=match["node"].astype(object).fillna(nodes), known_at=known_at)
    return located[list(EVENTS.names)], int(located["gpu"].isna().sum())
