"""Nodes and pods as an API server tells them, and a scheduler on a world of them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from foundation.kubernetes.client import KubernetesClient
from policy.fleet import Level
from policy.plan import Action, Verb
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.clock import ManualClock
from scheduler.ports.readings import Precondition, WriteResult
from tests.clock import Clock
from tests.scheduler.kubernetes.api_world import Raw, World

T0 = datetime(2026, 11, 21, 12, tzinfo=UTC)
SETTINGS = KubernetesSettings()
LASTS = timedelta(seconds=30)
LEVELS = {
    "publish": Level.PUBLISH,
    "avoid": Level.AVOID,
    "swap": Level.SWAP,
    "drain": Level.DRAIN,
    "release": Level.NONE,
}


def node(name: str, **spec: Any) -> Raw:
    """A GPU node that is ready."""
    resources = {"cpu": "64", "nvidia.com/gpu": "8"}
    return {
        "metadata": {"name": name, "labels": {"zone": "a", "nvidia.com/gpu.present": "true"}},
        "spec": spec,
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "nodeInfo": {"bootID": f"boot-{name}"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(
    name: str, on: str, *, gpus: int = 8, owner: str | None = "ReplicaSet", annotations: Any = None, **spec: Any
) -> Raw:
    """A running pod; ``owner`` is the kind of its controller, which is named ``train``."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    owners = [{"apiVersion": "apps/v1", "kind": owner, "name": "train", "uid": "u-train", "controller": True}]
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "ownerReferences": owners if owner else [],
            "annotations": annotations or {},
        },
        "spec": {
            "nodeName": on,
            "terminationGracePeriodSeconds": 45,
            "containers": [{"name": "c", "resources": {"limits": limits}}],
            **spec,
        },
        "status": {"phase": "Running", "startTime": "2026-11-21T06:00:00Z"},
    }


def add(world: World, *things: Raw) -> None:
    for target in things:
        name, namespace = target["metadata"]["name"], target["metadata"].get("namespace")
        world.put(f"/api/v1/namespaces/{namespace}/pods/{name}" if namespace else f"/api/v1/nodes/{name}", target)


class Hand:
    """A scheduler that holds the lease, on a world."""

    def __init__(self, world: World, cluster: KubernetesClient, settings: KubernetesSettings = SETTINGS) -> None:
        self.world = world
        self.clock = ManualClock(T0)
        self.elapsed = Clock()
        self.scheduler = KubernetesScheduler(
            cluster, self.clock, settings, elapsed=self.elapsed.monotonic, sleep=self.elapsed.sleep
        )
        assert self.scheduler.hold_lease("me", LASTS) == T0 + LASTS

    def later(self, by: timedelta) -> None:
        """Time passes, and the lease is held all along."""
        self.clock.move(by)
        self.elapsed.move(seconds=by.total_seconds())
        assert self.scheduler.hold_lease("me", LASTS) is not None

    def action(self, verb: Verb, name: str = "n1", tier: Any = "high", **how: Any) -> Action:
        end = None if verb == "release" else self.clock.now() + timedelta(hours=6)
        risk = None if verb == "release" else 0.9
        return Action(verb, name, tier, how.get("to", LEVELS[verb]), risk, end, ("its errors rise",))

    def do(self, verb: Verb, name: str = "n1", **how: Any) -> WriteResult:
        """Read a node again and carry an action out, as the controller does."""
        action = self.action(verb, name, **how)
        reading = self.scheduler.revalidate(name)
        until = self.clock.now() + LASTS
        condition = Precondition(reading.version, reading.boot_id, "me", until)
        return self.scheduler.apply(action, condition)

    def announce(self) -> tuple[str, ...]:
        """Write what is due after the marks of a round; gives what failed."""
        return self.scheduler.announce((), "me", lambda: self.clock.now() + LASTS, new=True)

    def raw(self, name: str = "n1") -> Raw:
        return self.world.objects[f"/api/v1/nodes/{name}"]

    def level(self, name: str = "n1") -> Level:
        reading = self.scheduler.revalidate(name)
        return reading.view.marks.level
