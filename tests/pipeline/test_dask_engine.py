import gc
import os
import signal
from pathlib import Path

import pytest

from features.config import DecisionSection, LabelSection
from features.engine import LocalEngine
from features.matrix.build_tasks import leave_builds
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from foundation.files import building_path
from pipeline import dask_engine
from pipeline.dask_engine import DaskEngine, refuse_other_versions, running_versions
from telemetry.dataset.store import Dataset
from tests.features.small_fleet import (
    HOUR,
    SMALL,
    T0,
    Training,
    events_of,
    gpus,
    inventory_of,
    samples_of,
    write_dataset,
    xid,
)

# Where a worker is killed, distributed leaves sockets to it to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")


@pytest.fixture(scope="module")
def cluster():
    with DaskEngine(workers=2) as engine:
        # A worker that is killed below is not started again, which takes seconds: the last test kills the last one.
        for nanny in engine.client.cluster.workers.values():
            nanny.close_gracefully()
        yield engine
    gc.collect()  # here, and not in a test of another module


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    inventory = inventory_of(gpus(24, a_node=2))
    events = events_of([xid(5, "gpu01", "node0"), xid(30, "gpu07", "node3"), xid(44, "gpu02", "node1", "63")])
    return write_dataset(
        tmp_path_factory.mktemp("fleet") / "fleet",
        inventory,
        hours=48,
        samples=samples_of(inventory, 48),
        events=events,
        buckets=8,
    )


def build(dataset: Dataset, out: Path, engine=None, progress=None) -> FeatureMatrix:
    return build_matrix(
        dataset,
        out,
        decision=DecisionSection(every=3 * HOUR),
        labels=LabelSection(horizon=6 * HOUR),
        features=SMALL,
        training=Training(),
        seed=5,
        progress=progress,
        engine=engine,
    )


@pytest.fixture(scope="module")
def here(dataset, tmp_path_factory) -> FeatureMatrix:
    return build(dataset, tmp_path_factory.mktemp("here") / "matrix")


def content(matrix: FeatureMatrix) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(matrix.path.iterdir())}


def test_a_cluster_makes_the_same_matrix_byte_for_byte_though_a_worker_is_killed(cluster, dataset, here, tmp_path):
    killed, counts = [], []

    def kill_one(done: int, total: int) -> None:
        counts.append((done, total))
        if not killed:
            killed.append(sorted(cluster.client.run(os.getpid).values())[0])
            os.kill(killed[0], signal.SIGKILL)

    matrix = build(dataset, tmp_path / "matrix", cluster, kill_one)
    assert killed
    assert counts[-1][0] == counts[-1][1]
    assert content(matrix) == content(here)
    assert [path.name for path in tmp_path.iterdir()] == ["matrix"]


def test_a_cluster_extends_a_matrix_as_this_machine_does(cluster, dataset, here, tmp_path):
    inventory = inventory_of(gpus(24, a_node=2))
    samples = samples_of(inventory, 48)
    shorter = write_dataset(
        tmp_path / "fleet",
        inventory,
        hours=47,
        samples=samples[samples["timestamp"] <= T0 + 47 * HOUR],
        events=events_of([xid(5, "gpu01", "node0"), xid(30, "gpu07", "node3"), xid(44, "gpu02", "node1", "63")]),
        buckets=8,
    )
    build(shorter, tmp_path / "matrix")
    counted = []
    matrix = build(dataset, tmp_path / "matrix", cluster, lambda _done, total: counted.append(total))
    assert counted[-1] < dataset.meta.counts["samples"] + matrix.meta.counts["rows"]
    assert content(matrix) == content(here)


def test_an_error_of_a_worker_names_its_place(cluster, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(Dataset, "digest", property(lambda self: self.meta.digest[::-1]))
    with pytest.raises(InputError, match=r"a worker sees a different dataset .*machine .*fleet\)"):
        build(dataset, tmp_path / "matrix", cluster)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_does_not_see_the_folder_says_so(dataset, tmp_path, monkeypatch):
    class Elsewhere(LocalEngine):
        def run(self, job, items, on_result, *, max_workers):
            leave_builds()
            building_path(tmp_path / "matrix").rename(tmp_path / "elsewhere")
            super().run(job, items, on_result, max_workers=max_workers)

    with pytest.raises(InputError, match=r"a worker cannot see the output directory of the matrix \(machine "):
        build(dataset, tmp_path / "matrix", Elsewhere())


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(dask_engine, "CONNECT_S", 0.5)
    with pytest.raises(InputError, match=r"no Dask scheduler responds: .*--dask-address tcp://127.0.0.1:9"):
        DaskEngine("tcp://127.0.0.1:9")
    with pytest.raises(InputError, match=r"'head:8786' .*tcp://HOST:PORT"):
        DaskEngine("head:8786")


def test_workers_of_other_versions_are_refused():
    here = running_versions()
    refuse_other_versions({"tcp://10.0.0.1:1": here})
    with pytest.raises(
        InputError, match=rf"a worker runs numpy 1\.0 instead of {here['numpy']} \(worker tcp://10.0.0.2:1"
    ):
        refuse_other_versions({"tcp://10.0.0.1:1": here, "tcp://10.0.0.2:1": {**here, "numpy": "1.0"}})


def times_out(number: int) -> int:
    raise TimeoutError(f"the folder of {number} does not answer")


def test_a_task_that_times_out_by_itself_is_not_waited_for(cluster):
    with pytest.raises(TimeoutError, match="the folder of 7 does not answer"):
        cluster.run(times_out, [7], lambda item, result: None, max_workers=1)


def dies(number: int) -> int:
    os._exit(number)


def test_a_task_that_ends_every_worker_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr(cluster.client.cluster.scheduler, "allowed_failures", 0)
    with pytest.raises(InputError, match=r"(?s)every worker that ran dies .* \(workers of"):
        cluster.run(dies, [7], lambda item, result: None, max_workers=1)
