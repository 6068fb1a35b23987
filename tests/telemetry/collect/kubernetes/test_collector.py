"""Targets from EndpointSlices, and the collector over a server in memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.kubernetes.api import ApiRefused, Unreachable
from telemetry.collect.kubernetes.collector import KubernetesCollector
from telemetry.collect.kubernetes.discovery import service_exporters, slice_exporters
from telemetry.collect.kubernetes.rules import default_rules
from telemetry.collect.outbox import Outbox
from tests.clock import Clock
from tests.telemetry.collect.builders import staged, staging
from tests.telemetry.collect.kubernetes.memory_api import EVENTS, NODES, PODS, MemoryApi
from tests.telemetry.collect.kubernetes.objects import ended, event, node, pod
from tests.waiting import wait


class World:
    """A server, and what collectors make of it in one folder."""

    def __init__(self, folder: Path) -> None:
        self.api, self.clock, self.staging = MemoryApi(), Clock(), staging(folder)
        self.api.put(NODES, node("n1"))
        self.api.put(PODS, pod("p1", gpus=8))

    def collector(self, **options: Any) -> Any:
        return closing(
            KubernetesCollector(self.api, self.staging, default_rules(), clock=self.clock, cluster="east", **options)
        )

    def collect_once(self, **options: Any) -> KubernetesCollector:
        with self.collector(**options) as collector:
            collector.once()
        self.clock.move(minutes=1)
        return collector

    @contextmanager
    def following(self, until: Callable[[], object]) -> Iterator[KubernetesCollector]:
        """Follow in a thread, and leave in the end when ``until`` is true."""
        stop = threading.Event()
        with self.collector() as collector:
            thread = threading.Thread(target=collector.run, args=(stop,), kwargs={"interval_s": 0.05})
            thread.start()
            yield collector
            wait(until)
            stop.set()
            thread.join(60)
            assert not thread.is_alive()

    def jobs(self) -> list[dict[str, Any]]:
        return staged(self.staging, "jobs")

    def codes(self) -> list[str]:
        return [row["code"] for row in staged(self.staging)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_one_round_after_another_lands_the_difference(world: World) -> None:
    assert world.collect_once().outbox.staged["events"] == 0
    world.api.put(NODES, node("n1", cordoned=True))
    world.api.put(EVENTS, event("GpuLost"))
    assert world.collect_once().outbox.staged["events"] == 2
    assert world.collect_once().outbox.staged["events"] == 0
    world.api.put(NODES, node("n1", ready=("False", "2026-03-01T12:02:30Z")))
    world.api.remove(PODS, "p1")
    world.collect_once()
    assert world.codes() == ["cordon", "GpuLost", "node_not_ready", "uncordon"]
    assert [row["outcome"] for row in world.jobs()] == [None, "Unknown"]


def test_following_lands_what_happens_and_everything_at_the_end(world: World) -> None:
    with world.following(world.codes):
        wait(world.jobs)
        world.api.put(NODES, node("n1", cordoned=True))
    assert world.codes() == ["cordon"]
    assert [row["cluster"] for row in staged(world.staging, "inventory")] == ["east"]
    # What happened while no collector ran is reported in full by the next one.
    world.api.put(NODES, node("n1"))
    world.api.put(NODES, node("n1", cordoned=True))
    world.api.put(PODS, pod("p2"))
    world.api.put(PODS, pod("p2", phase="Succeeded", status=ended("2026-03-01T11:30:00Z")))
    world.api.remove(PODS, "p2")
    with world.following(lambda: len(world.codes()) == 3 and len(world.jobs()) > 1):
        pass
    assert world.codes() == ["cordon", "uncordon", "cordon"]
    outcomes = {row["job"]: row["outcome"] for row in world.jobs()}  # the last row of a job counts
    assert list(outcomes.values()) == [None, "Succeeded"]


def test_while_nothing_can_be_staged_nothing_more_is_taken_in(world, monkeypatch, caplog):
    monkeypatch.setattr("telemetry.collect.kubernetes.collector.backoff_s", lambda _failures: 0.01)
    commit, full, failures = Outbox.commit, threading.Event(), [0]

    def failing(self: Outbox, *args: Any, **more: Any) -> None:
        if full.is_set():
            failures[0] += 1
            raise InputError("the disk is full", "here", "Free space.")
        commit(self, *args, **more)

    monkeypatch.setattr(Outbox, "commit", failing)
    with world.following(world.codes) as collector:
        wait(world.jobs)
        full.set()
        wait(lambda: failures[0])
        world.api.put(NODES, node("n1", cordoned=True))
        wait(lambda: failures[0] > 10)
        assert not collector.nodes.known["n1"].cordoned
        full.clear()
    assert world.codes() == ["cordon"]
    assert caplog.text.count("writing: ") - caplog.text.count("recovered") == 1


def test_events_of_nodes_outside_the_fleet_are_left_out(world: World) -> None:
    world.api.put(NODES, node("cpu", gpus=0))
    world.api.put(EVENTS, event("GpuLost", uid="e1", about=("Node", "cpu")))
    world.api.put(EVENTS, event("GpuLost", uid="e2", about=("Node", "n1")))
    world.collect_once()
    assert [row["node"] for row in staged(world.staging)] == ["n1"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ApiRefused(403, 'cannot list resource "nodes"'), r"rejects the request: cannot list.*collector-rbac\.yaml"),
        (ApiRefused(401, "Unauthorized"), "rejects the request: Unauthorized.*token or certificate"),
        (Unreachable("connection refused"), "does not respond: connection refused"),
    ],
)
def test_a_server_that_does_not_let_us_says_what_to_do(world: World, failure: Exception, message: str) -> None:
    world.api.failures = [failure]
    with pytest.raises(InputError, match=message):
        world.collect_once()


def test_a_long_life_stays_small(world: World) -> None:
    with world.collector() as collector:
        for number in range(20):
            name = f"e{number}"
            world.api.put(EVENTS, event("GpuLost", uid=name))
            world.api.put(PODS, pod(name))
            collector.once()
            world.clock.move(hours=1)
            world.api.remove(EVENTS, name)
            world.api.remove(PODS, name)
        collector.once()
    kept = collector.outbox.position["resources"]
    assert kept["events of Node"]["known"] == {}
    assert list(kept["pods"]["known"]) == ["uid-p1"]
    assert len(world.jobs()) == 1 + 2 * 20


WHERE = "kubernetes:gpu-operator/dcgm"
METRICS = [{"name": "metrics", "port": 9400}]


def endpoint(address: str, node: str | None = None, *, pod: str | None = None, **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [address], **({"nodeName": node} if node else {}), **target, **more}


def slice_of(*endpoints: dict[str, Any], family: str = "IPv4", ports: Any = METRICS) -> dict[str, Any]:
    return {"addressType": family, "endpoints": list(endpoints), "ports": ports, "metadata": {"name": f"s-{family}"}}


def test_an_exporter_that_does_not_get_ready_is_scraped_and_one_that_ends_is_not() -> None:
    unready = endpoint("10.0.0.1", "gpu-01", conditions={"ready": False})
    ending = endpoint("10.0.0.2", conditions={"ready": False, "serving": True, "terminating": True})
    targets = slice_exporters([slice_of(unready, ending)], None, WHERE)
    assert [(target.url, target.node) for target in targets] == [("http://10.0.0.1:9400", "gpu-01")]


def test_a_pod_with_two_addresses_is_one_target() -> None:
    four = slice_of(endpoint("10.0.0.1", "a", pod="p1"))
    six = slice_of(endpoint("fd00::1", "a", pod="p1"), endpoint("fd00::2", "b", pod="p2"), family="IPv6")
    for slices in ([four, six], [six, four]):
        assert {exporter.url for exporter in slice_exporters(slices, None, WHERE)} == {
            "http://10.0.0.1:9400",
            "http://[fd00::2]:9400",
        }
    assert slice_exporters([slice_of(endpoint("x.example.com"), family="FQDN")], None, WHERE) == []


HEALTH = {"name": "health", "port": 9401}


@pytest.mark.parametrize(
    ("port", "ports", "url"),
    [
        (9401, [HEALTH, *METRICS], "http://10.0.0.1:9401"),
        ("health", [HEALTH, *METRICS], "http://10.0.0.1:9401"),
        (None, [HEALTH, *METRICS], "http://10.0.0.1:9400"),
        (None, [{"name": "https", "port": 443}], "https://10.0.0.1:443"),
        (None, [HEALTH, {"name": "b", "port": 2}], r"the port is ambiguous: it has health \(9401\), b \(2\)"),
        ("x", METRICS, r"has no port 'x': it has metrics \(9400\)"),
    ],
)
def test_which_port(port: int | str | None, ports: list[dict[str, Any]], url: str) -> None:
    refused = nullcontext() if url.startswith("http") else pytest.raises(InputError, match=url)
    with refused:
        (target,) = slice_exporters([slice_of(endpoint("10.0.0.1"), ports=ports)], port, WHERE)
        assert target.url.startswith(url)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ApiRefused(403, "forbidden"), r"rejects the request: forbidden.*kubernetes:gpu-operator/dcgm.*collector-rbac"),
        (Unreachable("refused"), "does not respond"),
    ],
)
def test_an_api_failure_is_reported(failure: Exception, message: str) -> None:
    api = MemoryApi()
    api.failures = [failure]
    with pytest.raises(InputError, match=message):
        service_exporters("gpu-operator", "dcgm", api=api)
    with pytest.raises(InputError, match=r"there is no such service.*kubectl get endpointslices -n gpu-operator"):
        service_exporters("gpu-operator", "dcgm", api=api)
    api.put("/apis/discovery.k8s.io/v1/namespaces/gpu-operator/endpointslices", slice_of(endpoint("10.0.0.1", "a")))
    assert len(service_exporters("gpu-operator", "dcgm", api=api)) == 1
    assert api.params[-1]["labelSelector"] == "kubernetes.io/service-name=dcgm"
