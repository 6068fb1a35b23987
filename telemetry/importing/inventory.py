"""Reads the inventory, merges it with an older one, and resolves overlaps."""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from foundation.errors import InputError
from foundation.text import nearest_hint
from foundation.times import NEVER
from telemetry.dataset.installations import Timeline
from telemetry.dataset.meta import instant_text
from telemetry.dataset.schema import INVENTORY, Unit, ms_of
from telemetry.identity.devices import (
    GpuNames,
    device_key,
    is_placeholder,
    normalise_pci_bus_id,
    parent_of_mig,
    place_identity,
)
from telemetry.identity.nodes import NodeNames, are_one_node, node_key
from telemetry.importing.batch import Batch
from telemetry.importing.columns import aliases_by_words, are_pci_addresses, as_text, mapped_targets
from telemetry.importing.files.sources import expand_sources
from telemetry.importing.files.tables import read_batches
from telemetry.importing.mapping import InventoryMapping
from telemetry.importing.quarantine import Quarantine, row_text
from telemetry.importing.slots import ObservedSlots


class InstallationIndex:
    """Looks up where a unit was at a given time.

    ``units``, ``nodes``: names by existing code, to keep codes stable.
    ``is_observed``: nodes and GPUs are known from samples only, so the fleet may be larger.
    ``shared``: maps a GPU id used on several nodes, together with the node, to a unique name.

    ``given``: installations in input order; ``frame``: sorted by unit code and time.
    ``begin``: start of the first installation (ms).
    ``node_names``: names by node code. ``frame_codes``: codes of units with an installation.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        unit: Unit,
        parents: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
        *,
        units: Sequence[str] = (),
        nodes: Sequence[str] = (),
        is_observed: bool = False,
        shared: Mapping[tuple[str, str], str] | None = None,
        slots: ObservedSlots | None = None,
    ) -> None:
        self.unit, self.given, self.is_observed = unit, frame, is_observed
        self.shared = {(device_key(gpu), node): name for (gpu, node), name in (shared or {}).items()}
        self._shared_keys = {key for key, _ in self.shared}
        self.slots = slots or ObservedSlots()
        self.parents = dict(parents or {})
        self.units = list(dict.fromkeys([*units, *sorted(set(frame[unit]))]))
        self._code = {name: code for code, name in enumerate(self.units)}
        start, code = ms_of(frame["installed_at"]), frame[unit].map(self._code).to_numpy(np.int64)
        order = np.lexsort((start, code))
        self.frame, start = frame.iloc[order].reset_index(drop=True), start[order]
        self.frame_codes = np.unique(code)
        self._end = ms_of(self.frame["removed_at"], unknown=NEVER)
        self._timeline, self._timed = Timeline(code[order], start, len(self.units)), len(self.units)
        self.nodes = self.frame["node"].to_numpy(dtype=object)
        self.node_names = list(dict.fromkeys([*nodes, *sorted(set(self.nodes))]))
        self.node_codes = pd.Index(self.node_names, dtype=object).get_indexer(pd.Index(self.nodes, dtype=object))
        self.begin = int(start.min()) if len(start) else 0
        self.node_since = pd.Series(start).groupby(self.nodes).min().to_dict()
        self.aliases = dict(aliases or {})
        self._long_forms: dict[str, set[str]] = {}
        self._name()

    def changed(self, frame: pd.DataFrame, **changes: Any) -> "InstallationIndex":
        """Return a copy with other installations and the same codes; ``changes``: further constructor arguments."""
        same: dict[str, Any] = {"shared": self.shared, "slots": self.slots, "is_observed": self.is_observed}
        known: dict[str, Any] = {"units": self.units, "nodes": self.node_names}
        index = InstallationIndex(frame, self.unit, self.parents, self.aliases, **{**same, **known, **changes})
        index.names.long_forms.update(self.names.long_forms)
        return index

    def codes(self, names: Sequence[str | None] | npt.NDArray[np.object_]) -> npt.NDArray[np.int64]:
        """Return the code of each unit, -1 if unknown."""
        known = self.gpu if self.unit == "gpu" else self.names.written
        return np.array([-1 if name is None else self._code.get(known(name), -1) for name in names], np.int64)

    def gpu(self, name: str, node: object = None) -> str:
        """Resolve a name to a GPU in the inventory's spelling; a MIG instance resolves to its parent.

        ``node``: disambiguates an id used on several nodes.
        """
        if self.shared and isinstance(node, str):
            name = self.shared.get((device_key(name), node), name)
        return self.parents.get(name) or self._gpus.find(name) or self._gpus.written(parent_of_mig(name) or name)

    def is_shared(self, name: str) -> bool:
        """Whether an id is used on several nodes and therefore ambiguous without a node."""
        return device_key(name) in self._shared_keys

    def are_elsewhere(self, nodes: npt.NDArray[np.object_], expected: npt.NDArray[np.object_]) -> npt.NDArray[np.bool_]:
        """Mark the nodes that contradict the installations; an ambiguous name matches any node it may mean.

        ``nodes``: as resolved by :attr:`names`; ``expected``: nodes of the installations. Shape (n,).
        """
        differs = nodes != expected
        rows = np.flatnonzero(differs)
        for row in rows[[self.names.is_ambiguous(name) for name in nodes[rows]]] if len(rows) else ():
            differs[row] = not are_one_node(nodes[row], expected[row])
        return differs

    def codes_of_nodes(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the code of each node, -1 if unknown."""
        written = pd.Index(self.names.written_all(names), dtype=object)
        return pd.Index(self.node_names, dtype=object).get_indexer(written).astype(np.int64)

    def learn(self, units: Sequence[str], nodes: Sequence[str]) -> None:
        """Assign codes to units and nodes missing in the inventory; the units have no installation yet."""
        for name in units:
            self._code[name] = len(self.units)
            self.units.append(name)
        self.node_names += nodes
        self._name()

    def _name(self) -> None:
        self.names = NodeNames(self.node_names, self.aliases)
        self.names.long_forms = self._long_forms
        gpus = self.units if self.unit == "gpu" else ()
        self._gpus = GpuNames(gpus, self.parents)

    def find(self, codes: npt.NDArray[np.int64], ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Find the installation of each unit at each time.

        ``codes``: from :meth:`codes`, negative if unknown; shape (n,).
        Returns: row of :attr:`frame`, or -1 for an unknown unit, -2 before its first installation, -3 after a removal;
        shape (n,). Intervals include the time of removal.
        """
        row = self.last_row(codes, ms)
        return np.where((row >= 0) & (ms > np.append(self._end, 0)[row]), -3, row)

    def last_row(self, codes: npt.NDArray[np.int64], ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Find each unit's latest installation that started by a time, even if it has ended."""
        # A sample at the exact time of a swap in one slot belongs to the later installation.
        row = self._timeline.last(np.where(codes < self._timed, codes, -1), ms)
        return np.where((codes >= 0) & (row < 0) & bool(len(self.frame)), -2, row)


SEEN_AT: Final = "seen_at"
"""Column that marks the rows of an inventory source as observations instead of installations."""

_FIRST, _PLACE = "_first", ("gpu", "node")


def condense_observations(frame: pd.DataFrame) -> pd.DataFrame:
    """Condense observations to one row per unit and node: first and last time seen, and the latest attributes.

    ``frame``: observations (``seen_at`` and the inventory's columns), results of this function, or both. Rows without a
    time are dropped; ``_first`` is added.
    """
    observed = frame[frame[SEEN_AT].notna()]
    if _FIRST not in observed:
        observed = observed.assign(**{_FIRST: observed[SEEN_AT]})
    observed = observed.sort_values(SEEN_AT, kind="stable")
    first = observed.groupby(list(_PLACE), sort=False, dropna=False)[_FIRST].transform("min")
    return observed.assign(**{_FIRST: first}).drop_duplicates(list(_PLACE), keep="last", ignore_index=True)


def installations_of(observations: pd.DataFrame, absent: timedelta) -> pd.DataFrame:
    """Convert observations to installations, one per unit and node.

    ``absent``: a unit last seen this long before the newest observation of any unit counts as removed.
    Unless the source has them, ``installed_at`` is the first observation, and ``removed_at`` the last one of a removed
    unit, otherwise missing. A unit that reappears has been there all along.
    """
    observed = condense_observations(observations)
    first, last = observed[_FIRST], observed[SEEN_AT]
    removed_after = last.where(last <= last.max() - absent)
    removed_after = removed_after.where(
        removed_after > first, removed_after + timedelta(milliseconds=1)
    )  # seen once: installations cannot be empty
    started, removed = observed["installed_at"], observed["removed_at"]
    return observed.assign(
        installed_at=started.where(started.notna(), first), removed_at=removed.where(removed.notna(), removed_after)
    ).drop(columns=[SEEN_AT, _FIRST])


def with_parts(table: pa.Table, parts: Mapping[str, re.Pattern[str]], location: str) -> pa.Table:
    """Add the named groups of patterns as string columns, null where a value does not match.

    ``parts``: maps a source column to a regular expression for whole values.
    Raises ``InputError`` if the column is missing, or a group has the name of a column.
    """
    for name, pattern in parts.items():
        if name not in table.column_names:
            raise InputError(
                f"the mapping takes parts of column {name!r}, which does not exist",
                location,
                nearest_hint(name, table.column_names) or f"Its columns are {', '.join(table.column_names)}.",
            )
        texts = pd.Series(as_text(table.column(name), len(table)), dtype="str")
        for group, values in texts.str.extract(rf"\A(?:{pattern.pattern})\Z")[list(pattern.groupindex)].items():
            if group in table.column_names:
                raise InputError(
                    f"the mapping takes {group!r} out of {name!r}, and there is a column of that name",
                    location,
                    "Rename the group.",
                )
            table = table.append_column(str(group), pa.array(values, pa.string(), from_pandas=True))
    return table


_LOG = logging.getLogger(__name__)
_FAR_FUTURE = datetime(9999, 12, 31, tzinfo=UTC)
_TIMES = ("installed_at", "removed_at")
_MIG_OLD = r"\AMIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+\Z"


def read_inventory(
    path: Path,
    mapping: InventoryMapping,
    quarantine: Quarantine,
    not_after: datetime = _FAR_FUTURE,
    node_names: NodeNames | None = None,
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Read an inventory file with one row per installation.

    ``node`` is required; without ``gpu``, the nodes are the units. ``parent`` names the GPU of a MIG instance; rows of
    instances are dropped, and their names become aliases of the parent. With ``seen_at``, rows are observations.
    ``quarantine``: receives rows without a node, with an unusable time, or that end before they start, and MIG
    instances without a known parent.
    ``not_after``: a later start is a clock error; an installation with a later end is current.
    Returns: installations in the layout of :data:`INVENTORY`, except that ``installed_at`` may be missing, and the GPU
    by MIG instance.
    Raises ``InputError`` if ``node`` is missing, timestamps are naive, or no row is usable.
    """
    frames = [pd.DataFrame()]
    matched: set[str] = set()
    are_addresses: dict[str, bool] = {}
    facts: set[str] = set()
    for file in expand_sources((path,), "inventory"):
        for batch in read_batches(file, "inventory", quarantine):
            present = set(batch.table.column_names)
            batch.table = with_parts(batch.table, mapping.parts, str(file))
            names = batch.table.column_names
            parts = set(names) - present
            matched |= {name for name in parts if batch.table.column(name).null_count < len(batch.table)}
            known = [*INVENTORY.names, "parent", "mig_instance", SEEN_AT]
            aliases = _aliases(batch.table, mapping, are_addresses)
            batch.resolve(mapping, known, "node", passed_on=parts, extras=True, aliases=aliases)
            frame = _batch_frame(batch, not_after)
            facts |= {*frame.columns} - {*known, "_row", "_file", _FIRST}
            if node_names is not None:
                frame["node"] = frame["node"].map(node_names.written)
            frames.append(condense_observations(frame) if SEEN_AT in batch else frame)
    inventory = pd.concat(frames, ignore_index=True)
    if SEEN_AT in inventory:
        inventory = installations_of(inventory, mapping.absent)
    for name in facts:  # over all files: a column may be numeric in one and text in another
        inventory[name] = _static(
            inventory[name], zeros_count=not any(name in part.groupindex for part in mapping.parts.values())
        )
    if inventory.empty:
        raise InputError("the inventory has no usable rows", str(path), "Give one row for each GPU (or node).")
    for name, pattern in mapping.parts.items():
        if not matched & set(pattern.groupindex):  # otherwise its columns would silently be empty
            raise InputError(
                f"no value of column {name!r} matches {pattern.pattern!r}",
                str(path),
                "Correct the pattern under `parts` in the mapping; it has to match a whole value.",
            )
    return _fold_mig(_identified(inventory), quarantine)


def _aliases(table: pa.Table, mapping: InventoryMapping, are_addresses: dict[str, bool]) -> dict[str, str]:
    """Return column aliases; a column of PCI addresses is recognized by its values.

    ``are_addresses``: decision by column, made on the first batch with values and reused for the others.
    """
    names = table.column_names
    aliases = aliases_by_words(names, mapping, "inventory")
    claimed = {*mapped_targets(mapping), *(aliases.get(name, name) for name in names)}
    for name in names:
        if name in mapping.columns or name in aliases or name in INVENTORY.names or "pci_bus_id" in claimed:
            continue
        decided = are_addresses.get(name)
        if decided is None and (decided := are_pci_addresses(table.column(name))) is not None:
            are_addresses[name] = decided
        if decided:
            aliases[name] = "pci_bus_id"
            break
    return aliases


def _batch_frame(batch: Batch, not_after: datetime) -> pd.DataFrame:
    length = batch.table.num_rows
    content: dict[str, Any] = {"_row": batch.rows, "_file": np.full(length, str(batch.file), dtype=object)}
    for name in dict.fromkeys([*INVENTORY.names, *batch.columns, *batch.mapping.constants]):
        if name == SEEN_AT:  # a date covers the whole day
            for column, day_end in ((_FIRST, False), (SEEN_AT, True)):
                content[column] = batch.times(name, not_after, optional=False, is_end=False, day_end=day_end)
        elif name in _TIMES:
            # A missing end means in service, a missing start before the first observation.
            content[name] = batch.times(name, not_after, optional=True, is_end=name == "removed_at")
        elif name in INVENTORY.names or name in ("parent", "mig_instance"):
            content[name] = pd.Series(batch.texts(name), dtype=object)
        else:
            fact = batch.column(name)
            content[name] = None if fact is None else fact.to_pandas()
    frame = pd.DataFrame(content)
    buses = [normalise_pci_bus_id(text) or text if isinstance(text, str) else None for text in frame["pci_bus_id"]]
    frame["pci_bus_id"] = pd.Series(buses, dtype=object)
    batch.refuse("missing node", frame["node"].isna().to_numpy())
    batch.refuse("removed before installed", (frame["removed_at"] <= frame["installed_at"]).to_numpy(dtype=bool))
    return frame[batch.valid]


def _identified(frame: pd.DataFrame) -> pd.DataFrame:
    """Unify the spelling of nodes and GPUs, and identify GPUs with a placeholder id by serial number or location.

    Node names that differ only in case are distinct nodes if they have different GPUs in the same slot.
    """
    if frame["gpu"].isna().all():
        return frame
    places = frame["pci_bus_id"].fillna(frame["slot"])
    keys = frame["node"].map(node_key)
    gpus = frame.assign(place=places, key=keys).groupby(["key", "place"])[["node", "gpu"]].nunique()
    case_sensitive = set(gpus.index[(gpus["node"] > 1) & (gpus["gpu"] > 1)].get_level_values("key"))
    first = dict(zip(keys[::-1], frame["node"][::-1], strict=True))
    nodes = [node if key in case_sensitive else first[key] for node, key in zip(frame["node"], keys, strict=True)]
    spelled: dict[str, str] = {}
    named: list[str | None] = []
    by_place: list[str | None] = []
    for gpu, serial, node, bus, slot in zip(
        *(frame[name].astype(object).where(frame[name].notna(), None) for name in ("gpu", "serial")),
        nodes,
        *(frame[name].astype(object).where(frame[name].notna(), None) for name in ("pci_bus_id", "slot")),
        strict=True,
    ):
        identity = gpu
        if gpu is not None and not gpu.isdigit() and is_placeholder(gpu):  # digits may be the operator's own ids
            identity = serial if not is_placeholder(serial) else place_identity(node, pci_bus_id=bus, slot=slot)
            by_place.append(identity)
        named.append(None if identity is None else spelled.setdefault(device_key(identity), identity))
    if by_place:
        _LOG.warning(
            "%d GPUs have a placeholder as UUID: identified by serial number or place, such as %s",
            len(by_place),
            by_place[0],
        )
    return frame.assign(
        node=pd.Series(nodes, frame.index, dtype=object), gpu=pd.Series(named, frame.index, dtype=object)
    )


def _static(values: pd.Series, *, zeros_count: bool) -> pd.Series:
    """Convert an attribute column to numbers if all values are numeric and no significant leading zero is lost."""
    is_text = values.map(lambda value: isinstance(value, str))
    if not is_text.any():
        return values
    numbers = pd.to_numeric(values.astype(object), errors="coerce")
    is_number = numbers.notna().eq(values.notna()).all()
    texts = values[is_text].astype("str")
    if is_number and not (zeros_count and texts.str.match(r"[+-]?0\d").any()):
        return numbers
    return values if is_text.eq(values.notna()).all() else values.map(str, na_action="ignore")


def _fold_mig(frame: pd.DataFrame, quarantine: Quarantine) -> tuple[pd.DataFrame, dict[str, str]]:
    """Drop the rows of MIG instances, and return the parent GPU of each, found by name or PCI address."""
    gpu = frame["gpu"].astype("str")
    named_parents = frame["parent"] if "parent" in frame else pd.Series(None, index=frame.index, dtype=object)
    is_mig = gpu.notna() & (gpu.str.startswith("MIG-").fillna(False) | named_parents.notna())
    places = pd.MultiIndex.from_frame(frame[["node", "pci_bus_id"]])
    is_parent = (~is_mig & gpu.notna() & frame["pci_bus_id"].notna()).to_numpy()
    by_place = dict(zip(places[is_parent], gpu[is_parent], strict=True))
    at_place = pd.Series([by_place.get(place) for place in places], index=frame.index, dtype=object)
    parent = named_parents.fillna(gpu.str.extract(_MIG_OLD, expand=False)).fillna(at_place)[is_mig]
    for index in parent.index[parent.isna()]:
        row = frame.loc[index].dropna()
        number, file = int(row.pop("_row")), Path(row.pop("_file"))
        reason = "MIG instance without a known parent"
        quarantine.set_aside(reason, "inventory", file, number, row_text(row.to_dict()), gpu[index])
    parents = {gpu[index]: name for index, name in parent.dropna().items()}
    merged = frame[~is_mig].drop(columns=["_row", "_file", "parent", "mig_instance"], errors="ignore")
    return merged.drop_duplicates(ignore_index=True), parents


def unit_of(frame: pd.DataFrame) -> Unit:
    """Return the unit of a fleet: ``gpu``, or ``node`` if no installation has a GPU."""
    return "gpu" if frame["gpu"].notna().any() else "node"


def merge_installations(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """Update an inventory with a newer one; the key of an installation is gpu, node and ``installed_at``.

    ``new``: replaces old installations with the same key. Without ``installed_at``, a row updates the open old
    installation of the same gpu and node, if there is one.
    """
    if old is not None and new["installed_at"].isna().any():
        new = with_old_starts(old, new)
    merged = new if old is None else pd.concat([frame for frame in (old, new) if len(frame)], ignore_index=True)
    return merged.drop_duplicates([*_PLACE, "installed_at"], keep="last", ignore_index=True)


def with_old_starts(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Fill in missing starts from open installations of the same gpu and node in the dataset."""
    starts = old[old["removed_at"].isna()].drop_duplicates(list(_PLACE), keep="last")[[*_PLACE, "installed_at"]]
    start = new[list(_PLACE)].merge(starts, how="left", on=list(_PLACE))["installed_at"].set_axis(new.index)
    return new.assign(installed_at=new["installed_at"].fillna(start))


def end_overlaps(frame: pd.DataFrame, unit: Unit) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """End each installation when the unit's next one starts.

    Returns: the installations; those dropped because another of the unit, given later in the file, starts at the same
    time; and a report line for each installation that was ended.
    """
    ordered = frame.sort_values([unit, "installed_at"], kind="stable", na_position="first")
    repeated = ordered.duplicated([unit, "installed_at"], keep="last")
    first, dropped = ordered[~repeated].reset_index(drop=True), ordered[repeated]
    followed = first[unit].eq(first[unit].shift(-1))
    next_start = first["installed_at"].shift(-1)
    overlap = followed & (first["removed_at"].isna() | (next_start < first["removed_at"]))
    lines = [
        f"{unit} {first[unit][row]!r} leaves node {first['node'][row]!r} at {instant_text(next_start[row])}, when it "
        f"is installed in node {first['node'][row + 1]!r}"
        for row in np.flatnonzero(overlap.to_numpy())
    ]
    first["removed_at"] = first["removed_at"].where(~overlap, next_start)
    return first, dropped, lines
