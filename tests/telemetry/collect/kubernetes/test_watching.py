"""Following a resource across all that servers do."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import pytest

from telemetry.collect.kubernetes import watching
from telemetry.collect.kubernetes.api import Object, Refused, Unreachable
from telemetry.collect.kubernetes.watching import Change, Resource, list_resource
from tests.telemetry.collect.kubernetes.memory_api import CUT, NODES, MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW

RESOURCE = Resource("nodes", NODES, lambda item: (item["metadata"]["name"], item.get("value")), {})


def clock() -> datetime:
    return NOW


class Listener:
    """Keeps what it is told as a follower's reader would, and stops the follower after some waits."""

    def __init__(self, rounds: int = 3) -> None:
        self.known: dict[str, Any] = {}
        self.kinds: list[str] = []
        self.values: list[Any] = []
        self.version = ""
        self.waits: list[float] = []
        self._rounds = rounds
        self.between: list[Any] = []

    def put(self, change: Change) -> bool:
        self.kinds.append(change.kind)
        self.version = change.version
        if change.kind == "listed":
            self.known = dict(change.objects)
        for name, value in change.objects:
            if change.kind == "gone":
                self.known.pop(name)
            else:
                self.known[name] = value
                self.values.append(value)
        return True

    def wait(self, seconds: float) -> bool:
        if seconds == 0:
            if self.between:
                self.between.pop(0)()
            self._rounds -= 1
            return self._rounds < 0
        self.waits.append(seconds)
        return False


def follow(api: MemoryApi, listener: Listener, version: str | None = None) -> None:
    watching.follow(api, RESOURCE, listener.put, clock=clock, wait=listener.wait, version=version)


def item(name: str, value: int) -> dict[str, Any]:
    return {"metadata": {"name": name}, "value": value}


def test_a_listing_is_put_together_from_its_pages() -> None:
    api = MemoryApi()
    for number in range(5):
        api.put(NODES, item(f"n{number}", number))
    change = list_resource(api, RESOURCE, clock)
    assert (change.kind, len(change.objects), change.version, change.at) == ("listed", 5, str(api.version), NOW)


def test_a_listing_that_the_server_forgot_is_begun_again() -> None:
    api = MemoryApi()
    api.put(NODES, item("n", 1))
    api.failures = [Refused(410, "expired")]
    assert len(list_resource(api, RESOURCE, clock).objects) == 1
    api.failures = [Refused(410, "expired")] * 3
    with pytest.raises(Refused, match="expired"):
        list_resource(api, RESOURCE, clock)


def test_changes_come_once_each_and_bookmarks_move_on() -> None:
    api, listener = MemoryApi(), Listener(4)
    api.put(NODES, item("n", 1))
    listener.between = [
        lambda: None,
        lambda: (api.put(NODES, item("n", 2)), api.put(NODES, item("n", 3))),
        lambda: api.remove(NODES, "n"),
    ]
    follow(api, listener)
    assert listener.values == [1, 2, 3]
    assert listener.known == {}
    assert listener.kinds.count("listed") == 1
    assert listener.version == str(api.version)


def test_after_a_cut_it_goes_on_where_it_was() -> None:
    api, listener = MemoryApi(), Listener(3)
    api.put(NODES, item("n", 1))

    def cut() -> None:
        api.put(NODES, item("n", 2))
        api.put(NODES, item("n", 3))
        api.failures = [CUT]

    listener.between = [lambda: None, cut]
    follow(api, listener)
    assert listener.values == [1, 2, 3]
    assert listener.kinds.count("listed") == 1
    assert len(listener.waits) >= 1


def test_a_forgetful_server_is_listed_anew() -> None:
    api, listener = MemoryApi(), Listener(4)
    api.put(NODES, item("a", 1))

    def forget() -> None:
        api.put(NODES, item("b", 2))
        api.remove(NODES, "a")
        api.forget()

    listener.between = [lambda: None, forget]
    follow(api, listener)
    assert listener.kinds.count("listed") == 2
    assert listener.known == {"b": 2}


def test_from_a_version_there_is_no_listing() -> None:
    api, listener = MemoryApi(), Listener(1)
    api.put(NODES, item("n", 1))
    version = str(api.version)
    api.put(NODES, item("n", 2))
    follow(api, listener, version)
    assert "listed" not in listener.kinds
    assert listener.values == [2]


def test_a_refusal_is_waited_out_as_long_as_asked_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    api, listener = MemoryApi(), Listener(6)
    api.failures = [Refused(429, "slow down", 7.0), Refused(403, "no"), Unreachable("gone"), Unreachable("gone")]
    follow(api, listener)
    assert listener.waits[0] == 7.0
    assert all(wait > 0 for wait in listener.waits)
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == [
        "nodes cannot be followed, retrying: HTTP 429: slow down",
        "nodes are followed again",
    ]


def test_an_object_that_cannot_be_read_is_left_out_and_the_rest_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def trim(content: Object) -> tuple[str, int]:
        return content["metadata"]["name"], 10 // content["value"] if content["value"] else content["nothing"]

    api, listener = MemoryApi(), Listener(1)
    api.put(NODES, item("bad", 0))
    api.put(NODES, item("good", 5))
    watching.follow(api, Resource("nodes", NODES, trim, {}), listener.put, clock=clock, wait=listener.wait)
    assert listener.known == {"good": 2}
    assert "'bad' cannot be read" in caplog.text


def test_a_server_that_ends_watches_at_once_is_not_asked_in_a_hurry() -> None:
    class Curt(MemoryApi):
        def watch(self, path: str, params: Mapping[str, str] | None, version: str) -> Iterator[Object]:
            self.asked.append("watch")
            yield from ()

    api, listener = Curt(), Listener(5)
    follow(api, listener)
    assert len(listener.waits) == api.asked.count("watch") == 5


def test_whoever_does_not_want_more_stops_it() -> None:
    api = MemoryApi()
    api.put(NODES, item("n", 1))
    watching.follow(api, RESOURCE, lambda _change: False, clock=clock, wait=lambda _s: False)
    assert api.asked == [NODES]
