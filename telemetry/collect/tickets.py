"""Tickets of repairs, replacements and RMAs, from a table, to landed events."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from foundation.errors import InputError
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.importing.columns import KEY_ALIASES, refuse_absent
from telemetry.importing.events import parse_events
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import read_batches
from telemetry.landing.folder import Landing
from telemetry.landing.tables import LANDED_EVENTS

SOURCE: Final = "ticket"
ENTRY_ALIASES: Final[Mapping[str, str]] = {
    "entered_at": "known_at",
    "created_at": "known_at",
    "reported_at": "known_at",
    "opened_at": "known_at",
}
"""Further names of the column that says when a ticket was entered."""


def collect_tickets(
    path: Path, landing: Landing, *, mapping: TableMapping, delay: timedelta, parents: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write the events of one table, as for an import of events, to the landing folder, once; return what is shown.

    ``delay``: ``known_at`` of a ticket without an entry time is its time plus this. ``parents``: GPU to node, for
    tickets that name a GPU only. Raises ``InputError`` if the table has a wrong column, or no row can be used.
    """
    quarantine = Quarantine(None)
    tables = [LANDED_EVENTS.empty_table()]
    counts: Counter[str] = Counter()
    for given in read_batches(path, "events", quarantine):
        texts = ("node", "gpu", "code", "detail", "source", "pci_bus_id")
        aliases = {**KEY_ALIASES, **ENTRY_ALIASES}
        refuse_absent(mapping, given.table.column_names, str(path))
        batch, rows = parse_events(given, mapping, LANDED_EVENTS.names, delay, counts, texts, aliases)
        unplaced = pd.isna(rows["node"])
        rows["node"][unplaced] = [(parents or {}).get(gpu) for gpu in rows["gpu"][unplaced]]
        batch.refuse("missing node and gpu", unplaced & pd.isna(rows["gpu"]))
        batch.refuse("the node of the gpu is not known", pd.isna(rows["node"]))
        rows["source"] = np.where(pd.isna(rows["source"]), SOURCE, rows["source"])
        rows["pci_bus_id"][:] = [None if text is None else normalise_pci_bus_id(text) for text in rows["pci_bus_id"]]
        arrays = [pa.array(rows[field.name], field.type, from_pandas=True) for field in LANDED_EVENTS]
        tables.append(pa.table(arrays, schema=LANDED_EVENTS).filter(pa.array(batch.good)))
    table = pa.concat_tables(tables)
    if counts["events_read"] and not table.num_rows and quarantine.counts:
        reason = quarantine.counts.most_common(1)[0][0]
        raise InputError(f"no row can be used: {reason}", quarantine.examples[reason], "Correct it, or map it.")
    rules = mapping.model_dump_json()
    digest = hashlib.sha256(path.read_bytes() + rules.encode()).hexdigest()[:24]
    again = landing.has_landed("events", f"tickets-{digest}")
    made = landing.stage("events", table, name=f"tickets-{digest}")
    return {
        "events_written": table.num_rows if made is not None else 0,
        "already_written": again,
        "rejected": dict(quarantine.counts),
        "examples": dict(quarantine.examples),
    }
