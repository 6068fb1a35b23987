from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from telemetry.dataset.store import Dataset
from telemetry.landing.folder import Landing, landing_of
from tests.telemetry.landing.test_compaction import DAY, land, raw, samples_of

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from predrain.command import main; main()", "collect", "compact"]


def run(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *given], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_landed_files_are_compacted_and_counted(tmp_path: Path):
    land(tmp_path, raw())
    done = run("--dataset", str(tmp_path / "dataset"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["compacted files"] == {"samples": 1}
    assert result["samples"] == len(samples_of(tmp_path))


def test_a_mistyped_dataset_is_an_error_and_makes_nothing(tmp_path: Path):
    land(tmp_path, raw())
    typo = run("--dataset", str(tmp_path / "datsaet"))
    assert typo.returncode == 1
    assert "there is no dataset" in typo.stderr
    assert "Check the path" in typo.stderr
    live = run("--dataset", str(tmp_path / "dataset.live"))
    assert live.returncode == 1
    assert "is a landing folder" in live.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.live"]


def test_it_goes_on_compacting_until_it_is_stopped(tmp_path: Path):
    land(tmp_path, raw())
    running = subprocess.Popen(
        [*COMMAND, "--dataset", str(tmp_path / "dataset"), "--every", "1s"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        landing = Landing(landing_of(tmp_path / "dataset"), writer="t")
        wait_for(lambda: not landing.waiting())
        land(tmp_path, raw(start=DAY.floor("D") + (raw(1, 2)["timestamp"][1] - DAY) * 120))
        wait_for(lambda: not landing.waiting())
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        running.wait()
        assert running.stderr is not None
        running.stderr.close()
    assert Dataset.open(tmp_path / "dataset").meta.counts["imported"]["samples_read"] == 480


WRITER = """
import os, sys, time
from pathlib import Path
import pandas as pd
from tests.telemetry.landing.test_compaction import DAY, land, raw
number = int(sys.argv[2])
for turn in range(12):
    frame = raw(gpus=4, times=4, start=DAY + pd.Timedelta(minutes=2 * turn))
    land(Path(sys.argv[1]), frame[frame["gpu"].isin(sorted(set(frame["gpu"]))[2 * number : 2 * number + 2])])
    time.sleep(0.05)
"""


def test_concurrent_collectors_and_compactions_lose_nothing(tmp_path: Path):
    landing_of(tmp_path / "dataset").mkdir()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(number)], cwd=ROOT) for number in range(2)
    ]
    while any(writer.poll() is None for writer in writers):
        done = run("--dataset", str(tmp_path / "dataset"))
        assert done.returncode == 0, done.stderr
    assert [writer.wait() for writer in writers] == [0, 0]
    assert run("--dataset", str(tmp_path / "dataset")).returncode == 0
    samples = samples_of(tmp_path)
    assert samples["sample_count"].sum() == 4 * 48
    assert Landing(landing_of(tmp_path / "dataset"), writer="t").waiting() == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".dataset")]


def wait_for(condition: object, seconds: float = 120.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
