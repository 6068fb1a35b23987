"""`predrain collect tickets` takes a folder of exports, as the unit and the chart give it."""

import json
from pathlib import Path

import pyarrow.parquet as pq

from telemetry.staging.folder import StagingFolder, staging_of
from tests.processes import invoke


def test_each_export_of_a_folder_is_staged_once(tmp_path: Path) -> None:
    (exports := tmp_path / "tickets").mkdir()
    for name, gpu in (("january", 1), ("february", 2)):
        row = f"2026-03-0{gpu}T10:00:00Z,n1,GPU-0000000{gpu}-0000-0000-0000-000000000000,replacement"
        (exports / f"{name}.csv").write_text(f"timestamp,node,gpu,type\n{row}\n")
    for _ in range(2):
        invoke("collect", "tickets", exports, "--dataset", tmp_path / "fleet")
    staged = StagingFolder(staging_of(tmp_path / "fleet"), writer="test").waiting("events")
    gpus = sorted(gpu for path in staged for gpu in pq.read_table(path)["gpu"].to_pylist())
    assert gpus == [f"GPU-0000000{gpu}-0000-0000-0000-000000000000" for gpu in (1, 2)]


def test_a_table_that_cannot_be_used_stops_no_other(tmp_path: Path) -> None:
    (exports := tmp_path / "tickets").mkdir()
    (exports / "a.csv").write_text("what,when\nx,y\n")
    good = "2026-03-01T10:00:00Z,n1,repair\n"
    (exports / "b.csv").write_text("timestamp,node,type\n" + good * 8 + "yesterday,n1,repair\n" * 2)
    (exports / "c.csv").write_text("timestamp,node,type\n" + good)
    report = invoke("collect", "tickets", exports, "--dataset", tmp_path / "fleet", "--json", code=1)
    files = json.loads(report.stdout)["accounting"]["files"]
    assert (files["read"], files["used"], files["left_out"][0]["count"]) == (3, 2, 1)
    staged = StagingFolder(staging_of(tmp_path / "fleet"), writer="test").waiting("events")
    assert sum(pq.read_table(path).num_rows for path in staged) == 9


def test_a_table_that_loses_more_than_it_may_is_refused(tmp_path: Path) -> None:
    rows = "2026-03-01T10:00:00Z,n1,repair\n" * 80 + "yesterday,n1,repair\n" * 20
    (tmp_path / "t.csv").write_text(f"timestamp,node,type\n{rows}")
    command = ["collect", "tickets", tmp_path / "t.csv", "--dataset", tmp_path / "fleet"]
    assert "unreadable timestamp" in invoke(*command, code=1).stderr
    invoke(*command, "--max-loss", "0.3")
