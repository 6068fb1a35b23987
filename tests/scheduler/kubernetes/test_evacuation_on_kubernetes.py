"""Nodes that are emptied on an API server, with other clients, slow pods and other clocks in between."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scheduler.evacuation.settings import VerificationSettings
from scheduler.ports.report import RoundReport
from tests.scheduler.evacuation.emptying_cluster import FAST, found, work
from tests.scheduler.kubernetes.api_world import managed
from tests.scheduler.kubernetes.fleet import JOBS, Fleet
from tests.scheduler.kubernetes.objects import add, pod

PODS = "/api/v1/namespaces/team/pods"
SLOW = {"predrain.io/checkpoint": "annotation", "predrain.io/checkpoint-takes": "5m"}


@pytest.fixture
def fleet(fleet: Fleet) -> Fleet:
    fleet.evacuation = replace(FAST, max_concurrent=1, verification=VerificationSettings())
    fleet.restart()
    return fleet


def rounds(fleet: Fleet, count: int, minutes: int = 1) -> list[RoundReport]:
    reports = []
    for _ in range(count):
        fleet.later(timedelta(minutes=minutes - 1))
        reports.append(fleet.round())
    return reports


def going(fleet: Fleet) -> list[str]:
    return sorted(path.rpartition("/")[2] for path, raw in fleet.world.objects.items()
                  if path.startswith(PODS) and raw["metadata"].get("deletionTimestamp"))  # fmt: skip


def edit(fleet: Fleet, name: str, **metadata: Any) -> None:
    fleet.world.edit(f"{PODS}/{name}", lambda raw: raw["metadata"].update(metadata))


def test_the_pods_of_one_job_on_two_nodes_at_risk_leave_in_one_round_whatever_the_limits_are(fleet: Fleet) -> None:
    add(fleet.world, *(pod(f"p{at}", f"n{at}", owner="Job", annotations=SLOW if at == 2 else {}) for at in (1, 2)))
    for at in (1, 2):
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u-train", "controller": True}
        edit(fleet, f"p{at}", ownerReferences=[owner])
    fleet.world.put(f"{JOBS}/train", {"spec": {"backoffLimit": 6}, "status": {}})
    fleet.scored(n1=0.9, n2=0.9)
    stops = [going(fleet) for _ in range(7) if rounds(fleet, 1)]
    assert stops[0] == [], "the part that can write a checkpoint is waited for"
    assert stops[-1] == ["p1", "p2"]
    assert not [stop for stop in stops if len(stop) == 1], "one stop, not two"


@pytest.mark.parametrize("by", ["predrain", "another client", "its node"])
def test_a_pod_that_hangs_is_named_with_what_keeps_it_and_the_next_one_goes(fleet: Fleet, by: str) -> None:
    grace = 30 * 86_400 if by == "another client" else 45
    add(fleet.world, pod("a", "n1", terminationGracePeriodSeconds=grace), pod("b", "n1", gpus=0))
    edit(fleet, "a", finalizers=["example.com/unmount"])
    if by != "predrain":
        edit(fleet, "a", deletionTimestamp="2026-11-21T11:00:00Z")
    if by == "its node":
        fleet.world.edit("/api/v1/nodes/n1", lambda raw: raw["status"].update(conditions=[]))
    fleet.scored(n1=0.9)
    rounds(fleet, 2)
    assert going(fleet) == (["a", "b"] if by == "its node" else ["a"]), "the place is taken"
    rounds(fleet, 15, 5)
    assert going(fleet) == ["a", "b"]
    (hanging,) = [message for message in found(fleet, "hanging") if "/a:" in message]
    assert "example.com/unmount" in hanging
    assert len(found(fleet, "stuck")) == 1


@pytest.mark.parametrize("ahead", [timedelta(seconds=-50), timedelta(minutes=20)])
def test_a_leader_with_another_clock_goes_on_with_the_same_requests(fleet: Fleet, ahead: timedelta) -> None:
    add(fleet.world, pod("a", "n1", annotations={**SLOW, "predrain.io/checkpoint-takes": "40m"}))
    fleet.scored(n1=0.9)
    rounds(fleet, 2)
    asked = fleet.world.objects[f"{PODS}/a"]["metadata"]["annotations"]["predrain.io/checkpoint-requested"]
    fleet.clock.move(ahead)
    fleet.elapsed.move(seconds=60)
    fleet.restart()
    rounds(fleet, 3)
    annotations = fleet.world.objects[f"{PODS}/a"]["metadata"]["annotations"]
    assert (annotations["predrain.io/checkpoint-requested"], going(fleet)) == (asked, [])
    key = asked.partition('"key": "')[2][:32]
    answer = f'{{"key": "{key}", "at": "2001-01-01T00:00Z"}}'
    edit(fleet, "a", annotations={**annotations, "predrain.io/checkpoint-acknowledged": answer})
    rounds(fleet, 1)
    assert going(fleet) == ["a"], "an answer is known by its key, whatever its clock"


OTHERS: dict[str, Any] = {
    "a person drains it": lambda raw: (raw["spec"].update(unschedulable=True),
                                       raw["metadata"].update(managedFields=managed("kubectl-drain"))),
    "the autoscaler removes it": lambda raw: raw["spec"].setdefault("taints", []).append(
        {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}),
    "the driver manager cordons it": lambda raw: raw["metadata"]["labels"].update(
        {"nvidia.com/gpu.deploy.dcgm": "paused-for-driver-upgrade"}),
    "Karpenter ends it": lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-21T12:02:00Z"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_what_another_client_empties_is_left_to_it(fleet: Fleet, what: str) -> None:
    add(fleet.world, pod("a", "n1", annotations=SLOW))
    fleet.scored(n1=0.9)
    rounds(fleet, 1)
    fleet.world.edit("/api/v1/nodes/n1", OTHERS[what])
    reports = rounds(fleet, 3, 5)
    assert going(fleet) == []
    assert all(("hold", "held", None) in work(report) for report in reports), "and each round says why"
