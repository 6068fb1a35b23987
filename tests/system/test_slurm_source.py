"""Drains, resumes, repairs and jobs of a real Slurm, through the command; its controller is killed in between."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.staged import staged_table
from tests.system.slurm_cluster import RELEASES, SlurmCluster, cluster_of, why_not

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
PREDRAIN = str(Path(sys.executable).with_name("predrain"))


@pytest.fixture(scope="module", params=product(RELEASES, (False, True)), ids=str)
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """Two nodes of eight GPUs, without and with accounting."""
    release, accounting = request.param
    with cluster_of(release, accounting=accounting) as made:
        yield made


def collect(cluster: SlurmCluster, dataset: Path, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PREDRAIN, "collect", "slurm", "--dataset", str(dataset), "--once", "--json", *more],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=check,
        timeout=180,
    )


def staged(dataset: Path, kind: str) -> list[dict[str, Any]]:
    return staged_table(dataset.with_name(f"{dataset.name}.live"), kind).to_pylist()


def stored_events(dataset: Path) -> list[tuple[str, ...]]:
    return [(row["node"], row["type"], row["code"], row["detail"], row["source"]) for row in staged(dataset, "events")]


def test_drains_a_job_and_a_killed_controller(cluster: SlurmCluster, tmp_path: Path):
    dataset = tmp_path / "fleet"
    assert json.loads(collect(cluster, dataset).stdout)["events"] == 0

    began = datetime.now(UTC) - timedelta(seconds=2)
    job = cluster.submit("-w", "n1", "--gres=gpu:2", "-c1", script=f"until test -e {tmp_path}/end; do sleep 0.2; done")
    cluster.wait(lambda: cluster.job(job)["job_state"] == "RUNNING")
    cluster.update("n1", state="drain", reason="xid 79 on gpu 3")
    cluster.wait(lambda: json.loads(collect(cluster, dataset).stdout)["jobs"] == 1)  # slurmdbd hears of it later
    cluster.update("n1", state="drain", reason="gpu 3 replaced, burn-in")
    (tmp_path / "end").touch()
    cluster.wait(lambda: cluster.job(job)["job_state"] == "COMPLETED")
    cluster.wait(lambda: json.loads(collect(cluster, dataset).stdout)["jobs"] == 1)

    cluster.wait_until_saved()
    cluster.kill("slurmctld")
    failed = collect(cluster, dataset, "--timeout", "5s", check=False)
    assert failed.returncode == 1
    assert "predrain: error: Slurm does not respond" in failed.stderr
    assert failed.stderr.count("\n") <= 4

    cluster.start_controller()
    cluster.wait(lambda: cluster.states() == {"n1": "drained", "n2": "idle"})
    collect(cluster, dataset)
    cluster.update("n1", state="resume")
    cluster.update("n2", state="drain", reason="predrain: p=0.83/24h gpu=1")
    collect(cluster, dataset)
    collect(cluster, dataset)

    assert stored_events(dataset) == [
        ("n1", "drain", "drain", "xid 79 on gpu 3 [root]", "slurm"),
        ("n1", "drain", "drain", "gpu 3 replaced, burn-in [root]", "slurm"),
        ("n1", "replacement", "replacement", "gpu 3 replaced, burn-in", "slurm"),
        ("n1", "drain", "resume", "gpu 3 replaced, burn-in", "slurm"),
        ("n2", "drain", "drain", "predrain: p=0.83/24h gpu=1 [root]", "predrain"),
    ]
    rows = staged(dataset, "events")
    assert all(began <= row["timestamp"] <= row["known_at"] <= datetime.now(UTC) for row in rows)
    assert {row["gpu"] for row in rows} == {None}

    running, done = staged(dataset, "jobs")
    assert (running["job"], running["node"], running["gpus"]) == (job, "n1", 2)
    assert (running["ended_at"], running["outcome"]) == (None, None)
    assert (done["job"], done["started_at"], done["gpus"], done["outcome"]) == (
        job,
        running["started_at"],
        2,
        "completed",
    )
    assert done["started_at"] < done["ended_at"] <= datetime.now(UTC)
    cluster.update("n2", state="resume")
