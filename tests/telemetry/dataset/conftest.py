"""A server that speaks S3 for all tests here, a bucket for each, and small datasets to publish."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foundation.place import S3Place
from telemetry.dataset.layout import Runs
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from tests.features.small_fleet import (
    CHANNELS,
    HOUR,
    STEP,
    T0,
    events_of,
    gpus,
    inventory_of,
    samples_of,
    to_table,
    xid,
)
from tests.object_storage import Storage, object_storage

BUCKETS = itertools.count()
WHOLE = samples_of(inventory_of(gpus(8)), 96, seed=3)


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with object_storage(tmp_path_factory.mktemp("storage") / "server.log") as running:
        yield running


@pytest.fixture
def place(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A prefix in a bucket of its own, and the environment that leads there."""
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    bucket = f"bucket-{next(BUCKETS)}"
    storage.direct.create_dir(bucket)
    return S3Place(bucket, "fleets/east")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Dataset]:
    """Writes a dataset of so many hours, in runs of a day or (None) as one run."""

    def made(name: str, hours: float, *, run_days: int | None = 1) -> Dataset:
        samples = WHOLE[WHOLE["timestamp"] <= T0 + hours * HOUR]
        runs = Runs(run_days)
        with DatasetWriter(tmp_path / name, step=STEP, channels=CHANNELS, buckets=2, runs=runs) as writer:
            bucket = samples["node"].map(writer.bucket_of)
            for number in sorted(set(bucket)):
                writer.write_samples(number, to_table(samples[bucket == number]))
            xids = [xid(20, "gpu01", "node0"), xid(40.5, "gpu05", "node1")]
            return writer.finish(events=events_of(xids), inventory=inventory_of(gpus(8)), span=(T0, T0 + hours * HOUR))

    return made
