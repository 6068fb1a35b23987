"""The collector over a server in memory: what lands, and what is remembered."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from telemetry.collect.kubernetes.api import Refused, Unreachable
from telemetry.collect.kubernetes.collector import KubernetesCollector
from telemetry.collect.kubernetes.rules import default_rules
from telemetry.collect.outbox import Outbox
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from tests.telemetry.collect.kubernetes.memory_api import EVENTS, NODES, PODS, MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW, ended, event, node, pod
from tests.waiting import wait


class Clock:
    now = NOW

    def __call__(self) -> datetime:
        return self.now


@contextmanager
def collecting(api: MemoryApi, root: Path, clock: Clock, **scope: Any) -> Iterator[KubernetesCollector]:
    landing = Landing(root, writer="kubernetes")
    collector = KubernetesCollector(api, landing, default_rules(), clock=clock, **scope)
    try:
        yield collector
    finally:
        collector.close()


def rows(root: Path, kind: str) -> list[dict[str, Any]]:
    return [row for path in Landing(root, writer="t").waiting(kind) for row in pq.read_table(path).to_pylist()]


def codes(root: Path) -> list[str]:
    return [row["code"] for row in rows(root, "events")]


@pytest.fixture
def api() -> MemoryApi:
    made = MemoryApi()
    made.put(NODES, node("n1"))
    made.put(PODS, pod("p1", gpus=8))
    return made


def test_one_round_after_another_lands_the_difference(api: MemoryApi, tmp_path: Path) -> None:
    clock = Clock()
    for round_number in range(4):
        with collecting(api, tmp_path, clock) as collector:
            collector.once()
            assert collector.outbox.landed["events"] == (0, 2, 0, 2)[round_number]
        clock.now += timedelta(minutes=1)
        if round_number == 0:
            api.put(NODES, node("n1", cordoned=True))
            api.put(EVENTS, event("GpuLost"))
        if round_number == 2:
            api.put(NODES, node("n1", ready=("False", "2026-03-01T12:02:30Z")))
            api.remove(PODS, "p1")
    assert codes(tmp_path) == ["cordon", "GpuLost", "node_not_ready", "uncordon"]
    assert [row["outcome"] for row in rows(tmp_path, "jobs")] == [None, "Unknown"]


def test_a_kill_between_remembering_and_landing_neither_loses_nor_repeats(
    api: MemoryApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    api.put(NODES, node("n1", cordoned=True))
    stage = Landing.stage
    for after in range(3):  # killed before, between and after the files of one batch
        root = tmp_path / f"{after}.live"
        count = 0

        def dying(self: Landing, *args: Any, **more: Any) -> Path | None:
            nonlocal count
            count += 1
            if count > after:  # noqa: B023 - called within this round
                raise KeyboardInterrupt
            return stage(self, *args, **more)

        monkeypatch.setattr(Landing, "stage", dying)
        with collecting(api, root, clock) as collector, suppress(KeyboardInterrupt):
            collector.once()
        monkeypatch.setattr(Landing, "stage", stage)
        clock.now += timedelta(hours=1)
        for _ in range(2):
            with collecting(api, root, clock) as collector:
                collector.once()
        assert codes(root) == ["cordon"]
        assert len(rows(root, "jobs")) == 1


def test_a_full_disk_holds_everything_until_there_is_room(
    api: MemoryApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with collecting(api, tmp_path, clock) as collector:
        stage = Landing.stage

        def full(self: Landing, *_args: Any, **_more: Any) -> Path | None:
            raise InputError("the disk is full", "here", "Free space.")

        monkeypatch.setattr(Landing, "stage", full)
        api.put(NODES, node("n1", cordoned=True))
        with pytest.raises(InputError, match="disk is full"):
            collector.once()
        api.put(NODES, node("n1"))
        with pytest.raises(InputError, match="disk is full"):
            collector.once()
        monkeypatch.setattr(Landing, "stage", stage)
        collector.once()
        assert codes(tmp_path) == ["cordon", "uncordon"]
        assert len(rows(tmp_path, "jobs")) == 1


@contextmanager
def following(api: MemoryApi, root: Path, until: Callable[[], object], **scope: Any) -> Iterator[KubernetesCollector]:
    """Follow in a thread, and leave in the end when ``until`` is true."""
    stop = threading.Event()
    with collecting(api, root, Clock(), **scope) as collector:
        thread = threading.Thread(target=collector.run, args=(stop,), kwargs={"interval_s": 0.05})
        thread.start()
        yield collector
        wait(until)
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def test_following_lands_what_happens_and_everything_at_the_end(api: MemoryApi, tmp_path: Path) -> None:
    with following(api, tmp_path, lambda: codes(tmp_path), cluster="east"):
        wait(lambda: rows(tmp_path, "jobs"))
        api.put(NODES, node("n1", cordoned=True))
    assert codes(tmp_path) == ["cordon"]
    assert [row["cluster"] for row in rows(tmp_path, "inventory")] == ["east"]
    # What happened while nobody looked is told in full by the next one.
    api.put(NODES, node("n1"))
    api.put(NODES, node("n1", cordoned=True))
    api.put(PODS, pod("p2"))
    api.put(PODS, pod("p2", phase="Succeeded", status=ended("2026-03-01T11:30:00Z")))
    api.remove(PODS, "p2")
    with following(
        api, tmp_path, lambda: len(codes(tmp_path)) == 3 and len(rows(tmp_path, "jobs")) > 1, cluster="east"
    ):
        pass
    assert codes(tmp_path) == ["cordon", "uncordon", "cordon"]
    outcomes = {row["job"]: row["outcome"] for row in rows(tmp_path, "jobs")}  # the last row of a job counts
    assert list(outcomes.values()) == [None, "Succeeded"]


def test_while_nothing_can_be_landed_nothing_more_is_taken_in(
    api: MemoryApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telemetry.collect.kubernetes.collector.backoff_s", lambda _failures: 0.01)
    commit, full, failures = Outbox.commit, threading.Event(), [0]

    def failing(self: Outbox, *args: Any, **more: Any) -> None:
        if full.is_set():
            failures[0] += 1
            raise InputError("the disk is full", "here", "Free space.")
        commit(self, *args, **more)

    monkeypatch.setattr(Outbox, "commit", failing)
    with following(api, tmp_path, lambda: codes(tmp_path)) as collector:
        wait(lambda: rows(tmp_path, "jobs"))
        full.set()
        wait(lambda: failures[0])
        api.put(NODES, node("n1", cordoned=True))
        wait(lambda: failures[0] > 10)
        assert not collector.nodes.known["n1"].cordoned
        full.clear()
    assert codes(tmp_path) == ["cordon"]
    assert caplog.text.count("nothing can be landed") == 1


def test_events_of_nodes_that_are_not_ours_are_left_out(api: MemoryApi, tmp_path: Path) -> None:
    api.put(NODES, node("cpu", gpus=0))
    api.put(EVENTS, event("GpuLost", uid="e1", about=("Node", "cpu")))
    api.put(EVENTS, event("GpuLost", uid="e2", about=("Node", "n1")))
    with collecting(api, tmp_path, Clock()) as collector:
        collector.once()
    assert [row["node"] for row in rows(tmp_path, "events")] == ["n1"]


def test_only_jobs_of_the_selected_namespaces(api: MemoryApi, tmp_path: Path) -> None:
    api.put("/api/v1/namespaces", {"metadata": {"name": "train"}})
    api.put(PODS, pod("other", namespace="dev"))
    with collecting(api, tmp_path, Clock(), namespace_selector="team=llm") as collector:
        collector.once()
    assert [row["job"] for row in rows(tmp_path, "jobs")] == ["train/p1/uid-p1"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Refused(403, 'cannot list resource "nodes"'), r"refuses: cannot list.*collector-rbac\.yaml"),
        (Refused(401, "Unauthorized"), "refuses: Unauthorized.*token or certificate"),
        (Unreachable("connection refused"), "does not answer: connection refused"),
    ],
)
def test_a_server_that_does_not_let_us_says_what_to_do(
    api: MemoryApi, tmp_path: Path, failure: Exception, message: str
) -> None:
    api.failures = [failure]
    with collecting(api, tmp_path, Clock()) as collector, pytest.raises(InputError, match=message):
        collector.once()


def test_a_long_life_stays_small(api: MemoryApi, tmp_path: Path) -> None:
    clock = Clock()
    with collecting(api, tmp_path, clock) as collector:
        for number in range(60):
            clock.now += timedelta(hours=1)
            name = f"e{number}"
            api.put(EVENTS, event("GpuLost", uid=name))
            api.put(PODS, pod(name))
            collector.once()
            api.remove(EVENTS, name)
            api.remove(PODS, name)
        collector.once()
        content = collector.outbox.position
    assert content["resources"]["events of Node"]["known"] == {}
    assert list(content["resources"]["pods"]["known"]) == ["uid-p1"]
    assert len(rows(tmp_path, "jobs")) == 1 + 2 * 60
