"""What is waited for while a node is emptied: it ends in a report, holds no shared place, and stops a job once."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.breaker import BreakerConfig, CommonCauseConfig
from policy.fleet import JobView, Level
from scheduler.evacuation.settings import WebhookSettings
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Switches, WriteResult
from scheduler.ports.workloads import CheckpointOffer, HookReply, Placement
from tests.policy.decide_world import STEP, T0, config
from tests.scheduler.evacuation.emptying_cluster import (
    FAST,
    MINUTE,
    SCHEDULER,
    EmptyingCluster,
    Recording,
    found,
    work,
    workload,
)
from tests.scheduler.faults import Crash


def unasked(**fields: object) -> EmptyingCluster:
    """Node n1 is drained; its workload names no checkpoint, as most do not."""
    cluster = EmptyingCluster()
    cluster.runs("w1-uid", checkpoint=None, **fields)
    cluster.scored(n1=0.9)
    cluster.round()
    return cluster


def rounds(cluster: EmptyingCluster, minutes: int, step: int = 1) -> list:
    """Rounds over a while; the scores are renewed as a scoring job does."""
    reports = []
    for minute in range(0, minutes, step):
        if minute % 60 == 0:
            cluster.scored()
        reports.append(cluster.later(step))
    return reports


STUCK = {
    "a budget that allows none": lambda c: c.workloads.blocked.__setitem__("w1-uid", "budget of zero"),
    "an opt-out": lambda c: c.runs("w1-uid", opt_out="predrain.io/managed=no"),
    "suspended": lambda c: c.runs("w1-uid", state="suspended"),
    "held": lambda c: c.runs("w1-uid", state="held"),
    "pinned": lambda c: c.runs("w1-uid", placement=Placement(False, "it requires n1")),
    "undecided": lambda c: c.runs("w1-uid", placement=Placement(None, "no right to list nodes")),
    "ends only in days": lambda c: c.runs(
        "w1-uid", opt_out="keep", job=JobView("w1", 2, T0, ends_at=T0 + timedelta(days=9))
    ),
    "each eviction is refused": lambda c: setattr(c.workloads, "evict", lambda *_: WriteResult("refused", "no right")),
    "each eviction is a conflict": lambda c: setattr(c.workloads, "evict", lambda *_: WriteResult("conflict", "x")),
    "each eviction has no answer": lambda c: setattr(c.workloads, "evict", lambda *_: WriteResult("timeout", "x")),
    "its list cannot be read": lambda c: setattr(c.workloads, "on_node", _unreadable),
}


def _unreadable(node: str):
    raise SchedulerError(f"{node}: HTTP 500")


@pytest.mark.parametrize("names_a_checkpoint", [False, True])
@pytest.mark.parametrize("name", sorted(STUCK))
def test_every_wait_is_reported_as_stuck_once_after_the_stated_time(name, names_a_checkpoint):
    cluster = EmptyingCluster()
    cluster.runs("w1-uid", checkpoint=SCHEDULER if names_a_checkpoint else None)
    STUCK[name](cluster)
    cluster.scored(n1=0.9)
    cluster.round()
    reports = rounds(cluster, 58, 2)
    assert found(cluster, "stuck") == []
    reports = rounds(cluster, 180, 10)
    (message,) = found(cluster, "stuck")
    assert "2026-03-01 00:00 UTC" in message
    assert ("w1 (" in message) is (name != "its list cannot be read")
    assert sum(("report", "done", None) in work(report) for report in reports) == 1
    assert cluster.evicted() == []
    cluster.clock.move(2 * STEP)
    cluster.round()
    assert cluster.level("n1") is Level.NONE, "the taint expires although the node was never emptied"


def test_suspended_work_is_asked_nothing_also_by_the_hook_for_all_jobs():
    hook = Recording(HookReply("done"))
    asking = replace(FAST.checkpoint, default="webhook", webhook=WebhookSettings("http://localhost"))
    cluster = EmptyingCluster(settings=replace(FAST, checkpoint=asking), hooks={"webhook": hook})
    cluster.runs("w1-uid", checkpoint=None, state="suspended")
    cluster.runs("w2-uid", checkpoint=None)
    cluster.scored(n1=0.9, n2=0.9)
    cluster.round()
    assert [payload["workload"]["name"] for payload, _ in hook.requests] == ["w2"]


def test_a_checkpoint_that_cannot_be_read_is_reported_in_each_round():
    cluster = EmptyingCluster()
    cluster.scored(n1=0.9)
    for wait in (0, 1):
        cluster.workloads.faults.plan("unreadable", "checkpoint_state")
        report = cluster.later(wait)
        assert ("checkpoint", "unknown", "w1") in work(report)
        assert not report.failed
    cluster.acknowledge("w1-uid")
    assert ("checkpoint", "done", "w1") in work(cluster.later())


def test_a_drain_that_a_switch_stops_for_long_is_reported_with_its_cause():
    cluster = unasked(opt_out="keep")
    cluster.scheduler.set_switches(Switches(kill=True))
    rounds(cluster, 62, 2)
    (message,) = found(cluster, "stuck")
    assert "the kill switch is set" in message


def test_a_diagnostic_that_never_starts_is_reported():
    cluster = unasked()
    cluster.leave("w1-uid")
    cluster.verification.start = lambda *_, **__: WriteResult("refused", "no quota")
    rounds(cluster, 62, 2)
    (message,) = found(cluster, "stuck")
    assert "its diagnostic did not start (no quota)" in message


@pytest.mark.parametrize("replicas", [1, 3])
def test_work_that_comes_back_after_two_evictions_is_reported_and_left(replicas):
    cluster = EmptyingCluster()
    cluster.leave("w1-uid")

    def comes(generation: int) -> None:
        for replica in range(replicas):
            uid = f"mon-{generation}-{replica}"
            cluster.workloads.running[uid] = workload(uid, "n1", uid=uid, checkpoint=None, origin="ReplicaSet mon")

    comes(0)
    cluster.scored(n1=0.9)
    cluster.round()
    for generation in range(1, 30):
        for uid in [uid for uid, item in cluster.workloads.running.items() if item.ending]:
            cluster.leave(uid)
        if not any(item.node == "n1" for item in cluster.workloads.running.values()):
            comes(generation)
        cluster.later()
    assert len(cluster.evicted()) == 2 * replicas
    (message,) = found(cluster, "returned")
    assert "ReplicaSet mon returned after 2 evictions" in message
    assert len(found(cluster, "stuck")) == 0, "the clock of stuck has not run out yet"


def come_back(cluster: EmptyingCluster, generation: int) -> None:
    """End the work that was evicted; its owner starts it again on the same node."""
    for uid in [uid for uid, item in cluster.workloads.running.items() if item.ending]:
        cluster.leave(uid)
        new = f"run-{generation}"
        cluster.workloads.running[new] = workload("w1", "n1", uid=new, checkpoint=None, origin="job 7")


def test_a_process_that_takes_over_knows_what_came_back_before():
    cluster = unasked(origin="job 7")
    for generation in range(1, 6):
        come_back(cluster, generation)
        cluster.clock.move(MINUTE)
        cluster.restart()
        cluster.round()
    assert len(cluster.evicted()) == 2


@pytest.mark.parametrize("fault", ["refused", "timeout_before", "conflict"])
def test_an_eviction_whose_progress_cannot_be_saved_counts_in_the_next_round(fault):
    cluster = unasked(origin="job 7")
    for generation in range(1, 6):
        come_back(cluster, generation)
        cluster.workloads.faults.plan(fault, "save_progress", skip=1)
        cluster.later()
        cluster.clear_faults()
    assert len(cluster.evicted()) == 2


def test_an_eviction_that_is_accepted_without_effect_is_repeated_once_and_then_reported():
    cluster = unasked(grace=timedelta(days=20))
    calls = []

    def accepted(target, fence):
        calls.append(target.uid)
        return WriteResult("done")

    cluster.runs("w1-uid", state="running")
    cluster.workloads.evicted.clear()
    cluster.workloads.evict = accepted
    rounds(cluster, 60 * 6, 5)
    assert len(calls) <= 2
    (message,) = found(cluster, "hanging")
    assert "survived 2 accepted evictions" in message


def gang(cluster: EmptyingCluster, *, uid: str | None = None, **fields: object) -> None:
    """One job runs on n1 and n2: as two pods, or as one run of a Slurm job on both."""
    for name in ("w1-uid", "w2-uid"):
        cluster.leave(name)
    for node in ("n1", "n2"):
        mine = uid or f"{node}-part"
        key = mine if uid is None else f"{uid}@{node}"
        cluster.workloads.running[key] = workload(
            f"part on {node}", node, uid=mine, gang="train", origin="train", **fields
        )


def test_the_parts_of_one_job_wait_for_each_other_no_longer_than_one_request_may_take():
    cluster = EmptyingCluster(
        settings=replace(FAST, checkpoint=replace(FAST.checkpoint, timeout=30 * MINUTE, max_timeout=30 * MINUTE))
    )
    gang(cluster)
    cluster.scored(n1=0.95)
    cluster.round()
    cluster.acknowledge("n1-part")
    cluster.clock.move(MINUTE)
    cluster.scored(n1=0.95, n2=0.9)  # it joins, and would be waited for until 31 minutes
    cluster.round()
    assert cluster.evicted() == []
    cluster.later(29.5)
    assert cluster.evicted() == ["n1-part"]


def test_a_part_that_may_not_be_moved_keeps_the_other_parts_of_its_job():
    cluster = EmptyingCluster()
    gang(cluster, checkpoint=None)
    cluster.runs("n2-part", opt_out="do-not-disrupt=true")
    cluster.scored(n1=0.95, n2=0.9)
    rounds(cluster, 5)
    assert cluster.evicted() == []
    cluster.runs("n2-part", opt_out=None)
    cluster.later()
    assert sorted(cluster.evicted()) == ["n1-part", "n2-part"]


def test_one_run_of_a_job_on_two_risky_nodes_is_asked_once_and_requeued_once():
    hook = Recording(HookReply("waiting"), HookReply("done"))
    cluster = EmptyingCluster(hooks={"webhook": hook})
    gang(cluster, uid="7.0.1", checkpoint=replace(SCHEDULER, means="webhook"))
    calls = []

    def requeued(target, fence):
        calls.append(target.uid)
        cluster.workloads.running.clear()  # it leaves both nodes
        return WriteResult("done")

    cluster.workloads.evict = requeued
    cluster.scored(n1=0.95, n2=0.9)
    cluster.round()
    assert len(hook.requests) == 1
    cluster.later()
    assert len(hook.requests) == 2
    assert len({key for _, key in hook.requests}) == 1
    assert calls == ["7.0.1"]
    cluster.later()
    assert {entry.phase for entry in cluster.progress().nodes.values()} == {"verifying"}


def test_a_part_that_joins_after_the_answer_of_its_gang_is_due_has_it_asked_again():
    hook = Recording(HookReply("done"))
    cluster = EmptyingCluster(hooks={"webhook": hook})
    cluster.workloads.running.clear()
    for name, node in (("a", "n1"), ("b", "n2"), ("c", "n1"), ("d", "n1")):
        part = workload(name, node, gang="g", checkpoint=replace(SCHEDULER, means="webhook"))
        cluster.workloads.running[part.uid] = part
    cluster.runs("c-uid", opt_out="do-not-disrupt=true")  # it keeps the gang
    cluster.scored(n1=0.95)
    cluster.round()
    assert len(hook.requests) == 1
    cluster.later(60)
    cluster.scored(n1=0.95, n2=0.95)
    cluster.round()
    assert len(hook.requests) == 2, "the checkpoint is an hour old"
    assert len({key for _, key in hook.requests}) == 2


def test_a_leader_whose_clock_is_behind_that_of_the_mark_goes_on_with_the_same_drain():
    cluster = EmptyingCluster()
    cluster.scored(n1=0.9)
    cluster.clock.move(MINUTE)
    cluster.workloads.faults.plan("crash_before", "save_progress")
    with pytest.raises(Crash):
        cluster.round()  # the mark stands, and nothing says yet that it is followed
    cluster.clock.move(timedelta(seconds=-20))
    cluster.scheduler.lease = None
    cluster.restart()
    cluster.round()
    first, began = cluster.workloads.asked["w1-uid"], found(cluster, "started")
    for _ in range(10):
        cluster.clock.move(timedelta(seconds=5))
        cluster.round()
    assert found(cluster, "started") == began
    assert set(began) == {"the node has a drain marker"}
    assert cluster.workloads.asked["w1-uid"] == first


def _blocks(cluster: EmptyingCluster) -> None:
    cluster.runs("w1-uid", checkpoint=None)
    cluster.workloads.blocked["w1-uid"] = "budget"


def _is_empty(cluster: EmptyingCluster) -> None:
    cluster.leave("w1-uid")


def _starts_no_diagnostic(cluster: EmptyingCluster) -> None:
    cluster.leave("w1-uid")
    cluster.verification.start = lambda *_, **__: WriteResult("refused", "no quota")


WAITS = {
    "stuck": (60, lambda c: c.runs("w1-uid", checkpoint=None, opt_out="keep"), lambda c: found(c, "stuck")),
    "deadline": (30, lambda c: None, lambda c: c.evicted()),
    "hanging": (64, lambda c: c.runs("w1-uid", state="ending"), lambda c: found(c, "hanging")),
    "retry": (4, _blocks, lambda c: c.workloads.blocked.clear() or c.evicted()),
    "diagnostic": (240, _is_empty, lambda c: found(c, "escalated")),
    "start": (240, _starts_no_diagnostic, lambda c: found(c, "escalated")),
}


@pytest.mark.parametrize("ahead", [timedelta(0), timedelta(hours=5)])
@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_is_longer_because_the_clock_was_ahead_when_it_began(wait, ahead):
    longest, prepare, over = WAITS[wait]
    cluster = EmptyingCluster(policy=FREE)
    prepare(cluster)
    cluster.scored(n1=0.9)
    cluster.clock.move(ahead)
    for _ in range(3):
        cluster.later()
    cluster.clock.move(-ahead)
    cluster.scheduler.lease = None
    cluster.restart()
    minutes = next(minute for minute in range(600) if not rounds(cluster, 1) or over(cluster))
    assert minutes <= longest + 4


FREE = config(
    "g",
    free=True,
    breaker=BreakerConfig(
        max_risky=1.0, jump=100.0, common_cause=CommonCauseConfig(100), clock_slack=timedelta(days=1)
    ),
)


def test_a_hook_or_diagnostic_that_raises_keeps_no_other_from_its_turn():
    asks = CheckpointOffer("webhook")
    cluster = EmptyingCluster(hooks={"webhook": Recording(HookReply("waiting"))}, policy=FREE)
    cluster.workloads.running = {
        item.uid: item for item in (workload("w1", "n1", checkpoint=asks), workload("w2", "n2", checkpoint=None))
    }
    start, hook = cluster.verification.start, cluster.hooks["webhook"].tell

    def odd(node, *args, **others):
        if node == "n0":
            raise KeyError("spec")
        return start(node, *args, **others)

    cluster.verification.start = odd
    cluster.hooks["webhook"].tell = lambda *_: hook() / 0
    cluster.scored(n0=0.95, n1=0.9, n2=0.9, n3=0.8)
    report = cluster.round()
    assert cluster.evicted() == ["w2-uid"]
    assert {node for node, _ in cluster.verification.started.values()} == {"n3"}
    assert report.errors == ["the diagnostic of n0: KeyError: 'spec'"]
    assert ("checkpoint", "unknown", "w1") in work(report)
    assert cluster.progress().nodes["n2"].evicted == {"w2": 1}


@pytest.mark.parametrize(
    ("part", "call"),
    [("workloads", call) for call in ("on_node", "preview", "evict", "ask_checkpoint", "checkpoint_state")]
    + [("scheduler", "revalidate"), ("verification", "drop")],
)
def test_a_call_that_raises_for_one_node_keeps_no_other_from_its_turn(part, call):
    cluster = EmptyingCluster(policy=FREE)
    asks = CheckpointOffer("scheduler") if "checkpoint" in call else None
    cluster.workloads.running = {
        item.uid: item for item in (workload("w1", "n1", checkpoint=asks), workload("w2", "n2", checkpoint=None))
    }
    cluster.scored(n0=0.95)
    cluster.round()
    target = getattr(cluster, part)
    inner, met = getattr(target, call), []

    def odd(*given, **others):
        node = given[0] if isinstance(given[0], str) else given[0].node
        if node == ("n0" if part == "verification" else "n1") and (part != "scheduler" or cluster.level(node)):
            met.append(node)
            raise KeyError("spec")
        return inner(*given, **others)

    setattr(target, call, odd)
    cluster.clock.move(STEP)
    cluster.change("n0", opt_out="a person")
    cluster.scored(n1=0.9, n2=0.9)
    for _ in range(2):
        cluster.clock.move(timedelta(seconds=1))
        report = cluster.round()
        assert not any(error.startswith("the evacuation") for error in report.errors), report.errors
    assert met
    assert "w2-uid" in cluster.evicted()
    assert "n0" not in cluster.progress().nodes


@pytest.mark.parametrize("reached", [True, False])
def test_a_pause_prolongs_only_a_wait_of_which_nobody_was_asked(reached: bool) -> None:
    cluster = EmptyingCluster()
    cluster.scored(n1=0.9)
    if not reached:
        cluster.workloads.faults.plan("refused", "ask_checkpoint")
    cluster.round()
    deadline = cluster.progress().nodes["n1"].leaving["w1-uid"].deadline
    for cordoned in (True, False):
        cluster.write("n1", lambda target, out=cordoned: replace(target, unschedulable=out))
        cluster.later(2)
    after = cluster.progress().nodes["n1"].leaving["w1-uid"].deadline
    assert (after == deadline) is reached
