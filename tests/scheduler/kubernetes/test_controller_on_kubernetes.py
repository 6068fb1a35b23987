"""The controller on an API server: another installation, and answers of 200 that are no answers."""

import copy
from dataclasses import replace
from datetime import timedelta

import pytest

from scheduler.ports.readings import Switches
from tests.scheduler.kubernetes.fleet import NAMES, Fleet
from tests.scheduler.kubernetes.objects import SETTINGS, add, pod


def test_another_installation_leaves_marks_and_condition_alone_and_reports_them(fleet: Fleet) -> None:
    other = Fleet(fleet.cluster, fleet.world, replace(SETTINGS, lease="other", state="other-state"))
    fleet.scored(n1=0.9)
    fleet.round()
    before = copy.deepcopy(fleet.world.objects["/api/v1/nodes/n1"])
    assert fleet.ours("n1") == ["NoSchedule"]
    for value in (0.9, 0.01):
        other.scored(n1=value, n2=value)
        report = other.round()
        assert fleet.world.objects["/api/v1/nodes/n1"] == before
        assert "belong to another installation, predrain/predrain-controller" in "; ".join(report.plan.reasons)
    other.controller.scheduler.set_switches(Switches(release_all=True))
    other.round()
    assert fleet.world.objects["/api/v1/nodes/n1"] == before
    fleet.later(timedelta(days=2))
    other.round()
    assert fleet.world.objects["/api/v1/nodes/n1"]["status"] == before["status"], "its owner corrects the condition"
    fleet.round()
    assert fleet.named_ours("n1") == set()


def test_a_node_that_is_drained_in_one_round_has_the_condition_that_other_tools_read(fleet: Fleet) -> None:
    fleet.scored(n1=0.9)
    fleet.round()
    assert fleet.ours("n1") == ["NoSchedule"]
    conditions = fleet.world.objects["/api/v1/nodes/n1"]["status"]["conditions"]
    predicted = [(one["status"], one["reason"]) for one in conditions if one["type"] == "GPUFailurePredicted"]
    assert predicted == [("True", "RiskHigh")]


@pytest.mark.parametrize("fault", [{"status": 429, "headers": {"Retry-After": "1000000000"}}, {"status": 0}])
@pytest.mark.parametrize("path", ["nodes$", "nodes/n1", "leases", "configmaps", "pods$"])
def test_a_release_that_a_fault_of_the_server_stops_is_done_in_the_next_round(fleet, path, fault):
    add(fleet.world, pod("p0", "n2"))
    fleet.scored(n1=0.9)
    fleet.round()
    assert fleet.ours("n1") == ["NoSchedule"]
    fleet.later(timedelta(days=2))
    for method in ("GET", "PUT", "PATCH", "POST"):
        fleet.world.fail(method, path, times=99, **fault)
    report = fleet.round()
    assert report.failed
    assert "429: " in str(report.to_json()) or not fault["status"]
    fleet.world.faults.clear()
    fleet.round()
    assert fleet.named_ours("n1") == set()


def test_a_lease_that_may_not_be_read_keeps_no_overdue_mark(fleet: Fleet) -> None:
    fleet.scored(n1=0.9, n2=0.4)
    fleet.round()
    fleet.later(timedelta(days=2))
    fleet.world.fail("GET", "leases", 403, content={"message": "forbidden"}, times=99)
    report = fleet.round()
    assert "forbidden" in report.errors[0]
    assert fleet.named_ours("n1") == fleet.named_ours("n2") == set()


@pytest.mark.parametrize("content", [{"items": None, "metadata": {}}, {"metadata": {"name": "another"}}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "nodes$"), ("GET", "nodes/n2"), ("GET", "pods$"), ("GET", "configmaps"), ("GET", "leases"),
        ("PUT", "leases"), ("PUT", "configmaps"), ("PATCH", "nodes/n2$"), ("PATCH", "nodes/n2/status"),
    ],
)  # fmt: skip
def test_an_answer_of_200_that_is_something_else_would_be_taken_for_done_and_reports_nothing(
    fleet: Fleet, method: str, path: str, content: dict
) -> None:
    add(fleet.world, pod("p0", "n2"))
    fleet.scored(n0=0.45)
    fleet.round()
    fleet.controller.scheduler.set_switches(Switches(kill=True))
    fleet.scored(n0=0.45, n2=0.9)
    fleet.world.fail(method, path, 200, content=content, times=99)
    fleet.round()
    assert fleet.ours("n2") == [], "whatever was answered, the kill switch is not forgotten"
    fleet.world.faults.clear()
    fleet.controller.scheduler.set_switches(Switches())
    fleet.later(timedelta(hours=1))
    fleet.scored()
    fleet.world.fail(method, path, 200, content=content, times=99)
    fleet.round()
    out = [name for name in NAMES if "NoSchedule" in fleet.ours(name)]
    assert out in ([], ["n2"])
    fleet.world.faults.clear()
    fleet.later(timedelta(minutes=5))
    fleet.round()
    assert fleet.ours("n0") == ["PreferNoSchedule"], "nothing was taken for gone, or for a person's hand"
    assert fleet.ours("n2") == ["NoSchedule"]
