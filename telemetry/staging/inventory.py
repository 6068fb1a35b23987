"""Inventory of a live fleet, derived from collectors' observations and operators' installations.

Observations are condensed into runs: one GPU on one node with one driver, from its first observation to its last. A
late observation of another location splits a run, so the order of files does not matter.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from foundation.times import NEVER, instants
from telemetry.dataset.schema import EVENTS, INVENTORY, Unit, ms_of
from telemetry.identity.devices import device_key, normalise_pci_bus_id, place_identity
from telemetry.identity.nodes import node_key, one_spelling
from telemetry.importing.evidence import ATTRIBUTES, correct_installations, shared_units
from telemetry.importing.slots import CLEARLY_MS, Replacements, records, stays_in_places

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
"""Runs; ``gpu`` null is the node itself. Times are milliseconds since the epoch, UTC."""


def no_runs() -> pd.DataFrame:
    """Return an empty frame of runs."""
    return RUNS.empty_table().to_pandas()


def merge_observations(runs: pd.DataFrame, observations: pd.DataFrame) -> pd.DataFrame:
    """Merge observations into runs, sorted by (gpu, first_ms); the last reported value of an attribute counts.

    ``observations``: ``gpu`` (None: the node), ``node``, any of :data:`ATTRIBUTES`, ``first_ms`` and ``last_ms``
    (equal, or the ends of a period in which the GPU was seen only there).
    """
    points = _points([runs, observations])
    if points.empty:
        return no_runs()
    points["driver"] = points.groupby("owner", sort=False)["driver"].ffill()
    previous = points[["owner", "node", "driver"]].shift()
    has_moved = (points["owner"] != previous["owner"]) | (points["node"] != previous["node"])
    points["address"] = points.groupby(has_moved.cumsum(), sort=False)["pci_bus_id"].ffill()
    previous["address"] = points["address"].shift()
    is_new_run = has_moved.copy()
    for name in ("driver", "address"):
        is_new_run |= points[name].notna() & previous[name].notna() & (points[name] != previous[name])
    grouped = points.groupby(is_new_run.cumsum(), sort=False)
    merged = grouped[["gpu", "node", *ATTRIBUTES]].last()
    merged["first_ms"] = grouped["ms"].min()
    merged["last_ms"] = grouped["ms"].max()
    merged = merged.astype(object).where(merged.notna(), None).astype({"first_ms": np.int64, "last_ms": np.int64})
    return merged.reset_index(drop=True)[list(RUNS.names)]


def unify_spellings(runs: pd.DataFrame, known: Iterable[str], known_gpus: Sequence[str]) -> pd.DataFrame:
    """Unify the spelling of each node and GPU, preferring known ones, and merge the resulting runs.

    Exporters write UUIDs with and without the prefix ``GPU-``. Spellings of a node that differ in letter case are
    different nodes if they have different GPUs at one PCI address.
    """
    if runs.empty:
        return runs
    located = runs[runs["gpu"].notna() & runs["pci_bus_id"].notna()].assign(key=runs["node"].map(node_key))
    gpus = located.groupby(["key", "pci_bus_id"])[["node", "gpu"]].nunique()
    distinct = gpus.index[(gpus["node"] > 1) & (gpus["gpu"] > 1)].get_level_values("key")
    ordered = runs.sort_values("first_ms", kind="stable")
    by_key: dict[str, str] = {}
    for gpu in (*known_gpus, *sorted(ordered["gpu"].dropna().unique(), key=len, reverse=True)):
        by_key.setdefault(device_key(gpu), gpu)
    named = {gpu: by_key[device_key(gpu)] for gpu in ordered["gpu"].dropna()} | {gpu: gpu for gpu in known_gpus}
    nodes = runs["node"].map(one_spelling(ordered["node"], known, distinct))
    gpus = runs["gpu"].map(named, na_action="ignore").where(runs["gpu"].notna(), None)
    is_same = (nodes == runs["node"]).all() and (gpus[gpus.notna()] == runs["gpu"][gpus.notna()]).all()
    return runs if is_same else merge_observations(no_runs(), runs.assign(node=nodes, gpu=gpus))


def distinguish(
    runs: pd.DataFrame, step: timedelta, known: Collection[str] = ()
) -> tuple[pd.DataFrame, dict[tuple[str, str], str]]:
    """Rename GPUs whose identity was seen on two nodes at the same time, by node and location.

    ``known``: GPUs of the dataset, which keep their names.
    Returns: the runs without strays, with one run per node for a shared identity; and the names by identity and node.
    """
    of_gpus = runs[runs["gpu"].notna()]
    unit, gpus = pd.factorize(of_gpus["gpu"])
    ends = pd.DataFrame({"unit": unit, "node": pd.factorize(of_gpus["node"])[0]})
    rows = pd.concat([ends.assign(ms=of_gpus[name].to_numpy()) for name in ("first_ms", "last_ms")], ignore_index=True)
    shared, strays = shared_units(rows.sort_values(["unit", "ms", "node"]), step // timedelta(milliseconds=1))
    twins = runs[runs["gpu"].isin([gpus[code] for code in shared])].sort_values("last_ms", kind="stable")
    names: dict[tuple[str, str], str] = {}
    for (gpu, node), part in twins.groupby(["gpu", "node"]):
        address, slot = (next(iter(part[name].dropna()[::-1]), None) for name in ("pci_bus_id", "slot"))
        by_identity = f"{node}@{gpu}"
        places = (place_identity(node, pci_bus_id=address), place_identity(node, slot=slot), by_identity)
        choices = [name for name in places if name is not None]
        names[gpu, node] = next((name for name in choices if name in known), choices[0])
    left_out = {gpus[code] for code in (*shared, *strays["unit"])}
    others = runs[~runs["gpu"].isin(left_out)]
    if twins.empty:
        return others.reset_index(drop=True), names
    of_place = twins.groupby(["gpu", "node"], as_index=False)
    ends = of_place.agg({"first_ms": "min", "last_ms": "max"})
    condensed = of_place.last().drop(columns=["first_ms", "last_ms"]).merge(ends, on=["gpu", "node"])
    return pd.concat([others, condensed[runs.columns]], ignore_index=True), names


def under_names(runs: pd.DataFrame, names: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """Return runs renamed by :func:`distinguish`."""
    keys = zip(runs["gpu"], runs["node"], strict=True)
    return runs.assign(gpu=pd.Series([names.get(key, key[0]) for key in keys], runs.index, dtype=object))


def _points(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return one row per GPU (or node), time and location, in order of time."""
    full: list[pd.DataFrame] = []
    for frame in (frame for frame in frames if len(frame)):
        for column in ("first_ms", "last_ms"):
            points = frame.reindex(columns=["gpu", "node", *ATTRIBUTES]).astype(object)
            # If a run ends at the time another starts, the end sorts first.
            begins = (frame["first_ms"] == frame["last_ms"]).to_numpy() | (column == "first_ms")
            full.append(points.assign(ms=frame[column].to_numpy(np.int64), begins=begins))
    if not full:
        return pd.DataFrame()
    points = pd.concat(full, ignore_index=True)
    points = points.where(points.notna(), None)
    addresses = points["pci_bus_id"].map(lambda text: None if text is None else normalise_pci_bus_id(text) or text)
    points["pci_bus_id"] = addresses.astype(object)
    # A GPU keeps its identity when it moves; observations without a GPU belong to the node.
    points["owner"] = points["gpu"].where(points["gpu"].notna(), "\0" + points["node"].astype(str))
    points = points.sort_values(["owner", "ms", "begins", "node"], kind="stable")
    return points.groupby(["owner", "ms", "node"], sort=False, as_index=False).last()


def from_staged(table: pa.Table) -> pd.DataFrame:
    """Return the observations of a staged inventory table."""
    frame = table.to_pandas()
    ms = ms_of(frame["seen_at"])
    return frame.drop(columns=["seen_at"]).assign(first_ms=ms, last_ms=ms)


def from_samples(table: pa.Table) -> pd.DataFrame:
    """Return the observations in a staged sample table: first and last sample of each GPU (or node).

    ``table``: ``timestamp``, ``node`` and ``gpu``. If a GPU is on two nodes within the file, each sample is an
    observation.
    """
    frame = table.select(["gpu", "node"]).to_pandas()
    stamps = table.column("timestamp").cast(pa.int64()).to_numpy()
    return collapse([frame.assign(first_ms=stamps, last_ms=stamps)])


def collapse(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Condense observations to one row for each GPU that was on one node in all of them."""
    full = [frame for frame in frames if len(frame)]
    if not full:
        return no_runs()
    observations = pd.concat(full, ignore_index=True)
    grouped = observations.groupby(["gpu", "node"], dropna=False, sort=False)
    ends = grouped.agg(first_ms=("first_ms", "min"), last_ms=("last_ms", "max")).reset_index()
    moved = set(ends.loc[ends["gpu"].notna() & ends.duplicated("gpu", keep=False), "gpu"])
    return pd.concat([ends[~ends["gpu"].isin(moved)], observations[observations["gpu"].isin(moved)]], ignore_index=True)


SOURCE: Final = "inventory"

_TEXTS: Final = [name for name in INVENTORY.names if name not in ("installed_at", "removed_at")]
_STATICS: Final = ["cluster", "group", "rack", "nvlink_domain"]


def derive_inventory(runs: pd.DataFrame, declared: pd.DataFrame | None, previous: pd.DataFrame) -> pd.DataFrame:
    """Derive the inventory.

    ``runs``: in the layout of :data:`telemetry.staging.inventory.RUNS`.
    ``declared``: installations from operators, in the layout of :data:`telemetry.dataset.schema.INVENTORY` with
    further static columns. They take precedence; observations fill their gaps: missing attributes, unlisted GPUs, later
    moves.
    ``previous``: the previously derived inventory, in the layout of :data:`INVENTORY`. Its removals hold until
    the GPU is seen again.
    Returns: installations without overlaps. ``installed_at`` is null if the GPU was there from the first observation of
    its node. ``removed_at`` is when the GPU was seen elsewhere, or another GPU at its address; a GPU that fell silent
    is still installed, because that is how GPUs fail.
    """
    known = INVENTORY.empty_table().to_pandas() if declared is None else declared
    # Runs are not split by slot: only addresses are places.
    stays = stays_in_places(_places(runs).assign(slot=None), known.assign(slot=None))
    replacements = Replacements(stays, known)
    observed = stays.assign(slot=_places(runs)["slot"])
    frame, contradictions = correct_installations(known, observed, unit="gpu", replacements=replacements)
    ended = set(known["gpu"][known["removed_at"].notna()])
    for line in contradictions:
        if line.split(" ", 1)[0] in ended:  # open installations may have moved since
            _LOG.warning("observations contradict the inventory: %s", line)
    if frame.empty:
        frame = frame.reindex(range(runs["node"].nunique())).assign(node=sorted(set(runs["node"])))
    in_place = known[known["removed_at"].isna()]
    of_open = set(zip(in_place["gpu"], in_place["node"], strict=True))
    declared_ends = set(known["removed_at"].dropna())
    revocable = frame["gpu"].notna() & ~frame["removed_at"].isin(declared_ends)
    frame["removed_at"] = _ends(frame, revocable, replacements, previous, open_installations=of_open)
    statics = runs[runs["gpu"].isna()].sort_values("first_ms", kind="stable").groupby("node")[_STATICS].last()
    for name in _STATICS:
        frame[name] = frame[name].where(frame[name].notna(), frame["node"].map(statics[name]))
    frame[_TEXTS] = frame[_TEXTS].astype(object).where(frame[_TEXTS].notna(), None)
    if frame["gpu"].notna().any():
        frame = frame[frame["gpu"].notna()]
    return frame.sort_values(["node", "gpu", "installed_at"], kind="stable", na_position="first", ignore_index=True)


def late_nodes(runs: pd.DataFrame, events: pd.DataFrame, unit: Unit) -> dict[str, pd.Timestamp]:
    """Return the nodes first seen well after their fleet, with their first known time.

    ``events``: events with plausible times, assigned to nodes.
    ``unit``: unit of the fleet; a GPU node is first seen with its first GPU.
    """
    first_ms = (runs[runs["gpu"].notna()] if unit == "gpu" else runs).groupby("node")["first_ms"].min()
    late_ms = first_ms[first_ms - first_ms.min() > CLEARLY_MS]
    first_seen = pd.Series(instants(late_ms.to_numpy(np.int64)), late_ms.index)
    earliest = events[events["node"].isin(first_seen.index)].groupby("node")["timestamp"].min()
    return dict(pd.concat([first_seen, earliest]).groupby(level=0).min())


def driver_changes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a ``driver`` event for each change of a GPU's driver, at the first observation of the new one."""
    known = _by_gpu(runs[runs["driver"].notna()])
    previous = known.groupby("gpu")["driver"].shift()
    changed = known[previous.notna() & (previous != known["driver"])]
    times = pd.Series(instants(changed["first_ms"].to_numpy(np.int64)), changed.index)
    detail = "driver " + previous[changed.index].astype(object) + " before"
    events = changed[["node", "gpu"]].assign(timestamp=times, known_at=times, type="driver", code=changed["driver"])
    return events.assign(detail=detail, source=SOURCE).reindex(columns=EVENTS.names).reset_index(drop=True)


def _by_gpu(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["gpu"].notna()].sort_values(["gpu", "first_ms"], kind="stable")


def _places(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the locations of GPUs, per GPU in order of time; runs that differ only in driver are merged."""
    runs = _by_gpu(runs)
    has_moved = (runs["gpu"] != runs["gpu"].shift()) | (runs["node"] != runs["node"].shift())
    address = runs.groupby(has_moved.cumsum())["pci_bus_id"].ffill()
    is_new_place = has_moved | (address.notna() & address.shift().notna() & (address != address.shift()))
    grouped = runs.groupby(is_new_place.cumsum())
    # The driver of an installation is the first one; other attributes are the newest reported.
    first = grouped[["driver", "first_ms"]].first()
    places = grouped.last().assign(**first, last_ms=grouped["last_ms"].max())
    # Observations of the node itself do not count: a node may be observed long before its GPUs.
    since_node = places["first_ms"] - places.groupby("node")["first_ms"].transform("min")
    return places.assign(is_from_start=since_node <= CLEARLY_MS)


def _ends(
    installations: pd.DataFrame,
    derived: pd.Series,
    replacements: Replacements,
    previous: pd.DataFrame,
    *,
    open_installations: set[tuple[str, str]],
) -> pd.Series:
    """Return the ends of installations, including removals in ``previous`` of GPUs that were not seen again.

    ``derived``: installations whose end no operator gives. ``open_installations``: GPU and node of operators'
    installations without an end.
    """
    gpus, starts = previous["gpu"], previous["installed_at"]
    moves = pd.MultiIndex.from_arrays([gpus, previous["removed_at"]]).isin(pd.MultiIndex.from_arrays([gpus, starts]))
    ended = previous[previous["removed_at"].notna() & ~moves]
    ends_before = ended.assign(ms=ms_of(ended["removed_at"])).groupby(["gpu", "node"])["ms"].agg(list).to_dict()
    start, end = ms_of(installations["installed_at"], unknown=-1), ms_of(installations["removed_at"], unknown=NEVER)
    for number, installation in enumerate(records(installations.assign(start=start, end=end))):
        key = (installation["gpu"], installation["node"])
        # An operator can revoke a removal; a derived removal of an observed installation is kept.
        if not derived.iloc[number] or (end[number] == NEVER and key in open_installations):
            continue
        stay = replacements.last_stay(installation)
        after = installation["start"] if stay is None else stay["last_ms"]
        earlier = [ms for ms in ends_before.get(key, []) if ms >= after and ms > installation["start"]]
        end[number] = min([*earlier, end[number]])
    return pd.Series(instants(end), installations.index)
