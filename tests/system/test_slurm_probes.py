"""Probes on a real Slurm: jobs of a preemptible partition that end for any other job, read by their exit code."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from scheduler.ports.clock import SystemClock
from scheduler.ports.workloads import Fence
from scheduler.slurm.commands import SlurmCommands
from scheduler.slurm.probes import SlurmProbes
from scheduler.slurm.scheduler import SlurmScheduler, open_slurm
from scheduler.slurm.settings import ProbeJobSettings, SlurmSettings
from scheduler.slurm.workloads import SlurmWorkloads
from tests.system.slurm_cluster import RELEASES, SlurmCluster, cluster_of, why_not

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
PREEMPTIBLE = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=probes Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=0 PreemptMode=CANCEL
PartitionName=DEFAULT
"""
SCRIPT = '#!/bin/sh\nread -r what < {root}/what\ncase "$what" in passed) exit 0;; failed) exit 3;; esac\nsleep 300\n'
MANY_S = 15.0


@pytest.fixture(scope="module", params=RELEASES)
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with cluster_of(request.param, more=PREEMPTIBLE) as made:
        made.run("scontrol", "update", "PartitionName=gpu", "PriorityTier=10", "PreemptMode=OFF")
        script = made.root / "probe.sh"
        script.write_text(SCRIPT.format(root=made.root))
        script.chmod(0o755)
        yield made


@pytest.fixture
def scheduler(cluster: SlurmCluster, tmp_path: Path) -> SlurmScheduler:
    folder = tmp_path / "shared"
    folder.mkdir()
    probe = ProbeJobSettings(str(cluster.root / "probe.sh"), partition="probes")
    return open_slurm(SlurmSettings(str(folder), cluster="c", probe=probe, **cluster.settings), SystemClock())


def begun(cluster: SlurmCluster, scheduler: SlurmScheduler, key: str, what: str, node: str = "n1") -> SlurmProbes:
    """A probe that was submitted."""
    (cluster.root / "what").write_text(f"{what}\n")
    port, probe = scheduler.port, scheduler.port._settings.probe
    assert isinstance(port, SlurmCommands)
    assert probe is not None
    assert scheduler.read_fleet().nodes
    until = scheduler.hold_lease("me", timedelta(minutes=5))
    assert until is not None
    probes = SlurmProbes(port, scheduler.folder, probe, SystemClock())
    answer = probes.start(node, ("GPU-a",), key, Fence("me", until), None, probe=True)
    assert answer.kind == "done", answer.message
    assert probes.start(node, ("GPU-a",), key, Fence("me", until), None, probe=True).kind == "already"
    return probes


def ended(cluster: SlurmCluster, probes: SlurmProbes, key: str, node: str = "n1") -> str:
    cluster.wait(lambda: probes.result(node, key).kind != "running")
    return probes.result(node, key).kind


@pytest.mark.parametrize("what", ["passed", "failed"])
def test_a_probe_ends_with_what_its_script_says(cluster: SlurmCluster, scheduler: SlurmScheduler, what: str) -> None:
    key = what[0] * 32
    assert ended(cluster, begun(cluster, scheduler, key, what), key) == what


def test_a_job_preempts_a_probe_within_seconds_and_never_sees_it_as_work(
    cluster: SlurmCluster, scheduler: SlurmScheduler
) -> None:
    key = "a" * 32
    probes = begun(cluster, scheduler, key, "long")
    cluster.wait(lambda: "running" in probes.result("n1", key).message)
    reading = scheduler.revalidate("n1")
    assert (reading.view.jobs, reading.view.why_out_of_service) == ((), None), (
        "a probe is no job, and its node is in service"
    )
    began = time.monotonic()
    job = cluster.submit("--partition=gpu", "--nodelist=n1", "--exclusive", script="sleep 60")
    cluster.wait(lambda: "RUNNING" in str(cluster.job(job)["job_state"]))
    waited_s = time.monotonic() - began
    assert waited_s < MANY_S, f"the job waited {waited_s:.1f} s"
    assert ended(cluster, probes, key) == "inconclusive"
    workloads = SlurmWorkloads(scheduler.port, scheduler.folder, SystemClock())
    assert [item.name for item in workloads.on_node("n1")] == [job]
    cluster.run("scancel", job)


def test_a_probe_whose_job_id_was_not_saved_is_neither_lost_nor_submitted_again(
    cluster: SlurmCluster, scheduler: SlurmScheduler
) -> None:
    key = "9" * 32
    probes = begun(cluster, scheduler, key, "passed")
    (scheduler.folder.path / "probes.json").unlink()
    until = scheduler.hold_lease("me", timedelta(minutes=5))
    assert until is not None
    assert probes.start("n1", ("GPU-a",), key, Fence("me", until), None, probe=True).kind == "already"
    assert ended(cluster, probes, key) == "passed"


def test_a_probe_that_is_dropped_leaves_its_node(cluster: SlurmCluster, scheduler: SlurmScheduler) -> None:
    key = "b" * 32
    probes = begun(cluster, scheduler, key, "long", "n2")
    cluster.wait(lambda: "running" in probes.result("n2", key).message)
    probes.drop("n2", key)
    assert ended(cluster, probes, key, "n2") == "inconclusive"
    cluster.wait(lambda: cluster.states()["n2"] == "idle")
