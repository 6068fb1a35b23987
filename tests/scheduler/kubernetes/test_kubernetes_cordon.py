"""Hard marks as cordons and device taints: only ours come and go."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import kubernetes_validate
import pytest

from foundation.kubernetes.client import KubernetesClient
from policy.fleet import Level, NodeView, Score, UnitView
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.protocols import NodeSignal
from scheduler.ports.readings import Switches
from scheduler.ports.risks import Risks
from tests.scheduler.cluster import MODEL
from tests.scheduler.kubernetes.api_world import Raw, World, managed
from tests.scheduler.kubernetes.fleet import Fleet
from tests.scheduler.kubernetes.objects import LASTS, SETTINGS, Hand

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
    assert (view.cordoned_by, view.marker_removed, view.why_out_of_service) == (None, False, "drained by predrain"), (
        "it is no foreign hand"
    )
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
    assert (view.marker_removed, view.uncordoned, view.cordoned_by) == (True, True, None)
    hand.do("release", to=Level.PUBLISH)
    assert hand.level() is Level.PUBLISH
    assert KEY not in hand.raw()["metadata"]["annotations"]
    assert (seen(hand).marker_removed, seen(hand).uncordoned) == (True, False), (
        "also for a controller that knows nothing"
    )
    hand.later(timedelta(hours=7))
    assert not seen(hand).marker_removed, "after the end of what we put on, nobody knows"


def test_a_person_who_cordons_our_node_anew_would_lose_the_cordon_with_our_mark_and_keeps_it(world, hand):
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
def test_a_cordon_without_its_annotation_or_writer_is_a_persons(world, hand, change):
    hand.do("swap")
    world.edit(NODE, change)
    hand.do("release")
    assert hand.raw()["spec"]["unschedulable"] is True


def test_where_nobody_records_who_cordons_none_of_ours_could_be_recognized_and_none_is_made(world, cluster):
    hand = Hand(world, cluster, CORDONS)  # a server that tracks no fields
    hand.do("swap")
    assert "unschedulable" not in hand.raw()["spec"]
    hand.scheduler.read_fleet()
    (message,) = hand.announce()
    assert message.startswith("no node is cordoned, only tainted")


ON = replace(SETTINGS, device_taints=True)
DRIVER = "gpu.nvidia.com"
FOREIGN = {"metadata": {"name": "predrain-of-a-person"}, "spec": {"taint": {"key": "x/y", "effect": "NoSchedule"}}}


def slice_of(node: str, *uuids: str, generation: int = 1, version: str = "v1", part: str = "0") -> Raw:
    """What the driver on a node says of its GPUs; the last one is cut in parts."""
    devices: list[Raw] = []
    for at, uuid in enumerate(uuids):
        devices.append({"name": f"gpu-{at}", "attributes": {"uuid": {"string": uuid}, "index": {"int": at}}})
    parts = {"uuid": {"string": f"MIG-{part}"}, "parentUUID": {"string": uuids[-1]}}
    devices.append({"name": f"gpu-{len(uuids) - 1}-mig-1g.5gb-0-1", "attributes": parts})
    if version == "v1beta1":
        devices = [{"name": device["name"], "basic": {"attributes": device["attributes"]}} for device in devices]
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    return {
        "apiVersion": f"resource.k8s.io/{version}", "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{generation}-{part}"},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
    }  # fmt: skip


def offers(world: World, rules: str, slices: str, *more: Raw) -> None:
    """Make a server that offers device taints, with two nodes of two GPUs."""
    group = "/apis/resource.k8s.io"
    versions = sorted({rules, slices, "v1alpha3"})
    for version in versions:
        names = [name for name, at in (("devicetaintrules", rules), ("resourceslices", slices)) if at == version]
        world.discovery[f"{group}/{version}"] = {"resources": [{"name": name} for name in names]}
    world.kinds = ("/devicetaintrules", "/resourceslices")
    for item in more or (slice_of("n1", "GPU-a", "GPU-b", version=slices), slice_of("n2", "GPU-c", version=slices)):
        world.put(f"{group}/{slices}/resourceslices/{item['metadata']['name']}", item)


def rules_of(world: World) -> dict[str, Raw]:
    result = [item for path, item in world.objects.items() if "/devicetaintrules/predrain-" in path]
    return {item["metadata"]["name"]: item for item in result}


def devices(world: World) -> list[str]:
    result = [item["spec"]["deviceSelector"] for item in rules_of(world).values() if "deviceSelector" in item["spec"]]
    return sorted(f"{item['pool']}/{item['device']}" for item in result)


class Drains(Fleet):
    """A controller with device taints on a world."""

    def __init__(self, world: World, cluster: KubernetesClient) -> None:
        super().__init__(cluster, world, ON)
        self.scheduler = self.controller.scheduler

    def round(self, **values: float) -> Any:
        self.later(timedelta(minutes=1))
        self.scored(**values)
        return self.controller.round()

    def scored(self, **values: float) -> None:
        now = self.clock.now()
        end = now + timedelta(hours=6)
        names = {"n1": ("GPU-a", "GPU-b"), "n2": ("GPU-c",)}
        units = {
            node: tuple(UnitView(gpu, Score(values.get(gpu[-1], 0.01), now, end, ("why",))) for gpu in gpus)
            for node, gpus in names.items()
        }
        self.risks.risks = Risks(units, now, MODEL, now - timedelta(days=1))


@pytest.fixture
def drains(world: World, cluster: KubernetesClient) -> Drains:
    offers(world, "v1", "v1")
    return Drains(world, cluster)


@pytest.mark.parametrize(
    ("rules", "slices", "kubernetes"),
    [("v1alpha3", "v1beta1", "1.33"), ("v1beta2", "v1", "1.36"), ("v1", "v1", "1.37")],
)
def test_each_gpu_that_a_hard_mark_is_due_to_is_tainted_in_the_version_that_the_server_offers(
    world: World, cluster: KubernetesClient, rules: str, slices: str, kubernetes: str
) -> None:
    offers(world, rules, slices)
    for path in [path for path in world.objects if "resourceslices" in path]:
        content = {**world.objects[path], "metadata": {"name": "x"}}
        kubernetes_validate.validate(content, kubernetes, strict=True)
    drains = Drains(world, cluster)
    report = drains.round(b=0.9, c=0.45)
    assert devices(world) == ["n1/gpu-1", "n1/gpu-1-mig-1g.5gb-0-1"], "the healthy GPU of the node is not"
    assert [note for note in report.notes if "device taint" in note] == ["set: device taint for GPU-b on n1"] * 2
    for rule in rules_of(world).values():
        sent = {
            **rule,
            "metadata": {k: v for k, v in rule["metadata"].items() if k in ("name", "labels", "annotations")},
        }
        kubernetes_validate.validate(sent, kubernetes, strict=True)
        assert rule["apiVersion"] == f"resource.k8s.io/{rules}"
        assert rule["spec"]["taint"] == {"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule"}
    version = world.version
    again = drains.round(b=0.9, c=0.45)
    assert not [note for note in again.notes if "device taint" in note]
    changed = [path for path, item in world.objects.items() if int(item["metadata"]["resourceVersion"]) > version]
    assert not [path for path in changed if "devicetaintrules" in path], "a second round changes nothing"
    drains.round()
    assert devices(world) == []


def test_a_rehearsal_shows_the_rules_that_would_be_set_and_taken_off_and_sets_none(world, drains):
    drains.round()
    drains.clock.move(timedelta(minutes=1))
    drains.scored(a=0.9)
    notes = [note for note in drains.controller.rehearse().notes if "devicetaintrule" in note]
    assert len(notes) == 1
    assert notes[0].startswith("would also be written: devicetaintrule predrain-")
    spec = {
        "deviceSelector": {"device": "gpu-0", "driver": DRIVER, "pool": "n1"},
        "taint": {"effect": "NoSchedule", "key": "predrain.io/at-risk", "value": "high"},
    }
    assert notes[0].endswith(f": spec: (none) -> {json.dumps(spec, sort_keys=True)}")
    assert devices(world) == []
    drains.round(a=0.9)
    assert [item["spec"] for item in rules_of(world).values()] == [spec], "exactly what was shown"
    ending = drains.controller.rehearse(Switches(release_all=True)).notes
    assert [note.split(": ", 1)[1] for note in ending if "devicetaintrule" in note] == [
        f"devicetaintrule {name}: spec: GPU-a -> (none)" for name in rules_of(world)
    ]
    world.fail("GET", "devicetaintrules", 403, content={"message": "no"})
    failed = drains.controller.rehearse()
    assert [error for error in failed.errors if "no" in error], "what cannot be read cannot be shown"


def test_only_what_is_ours_is_taken_off_and_another_gpu_behind_the_name_is_another_rule(world, drains):
    folder = "/apis/resource.k8s.io/v1/devicetaintrules"
    world.put(f"{folder}/predrain-of-a-person", FOREIGN)
    labelled = {"metadata": {"labels": {"predrain.io/device-taint": "true"}}, "spec": {}}
    world.put(f"{folder}/somebodys", labelled)
    drains.round(a=0.9)
    assert devices(world) == ["n1/gpu-0"]
    before = set(rules_of(world))
    newer = slice_of("n1", "GPU-new", "GPU-a", generation=2)
    world.put("/apis/resource.k8s.io/v1/resourceslices/n1-2-0", newer)
    drains.round(a=0.9)
    assert devices(world) == ["n1/gpu-1", "n1/gpu-1-mig-1g.5gb-0-1"], "it moved to another slot"
    assert not (before - {"predrain-of-a-person"}) & set(rules_of(world))
    drains.scheduler.set_switches(Switches(release_all=True))
    drains.round(a=0.9)
    assert set(rules_of(world)) == {"predrain-of-a-person"}
    assert f"{folder}/somebodys" in world.objects


@pytest.mark.parametrize("part", ["value", "key", "effect", "device"])
def test_a_device_taint_that_somebody_edited_stays_and_is_reported_and_a_time_of_the_server_is_no_edit(
    world: World, drains: Drains, part: str
) -> None:
    drains.round(a=0.9, c=0.9)
    names = {rule["spec"]["deviceSelector"]["pool"]: name for name, rule in rules_of(world).items()}
    folder = "/apis/resource.k8s.io/v1/devicetaintrules"

    def edit(raw: Raw) -> None:
        raw["spec"]["deviceSelector" if part == "device" else "taint"][part] = "rma-4711"

    world.edit(f"{folder}/{names['n1']}", edit)
    world.edit(f"{folder}/{names['n2']}", lambda raw: raw["spec"]["taint"].update(timeAdded="2026-11-21T12:00:00Z"))
    drains.scheduler.set_switches(Switches(release_all=True))
    report = drains.round(a=0.9, c=0.9)
    assert set(rules_of(world)) == {names["n1"]}
    assert any(names["n1"] in note and "edited" in note for note in report.notes)


def test_a_device_taint_that_is_removed_twice_is_not_set_again_and_is_reported(world: World, drains: Drains) -> None:
    for _ in range(5):
        report = drains.round(a=0.9)
        for name in rules_of(world):
            del world.objects[f"/apis/resource.k8s.io/v1/devicetaintrules/{name}"]
    assert devices(world) == []
    assert any("removed 2 times: it is not re-applied" in note for note in report.notes)
    drains.round()
    drains.round(a=0.9)
    assert devices(world) == ["n1/gpu-0"], "in the next episode it is"


def test_a_server_without_device_taints_is_reported_and_asked_again(world: World, cluster: KubernetesClient) -> None:
    drains = Drains(world, cluster)
    notes = [note for note in drains.round(a=0.9).notes if "device" in note]
    assert notes == ["the server offers no device taints (resource.k8s.io, DeviceTaintRule): none is set"]
    offers(world, "v1", "v1")
    drains.round(a=0.9)
    assert devices(world) == ["n1/gpu-0"], "it was upgraded"


def test_what_cannot_be_read_takes_nothing_off_and_fails_nothing_else(world: World, drains: Drains) -> None:
    drains.round(a=0.9)
    world.fail("GET", "resourceslices", 403, content={"message": "no"})
    report = drains.round(a=0.9)
    assert next(note for note in report.notes if "n1" in note).startswith("the devices of n1 cannot be read: ")
    assert devices(world) == ["n1/gpu-0"]
    world.fail("DELETE", "devicetaintrules", 403, content={"message": "no"})
    report = drains.round()
    assert [note for note in report.notes if "stays: HTTP 403: no" in note]
    assert not report.errors
    drains.round()
    assert devices(world) == []


def test_a_kill_switch_sets_nothing_new_and_a_state_that_was_lost_takes_nothing_off(world, drains):
    drains.round(a=0.9)
    drains.scheduler.set_switches(Switches(kill=True))
    signal = NodeSignal("n1", "high", Level.SWAP, (), ())
    assert drains.scheduler.hold_lease("p1", LASTS) is not None
    until = drains.clock.now() + LASTS
    assert drains.scheduler.announce([signal], "p1", lambda: until, new=True) == ()
    assert devices(world) == ["n1/gpu-0"]
    other = NodeSignal("n2", "high", Level.SWAP, ("GPU-c",), ())
    assert drains.scheduler.announce([signal, other], "p1", lambda: until, new=True) == ()
    message = drains.scheduler.announce([], "another", lambda: until, new=True)
    assert [word.split(" stays: ")[1] for word in message] == ["another does not hold the lease"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_cordon_that_two_installations_noted_ends_with_the_last_of_them(world, cluster, hand, first):
    hands = (hand, Hand(world, cluster, replace(CORDONS, prefix="b.example", namespace="b")))
    hand.do("swap")
    world.edit(NODE, by(None))
    hands[1].do("swap")
    hands[first].do("release")
    assert hand.raw()["spec"].get("unschedulable"), "the other one relies on it"
    hands[1 - first].do("release")
    assert "unschedulable" not in hand.raw()["spec"]
    assert hand.raw()["spec"].get("taints") is None
