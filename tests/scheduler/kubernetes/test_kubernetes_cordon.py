"""The cordon that may go with a hard mark: how it was before is recorded, and nobody else's is ever undone."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from foundation.kubernetes.client import KubernetesClient
from policy.fleet import Level, NodeView
from scheduler.kubernetes.settings import KubernetesSettings
from tests.scheduler.kubernetes.api_world import Raw, World, managed
from tests.scheduler.kubernetes.objects import SETTINGS, Hand

NODE = "/api/v1/nodes/n1"
CORDONS: KubernetesSettings = replace(SETTINGS, cordon=True)
KEY = "predrain.io/cordoned-by-us"
OF_THE_LIFECYCLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@pytest.fixture
def hand(world: World, cluster: KubernetesClient) -> Hand:
    world.edit(NODE, by(None))
    return Hand(world, cluster, CORDONS)


def seen(hand: Hand) -> NodeView:
    reading = hand.scheduler.revalidate("n1")
    return reading.view


def by(manager: str | None) -> Callable[[Raw], object]:
    """Cordon a node by the hand of somebody, as the server notes it; None: uncordon it."""

    def change(node: Raw) -> None:
        node["metadata"]["managedFields"] = managed(manager)
        node["spec"].pop("unschedulable", None)
        node["spec"] |= {"unschedulable": True} if manager else {}

    return change


def test_a_hard_mark_cordons_and_its_release_takes_the_cordon_off(world: World, hand: Hand) -> None:
    hand.do("publish")
    hand.do("avoid", tier="elevated")
    assert "unschedulable" not in hand.raw()["spec"], "a soft mark does not"
    writes = {write.path: (write.before, write.after) for write in hand.do("swap").writes}
    assert writes["spec.unschedulable"] == (None, "true")
    assert '"earlier": "schedulable"' in hand.raw()["metadata"]["annotations"][KEY]
    world.edit(NODE, lambda node: node["spec"]["taints"].append(OF_THE_LIFECYCLE))
    view = seen(hand)
    assert (view.cordoned_by, view.undone, view.lost) == (None, False, "drained by us"), "it is no foreign hand"
    hand.do("drain")
    hand.do("release", to=Level.SWAP)
    assert hand.raw()["spec"]["unschedulable"] is True
    hand.do("release")
    assert "unschedulable" not in hand.raw()["spec"]
    assert KEY not in hand.raw()["metadata"].get("annotations", {})


def test_the_release_of_a_mark_whose_taint_a_person_removed_takes_the_cordon_off(world: World, hand: Hand) -> None:
    hand.do("swap")
    world.edit(NODE, lambda node: node["spec"].pop("taints"))
    hand.do("release")
    assert "unschedulable" not in hand.raw()["spec"], "without its annotation it would be nobody's"


def test_a_node_that_a_person_cordoned_first_stays_cordoned(world: World, hand: Hand) -> None:
    world.edit(NODE, by("kubectl-cordon"))
    hand.do("swap")  # the policy would not; whoever cordons in between is not to be undone either
    assert KEY not in hand.raw()["metadata"].get("annotations", {})
    assert seen(hand).cordoned_by == "kubectl-cordon (it is unschedulable)"
    hand.do("release")
    assert hand.raw()["spec"]["unschedulable"] is True


def test_an_uncordon_by_a_person_undoes_our_mark_and_is_remembered_after_its_release(world: World, hand: Hand) -> None:
    hand.do("publish")
    hand.do("swap")
    world.edit(NODE, by(None))
    view = seen(hand)
    assert (view.undone, view.uncordoned, view.cordoned_by) == (True, True, None)
    hand.do("release", to=Level.PUBLISH)
    assert hand.level() is Level.PUBLISH
    assert KEY not in hand.raw()["metadata"]["annotations"]
    assert (seen(hand).undone, seen(hand).uncordoned) == (True, False), "also for a controller that knows nothing"
    hand.later(timedelta(hours=7))
    assert not seen(hand).undone, "after the end of what we put on, nobody knows"


def test_a_person_who_cordons_our_node_anew_would_lose_the_cordon_with_our_mark_and_keeps_it(
    world: World, hand: Hand
) -> None:
    hand.do("swap")
    world.edit(NODE, by(None))
    world.edit(NODE, by("kubectl-cordon"))
    assert KEY in hand.raw()["metadata"]["annotations"], "by its annotation alone the cordon would be ours"
    assert seen(hand).cordoned_by == "kubectl-cordon (it is unschedulable)"
    hand.do("release")
    assert hand.raw()["spec"]["unschedulable"] is True
    assert KEY not in hand.raw()["metadata"].get("annotations", {})


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node["metadata"]["annotations"].pop(KEY),
        lambda node: node["metadata"].update(managedFields=managed(None)),
    ],
)
def test_a_cordon_without_its_annotation_or_writer_is_a_persons(
    world: World, hand: Hand, change: Callable[[Raw], object]
) -> None:
    hand.do("swap")
    world.edit(NODE, change)
    hand.do("release")
    assert hand.raw()["spec"]["unschedulable"] is True


def test_where_nobody_records_who_cordons_none_of_ours_could_be_recognized_and_none_is_made(
    world: World, cluster: KubernetesClient
) -> None:
    hand = Hand(world, cluster, CORDONS)  # a server that tracks no fields
    hand.do("swap")
    assert "unschedulable" not in hand.raw()["spec"]
    hand.scheduler.read_fleet()
    (message,) = hand.announce()
    assert message.startswith("no node is cordoned: the server does not tell who cordons")
