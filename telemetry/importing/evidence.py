"""Samples as evidence of where GPUs were: installations without an inventory, and corrections of an outdated one.

A sample that names GPU and node is better evidence than an inventory. If they disagree, the sample is trusted, the
dataset's inventory is corrected, and the contradiction is reported.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from foundation.times import NEVER, instants
from telemetry.dataset.meta import instant_text
from telemetry.dataset.schema import INVENTORY, Unit, ms_of
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.samples.block import Spill
from telemetry.importing.slots import Replacements, records

ATTRIBUTES: Final = ("slot", "pci_bus_id", "serial", "model", "driver", "cluster", "group", "rack", "nvlink_domain")
_PLACE_ATTRIBUTES: Final = ("slot", "pci_bus_id", "cluster", "group", "rack", "nvlink_domain")
# Attributes of the location, which do not move with the GPU.
MAX_MOVES: Final = 12
"""A unit that changes nodes more often is an identity shared by GPUs of several nodes."""

_TOGETHER_MS: Final = 3_600_000
# GPUs do not move to another node and back within an hour: samples on one node this close are one installation.
_MIN_RETURNS: Final = 3
_MIN_SAMPLES: Final = 4
# Fewer than _SEVERAL samples on a second node, with _MANY times as many elsewhere, do not indicate a second GPU.

STRAY: Final = "on a second node for a moment"
"""Reason for such samples: a scrape was relabelled or answered late."""


def rows_of(spill: Spill, units: Collection[int]) -> pd.DataFrame:
    """Return ``unit``, ``node`` (both codes) and ``ms`` of the units' samples, sorted by (unit, ms, node)."""
    codes = np.array(sorted(units), np.int64)
    parts: list[pd.DataFrame] = []
    for bucket in spill.buckets():
        rows = spill.read(bucket, ["unit", "node", "ms"]).to_pandas()
        parts.append(rows[np.isin(rows["unit"], codes)])
    return pd.concat(parts, ignore_index=True).sort_values(["unit", "ms", "node"], kind="stable")


def shared_units(rows: pd.DataFrame, step_ms: int) -> tuple[list[int], pd.DataFrame]:
    """Return the units seen on two nodes at the same time, i.e. identities shared by several GPUs, and stray rows.

    ``rows``: see :func:`rows_of`. A unit seen on one node and then on another has moved.
    Stray rows are too few to indicate another GPU, compared with those on other nodes.
    """
    together_ms = max(_TOGETHER_MS, 3 * step_ms)
    ordered = rows.sort_values(["unit", "node", "ms"], kind="stable")
    previous = ordered.shift()
    begins = (ordered["unit"] != previous["unit"]) | (ordered["node"] != previous["node"])
    begins |= ordered["ms"] - previous["ms"] > together_ms
    span_of_row = begins.cumsum()
    spans = ordered.groupby(span_of_row.to_numpy(), sort=False).agg(
        unit=("unit", "first"), node=("node", "first"), first=("ms", "min"), last=("ms", "max"), samples=("ms", "size")
    )
    spans = spans.sort_values(["unit", "first"], kind="stable")
    of_node = spans.groupby(["unit", "node"])["samples"].transform("sum")
    on_others = spans.groupby("unit")["samples"].transform("sum") - of_node
    is_stray = _overlaps(spans) & (of_node < _MIN_RETURNS) & (on_others >= _MIN_SAMPLES * of_node)
    strays = ordered[span_of_row.isin(spans.index[is_stray])]
    spans, rows = spans[~is_stray], rows.drop(strays.index)
    changes = (rows["unit"] == rows["unit"].shift()) & (rows["node"] != rows["node"].shift())
    moves = changes.groupby(rows["unit"]).sum()
    return sorted({*spans["unit"][_overlaps(spans)], *moves.index[moves > MAX_MOVES]}), strays


def _overlaps(spans: pd.DataFrame) -> pd.Series:
    """Return which spans begin before an earlier one of the same unit has ended."""
    latest = spans.groupby("unit")["last"].cummax().groupby(spans["unit"]).shift()
    return spans["first"] < latest


def runs_of(rows: pd.DataFrame, installations: InstallationIndex) -> pd.DataFrame:
    """Return one row per uninterrupted stay of a unit on a node, by (gpu, first_ms).

    ``rows``: see :func:`rows_of`.
    Returns: ``gpu`` (the node if nodes are the unit), ``node``, ``first_ms``, ``last_ms``.
    """
    begins = (rows["unit"] != rows["unit"].shift()) | (rows["node"] != rows["node"].shift())
    runs = rows.groupby(begins.cumsum().to_numpy(), sort=False).agg(
        unit=("unit", "first"), node=("node", "first"), first_ms=("ms", "min"), last_ms=("ms", "max")
    )
    names, nodes = np.array(installations.units, dtype=object), np.array(installations.node_names, dtype=object)
    return runs.assign(gpu=names[runs.pop("unit")], node=nodes[runs["node"]]).reset_index(drop=True)


def correct_installations(
    declared: pd.DataFrame, runs: pd.DataFrame, *, unit: Unit, replacements: Replacements
) -> tuple[pd.DataFrame, list[str]]:
    """Correct installations by observations.

    ``declared``: in the layout of :data:`INVENTORY`; empty without an inventory.
    ``runs``: all observations of the GPUs to correct, see :func:`runs_of`. Additional columns are attributes that fill
    gaps in the installations. ``is_from_start``: a GPU missing from the inventory and first seen in such a run has no
    known start.
    ``replacements``: GPUs that were seen in the place of another one, whose installation ends then.
    Returns: the installations, and a line per GPU and period that contradicts the inventory.
    """
    limits = {
        "start": ms_of(declared["installed_at"], unknown=-NEVER),
        "end": ms_of(declared["removed_at"], unknown=NEVER),
    }
    of_unit = _records_by(unit, declared.assign(**limits).sort_values("start", kind="stable"))
    observed = _records_by("gpu", runs.sort_values("first_ms", kind="stable"))
    corrected = [
        installation
        for gpu, runs_of_gpu in observed.items()
        for installation in _corrected_of(of_unit.get(gpu, []), runs_of_gpu, replacements)
    ]
    if unit == "node":
        corrected = [installation | {"gpu": None} for installation in corrected]
    names = list(dict.fromkeys([*INVENTORY.names, *declared.columns]))
    frame = pd.DataFrame(corrected, columns=[*names, "start", "end"])
    frames = [part for part in (declared.assign(**limits)[~declared[unit].isin(set(observed))], frame) if len(part)]
    combined = pd.concat(frames, ignore_index=True) if frames else declared.assign(**limits)
    ends = [_end(installation, replacements) for installation in records(combined)]
    combined["end"] = np.array(ends, np.int64)
    for name, limit in (("installed_at", "start"), ("removed_at", "end")):
        times = pd.Series(instants(np.abs(combined.pop(limit).to_numpy(np.int64))))
        combined[name] = times.astype("datetime64[ms, UTC]")
    lines = _contradictions(of_unit, runs, is_covered(declared, runs), replacements)
    return combined.reindex(columns=names), lines


def _end(installation: dict[str, Any], replacements: Replacements) -> int:
    end = replacements.end_ms(installation)
    return int(installation["end"] if end is None else min(end, installation["end"]))


def split_installations(
    declared: pd.DataFrame, names: Mapping[tuple[str, str], str], first_ms: int, stored: Collection[str]
) -> pd.DataFrame:
    """Split the installations of identities shared by several GPUs into those of the GPU on each node.

    ``names``: name of the GPU by identity and node.
    ``first_ms``: installations of the identities in ``stored`` (those the dataset already has) end then at the latest.
    """
    shared = {gpu for gpu, _ in names}
    keys = list(zip(declared["gpu"], declared["node"], strict=True))
    known = set(declared["gpu"])
    # GPUs distinguished by an earlier import already have installations.
    is_new = np.array([names.get(key, key[0]) not in known or key not in names for key in keys], dtype=bool)
    split = declared.assign(gpu=[names.get(key, key[0]) for key in keys])[is_new]
    retained = declared[declared["gpu"].isin(shared & set(stored))]
    if retained.empty:
        return split
    start = retained["installed_at"]
    end = pd.Series(instants(np.full(len(retained), first_ms)), retained.index)
    end = end.where(start.isna() | (end > start), start + pd.Timedelta(milliseconds=1))
    end = end.where(retained["removed_at"].isna() | (retained["removed_at"] > end), retained["removed_at"])
    closed = retained.assign(removed_at=end.astype("datetime64[ms, UTC]"))
    return pd.concat([split, closed], ignore_index=True)


def with_places(declared: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
    """Fill in missing PCI addresses and slots of installations from samples, if unambiguous.

    ``places``: ``gpu``, ``node``, ``pci_bus_id``, ``slot``, one row per stay in a place.
    """
    of_installation = places.groupby(["gpu", "node"])
    index = pd.MultiIndex.from_frame(declared[["gpu", "node"]])
    filled = declared.copy()
    for name in ("pci_bus_id", "slot"):
        unique_value = of_installation[name].first().where(of_installation[name].nunique() == 1).reindex(index)
        filled[name] = declared[name].astype(object).where(declared[name].notna(), unique_value.to_numpy(dtype=object))
        filled[name] = filled[name].where(filled[name].notna(), None)
    return filled


def _records_by(name: str, frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in records(frame):
        rows[row[name]].append(row)
    return rows


def _corrected_of(
    installations: list[dict[str, Any]], runs: list[dict[str, Any]], replacements: Replacements
) -> list[dict[str, Any]]:
    """Return a GPU's installations: those observed, and the inventory's before and after them."""
    first, last = runs[0]["first_ms"], max(run["last_ms"] for run in runs)
    limits = sorted({limit for installation in installations for limit in (installation["start"], installation["end"])})
    corrected: list[dict[str, Any]] = []
    vacated = replacements.vacated_ms(runs[0])
    boundary = -NEVER if not installations and runs[0]["is_from_start"] and vacated is None else first
    for number, run in enumerate(runs):
        same = [installation for installation in installations if installation["node"] == run["node"]]
        if number == 0 and vacated is not None:
            boundary = replacements.begin_ms(run)
        elif number == 0:  # an installation that starts before the first observation keeps its start
            boundary = max(
                (installation["start"] for installation in same if installation["start"] <= first), default=boundary
            )
        start = boundary
        if number + 1 < len(runs):
            following = runs[number + 1]["first_ms"]
            # If the inventory's date of the move fits the samples, it is more accurate than they are.
            fitting = [limit for limit in limits if run["last_ms"] < limit <= following]
            end, boundary = (fitting[0], fitting[-1]) if fitting else (following, following)
        else:
            later_starts = [installation["start"] for installation in installations if installation["start"] > last]
            end = min(
                [installation["end"] for installation in same if installation["end"] >= last] + later_starts,
                default=NEVER,
            )
        address = run.get("pci_bus_id")
        in_place = [installation for installation in same if address in (None, installation["pci_bus_id"])]
        known: dict[str, Any] = dict((in_place or same or installations or [{}])[-1])
        if not same:
            known = {name: value for name, value in known.items() if name not in _PLACE_ATTRIBUTES}
        elif not in_place:
            known |= {"pci_bus_id": None, "slot": None if known["pci_bus_id"] else known["slot"]}
        attributes: dict[str, Any] = {name: run[name] for name in ATTRIBUTES if name in run and known.get(name) is None}
        corrected.append(known | attributes | {"gpu": run["gpu"], "node": run["node"], "start": start, "end": end})
    begin, end = corrected[0]["start"], corrected[-1]["end"]
    earlier = [
        installation | {"end": min(installation["end"], begin)}
        for installation in installations
        if installation["start"] < begin and not _is_too_early(installation, runs[0], vacated)
    ]
    return [*earlier, *corrected, *(installation for installation in installations if installation["start"] >= end)]


def _is_too_early(installation: dict[str, Any], run: dict[str, Any], vacated_ms: int | None) -> bool:
    """Whether an installation of a run starts while another GPU is seen in its place."""
    return (
        vacated_ms is not None
        and installation["node"] == run["node"]
        and installation["start"] <= vacated_ms < installation["end"]
    )


def is_covered(installations: pd.DataFrame, runs: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return which runs lie within an installation of the GPU on that node."""
    limits = installations[["gpu", "node"]].assign(
        start=ms_of(installations["installed_at"], unknown=-NEVER),
        end=ms_of(installations["removed_at"], unknown=NEVER),
    )
    numbered = runs[["gpu", "node", "first_ms", "last_ms"]].assign(run=np.arange(len(runs)))
    pairs = numbered.merge(limits, on=["gpu", "node"])
    covered = (pairs["start"] <= pairs["first_ms"]) & (pairs["last_ms"] <= pairs["end"])
    return np.isin(np.arange(len(runs)), pairs.loc[covered, "run"])


def _contradictions(
    installations: Mapping[str, list[dict[str, Any]]],
    runs: pd.DataFrame,
    covered: npt.NDArray[np.bool_],
    replacements: Replacements,
) -> list[str]:
    """Return a line per run outside all installations, or that began later than its own; empty without an inventory."""
    lines = []
    for run, within in zip(records(runs) if installations else (), covered.tolist(), strict=False):
        of_gpu, vacated = installations.get(run["gpu"], ()), replacements.vacated_ms(run)
        if within and not any(_is_too_early(installation, run, vacated) for installation in of_gpu):
            continue
        nodes = ", ".join(
            dict.fromkeys(
                _period(installation) if installation["node"] == run["node"] else installation["node"]
                for installation in of_gpu
            )
        )
        seen = f"from {_text(run['first_ms'])} to {_text(run['last_ms'])}"
        lines.append(f"{run['gpu']} was on node {run['node']} {seen}; inventory: {nodes or 'does not name it'}")
    return lines


def _period(installation: dict[str, Any]) -> str:
    """Return the node of an installation with its known limits."""
    limits = (("from", installation["start"]), ("to", installation["end"]))
    return " ".join([installation["node"], *(f"{word} {_text(ms)}" for word, ms in limits if abs(ms) != NEVER)])


def _text(ms: int) -> str:
    return instant_text(pd.Timestamp(ms, unit="ms", tz="UTC").to_pydatetime())


def unseen_nodes(
    installations: InstallationIndex, declared: Sequence[str], is_seen: npt.NDArray[np.bool_]
) -> tuple[list[str], list[str]]:
    """Return the nodes with samples that are not in the inventory, and vice versa.

    ``declared``: nodes of the inventory. ``is_seen``: whether a node has samples, by node code.
    """
    known = set(declared)
    observed = {installations.node_names[code] for code in np.flatnonzero(is_seen).tolist()}
    return sorted(observed - known), sorted(known - observed)
