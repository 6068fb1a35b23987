"""A real Prometheus with 30 days of a simulated fleet, pulled back through its API: the simulator's own dataset."""

import json
import random
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from telemetry.staging.folder import staging_of
from tests.processes import PREDRAIN, predrain, running
from tests.system.prometheus_server import load_blocks, need_prometheus, prometheus
from tests.system.simulated_exposition import exposition, same_values, samples_of, write_openmetrics
from tests.system.slurm_cluster import programs_of
from tests.waiting import free_port, wait

pytestmark = pytest.mark.system

GPUS, DAYS, SEED = 12, 30, 3
START, END = "2026-01-01T00:00:00Z", "2026-01-31T00:00:00Z"


@dataclass(frozen=True)
class Fleet:
    """The simulated fleet and the server that has its history."""

    truth: Dataset
    data: Path
    url: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Simulate, turn into blocks, serve."""
    need_prometheus()
    base = tmp_path_factory.mktemp("fleet")
    # Many failures, so that counters reset, GPUs are replaced and fall silent.
    simulate(base / "sim", gpus=GPUS, days=DAYS, seed=SEED, scenario="drift", acceleration=60.0)
    truth = Dataset.open(base / "sim")
    write_openmetrics(truth, base / "history.om")
    load_blocks(base / "history.om", base / "data")
    with prometheus(base / "data") as url:
        yield Fleet(truth, base / "data", url)


def arguments(
    url: str, dataset: Path, *options: str | Path, start: str = START, end: str = END
) -> tuple[str | Path, ...]:
    span = ("--since", start, "--until", end)
    return ("collect", "prometheus", "--prometheus", url, *span, "--dataset", dataset, "--json", *options)


def collect(url: str, dataset: Path, *options: str | Path, **span: str) -> dict[str, object]:
    return json.loads(predrain(*arguments(url, dataset, *options, **span)).stdout)


def assert_same_telemetry(fleet: Fleet, dataset: Path, *, gauges_within: float = 0.0) -> None:
    """Every sample of the simulator and none besides; exact, gauges being float32 on both sides."""
    mine, theirs = samples_of(fleet.truth), samples_of(Dataset.open(dataset))
    assert set(mine) == set(theirs)
    assert len(mine) == len(theirs)
    for name in mine.columns:
        if gauges_within and mine[name].dtype == "float32":
            assert mine[name].isna().equals(theirs[name].isna()), name
            assert np.allclose(mine[name], theirs[name], rtol=gauges_within, atol=0, equal_nan=True), name
        else:
            assert same_values(mine[name], theirs[name]), name


def test_the_history_comes_back_as_it_was(fleet: Fleet, tmp_path: Path) -> None:
    inventory = fleet.truth.path / "inventory.parquet"
    report = collect(fleet.url, tmp_path / "out", "--inventory", inventory)
    assert report["samples"] > 20 * GPUS * DAYS * 100
    assert report["quarantined"] == {}
    assert_same_telemetry(fleet, tmp_path / "out")
    again = collect(fleet.url, tmp_path / "out")
    assert (again["samples"], again["compacted files"]) == (0, {})
    # A longer time brings what is new, once; nothing else changes.
    digest = Dataset.open(tmp_path / "out").digest
    collect(fleet.url, tmp_path / "out", end="2026-02-02T00:00:00Z")
    assert Dataset.open(tmp_path / "out").digest == digest


def test_a_newer_prometheus_gives_the_same(fleet: Fleet, tmp_path: Path) -> None:
    newer = programs_of("trixie")
    assert newer is not None
    shutil.copytree(fleet.data, tmp_path / "data", ignore=shutil.ignore_patterns("lock", "queries.active"))
    with prometheus(tmp_path / "data", program=newer / "prometheus") as url:
        collect(url, tmp_path / "out", "--inventory", fleet.truth.path / "inventory.parquet")
    assert_same_telemetry(fleet, tmp_path / "out")


def test_killed_anywhere_it_goes_on_without_gaps_or_duplicates(fleet: Fleet, tmp_path: Path) -> None:
    out = tmp_path / "out"
    draw = random.Random(20260131)
    staged = staging_of(out) / "samples"
    killed = 0
    for _ in range(4):
        before = len(list(staged.glob("*.parquet")))
        run = subprocess.Popen(
            [*PREDRAIN, *arguments(fleet.url, out, "--no-compact", "--concurrency", "2")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        enough = before + draw.randint(3, 20)
        while run.poll() is None and len(list(staged.glob("*.parquet"))) < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        killed += run.poll() is None
        run.send_signal(signal.SIGKILL)
        run.wait(120)
    assert killed, "the backfill was over before it could be killed"
    inventory = fleet.truth.path / "inventory.parquet"
    report = collect(fleet.url, out, "--inventory", inventory)
    assert 0 < report["chunks fetched before"] < report["chunks"]
    assert_same_telemetry(fleet, out)


def test_a_server_with_a_low_limit_is_asked_for_less(fleet: Fleet, tmp_path: Path) -> None:
    copy = shutil.copytree(fleet.data, tmp_path / "data", ignore=shutil.ignore_patterns("lock"))
    day = {"start": "2026-01-10T00:00:00Z", "end": "2026-01-11T00:00:00Z"}
    with prometheus(copy, "--query.max-samples=150") as limited:  # 6 h of 12 GPUs are 432 samples of a metric
        collect(limited, tmp_path / "limited", **day)
    collect(fleet.url, tmp_path / "whole", **day)
    assert Dataset.open(tmp_path / "limited").digest == Dataset.open(tmp_path / "whole").digest


def test_a_dump_of_the_database_lands_what_the_database_was_made_of(fleet: Fleet, tmp_path: Path) -> None:
    # the dump of blocks alone: promtool wants a write-ahead log, be it empty
    copy = fleet.data.with_name("dumped")
    subprocess.run(["cp", "-r", fleet.data, copy], check=True, timeout=300)
    (copy / "lock").unlink(missing_ok=True)
    (copy / "wal").mkdir(exist_ok=True)
    dump = tmp_path / "dump.txt"
    with dump.open("wb") as stream:
        subprocess.run(["promtool", "tsdb", "dump", copy], stdout=stream, timeout=300, check=True)
    predrain("collect", "openmetrics", dump, "--dataset", tmp_path / "out")
    live = staging_of(tmp_path / "out")
    rows = pa.concat_tables(
        [pq.read_table(file) for file in (live / "samples").glob("*.parquet")], promote_options="default"
    )
    mine, theirs = samples_of(fleet.truth), rows.to_pandas().sort_values(["gpu", "timestamp"], ignore_index=True)
    assert len(mine) == len(theirs)
    assert [name for name in mine if name in theirs and not same_values(mine[name], theirs[name])] == []


@contextmanager
def victoria_metrics(data: Path) -> Iterator[str]:
    """Run VictoriaMetrics until the block ends; yields its address."""
    program = shutil.which("victoria-metrics")
    if program is None:
        pytest.skip("victoria-metrics is not installed: apt-get install victoria-metrics")
    url = f"http://127.0.0.1:{free_port()}"
    flags = [f"-storageDataPath={data}", f"-httpListenAddr={url.removeprefix('http://')}", "-retentionPeriod=100y"]
    with running([program, *flags], data.with_name("vm.log")):
        wait(lambda: urllib.request.urlopen(f"{url}/health", timeout=2).close() is None)
        yield url


def test_victoria_metrics_gives_the_same(fleet: Fleet, tmp_path: Path) -> None:
    with victoria_metrics(tmp_path / "vm") as url:
        lines = (line.rstrip("\n").rsplit(" ", 1) for line in exposition(fleet.truth))
        body = "".join(f"{sample} {seconds}000\n" for sample, seconds in lines).encode()
        request = urllib.request.Request(f"{url}/api/v1/import/prometheus", data=body, method="POST")
        urllib.request.urlopen(request, timeout=300).close()
        for _ in range(2):  # what is on its way into a part when a flush is asked for is not in it
            urllib.request.urlopen(f"{url}/internal/force_flush", timeout=10).close()
            time.sleep(2)
        collect(url, tmp_path / "out", "--inventory", fleet.truth.path / "inventory.parquet", "--chunk", "24h")
    # It keeps a block's values as whole numbers of one power of ten, so that the last digits of some gauges are lost.
    assert_same_telemetry(fleet, tmp_path / "out", gauges_within=1e-5)
