import json
import os
import subprocess
import sys
from pathlib import Path

from telemetry.staging.folder import StagingFolder, staging_of
from tests.processes import PREDRAIN, ROOT, invoke, running
from tests.telemetry.helpers import DAY
from tests.telemetry.staging_world import raw, samples_of, stage_frame
from tests.waiting import wait

COMPACT = ("collect", "compact", "--dataset")


def test_staged_files_are_compacted_and_counted(tmp_path: Path):
    stage_frame(tmp_path, raw())
    result = json.loads(invoke(*COMPACT, tmp_path / "dataset", "--json").stdout)
    assert result["compacted files"] == {"samples": 1}
    assert result["samples"] == len(samples_of(tmp_path))


def test_a_mistyped_dataset_is_an_error_and_makes_nothing(tmp_path: Path):
    stage_frame(tmp_path, raw())
    typo = invoke(*COMPACT, tmp_path / "datsaet", code=1)
    assert "no dataset" in typo.stderr
    assert "Check the path" in typo.stderr
    live = invoke(*COMPACT, tmp_path / "dataset.live", code=1)
    assert "is a staging folder" in live.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.live"]


def test_it_goes_on_compacting_until_it_is_stopped(tmp_path: Path):
    stage_frame(tmp_path, raw())
    staging = StagingFolder(staging_of(tmp_path / "dataset"), writer="t")
    with running([*PREDRAIN, *COMPACT, tmp_path / "dataset", "--interval", "1s"], tmp_path / "log") as process:
        wait(lambda: not staging.waiting())
        stage_frame(tmp_path, raw(start=DAY.floor("D") + (raw(1, 2)["timestamp"][1] - DAY) * 120))
        wait(lambda: not staging.waiting())
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert samples_of(tmp_path)["sample_count"].sum() == 480


WRITER = """
import os, sys, time
from pathlib import Path
import pandas as pd
from tests.telemetry.staging_world import DAY, stage_frame, raw
number = int(sys.argv[2])
for turn in range(12):
    frame = raw(gpus=4, times=4, start=DAY + pd.Timedelta(minutes=2 * turn))
    stage_frame(Path(sys.argv[1]), frame[frame["gpu"].isin(sorted(set(frame["gpu"]))[2 * number : 2 * number + 2])])
    time.sleep(0.05)
"""


def test_concurrent_collectors_and_compactions_lose_nothing(tmp_path: Path):
    staging_of(tmp_path / "dataset").mkdir()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(number)], cwd=ROOT) for number in range(2)
    ]
    while any(writer.poll() is None for writer in writers):
        invoke(*COMPACT, tmp_path / "dataset")
    assert [writer.wait() for writer in writers] == [0, 0]
    invoke(*COMPACT, tmp_path / "dataset")
    samples = samples_of(tmp_path)
    assert samples["sample_count"].sum() == 4 * 48
    assert StagingFolder(staging_of(tmp_path / "dataset"), writer="t").waiting() == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".dataset")]
