"""What is read of nodes and pods: whose they are, what runs there, and what is no business of ours."""

from dataclasses import replace
from datetime import timedelta

import pytest

from foundation.kubernetes.client import KubernetesClient
from policy.fleet import JobView, Level, NodeView
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.errors import SchedulerError
from tests.scheduler.kubernetes.api_world import Raw, World
from tests.scheduler.kubernetes.fleet import Fleet
from tests.scheduler.kubernetes.objects import SETTINGS, T0, Hand, add, node, pod


def views(hand: Hand) -> dict[str, NodeView]:
    return {item.view.name: item.view for item in hand.scheduler.read_fleet().nodes}


def test_nodes_with_gpus_are_the_fleet_and_so_is_what_carries_our_marks(world: World, hand: Hand) -> None:
    cpu, broken = node("cpu"), node("broken")
    cpu["status"]["capacity"] = cpu["metadata"]["labels"] = {}
    broken["status"]["capacity"] = {}
    left = node("left")
    left["status"]["capacity"], left["metadata"]["labels"] = {}, {"predrain.io/risk-tier": "high"}
    add(world, cpu, broken, left)
    result = views(hand)
    assert set(result) == {"n1", "n2", "broken", "left"}
    assert result["left"].marks.level is Level.NONE
    assert "no record" in (result["left"].notice or "")


def test_a_selector_narrows_the_fleet_and_marks_outside_of_it_are_to_be_removed(world, cluster):
    add(world, node("n3"))
    world.edit("/api/v1/nodes/n1", lambda raw: raw["metadata"]["labels"].update(pool="train"))
    hand = Hand(world, cluster, replace(SETTINGS, selector="pool=train"))
    hand.do("swap", "n2")
    result = views(hand)
    assert set(result) == {"n1", "n2"}
    assert (result["n1"].opt_out, result["n2"].opt_out) == (None, "it is not in kubernetes.selector")
    assert result["n2"].marks.tainted


def test_a_job_has_the_gpus_of_all_its_pods_and_stands_on_each_of_its_nodes(world: World, hand: Hand) -> None:
    saved = {"predrain.io/checkpointed-at": "2026-11-21T11:00:00Z", "predrain.io/checkpoint": "annotation"}
    add(
        world,
        pod("a", "n1", annotations=saved),
        pod("b", "n2", activeDeadlineSeconds=36_000, annotations={"predrain.io/elastic": "true"}),
        pod("web", "n1", gpus=0),
        {**pod("over", "n1"), "status": {"phase": "Succeeded", "startTime": "2026-11-21T06:00:00Z"}},
    )
    result = views(hand)
    (job,) = result["n1"].jobs
    assert result["n2"].jobs == (job,)
    assert (job.name, job.gpus, job.can_checkpoint, job.can_shrink) == ("team/train/u-train", 16, True, True)
    assert (job.started_at, job.checkpointed_at, job.ends_at) == (
        T0.replace(hour=6), T0.replace(hour=11), T0.replace(hour=16),
    )  # fmt: skip
    again = hand.scheduler.revalidate("n1")
    assert again.view.jobs == (job,), "of one node's pods alone it would be half as large"
    assert again.view.scopes == result["n1"].scopes


def test_a_job_that_came_since_is_seen_when_the_node_is_read_again(world: World, hand: Hand) -> None:
    views(hand)
    add(world, pod("late", "n1", gpus=2))
    again = hand.scheduler.revalidate("n1")
    assert [job.gpus for job in again.view.jobs] == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unschedulable": True}, "cordoned by an operator or another tool (it is unschedulable)"),
        ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]},
         None),
        ({"taints": [{"key": "AggregatedNodeHealth", "effect": "NoSchedule"}]},
         "owned by NVSentinel"),
        ({"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, None),
        ({"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, None),
        ({"taints": [{"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule"}]},
         "cordoned by an operator or another tool (taint predrain.io/at-risk=high:NoSchedule)"),
    ],
)  # fmt: skip
def test_who_took_a_node_out_of_service_is_distinguished(world: World, hand: Hand, change: dict, message: str) -> None:
    world.edit("/api/v1/nodes/n1", lambda raw: raw["spec"].update(change))
    assert views(hand)["n1"].why_out_of_service == message


def test_a_node_that_is_not_ready_is_down_and_one_that_is_being_deleted_rests(world: World, hand: Hand) -> None:
    world.edit("/api/v1/nodes/n1", lambda raw: raw["status"]["conditions"][0].update(status="Unknown"))
    world.edit("/api/v1/nodes/n2", lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-21T00:00:00Z"))
    assert [(view.down, view.counted) for view in views(hand).values()] == [(True, True), (False, False)]


def test_a_node_that_cannot_be_understood_is_never_written_to(world: World, hand: Hand) -> None:
    world.edit("/api/v1/nodes/n1", lambda raw: raw["spec"].update(taints=[{"key": "no effect"}]))
    assert not views(hand)["n1"].readable
    assert hand.do("release").kind == "conflict"


def test_a_pod_that_cannot_be_understood_still_occupies_its_node(world: World, hand: Hand) -> None:
    broken = pod("broken", "n1")
    broken["spec"]["containers"] = "none"
    add(world, broken)
    assert [job.name for job in views(hand)["n1"].jobs] == ["team/broken"]


@pytest.mark.parametrize("key", ["checkpointed-at", "ends-at"])
@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-05:00", "0001-01-01T00:00:00+05:00", "soon"])
def test_an_instant_outside_what_utc_can_tell_is_none(world: World, hand: Hand, key: str, text: str) -> None:
    add(world, pod("odd", "n1", annotations={f"predrain.io/{key}": text}))
    (job,) = views(hand)["n1"].jobs
    assert (job.checkpointed_at, job.ends_at) == (None, None)
    assert object_of(JobView, plain_of(job), "job") == job, "as the ledger keeps it"


def test_gpus_places_and_driver_are_taken_from_annotations_and_labels(world: World, cluster: KubernetesClient) -> None:
    uuid = "GPU-8dcd427f-1f5a-4d61-b2f0-9f4c3b0a0001"
    world.edit("/api/v1/nodes/n1", lambda raw: raw["metadata"].update(annotations={"predrain.io/gpus": "a-1, a-2"}))
    world.edit(
        "/api/v1/nodes/n2", lambda raw: raw["metadata"].update(annotations={"hami": f"{uuid},10,32768:{uuid},1"})
    )
    labels = {
        "topology.kubernetes.io/zone": "z", "rack": "r7", "nvidia.com/gpu.clique": "c.1",
        "nvidia.com/cuda.driver.major": "570", "nvidia.com/cuda.driver.minor": "86",
    }  # fmt: skip
    world.edit("/api/v1/nodes/n1", lambda raw: raw["metadata"]["labels"].update(labels))
    settings = replace(SETTINGS, rack_labels=("rack",), gpu_annotations=("hami",), cluster="east")
    result = views(Hand(world, cluster, settings))
    assert [unit.name for unit in result["n1"].units] == ["a-1", "a-2"]
    assert [unit.name for unit in result["n2"].units] == [uuid]
    one = result["n1"]
    assert (one.cluster, one.group, one.rack, one.domain, one.software) == ("east", "z", "r7", "c.1", "driver 570.86")
    assert result["n2"].group == "none"


@pytest.mark.parametrize(("path", "what"), [("/pods$", "pods"), ("/configmaps/", "configmaps")])
def test_where_pods_or_switches_may_not_be_read_nodes_can_still_be_released_and_nothing_new_be_done(
    world: World, hand: Hand, cluster: KubernetesClient, path: str, what: str
) -> None:
    acting = Fleet(cluster, world)
    hand.scheduler.drop_lease("me")
    acting.scored(n1=0.9)
    acting.round()
    assert acting.ours("n1") == ["NoSchedule"]
    world.fail("GET", path, 403, content={"message": f'cannot read resource "{what}"'}, times=99)
    fleet = hand.scheduler.read_fleet()
    assert {reading.view.name for reading in fleet.nodes} == {"n1", "n2"}
    assert fleet.partial
    assert not any(reading.jobs_known for reading in fleet.nodes)
    assert f'cannot read resource "{what}"' in (fleet.error or "")
    assert fleet.switches.kill is (what == "configmaps"), "a person may have set the kill switch"
    acting.later(timedelta(days=2))
    acting.scored(n1=0.01, n2=0.9)
    acting.round()
    assert (acting.ours("n1"), acting.ours("n2")) == ([], [])


def test_a_listing_that_expires_begins_again_and_is_given_up_in_the_end(world, cluster):
    hand = Hand(world, cluster, replace(SETTINGS, node_page_size=1))
    world.expire_pages = 2
    assert set(views(hand)) == {"n1", "n2"}
    world.expire_pages = 99
    with pytest.raises(SchedulerError, match="the listing expired 3 times before its last page"):
        hand.scheduler.read_fleet()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prefix": "Predrain"}, "prefix"),
        ({"requests_per_second": 0.0}, "requests_per_second"),
        ({"pod_page_size": 0}, "pod_page_size"),
        ({"state": "x", "progress": "x"}, "state and progress are both 'x': give two names"),
        ({"avoid_label": "gke.example/x"}, "avoid_label"),
        ({"avoid_label": "predrain.io/managed=false"}, "give a key that does not begin with predrain.io/"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **wrong)


@pytest.mark.parametrize(("created", "lost"), [("2026-11-21T11:50:00Z", None), ("2026-11-21T11:40:00Z", "down")])
def test_a_new_node_that_is_not_ready_is_starting_for_a_while(world, hand, created, lost):
    def starts(raw: Raw) -> None:
        raw["metadata"]["creationTimestamp"] = created
        raw["status"]["conditions"] = [{"type": "Ready", "status": "False"}]

    world.edit("/api/v1/nodes/n1", starts)
    view = views(hand)["n1"]
    assert (view.why_out_of_service, view.counted) == (lost, lost is not None)
