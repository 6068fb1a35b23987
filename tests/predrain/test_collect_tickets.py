"""`predrain collect tickets` takes a folder of exports, as the unit and the chart give it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from telemetry.landing.folder import Landing, landing_of
from tests.processes import predrain


def test_each_export_of_a_folder_is_staged_once(tmp_path: Path) -> None:
    (exports := tmp_path / "tickets").mkdir()
    for name, gpu in (("january", 1), ("february", 2)):
        row = f"2026-03-0{gpu}T10:00:00Z,n1,GPU-0000000{gpu}-0000-0000-0000-000000000000,replacement"
        (exports / f"{name}.csv").write_text(f"timestamp,node,gpu,type\n{row}\n")
    for _ in range(2):
        predrain("collect", "tickets", exports, "--dataset", tmp_path / "fleet")
    staged = Landing(landing_of(tmp_path / "fleet"), writer="test").waiting("events")
    gpus = sorted(gpu for path in staged for gpu in pq.read_table(path)["gpu"].to_pylist())
    assert gpus == [f"GPU-0000000{gpu}-0000-0000-0000-000000000000" for gpu in (1, 2)]
