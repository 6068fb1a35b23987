"""From a drain mark to an empty node, and back into service."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from policy.breaker import BreakerConfig
from policy.fleet import Level
from policy.plan import Action
from scheduler.controller.metrics import RoundMetrics
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import SourceError
from scheduler.ports.node_object import after
from scheduler.ports.readings import Switches, WriteResult
from scheduler.ports.workloads import DiagnosticResult, Hook, HookReply
from tests.policy.decide_world import HOUR, STEP, config
from tests.scheduler.cluster import without_our_taints
from tests.scheduler.evacuation.emptying_cluster import (
    FAST,
    MINUTE,
    SCHEDULER,
    EmptyingCluster,
    Recording,
    draining,
    findings,
    work,
    workload,
)
from tests.scheduler.faults import Crash


def asked_by(hooks: Mapping[str, Hook] | None = None, **offer: Any) -> EmptyingCluster:
    """Node n1 is at risk, and its workload is asked for a checkpoint in a way of its own."""
    cluster = EmptyingCluster(hooks=hooks)
    cluster.runs("w1-uid", checkpoint=replace(SCHEDULER, **offer))
    cluster.scored(n1=0.9)
    return cluster


def test_the_whole_way_from_a_risk_to_an_empty_node_and_back_into_service():
    cluster = draining()
    assert set(cluster.workloads.asked) == {"w1-uid"}
    assert cluster.evicted() == []
    assert work(cluster.later()) == [("wait", "waiting", "w1")]

    cluster.acknowledge("w1-uid")
    assert work(cluster.later()) == [("checkpoint", "done", "w1"), ("evict", "done", "w1")]
    assert cluster.evicted() == ["w1-uid"]
    assert cluster.progress().nodes["n1"].phase == "evacuating", "accepted is not gone"

    cluster.leave("w1-uid")
    assert work(cluster.later()) == [("empty", "done", None), ("verify", "waiting", None)]
    assert [node for node, _ in cluster.verification.started.values()] == ["n1"]
    assert work(cluster.later()) == [("verify", "waiting", None)]

    cluster.verification.results["n1"] = DiagnosticResult("passed", "dcgmi diag -r 3")
    assert work(cluster.later()) == [("verify", "passed", None)]
    assert cluster.level("n1") is Level.DRAIN, "it is the controller's next round that releases"
    report = cluster.later()
    assert [(s.action.verb, s.action.node, s.outcome) for s in report.steps] == [("release", "n1", "done")]
    assert cluster.levels() == {}
    assert cluster.progress().nodes == {}


def test_the_deadline_is_that_of_the_first_request_whoever_leads():
    cluster = draining()
    for _ in range(4):
        cluster.clock.move(MINUTE)
        cluster.restart()
        cluster.round()
    assert cluster.evicted() == []
    cluster.restart()
    assert work(cluster.later()) == [("evict", "done", "w1")]


@pytest.mark.parametrize("takes", [timedelta(minutes=10), timedelta(hours=9)])
def test_the_time_that_a_workload_names_is_waited_for_up_to_the_most(takes):
    cluster = asked_by(takes=takes)
    cluster.round()
    wait = min(takes, timedelta(minutes=30)) / MINUTE
    cluster.later(wait - 1)
    assert cluster.evicted() == []
    cluster.later()
    assert cluster.evicted() == ["w1-uid"]


def test_what_cannot_write_a_checkpoint_is_evicted_at_once_and_reports_it():
    cluster = draining()
    cluster.workloads.cannot.add("w1-uid")
    assert work(cluster.later()) == [("checkpoint", "inconclusive", "w1"), ("evict", "done", "w1")]


def test_a_blocked_budget_is_tried_again_with_growing_pauses_and_never_forced():
    cluster = draining(settings=replace(FAST, stuck_after=10 * MINUTE))
    cluster.acknowledge("w1-uid")
    cluster.workloads.blocked["w1-uid"] = "budget team/train allows none"
    reports = [cluster.later() for _ in range(30)]
    tries = [i for i, report in enumerate(reports) if ("evict", "blocked", "w1") in work(report)]
    assert tries[:5] == [0, 1, 3, 7, 11], "1, 2, 4 and then 4 minutes"
    assert cluster.evicted() == []
    assert cluster.level("n1") is Level.DRAIN
    stuck = [f for f in findings(cluster) if f[1] == "stuck"]
    assert len(stuck) == 1
    assert "not empty: w1 (blocked: budget team/train allows none" in stuck[0][2]
    del cluster.workloads.blocked["w1-uid"]
    cluster.later(4)
    assert cluster.evicted() == ["w1-uid"]


TO_SWAP = Action("release", "n1", "high", Level.SWAP, 0.9, None, ("it is lowered",))
CALLED_OFF = {
    "killed": lambda c: c.scheduler.set_switches(Switches(kill=True)),
    "all released": lambda c: c.scheduler.set_switches(Switches(release_all=True)),
    "opted out": lambda c: c.write("n1", lambda n: replace(n, labels={"predrain.io/managed": "false"})),
    "taken off": lambda c: c.write("n1", lambda n: without_our_taints(n, c)),
    "cordoned": lambda c: c.write("n1", lambda n: replace(n, unschedulable=True)),
    "unreadable": lambda c: c.change("n1", readable=False),
    "undone": lambda c: c.change("n1", marker_removed=True),
    "lowered": lambda c: c.write("n1", lambda n: after(TO_SWAP, n, c.scheduler.keys, c.clock.now())),
    "expired": lambda c: c.clock.move(2 * STEP),
    "not released": lambda c: (c.scored(n1=0.01), setattr(c.scheduler, "apply", lambda *_: WriteResult("refused"))),
    "calm": lambda c: c.scored(n1=0.01),
    "gone": lambda c: c.scheduler.nodes.pop("n1"),
}


@pytest.mark.parametrize("name", sorted(CALLED_OFF))
def test_a_drain_that_is_called_off_evicts_nothing_more(name):
    cluster = draining()
    if name in ("calm", "not released"):  # one calm decision does not end it by itself: the rule of the policy
        cluster.clock.move(MINUTE)
        cluster.scored(n1=0.01)
        cluster.later()
    CALLED_OFF[name](cluster)
    cluster.acknowledge("w1-uid")
    for _ in range(8):
        cluster.round()
        cluster.clock.move(MINUTE)
    assert cluster.evicted() == []


BETWEEN = {
    **CALLED_OFF,
    "expired": lambda c: c.clock.move(timedelta(seconds=5)),
    "booted": lambda c: c.scheduler.edit("n1", lambda n: replace(n, boot_id="another")),
}


@pytest.mark.parametrize("name", sorted(set(BETWEEN) - {"calm", "not released"}))
def test_a_drain_that_is_called_off_between_two_evictions_stops_between_them(name):
    cluster = EmptyingCluster()
    for uid in ("a", "b"):
        cluster.workloads.running[uid] = workload(uid, "n1", uid=uid, checkpoint=None)
    del cluster.workloads.running["w1-uid"]
    cluster.scored(n1=0.9, duration=timedelta(seconds=5))
    evict = cluster.workloads.evict

    def then_called_off(target, fence):
        answer = evict(target, fence)
        BETWEEN[name](cluster)
        return answer

    cluster.workloads.evict = then_called_off
    cluster.round()
    assert len(cluster.evicted()) == 1


@pytest.mark.parametrize("fault", [None, "timeout_after", "crash_after"])
def test_only_so_many_are_on_their_way_at_once(fault):
    cluster = EmptyingCluster(settings=replace(FAST, max_concurrent=3))
    cluster.workloads.running.clear()
    for i in range(8):
        uid = f"u{i}"
        cluster.workloads.running[uid] = workload(uid, f"n{i % 2 + 1}", uid=uid, checkpoint=None)
    cluster.scored(n1=0.95, n2=0.9)
    if fault is not None:
        cluster.workloads.faults.plan(fault, "evict", skip=1)
    with contextlib.suppress(Crash):
        cluster.round()
    cluster.restart("p1")
    cluster.later()
    assert len(cluster.evicted()) == 3
    for uid in cluster.evicted():
        cluster.leave(uid)
    cluster.later()
    assert len(cluster.evicted()) == 6


def test_a_slow_scheduler_leaves_less_urgent_nodes_to_the_next_round_which_begins_with_them():
    cluster = EmptyingCluster(lease=HOUR)
    for uid in cluster.workloads.running:
        cluster.runs(uid, checkpoint=None)
    cluster.scored(n1=0.95, n2=0.9)
    revalidate = cluster.scheduler.revalidate

    def slow(node):
        if cluster.level(node) is Level.DRAIN:
            cluster.clock.move(timedelta(seconds=11))
        return revalidate(node)

    cluster.scheduler.revalidate = slow
    report = cluster.round()
    assert any("1 nodes, such as n2," in error for error in report.errors)
    assert cluster.evicted() == ["w1-uid"]
    report = cluster.later()
    assert any("1 nodes, such as n1," in error for error in report.errors)
    assert cluster.evicted() == ["w1-uid", "w2-uid"]


def test_a_workload_that_may_not_be_moved_is_asked_and_waited_for():
    cluster = EmptyingCluster(settings=replace(FAST, stuck_after=HOUR))
    cluster.runs("w1-uid", loss="no controller would start it elsewhere")
    cluster.scored(n1=0.9)
    cluster.round()
    cluster.acknowledge("w1-uid")
    for _ in range(5):
        cluster.later(30)
    assert cluster.evicted() == []
    assert [f[1] for f in findings(cluster)].count("stuck") == 1
    cluster.leave("w1-uid")
    assert ("empty", "done", None) in work(cluster.later())


def test_what_belongs_to_the_node_neither_goes_nor_keeps_it_from_being_empty():
    cluster = EmptyingCluster()
    cluster.runs("w1-uid", stays="a daemon set's pod")
    cluster.scored(n1=0.9)
    assert ("empty", "done", None) in work(cluster.round())
    assert cluster.evicted() == []


def test_a_workload_of_another_uid_is_asked_anew_and_not_evicted_for_the_first_ones_deadline():
    cluster = draining()
    cluster.clock.move(6 * MINUTE)
    cluster.leave("w1-uid")
    cluster.workloads.running["w1-again"] = workload("w1", "n1", uid="w1-again")
    cluster.round()
    assert cluster.evicted() == []
    assert set(cluster.workloads.asked) == {"w1-uid", "w1-again"}


def test_hooks_are_asked_until_they_say_it_is_written():
    hook = Recording(HookReply("waiting"), HookReply("timeout", "no answer"), HookReply("done", "step 900"))
    cluster = asked_by(means="webhook", hooks={"webhook": hook})
    cluster.round()
    cluster.later()
    assert cluster.evicted() == []
    cluster.later()
    assert cluster.evicted() == ["w1-uid"]
    assert {key for _, key in hook.requests} == {hook.requests[0][1]}, "one key for one request"


def test_what_wants_to_be_asked_in_a_way_that_is_not_set_up_is_not_moved_unasked():
    cluster = asked_by(means="webhook")
    for _ in range(3):
        report = cluster.later(30)
    assert cluster.evicted() == []
    assert "its checkpoint method webhook is not configured" in report.work[0].message


def test_slow_hooks_do_not_keep_what_is_ready_from_going():
    cluster = EmptyingCluster(lease=HOUR)

    class Slow:
        asked = 0

        def tell(self, payload, key):
            Slow.asked += 1
            cluster.clock.move(timedelta(seconds=10) / 8)  # eight at once
            return HookReply("waiting")

    cluster.hooks["webhook"] = Slow()
    cluster.restart(holder="p1")
    offer = replace(cluster.workloads.running["w1-uid"].checkpoint, means="webhook", takes=timedelta(minutes=30))
    for i in range(64):
        cluster.workloads.running[f"s{i}"] = workload(f"s{i}", "n1", uid=f"s{i}", checkpoint=offer)
    cluster.scored(n1=0.9)
    cluster.later()
    cluster.acknowledge("w1-uid")
    cluster.later()
    assert cluster.evicted() == ["w1-uid"]
    for _ in range(3):
        cluster.later()
    assert Slow.asked >= 64


@pytest.mark.parametrize("what", ["all of it", "a call"])
def test_a_ledger_that_cannot_be_written_stops_what_is_new(what):
    cluster = draining()
    cluster.acknowledge("w1-uid")
    if what == "a call":
        cluster.ledger.call = lambda _: cluster.ledger._read("no SQL")
    else:
        cluster.ledger.close()
    report = cluster.later()
    assert report.failed
    assert cluster.evicted() == []


def test_an_interrupted_eviction_is_settled_by_what_is_there():
    cluster = draining(ledger=SqliteLedger(None))
    cluster.acknowledge("w1-uid")
    cluster.workloads.faults.plan("crash_after", "evict")
    cluster.clock.move(MINUTE)
    with pytest.raises(Crash):
        cluster.round()
    assert len(cluster.ledger.open_calls()) == 1
    cluster.clock.move(MINUTE)
    cluster.restart()
    report = cluster.round()
    assert "evict on n1 was interrupted: it is terminating" in report.notes
    assert cluster.ledger.open_calls() == ()
    assert cluster.evicted() == ["w1-uid"]


def test_a_rehearsal_reports_whom_it_would_ask_and_evict_and_does_nothing():
    cluster = EmptyingCluster()
    cluster.scored(n1=0.9)
    report = cluster.controller.rehearse()
    assert [(s.verb, s.outcome, s.workload, s.message) for s in report.work] == [
        ("evict", "would", "w1", "after a checkpoint by scheduler")
    ]
    assert report.work[0].writes[0].message == "pod w1: ending: (none) -> true"
    assert (cluster.workloads.asked, cluster.workloads.text, cluster.evicted()) == ({}, None, [])


def test_a_leader_whose_progress_somebody_else_replaced_stops():
    cluster = draining()
    cluster.acknowledge("w1-uid")
    cluster.workloads.faults.plan("conflict", "save_progress")
    report = cluster.later()
    assert not report.active
    assert "another process wrote the evacuation state" in report.notes[-1]


def test_progress_that_may_not_be_kept_stops_what_is_new():
    cluster = EmptyingCluster()
    cluster.workloads.faults.plan("refused", "save_progress")
    cluster.scored(n1=0.9)
    report = cluster.round()
    assert report.failed
    assert (cluster.workloads.asked, cluster.evicted()) == ({}, [])


def test_a_process_that_never_heard_what_gpus_reported_moves_nobody():
    cluster = draining()
    cluster.acknowledge("w1-uid")

    def unread(now):
        raise SourceError("the events are gone")

    cluster.facts.read = unread
    cluster.clock.move(MINUTE)
    cluster.restart()
    report = cluster.round()
    assert cluster.evicted() == []
    assert report.work[-1].message == "the events of its GPUs cannot be read"


def test_switched_off_nothing_is_asked_of_anybody():
    cluster = draining(settings=EvacuationSettings())
    assert (cluster.workloads.asked, cluster.evicted(), cluster.workloads.text) == ({}, [], None)


def test_what_cannot_be_listed_is_not_empty():
    cluster = draining()
    cluster.leave("w1-uid")
    cluster.workloads.faults.plan("unreadable", "on_node")
    report = cluster.later()
    assert report.failed
    assert cluster.progress().nodes["n1"].phase == "evacuating"


def test_progress_that_is_damaged_is_begun_anew_and_everybody_is_asked_again():
    cluster = draining()
    first = cluster.workloads.asked["w1-uid"]
    assert "a drain now is expected to save" in first.why
    cluster.workloads.text = "nonsense"
    report = cluster.later(6)
    assert "evacuations are restarted: the evacuation state begins with 'nonsense'" in report.errors[0]
    assert cluster.evicted() == [], "no deadline is over"
    assert cluster.workloads.asked["w1-uid"].key != first.key


def test_an_open_breaker_stops_evictions_as_it_stops_new_marks():
    breaker = BreakerConfig(max_risky=0.5, min_risky=1)
    cluster = EmptyingCluster(policy=config("g", free=True, breaker=breaker))
    cluster.scored(n1=0.9)
    cluster.round()
    cluster.acknowledge("w1-uid")
    cluster.clock.move(MINUTE)
    cluster.scored(**dict.fromkeys(cluster.names, 0.9))
    report = cluster.round()
    assert report.plan.open_causes
    assert cluster.evicted() == []
    assert ("hold", "held", None) in work(report)


@pytest.mark.parametrize("kind", ["timeout", "refused"])
def test_a_webhook_that_cannot_be_reached_would_fail_whole_rounds_and_is_one_answer(kind):
    hook = Recording(HookReply(kind, "w1.example: refused"))
    cluster = asked_by(means="webhook", hooks={"webhook": hook})
    first = cluster.round()
    assert not first.failed
    (step,) = first.work
    assert (step.verb, step.outcome) == ("checkpoint", {"timeout": "unknown", "refused": "failed"}[kind])
    assert step.message == "w1.example: refused; requested again until 2026-03-01 00:05:00 UTC, then moved without it"
    numbers = RoundMetrics(cluster.clock, HOUR, HOUR)
    numbers.note(first, 0.1)
    assert (
        f'predrain_act_evacuation_steps_total{{outcome="{step.outcome}",verb="checkpoint"}} 1.0' in numbers.exposition()
    )
    assert 'predrain_act_rounds_total{result="failed"} 0.0' in numbers.exposition()
    cluster.later(4)
    assert cluster.evicted() == [], "the deadline holds"
    moved = cluster.later(2)
    assert cluster.evicted() == ["w1-uid"]
    assert not moved.failed


def test_an_eviction_that_is_refused_fails_the_round():
    cluster = draining()
    cluster.workloads.faults.plan("refused", "evict")
    assert cluster.later(6).failed
