"""Checkpoints by a command in the pod's container: who may say what is run, and what its end means."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import urllib3

from scheduler.evacuation.checkpoint_requests import Checkpoints, PendingRequest
from scheduler.evacuation.settings import CheckpointSettings
from scheduler.kubernetes.exec_hook import PodExecHook
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.kubernetes.workloads import KubernetesWorkloads
from scheduler.ports.workloads import CheckpointAsk, Fence
from telemetry.collect.kubernetes.client import KubernetesClient
from tests.scheduler.kubernetes.api_world import Raw, World
from tests.scheduler.kubernetes.objects import LASTS, Hand, add, pod
from tests.telemetry.collect.kubernetes.exec_server import ExecServer, ended, exec_server

SETTINGS = KubernetesSettings(
    checkpoint_exec=("/usr/local/bin/save", "--now"), checkpoint_exec_timeout=timedelta(seconds=2)
)
KEY = "k" * 32
RUNNING = [{"name": "c", "state": {"running": {}}}]


@pytest.fixture
def inside() -> Iterator[ExecServer]:
    with exec_server() as made:
        yield made


def asking(
    names: list[Raw], world: World, cluster: KubernetesClient, inside: ExecServer
) -> tuple[Hand, Checkpoints, list]:
    for each in names:
        each["status"]["containerStatuses"] = RUNNING
    add(world, *names)
    hand = Hand(world, cluster, SETTINGS)
    workloads = KubernetesWorkloads(hand.scheduler)
    connection = KubernetesClient(urllib3.PoolManager(), inside.url, dict)
    hook = PodExecHook(hand.scheduler, connection)
    checkpoints = Checkpoints(workloads, CheckpointSettings(), None, None, hook)
    return hand, checkpoints, list(workloads.on_node("n1"))


def ask(hand: Hand, checkpoints: Checkpoints, workload: object) -> tuple[str, str, str]:
    offer = checkpoints.offer_of(workload)  # type: ignore[arg-type]
    assert offer is not None
    request = CheckpointAsk(KEY, hand.clock.now() + timedelta(minutes=5), "its errors rise")
    fence = Fence("me", hand.clock.now() + LASTS)
    (came,) = checkpoints.ask([PendingRequest(workload, offer, request, True)], fence)  # type: ignore[arg-type]
    return came.answer.kind, came.state.kind, came.state.words


def test_the_operators_command_runs_in_the_pod_that_asks_and_its_exit_code_says_how_it_stands(
    world: World, cluster: KubernetesClient, inside: ExecServer
) -> None:
    notes = {"predrain.io/checkpoint": "exec", "predrain.io/checkpoint-command": "rm -rf /"}
    hand, checkpoints, (workload,) = asking([pod("p1", "n1", annotations=notes)], world, cluster, inside)
    inside.scripts = [ended(75), ended(0, (1, b'noise\n{"words": "step 9000"}\n')), ended(2, (2, b"disk full"))]
    assert ask(hand, checkpoints, workload) == ("done", "waiting", "exit code 75")
    assert ask(hand, checkpoints, workload) == ("done", "acknowledged", "step 9000")
    assert ask(hand, checkpoints, workload) == (
        "done", "failed", "/usr/local/bin/save ended with exit code 2: disk full",
    )  # fmt: skip
    assert {tuple(each["command"]) for each in inside.asked} == {("/usr/local/bin/save", "--now", "checkpoint", KEY)}
    assert {(each["path"], each["container"]) for each in inside.asked} == {
        ("/api/v1/namespaces/team/pods/p1/exec", "c")
    }


def test_without_a_command_in_the_settings_a_pod_that_asks_for_it_is_asked_nothing(
    world: World, cluster: KubernetesClient
) -> None:
    add(world, pod("p1", "n1", annotations={"predrain.io/checkpoint": "exec"}))
    scheduler = KubernetesScheduler(cluster, Hand(world, cluster).clock)
    workloads = KubernetesWorkloads(scheduler)
    (workload,) = workloads.on_node("n1")
    assert Checkpoints(workloads, CheckpointSettings(), None, None).offer_of(workload) is None


def test_nothing_is_run_in_another_pod_a_stopped_container_or_without_the_lease(
    world: World, cluster: KubernetesClient, inside: ExecServer
) -> None:
    notes = {"predrain.io/checkpoint": "exec"}
    hand, checkpoints, (workload,) = asking([pod("p1", "n1", annotations=notes)], world, cluster, inside)
    path = "/api/v1/namespaces/team/pods/p1"
    world.edit(path, lambda each: each["status"].update(containerStatuses=[{"name": "c", "state": {"waiting": {}}}]))
    assert ask(hand, checkpoints, workload) == ("refused", "waiting", "its container c does not run")
    world.edit(
        path, lambda each: each["metadata"]["annotations"].update({"kubectl.kubernetes.io/default-container": "x"})
    )
    assert ask(hand, checkpoints, workload) == ("refused", "waiting", "it has no container 'x'")
    world.edit(path, lambda each: each["metadata"].update(uid="another"))
    assert ask(hand, checkpoints, workload)[2] == "another pod of that name is there (uid another)"
    del world.objects[path]
    assert ask(hand, checkpoints, workload)[2] == "there is no such pod any more"
    hand.scheduler.drop_lease("me")
    assert ask(hand, checkpoints, workload)[2] == "the lease has ended, nothing was run"
    assert inside.asked == []


def test_a_refusal_and_an_unknown_end_are_no_acknowledgement(
    world: World, cluster: KubernetesClient, inside: ExecServer
) -> None:
    notes = {"predrain.io/checkpoint": "exec"}
    hand, checkpoints, (workload,) = asking([pod("p1", "n1", annotations=notes)], world, cluster, inside)
    inside.refusals = [(403, "cannot get resource pods/exec"), (503, "later")]
    assert ask(hand, checkpoints, workload) == ("refused", "waiting", "HTTP 403: cannot get resource pods/exec")
    assert ask(hand, checkpoints, workload) == ("timeout", "waiting", "HTTP 503: later")

    async def cut(link: object) -> None:
        await link.close()  # type: ignore[attr-defined]

    inside.scripts = [cut]
    assert ask(hand, checkpoints, workload)[:2] == ("timeout", "waiting")
