"""What promtool itself dumps of a database, and the file that the database was made of, land as the same rows."""

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.collect.openmetrics import land_dump
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.landing.folder import Landing

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine"),
]

T0 = 1_772_323_200


def openmetrics() -> str:
    """Two days of three GPUs, with a pod that changes, gaps, exponents, and a counter that float32 could not hold."""
    lines = []
    for metric, scale in (
        ("DCGM_FI_DEV_GPU_TEMP", 0.125),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 54_700_000_001.0),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 4.0),
    ):
        lines.append(f"# TYPE {metric} gauge")
        for gpu in range(3):
            for pod in range(2):
                labels = f'UUID="GPU-{gpu}",Hostname="n{gpu // 2}",gpu="{gpu}",pod="a \\"{pod}\\" \\\\ b"'
                for turn in range(pod * 1440, pod * 1440 + 1400):
                    lines.append(f"{metric}{{{labels}}} {scale * (turn + gpu)!r} {T0 + turn * 60 + gpu / 8:.3f}")
    return "\n".join([*lines, "# EOF", ""])


def rows(path: Path, live: Path) -> list[dict[str, Any]]:
    land_dump(path, Landing(live, writer="test"), SeriesCatalogue(CATALOGUE))
    tables = [pq.read_table(each) for each in (live / "samples").glob("*.parquet")]
    found = pa.concat_tables(tables, promote_options="default").to_pylist()
    return sorted(found, key=lambda row: (row["gpu"], row["timestamp"]))


def test_the_dump_of_a_real_database_is_what_it_was_made_of(tmp_path: Path) -> None:
    source = tmp_path / "source.om"
    source.write_text(openmetrics())
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", source, tmp_path / "tsdb"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (tmp_path / "tsdb" / "wal").mkdir()  # promtool wants one, be it empty
    dump = tmp_path / "dump.txt"
    with dump.open("wb") as stream:
        subprocess.run(["promtool", "tsdb", "dump", tmp_path / "tsdb"], stdout=stream, timeout=120, check=True)
    ours, theirs = rows(source, tmp_path / "ours"), rows(dump, tmp_path / "theirs")
    assert len(ours) == 3 * 2800
    assert ours == theirs
    assert not any(math.isnan(row["energy_mj"]) for row in ours)
    assert ours[-1]["energy_mj"] == 54_700_000_001.0 * (1440 + 1399 + 2)
    assert round(ours[-1]["timestamp"].timestamp() * 1000) == (T0 + 2839 * 60) * 1000 + 250
