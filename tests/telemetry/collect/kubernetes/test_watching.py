"""Following a resource across all that servers do."""

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import pytest

from foundation.kubernetes.api import ApiRefused, Object, Unreachable
from foundation.kubernetes.watching import ChangeKind, Resource, Tracker, follow
from telemetry.dataset.event import Event
from tests.telemetry.collect.kubernetes.memory_api import NODES, MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW


class Values(Tracker[tuple[str, int], int]):
    """The last value of each name, and all of them in their order."""

    key = staticmethod(lambda view: view[0])

    def __init__(self) -> None:
        super().__init__({})
        self.heard: list[int] = []

    def update(self, view: tuple[str, int], at: datetime) -> list[Event]:
        if self.known.get(view[0]) != view[1]:
            self.heard.append(view[1])
        self.known[view[0]] = view[1]
        return []


class Followed:
    """A resource followed for some rounds; ``between`` happens before each."""

    def __init__(self, api: MemoryApi, rounds: int, *between: Callable[[], object], version: str | None = None) -> None:
        self.values = Values()
        self.listings = 0
        self.waits: list[float] = []
        self._rounds = rounds
        self._between = list(between)
        self.resource = Resource("nodes", NODES, {}, _read, self.values, version)
        follow(api, self.resource, self._take, self._wait)

    def _take(self, resource: Resource, kind: ChangeKind, views: list[Any], version: str) -> None:
        self.listings += kind == "listed"
        self.values.take(kind, views, NOW)
        resource.version = version

    def _wait(self, seconds: float) -> bool:
        if seconds:
            self.waits.append(seconds)
        if self._between:
            self._between.pop(0)()
        self._rounds -= 1
        return self._rounds < 0


def _read(item: Object) -> tuple[str, int]:
    return item["metadata"]["name"], 10 // item["value"]


def item(name: str, value: int) -> dict[str, Any]:
    return {"metadata": {"name": name}, "value": value}


@pytest.fixture
def api() -> MemoryApi:
    made = MemoryApi()
    made.put(NODES, item("n", 10))
    return made


def change(api: MemoryApi, *failures: Exception) -> None:
    api.put(NODES, item("n", 5))
    api.put(NODES, item("n", 2))
    api.failures = list(failures)


def test_changes_come_once_each_also_after_a_cut(api: MemoryApi) -> None:
    cut = Unreachable("the watch was cut")
    seen = Followed(api, 4, lambda: None, lambda: change(api, cut), lambda: None, lambda: api.remove(NODES, "n"))
    assert (seen.values.heard, seen.values.known, seen.listings) == ([1, 2, 5], {}, 1)
    assert seen.resource.version == str(api.version), "a bookmark moves on too"


def test_the_server_was_heard_of_with_each_watch_that_it_accepts_and_not_since_it_refused(api: MemoryApi) -> None:
    def refuse() -> None:
        api.failures = [ApiRefused(403, "no")]

    began = time.monotonic()
    assert began <= Followed(api, 2).resource.heard_s <= time.monotonic()
    assert Followed(api, 2, lambda: None, refuse).resource.heard_s == float("-inf")


def test_a_forgetful_server_is_listed_again(api: MemoryApi) -> None:
    def forget() -> None:
        api.put(NODES, item("b", 5))
        api.remove(NODES, "n")
        api.forget()

    seen = Followed(api, 4, lambda: None, forget)
    assert (seen.values.known, seen.listings) == ({"b": 2}, 2)


def test_from_a_version_there_is_no_listing(api: MemoryApi) -> None:
    version = str(api.version)
    change(api)
    seen = Followed(api, 1, version=version)
    assert (seen.values.heard, seen.listings) == ([2, 5], 0)


def test_a_refusal_is_waited_out_as_long_as_asked_and_logged_once(
    api: MemoryApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    api.failures = [ApiRefused(429, "slow down", 7.0), ApiRefused(403, "no"), Unreachable("gone"), Unreachable("gone")]
    seen = Followed(api, 6)
    assert seen.waits[0] == 7.0
    assert all(wait > 0 for wait in seen.waits)
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == [
        "nodes cannot be followed, retrying: HTTP 429: slow down",
        "watching nodes again",
    ]


def test_an_object_that_cannot_be_read_is_left_out_and_the_rest_is_not(
    api: MemoryApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(NODES, {"metadata": {"name": "bad"}})
    assert Followed(api, 1).values.known == {"n": 1}
    assert "unreadable 'bad'" in caplog.text


def test_a_server_that_ends_watches_immediately_is_not_asked_in_a_hurry() -> None:
    class Curt(MemoryApi):
        def watch(
            self, path: str, params: Mapping[str, str], version: str, begun: Callable[[], object]
        ) -> Iterator[Object]:
            self.asked.append("watch")
            begun()
            yield from ()

    api = Curt()
    assert len(Followed(api, 5).waits) == api.asked.count("watch") == 5
