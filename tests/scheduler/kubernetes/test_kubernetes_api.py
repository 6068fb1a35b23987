"""Requests: what is tried again and for how long, what an answer without an answer means, pages, rates."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from scheduler.kubernetes.api import ApiServer, NoAnswerError
from scheduler.kubernetes.rate import TokenBucket
from scheduler.ports.errors import SchedulerError
from telemetry.collect.kubernetes.client import Cluster
from tests.scheduler.kubernetes.api_world import World, served
from tests.scheduler.kubernetes.objects import QUICK, Elapsed, add, node


@pytest.fixture
def world() -> World:
    made = World()
    add(made, *(node(f"n{i}") for i in range(7)))
    return made


@pytest.fixture
def cluster(world: World) -> Iterator[Cluster]:
    with served(world) as made:
        yield made


@pytest.fixture
def elapsed() -> Elapsed:
    return Elapsed()


@pytest.fixture
def api(cluster: Cluster, elapsed: Elapsed) -> ApiServer:
    return ApiServer(cluster, QUICK, elapsed, elapsed.sleep)


def test_what_may_pass_is_tried_again_when_the_server_says(api: ApiServer, world: World, elapsed: Elapsed) -> None:
    world.fail("GET", "nodes/n1", 500, content={"message": "etcd leader changed"})
    world.fail("GET", "nodes/n1")  # cut
    world.fail("GET", "nodes/n1", 429, headers={"Retry-After": "0"})
    found = api.read("/api/v1/nodes/n1")
    assert found is not None
    assert found["metadata"]["name"] == "n1"
    assert len(elapsed.slept) == 3
    assert elapsed.slept[2] == 0
    assert world.agents == {"predrain-act/test"}


def test_a_wait_that_is_longer_than_our_patience_is_not_waited(api: ApiServer, world: World, elapsed: Elapsed) -> None:
    world.fail("GET", "nodes/n1", 429, headers={"Retry-After": "30"}, times=9)
    with pytest.raises(SchedulerError, match=r"GET /api/v1/nodes/n1: HTTP 429"):
        api.read("/api/v1/nodes/n1")
    assert elapsed.slept == []


def test_patience_ends(api: ApiServer, world: World, elapsed: Elapsed) -> None:
    world.fail("GET", "nodes", 503, content={"message": "apiserver is shutting down"}, times=99)
    with pytest.raises(SchedulerError, match="HTTP 503: apiserver is shutting down"):
        api.read("/api/v1/nodes/n1")
    assert 0.3 < elapsed.now < QUICK.patience.total_seconds()


def test_silence_is_an_unknown_and_a_closed_door_is_not(cluster: Cluster, world: World) -> None:
    world.fail("PATCH", "nodes", 200, delay_s=0.4, times=9)
    with pytest.raises(NoAnswerError, match="timed out") as silent:
        ApiServer(cluster, QUICK).ask("PATCH", "/api/v1/nodes/n1", body=[], within=timedelta(seconds=0.5))
    assert silent.value.sent
    cluster.host = "http://127.0.0.1:9"
    with pytest.raises(NoAnswerError, match="cannot be reached") as closed:
        ApiServer(cluster, QUICK).ask("PATCH", "/api/v1/nodes/n1", body=[], within=timedelta(seconds=0.3))
    assert not closed.value.sent


def test_a_listing_is_read_page_by_page(api: ApiServer, world: World) -> None:
    names, version = api.listing("/api/v1/nodes", {}, 3, lambda each: each["metadata"]["name"])
    assert names == [f"n{i}" for i in range(7)]
    assert version == str(world.version)
    assert [(each.get("limit"), each.get("continue")) for each in world.params] == [
        ("3", None), ("3", "3"), ("3", "6"),
    ]  # fmt: skip


def test_a_listing_that_expires_is_begun_anew_and_given_up_in_the_end(api: ApiServer, world: World) -> None:
    world.expire_pages = 2
    assert len(api.listing("/api/v1/nodes", {}, 3, lambda each: each["metadata"]["name"])[0]) == 7
    world.expire_pages = 99
    with pytest.raises(SchedulerError, match="the listing expired 3 times before its last page"):
        api.listing("/api/v1/nodes", {}, 3, lambda each: each["metadata"]["name"])


def test_what_is_not_json_or_no_listing_is_an_error(api: ApiServer, world: World) -> None:
    world.fail("GET", "nodes", 200, content={"items": {}}, times=1)
    with pytest.raises(SchedulerError, match="the answer is no listing"):
        api.listing("/api/v1/nodes", {}, 3, lambda each: each)
    world.fail("GET", "nodes", 403, content={"message": 'User "x" cannot list resource "nodes"'})
    with pytest.raises(SchedulerError, match='HTTP 403: User "x" cannot list resource "nodes"'):
        api.listing("/api/v1/nodes", {}, 3, lambda each: each)


def test_requests_are_held_to_their_rate_after_a_burst() -> None:
    elapsed = Elapsed()
    bucket = TokenBucket(10.0, 5, elapsed, elapsed.sleep)
    assert [bucket.take() for _ in range(5)] == [0.0] * 5
    for _ in range(20):
        bucket.take()
    assert elapsed.now == pytest.approx(2.0)
    elapsed.now += 100
    assert [bucket.take() for _ in range(5)] == [0.0] * 5
    assert bucket.take() > 0
