"""Reports of a real Slurm 24.11, as recorded: n1 was resumed, n2 is drained, a task of an array runs, a job failed."""

from pathlib import Path

from scheduler.slurm.job import job_of
from scheduler.slurm.node import node_of
from scheduler.slurm.port import read_report
from telemetry.accounting import Accounting
from telemetry.collect.slurm.jobs import read_squeue
from telemetry.collect.slurm.nodes import read_nodes

RECORDED = Path(__file__).parents[2] / "data" / "slurm"


def test_the_reason_that_24_11_keeps_of_a_drain_that_has_ended_says_nothing():
    content = (RECORDED / "24.11-nodes.json").read_bytes()
    rows, version = read_report(content, "nodes")
    assert (version, rows[0]["reason"]) == (42, "xid 79 on gpu 3")
    resumed, drained = (node_of(row, "gpu") for row in rows)
    assert (resumed.out, resumed.reason, resumed.user, resumed.reason_at) == (frozenset(), None, None, None)
    assert (drained.out, drained.reason, drained.user) == ({"DRAIN"}, "predrain: tier=high", "root")
    assert drained.reason_at is not None
    for node in (resumed, drained):
        assert (node.readable, node.gpus, node.weight, node.partitions) == (True, 8, 1, ("gpu", "probes"))
    observed = read_nodes(content.decode(), Accounting())
    assert [(node.out, node.reason) for node in observed.values()] == [(None, None), ("drain", "predrain: tier=high")]


def test_jobs_of_24_11():
    content = (RECORDED / "24.11-jobs.json").read_bytes()
    rows, _ = read_report(content, "jobs")
    (task,) = filter(None, (job_of(row, "gpu") for row in rows))
    assert (task.name, task.nodes, task.gpus, task.requeue, task.batch) == ("1_7", ("n2",), 2, True, True)
    assert (task.signal.name, task.signal.batch, task.state) == ("USR1", True, "running")
    assert task.ends_at is not None
    assert task.started_at is not None
    assert (task.ends_at - task.started_at).total_seconds() == 3600
    accounting = Accounting()
    jobs = {job.job: job for job in read_squeue(content.decode(), accounting)}
    assert {name: (job.nodes, job.gpus, job.outcome) for name, job in jobs.items()} == {
        "1_7": (("n2",), (2,), None), "2": (("n2",), (1,), "failed"),
    }  # fmt: skip
