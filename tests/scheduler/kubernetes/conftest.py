"""A small cluster, its connection, and a scheduler on it that holds the lease."""

from collections.abc import Iterator

import pytest

from foundation.kubernetes.client import KubernetesClient
from tests.scheduler.kubernetes.api_world import World, served
from tests.scheduler.kubernetes.fleet import NAMES, Fleet
from tests.scheduler.kubernetes.objects import Hand, add, node


@pytest.fixture
def world() -> World:
    made = World()
    add(made, node("n1"), node("n2"))
    return made


@pytest.fixture
def cluster(world: World) -> Iterator[KubernetesClient]:
    with served(world) as made:
        yield made


@pytest.fixture
def hand(world: World, cluster: KubernetesClient) -> Hand:
    return Hand(world, cluster)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """A controller and its nodes."""
    world = World()
    add(world, *(node(name) for name in NAMES))
    with served(world) as cluster:
        yield Fleet(cluster, world)
