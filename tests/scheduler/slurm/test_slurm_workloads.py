"""Jobs on a node that is to be emptied, where else they could run, and as a real Slurm reports them."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from scheduler.ports.errors import SchedulerError
from scheduler.ports.workloads import CheckpointAsk, Fence, Placement
from scheduler.slurm.job import Requirements, SlurmJob, job_of
from scheduler.slurm.node import SlurmNode, node_of
from scheduler.slurm.port import read_report
from scheduler.slurm.workloads import placement_of
from telemetry.accounting import Accounting
from telemetry.collect.slurm.jobs import read_squeue
from telemetry.collect.slurm.nodes import read_nodes
from tests.policy.decide_world import HOUR, T0
from tests.scheduler.slurm.slurm_world import ME, World

ASK = CheckpointAsk("a" * 32, T0 + HOUR, "high")
JOB = SlurmJob(
    7, "7", 7, "7.0.1", ("n0", "n1"), frozenset({"RUNNING"}), "ann", 16, T0, T0 + 5 * HOUR, True, True,
    "predrain.checkpoint=USR1@120",
)  # fmt: skip


@pytest.fixture
def world(tmp_path) -> World:
    made = World(tmp_path / "shared")
    made.slurm.running[7] = JOB
    return made


def fence(world: World) -> Fence:
    return Fence(ME, world.lease())


def change(world: World, **changed: object) -> None:
    world.slurm.running[7] = replace(world.slurm.running[7], **changed)


def comment(world: World, token: str, moved: timedelta) -> None:
    """The job notes an instant of its own clock, which is not ours."""
    at = int((world.clock.now() + moved).timestamp())
    change(world, comment=f"{JOB.comment} predrain.{token}={at}")


def test_a_job_is_listed_on_each_of_its_nodes(world):
    for node in ("n0", "n1"):
        (work,) = world.workloads.on_node(node)
        assert (work.name, work.uid, work.kind, work.node, work.owner) == ("7", "7.0.1", "job", node, "user ann")
        assert (work.stays, work.immovable, work.ending) == (None, None, False)
        assert (work.job.gpus, work.ends_at) == (16, T0 + 5 * HOUR)
        assert (work.checkpoint.means, work.checkpoint.takes) == ("scheduler", timedelta(minutes=2))
    assert world.workloads.on_node("n2") == ()


def test_a_node_that_slurm_still_cleans_up_is_not_empty(world):
    node = world.slurm.all["n2"]
    world.slurm.all["n2"] = replace(node, states=frozenset({"IDLE", "DRAIN", "COMPLETING"}))
    (work,) = world.workloads.on_node("n2")
    assert (work.ending, work.job) == (True, None)
    assert world.workloads.evict(work, fence(world)).kind == "gone"
    assert world.slurm.requeued == []


def test_jobs_that_we_may_not_see_do_not_make_a_node_empty(world):
    world.slurm.all["n2"] = replace(world.slurm.all["n2"], states=frozenset({"MIXED", "DRAIN"}))
    with pytest.raises(
        SchedulerError, match=re.escape("n2 as in use but lists no job: check whether this user can see all")
    ):
        world.workloads.on_node("n2")


def test_a_job_that_begins_while_a_node_is_read_is_listed(world, monkeypatch):
    world.slurm.all["n2"] = replace(world.slurm.all["n2"], states=frozenset({"MIXED", "DRAIN"}))
    read = world.slurm.node

    def begins(name: str):
        change(world, nodes=("n2",))  # after the jobs were read, and before the node is
        return read(name)

    monkeypatch.setattr(world.slurm, "node", begins)
    assert [work.name for work in world.workloads.on_node("n2")] == ["7"]


@pytest.mark.parametrize(
    ("changed", "held"),
    [
        ({"requeue": False}, "it cannot be requeued (--no-requeue)"),
        ({"batch": False}, "it is not a batch job and cannot be requeued"),
        ({"comment": "predrain.keep"}, "its comment says predrain.keep"),
    ],
)
def test_a_job_that_may_not_be_moved_reports_why_and_is_not(world, changed, held):
    change(world, **changed)
    (work,) = world.workloads.on_node("n0")
    assert work.immovable == held
    assert world.workloads.preview(work) == ()
    answer = world.workloads.evict(replace(work, loss=None, opt_out=None), fence(world))
    assert (answer.kind, answer.message) == ("refused", held)
    assert world.slurm.requeued == []


def test_a_job_is_signalled_once_for_both_of_its_nodes_and_again_for_a_later_drain(world):
    (here,), (there,) = world.workloads.on_node("n0"), world.workloads.on_node("n1")
    assert world.workloads.ask_checkpoint(here, ASK, fence(world)).kind == "done"
    assert world.workloads.ask_checkpoint(here, ASK, fence(world)).kind == "already"
    second = replace(ASK, key="b" * 32)
    assert world.workloads.ask_checkpoint(there, second, fence(world)).kind == "already"
    assert world.slurm.sent == [(7, "USR1")]
    comment(world, "checkpointed", timedelta(seconds=3))
    assert world.workloads.checkpoint_state(here, ASK.key).kind == "acknowledged"
    assert world.workloads.checkpoint_state(there, second.key).kind == "acknowledged"
    world.clock.move(3 * HOUR)
    third = replace(ASK, key="c" * 32, deadline=T0 + 4 * HOUR)
    assert world.workloads.ask_checkpoint(here, third, fence(world)).kind == "done"
    assert world.workloads.checkpoint_state(here, third.key).kind == "waiting"  # the old checkpoint says nothing
    assert len(world.slurm.sent) == 2


def test_a_signal_of_which_nobody_knows_is_sent_again_and_its_time_is_that_of_the_first(world):
    (work,) = world.workloads.on_node("n0")
    world.slurm.failing.append("timeout_after")
    assert world.workloads.ask_checkpoint(work, ASK, fence(world)).kind == "timeout"
    comment(world, "checkpointed", timedelta(seconds=2))
    world.restart()
    world.clock.move(timedelta(minutes=1))
    world.lease()
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "acknowledged"
    assert world.workloads.ask_checkpoint(work, ASK, fence(world)).kind == "done"
    assert len(world.slurm.sent) == 2
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "acknowledged"


def test_a_job_answers_by_its_comment_or_by_its_end(world):
    (work,) = world.workloads.on_node("n0")
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "waiting"
    comment(world, "checkpointed", timedelta(hours=-1))
    world.workloads.ask_checkpoint(work, ASK, fence(world))
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "waiting"
    assert world.workloads.checkpoint_state(work, "d" * 32).message == "it has no request with this key"
    comment(world, "checkpoint-failed", timedelta(seconds=1))
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "failed"
    world.slurm.running.clear()
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "gone"


@pytest.mark.parametrize("ahead", [timedelta(days=days) for days in (-400, -0.2, 0, 0.2, 400)])
def test_an_answer_is_a_changed_comment_whatever_the_clock_of_the_job_says(world, ahead):
    comment(world, "checkpointed", ahead)
    (work,) = world.workloads.on_node("n0")
    world.workloads.ask_checkpoint(work, ASK, fence(world))
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "waiting"
    world.clock.move(timedelta(seconds=1))
    comment(world, "checkpointed", ahead)
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "acknowledged"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"states": frozenset({"SUSPENDED"})}, "it is suspended"),
        ({"held": True}, "it is held"),
        ({"start_by": T0}, "before its --deadline"),
        ({"burst_buffer": True}, "the data in its burst buffer"),
        ({"cron": True}, "to the next time in its scrontab"),
        ({"needs": Requirements(nodes=frozenset({"n0"}))}, "on this node only: it requires n0"),
        ({"needs": Requirements(partitions=frozenset({"small"}))}, "this node only: it needs 2 nodes (partition"),
        ({"needs": Requirements(partitions=frozenset({"closed"}))}, "this node only: its partition closed is DOWN"),
        ({"needs": Requirements(reservation="gone")}, "cannot determine whether it can run elsewhere: the"),
    ],
)  # fmt: skip
def test_work_that_a_requeue_would_harm_is_waited_for_also_if_it_changed_since_it_was_listed(world, changed, why):
    (before,) = world.workloads.on_node("n0")
    assert before.immovable is None
    change(world, **changed)
    (work,) = world.workloads.on_node("n0")
    assert why in (work.immovable or "")
    answer = world.workloads.evict(before, fence(world))
    assert (answer.kind, why in answer.message) == ("refused", True)
    assert (world.slurm.requeued, world.slurm.sent) == ([], [])


def test_a_job_may_use_the_nodes_of_all_its_reservations(world):
    world.slurm.reservations = {"r1": frozenset({"n0", "n2"}), "r2": frozenset({"n3"})}
    for named, elsewhere in (("r1", False), ("r1,r2", True), ("r1,gone", None)):
        change(world, needs=Requirements(reservation=named))
        assert world.workloads.on_node("n0")[0].placement.elsewhere is elsewhere


def test_a_list_of_nodes_that_cannot_be_read_leaves_it_undecided(world, monkeypatch):
    def refused():
        raise SchedulerError("sinfo: no answer")

    monkeypatch.setattr(world.slurm, "nodes", refused)
    (work,) = world.workloads.on_node("n0")
    assert work.immovable == "cannot determine whether it can run elsewhere: sinfo: no answer"


def test_jobs_are_waited_for_where_the_transport_cannot_requeue(world):
    world.slurm.cannot_requeue = "slurmrestd cannot requeue a job"
    (work,) = world.workloads.on_node("n0")
    assert work.immovable == "slurmrestd cannot requeue a job"


def test_only_the_very_run_is_asked_or_moved(world):
    (work,) = world.workloads.on_node("n0")
    change(world, uid="7.1.1")
    assert world.workloads.ask_checkpoint(work, ASK, fence(world)).kind == "conflict"
    assert world.workloads.evict(work, fence(world)).kind == "conflict"
    assert world.workloads.checkpoint_state(work, ASK.key).kind == "gone"
    world.slurm.running.clear()
    assert world.workloads.evict(work, fence(world)).kind == "gone"
    assert (world.slurm.sent, world.slurm.requeued) == ([], [])


def test_a_job_without_a_signal_or_that_does_not_run_is_not_asked(world):
    change(world, states=frozenset({"SUSPENDED"}))
    (work,) = world.workloads.on_node("n0")
    assert work.checkpoint is None
    assert world.workloads.ask_checkpoint(work, ASK, fence(world)).kind == "refused"
    change(world, states=frozenset({"RUNNING"}), comment="")
    assert world.workloads.ask_checkpoint(work, ASK, fence(world)).message == "its comment names no signal"
    assert world.slurm.sent == []


def test_a_requeue_is_done_once(world):
    (work,) = world.workloads.on_node("n0")
    assert [write.message for write in world.workloads.preview(work)] == ["job 7: JobState: RUNNING -> REQUEUE"]
    change(world, states=frozenset({"COMPLETING"}))
    assert world.workloads.evict(work, fence(world)).kind == "already"
    change(world, states=frozenset({"RUNNING"}))
    assert world.workloads.evict(work, fence(world)).kind == "done"
    assert world.workloads.evict(work, fence(world)).kind == "gone"
    assert world.slurm.requeued == ["7"]


def test_nothing_is_sent_without_the_lease(world):
    (work,) = world.workloads.on_node("n0")
    given = fence(world)
    stolen = replace(given, holder="another")
    assert world.workloads.ask_checkpoint(work, ASK, stolen).kind == "refused"
    assert world.workloads.evict(work, stolen).kind == "refused"
    world.clock.move(HOUR)
    assert world.workloads.evict(work, given).kind == "refused"
    assert (world.slurm.sent, world.slurm.requeued) == ([], [])


def heterogeneous(world: World, **leader: object) -> None:
    """A job of two components, of which the first one, on n2, names a signal."""
    first = replace(JOB, number=8, name="8+0", leader=8, uid="8.0.1", nodes=("n2",), gpus=8)
    second = replace(first, number=9, name="8+1", uid="9.0.1", nodes=("n3",), gpus=4, comment="")
    world.slurm.running |= {8: replace(first, **leader), 9: second}


def test_the_parts_of_a_heterogeneous_job_are_one_job_and_go_together(world):
    heterogeneous(world)
    (part,) = world.workloads.on_node("n3")
    assert (part.job.name, part.job.gpus) == ("8", 12)
    assert world.workloads.evict(part, fence(world)).kind == "done"
    assert world.workloads.on_node("n2") == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"comment": "predrain.keep"}, {"held": True}, {"states": frozenset({"SUSPENDED"})}, {"requeue": False},
        {"needs": Requirements(partitions=frozenset({"closed"}))},
    ],
)  # fmt: skip
def test_what_keeps_a_component_on_a_healthy_node_keeps_the_whole_job(world, changed):
    heterogeneous(world)
    (listed,) = world.workloads.on_node("n3")
    heterogeneous(world, **changed)
    (part,) = world.workloads.on_node("n3")
    assert part.immovable.startswith("component 8+0: ")
    assert world.workloads.evict(listed, fence(world)).kind == "refused"
    assert world.slurm.requeued == []


def test_the_component_that_names_a_signal_is_asked_before_another_one_takes_it_along(world):
    heterogeneous(world)
    (part,) = world.workloads.on_node("n3")
    assert part.checkpoint.means == "scheduler"
    assert world.workloads.ask_checkpoint(part, ASK, fence(world)).kind == "done"
    assert world.slurm.sent == [(8, "USR1")]
    assert world.workloads.checkpoint_state(part, ASK.key).kind == "waiting"
    heterogeneous(world, comment=f"{JOB.comment} predrain.checkpointed=7")
    assert world.workloads.checkpoint_state(part, ASK.key).kind == "acknowledged"


NODE = SlurmNode(
    "n1", frozenset({"IDLE"}), gpus=8, features=("h100", "ib"), partitions=("gpu", "down", "drain", "inactive"),
    cpus=64, memory_mb=1000, disk_mb=500, gres=frozenset({"gpu", "gpu:h100", "nic"}),
)  # fmt: skip
PLACED = SlurmJob(7, "7", 7, "7.0.1", ("n1",), frozenset({"RUNNING"}), gpus=8)


def decide(job: SlurmJob = PLACED, reserved: frozenset[str] = frozenset(), **others: SlurmNode) -> Placement:
    """Decide with three nodes alike, some of them changed, all in a partition that is up and in others."""
    nodes = {name: replace(NODE, name=name) for name in ("n1", "n2", "n3")} | others
    return placement_of(job, "n1", tuple(nodes.values()), PARTITIONS, reserved)


PARTITIONS = {
    name: {"State": state, "MaxNodes": "UNLIMITED", "MinNodes": "0"}
    for name, state in {"gpu": "UP", "debug": "UP", "down": "DOWN", "inactive": "INACTIVE", "drain": "DRAIN"}.items()
}


def needing(**requirements: object) -> SlurmJob:
    return replace(PLACED, needs=Requirements(**requirements))


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
        ({"partitions": names("down")}, False),
        ({"partitions": names("inactive")}, False),
        ({"partitions": names("drain")}, False),
        ({"partitions": names("down", "gpu")}, True),
        ({"partitions": names("down", "debug")}, False),
        ({"partitions": names("unlisted")}, None),
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
        ({"cpus": 64, "memory_mb": 1000}, True),
        ({"cpus": 65}, False),
        ({"memory_mb": 1001}, False),
        ({"gres": names("gpu", "gpu:h100")}, True),
        ({"gres": names("gpu", "gpu:a100")}, False),
        ({"gres": names("gpu", "nic")}, True),
        ({"gres": names("gpu", "nvme")}, False),
        ({"disk_mb": 500}, True),
        ({"disk_mb": 501}, False),
    ],
)
def test_what_a_job_requires_decides_where_it_can_run(requirements, elsewhere):
    decided = decide(needing(**requirements))
    assert decided.elsewhere is elsewhere
    assert bool(decided.reason) is (elsewhere is not True)


@pytest.mark.parametrize(
    ("limit", "elsewhere"),
    [
        ({"MaxTime": "UNLIMITED"}, True), ({"MaxTime": "1-12:00:00"}, True), ({"MaxTime": "1-11:59:00"}, False),
        ({"MaxNodes": "1"}, True), ({"MaxNodes": "0"}, False), ({"MinNodes": "2"}, False),
        ({"MaxCPUsPerNode": "16"}, True), ({"MaxCPUsPerNode": "15"}, False),
        ({"MaxMemPerNode": "500"}, True), ({"MaxMemPerNode": "499"}, False),
        ({"AllowAccounts": "parent", "AllowQos": "ALL"}, True), ({"AllowQos": "high,Normal"}, True),
        ({"DenyAccounts": "team"}, False), ({"DenyAccounts": "other"}, True),
        ({"AllowQos": "high"}, False), ({"DenyQos": "normal"}, False),
    ],
)  # fmt: skip
def test_a_job_that_its_partition_would_take_no_more_is_waited_for(limit, elsewhere):
    needs = {"partitions": names("gpu"), "cpus": 16, "memory_mb": 500, "minutes": 36 * 60, "account": "team",
             "qos": "normal"}  # fmt: skip
    partitions = {"gpu": PARTITIONS["gpu"] | limit}
    nodes = [replace(NODE, name=name) for name in ("n1", "n2")]
    assert placement_of(needing(**needs), "n1", nodes, partitions, ()).elsewhere is elsewhere


def test_a_feature_that_is_not_active_does_not_count():
    inactive = {name: replace(NODE, name=name, inactive=names("ib")) for name in ("n2", "n3")}
    assert decide(needing(features="ib"), **inactive).elsewhere is False
    assert decide(needing(features="h100"), **inactive).elsewhere is True


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


@pytest.mark.parametrize("state", ["ALLOCATED", "POWERED_DOWN", "PLANNED", "BLOCKED", "POWER_DRAIN"])
def test_busy_and_sleeping_nodes_are_another_place_because_a_requeued_job_waits_in_its_queue(state):
    busy = replace(NODE, states=frozenset({state}))
    assert decide(n2=replace(busy, name="n2"), n3=replace(busy, name="n3")).elsewhere is True


def test_a_job_on_several_nodes_needs_as_many_without_the_one_that_is_emptied():
    two = replace(PLACED, nodes=("n1", "n2"), gpus=16)
    assert decide(two).elsewhere is True
    assert decide(replace(two, nodes=("n1", "n2", "n3"), gpus=24)).elsewhere is False


def test_smaller_nodes_are_no_other_place_and_a_report_that_exceeds_the_node_itself_is_cut():
    small = replace(NODE, gpus=4)
    assert decide(n2=replace(small, name="n2"), n3=replace(small, name="n3")).elsewhere is False
    assert decide(replace(PLACED, gpus=16)).elsewhere is True


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
    assert (task.ends_at - task.started_at).total_seconds() == 3600
    accounting = Accounting()
    jobs = {job.job: job for job in read_squeue(content.decode(), accounting)}
    assert {name: (job.nodes, job.gpus, job.outcome) for name, job in jobs.items()} == {
        "1_7": (("n2",), (2,), None), "2": (("n2",), (1,), "failed"),
    }  # fmt: skip
