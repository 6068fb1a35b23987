"""A node that a hard rule drained: its remedy is asked for, and once it succeeded the node is released."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.fleet import Fact, Level
from policy.node_tier.hard_rules import RULES
from scheduler.evacuation.settings import VerificationSettings
from scheduler.ports.risks import ReportedFacts
from scheduler.ports.workloads import DiagnosticResult
from tests.scheduler.evacuation.emptying_cluster import FAST, EmptyingCluster, findings


def faulty(fact: str, **others) -> EmptyingCluster:
    """Node n1 is drained because of a fact, and empty."""
    cluster = EmptyingCluster(**others)
    cluster.scored(n1=0.01)
    cluster.facts.facts["n1-0"] = ReportedFacts((Fact(fact, cluster.clock.now()),))
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    cluster.leave("w1-uid")
    for _ in range(2):
        cluster.later()
    return cluster


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.tier == "high"], ids=lambda rule: rule.fact)
def test_the_remedy_of_the_rule_is_asked_for_and_the_node_is_released_when_it_succeeded(rule):
    cluster = faulty(rule.fact)
    assert list(cluster.verification.remedies.values()) == [rule.remedy]
    assert cluster.level("n1") is Level.DRAIN, "the remedy is not done yet"
    cluster.verification.results["n1"] = DiagnosticResult("passed")
    for _ in range(2):
        cluster.later()
    assert cluster.level("n1") is not Level.DRAIN, "long before the rule ends by itself"


def test_a_remedy_that_failed_releases_nothing():
    cluster = faulty("xid 79")
    cluster.verification.results["n1"] = DiagnosticResult("failed", "it is still off the bus")
    for _ in range(3):
        cluster.later()
    assert cluster.level("n1") is Level.DRAIN


def test_without_a_hook_people_are_told_once_what_to_do():
    by_hand = replace(FAST, verification=VerificationSettings(method="none"))
    cluster = faulty("xid 79", settings=by_hand)
    for _ in range(3):
        cluster.later()
    escalated = [words for _, kind, words in findings(cluster) if kind == "escalated"]
    assert len(escalated) == 1
    assert "reboot the node" in escalated[0]


def test_a_drain_on_a_prediction_alone_asks_for_no_remedy():
    cluster = EmptyingCluster()
    cluster.scored(n1=0.9)
    cluster.round()
    cluster.leave("w1-uid")
    cluster.later()
    assert list(cluster.verification.remedies.values()) == [None]


@pytest.mark.parametrize(("days", "remedy"), [(6, "replace"), (8, "reboot")])
def test_a_fault_that_is_back_soon_after_its_remedy_asks_for_a_replacement(days, remedy):
    cluster = faulty("xid 79")
    cluster.verification.results["n1"] = DiagnosticResult("passed")
    for _ in range(2):
        cluster.later()
    cluster.clock.move(timedelta(days=days))
    cluster.scored()
    cluster.facts.facts["n1-0"] = ReportedFacts((Fact("xid 79", cluster.clock.now()),))
    for _ in range(3):
        cluster.later()
    assert list(cluster.verification.remedies.values())[-1] == remedy
