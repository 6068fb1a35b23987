"""Jobs whose pods hold GPUs by resource claims."""

import pytest

from policy.fleet import JobView
from tests.scheduler.kubernetes.api_world import Raw, World
from tests.scheduler.kubernetes.objects import Hand, add, pod

GROUP = "/apis/resource.k8s.io"


def claim(name: str, gpus: int, nics: int = 0) -> Raw:
    devices = [("gpu.nvidia.com", "gpu", gpus), ("nic.example", "nic", nics)]
    results = [
        {"request": "r", "driver": driver, "pool": "n1", "device": f"{kind}-{at}"}
        for driver, kind, count in devices
        for at in range(count)
    ]
    return {
        "metadata": {"name": name, "namespace": "team"}, "status": {"allocation": {"devices": {"results": results}}},
    }  # fmt: skip


def claiming(name: str, on: str, *claims: str, gpus: int = 0) -> Raw:
    asked = [{"name": f"c{at}", "resourceClaimName": item} for at, item in enumerate(claims)]
    return pod(name, on, gpus=gpus, resourceClaims=asked)


def gpus(hand: Hand) -> dict[str, list[int]]:
    def of(jobs: tuple[JobView, ...]) -> list[int]:
        return [job.gpus for job in jobs]

    return {node.view.name: of(node.view.jobs) for node in hand.scheduler.read_fleet().nodes}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_job_is_as_large_as_its_requests_and_claims_together(world: World, hand: Hand, version: str) -> None:
    world.discovery[f"{GROUP}/{version}"] = {"resources": []}
    world.kinds = ("/resourceclaims",)
    for item in (claim("four", 4, nics=2), claim("two", 2)):
        path = f"{GROUP}/{version}/resourceclaims"
        world.put(f"{path}/{item['metadata']['name']}", item)
    add(world, claiming("p1", "n1", "four"), claiming("p2", "n2", "two", "unknown", gpus=1))
    assert gpus(hand) == {"n1": [8], "n2": [8]}, "4 + (1 + 2 + one that is not known)"
    reading = hand.scheduler.revalidate("n2")
    assert [job.gpus for job in reading.view.jobs] == [8]


def test_without_claims_nobody_is_asked_and_without_the_right_each_counts_as_one(world: World, hand: Hand) -> None:
    add(world, pod("p0", "n1"))
    assert gpus(hand) == {"n1": [8], "n2": []}
    assert not [path for _, path in world.asked if "resource.k8s.io" in path]
    add(world, claiming("p1", "n2", "four"))
    world.discovery[f"{GROUP}/v1"] = {"resources": []}
    world.fail("GET", "resourceclaims", 403, content={"message": "no"}, times=9)
    assert gpus(hand) == {"n1": [9], "n2": [9]}
    assert hand.scheduler.read_fleet().error is None


def test_a_claim_that_pods_of_one_job_share_counts_once(world: World, hand: Hand) -> None:
    world.discovery[f"{GROUP}/v1"] = {"resources": []}
    world.kinds = ("/resourceclaims",)
    world.put(f"{GROUP}/v1/resourceclaims/four", claim("four", 4))
    alone, beside = claiming("p1", "n1", "four"), claiming("p2", "n1", "four", gpus=1)
    add(world, alone, beside, claiming("p3", "n2", "four"))
    assert gpus(hand) == {"n1": [5], "n2": [5]}, "4 + 1, and not 4 for each pod"
