"""Pods that are followed from round to round: seen without a listing, and listed where nothing is heard any more."""

import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from foundation.kubernetes.api import ApiRefused, Object, Unreachable
from policy.fleet import JobView
from scheduler.kubernetes import pods as pods_module
from scheduler.kubernetes.api import ApiServer
from scheduler.kubernetes.pods import PODS, PodKeys, PodPart, RunningPods, jobs_of, pod_part
from scheduler.ports.errors import SchedulerError
from tests.scheduler.kubernetes.api_world import Raw
from tests.scheduler.kubernetes.objects import SETTINGS, pod
from tests.telemetry.collect.kubernetes.memory_api import MemoryApi
from tests.waiting import wait

KEYS = PodKeys("predrain.io", "predrain")


def part_of(raw: object) -> PodPart | None:
    return pod_part(raw, SETTINGS.rules, KEYS)


def put(api: MemoryApi, raw: Raw) -> None:
    raw["metadata"] |= {"uid": raw["metadata"]["name"], "creationTimestamp": "2026-11-01T00:00:00Z"}
    api.put(PODS, raw)


def followed(api: MemoryApi) -> RunningPods:
    return RunningPods(ApiServer(api), part_of, 250, follows=True)


@pytest.fixture
def api() -> MemoryApi:
    made = MemoryApi()
    put(made, pod("a", "n1", gpus=2))
    return made


@pytest.fixture
def pods(api: MemoryApi) -> Iterator[RunningPods]:
    made = followed(api)
    made.everywhere()
    yield made
    made.stop()


def jobs(parts: list[PodPart]) -> dict[str, list[JobView]]:
    return {node: list(of_node.values()) for node, of_node in jobs_of(parts).items()}


def listings(api: MemoryApi) -> int:
    return len(api.params)


def ended(raw: Raw) -> Raw:
    return {**raw, "status": {**raw["status"], "phase": "Succeeded"}}


def test_what_starts_moves_and_ends_is_seen_without_a_listing(api: MemoryApi, pods: RunningPods) -> None:
    broken = pod("broken", "n2")
    broken["spec"]["containers"] = "none"
    put(api, pod("b", "n1", gpus=4))
    put(api, broken)
    wait(lambda: len(pods.everywhere()) == 3)
    assert [job.gpus for job in jobs(pods.on("n1"))["n1"]] == [6], "two pods of one job"
    assert [job.name for job in jobs(pods.everywhere())["n2"]] == ["team/broken"], "it occupies its node nevertheless"
    put(api, ended(pod("a", "n1", gpus=2)))
    api.remove(PODS, "broken")
    wait(lambda: len(pods.everywhere()) == 1)
    assert pods.on("n2") == []
    assert [part.gpus for part in pods.on("n1")] == [4]
    assert listings(api) == 1


def test_a_cut_watch_is_no_news_until_the_server_is_heard_of_again(api: MemoryApi, pods: RunningPods) -> None:
    wait(lambda: pods.watched)
    api.failures += [Unreachable("cut")] * 3
    wait(lambda: not api.failures)
    put(api, pod("b", "n2"))
    assert {part.node for part in pods.everywhere()} == {"n1", "n2"}, "listed, or followed again"
    wait(lambda: pods.watched)
    before = listings(api)
    assert len(pods.everywhere()) == 2
    assert listings(api) == before


def test_what_comes_back_after_a_cut_is_never_older_than_what_was_listed_meanwhile(api, pods, monkeypatch):
    """The server takes the watch up again at once, and is slow to tell what happened meanwhile."""
    backlog, watch = threading.Event(), api.watch

    def slow(path: str, params: Mapping[str, str], version: str, begun: Callable[[], object]) -> Iterator[Object]:
        events = watch(path, params, version, begun)
        first = next(events)
        backlog.wait(10)
        yield first
        yield from events

    wait(lambda: pods.watched)
    api.failures += [Unreachable("cut")] * 2
    wait(lambda: not pods.watched)
    monkeypatch.setattr(api, "watch", slow)
    put(api, pod("b", "n2"))
    wait(lambda: pods.watched)
    assert {part.node for part in pods.everywhere()} == {"n1", "n2"}
    assert len(pods.on("n2")) == 1
    backlog.set()


def test_a_forgetful_server_is_listed_again(api: MemoryApi, pods: RunningPods) -> None:
    api.remove(PODS, "a")
    put(api, pod("b", "n2"))
    api.forget()
    wait(lambda: [part.node for part in pods.everywhere()] == ["n2"])
    wait(lambda: pods.watched)


@pytest.mark.parametrize("what", ["silent", "dead"])
def test_what_is_not_heard_of_is_listed(api: MemoryApi, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "dead":
        monkeypatch.setattr(pods_module, "follow", lambda *_: None)
    if what == "silent":
        monkeypatch.setattr(pods_module, "IDLE_S", 0.0)
    pods = followed(api)
    pods.everywhere()
    wait(lambda: not pods.watched)
    for rounds in (2, 3):
        put(api, pod(f"p{rounds}", "n1", gpus=1))
        assert len(pods.everywhere()) == rounds
        assert len(pods.on("n1")) == rounds
    assert listings(api) > 2
    pods.stop()


def test_the_first_listing_fails_loudly_and_the_next_one_begins_the_watch(api: MemoryApi) -> None:
    pods = followed(api)
    api.failures.append(ApiRefused(403, "forbidden"))
    with pytest.raises(SchedulerError, match="forbidden"):
        pods.everywhere()
    assert not pods.watched
    assert len(pods.everywhere()) == 1
    assert pods.watched
    pods.stop()
    assert not pods.watched


def test_a_process_that_does_one_round_follows_nothing(api: MemoryApi) -> None:
    pods = RunningPods(ApiServer(api), part_of, 250, follows=False)
    for _ in range(2):
        assert len(pods.everywhere()) == 1
    assert (pods.watched, listings(api)) == (False, 2)
