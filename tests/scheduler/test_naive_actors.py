"""Known failures of other tools that lie between processes, people and a scheduler, tried against ours."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from policy.fleet import Level
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.ports.risks import ReportedFacts
from tests.policy.decide_world import HOUR, STEP, config, once
from tests.policy.decide_world import node as unscored
from tests.scheduler.cluster import Cluster
from tests.scheduler.evacuation.emptying_cluster import MINUTE
from tests.scheduler.kubernetes.api_world import World, served
from tests.scheduler.kubernetes.objects import LASTS, SETTINGS, Hand, add, node

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.fixture
def hand() -> Iterator[Hand]:
    world = World()
    add(world, node("n1"), node("n2"))
    with served(world) as connection:
        yield Hand(world, connection)


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
        for target in yaml.safe_load_all(file.read_text())
        if target["kind"] in ("Role", "ClusterRole")
        for rule in target["rules"]
    ]
    assert any("pods/eviction" in rule["resources"] for rule in rules)
    for rule in rules:
        if {"pods", "*"} & set(rule["resources"]):
            assert not {"delete", "deletecollection", "*"} & set(rule["verbs"]), rule


def test_a_recovery_that_comes_late_would_cancel_a_fresh_alert_and_does_not():
    cluster = Cluster()
    repaired = cluster.clock.now() - MINUTE
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9)
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    cluster.facts.facts["n1-0"] = ReportedFacts((), repaired)  # told only now, of a repair before the scores
    recovered = {unit for unit, item in cluster.facts.read(cluster.clock.now()).items() if item.valid_from}
    assert recovered == {"n1-0"}, "the naive one: it was repaired, so give it back"
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    cluster.facts.facts["n1-0"] = ReportedFacts((), cluster.clock.now() + MINUTE)
    cluster.clock.move(2 * MINUTE)
    cluster.round()
    assert cluster.level("n1") is Level.NONE, "a repair after them does"


def test_a_node_marked_once_would_never_get_the_taint_of_a_later_worse_alert_and_gets_it():
    cluster = Cluster()
    cluster.scored(n1=0.4)
    cluster.round()
    assert cluster.level("n1") is Level.AVOID
    cluster.clock.move(HOUR)
    cluster.scored(n1=0.9)
    todo = {name for name, risk in cluster.values.items() if risk > 0.6 and not cluster.level(name)}
    assert todo == set(), "the naive one: it is marked already"
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    effects = {(t.value, t.effect) for t in cluster.scheduler.nodes["n1"].object.taints if "predrain" in t.key}
    assert ("high", "NoSchedule") in effects


def test_a_look_at_a_fleet_without_scores_would_open_the_breaker_and_a_release_of_everything_takes_none():
    fleet = [unscored(f"n{i}", None) for i in range(8)]
    assert once(fleet, config(), model_fitted_at=None).open_causes, "the naive one"
    assert not once(fleet, config(), model_fitted_at=None, release_all=True).open_causes
