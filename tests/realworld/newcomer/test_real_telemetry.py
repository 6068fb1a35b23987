"""GWDG's A100 nodes as a newcomer has them: one round of questions, none about rows that are left out on purpose."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.params import Params
from pipeline.sources import check_sources
from telemetry.importing.suggestion.trial import write_inquiry
from tests.processes import ROOT

DATA = ROOT.parent / "shared" / "data" / "gwdg"
KEYS = ("t", "node", "uuid", "gpu", "driverVersion")


@pytest.mark.skipif(not DATA.is_dir(), reason="GWDG's telemetry is not here")
def test_nothing_is_asked_again_once_the_mapping_is_given(tmp_path: Path) -> None:
    table = pq.read_table(DATA / "dcgm_wide.parquet")
    names = [name if name in KEYS else f"DCGM_FI_DEV_{name}" for name in table.column_names]
    pq.write_table(table.rename_columns(names), tmp_path / "dcgm.parquet")
    tables = {"samples": [tmp_path / "dcgm.parquet"], "events": [DATA / "incident_events.csv"]}
    first = check_sources(tables, None, Params(), known=None)
    assert not first.is_clear
    assert {question.section for question in first.questions} <= {"timezone"}, "frozen stretches are no loss"
    second = check_sources(tables, write_inquiry(first, tmp_path), Params(), known=None)
    assert second.is_clear
