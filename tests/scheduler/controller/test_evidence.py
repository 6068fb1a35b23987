"""Which scores count for which node."""

from dataclasses import replace

import pytest

from policy.fleet import Fact, Level, UnitView
from scheduler.ports.risks import ReportedFacts
from tests.policy.decide_world import HOUR, STEP, T0
from tests.scheduler.cluster import Cluster, at_risk


def without_names(cluster):
    """A scheduler that does not know which GPUs are in its nodes."""
    for name in cluster.names:
        cluster.change(name, units=())


def test_scores_of_the_machine_before_would_drain_another_one_under_its_name_and_do_not():
    cluster = Cluster()
    without_names(cluster)
    cluster.scored(n1=0.9, n4=0.9)
    cluster.clock.move(HOUR)
    cluster.change("n1", since=T0 + HOUR / 2)  # deleted, and created again
    report = cluster.round()
    assert cluster.level("n4") is Level.DRAIN
    assert cluster.level("n1") is Level.NONE
    assert report.plan is not None
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9)
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN, "what was scored on it since counts"


def test_a_gpu_that_the_scheduler_calls_new_is_so_whatever_else_is_known_of_it():
    cluster = at_risk(n1=0.9, n4=0.9)
    cluster.facts.facts = {f"{node}-0": ReportedFacts((), T0 - HOUR) for node in ("n1", "n4")}
    cluster.change("n1", units=(UnitView("n1-0", valid_from=T0 + HOUR / 2), UnitView("n1-1")))
    cluster.clock.move(HOUR)
    cluster.round()
    assert cluster.levels() == {"n4": Level.DRAIN}


def test_a_gpu_that_the_scheduler_names_is_the_same_one_in_whatever_node():
    cluster = at_risk(n1=0.9)
    cluster.clock.move(HOUR)
    cluster.change("n1", since=T0 + HOUR / 2)
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN


def test_a_node_whose_maintenance_stands_in_the_events_would_be_drained_and_is_not():
    cluster = at_risk(n1=0.9, n4=0.9)
    cluster.facts.facts = {"n1": ReportedFacts(planned=((T0 - HOUR, T0 + HOUR),))}
    cluster.round()
    assert cluster.levels() == {"n4": Level.DRAIN}


def test_a_node_created_anew_between_the_decision_and_its_mark_gets_none():
    cluster = Cluster()
    without_names(cluster)
    cluster.scored(n1=0.9)
    read = cluster.scheduler.revalidate

    def created_anew(node):
        cluster.change(node, since=cluster.clock.now() + HOUR)
        return read(node)

    cluster.scheduler.revalidate = created_anew
    report = cluster.round()
    assert cluster.levels() == {}
    assert "its scores or facts changed since the decision" in {step.message for step in report.steps}


def test_names_that_differ_between_scores_and_scheduler_are_reported():
    cluster = Cluster(nodes=5)
    without_names(cluster)
    assert cluster.round().notes == []
    risks = cluster.risks.risks
    cluster.risks.risks = replace(risks, nodes={f"gpu-{name}": units for name, units in risks.nodes.items()})
    assert cluster.round().notes == [
        "scores of gpu-n0, gpu-n1, gpu-n2 and 2 more match no node: the name is unknown or ambiguous",
        "no scores for n0, n1, n2 and 2 more: not counted, no actions",
    ]


@pytest.mark.parametrize("spelled", ["{}.gpu.example.com", "{}.LOCAL"])
def test_scores_of_a_host_name_are_of_the_schedulers_node(spelled: str):
    cluster = Cluster(nodes=5)
    without_names(cluster)
    cluster.scored(n1=0.9)
    risks = cluster.risks.risks
    nodes = {spelled.format(name).upper(): units for name, units in risks.nodes.items()}
    cluster.risks.risks = replace(risks, nodes=nodes)
    assert cluster.round().notes == []
    assert set(cluster.levels()) == {"n1"}


def test_a_short_name_that_two_nodes_may_have_is_taken_for_neither():
    cluster = Cluster(nodes=2)
    without_names(cluster)
    for name in list(cluster.scheduler.nodes):
        node = cluster.scheduler.nodes.pop(name)
        full = f"n0.{name}.example"
        cluster.scheduler.nodes[full] = replace(node, object=replace(node.object, name=full))
    cluster.scored(n0=0.9)
    cluster.round()
    assert cluster.levels() == {}


def test_a_gpu_that_was_swapped_takes_its_risk_and_its_faults_along():
    cluster = at_risk(n1=0.9)
    cluster.facts.facts = {"n1-0": ReportedFacts((Fact("xid 79", T0),)), "n2-0": ReportedFacts((Fact("xid 79", T0),))}
    cluster.change("n2", units=(UnitView("new"), UnitView("n2-1")))
    cluster.round()
    assert cluster.levels() == {"n1": Level.DRAIN}
    cluster.change("n1", units=(UnitView("newer"), UnitView("n1-1")))
    cluster.clock.move(HOUR)
    cluster.round()
    assert cluster.levels() == {}, "the GPU that it was drained for is gone"


def test_a_node_that_was_renamed_is_judged_by_the_gpus_that_are_in_it():
    cluster = at_risk(n1=0.9)
    others, sick = cluster.scheduler.nodes["n4"].base.units, cluster.scheduler.nodes["n1"].base.units
    cluster.change("n4", units=sick)
    cluster.change("n1", units=others)
    cluster.round()
    assert cluster.levels() == {"n4": Level.DRAIN}


def test_under_a_clock_that_stepped_back_scores_and_faults_of_the_future_take_nothing_out():
    cluster = Cluster()
    cluster.round()
    cluster.clock.move(2 * HOUR)
    cluster.scored(n1=0.9)
    cluster.facts.facts = {"n4-0": ReportedFacts((Fact("xid 79", cluster.clock.now()),))}
    cluster.clock.move(-HOUR)
    cluster.round()
    assert not [name for name, level in cluster.levels().items() if level.hard]
    cluster.clock.move(2 * HOUR)
    cluster.scored(n1=0.9)
    cluster.round()
    assert {name for name, level in cluster.levels().items() if level.hard} == {"n1", "n4"}
