"""Which Slurm jobs could run on other nodes than those they have."""

from dataclasses import replace

import pytest

from scheduler.ports.workloads import Placement
from scheduler.slurm.job import Requirements, SlurmJob
from scheduler.slurm.node import SlurmNode
from scheduler.slurm.workloads import placement_of

NODE = SlurmNode(
    "n1", frozenset({"IDLE"}), gpus=8, features=("h100", "ib"), partitions=("gpu",), cpus=64, memory_mb=1000,
    gpu_types=frozenset({"h100"}),
)  # fmt: skip
JOB = SlurmJob(7, "7", 7, "7.0.1", ("n1",), frozenset({"RUNNING"}), gpus=8)


def decide(job: SlurmJob = JOB, reserved: frozenset[str] | None = None, **others: SlurmNode) -> Placement:
    """Decide with three nodes alike, some of them changed."""
    nodes = {name: replace(NODE, name=name) for name in ("n1", "n2", "n3")} | others
    return placement_of(job, "n1", tuple(nodes.values()), reserved)


def needing(**requirements: object) -> SlurmJob:
    return replace(JOB, needs=Requirements(**requirements))


def names(*listed: str) -> frozenset[str]:
    return frozenset(listed)


@pytest.mark.parametrize(
    ("requirements", "elsewhere"),
    [
        ({}, True),
        ({"nodes": names("n1")}, False),
        ({"nodes": names("n2")}, True),
        ({"nodes": names("n9")}, False),
        ({"excluded": names("n2")}, True),
        ({"excluded": names("n2", "n3")}, False),
        ({"partitions": names("gpu", "debug")}, True),
        ({"partitions": names("debug")}, False),
        ({"features": "h100&ib"}, True),
        ({"features": "h100,ib"}, True),
        ({"features": "a100|h100"}, True),
        ({"features": "h100&nvswitch"}, False),
        ({"features": "a100|b200"}, False),
        ({"features": "[rack1*2&rack2*2]"}, None),
        ({"features": "(a|b)&c"}, None),
        ({"features": "h100&!ib"}, None),
        ({"features": "h100*2"}, None),
        ({"nodes": names("n2"), "excluded": names("n2")}, False),
        ({"contiguous": True}, None),
        ({"reservation": "r1"}, None),
        ({"cpus": 64, "memory_mb": 1000}, True),
        ({"cpus": 65}, False),
        ({"memory_mb": 1001}, False),
        ({"gpu_type": "h100"}, True),
        ({"gpu_type": "a100"}, False),
    ],
)
def test_what_a_job_requires_decides_where_it_can_run(requirements, elsewhere):
    decided = decide(needing(**requirements))
    assert decided.elsewhere is elsewhere
    assert bool(decided.reason) is (elsewhere is not True)


@pytest.mark.parametrize(("nodes", "elsewhere"), [({"n1", "n2"}, True), ({"n1"}, False), (set(), False)])
def test_in_a_reservation_only_its_nodes_count(nodes, elsewhere):
    assert decide(needing(reservation="r1"), frozenset(nodes)).elsewhere is elsewhere


@pytest.mark.parametrize(
    "state", ["DRAIN", "FAIL", "DOWN", "NOT_RESPONDING", "RESERVED", "MAINTENANCE", "FUTURE", "ERROR", "INVALID_REG"]
)  # fmt: skip
def test_nodes_that_take_no_jobs_are_no_other_place(state):
    other = replace(NODE, states=frozenset({"IDLE", state}))
    assert decide(n2=replace(other, name="n2")).elsewhere is True
    assert decide(n2=replace(other, name="n2"), n3=replace(other, name="n3")).elsewhere is False


@pytest.mark.parametrize("state", ["ALLOCATED", "POWERED_DOWN", "PLANNED"])
def test_busy_and_sleeping_nodes_are_another_place_because_a_requeued_job_waits_in_its_queue(state):
    busy = replace(NODE, states=frozenset({state}))
    assert decide(n2=replace(busy, name="n2"), n3=replace(busy, name="n3")).elsewhere is True


def test_a_job_on_several_nodes_needs_as_many_without_the_one_that_is_emptied():
    two = replace(JOB, nodes=("n1", "n2"), gpus=16)
    assert decide(two).elsewhere is True
    assert decide(replace(two, nodes=("n1", "n2", "n3"), gpus=24)).elsewhere is False


def test_smaller_nodes_are_no_other_place_and_a_report_that_exceeds_the_node_itself_is_cut():
    small = replace(NODE, gpus=4)
    assert decide(n2=replace(small, name="n2"), n3=replace(small, name="n3")).elsewhere is False
    assert decide(replace(JOB, gpus=16)).elsewhere is True
