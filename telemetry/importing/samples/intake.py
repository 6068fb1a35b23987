"""Reads sample files, validates the rows and spills them to disk."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from foundation.errors import InputError
from foundation.times import NEVER
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.layout import node_hash
from telemetry.dataset.schema import CHANNEL_TYPES
from telemetry.identity.devices import device_key, is_placeholder, normalise_pci_bus_id, parent_of_mig, place_identity
from telemetry.identity.nodes import one_spelling
from telemetry.importing.batch import Batch
from telemetry.importing.columns import (
    GPU_PLACE,
    KEY_ALIASES,
    SAMPLE_KEYS,
    as_counts,
    as_text,
    left_out_of_samples,
    missing_column,
    resolve_columns,
    source_names,
)
from telemetry.importing.files.tables import column_names, count_unused, link_columns, read_batches, table_kind
from telemetry.importing.instants import WRONG_CLOCK
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine, advice
from telemetry.importing.samples.block import ORDER_SHIFT, Spill
from telemetry.importing.samples.channel_values import parse_values, unit_of_column
from telemetry.importing.samples.derived_events import GpuLosses
from telemetry.importing.slots import PlaceRuns, slot_key
from telemetry.importing.tickets import GpuPlaces
from telemetry.values.links import LinkTotals
from telemetry.values.names import spellings
from telemetry.values.numbers import read_numbers

STAY_PROBLEMS = {-1: "unknown {unit}", -2: "before installation", -3: "after removal"}
# By result of InstallationIndex.find.
_MIN_FRACTION = 20
# Minimum number of nonzero values to conclude that a column has another unit.
_TOO_SMALL: Final = {"%": (1.0, "fractions", "percent", 100), "MHz": (10.0, "GHz", "MHz", 1000)}
"""By unit: a limit that most values of a working GPU exceed, the unit of values below it, and the factor."""


_UnitMs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
_INDEX: Final = re.compile(r"(?i)(?:(?:/dev/)?nvidia|cuda:|gpu ?|card)?\d{1,2}(?:\.0)?")
# Values of the exporters' label `gpu` and of the first column of amd-smi.


@dataclass(slots=True)
class SampleIntake:
    """Reads sample files, validates each row and value, and spills usable rows.

    ``every_channel``: channels that may occur; ``channels``: those in the files, in catalogue order.
    ``strict``: raise an error if no row is usable or percentages seem to be fractions.
    ``wrong_clock``: marks impossible timestamps (ms).
    ``unsettled``: marks timestamps (ms) of rows deferred to a later run.
    ``sample_count``: whether a file gives the number of raw samples per row.
    ``moved``: codes of units whose samples contradict the inventory's location.
    ``has_replacements``: whether the inventory names several GPUs of one place.
    ``first_ms``: time of the first usable sample.
    ``seen_nodes``: whether a usable sample names the node, by node code.
    ``rows_read``: number of rows read so far; in long tables each value is a row.
    ``place_names``: number of rows whose GPU is identified by its location, for lack of an id.
    Raises ``InputError`` if a file has an unknown column, lacks a key column, or has no channel.
    """

    files: Sequence[Path]
    mapping: TableMapping
    every_channel: Mapping[str, Channel]
    installations: InstallationIndex
    quarantine: Quarantine
    wrong_clock: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
    strict: bool
    counts: Counter[str] = field(default_factory=Counter)
    channels: dict[str, Channel] = field(init=False)
    has_replacements: bool = field(init=False)
    sample_count: bool = False
    losses: GpuLosses = field(default_factory=GpuLosses)
    places: PlaceRuns = field(default_factory=PlaceRuns)
    links: LinkTotals = field(default_factory=LinkTotals)
    unsettled: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None = None
    moved: set[int] = field(default_factory=set)
    first_ms: int = NEVER
    seen_nodes: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    place_names: int = 0
    rows_read: int = 0
    _columns: list[dict[str, str]] = field(default_factory=list)
    _usable: bool = False
    _names: dict[str, str] = field(default_factory=dict)
    _nonzero: Counter[str] = field(default_factory=Counter)
    _fractions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        all_channels = with_rollups(self.every_channel)
        known = [*SAMPLE_KEYS, *all_channels, "sample_count"]
        if self.mapping.long is not None:  # other columns are labels, of any metric
            self.mapping = self.mapping.model_copy(update={"ignore_others": True})
        self._names = source_names(self.every_channel)
        aliases = {**self._names, **KEY_ALIASES, "index": "slot"}
        present: set[str] = set()
        for file in self.files:
            names = column_names(file, long=self.mapping.long, is_wanted=self._is_channel)
            required, location = ["timestamp"], str(file)
            required += ["node"] if table_kind(file, "samples") == "dmon" else []  # dmon does not report it
            columns = resolve_columns(
                names,
                self.mapping,
                known,
                location,
                required,
                aliases=aliases,
                ignored=left_out_of_samples,
                declare=True,
            )
            mapped = {*columns, *self.mapping.constants}
            has_place = self.installations.unit == "gpu" and "node" in mapped and not mapped.isdisjoint(GPU_PLACE)
            # Staged samples always have the column, without values for nodes without GPUs.
            if self.strict and self.installations.unit == "node" and "gpu" in mapped and len(self.installations.given):
                raise InputError(
                    "the samples name GPUs, but the inventory only nodes",
                    location,
                    "Give an inventory with a column `gpu`, or none: samples that name node and GPU need none. To "
                    "import one series a node, map that column to null.",
                )
            if self.installations.unit not in mapped and not has_place:
                raise missing_column(self.installations.unit, names, location)
            present |= mapped
            # A file of a long table may hold only unknown metrics, whose rows are counted.
            is_last = self.mapping.long is None or file == self.files[-1]
            if is_last and (mapped if self.mapping.long is None else present).isdisjoint(all_channels):
                names = column_names(file, long=self.mapping.long)
                raise InputError(
                    "the file has no channel", location, f"Its columns are {names}. Map at least one to a channel."
                )
            self._columns.append(columns)
        given = self.installations.given.drop_duplicates(["node", "pci_bus_id", "slot", self.installations.unit])
        places = given[given[["pci_bus_id", "slot"]].notna().any(axis=1)]
        self.has_replacements = bool(places.duplicated(["node", "pci_bus_id", "slot"]).any())
        self.channels = {name: channel for name, channel in all_channels.items() if name in present}
        self.sample_count = "sample_count" in present

    def _is_channel(self, metric: str) -> bool:
        return metric in self.mapping.columns or not self._names.keys().isdisjoint(spellings(metric))

    def run(self, folder: Path, buckets: int, expected: int, progress: Callable[[int, int], None]) -> Spill:
        """Read all files; ``progress`` is called after each batch with the rows read and expected.

        Raises ``InputError`` if timestamps are naive or, with ``strict``, percentages seem to be fractions or no row
        is usable.
        """
        spill = Spill(folder, buckets)
        bucket_of_node = np.empty(0, np.int64)
        finished_rows, finished_bytes, all_bytes = 0, 0, sum(file.stat().st_size for file in self.files)
        for number, (file, columns) in enumerate(zip(self.files, self._columns, strict=True)):
            for batch in read_batches(file, "samples", self.quarantine, self.mapping.long, self._is_channel):
                if len(batch.rows) == 0:
                    continue
                self.rows_read = finished_rows + int(batch.rows[-1])  # in a long table each value is a row
                progress(self.rows_read, max(self.rows_read, expected))
                batch.columns, batch.mapping = columns, self.mapping
                batch.drop_without_values()
                count_unused(batch, self._names)
                table = self._check(batch, number)
                new = [node_hash(name) % buckets for name in self.installations.node_names[len(bucket_of_node) :]]
                bucket_of_node = np.append(bucket_of_node, np.array(new, np.int64))
                spill.add(bucket_of_node[table.column("node").to_numpy()], table)
            finished_rows, finished_bytes = self.rows_read, finished_bytes + file.stat().st_size
            expected = finished_rows * all_bytes // max(finished_bytes, 1)
        if self.strict:
            self._check_usable()
        spill.close()
        return spill

    def _check_usable(self) -> None:
        for name, nonzero in self._nonzero.items():
            if nonzero >= _MIN_FRACTION and 2 * self._fractions[name] > nonzero:
                limit, present, expected, factor = _TOO_SMALL[self.channels[name].unit]
                raise InputError(
                    f"{self._fractions[name]} of {nonzero} nonzero values of {name!r} are below {limit:g}: "
                    f"they seem to be {present} instead of {expected}",
                    f"channel {name!r}",
                    f"Give `scale: {{{name}: {factor}}}` in the mapping.",
                )
        if not self.rows_read and not self.quarantine.counts:
            raise InputError(
                "the sample files have no rows",
                ", ".join(str(file) for file in self.files[:3]),
                "Check the period that they were exported for, or leave --samples out.",
            )
        if not self._usable:
            raise no_usable_rows("sample", self.quarantine, str(self.files[0]))

    def _check(self, batch: Batch, number: int) -> pa.Table:
        length = len(batch.rows)
        instants = batch.instants("timestamp")
        assert instants is not None
        ms = instants.ms
        batch.refuse(WRONG_CLOCK, self.wrong_clock(ms))
        if self.unsettled is not None:
            batch.wait("the end of their step", self.unsettled(ms))
        by_node = self.installations.unit == "node"
        unit_index, unit_names = _encoded(batch.column("node" if by_node else "gpu"), length)
        node_index, node_names = _encoded(batch.column("node"), length)
        if not by_node:
            unit_index, unit_names = self._named_by_place(batch, ms, unit_index, unit_names, node_index, node_names)
        batch.refuse("missing node" if by_node else "missing gpu", unit_index < 0)
        self._learn(unit_index, unit_names, node_index, node_names, batch.valid)
        codes = np.append(self.installations.codes(unit_names), -1)[unit_index]
        node_codes = np.append(self.installations.codes_of_nodes(node_names), -1)[node_index]
        installation = self.installations.find(codes, ms)
        installed_nodes = np.append(self.installations.node_codes, -1)
        node_of_installation = np.where(installation >= 0, installed_nodes[np.clip(installation, 0, None)], -1)
        places_itself = (codes >= 0) & (node_codes >= 0)
        if by_node:
            places_itself &= ~np.isin(codes, self.installations.frame_codes)
        # An ambiguous node name is resolved by the GPU's installation.
        unclear = np.flatnonzero((node_index >= 0) & (node_codes < 0) & (installation >= 0))
        if len(unclear):
            is_elsewhere = np.zeros(length, dtype=bool)
            named = np.array(node_names, dtype=object)[node_index[unclear]]
            is_elsewhere[unclear] = self.installations.are_elsewhere(
                named, self.installations.nodes[installation[unclear]]
            )
            batch.refuse("on another node than the inventory says", is_elsewhere)
        for problem, reason in STAY_PROBLEMS.items():
            batch.refuse(reason.format(unit=self.installations.unit), (installation == problem) & ~places_itself)
        has_moved = batch.valid & places_itself & (node_codes != node_of_installation)
        self.moved.update(np.unique(codes[has_moved]).tolist())
        node_codes = np.where(places_itself, node_codes, node_of_installation)
        self.seen_nodes = np.append(
            self.seen_nodes, np.zeros(len(self.installations.node_names) - len(self.seen_nodes), dtype=bool)
        )
        self.seen_nodes[node_codes[batch.valid]] = True
        self.first_ms = int(ms.min(where=batch.valid, initial=self.first_ms))
        part = np.zeros(length, dtype=bool)
        if not by_node:
            is_mig = [name in self.installations.parents or parent_of_mig(name) is not None for name in unit_names]
            part = np.array([*is_mig, False])[unit_index] | (_encoded(batch.column("mig_instance"), length)[0] >= 0)
        valid = batch.valid
        self._usable |= bool(valid.any())
        columns: dict[str, pa.Array] = {
            "unit": pa.array(codes[valid].astype(np.int32)),
            "node": pa.array(node_codes[valid].astype(np.int32)),
            "ms": pa.array(ms[valid]),
            "order": pa.array((np.int64(number) << ORDER_SHIFT) + batch.rows[valid]),
            "mig": pa.array(part[valid]),
        }
        is_lost = np.zeros(int(valid.sum()), np.bool_)
        for channel in self.channels.values():
            columns[channel.name] = self._channel(channel, batch, is_lost, (codes[valid], ms[valid]))
        self._observe_places(batch, codes, node_codes, ms)
        self.losses.add(columns["unit"].to_numpy(), columns["node"].to_numpy(), columns["ms"].to_numpy(), is_lost)
        if self.sample_count:
            columns["sample_count"] = pa.array(as_counts(batch.column("sample_count"), length)[valid].astype(np.int32))
        return pa.table(columns)

    def _observe_places(
        self, batch: Batch, codes: npt.NDArray[np.int64], node_codes: npt.NDArray[np.int64], ms: npt.NDArray[np.int64]
    ) -> None:
        """Record the slot and PCI address of GPUs in good rows, or only that they were seen if one replaced another."""
        has_place = "slot" in batch or "pci_bus_id" in batch or self.has_replacements
        if self.installations.unit == "node" or not has_place:
            return
        valid, length = batch.valid, len(batch.rows)
        address_index, addresses = _encoded(batch.column("pci_bus_id"), length)
        slot_index, slots = _encoded(batch.column("slot"), length)
        addresses = [normalise_pci_bus_id(address) or address for address in addresses]
        self.places.add(
            codes[valid], node_codes[valid], ms[valid], (address_index[valid], addresses), (slot_index[valid], slots)
        )

    def _named_by_place(
        self,
        batch: Batch,
        ms: npt.NDArray[np.int64],
        unit_index: npt.NDArray[np.int64],
        unit_names: list[str],
        node_index: npt.NDArray[np.int64],
        node_names: list[str],
    ) -> tuple[npt.NDArray[np.int64], list[str]]:
        """Identify GPUs by node and PCI address or slot if samples have no id, a placeholder or an index.

        A GPU that the inventory lists at this location takes precedence.
        """
        # A name in the inventory is an id, even if it looks like an index.
        indices = [slot_key(name) if _INDEX.fullmatch(name) else None for name in unit_names]
        names_nothing = np.array(
            [is_placeholder(name) or index is not None for name, index in zip(unit_names, indices, strict=True)], bool
        )
        names_nothing &= self.installations.codes(unit_names) < 0
        no_identity = np.append(names_nothing, "gpu" not in batch)[unit_index] & (node_index >= 0)
        if not no_identity.any():
            return unit_index, unit_names
        texts = {name: as_text(batch.column(name), len(unit_index)) if name in batch else None for name in GPU_PLACE}
        if texts["slot"] is None:
            texts["slot"] = np.array([*indices, None], dtype=object)[unit_index]
        places = GpuPlaces(self.installations)
        names = pd.Series([*unit_names, None], dtype=object).to_numpy()[unit_index]
        for row in np.flatnonzero(no_identity).tolist():
            address, slot = (None if column is None else column[row] for column in texts.values())
            address = None if address is None else normalise_pci_bus_id(address) or address
            node, keys = node_names[node_index[row]], [key for key in (address, slot) if key is not None]
            names[row] = places.find(keys, slot, node, int(ms[row]))
            if names[row] is None:
                names[row] = place_identity(node, pci_bus_id=address, slot=slot)
                self.place_names += names[row] is not None
        codes, distinct = pd.factorize(names)
        return codes.astype(np.int64), list(distinct)

    def _learn(
        self,
        unit_index: npt.NDArray[np.int64],
        unit_names: list[str],
        node_index: npt.NDArray[np.int64],
        node_names: list[str],
        valid: npt.NDArray[np.bool_],
    ) -> None:
        """Register units and nodes of usable rows that are not in the inventory."""
        if not node_names or (self.installations.unit == "node" and len(self.installations.given)):
            return  # if nodes are the units, the inventory alone defines the fleet
        unknown = self.installations.codes(unit_names) < 0
        unknown_nodes = self.installations.codes_of_nodes(node_names) < 0
        if not unknown.any() and not unknown_nodes.any():
            return
        has_both = valid & (unit_index >= 0) & (node_index >= 0)
        used_units, used_nodes = (np.unique(index[has_both]).tolist() for index in (unit_index, node_index))
        units = [unit_names[code] for code in used_units if unknown[code] and _may_be_gpu(unit_names[code])]
        nodes = [
            node_names[code]
            for code in used_nodes
            if unknown_nodes[code] and not self.installations.names.is_ambiguous(node_names[code])
        ]
        nodes = [self.installations.names.written(name) for name in nodes]
        if units or nodes:
            # Register one spelling each; lookups find the others under it.
            self.installations.learn(
                list({device_key(name): name for name in reversed(units)}.values()),
                list(dict.fromkeys(one_spelling(nodes).values())),
            )

    def _channel(self, channel: Channel, batch: Batch, is_lost: npt.NDArray[np.bool_], unit_ms: _UnitMs) -> pa.Array:
        """Return the values of the good rows; mark those that report a lost GPU in ``is_lost``."""
        usable = batch.valid
        kind = CHANNEL_TYPES[channel.kind]
        column = batch.column(channel.name)
        if column is None:
            return pa.nulls(int(usable.sum()), kind)
        column = self._mapped(column, channel.name).filter(pa.array(usable))
        scale, offset = self.mapping.scale.get(channel.name), self.mapping.offset.get(channel.name)
        source = batch.columns.get(channel.name, channel.name)
        convert = scale is None and offset is None
        numbers = read_numbers(
            column, channel.unit, header_unit=unit_of_column(source), convert=convert, decimal=batch.decimal
        )
        is_lost |= numbers.lost
        links = link_columns(source, batch.table.column_names)
        if links and channel.kind == "counter":
            parts = [read_numbers(batch.table.column(name), channel.unit).values[usable] for name in links]
            if np.array_equal(np.nan_to_num(numbers.values), np.nansum(parts, axis=0)):  # the table has no true total
                names = [(unit, channel.name) for unit in self.installations.units]
                totals = self.links.of_table(names, *unit_ms, links, np.column_stack(parts))
                numbers = numbers._replace(values=totals)
        values, valid, problems, sentinels = parse_values(numbers, channel, scale, offset)
        if channel.unit in _TOO_SMALL:
            nonzero = values[valid & (values != 0)]
            self._nonzero[channel.name] += len(nonzero)
            self._fractions[channel.name] += int((nonzero < _TOO_SMALL[channel.unit][0]).sum())
        self.counts["values_not_supported"] += sentinels
        rejected: dict[str, tuple[int, str]] = {}
        for reason, chosen in problems.items():
            values_of = column.filter(pa.array(chosen)).to_pylist()
            details = [f"{channel.name} = {value}" for value in values_of]
            batch.set_aside(reason, np.flatnonzero(usable)[chosen], details, rows=0)
            rejected[reason] = len(values_of), f"{batch.file.name}: {values_of[0]!r}"
        self.quarantine.values("samples", channel.name, int(valid.sum()), rejected)
        return pa.array(values, kind, mask=~valid)

    def _mapped(self, column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
        table = self.mapping.values.get(name)
        if table is None:
            return column
        texts = [table.get(text, text) for text in as_text(column, len(column))]
        return pa.chunked_array([pa.array([None if text is None else str(text) for text in texts], pa.string())])


def no_usable_rows(table: str, quarantine: Quarantine, location: str) -> InputError:
    """Return the error for sources without a usable row, with the most common reason and an example."""
    if not quarantine.counts:
        return InputError(f"no {table} row can be used", location, "Check the file.")
    reason, number = quarantine.counts.most_common(1)[0]
    return InputError(
        f"no {table} row can be used: {sum(quarantine.counts.values())} were quarantined, {number} of them for "
        f"{reason!r}, such as {quarantine.example(reason)}",
        location,
        advice(reason),
    )


def _may_be_gpu(name: str) -> bool:
    return not name.upper().startswith("MIG-") and parent_of_mig(name) is None and not is_placeholder(name)


def _encoded(column: pa.ChunkedArray | None, length: int) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Factorize a column: an index into the distinct strings for each row (-1 for null or blank), and the strings."""
    if column is None:
        return np.full(length, -1, np.int64), []
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.combine_chunks().dictionary_encode()
    codes, names = pd.factorize(as_text(pa.chunked_array([encoded.dictionary]), len(encoded.dictionary)))
    return np.append(codes, -1)[encoded.indices.fill_null(-1).to_numpy()], list(names)
