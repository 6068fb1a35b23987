"""Which GPU was seen where, from when to when: what collectors observe, brought down to runs.

A run is one GPU on one node under one driver, from its first observation to its last. A late observation of another
place inside a run splits it, so that the order in which files land does not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from telemetry.dataset.schema import ms_of
from telemetry.identity.nodes import node_key, one_spelling
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.importing.placing.evidence import ATTRIBUTES, MOST_MOVES

_LOG = logging.getLogger(__name__)

RUNS: Final = pa.schema(
    [
        pa.field("gpu", pa.string()),
        pa.field("node", pa.string(), nullable=False),
        *(pa.field(name, pa.string()) for name in ATTRIBUTES),
        pa.field("first_ms", pa.int64(), nullable=False),
        pa.field("last_ms", pa.int64(), nullable=False),
    ]
)
"""Runs; ``gpu`` null is the node itself. Instants are milliseconds since the epoch, UTC."""


def no_runs() -> pd.DataFrame:
    """Return a frame of no runs."""
    return RUNS.empty_table().to_pandas()


def merge_observations(runs: pd.DataFrame, seen: pd.DataFrame) -> pd.DataFrame:
    """Add observations to runs, sorted by (gpu, first_ms); an attribute is the last that was reported.

    ``seen``: ``gpu`` (None: the node), ``node``, any of :data:`ATTRIBUTES`, ``first_ms`` and ``last_ms`` (one instant,
    or the ends of a time in which the GPU was seen there and nowhere else).
    """
    points = _settled(_points([runs, seen]))
    if points.empty:
        return no_runs()
    points["driver"] = points.groupby("owner", sort=False)["driver"].ffill()
    before = points[["owner", "node", "driver"]].shift()
    moved = (points["owner"] != before["owner"]) | (points["node"] != before["node"])
    updated = points["driver"].notna() & before["driver"].notna() & (points["driver"] != before["driver"])
    grouped = points.groupby((moved | updated).cumsum(), sort=False)
    made = grouped[["gpu", "node", *ATTRIBUTES]].last()
    made["first_ms"] = grouped["ms"].min()
    made["last_ms"] = grouped["ms"].max()
    made = made.astype(object).where(made.notna(), None).astype({"first_ms": np.int64, "last_ms": np.int64})
    return made.reset_index(drop=True)[list(RUNS.names)]


def spell_nodes(runs: pd.DataFrame, known: Iterable[str]) -> pd.DataFrame:
    """Give each node one spelling, that of a known node where there is one, and join the runs that then are one.

    Two spellings that differ in letter case are two nodes if they have different GPUs at one PCI address.
    """
    if runs.empty:
        return runs
    located = runs[runs["gpu"].notna() & runs["pci_bus_id"].notna()].assign(key=runs["node"].map(node_key))
    gpus = located.groupby(["key", "pci_bus_id"])[["node", "gpu"]].nunique()
    apart = gpus.index[(gpus["node"] > 1) & (gpus["gpu"] > 1)].get_level_values("key")
    ordered = runs.sort_values("first_ms", kind="stable")["node"]
    spelled = one_spelling(ordered, known, apart)
    nodes = runs["node"].map(spelled)
    return runs if (nodes == runs["node"]).all() else merge_observations(no_runs(), runs.assign(node=nodes))


def _settled(points: pd.DataFrame) -> pd.DataFrame:
    """Keep a GPU that two names claim in turn where it was seen most: devices do not move that often."""
    if points.empty:
        return points
    moved = (points["node"] != points["node"].shift()) & (points["owner"] == points["owner"].shift())
    moves = moved.groupby(points["owner"], sort=False).sum()
    for owner in moves.index[moves > MOST_MOVES]:
        own = points["owner"] == owner
        nodes = points.loc[own, "node"].value_counts()
        most = min(nodes.index[nodes == nodes.max()])
        _LOG.warning("%s was seen on %s in turn; it is taken to be on %s", owner, ", ".join(sorted(nodes.index)), most)
        points = points[~own | (points["node"] == most)]
    return points.reset_index(drop=True)


def _points(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return one row for each GPU (or node), instant and place, in the order of time."""
    full: list[pd.DataFrame] = []
    for frame in (frame for frame in frames if len(frame)):
        for column in ("first_ms", "last_ms"):
            points = frame.reindex(columns=["gpu", "node", *ATTRIBUTES]).astype(object)
            # Where one place ends at the instant another begins, the end comes first.
            begins = (frame["first_ms"] == frame["last_ms"]).to_numpy() | (column == "first_ms")
            full.append(points.assign(ms=frame[column].to_numpy(np.int64), begins=begins))
    if not full:
        return pd.DataFrame()
    points = pd.concat(full, ignore_index=True)
    points = points.where(points.notna(), None)
    addresses = points["pci_bus_id"].map(lambda text: None if text is None else normalise_pci_bus_id(text) or text)
    points["pci_bus_id"] = addresses.astype(object)
    # A GPU keeps its identity when it moves; an observation without one is the node's own.
    points["owner"] = points["gpu"].where(points["gpu"].notna(), "\0" + points["node"].astype(str))
    points = points.sort_values(["owner", "ms", "begins", "node"], kind="stable")
    return points.groupby(["owner", "ms", "node"], sort=False, as_index=False).last()


def from_landed(table: pa.Table) -> pd.DataFrame:
    """Return the observations of a landed inventory table."""
    frame = table.to_pandas()
    ms = ms_of(frame["seen_at"])
    return frame.drop(columns=["seen_at"]).assign(first_ms=ms, last_ms=ms)


def from_samples(table: pa.Table) -> pd.DataFrame:
    """Return the observations that a landed sample table implies: first and last sample of each GPU (or node).

    ``table``: ``timestamp``, ``node`` and ``gpu``. Where a GPU is on two nodes within the file, each sample counts by
    itself.
    """
    frame = table.select(["gpu", "node"]).to_pandas()
    stamps = table.column("timestamp").cast(pa.int64()).to_numpy()
    return collapse([frame.assign(first_ms=stamps, last_ms=stamps)])


def collapse(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Bring observations of samples down to one row for each GPU that was in one place in all of them."""
    full = [frame for frame in frames if len(frame)]
    if not full:
        return no_runs()
    whole = pd.concat(full, ignore_index=True)
    grouped = whole.groupby(["gpu", "node"], dropna=False, sort=False)
    ends = grouped.agg(first_ms=("first_ms", "min"), last_ms=("last_ms", "max")).reset_index()
    moved = set(ends.loc[ends["gpu"].notna() & ends.duplicated("gpu", keep=False), "gpu"])
    return pd.concat([ends[~ends["gpu"].isin(moved)], whole[whole["gpu"].isin(moved)]], ignore_index=True)
