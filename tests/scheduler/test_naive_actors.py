"""Known failures of other tools, each first done by an actor that guards against nothing, then tried against ours.

What stands here are the rows of docs/failure-table.md whose failure lies between processes, people and a scheduler;
those of the decision itself are in tests/policy/test_decide_failures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from policy.fleet import Level
from policy.plan import Action
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.ports.errors import SchedulerError
from scheduler.ports.node_object import after
from scheduler.ports.readings import Precondition
from scheduler.ports.risks import Facts
from scheduler.slurm.node import NodeChange
from tests.policy.decide_world import HOUR, STEP, config, once
from tests.policy.decide_world import node as unscored
from tests.scheduler.cluster import Cluster
from tests.scheduler.evacuation.emptying_cluster import MINUTE, draining
from tests.scheduler.faults import Crash
from tests.scheduler.kubernetes.api_world import World, served
from tests.scheduler.kubernetes.objects import LASTS, SETTINGS, Hand, add, node, pod
from tests.scheduler.slurm.slurm_world import World as SlurmWorld
from tests.scheduler.slurm.slurm_world import action, release

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
OURS = {"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule"}
THEIRS = {"key": "team.example/reserved", "value": "x", "effect": "NoSchedule"}
NODE = "/api/v1/nodes/n1"
MERGE = "application/merge-patch+json"


@pytest.fixture
def hand() -> Iterator[Hand]:
    world = World()
    add(world, node("n1"), node("n2"))
    with served(world) as connection:
        yield Hand(world, connection)


def taints(hand: Hand) -> list[str]:
    return [each["key"] for each in hand.raw()["spec"].get("taints", ())]


def add_theirs(hand: Hand) -> None:
    hand.world.edit(NODE, lambda each: each["spec"].update(taints=[*each["spec"].get("taints", ()), THEIRS]))


def test_a_merge_patch_of_the_taints_would_erase_another_tools_and_a_tested_patch_does_not(hand):
    seen = hand.raw()["spec"].get("taints", [])
    add_theirs(hand)
    patch = {"metadata": {}, "spec": {"taints": [*seen, OURS]}}
    assert hand.world.serve("PATCH", NODE, {}, patch, MERGE)[0] == 200
    assert taints(hand) == ["predrain.io/at-risk"], "the naive one: theirs is gone, and nobody was told"

    hand.world.edit(NODE, lambda each: each["spec"].pop("taints"))
    preview, reading = hand.scheduler.preview, hand.scheduler.revalidate("n1")
    assert preview((hand.action("taint"),), reading)[0]
    add_theirs(hand)
    assert hand.do("taint").kind == "done"
    assert taints(hand) == ["team.example/reserved", "predrain.io/at-risk"]
    assert hand.do("release").kind == "done"
    assert taints(hand) == ["team.example/reserved"]


def test_an_uncordon_at_the_end_would_put_a_node_back_that_a_person_cordoned_and_a_release_does_not(hand):
    hand.do("drain")
    hand.world.edit(NODE, lambda each: each["spec"].update(unschedulable=True))  # a person, during our drain
    assert hand.do("release").kind == "done"
    assert hand.raw()["spec"]["unschedulable"] is True

    hand.world.serve("PATCH", NODE, {}, {"metadata": {}, "spec": {"unschedulable": None}}, MERGE)
    assert "unschedulable" not in hand.raw()["spec"], "the naive one, which cordons and uncordons without an owner"


def test_a_first_page_taken_for_the_whole_list_would_call_a_busy_node_empty(hand):
    add(hand.world, pod("a", "n2"), pod("b", "n1"))
    on_n1 = [each for each in _pages(hand, pages=1) if each["spec"]["nodeName"] == "n1"]
    assert on_n1 == [], "the naive one, whose next page was answered by 410"
    hand.world.expire_pages = 1
    whole = hand.scheduler.api.listing("/api/v1/pods", {}, 1, lambda each: each["metadata"]["name"])
    assert whole == ["a", "b"]


def _pages(hand: Hand, pages: int) -> list[dict]:
    items: list[dict] = []
    after = "0"
    for _ in range(pages):
        listing = hand.world.serve("GET", "/api/v1/pods", {"limit": "1", "continue": after}, None, "")[1]
        items += listing["items"]
        after = listing["metadata"].get("continue", "0")
    return items


def test_a_lease_judged_by_the_wall_clock_would_be_taken_from_a_living_leader_after_a_jump(hand):
    with served(hand.world) as connection:
        other = KubernetesScheduler(connection, hand.clock, SETTINGS, elapsed=hand.elapsed, sleep=hand.elapsed.sleep)
        assert other.hold_lease("other", LASTS) is None
        until = hand.clock.now() + LASTS
        hand.clock.move(timedelta(days=1))  # a clock is set: no second of the lease has passed
        assert hand.clock.now() > until, "the naive one: expired, so it is mine"
        assert other.hold_lease("other", LASTS) is None
        hand.elapsed.now += 2 * LASTS.total_seconds()
        assert other.hold_lease("other", LASTS) is not None, "unchanged for its whole time by our own watch"


def test_no_role_of_ours_may_delete_a_pod_so_that_a_stuck_budget_cannot_be_forced():
    rules = [
        rule
        for file in sorted(DEPLOY.glob("*-rbac.yaml"))
        for thing in yaml.safe_load_all(file.read_text())
        if thing["kind"] in ("Role", "ClusterRole")
        for rule in thing["rules"]
    ]
    assert any("pods/eviction" in rule["resources"] for rule in rules)
    for rule in rules:
        if {"pods", "*"} & set(rule["resources"]):
            assert not {"delete", "deletecollection", "*"} & set(rule["verbs"]), rule


def test_a_drain_that_overwrites_a_reason_would_bring_a_broken_node_back_and_ours_leaves_it(tmp_path):
    world = SlurmWorld(tmp_path / "naive")
    world.slurm.person("n0", "DRAIN", "ADMIN SHUTDOWN")
    world.slurm.update("n0", NodeChange(state="DRAIN", reason="predrain: high"))  # its state was not read first
    world.slurm.update("n0", NodeChange(state="UNDRAIN"))
    assert world.slurm.all["n0"].out == frozenset(), "the naive one: a broken node serves again"

    ours = SlurmWorld(tmp_path / "ours")
    ours.slurm.person("n0", "DRAIN", "ADMIN SHUTDOWN")
    stands = ours.slurm.all["n0"]
    for each in (action("taint"), release()):
        ours.apply(each)
    assert ours.slurm.all["n0"] == stands


def test_a_plan_carried_out_as_it_was_made_would_hit_a_node_that_changed_and_a_re_read_does_not():
    naive = Cluster()
    naive.scored(n1=0.9)
    actions = naive.controller.rehearse().plan.actions
    _opt_out(naive)
    for each in actions:
        _blindly(naive, each)
    assert naive.level("n1") is Level.DRAINED, "the naive one acts on what it read before"

    ours = Cluster()
    ours.scored(n1=0.9)
    read, opted = ours.scheduler.revalidate, []

    def meanwhile(name):
        if not opted:
            opted.append(name)
            _opt_out(ours)
        return read(name)

    ours.scheduler.revalidate = meanwhile
    ours.round()
    assert opted
    assert ours.level("n1") is Level.NONE


def _opt_out(cluster: Cluster) -> None:
    cluster.write("n1", lambda each: replace(each, labels={"predrain.io/managed": "false"}))


def _blindly(cluster: Cluster, given: Action) -> None:
    cluster.write(given.node, lambda each: after(given, each, cluster.scheduler.keys, cluster.clock.now()))


def test_a_recovery_that_comes_late_would_cancel_a_fresh_alert_and_does_not():
    cluster = Cluster()
    repaired = cluster.clock.now() - MINUTE
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9)
    cluster.round()
    assert cluster.level("n1") is Level.DRAINED
    cluster.facts.facts["n1-0"] = Facts((), repaired)  # told only now, of a repair before the scores
    recovered = {unit for unit, each in cluster.facts.read(cluster.clock.now()).items() if each.valid_from}
    assert recovered == {"n1-0"}, "the naive one: it was repaired, so give it back"
    cluster.round()
    assert cluster.level("n1") is Level.DRAINED
    cluster.facts.facts["n1-0"] = Facts((), cluster.clock.now() + MINUTE)
    cluster.clock.move(2 * MINUTE)
    cluster.round()
    assert cluster.level("n1") is Level.NONE, "a repair after them does"


def test_a_node_marked_once_would_never_get_the_taint_of_a_later_worse_alert_and_gets_it():
    cluster = Cluster()
    cluster.scored(n1=0.4)
    cluster.round()
    assert cluster.level("n1") is Level.SOFT
    cluster.clock.move(HOUR)
    cluster.scored(n1=0.9)
    todo = {name for name, risk in cluster.values.items() if risk > 0.6 and not cluster.level(name)}
    assert todo == set(), "the naive one: it is marked already"
    cluster.round()
    assert cluster.level("n1") is Level.DRAINED
    effects = {(t.value, t.effect) for t in cluster.scheduler.nodes["n1"].object.taints if "predrain" in t.key}
    assert ("high", "NoSchedule") in effects


def test_a_new_leader_without_the_progress_would_begin_every_deadline_anew_and_goes_on_with_it():
    naive = draining()
    for _ in range(3):
        naive.clock.move(4 * MINUTE)
        naive.workloads.text = None  # what another process would know that keeps its progress in memory
        naive.restart()
        naive.round()
    assert naive.evicted() == [], "the naive one: twelve minutes, and the deadline of five never comes"
    ours = draining()
    for _ in range(3):
        ours.clock.move(4 * MINUTE)
        ours.restart()
        ours.round()
    assert ours.evicted() == ["w1-uid"]


def test_an_eviction_by_name_would_hit_the_pod_that_came_since_and_one_by_uid_does_not(hand):
    add(hand.world, pod("a", "n1"))
    path = "/api/v1/namespaces/team/pods/a"
    old = hand.world.objects[path]["metadata"]["uid"]
    del hand.world.objects[path]
    add(hand.world, pod("a", "n1"))
    came = hand.world.objects[path]["metadata"]["uid"]
    assert came != old
    by_uid = {"deleteOptions": {"preconditions": {"uid": old}}}
    assert hand.world.serve("POST", f"{path}/eviction", {}, by_uid, "application/json")[0] == 409
    assert "deletionTimestamp" not in hand.world.objects[path]["metadata"]
    by_name = {"deleteOptions": {"preconditions": {"uid": came}}}  # what a server does that is told no uid
    assert hand.world.serve("POST", f"{path}/eviction", {}, by_name, "application/json")[0] == 201


def test_an_accepted_eviction_taken_for_done_would_test_a_node_under_its_job_and_is_waited_for():
    cluster = draining()
    cluster.acknowledge("w1-uid")
    report = cluster.later()
    assert [step.outcome for step in report.work if step.verb == "evict"] == ["done"], "the naive one: drained"
    assert cluster.workloads.running["w1-uid"].ending
    for _ in range(3):
        cluster.later()
        assert cluster.progress().nodes["n1"].phase == "emptying"
        assert cluster.verification.faults.calls == []
    cluster.leave("w1-uid")
    cluster.later()
    assert cluster.progress().nodes["n1"].phase == "verifying"


def test_a_risk_of_one_would_read_as_nothing_left_and_be_reset_and_is_drained():
    left = 1.0 - 1.0  # what is left until the failure, as a number that is false
    assert not left, "the naive one: no expectancy, so its warning is taken back"
    cluster = Cluster()
    cluster.scored(n1=1.0)
    cluster.round()
    assert cluster.level("n1") is Level.DRAINED


def test_a_deletion_would_pass_a_budget_by_and_an_eviction_is_held_back_by_it(hand):
    path = "/api/v1/namespaces/team/pods/a"
    for naive in (False, True):
        add(hand.world, pod("a", "n1"))
        hand.world.budgets[path] = "train-pdb"
        if naive:
            del hand.world.objects[path]  # what a server does with a deletion: no budget is asked
            assert path not in hand.world.objects
            continue
        uid = hand.world.objects[path]["metadata"]["uid"]
        asked = {"deleteOptions": {"preconditions": {"uid": uid}}}
        assert hand.world.serve("POST", f"{path}/eviction", {}, asked, "application/json")[0] == 429
        assert "deletionTimestamp" not in hand.world.objects[path]["metadata"]


def test_a_leader_that_woke_up_would_write_beside_the_new_one_and_its_lease_stops_it():
    for naive in (True, False):
        cluster = Cluster(lease=timedelta(seconds=30))
        cluster.scored(n1=0.9)
        actions = cluster.controller.rehearse().plan.actions
        reading = cluster.scheduler.revalidate("n1")
        until = cluster.scheduler.hold_lease("p1", timedelta(seconds=30))
        cluster.clock.move(timedelta(seconds=31))  # it sleeps
        assert cluster.scheduler.hold_lease("p2", HOUR) is not None
        if naive:
            _blindly(cluster, actions[0])
            assert cluster.level("n1") is Level.PUBLISHED
            continue
        old = Precondition(reading.version, reading.boot_id, reading.view.marks, "p1", until)
        assert cluster.scheduler.apply(actions[0], old).kind == "refused"
        assert cluster.level("n1") is Level.NONE


def test_a_call_written_down_afterwards_would_be_forgotten_in_a_crash_and_an_intent_is_not():
    cluster = Cluster()
    cluster.scored(n1=0.9)
    afterwards: list[str] = []
    cluster.scheduler.faults.plan("crash_after", "apply", skip=1)
    try:
        cluster.round()
        afterwards.append("taint n1")
    except Crash:
        pass
    assert cluster.level("n1") is Level.TAINTED
    assert afterwards == [], "the naive one: a taint of which no record tells"
    ((_, intent),) = cluster.ledger.unsettled()
    assert (intent.verb, intent.node) == ("taint", "n1")
    cluster.clock.move(MINUTE)
    cluster.restart()
    cluster.round()
    assert cluster.ledger.unsettled() == ()
    assert cluster.level("n1") is Level.DRAINED


def test_every_422_read_as_a_conflict_would_be_tried_for_ever_and_a_refusal_is_told_apart(hand):
    json_patch = "application/json-patch+json"
    changed = [{"op": "test", "path": "/metadata/resourceVersion", "value": "1"}]
    invalid = [{"op": "add", "path": "/spec/taints", "value": [{**OURS, "key": "no!key"}]}]
    statuses = [hand.world.serve("PATCH", NODE, {}, patch, json_patch)[0] for patch in (changed, invalid)]
    assert statuses == [422, 422], "the naive one cannot tell a node that changed from a value that is never taken"

    reading = hand.scheduler.revalidate("n1")
    add_theirs(hand)
    stale = Precondition(reading.version, reading.boot_id, reading.view.marks, "me", hand.clock.now() + LASTS)
    assert hand.scheduler.apply(hand.action("taint"), stale).kind == "conflict"
    hand.world.fail("PATCH", "nodes/n1", 422, content={"message": "Node is invalid"})
    assert hand.do("taint").kind == "refused"


def test_an_error_read_as_an_empty_list_would_call_a_busy_node_empty_and_is_no_list():
    cluster = draining()
    cluster.workloads.faults.plan("unreadable", "on_node")
    try:
        listed = cluster.workloads.on_node("n1")
    except SchedulerError:
        listed = ()
    assert listed == (), "the naive one: nothing runs on it"
    cluster.workloads.faults.plan("unreadable", "on_node")
    report = cluster.later()
    assert "what runs on n1 cannot be listed" in report.errors[0]
    assert cluster.progress().nodes["n1"].phase == "emptying"


def test_a_look_at_a_fleet_without_scores_would_open_the_breaker_and_a_release_of_everything_takes_none():
    fleet = [unscored(f"n{i}", None) for i in range(8)]
    assert once(fleet, config(), model_fitted_at=None).open_causes, "the naive one"
    assert not once(fleet, config(), model_fitted_at=None, release_all=True).open_causes
