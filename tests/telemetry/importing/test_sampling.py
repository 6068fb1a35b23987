"""The step of a new dataset is the interval of its samples, and a step that is set wins."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from telemetry.config import TelemetrySection
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.store import Dataset
from telemetry.importing.mapping import TableMapping
from telemetry.importing.sampling import interval_of_files, sampling_interval, step_for, step_of
from telemetry.staging.compaction import CompactSettings, compact
from telemetry.staging.folder import StagingFolder, staging_of
from tests.processes import invoke
from tests.telemetry.helpers import write_csv

CHANNELS = resolve_channels({})
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


def samples(every: timedelta, *, jitter_s: float = 0.0, gpus: int = 3, seed: int = 0) -> pd.DataFrame:
    """Two days of samples of some GPUs, interleaved as a scrape writes them."""
    rng = np.random.default_rng(seed)
    times = pd.date_range(BEGIN, BEGIN + timedelta(days=2), freq=every, inclusive="left")
    rows = [
        {
            "timestamp": (time + timedelta(seconds=float(rng.uniform(-jitter_s, jitter_s)))).isoformat(),
            "node": "n1",
            "gpu": f"GPU-{gpu}",
            "gpu_temp_c": 40.0 + gpu,
        }
        for time in times
        for gpu in range(gpus)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("interval", "step"),
    [
        (None, minutes(10)),
        (timedelta(seconds=15), minutes(10)),
        (minutes(10), minutes(10)),
        (timedelta(seconds=603), minutes(10)),
        (minutes(12), minutes(15)),
        (minutes(30), minutes(30)),
        (timedelta(seconds=1807), minutes(30)),
        (minutes(60), minutes(60)),
        (timedelta(days=7), timedelta(days=1)),
    ],
)
def test_a_step_is_the_next_that_is_not_shorter_than_the_interval(interval: timedelta | None, step: timedelta) -> None:
    assert step_for(interval) == step


def test_the_interval_is_that_of_most_units_whatever_gaps_and_repeats_there_are() -> None:
    regular = [(f"g{unit}", 1_800_000 * turn) for unit in range(4) for turn in range(40) if turn not in (7, 8, 9)]
    frame = pd.DataFrame([*regular, *regular[:50], *(("fast", 60_000 * turn) for turn in range(500))])
    assert sampling_interval(frame[0].to_numpy(), frame[1].to_numpy(np.int64)) == minutes(30)


def test_one_sample_a_unit_shows_no_interval() -> None:
    assert sampling_interval(["a", "b"], np.array([0, 60_000])) is None


@pytest.mark.parametrize("jitter_s", [0.0, 20.0])
def test_files_are_measured_by_their_own_names_of_columns(tmp_path: Path, jitter_s: float) -> None:
    renamed = samples(minutes(30), jitter_s=jitter_s).rename(columns={"timestamp": "when", "gpu": "card"})
    path = write_csv(tmp_path / "samples.csv", renamed)
    mapping = TableMapping(columns={"when": "timestamp", "card": "gpu"})
    assert step_for(interval_of_files([path], mapping, CHANNELS)) == minutes(30)


def test_the_step_of_an_existing_dataset_holds(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "samples.csv", samples(minutes(30)))
    assert step_of(tmp_path / "none", [path], TableMapping(), CHANNELS) == minutes(30)
    hosts = write_csv(tmp_path / "hosts.csv", inventory())
    invoke("import", "--samples", path, "--inventory", hosts, "--out", tmp_path / "fleet")
    faster = write_csv(tmp_path / "faster.csv", samples(minutes(1)))
    assert step_of(tmp_path / "fleet", [faster], TableMapping(), CHANNELS) == minutes(30)


def inventory() -> pd.DataFrame:
    rows = [{"node": "n1", "gpu": f"GPU-{gpu}", "slot": gpu, "model": "H100"} for gpu in range(3)]
    return pd.DataFrame(rows).assign(installed_at=(BEGIN - timedelta(days=1)).isoformat())


def test_an_import_takes_the_step_from_its_samples_unless_one_is_set(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "samples.csv", samples(minutes(30), jitter_s=5.0))
    hosts = write_csv(tmp_path / "hosts.csv", inventory())
    (tmp_path / "params.yaml").write_text("telemetry: {step: 1h}\n")
    files = ["--samples", path, "--inventory", hosts]
    invoke("import", *files, "--out", tmp_path / "measured", cwd=tmp_path.parent)
    invoke("import", *files, "--out", tmp_path / "set", "--params", tmp_path / "params.yaml")
    assert Dataset.open(tmp_path / "measured").meta.step == minutes(30)
    assert Dataset.open(tmp_path / "set").meta.step == minutes(60)


@pytest.mark.parametrize(("every", "step"), [(minutes(30), minutes(30)), (minutes(1), minutes(10))])
def test_a_compaction_takes_the_step_of_a_new_dataset_from_what_was_staged(tmp_path, every, step):
    staging = StagingFolder(staging_of(tmp_path / "fleet"), writer="test", channels=CHANNELS)
    keys = {"timestamp": pa.timestamp("ms", tz="UTC"), "node": pa.string(), "gpu": pa.string()}
    schema = pa.schema(keys | {"gpu_temp_c": pa.float32()})
    for turn in range(96):  # one scrape a file, as live collectors write them
        row = {"timestamp": BEGIN + turn * every, "node": "n1", "gpu": "GPU-0", "gpu_temp_c": 40.0}
        staging.stage("samples", pa.Table.from_pylist([row], schema=schema))
    settings = CompactSettings(TelemetrySection(), CHANNELS, timedelta(seconds=60), minutes(10))
    compact(tmp_path / "fleet", settings=settings, now=BEGIN + timedelta(days=3))
    assert Dataset.open(tmp_path / "fleet").meta.step == step
