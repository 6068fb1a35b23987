"""What we publish once more as an NVSentinel health event, in the form that NVSentinel publishes."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from policy.fleet import Level, Published
from policy.plan import Action
from scheduler.kubernetes.nvsentinel import METHOD, HealthEvents, health_events
from telemetry.collect.kubernetes.client import KubernetesClient
from telemetry.errors import InputError
from tests.scheduler.kubernetes.api_world import World
from tests.scheduler.kubernetes.objects import QUICK, T0, Hand
from tests.scheduler.kubernetes.platform_connector import SERVES, Connector
from tests.scheduler.kubernetes.platform_connector import HealthEvents as Schema

HIGH = Action(
    "publish", "n1", "high", Level.PUBLISHED, 0.83, T0 + timedelta(hours=6), ("its errors rise — twofold",),
    units=("GPU-a", "GPU-b"),
)  # fmt: skip


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[Connector]:
    running = Connector(tmp_path / "nvsentinel.sock")
    yield running
    running.stop()


def event(message: Any) -> Any:
    (found,) = message.events
    return found


def test_an_event_says_all_that_it_has_to_in_the_published_form_and_is_to_be_stored_only() -> None:
    written = health_events(HIGH, T0, healthy=False)
    message = Schema.FromString(written)
    # what the schema does not know is kept, so a field of ours with a wrong number or type would make it longer
    known = Schema.FromString(written)
    known.DiscardUnknownFields()
    assert len(known.SerializeToString()) == len(written)
    found = event(message)
    assert (found.agent, found.componentClass, found.nodeName) == ("predrain", "GPU", "n1")
    assert (found.checkName, list(found.errorCode)) == (
        "PredrainGPUFailurePredicted", ["PREDRAIN_GPU_FAILURE_PREDICTED"]
    )  # fmt: skip
    assert (found.isFatal, found.isHealthy) == (False, False)
    kinds = found.DESCRIPTOR.fields_by_name
    assert kinds["recommendedAction"].enum_type.values_by_number[found.recommendedAction].name == "RUN_DCGMEUD"
    assert kinds["processingStrategy"].enum_type.values_by_number[found.processingStrategy].name == "STORE_ONLY"
    assert [(each.entityType, each.entityValue) for each in found.entitiesImpacted] == [
        ("GPU_UUID", "GPU-a"), ("GPU_UUID", "GPU-b"),
    ]  # fmt: skip
    assert dict(found.metadata) == {"tier": "high", "risk": "0.83", "expires_at": "2026-11-21T18:00:00+00:00"}
    assert found.generatedTimestamp.seconds == int(T0.timestamp())
    assert found.message == "its errors rise — twofold"


def test_one_that_takes_it_back_names_no_gpu_and_asks_for_nothing() -> None:
    release = replace(HIGH, verb="release", to=Level.NONE, risk=None, expires_at=None, units=())
    found = event(Schema.FromString(health_events(release, T0, healthy=True)))
    assert (found.isHealthy, found.recommendedAction, list(found.errorCode)) == (True, 0, [])
    assert list(found.entitiesImpacted) == []


@pytest.mark.parametrize(
    ("before", "action", "healthy"),
    [
        (None, HIGH, False),
        ("elevated", HIGH, False),
        ("high", HIGH, None),  # renewed
        ("high", replace(HIGH, tier="elevated"), True),
        (None, replace(HIGH, tier="elevated"), None),
        ("high", replace(HIGH, verb="taint", to=Level.TAINTED), None),
        ("high", replace(HIGH, verb="release", to=Level.PUBLISHED), None),
        ("high", replace(HIGH, verb="release", to=Level.NONE), True),
        ("watch", replace(HIGH, verb="release", to=Level.NONE), None),
    ],
)
def test_it_is_told_when_the_tier_becomes_high_and_when_it_is_no_more(
    connector: Connector, before: str | None, action: Action, healthy: bool | None
) -> None:
    stood = None if before is None else Published(before, T0)
    events = HealthEvents(connector.path)
    assert events.tell(action, stood, T0) is None
    assert [event(each).isHealthy for each in connector.told] == ([] if healthy is None else [healthy])
    assert (events.preview(action, stood) is None) == (healthy is None)


def test_through_the_adapter_the_connector_hears_what_a_rehearsal_showed(
    world: World, cluster: KubernetesClient, connector: Connector
) -> None:
    hand = Hand(world, cluster, replace(QUICK, nvsentinel_socket=str(connector.path)))
    reading = hand.scheduler.revalidate("n1")
    assert reading is not None
    (shown,) = hand.scheduler.preview((hand.action("publish"),), reading)
    assert [each.words for each in shown if "NVSentinel" in each.path] == [
        "node n1: NVSentinel health event PredrainGPUFailurePredicted: (none) -> "
        "unhealthy (no GPU named): its errors rise"
    ]
    assert hand.do("publish").writes == shown
    hand.do("taint")
    hand.do("release")
    assert [event(each).isHealthy for each in connector.told] == [False, True]
    assert SERVES == METHOD


@pytest.mark.parametrize(
    ("answer", "words"),
    [("refused", "INVALID_ARGUMENT (no such node)"), ("silent", "DEADLINE_EXCEEDED")],
)
def test_a_connector_that_refuses_or_hangs_is_told_and_left_alone_for_a_while(
    connector: Connector, answer: str, words: str
) -> None:
    connector.answer = answer
    events = HealthEvents(connector.path, within_s=0.3)
    told = events.tell(HIGH, None, T0)
    assert told is not None
    assert told.startswith(f"NVSentinel was not told: {words}")
    assert events.tell(HIGH, None, T0) == "NVSentinel was not told: it did not answer a moment ago"


def test_what_is_not_there_or_speaks_something_else_fails_nothing_else(
    world: World, cluster: KubernetesClient, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rubbish:
        rubbish.bind(str(tmp_path / "rubbish.sock"))
        rubbish.listen(8)
        thread = threading.Thread(target=_answer_rubbish, args=(rubbish,), daemon=True)
        thread.start()
        for place in ("none.sock", "rubbish.sock"):
            hand = Hand(world, cluster, replace(QUICK, nvsentinel_socket=str(tmp_path / place)))
            done = hand.do("publish")
            assert done.kind == "done"
            assert done.words.startswith("NVSentinel was not told: UNAVAILABLE")
            assert hand.level() is Level.PUBLISHED
            hand.do("release")


def _answer_rubbish(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            link, _ = listening.accept()
            with link:
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + b"\0" * 40)


def test_without_grpcio_the_socket_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"predrain\[nvsentinel\]"):
        HealthEvents(tmp_path / "none.sock")


def test_the_longest_event_stays_small() -> None:
    longest = replace(HIGH, node="n" * 253, reasons=("\U0001f525" * 2000,) * 3, units=("GPU-" + "a" * 36,) * 99)
    assert len(health_events(longest, T0, healthy=False)) < 16_384
