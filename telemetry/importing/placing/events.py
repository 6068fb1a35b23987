"""Which node and GPU an event is about: one function for events of files, kernel logs and staged tables alike."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.importing.instants import times_of
from telemetry.importing.inventory import Installations
from telemetry.xids.locating import locate

AFTERWARDS: Final = frozenset({"repair", "replacement", "diagnostic", "driver", "other"})
"""Types that may follow a removal: the work on a part that is out of its node."""

SHARED: Final = "identity of GPUs on several nodes"
"""Reason for events that name such an identity, and not the node of one of the GPUs."""

NOT_SEEN_YET: Final = ("unknown gpu", "unknown node", "name of several nodes", "before installation")
"""Reasons that a later observation may remove."""


def place_events(
    text: dict[str, npt.NDArray[np.object_]], ms: npt.NDArray[np.int64], stays: Installations
) -> npt.NDArray[np.object_]:
    """Find the node and GPU of each event.

    Names are written as the inventory writes them, a PCI address gives the GPU, a GPU gives the node, and a MIG
    instance is its GPU.

    ``text``: ``node``, ``gpu``, ``type``, and ``pci_bus_id`` where known; ``node`` and ``gpu`` are changed in place.
    ``ms``: shape (n,).
    Returns: why an event cannot be used, or an empty text; shape (n,).
    """
    gpu, node, kind = text["gpu"], text["node"], text["type"]
    _locate(text, ms, stays)
    of_gpu, named = ~pd.isna(gpu), ~pd.isna(node)
    node[named] = stays.names.written_all(node[named])
    gpu[of_gpu] = [stays.gpu(name, there) for name, there in zip(gpu[of_gpu], node[of_gpu], strict=True)]
    codes = stays.codes([None if pd.isna(name) else name for name in gpu])
    stay = stays.find(codes, ms) if stays.unit == "gpu" else np.full(len(gpu), -1)
    there = np.array([*stays.nodes, None], dtype=object)[np.where(stay >= 0, stay, -1)]
    rows = np.flatnonzero((stay >= 0) & named)
    at_home = rows[~stays.are_elsewhere(node[rows], there[rows])]
    node[at_home] = there[at_home]
    since = pd.Series(node, dtype=object).map(stays.node_since)
    missing = "missing node and gpu" if stays.unit == "gpu" else "missing node"
    of_node = np.select(
        [of_gpu, pd.isna(node), since.isna(), ms < since], ["", missing, "unknown node", "before installation"], ""
    )
    reasons = of_node.astype(object)
    for row in np.flatnonzero(reasons == "unknown node"):
        if stays.names.is_ambiguous(node[row]):
            reasons[row] = "name of several nodes"
    if stays.unit == "gpu":
        afterwards = of_gpu & (stay == -3) & np.isin(kind.astype(str), sorted(AFTERWARDS))
        # The installations hold against an event: a ticket may quote the serial number of another GPU of the node.
        # What samples show has corrected the installations before.
        reasons[of_gpu & (stay == -1)] = "unknown gpu"
        is_shared = np.array([stays.is_shared(name) if isinstance(name, str) else False for name in gpu], bool)
        reasons[of_gpu & (stay == -2)] = "before installation"
        reasons[of_gpu & (stay == -3) & ~afterwards] = "after removal"
        placed = of_gpu & (stay >= 0)
        unnamed = placed & pd.isna(node)
        node[unnamed] = there[unnamed]
        reasons[placed & (node != there)] = "on another node than the inventory says"
        reasons[is_shared & (reasons != "")] = SHARED
        left = afterwards & pd.isna(node)
        node[left] = stays.nodes[stays.last_row(codes[left], ms[left])]
    return reasons


def _locate(text: dict[str, npt.NDArray[np.object_]], ms: npt.NDArray[np.int64], stays: Installations) -> None:
    """Fill in the GPU, and its node, of events that name a PCI address only."""
    addresses = text.get("pci_bus_id")
    if addresses is None:
        return
    rows = np.flatnonzero(pd.isna(text["gpu"]) & ~pd.isna(addresses) & ~pd.isna(text["node"]))
    if not len(rows):
        return
    events = pd.DataFrame({name: text[name][rows] for name in ("node", "gpu", "type")}, dtype=object)
    events["pci_bus_id"] = [normalise_pci_bus_id(address) or address for address in addresses[rows]]
    events["timestamp"] = times_of(ms[rows])
    events = events.reindex(columns=[*events.columns, "code", "detail", "source"])
    located, _ = locate(events, stays.frame, names=stays.names)
    text["node"][rows] = located["node"].to_numpy(dtype=object)
    text["gpu"][rows] = located["gpu"].astype(object).where(located["gpu"].notna(), None).to_numpy()
