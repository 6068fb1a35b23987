"""Tickets of repairs, replacements and RMAs, from a table, to landed events."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.dataset.schema import EVENT_TYPES
from telemetry.errors import InputError
from telemetry.importing.columns import KEY_ALIASES, Columns, mapped_text, require, resolve_columns
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import Batch, read_batches
from telemetry.landing.folder import Landing
from telemetry.landing.tables import LANDED_EVENTS
from telemetry.xids.pci import normalise_pci_bus_id

SOURCE: Final = "ticket"
TYPE_ALIASES: Final[Mapping[str, str]] = {
    "rma": "replacement",
    "replaced": "replacement",
    "swap": "replacement",
    "repaired": "repair",
    "reseat": "repair",
    "fault": "failure",
}
"""What ticket systems call some event types."""

ENTRY_ALIASES: Final[Mapping[str, str]] = {
    "entered_at": "known_at",
    "created_at": "known_at",
    "reported_at": "known_at",
    "opened_at": "known_at",
}
"""Further names of the column that says when a ticket was entered."""

_TEXTS: Final = ("node", "gpu", "type", "code", "detail", "source", "pci_bus_id")


@dataclass(frozen=True, slots=True)
class TicketResult:
    """Outcome of a table; ``again``: this very table was written before."""

    landed: int
    again: bool
    refused: dict[str, int]
    examples: dict[str, str]


def collect_tickets(
    path: Path, landing: Landing, *, mapping: TableMapping, delay: timedelta, parents: Mapping[str, str] | None = None
) -> TicketResult:
    """Write the events of one table to the landing folder, once.

    ``path``: CSV, TSV, Parquet or JSON with ``timestamp``, ``type``, and ``gpu`` or ``node``, through ``mapping``.
    ``known_at`` is the ticket's entry time.
    ``delay``: ``known_at`` of a ticket without an entry time is its time plus this.
    ``parents``: GPU to node, for tickets that name a GPU only.
    Raises ``InputError`` if the table cannot be read, a required column is missing, a column is unknown, or no row can
    be used.
    """
    quarantine = Quarantine(None)
    tables: list[pa.Table] = []
    counts: Counter[str] = Counter()
    for batch in read_batches(path, "events", quarantine):
        names = batch.table.column_names
        known = list(LANDED_EVENTS.names)
        columns = resolve_columns(names, mapping, known, {**KEY_ALIASES, **ENTRY_ALIASES}, str(path))
        require(columns, ["timestamp", "type", "node" if "node" in columns else "gpu"], names, str(path))
        counts["rows"] += batch.table.num_rows
        tables.append(_events(batch, columns, mapping, delay, parents or {}))
    table = pa.concat_tables(tables) if tables else LANDED_EVENTS.empty_table()
    if counts["rows"] and not table.num_rows and quarantine.counts:
        reason = quarantine.counts.most_common(1)[0][0]
        raise InputError(f"no row can be used: {reason}", quarantine.examples[reason], "Correct it, or map it.")
    rules = mapping.model_dump_json()
    digest = hashlib.sha256(path.read_bytes() + rules.encode()).hexdigest()[:24]
    again = landing.has_landed("events", f"tickets-{digest}")
    made = landing.stage("events", table, name=f"tickets-{digest}")
    landed = table.num_rows if made is not None else 0
    return TicketResult(landed, again, dict(quarantine.counts), dict(quarantine.examples))


def _events(
    batch: Batch, columns: Columns, mapping: TableMapping, delay: timedelta, parents: Mapping[str, str]
) -> pa.Table:
    text: dict[str, npt.NDArray[np.object_]] = {}
    for name in _TEXTS:
        text[name], dropped = mapped_text(columns, batch.table, name, mapping)
        batch.good &= ~dropped
    kinds = [None if kind is None else str(kind).strip().lower() for kind in text["type"]]
    text["type"] = np.array([None if kind is None else TYPE_ALIASES.get(kind, kind) for kind in kinds], dtype=object)
    batch.refuse("unknown event type", ~np.isin(text["type"].astype(str), EVENT_TYPES))
    addresses = text["pci_bus_id"]
    addresses[:] = [None if address is None else normalise_pci_bus_id(str(address)) for address in addresses]
    for index, gpu in enumerate(text["gpu"]):
        if text["node"][index] is None and gpu is not None:
            text["node"][index] = parents.get(str(gpu))
    no_node = np.array([node is None for node in text["node"]], dtype=bool)
    named = np.array([gpu is not None for gpu in text["gpu"]], dtype=bool)
    batch.refuse("missing node and gpu", no_node & ~named)
    batch.refuse("the node of the gpu is not known", no_node)
    instants = batch.instants(columns, "timestamp", mapping.time)
    assert instants is not None
    known = instants.ms + int(delay.total_seconds() * 1000)
    entered = batch.instants(columns, "known_at", mapping.time, optional=True)
    if entered is not None:
        known = np.where(entered.ok, entered.ms, known)
    good = batch.good
    content: dict[str, Any] = {name: values[good] for name, values in text.items()}
    content["source"] = [source or SOURCE for source in content["source"]]
    # Nothing is known before it happens: such an entry time is a clock error or a backdated ticket.
    content |= {"timestamp": instants.ms[good], "known_at": np.maximum(known, instants.ms)[good]}
    arrays = [pa.array(content[field.name], type=field.type, from_pandas=True) for field in LANDED_EVENTS]
    return pa.Table.from_arrays(arrays, schema=LANDED_EVENTS)
