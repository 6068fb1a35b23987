"""Calls to nodes that are known are recorded together before the first of them, and what becomes of each too."""

from __future__ import annotations

from datetime import timedelta

import pytest

from policy.breaker import BreakerConfig, CommonCauseConfig
from policy.budget import BudgetConfig
from policy.fleet import Level
from scheduler.controller import executor
from scheduler.file import LeaseEntry
from scheduler.ports.readings import Switches
from tests.policy.decide_world import HOUR, config
from tests.scheduler.cluster import Cluster
from tests.scheduler.faults import Crash

SICK = {"n1": 0.9, "n2": 0.9, "n3": 0.9}


@pytest.fixture
def cluster() -> Cluster:
    breaker = BreakerConfig(max_risky=1.0, jump=100.0, common_cause=CommonCauseConfig(100))
    policy = config("g", budget=BudgetConfig((), ()), breaker=breaker)
    made = Cluster(policy=policy, lease=timedelta(seconds=30))
    made.knows_nodes()
    made.scored(**SICK)
    made.scheduler.faults.calls.clear()
    return made


def settled(cluster: Cluster) -> list[tuple[str, str, str]]:
    """What became of each recorded call."""
    rows = cluster.ledger._read(
        "SELECT i.verb, i.node, s.kind FROM intents i JOIN settled s ON s.intent = i.id ORDER BY i.id"
    )
    return [tuple(row) for row in rows]


def test_calls_are_recorded_in_groups_before_the_first_and_no_known_node_is_read_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_TOGETHER", 2)
    intend, groups = cluster.ledger.intend, []

    def intended(*intents):
        groups.append(([intent.node for intent in intents], cluster.scheduler.faults.calls.count("apply")))
        return intend(*intents)

    cluster.ledger.intend = intended
    report = cluster.round()
    assert not report.failed
    assert set(cluster.levels().values()) == {Level.DRAIN}
    assert groups[:2] == [(["n1", "n2"], 0), (["n3"], 2)]
    applied = [intent for intent in settled(cluster) if intent[0] == "swap"]
    assert applied == [("swap", name, "done") for name in SICK]
    first_write = cluster.scheduler.faults.calls.index("apply")
    assert "revalidate" not in cluster.scheduler.faults.calls[:first_write]


def test_a_call_that_was_recorded_and_then_not_made_is_settled_so(cluster: Cluster) -> None:
    apply = cluster.scheduler.apply

    def killed(action, precondition):
        cluster.scheduler.switches = Switches(kill=True)
        return apply(action, precondition)

    cluster.scheduler.apply = killed
    cluster.round()
    assert cluster.levels() == {"n1": Level.SWAP}
    assert settled(cluster) == [("swap", "n1", "done"), ("swap", "n2", "refused"), ("swap", "n3", "refused")]
    assert cluster.ledger.unsettled() == ()


def test_a_node_that_changed_since_is_read_again_and_its_call_recorded_again(cluster: Cluster) -> None:
    apply = cluster.scheduler.apply

    def raced(action, precondition):
        cluster.scheduler.apply = apply
        cluster.change("n2", rack="r9")
        cluster.change("n2", rack="r0")
        return apply(action, precondition)

    cluster.scheduler.apply = raced
    report = cluster.round()
    assert not report.failed
    assert cluster.level("n2") is Level.DRAIN
    assert [row for row in settled(cluster) if row[:2] == ("swap", "n2")] == [
        ("swap", "n2", "conflict"), ("swap", "n2", "done"),
    ]  # fmt: skip


def test_after_a_crash_every_recorded_call_is_looked_at(cluster: Cluster) -> None:
    cluster.scheduler.faults.plan("crash_after", "apply", skip=1)
    with pytest.raises(Crash):
        cluster.round()
    assert [intent.node for _, intent in cluster.ledger.unsettled()] == ["n2", "n3"]
    cluster.restart()
    cluster.clock.move(timedelta(minutes=1))
    report = cluster.round()
    assert [note.partition(":")[0] for note in report.notes] == [f"swap {n} was interrupted" for n in ("n2", "n3")]
    assert [row for row in settled(cluster) if row[0] == "swap"] == [
        ("swap", "n1", "done"), ("swap", "n2", "found"), ("swap", "n3", "not_found"), ("swap", "n3", "done"),
    ]  # fmt: skip
    assert set(cluster.levels().values()) == {Level.DRAIN}


def test_a_lost_lease_leaves_no_call_open(cluster: Cluster) -> None:
    apply = cluster.scheduler.apply

    def slept(action, precondition):
        answer = apply(action, precondition)
        cluster.clock.move(timedelta(seconds=40))
        cluster.scheduler.lease = LeaseEntry("another", cluster.clock.now() + HOUR)
        return answer

    cluster.scheduler.apply = slept
    assert not cluster.round().active
    assert settled(cluster) == [("swap", "n1", "done"), ("swap", "n2", "refused"), ("swap", "n3", "refused")]
    assert cluster.ledger.unsettled() == ()
