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
from telemetry.importing.columns import (
    KEY_ALIASES,
    Columns,
    as_text,
    map_values,
    require,
    resolve_columns,
)
from telemetry.importing.instants import OK, PROBLEMS, parse_instants
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import read_batches
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
    """What became of a table.

    ``landed``: Events; 0 where this very table landed before.
    ``examples``: one of each reason.
    """

    landed: int
    again: bool
    refused: dict[str, int]
    examples: dict[str, str]


def collect_tickets(
    path: Path, landing: Landing, *, mapping: TableMapping, delay: timedelta, parents: Mapping[str, str] | None = None
) -> TicketResult:
    """Land the events of one table.

    ``path``: CSV, TSV, Parquet or JSON, see :func:`read_batches`; columns ``timestamp`` and ``type``,
    and ``gpu`` or ``node``, through ``mapping``. ``known_at`` is the ticket's entry time.
    ``landing``: takes a table of the same content and mapping once.
    ``mapping``: the ``events`` section of a mapping file.
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
        tables.append(_events(path, batch.table, batch.rows, columns, mapping, delay, parents or {}, quarantine))
    table = pa.concat_tables(tables) if tables else LANDED_EVENTS.empty_table()
    if counts["rows"] and not table.num_rows and quarantine.counts:
        reason = quarantine.counts.most_common(1)[0][0]
        do = "Give --mapping with `events: {time: {timezone: …}}`." if "naive" in reason else "Correct it, or map it."
        raise InputError(f"no row can be used: {reason}", quarantine.examples[reason], do)
    rules = mapping.model_dump_json()
    digest = hashlib.sha256(path.read_bytes() + rules.encode()).hexdigest()[:24]
    again = landing.has_landed("events", f"tickets-{digest}")
    made = landing.land("events", table, name=f"tickets-{digest}")
    landed = table.num_rows if made is not None else 0
    return TicketResult(landed, again, dict(quarantine.counts), dict(quarantine.examples))


def _events(
    path: Path,
    table: pa.Table,
    rows: npt.NDArray[np.int64],
    columns: Columns,
    mapping: TableMapping,
    delay: timedelta,
    parents: Mapping[str, str],
    quarantine: Quarantine,
) -> pa.Table:
    length = table.num_rows
    good = np.ones(length, dtype=bool)

    def refuse(reason: str, chosen: npt.NDArray[np.bool_]) -> None:
        quarantine.add_rows(reason, "events", path, chosen & good, rows, table)
        good[chosen] = False

    text: dict[str, npt.NDArray[np.object_]] = {}
    for name in _TEXTS:
        text[name] = as_text(columns.get(table, name), length)
        if name in mapping.values:
            text[name], dropped = map_values(text[name], mapping.values[name])
            good[dropped] = False
    kinds = [None if each is None else str(each).strip().lower() for each in text["type"]]
    text["type"] = np.array([None if each is None else TYPE_ALIASES.get(each, each) for each in kinds], dtype=object)
    refuse("unknown event type", ~np.isin(text["type"].astype(str), EVENT_TYPES))
    addresses = text["pci_bus_id"]
    addresses[:] = [None if each is None else normalise_pci_bus_id(str(each)) for each in addresses]
    for index in range(length):
        if text["node"][index] is None and text["gpu"][index] is not None:
            text["node"][index] = parents.get(str(text["gpu"][index]))
    no_unit = np.array([each is None for each in text["node"]], dtype=bool)
    named = np.array([each is not None for each in text["gpu"]], dtype=bool)
    refuse("missing node and gpu", no_unit & ~named)
    refuse("the node of the gpu is not known", no_unit)
    ms = _instants(path, table, columns, mapping, "timestamp", refuse, required=True)
    known = _instants(path, table, columns, mapping, "known_at", refuse, required=False)
    known = np.where(known < 0, ms + int(delay.total_seconds() * 1000), known)
    content: dict[str, Any] = {name: values[good] for name, values in text.items()}
    content["source"] = [each or SOURCE for each in content["source"]]
    # Nothing is known before it happens: such an entry time is a clock error or a backdated ticket.
    content |= {"timestamp": ms[good], "known_at": np.maximum(known, ms)[good]}
    arrays = [pa.array(content[field.name], type=field.type, from_pandas=True) for field in LANDED_EVENTS]
    return pa.Table.from_arrays(arrays, schema=LANDED_EVENTS)


def _instants(
    path: Path,
    table: pa.Table,
    columns: Columns,
    mapping: TableMapping,
    name: str,
    refuse: Any,
    *,
    required: bool,
) -> npt.NDArray[np.int64]:
    """Return milliseconds, -1 where there is none; what cannot be read is refused."""
    column = columns.get(table, name)
    if column is None:
        return np.full(table.num_rows, -1, np.int64)
    instants = parse_instants(column, mapping.time, f"{path}, column {columns.source.get(name, name)!r}")
    for problem, reason in PROBLEMS.items():
        if required or problem != 1:
            refuse(f"{reason} in {name}", instants.status == problem)
    return np.where(instants.status == OK, instants.ms, -1)
