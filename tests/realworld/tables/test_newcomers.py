"""Files as somebody has them who never heard of predrain: at most one round of questions, all asked at once."""

from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.asking.questions import Inquiry, look, refuse_open
from telemetry.importing.mapping import load_mapping
from tests.telemetry.helpers import gpu, run_import

GWDG = Path(__file__).parents[3].parent / "shared/data/gwdg"


def suggested(folder: Path, given: dict[str, list[Path]]) -> str:
    """Return the mapping file that is suggested, unchanged."""
    text = Inquiry(given, None, *look(given, load_mapping(None), CATALOGUE)).mapping_text()
    (folder / "suggested.yaml").write_text(text)
    return text


def test_zones_orders_and_columns_of_all_tables_are_asked_at_once(tmp_path: Path) -> None:
    (tmp_path / "smi.csv").write_text(f"timestamp,uuid,power.draw [W],odd\n2026/03/01 00:00:00,{gpu(0)},300 W,1\n")
    (tmp_path / "tickets.csv").write_text("Opened,Host,Work\n03/04/2026 10:00,node-0,repair\n")
    given = {"samples": [tmp_path / "smi.csv"], "events": [tmp_path / "tickets.csv"]}
    with pytest.raises(InputError) as caught:
        refuse_open(given, load_mapping(None), CATALOGUE)
    for text in ("'odd'", "smi.csv", "2026/03/01 00:00:00", "03/04/2026 10:00", "timezone:", "order: dmy"):
        assert text in str(caught.value)


@pytest.mark.skipif(not GWDG.is_dir(), reason="the published telemetry of GWDG is absent")
def test_published_telemetry_and_tickets_import_by_what_is_suggested(tmp_path: Path) -> None:
    frame = pd.read_parquet(GWDG / "dcgm_wide.parquet")
    keys = ("t", "node", "uuid", "gpu", "driverVersion")
    renamed = frame.rename(columns={name: f"DCGM_FI_DEV_{name}" for name in frame if name not in keys})
    renamed.to_parquet(tmp_path / "dcgm.parquet")
    tickets = GWDG / "incident_events.csv"
    stays = frame.groupby(["uuid", "node"], as_index=False)["t"].min()
    others = sorted(set(pd.read_csv(tickets)["node"]) - set(stays["node"]))
    inventory = pd.DataFrame(
        {
            "gpu": [*stays["uuid"], *(f"other-{number}" for number in range(len(others)))],
            "node": [*stays["node"], *others],
            "installed_at": "2025-01-01T00:00:00Z",
        }
    )
    text = suggested(tmp_path, {"samples": [tmp_path / "dcgm.parquet"], "events": [tickets]})
    assert text.splitlines().count("timezone: UTC") == 1
    result = run_import(
        tmp_path, samples=[tmp_path / "dcgm.parquet"], events=[tickets], inventory=inventory, mapping=text
    )
    events = result.dataset.events()
    lost = events[(events["type"] == "xid") & (events["code"] == "79")]
    assert len(lost) == 44
    assert len(lost.drop_duplicates(["node", "timestamp"])) == 14
    assert (events["source"] == "incident_events.csv").sum() == 69
    assert result.dataset.meta.counts["samples"] == len(frame)
