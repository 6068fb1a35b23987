"""Other clients of the same nodes: webhooks and reconcilers change predrain's writes, tools share its cordon."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from foundation.kubernetes.client import KubernetesClient
from policy.fleet import Level
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.report import RoundReport
from tests.scheduler.kubernetes.api_world import Raw, World, managed
from tests.scheduler.kubernetes.fleet import NAMES, OURS, Fleet
from tests.scheduler.kubernetes.objects import SETTINGS, Hand, add, node

NODE = "/api/v1/nodes/n1"
Webhook = Callable[[Raw, Raw], object]


def admit(world: World, webhook: Webhook) -> Callable[[], None]:
    """Let a webhook change each write of a node, given as it was and as it will be; returns how to take it away."""
    put = world.put

    def changed(path: str, content: Raw) -> Raw:
        if "/nodes/" in path:
            content = copy.deepcopy(content)
            webhook(world.objects.get(path, {}), content)
        return put(path, content)

    world.put = changed
    return lambda: setattr(world, "put", put)


def without_taints(_: Raw, content: Raw) -> None:
    taints = [taint for taint in content["spec"].get("taints") or [] if not taint["key"].startswith(OURS)]
    content["spec"]["taints"] = taints


def keeping_taints(before: Raw, content: Raw) -> None:
    content["spec"]["taints"] = before.get("spec", {}).get("taints") or content["spec"].get("taints") or []


def outcomes(report: RoundReport, name: str = "n1") -> dict[str, str]:
    return {step.action.verb: step.outcome for step in report.steps if step.action.node == name}


def text_of(report: RoundReport) -> str:
    decided = [reason for decision in report.plan.nodes.values() for reason in decision.reasons]
    return "; ".join((*report.plan.reasons, *decided, *(step.message for step in report.steps)))


def test_an_answer_without_the_taint_is_no_success_and_is_not_tried_for_ever(fleet: Fleet) -> None:
    stop = admit(fleet.world, without_taints)
    fleet.scored(n1=0.9)
    reports = [fleet.round() for _ in range(8)]
    tried = [outcomes(report).get("swap") for report in reports]
    assert tried == ["failed", "failed", None, None, None, None, None, None]
    assert all(outcomes(report).get("drain") != "done" for report in reports)
    assert "admission webhook" in text_of(reports[0])
    for report in reports[2:]:
        assert "n1: the marker was missing from 2 responses" in text_of(report)
        assert "person" not in text_of(report)
    stop()
    assert outcomes(fleet.round()).get("swap") is None, "not in this episode"
    fleet.scored(n1=0.01)
    for _ in range(2):
        fleet.round()
        fleet.scored()
    metadata = fleet.world.objects[NODE]["metadata"]
    assert not [key for key in {**metadata["labels"], **metadata["annotations"]} if key.startswith(OURS)]
    fleet.scored(n1=0.9)
    assert outcomes(fleet.round())["swap"] == "done", "and in the next one it is tried again"


def test_marks_that_a_reconciler_removes_are_not_set_again_and_no_person_is_blamed(fleet: Fleet) -> None:
    fleet.scored(n1=0.9, n2=0.9)
    for number in range(5):
        report = fleet.round()
        assert outcomes(report).get("swap") == ("done" if number == 0 else None)
        if number:
            assert "within 60 s, on 2 nodes: another controller or an admission webhook" in text_of(report)
            assert "operator" not in text_of(report)
        for name in ("n1", "n2"):
            fleet.world.edit(f"/api/v1/nodes/{name}", lambda raw: raw["spec"].update(taints=[]))


def test_a_taint_that_the_server_keeps_stays_ours_until_it_is_off(world: World, hand: Hand) -> None:
    before = copy.deepcopy(hand.raw()["metadata"])
    hand.do("swap")
    stop = admit(world, keeping_taints)
    for _ in range(3):
        answer = hand.do("release")
        assert (answer.kind, "was not removed" in answer.message) == ("refused", True)
        assert hand.level() is Level.SWAP, "its record is not removed before it"
    stop()
    assert hand.do("release").kind == "done"
    assert hand.level() is Level.NONE
    assert hand.raw()["metadata"].get("annotations", {}) == before.get("annotations", {})


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_an_answer_without_what_is_published_is_no_success(world: World, hand: Hand, part: str) -> None:
    def strip(_: Raw, content: Raw) -> None:
        texts = content["metadata"].get(part) or {}
        content["metadata"][part] = {key: text for key, text in texts.items() if not key.startswith(OURS)}

    admit(world, strip)
    assert hand.do("publish").kind == "refused"


def test_a_taint_that_got_a_time_is_not_ours_any_more(world: World, hand: Hand) -> None:
    hand.do("swap")
    world.edit(NODE, lambda raw: raw["spec"]["taints"][0].update(timeAdded="2026-11-21T12:00:00Z"))
    hand.do("release")
    left = {"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule", "timeAdded": "2026-11-21T12:00:00Z"}
    assert hand.raw()["spec"]["taints"] == [left]


USERS: list[tuple[Callable[[Raw], object], Callable[[Raw], object]]] = [
    (
        lambda raw: raw["metadata"].setdefault("annotations", {}).update({"weave.works/kured-reboot-in-progress": "x"}),
        lambda raw: raw["metadata"]["annotations"].pop("weave.works/kured-reboot-in-progress"),
    ),
    (
        lambda raw: raw["metadata"]["labels"].update({"nvidia.com/gpu-driver-upgrade-state": "drain-required"}),
        lambda raw: raw["metadata"]["labels"].update({"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}),
    ),
    (
        lambda raw: raw["spec"]["taints"].append({"key": "medik8s.io/drain", "effect": "NoSchedule"}),
        lambda raw: raw["spec"].update(
            taints=[taint for taint in raw["spec"].get("taints") or [] if taint["key"] != "medik8s.io/drain"]
        ),
    ),
]


@pytest.fixture
def cordons(world: World, cluster: KubernetesClient) -> Hand:
    settings: KubernetesSettings = replace(SETTINGS, cordon=True)
    world.edit(NODE, lambda raw: raw["metadata"].update(managedFields=managed(None)))
    return Hand(world, cluster, settings)


def test_an_answer_that_lacks_only_a_label_is_no_success_and_counts_as_no_removed_taint(world, cordons):
    admit(world, lambda _, content: content["metadata"]["labels"].pop("predrain.io/risk-tier", None))
    assert cordons.do("swap").kind == "refused"
    record = json.loads(cordons.raw()["metadata"]["annotations"]["predrain.io/applied-taints"])
    assert (record["level"], record.get("refused", 0)) == ("swap", 0)
    assert cordons.raw()["spec"]["unschedulable"]


@pytest.mark.parametrize(("begin", "end"), USERS)
def test_our_cordon_stays_while_another_tool_relies_on_it_and_ends_after_that(world, cordons, begin, end):
    cordons.do("swap")
    world.edit(NODE, begin)
    assert cordons.do("release").kind == "done"
    for _ in range(2):
        assert cordons.raw()["spec"]["unschedulable"] is True
        assert not [taint for taint in cordons.raw()["spec"].get("taints") or [] if taint["key"].startswith(OURS)]
        reading = cordons.scheduler.revalidate("n1")
        assert "cordon stays while" in (reading.view.notice or "")
        assert (reading.view.marks.level, reading.view.why_out_of_service) == (Level.NONE, None)
        assert cordons.do("release").kind == "already"
    assert "n1" in {reading.view.name for reading in cordons.scheduler.read_fleet().nodes}
    world.edit(NODE, end)
    assert cordons.level() is Level.PUBLISH, "what is left of it is to be removed"
    assert cordons.do("release").kind == "done"
    assert "unschedulable" not in cordons.raw()["spec"]
    annotations = cordons.raw()["metadata"].get("annotations", {})
    assert not [key for key in annotations if key.startswith(OURS)]


def test_a_cordon_that_two_clients_wrote_is_not_ours_alone(world: World, cordons: Hand) -> None:
    cordons.do("swap")
    both = [*managed("predrain"), *managed("kubectl-cordon")[1:]]
    world.edit(NODE, lambda raw: raw["metadata"].update(managedFields=both))
    cordons.do("release")
    assert cordons.raw()["spec"]["unschedulable"] is True


@pytest.mark.parametrize("also", [(), ("predrain.io/risk-tier",)])
def test_marks_end_on_a_node_that_left_the_selector(world, cluster, also):
    add(world, *(node(name) for name in NAMES))
    for name in NAMES:
        world.edit(f"/api/v1/nodes/{name}", lambda raw: raw["metadata"]["labels"].update(pool="train"))
    fleet = Fleet(cluster, world, replace(SETTINGS, selector="pool=train"))
    fleet.scored(n1=0.9)
    fleet.round()
    assert "NoSchedule" in fleet.ours("n1")
    world.edit(NODE, lambda raw: [raw["metadata"]["labels"].pop(key) for key in ("pool", *also)])
    fleet.later(timedelta(minutes=1))
    report = fleet.round()
    assert fleet.ours("n1") == []
    assert "it is not in kubernetes.selector" in text_of(report)


@pytest.mark.parametrize("value", ["False", "no", "off", "0", "maybe"])
@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_an_opt_out_in_any_spelling_keeps_every_mark_off(fleet: Fleet, part: str, value: str) -> None:
    fleet.world.edit(NODE, lambda raw: raw["metadata"].setdefault(part, {}).update({"predrain.io/managed": value}))
    fleet.scored(n1=0.9)
    report = fleet.round()
    assert fleet.ours("n1") == []
    assert ("neither true nor false" in text_of(report)) == (value == "maybe")


def test_marks_that_a_backup_brings_back_end_as_they_would_have(fleet: Fleet) -> None:
    fleet.scored(n1=0.9)
    fleet.round()
    saved = copy.deepcopy(fleet.world.objects[NODE])
    fleet.scored(n1=0.01)
    for _ in range(4):
        fleet.round()
        fleet.scored()
    assert fleet.ours("n1") == []
    fleet.world.edit(NODE, lambda raw: raw.update(metadata=saved["metadata"], spec=saved["spec"]))
    assert fleet.ours("n1") == ["NoSchedule"]
    fleet.later(timedelta(days=2))
    fleet.round()
    assert fleet.ours("n1") == [], "its record is intact, and its end is over"


@pytest.mark.parametrize(
    ("condition", "status", "marks"),
    [
        *((condition, "True", []) for condition in ("VMEventScheduled", "DrainScheduled", "SlurmNodeReboot")),
        # it reports a fault: what repairs the node taints or cordons it
        ("AcceleratedHardwareReady", "False", ["NoSchedule"]),
    ],
)
def test_a_node_that_a_condition_gives_to_another_tool_gets_no_mark(fleet, condition, status, marks):
    conditions = fleet.world.objects[NODE]["status"]["conditions"]
    fleet.world.edit(
        NODE, lambda raw: raw["status"].update(conditions=[*conditions, {"type": condition, "status": status}])
    )
    fleet.scored(n1=0.9, n2=0.9)
    report = fleet.round()
    assert (fleet.ours("n1"), fleet.ours("n2")) == (marks, ["NoSchedule"])
    assert ("owns it" in text_of(report)) is (not marks)
    fleet.world.edit(NODE, lambda raw: raw["status"].update(conditions=conditions))
    fleet.round()
    assert fleet.ours("n1") == ["NoSchedule"]
