"""Readings: pages, listings that expire, answers that are none."""

from collections.abc import Iterator

import pytest

from scheduler.kubernetes.api import ApiServer
from scheduler.ports.errors import SchedulerError
from telemetry.collect.kubernetes.client import KubernetesClient
from tests.scheduler.kubernetes.api_world import World, served
from tests.scheduler.kubernetes.objects import add, node


@pytest.fixture
def world() -> World:
    made = World()
    add(made, *(node(f"n{i}") for i in range(7)))
    return made


@pytest.fixture
def cluster(world: World) -> Iterator[KubernetesClient]:
    with served(world) as made:
        yield made


@pytest.fixture
def api(cluster: KubernetesClient) -> ApiServer:
    return ApiServer(cluster)


def test_what_may_pass_is_tried_again_for_the_time_of_the_settings(api: ApiServer, world: World) -> None:
    world.fail("GET", "nodes/n1", 500, content={"message": "etcd leader changed"})
    world.fail("GET", "nodes/n1")  # cut
    world.fail("GET", "nodes/n1", 429, headers={"Retry-After": "0"})
    result = api.read("/api/v1/nodes/n1")
    assert result is not None
    assert result["metadata"]["name"] == "n1"
    assert world.agents == {"predrain-act/test"}
    world.fail("GET", "nodes", 503, content={"message": "apiserver is shutting down"}, times=99)
    with pytest.raises(SchedulerError, match="HTTP 503: apiserver is shutting down"):
        api.read("/api/v1/nodes/n1")


def test_a_listing_that_expires_is_begun_anew_and_given_up_in_the_end(api: ApiServer, world: World) -> None:
    world.expire_pages = 2
    assert len(api.listing("/api/v1/nodes", {}, 3, lambda raw: raw["metadata"]["name"])) == 7
    world.expire_pages = 99
    with pytest.raises(SchedulerError, match="the listing expired 3 times before its last page"):
        api.listing("/api/v1/nodes", {}, 3, lambda raw: raw["metadata"]["name"])
