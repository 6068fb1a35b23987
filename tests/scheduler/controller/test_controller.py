"""The controller's rounds on a cluster in memory."""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest

from policy.fleet import Fact, Level, UnitView
from policy.plan import Action
from scheduler.file import LeaseEntry
from scheduler.ports import stored_state
from scheduler.ports.errors import SourceError
from scheduler.ports.node_object import after
from scheduler.ports.readings import Switches
from scheduler.ports.risks import NO_RISKS, ReportedFacts
from scheduler.ports.stored_state import stored_policy_state
from tests.policy.decide_world import HOUR, STEP, T0, config
from tests.scheduler.cluster import Cluster, at_risk, marked, without_our_taints
from tests.scheduler.faults import Crash

MINUTE = timedelta(minutes=1)


def came(report):
    """What became of each action."""
    return [(step.action.verb, step.action.node, step.outcome) for step in report.steps]


def only(report, node):
    return [(verb, to) for verb, name, to in came(report) if name == node]


def drained() -> Cluster:
    """A cluster whose node n1 is drained."""
    cluster = marked(n1=0.9)
    assert cluster.level("n1") is Level.DRAIN
    return cluster


def test_each_tier_reaches_its_call_from_the_score_to_the_scheduler():
    cluster = Cluster(policy=config("g", free=True))
    cluster.scored(n1=0.15, n2=0.4, n3=0.9)
    report = cluster.round()
    assert not report.failed
    assert cluster.levels() == {"n1": Level.PUBLISH, "n2": Level.AVOID, "n3": Level.DRAIN}
    assert only(report, "n3") == [("swap", "done"), ("drain", "done"), ("publish", "already")]


def test_a_drained_node_that_falls_to_elevated_is_softly_tainted_and_is_drained_again_when_its_risk_rises():
    cluster = drained()
    for risk in (0.2, 0.2, 0.4, 0.9):
        cluster.clock.move(STEP)
        cluster.scored(n1=risk)
        report = cluster.round()
        assert all(outcome != "skipped" for _, _, outcome in came(report))
        if risk == 0.4:
            assert cluster.level("n1") is Level.AVOID
    assert cluster.level("n1") is Level.DRAIN, "nobody took a mark off"


def test_a_prediction_that_is_not_renewed_is_taken_off_when_it_expires():
    cluster = drained()
    cluster.clock.move(2 * STEP - MINUTE)
    cluster.restart()
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    cluster.clock.move(MINUTE)
    assert only(cluster.round(), "n1") == [("release", "done")]
    assert cluster.levels() == {}
    assert cluster.scheduler.keys.applied not in cluster.scheduler.nodes["n1"].object.annotations


def test_marks_are_taken_off_also_where_no_score_can_be_read_and_the_units_are_not_known():
    cluster = Cluster()
    for name in cluster.names:
        cluster.change(name, units=())
    cluster.scored(n1=0.9)
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    cluster.risks.risks, cluster.risks.read = NO_RISKS, Mock(side_effect=SourceError("the scores are gone"))
    cluster.restart()
    cluster.clock.move(STEP)
    report = cluster.round()
    assert report.failed
    assert cluster.level("n1") is Level.DRAIN, "the risk that it rests on still holds"
    cluster.clock.move(STEP)
    cluster.round()
    assert cluster.levels() == {}


def test_what_a_person_took_off_stays_off_in_this_episode_also_for_a_new_process():
    cluster = drained()
    cluster.write("n1", lambda node: without_our_taints(node, cluster))
    cluster.scheduler.state = None  # not even the safety state is there any more
    cluster.restart()
    for _ in range(3):
        cluster.clock.move(HOUR)
        cluster.scored(n1=0.9)
        cluster.round()
        assert cluster.scheduler.keys.taint not in {t.key for t in cluster.scheduler.nodes["n1"].object.taints}


CHANGES = {
    "cordoned": (lambda c: c.write("n1", lambda n: replace(n, unschedulable=True)), "took it out of service"),
    "opted_out": (lambda c: c.write("n1", lambda n: replace(n, labels={"predrain.io/managed": "false"})), "opted out"),
    "owned": (
        lambda c: c.write("n1", lambda n: replace(n, labels={"dgxc.nvidia.com/nvsentinel-state": "quarantined"})),
        "NVSentinel owns it",
    ),
    "booted": (lambda c: c.scheduler.edit("n1", lambda n: replace(n, boot_id="other")), "booted since"),
    "swapped": (lambda c: c.change("n1", units=(UnitView("n1-0"), UnitView("new"))), "its GPUs changed"),
    "unreadable": (lambda c: c.change("n1", readable=False), "cannot be read"),
    "down": (lambda c: c.change("n1", down=True), "went down"),
    "other_job": (lambda c: c.change("n1", jobs=()), "its jobs or its location"),
    "scored_anew": (lambda c: c.scored(T0 + timedelta(seconds=1), n1=0.02), "its scores or facts changed"),
    "new_fact": (
        lambda c: c.facts.facts.update({"n1-1": ReportedFacts((), c.clock.now())}),
        "its scores or facts changed",
    ),
    "released": (lambda c: c.scheduler.set_switches(Switches(release_all=True)), "release-all is set"),
    "removed": (lambda c: c.change("n1", marker_removed=True), "another client removed a predrain marker"),
    "killed": (lambda c: c.scheduler.set_switches(Switches(kill=True)), "the kill switch was set"),
    "gone": (lambda c: c.scheduler.nodes.pop("n1"), "the node was removed"),
    "jobs_unknown": (lambda c: setattr(c.scheduler, "_reading", partial(blind, c.scheduler._reading)), "its workloads"),
    "marked": (
        lambda c: c.write("n1", lambda n: after(AVOID, n, c.scheduler.keys, T0)),
        "another client changed its markers",
    ),
}
AVOID = Action("avoid", "n1", "elevated", Level.AVOID, 0.4, T0 + HOUR, ("its errors rise",))


def blind(reading, node):
    return replace(reading(node), jobs_known=False)


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_the_decision_and_the_write_stops_the_write(what):
    change, message = CHANGES[what]
    drained()  # without the change it is
    cluster = at_risk(n1=0.9)
    revalidate = cluster.scheduler.revalidate
    changed = []

    def then(node):
        if node == "n1" and not changed:
            changed.append(change(cluster))
        return revalidate(node)

    cluster.scheduler.revalidate = then
    report = cluster.round()
    assert changed
    assert [step.outcome for step in report.steps if step.action.verb in ("swap", "drain")] == ["skipped", "skipped"]
    assert message in next(step.message for step in report.steps if step.action.verb == "swap")
    assert all(not level.hard for level in cluster.levels().values())


def test_a_lost_update_would_erase_another_tools_taint_and_a_conflict_prevents_it():
    cluster = at_risk(n1=0.9)
    apply, meddled = cluster.scheduler.apply, []

    def between(action, precondition):
        if action.verb == "swap" and not meddled:
            meddled.append(True)
            theirs = replace(cluster.scheduler.nodes["n0"].object.taints[0], key="other.example/new")
            cluster.write("n1", lambda node: replace(node, taints=(*node.taints, theirs)))
        return apply(action, precondition)

    cluster.scheduler.apply = between
    report = cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    assert "other.example/new" in {taint.key for taint in cluster.scheduler.nodes["n1"].object.taints}
    assert not report.failed


def test_a_node_that_the_scheduler_knows_is_read_again_only_where_its_write_meets_another_version():
    cluster = Cluster(policy=config("g", free=True))
    cluster.knows_nodes()
    cluster.scored(n1=0.15, n2=0.15)
    apply = cluster.scheduler.apply

    def raced(action, precondition):
        cluster.scheduler.apply = apply
        cluster.change("n2", rack="r9")
        cluster.change("n2", rack="r0")
        return apply(action, precondition)

    cluster.scheduler.apply = raced
    cluster.scheduler.faults.calls.clear()
    assert not cluster.round().failed
    assert cluster.levels() == {"n1": Level.PUBLISH, "n2": Level.PUBLISH}
    assert cluster.scheduler.faults.calls.count("revalidate") == 1


def test_a_node_that_somebody_else_keeps_writing_to_is_given_up_for_this_round():
    cluster = Cluster(retries=1)
    cluster.scored(n1=0.9)
    for _ in range(2):
        cluster.scheduler.faults.plan("conflict", "apply")
    report = cluster.round()
    assert only(report, "n1") == [("swap", "failed"), ("drain", "skipped"), ("publish", "done")]
    assert cluster.levels() == {"n1": Level.PUBLISH}
    assert report.failed
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN


@pytest.mark.parametrize(("kind", "has_marks"), [("timeout_before", False), ("timeout_after", True)])
def test_after_a_call_without_an_answer_the_node_itself_shows(kind, has_marks):
    cluster = at_risk(n1=0.9)
    cluster.scheduler.faults.plan(kind, "apply")
    report = cluster.round()
    assert ("swap", "done" if has_marks else "failed") in only(report, "n1")
    assert cluster.ledger.unsettled() == ()
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN


def test_what_a_call_without_an_answer_came_to_is_unknown_while_the_node_cannot_be_read():
    cluster = at_risk(n1=0.9)
    cluster.scheduler.faults.plan("timeout_after", "apply")
    cluster.scheduler.faults.plan("unreadable", "revalidate", skip=1)
    assert ("swap", "unknown") in only(cluster.round(), "n1")
    assert len(cluster.ledger.unsettled()) == 1
    cluster.round()
    assert cluster.ledger.unsettled() == ()


def test_a_leader_that_was_asleep_writes_nothing_after_another_one_took_over():
    cluster = Cluster(lease=timedelta(seconds=30))
    cluster.scored(n1=0.9)
    revalidate, slept = cluster.scheduler.revalidate, []

    def sleep(node):
        if not slept:
            slept.append(True)
            cluster.clock.move(timedelta(seconds=40))
            cluster.scheduler.lease = LeaseEntry("another", cluster.clock.now() + HOUR)
        return revalidate(node)

    cluster.scheduler.revalidate = sleep
    report = cluster.round()
    assert slept
    assert cluster.levels() == {}
    assert not report.active
    assert report.notes == ["stopped: the lease expired before the write"]


def test_a_lost_ledger_changes_no_decision():
    plain, lost = Cluster(), Cluster()
    for cluster in (plain, lost):
        cluster.scored(n1=0.9, n3=0.8, n6=0.7)
        cluster.round()
    fresh = Cluster()
    lost.ledger = fresh.ledger
    lost.restart()
    for cluster in (plain, lost):
        cluster.clock.move(HOUR)
        cluster.scored(n1=0.9, n3=0.8, n6=0.7)
        cluster.round()
    assert plain.levels() == lost.levels()
    assert sum(level.hard for level in lost.levels().values()) == 2


def test_another_writer_of_the_state_stops_the_round():
    cluster = at_risk(n1=0.9)
    cluster.scheduler.faults.plan("conflict", "save_state")
    report = cluster.round()
    assert cluster.levels() == {}
    assert "another process wrote the safety state" in report.notes[-1]


def test_a_damaged_state_is_reported_and_what_stands_stays():
    cluster = drained()
    cluster.scheduler.state = cluster.scheduler.state[:-6] + "AAAA=="
    cluster.clock.move(MINUTE)
    cluster.restart()
    cluster.scheduler.lease = None
    report = cluster.round()
    assert "starting with an empty safety state" in report.errors[0]
    assert cluster.level("n1") is Level.DRAIN
    stored = stored_policy_state(cluster.scheduler)
    assert stored.load() is None
    assert stored.value.nodes["n1"].seen is Level.DRAIN


def test_the_state_is_unpacked_only_where_another_process_wrote_it(monkeypatch):
    cluster = drained()

    def unpack(*_):
        raise ValueError("unpacked")

    monkeypatch.setattr(stored_state, "unpack", unpack)
    cluster.clock.move(MINUTE)
    assert not cluster.round().failed
    cluster.scheduler.state = f"{cluster.scheduler.state} "
    assert "starting with an empty safety state: unpacked" in cluster.round().errors[0]


def test_an_unreadable_scheduler_is_an_error_and_nothing_is_done():
    cluster = at_risk(n1=0.9)
    for call in ("hold_lease", "read_fleet", "load_state"):
        cluster.scheduler.faults.plan("unreadable", call)
        report = cluster.round()
        assert report.failed
        assert {step.outcome for step in report.steps} <= {"skipped"}
    assert cluster.levels() == {}


def test_a_mark_that_rests_on_a_fault_is_not_taken_off_for_a_source_that_cannot_be_read():
    cluster = Cluster()
    cluster.facts.facts = {"n2-0": ReportedFacts((Fact("xid 79", T0),))}
    cluster.round()
    assert cluster.level("n2") is Level.DRAIN

    def broken(_now):
        raise SourceError("the events are away")

    cluster.facts.read = broken
    cluster.clock.move(HOUR)
    cluster.scored()
    cluster.restart()
    report = cluster.round()
    assert report.failed
    assert cluster.level("n2") is Level.DRAIN
    cluster.scheduler.set_switches(Switches(release_all=True))
    cluster.round()
    assert cluster.levels() == {}


def test_the_kill_switch_lets_marks_run_out_and_puts_none_on():
    cluster = drained()
    cluster.scheduler.set_switches(Switches(kill=True))
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9, n4=0.95)
    assert came(cluster.round()) == []
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9, n4=0.95)
    cluster.round()
    assert cluster.levels() == {}


def test_while_the_kill_switch_is_on_a_round_that_reports_nothing_new_is_not_recorded():
    cluster = drained()
    cluster.scheduler.set_switches(Switches(kill=True))
    recorded = []
    for _ in range(4):
        cluster.clock.move(MINUTE)
        recorded.append(cluster.round().number is not None)
    assert recorded == [True, False, False, False]
    cluster.restart()
    cluster.clock.move(MINUTE)
    report = cluster.round()
    assert (report.active, report.number) == (True, None), "what was said is known from the ledger"
    cluster.scheduler.set_switches(Switches())
    cluster.scored(n4=0.9)
    assert cluster.round().number is not None


def test_release_all_takes_off_everything_of_ours_and_nothing_else():
    cluster = Cluster(policy=config("g", free=True))
    cluster.scored(n0=0.9, n1=0.9, n2=0.4, n3=0.15)
    before = cluster.foreign()
    original = {name: item.object for name, item in cluster.scheduler.nodes.items()}
    cluster.round()
    cluster.write("n1", lambda node: replace(node, unschedulable=True))
    cluster.scheduler.set_switches(Switches(release_all=True))
    cluster.round()
    assert cluster.levels() == {}
    assert cluster.scheduler.nodes["n1"].object.unschedulable, "a person's cordon stays"
    cluster.write("n1", lambda node: replace(node, unschedulable=False))
    assert cluster.foreign() == before
    assert {name: item.object for name, item in cluster.scheduler.nodes.items()} == original


def test_a_rehearsal_writes_nothing_and_reports_exactly_what_would_be_written():
    cluster = at_risk(n1=0.9, n4=0.4)
    before = dict(cluster.scheduler.nodes)
    cluster.scheduler.faults.calls.clear()
    rehearsed = cluster.controller.rehearse()
    assert dict(cluster.scheduler.nodes) == before
    assert {"apply", "save_state", "hold_lease"} & set(cluster.scheduler.faults.calls) == set()
    assert cluster.ledger.last_digest() is None
    real = cluster.round()
    assert [(s.action, s.writes) for s in rehearsed.steps] == [(s.action, s.writes) for s in real.steps]
    taints = [w for s in rehearsed.steps for w in s.writes if w.path == "spec.taints"]
    assert [w.message for w in taints if w.target == "node n1"] == [
        "node n1: spec.taints: (none) -> predrain.io/at-risk=high:NoSchedule"
    ]


def test_new_marks_a_round_are_bounded_and_the_rest_follows():
    cluster = Cluster(max_new_per_round=1, policy=config("g", free=True))
    cluster.scored(n1=0.4, n2=0.4, n3=0.4)
    cluster.round()
    assert sorted(cluster.levels().values()) == [Level.PUBLISH, Level.PUBLISH, Level.AVOID], "publications go on"
    cluster.round()
    cluster.round()
    assert sum(level is Level.AVOID for level in cluster.levels().values()) == 3


def test_a_round_that_takes_too_long_leaves_the_rest_to_the_next():
    cluster = Cluster(max_round_duration=timedelta(seconds=10), policy=config("g", free=True))
    cluster.scored(n1=0.4, n2=0.4, n3=0.4)
    apply = cluster.scheduler.apply

    def slow(action, precondition):
        answer = apply(action, precondition)
        cluster.clock.move(timedelta(seconds=6))
        return answer

    cluster.scheduler.apply = slow
    report = cluster.round()
    assert [step.outcome for step in report.steps].count("done") == 2
    assert "controller.max_round_duration exceeded" in report.steps[-1].message


@pytest.mark.parametrize(
    "call", ["hold_lease", "read_fleet", "load_state", "read_switches", "revalidate", "apply", "save_state"]
)
def test_a_process_that_dies_does_nothing_more_in_its_round(call):
    cluster = at_risk(n1=0.9)
    cluster.scheduler.faults.plan("crash_before", call)
    with pytest.raises(Crash):
        cluster.round()
    assert cluster.scheduler.faults.calls[-1] == call


def test_a_crash_after_a_write_leaves_a_call_open_and_the_next_process_looks():
    cluster = at_risk(n1=0.9)
    cluster.scheduler.faults.plan("crash_after", "apply")
    with pytest.raises(Crash):
        cluster.round()
    assert [intent.verb for _, intent in cluster.ledger.unsettled()] == ["swap"]
    cluster.restart()
    cluster.clock.move(MINUTE)
    report = cluster.round()
    assert "swap n1 was interrupted" in report.notes[0]
    assert only(report, "n1") == [("drain", "done")]
    assert cluster.ledger.unsettled() == ()
