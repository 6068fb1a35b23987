"""Import of a table of tickets (repairs, replacements, RMAs) as staged events."""

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
from telemetry.accounting import Accounting
from telemetry.identity.devices import normalise_pci_bus_id
from telemetry.importing.columns import KEY_ALIASES, refuse_absent
from telemetry.importing.events import parse_events
from telemetry.importing.files.tables import read_batches
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.tickets import resolutions
from telemetry.phrases import WORK, PhraseReview
from telemetry.staging.folder import STAGED_EVENTS, StagingFolder

SOURCE: Final = "ticket"
ENTRY_ALIASES: Final[Mapping[str, str]] = {
    "entered_at": "known_at",
    "created_at": "known_at",
    "reported_at": "known_at",
    "opened_at": "known_at",
}


def collect_tickets(
    path: Path,
    staging: StagingFolder,
    *,
    mapping: TableMapping,
    delay: timedelta,
    installations: InstallationIndex | None = None,
    max_loss: float | None = None,
) -> tuple[dict[str, Any], Accounting]:
    """Stage the events of a ticket table, parsed as in an import; idempotent.

    ``delay``: from a ticket to its ``known_at``, for tickets without an entry time.
    ``installations``: the dataset's inventory, for tickets without a node, or with a slot, PCI address or serial number
    instead of a UUID.
    ``max_loss``: maximum share of lost rows; None: no limit.
    Returns: the summary to print, and the accounting.
    Raises ``InputError`` if a mapped column is missing, no row is usable, or ``max_loss`` is exceeded.
    """
    quarantine, review = Quarantine(max_loss), PhraseReview()
    tables = [STAGED_EVENTS.empty_table()]
    counts: Counter[str] = Counter()
    for unparsed in read_batches(path, "events", quarantine):
        texts = ("node", "gpu", "code", "detail", "source", "pci_bus_id")
        aliases = {**KEY_ALIASES, **ENTRY_ALIASES}
        refuse_absent(mapping, unparsed.table.column_names, str(path))
        batch, rows = parse_events(
            unparsed,
            mapping,
            STAGED_EVENTS.names,
            delay,
            counts,
            texts,
            aliases,
            installations=installations,
            review=review,
        )
        _fill_nodes(rows, installations)
        unplaced = pd.isna(rows["node"])
        batch.refuse("missing node and gpu", unplaced & pd.isna(rows["gpu"]))
        batch.refuse("unknown node of the gpu", unplaced)
        rows["source"] = np.where(pd.isna(rows["source"]), SOURCE, rows["source"])
        rows["pci_bus_id"][:] = [None if text is None else normalise_pci_bus_id(text) for text in rows["pci_bus_id"]]
        resolved = _staged(resolutions(rows, batch.valid, delay))
        tables += [_staged(pd.DataFrame(rows)[batch.valid]), resolved]
        quarantine.read("events", resolved.num_rows)
    table = pa.concat_tables(tables)
    quarantine.used("events", table.num_rows)
    if not table.num_rows and quarantine.counts:
        reason = quarantine.counts.most_common(1)[0][0]
        raise InputError(f"no usable rows: {reason}", quarantine.example(reason), "Correct or map it.")
    quarantine.check_loss("events")
    rules = mapping.model_dump_json()
    digest = hashlib.sha256(path.read_bytes() + rules.encode()).hexdigest()[:24]
    was_staged = staging.is_staged("events", f"tickets-{digest}")
    staged_path = staging.stage("events", table, name=f"tickets-{digest}")
    return {
        "events_written": table.num_rows if staged_path is not None else 0,
        "already_written": was_staged,
        "rejected": dict(quarantine.counts),
        "examples": {reason: quarantine.example(reason) for reason in quarantine.counts},
        "repairs_without_a_gpu": sum(
            kind in WORK and gpu is None
            for kind, gpu in zip(table["type"].to_pylist(), table["gpu"].to_pylist(), strict=True)
        ),
        "counts": {name: number for name, number in counts.items() if number},
        "phrases": review.rows(),
    }, quarantine


def _fill_nodes(rows: dict[str, Any], installations: InstallationIndex | None) -> None:
    """Fill in missing nodes: where the ticket's GPU was installed at the time."""
    if installations is None or installations.unit != "gpu":
        return
    unplaced = np.flatnonzero(pd.isna(rows["node"]) & ~pd.isna(rows["gpu"]))
    installation = installations.last_row(installations.codes(rows["gpu"][unplaced]), rows["timestamp"][unplaced])
    rows["node"][unplaced[installation >= 0]] = installations.nodes[installation[installation >= 0]]


def _staged(events: pd.DataFrame) -> pa.Table:
    arrays = [pa.array(events[field.name], field.type, from_pandas=True) for field in STAGED_EVENTS]
    return pa.table(arrays, schema=STAGED_EVENTS)
