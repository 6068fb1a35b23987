"""The controller over Slurm: the whole way of a node, people who come between, failures, restarts, two replicas."""

import os
from dataclasses import replace
from datetime import timedelta

import pytest

from foundation.running import Patience
from policy.fleet import Level
from policy.ladder.cost_benefit import CostBenefitConfig
from scheduler.ports.readings import Precondition, Switches
from scheduler.slurm.job import SlurmJob
from tests.policy.decide_world import HOUR, STEP
from tests.scheduler.slurm.slurm_world import LEASE, ME, World, action, release


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path / "shared")


@pytest.fixture
def drained(world) -> World:
    world.scored(n3=0.9)
    world.round()
    assert world.level("n3") is Level.DRAIN
    return world


def before(world: World) -> Precondition:
    """What was read of some node, some time ago."""
    return Precondition("v", None, ME, world.lease())


def steps(report) -> list[tuple[str, str, str]]:
    return [(step.action.verb, step.action.node, step.outcome) for step in report.steps]


def test_a_node_at_risk_is_weighted_drained_and_given_back_as_it_was(world):
    before = dict(world.slurm.all)
    world.scored(n3=0.9, n6=0.4)
    report = world.round()
    assert not report.failed, report.errors
    assert world.level("n6") is Level.AVOID
    assert world.slurm.all["n6"].weight == before["n6"].weight + 1_000_000
    assert [verb for verb, node, _ in steps(report) if node == "n3"] == ["swap", "drain", "publish"]
    assert world.level("n3") is Level.DRAIN
    node = world.slurm.all["n3"]
    assert node.reason.startswith("predrain: tier=high risk=0.9000 until=")
    assert steps(world.round()) == []
    world.clock.move(13 * HOUR)
    report = world.round()
    assert ("release", "n3", "done") in steps(report)
    assert world.slurm.all["n3"] == before["n3"]
    assert world.slurm.all == before


def test_a_node_that_leaves_the_watched_partitions_is_given_back_all_the_same(tmp_path):
    world = World(tmp_path / "shared", partitions=("g",))
    before = dict(world.slurm.all)
    world.scored(n3=0.9)
    world.round()
    assert world.level("n3") is Level.DRAIN
    for name in ("n3", "n4"):
        world.slurm.all[name] = replace(world.slurm.all[name], partitions=("maint",))
    assert {node.view.name for node in world.scheduler.read_fleet().nodes} == set(before) - {"n4"}
    world.clock.move(13 * HOUR)
    assert ("release", "n3", "done") in steps(world.round())
    assert world.slurm.all["n3"] == replace(before["n3"], partitions=("maint",))
    assert "n3" not in {node.view.name for node in world.scheduler.read_fleet().nodes}


def test_a_new_process_goes_on_from_slurm_alone(drained):
    world = drained
    writes = len(world.slurm.writes)
    world.controller.stop()
    world.restart()
    report = world.round()
    assert (report.active, report.failed, len(world.slurm.writes)) == (True, False, writes)
    (world.folder.path / "state.json").unlink()  # the shared disk is lost, Slurm is not
    world.controller.stop()
    world.restart()
    assert not world.round().failed
    assert world.level("n3") is Level.DRAIN
    world.clock.move(13 * HOUR)
    world.round()
    assert world.level("n3") is Level.NONE


def test_a_person_who_resumes_the_node_is_not_undone(drained):
    world = drained
    world.slurm.person("n3", "RESUME")
    for _ in range(3):
        world.clock.move(HOUR / 2)
        world.round()
        assert world.slurm.all["n3"].out == frozenset()


def test_a_reason_that_comes_at_the_same_time_stands_and_ours_is_taken_back(world):
    before = world.slurm.all["n0"]
    world.slurm.meanwhile.append(lambda: world.slurm.person("n0", "DRAIN", "bad cable"))
    answer = world.apply(action("swap"))
    assert answer.kind == "conflict"
    assert "bad cable" in answer.message
    assert world.scheduler.revalidate("n0").view.opt_out == "reason 'bad cable' of ann", "the next round releases it"
    assert world.apply(release()).kind == "done"
    node = world.slurm.all["n0"]
    assert (node.reason, node.user, node.extra, node.weight) == ("bad cable", "ann", before.extra, before.weight)


@pytest.mark.parametrize("state", ["DRAIN", "FAIL"])
def test_a_reason_that_a_late_write_of_ours_took_is_put_back(world, state):
    world.slurm.failing.append("timeout_late")
    assert world.apply(action("swap")).kind == "timeout"
    world.slurm.person("n0", state, "bad cable")
    theirs = world.slurm.all["n0"]
    assert world.scheduler.revalidate("n0").view.opt_out is not None
    world.slurm.late.pop()()  # only now does Slurm get to it
    assert world.level("n0") is Level.SWAP
    world.scheduler.read_fleet()
    assert len(world.scheduler.upkeep(ME, world.lease())) == 3
    node = world.slurm.all["n0"]
    assert (node.out, node.reason, node.extra) == ({state}, "bad cable", theirs.extra)
    world.scheduler.read_fleet()
    assert world.scheduler.upkeep(ME, world.lease()) == ()


def test_a_node_that_changed_since_it_was_read_is_a_conflict(world):
    assert world.apply(action("swap"), version="of before").kind == "conflict"
    assert world.apply(action("swap"), boot_id="another").kind == "conflict"
    assert world.slurm.writes == []
    assert world.apply(action("swap")).kind == "done"
    assert world.apply(action("swap")).kind == "already"
    del world.slurm.all["n0"]
    answer = world.scheduler.apply(action("swap"), before(world))
    assert answer.kind == "gone"


@pytest.mark.parametrize(
    ("fault", "kind", "level"),
    [("refused", "refused", Level.NONE), ("timeout_before", "timeout", Level.NONE), ("timeout_after", "done", 3)],
)
def test_what_slurm_reports_counts_less_than_what_stands_afterwards(world, fault, kind, level):
    world.slurm.failing.append(fault)
    assert world.apply(action("swap")).kind == kind
    assert world.level("n0") == level


def test_nothing_is_written_without_the_lease_or_after_its_end(world):
    until = world.lease()
    assert world.apply(action("swap"), until=until, holder="another").kind == "refused"
    world.clock.move(LEASE)
    assert world.apply(action("swap"), until=until).kind == "refused"
    world.seconds = 2 * LEASE.total_seconds()  # the wall clock went back, time did not
    assert world.apply(action("swap"), until=world.clock.now() + HOUR).kind == "refused"
    assert world.slurm.writes == []


def test_a_folder_that_hangs_keeps_no_overdue_mark(tmp_path):
    world = World(tmp_path, soft_weight=100)
    world.scored(n0=0.9, n1=0.4)
    world.round()
    world.clock.move(2 * STEP + timedelta(minutes=10))
    world.folder.patience = Patience(0.2)
    lease = tmp_path / "lease.json"
    lease.unlink()
    os.mkfifo(lease)  # an open of it does not return
    report = world.round()
    os.close(os.open(lease, os.O_WRONLY))
    assert "the lease cannot be read" in report.errors[0]
    assert {world.level("n0"), world.level("n1")} == {Level.NONE}


def test_a_slurm_that_cannot_be_read_is_left_as_it_is(world):
    world.slurm.unreadable = True
    report = world.round()
    assert report.failed
    assert world.slurm.writes == []
    world.controller.stop()
    assert world.scheduler.apply(action("swap"), before(world)).kind == "refused"


def test_a_round_sets_lost_weights_again_and_reports_it(world):
    world.scored(n6=0.4)
    world.round()
    soft = world.slurm.all["n6"].weight
    world.slurm.reconfigure()
    view = world.scheduler.revalidate("n6").view
    assert (view.marks.soft, view.marker_removed) == (True, False), "nobody took it off"
    report = world.round()
    assert world.slurm.all["n6"].weight == soft
    assert f"restored after the scheduler lost it: node n6: Weight: 1 -> {soft}" in report.notes
    world.slurm.reconfigure()
    world.scheduler.set_switches(Switches(kill=True))
    world.round()
    assert world.slurm.all["n6"].weight == 1


def test_a_weight_that_a_tool_resets_each_round_is_restored_twice_and_reported(world):
    world.scored(n6=0.4)
    world.round()
    soft, weights = world.slurm.all["n6"].weight, []
    for number in range(6):
        world.slurm.reconfigure()
        if number == 3:
            world.restart()
        world.clock.move(timedelta(minutes=1))
        report = world.round()
        weights.append(world.slurm.all["n6"].weight)
    assert weights == [soft, soft, 1, 1, 1, 1]
    assert any("another client resets its weight" in reason for reason in report.plan.reasons)
    assert world.level("n6") <= Level.PUBLISH


def test_a_reconfigure_now_and_then_is_no_tool_that_resets_weights(world):
    for _ in range(5):
        world.scored(n6=0.4)
        world.round()
        world.slurm.reconfigure()
        world.clock.move(HOUR / 2)
        world.round()
        assert world.level("n6") is Level.AVOID


@pytest.mark.parametrize("how", ["kill", "no lease", "expired", "a person's weight", "another reason", "a reboot"])
def test_a_soft_mark_is_not_set_again_where_it_must_not_be(world, how):
    world.apply(action("avoid"))
    world.slurm.reconfigure()
    world.scheduler.read_fleet()
    if how == "kill":
        world.scheduler.set_switches(Switches(kill=True))
    elif how == "expired":
        world.clock.move(7 * HOUR)
    elif how == "a person's weight":
        world.slurm.all["n0"] = replace(world.slurm.all["n0"], weight=5)
    elif how == "another reason":
        world.slurm.person("n0", "DRAIN", "mine")
    elif how == "a reboot":
        world.slurm.all["n0"] = replace(world.slurm.all["n0"], states=frozenset({"IDLE", "REBOOT_REQUESTED"}))
    writes = len(world.slurm.writes)
    assert world.scheduler.upkeep("another" if how == "no lease" else ME, world.lease()) == ()
    assert len(world.slurm.writes) == writes


def test_fail_is_taken_off_by_way_of_drain(world, tmp_path):
    world = World(tmp_path / "fail", hard_state="fail")
    before = world.slurm.all["n0"]
    assert world.apply(action("swap")).kind == "done"
    assert world.slurm.all["n0"].out == {"FAIL"}
    assert world.apply(release()).kind == "done"
    assert world.slurm.all["n0"] == before
    states = [change.state for _, change in world.slurm.writes if change.state is not None]
    assert states == ["FAIL", "UNDRAIN", "DRAIN", "UNDRAIN"]


def test_jobs_make_the_floors_of_their_nodes(world):
    states, now = frozenset({"RUNNING"}), world.clock.now()
    job = SlurmJob(7, "7", 7, "7.0.1", ("n3", "n5"), states, "ann", 16, started_at=now)  # cheap to stop
    world.slurm.running[7] = job
    views = {node.view.name: node.view for node in world.scheduler.read_fleet().nodes}
    assert [(j.name, j.gpus) for j in views["n3"].jobs] == [("7", 16)]
    assert ("job", "c/7") in views["n5"].scopes
    assert views["n0"].jobs == ()
    world.policy = replace(world.policy, cost_benefit=CostBenefitConfig(always=True))
    world.restart()
    world.scored(n3=0.9, n5=0.9)
    world.round()
    least, most = sorted((world.level("n3"), world.level("n5")))
    assert (least, most.hard) == (Level.AVOID, True), "one node of a job at a time"


def test_a_name_that_could_mean_many_nodes_is_refused(world):
    for name in ("n[0-3]", "ALL,n1", "-x", "a b"):
        answer = world.scheduler.apply(replace(action("swap"), node=name), before(world))
        assert answer.kind == "refused"


@pytest.mark.parametrize("cloud", [False, True])
def test_scores_of_a_machine_before_do_not_drain_another_one_under_its_name(world, cloud):
    world.scored(n0=0.9, n4=0.9)
    others = world.slurm.all
    old, states = others.pop("n0"), frozenset({"IDLE", "CLOUD"} if cloud else {"IDLE"})
    world.round()
    assert {name for name in others if world.level(name)} == {"n4"}
    world.clock.move(timedelta(minutes=5))
    others["n0"] = replace(old, states=states, booted_at=world.clock.now(), extra="")
    if cloud:
        world.restart()
        world.round()
        world.clock.move(timedelta(minutes=1))  # the lease of the process before expires
    assert world.round().active
    assert world.level("n0") is Level.NONE
    others["n0"] = replace(others["n0"], booted_at=None)  # as after an UNDRAIN
    world.clock.move(timedelta(minutes=1))
    world.round()
    assert world.level("n0") is Level.NONE
    world.clock.move(timedelta(minutes=5))
    world.scored()
    world.round()
    assert world.level("n0") is Level.DRAIN, "its own scores count"


def test_a_boot_time_that_wavers_is_one_boot(world):
    first = world.scheduler.revalidate("n0")
    world.slurm.all["n0"] = replace(world.slurm.all["n0"], booted_at=world.clock.now() + timedelta(seconds=2))
    second = world.scheduler.revalidate("n0")
    world.slurm.all["n0"] = replace(world.slurm.all["n0"], booted_at=None)
    third = world.scheduler.revalidate("n0")
    world.slurm.all["n0"] = replace(world.slurm.all["n0"], booted_at=world.clock.now() + HOUR)
    fourth = world.scheduler.revalidate("n0")
    assert first.boot_id == second.boot_id == third.boot_id != fourth.boot_id
    world.slurm.all["n0"] = replace(world.slurm.all["n0"], booted_at=world.clock.now() + HOUR + timedelta(seconds=2))
    world.restart()
    assert world.scheduler.revalidate("n0").boot_id == fourth.boot_id, "progress outlives a process"
