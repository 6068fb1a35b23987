from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.collect.tickets import collect_tickets
from telemetry.dataset.schema import INVENTORY, conform
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import NUMBER_AS_TYPE
from telemetry.staging.folder import StagingFolder
from tests.clock import NOW
from tests.telemetry.collect.builders import staged, staging

STAY = {"node": "n9", "gpu": "GPU-x", "installed_at": NOW}
HEAD = "timestamp,node,gpu,type,code,entered_at\n"


def collect(where: StagingFolder, path: Path, mapping: TableMapping | None = None, **more: object) -> dict[str, Any]:
    rules = mapping or TableMapping()
    result, accounting = collect_tickets(path, where, mapping=rules, delay=timedelta(minutes=10), **more)
    assert accounting.tables["events"].unaccounted == 0
    return result


def table(folder: Path, *rows: str, head: str = HEAD) -> Path:
    path = folder / "tickets.csv"
    path.write_text(head + "".join(f"{row}\n" for row in rows))
    return path


def test_tickets_land_with_their_entry_time_once(tmp_path: Path):
    where = staging(tmp_path)
    path = table(
        tmp_path,
        "2026-03-01T12:00:00Z,n1,GPU-a,RMA,gpu,2026-03-01T15:00:00Z",
        "2026-03-01T12:00:00Z,n2,,Repair,reseat,",
        "2026-03-01T12:00:00Z,n2,,repair,psu,2026-03-01T09:00:00Z",
    )
    result = collect(where, path)
    assert (result["events_written"], result["already_written"], result["rejected"]) == (3, False, {})
    assert result["repairs_without_a_gpu"] == 2
    assert collect(where, path) == result | {"events_written": 0, "already_written": True}
    rows = staged(where)
    assert [(row["type"], row["gpu"], row["code"], row["source"]) for row in rows] == [
        ("replacement", "GPU-a", "gpu", "ticket"),
        ("repair", None, "reseat", "ticket"),
        ("repair", None, "psu", "ticket"),
    ]
    waits = [row["known_at"] - NOW for row in rows]
    assert waits == [timedelta(hours=3), timedelta(minutes=10), timedelta(0)]  # nothing is known before it happens


def test_a_mapping_as_for_an_import(tmp_path: Path):
    where = staging(tmp_path)
    rows = ("01.03.2026 13:00,GPU-x,0000:3B:00.0,swap gpu 3", "01.03.2026 13:00,GPU-x,,chat")
    path = table(tmp_path, *rows, head="closed,unit,pci_bus_id,what\n")
    rules = TableMapping.model_validate(
        {
            "columns": {"closed": "timestamp", "unit": "gpu", "what": "type"},
            "time": {"format": "%d.%m.%Y %H:%M", "timezone": "Europe/Berlin"},
            "values": {"type": {"swap gpu 3": "replacement", "chat": None}},
        }
    )
    assert (
        collect(
            where,
            path,
            rules,
            installations=InstallationIndex(conform(pd.DataFrame([STAY]), INVENTORY).to_pandas(), "gpu"),
        )["events_written"]
        == 1
    )
    (row,) = staged(where)
    assert (row["timestamp"], row["node"], row["pci_bus_id"]) == (NOW, "n9", "00000000:3b:00")


def test_rows_that_cannot_be_used_are_counted(tmp_path: Path):
    where = staging(tmp_path)
    path = table(
        tmp_path,
        "2026-03-01T12:00:00Z,n1,,repair,,",
        "2026-03-01T12:00:00Z,n1,,7,,",
        "2026-03-01 12:00:00,n1,,repair,,",
        "2026-03-01T12:00:00Z,,,repair,,",
        "2026-03-01T12:00:00Z,,GPU-x,repair,,",
    )
    result = collect(where, path)
    assert result["events_written"] == 1
    assert result["rejected"] == {
        NUMBER_AS_TYPE: 1,
        "naive timestamp": 1,
        "missing node and gpu": 1,
        "unknown node of the gpu": 1,
    }
    assert '"7"' in result["examples"][NUMBER_AS_TYPE]
    with pytest.raises(InputError, match="no usable rows: unreadable timestamp"):
        collect(where, table(tmp_path, "x,n1,,repair,,"))
