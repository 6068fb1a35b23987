"""Pods on their way out: which have to go, which may, how they are told, and what a budget says."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from foundation.kubernetes.client import KubernetesClient
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.kubernetes.workloads import KubernetesWorkloads
from scheduler.ports.errors import SchedulerError
from scheduler.ports.workloads import CheckpointAsk, CheckpointOffer, Fence, Workload
from tests.scheduler.kubernetes.api_world import Raw, World
from tests.scheduler.kubernetes.objects import SETTINGS, T0, Hand, add, pod

FENCE = Fence("me", T0 + timedelta(seconds=30))
ASK = CheckpointAsk("a" * 32, T0 + timedelta(minutes=5), "n1 is drained")
LWS = "leaderworkerset.sigs.k8s.io/"
AUTOSCALER = "cluster-autoscaler.kubernetes.io"
DESCHEDULER = "descheduler.alpha.kubernetes.io"
REMOVAL = (
    "nvidia.com/gpu-driver-upgrade-drain.skip", "autoscaling.cast.ai/removal-disabled",
    "spotinst.io/restrict-scale-down",
)  # fmt: skip
BY_NAME = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
        }
    }
}
PATH = "/api/v1/namespaces/team/pods/a"


@pytest.fixture
def pods(hand: Hand) -> KubernetesWorkloads:
    return KubernetesWorkloads(hand.scheduler)


def the(pods: KubernetesWorkloads, name: str = "a", node: str = "n1") -> Workload:
    return next(workload for workload in pods.on_node(node) if workload.name == f"team/{name}")


def volume(**how: object) -> list[dict[str, object]]:
    return [{"name": "v", "emptyDir": how}]


def test_a_pod_of_a_job_goes_with_its_own_grace_and_the_whole_job_is_known(world: World, hand: Hand) -> None:
    add(world, pod("a", "n1"), pod("b", "n2"))
    hand.scheduler.read_fleet()
    workload = the(KubernetesWorkloads(hand.scheduler))
    assert (workload.uid, workload.kind, workload.node) == (world.objects[PATH]["metadata"]["uid"], "pod", "n1")
    assert workload.owner == "ReplicaSet team/train"
    assert workload.grace == timedelta(seconds=45)
    assert workload.job.gpus == 16
    assert (workload.stays, workload.immovable, workload.ending, workload.checkpoint) == (None, None, False, None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (pod("a", "n1", owner="DaemonSet"), "daemon set train runs it on every node"),
        (pod("a", "n1", owner=None, annotations={"kubernetes.io/config.mirror": "x"}), "a mirror pod"),
        (pod("a", "n1", owner="Node"), "a mirror pod"),
        (pod("a", "n1", owner=None, annotations={"kubernetes.io/config.source": "file"}), "a mirror pod"),
        (pod("a", "n1", gpus=0, owner="ExtendedDaemonSetReplicaSet"), "places it on this node"),
        (pod("a", "n1", gpus=0, owner="NodeAgent", affinity=BY_NAME), "places it on this node"),
    ],
)
def test_what_its_node_runs_by_itself_stays(world: World, pods: KubernetesWorkloads, target: Raw, message: str) -> None:
    add(world, target)
    assert message in (the(pods).stays or "")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (pod("a", "n1", owner=None), "it has no controller that would restart it"),
        (pod("a", "n1", volumes=volume()), "the data in its volume v would be lost"),
        (pod("a", "n1", volumes=volume(medium="Memory")), None),
        (pod("a", "n1", volumes=volume(medium="HugePages-2Mi")), None),
        (pod("a", "n1", volumes=volume(medium="")), "the data in its volume v would be lost"),
        (pod("a", "n1", owner=None, volumes=volume(), annotations={"predrain.io/evict": "true"}), None),
        (pod("a", "n1", annotations={"predrain.io/managed": "false"}), "predrain.io/managed=false"),
        (pod("a", "n1", annotations={"karpenter.sh/do-not-disrupt": "true"}), "karpenter.sh/do-not-disrupt=true"),
        (pod("a", "n1", annotations={"predrain.io/checkpoint": "exec"}), "predrain.io/checkpoint=exec"),
        (pod("a", "n1", annotations={"cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                                     "predrain.io/evict": "true"}), "safe-to-evict=false"),
    ],
)  # fmt: skip
def test_what_may_not_be_moved_is_held(world, pods, target, message):
    add(world, target)
    held = the(pods).immovable
    assert held is None if message is None else message in (held or "")


@pytest.mark.parametrize("owner", ["NodeAgent", "ExtendedDaemonSetReplicaSet"])
def test_a_pod_with_gpus_that_is_bound_to_its_node_is_no_part_of_it_and_is_waited_for(world, pods, owner):
    add(world, pod("a", "n1", owner=owner, affinity=BY_NAME))
    assert the(pods).stays is None
    assert "on this node only" in (the(pods).immovable or "")


@pytest.mark.parametrize(
    ("key", "value", "held"),
    [
        *(("predrain.io/managed", value, True) for value in ("false", "False", "no", "off", "0", "", "maybe", "24h")),
        *(("predrain.io/managed", value, False) for value in ("true", "True", "yes", "1")),
        *(("karpenter.sh/do-not-disrupt", value, True) for value in ("true", "TRUE", "1", "yes", "", "soon", "24h")),
        *(("karpenter.sh/do-not-disrupt", value, True) for value in ("6h1m", "1d", "361m")),
        *(("karpenter.sh/do-not-disrupt", value, False) for value in ("false", "off", "6h", "5h59m59s", "300m")),
        *((f"{AUTOSCALER}/safe-to-evict", value, True) for value in ("false", "False", "no", "0", "never", "1h")),
        *((f"{DESCHEDULER}/prefer-no-eviction", value, value != "false") for value in ("", "true", "false")),
        *(("cluster.x-k8s.io/drain", value, True) for value in ("skip", "wait-completed")),
        *((key, value, value != "off") for key in REMOVAL for value in ("true", "True", "1", "soon", "off")),
        *((f"{AUTOSCALER}/safe-to-evict", value, False) for value in ("true", "yes")),
        *(("node-lifecycle.datadoghq.com/enabled", value, value != "true") for value in ("false", "true", "no")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_only_a_clear_word_or_a_duration_that_is_over_lets_a_pod_go(world, pods, where, key, value, held):
    target = pod("a", "n1")  # it runs for six hours
    target["metadata"][where] = {key: value}
    add(world, target)
    why = the(pods).immovable
    assert (why is not None) is held
    assert why is None or why.startswith(f"{key}={value}") or f"{key}={value!r}" in why


@pytest.mark.parametrize(
    ("owner", "value", "held"),
    [("Job", "true", True), ("Job", "24h", True), ("Job", "1h", False), ("ReplicaSet", "true", False)],
)
def test_an_opt_out_of_one_pod_keeps_its_gang_on_all_nodes_and_no_replicas(world, hand, owner, value, held):
    add(
        world,
        pod("a", "n1", owner=owner),
        pod("b", "n2", owner=owner, annotations={"karpenter.sh/do-not-disrupt": value}),
    )
    hand.scheduler.read_fleet()
    why = the(KubernetesWorkloads(hand.scheduler)).opt_out
    assert (why is not None) is held
    assert why is None or why.startswith("team/b of the same job, on n2, has karpenter.sh/do-not-disrupt")


@pytest.mark.parametrize(
    ("volume", "held"),
    [
        ({"hostPath": {"path": "/scratch/db"}}, True),
        ({"hostPath": {"path": "/scratch/db", "type": "Directory"}}, True),
        ({"hostPath": {"path": "/"}}, True),
        ({"hostPath": {"path": "/devices/data"}}, True),
        ({"hostPath": {"path": "/dev/../data"}}, True),
        ({"hostPath": {"path": "/dev/infiniband"}}, False),
        ({"hostPath": {"path": "/mnt/agent.sock", "type": "Socket"}}, False),
        ({"hostPath": {"path": "/etc/localtime"}}, False),
        ({"ephemeral": {"volumeClaimTemplate": {}}}, True),
        ({"configMap": {"name": "c"}}, False),
    ],
)
def test_data_that_stays_on_the_node_holds_a_pod_unless_it_allows_the_loss(world, pods, volume, held):
    add(world, pod("a", "n1", volumes=[{"name": "v", **volume}]))
    why = the(pods).immovable
    assert (why is not None) is held
    assert not held or "data in its volume v" in (why or "")
    world.edit(PATH, lambda raw: raw["metadata"].update(annotations={"predrain.io/evict": "True"}))
    assert the(pods).immovable is None


def test_a_pod_is_known_by_what_starts_its_successor(world: World, pods: KubernetesWorkloads) -> None:
    bare, made = pod("a", "n1", owner=None), pod("b-x7", "n1", owner=None)
    made["metadata"]["generateName"] = "b-"
    add(world, bare, made, pod("c", "n1"))
    assert [the(pods, name).origin for name in ("a", "b-x7", "c")] == ["team/a", "team/b-", "ReplicaSet team/train"]


def test_a_pod_on_its_way_out_shows_what_keeps_it(world: World, pods: KubernetesWorkloads) -> None:
    target = pod("a", "n1")
    target["metadata"].update(deletionTimestamp="2026-11-21T12:00:00Z", finalizers=["batch.kubernetes.io/job-tracking"])
    add(world, target)
    assert (the(pods).state, the(pods).finalizers) == ("ending", ("batch.kubernetes.io/job-tracking",))


def test_the_pods_of_a_job_are_one_gang_unless_it_goes_on_without_some(world: World, hand: Hand) -> None:
    replica = pod("replica", "n1")
    replica["metadata"]["ownerReferences"][0].update(name="serving", uid="u-serving")
    add(world, pod("a", "n1", owner="Job"), pod("b", "n2", owner="Job"), pod("web", "n1", gpus=0, owner="Job"), replica)
    hand.scheduler.read_fleet()
    pods = KubernetesWorkloads(hand.scheduler)
    assert the(pods).gang is not None
    assert the(pods).gang == the(pods, "b", "n2").gang
    assert (the(pods, "web").gang, the(pods, "replica").gang) == (None, None)
    for name, on, labels in (
        ("js-0", "n1", {"jobset.sigs.k8s.io/jobset-name": "js"}),
        ("js-1", "n2", {"jobset.sigs.k8s.io/jobset-name": "js"}),
        *((f"lws-{at}", "n1", {LWS + "name": "lws", LWS + "group-index": group}) for at, group in enumerate("001")),
    ):
        part = pod(name, on, gpus=1, owner="Job" if name.startswith("js") else "StatefulSet")
        part["metadata"]["labels"] = labels
        part["metadata"]["ownerReferences"][0].update(name=name, uid=f"u-{name}")
        add(world, part)
    hand.scheduler.read_fleet()
    assert the(pods, "js-0").gang == the(pods, "js-1", "n2").gang, "a JobSet restarts as a whole"
    assert the(pods, "lws-0").gang == the(pods, "lws-1").gang
    assert the(pods, "lws-1").gang != the(pods, "lws-2").gang, "a group is a replica, the set is not"
    for name in ("a", "b"):
        path = f"/api/v1/namespaces/team/pods/{name}"
        world.edit(path, lambda raw: raw["metadata"].update(annotations={"predrain.io/elastic": "true"}))
    hand.scheduler.read_fleet()
    assert the(pods).gang is None


def test_a_grace_time_beyond_the_calendar_is_cut(world: World, pods: KubernetesWorkloads) -> None:
    add(world, pod("a", "n1", terminationGracePeriodSeconds=2**63 - 1))
    assert the(pods).grace == timedelta(days=30)


@pytest.mark.parametrize(
    ("group", "labels"),
    [("slinky.slurm.net", {}), ("sunk.coreweave.com", {}), ("apps.kruise.io", {"slurm.nebius.ai/nodeset": "gpu"})],
)
def test_slurms_own_pods_are_left_to_slurm(world: World, pods: KubernetesWorkloads, group: str, labels: Raw) -> None:
    target = pod("a", "n1", owner="NodeSet")
    target["metadata"]["ownerReferences"][0]["apiVersion"] = f"{group}/v1beta1"
    target["metadata"]["labels"] = labels
    add(world, target)
    assert the(pods).immovable == "it runs slurmd: its jobs leave through Slurm"


def test_an_operator_may_let_more_go_or_less(world: World, cluster: KubernetesClient) -> None:
    add(world, pod("a", "n1", owner=None, volumes=volume()), pod("web", "n1", gpus=0))

    def with_(settings: KubernetesSettings) -> KubernetesWorkloads:
        return KubernetesWorkloads(Hand(world, cluster, settings).scheduler)

    freely = with_(replace(SETTINGS, evict_unmanaged=True, evict_local_data=True, eviction_scope="gpu"))
    assert (the(freely).immovable, the(freely).stays, the(freely, "web").stays) == (None, None, "it has no GPU")


def test_a_gpu_pod_whose_containers_have_not_begun_has_to_go_too(world: World, cluster: KubernetesClient) -> None:
    target = pod("a", "n1")
    target["status"] = {"phase": "Pending"}
    add(world, target)
    workload = the(KubernetesWorkloads(Hand(world, cluster, replace(SETTINGS, eviction_scope="gpu")).scheduler))
    assert (workload.stays, workload.job is None) == (None, False)


def test_a_pod_reports_how_it_is_asked(world: World, pods: KubernetesWorkloads) -> None:
    annotations = {"predrain.io/checkpoint": "webhook",
            "predrain.io/checkpoint-takes": "5m"}  # fmt: skip
    add(world, pod("a", "n1", annotations=annotations), pod("b", "n1", annotations={"predrain.io/checkpoint": "smoke"}))
    assert the(pods).checkpoint == CheckpointOffer("webhook", timedelta(minutes=5))
    assert the(pods, "b").checkpoint is None


def test_a_checkpoint_is_asked_for_once_and_acknowledged_by_its_key(world: World, pods: KubernetesWorkloads) -> None:
    add(world, pod("a", "n1", annotations={"predrain.io/checkpoint": "annotation", "mine": "x"}))
    workload = the(pods)
    assert workload.checkpoint == CheckpointOffer("scheduler")
    assert pods.ask_checkpoint(workload, ASK, FENCE).kind == "done"
    assert pods.ask_checkpoint(workload, ASK, FENCE).kind == "already"
    notes = world.objects[PATH]["metadata"]["annotations"]
    assert notes["mine"] == "x"
    assert json.loads(notes["predrain.io/checkpoint-requested"]) == {
        "key": ASK.key, "deadline": "2026-11-21T12:05:00+00:00", "why": "n1 is drained",
    }  # fmt: skip

    def says(text: str) -> str:
        world.edit(PATH, lambda raw: raw["metadata"]["annotations"].update({
            "predrain.io/checkpoint-acknowledged": text}))  # fmt: skip
        state = pods.checkpoint_state(workload, ASK.key)
        return state.kind

    assert pods.checkpoint_state(workload, ASK.key).kind == "waiting"
    assert says("b" * 32) == "waiting", "of another drain"
    assert says(ASK.key) == "acknowledged"
    assert says(json.dumps({"key": ASK.key, "failed": "disk full"})) == "failed"
    assert says(f'{{"key": "{ASK.key}", "failed": "cut \\ud83d"}}') == "failed"
    assert pods.checkpoint_state(workload, ASK.key).message == "cut ?", "the ledger takes no half of a surrogate pair"
    assert says(json.dumps({"key": ASK.key, "at": "2026-11-21T12:01:00Z"})) == "acknowledged"


@pytest.mark.parametrize("left", [{}, {"predrain.io/checkpoint-requested": "another"}])
def test_a_request_that_the_answer_lacks_is_not_asked(world: World, pods: KubernetesWorkloads, left: Raw) -> None:
    asks = {"predrain.io/checkpoint": "annotation"}
    add(world, pod("a", "n1", annotations=asks))
    workload = the(pods)
    answer = {**world.objects[PATH], "metadata": {**world.objects[PATH]["metadata"], "annotations": asks | left}}
    world.fail("PATCH", "/pods/a", 200, content=answer)
    assert pods.ask_checkpoint(workload, ASK, FENCE).kind == "refused"


def test_without_the_right_to_patch_pods_a_pod_that_asks_by_annotation_is_held_and_the_rest_goes(world, hand):
    pods = KubernetesWorkloads(hand.scheduler)
    add(world, pod("a", "n1", annotations={"predrain.io/checkpoint": "annotation"}), pod("b", "n1"))
    workload = the(pods)
    world.fail("PATCH", "/pods/a", 403, content={"message": 'cannot patch resource "pods"'})
    refused = pods.ask_checkpoint(workload, ASK, FENCE)
    assert refused.kind == "refused"
    assert "may not patch pods in namespace team: apply deploy/kubernetes/checkpoint-rbac.yaml" in refused.message
    hand.elapsed.move(seconds=600)
    world.denied.add(("patch", "pods"))
    assert "may not patch pods in namespace team: apply deploy/kubernetes/checkpoint-rbac.yaml" in (
        the(pods).immovable or ""
    )
    assert the(pods, "b").immovable is None
    world.denied.clear()
    hand.elapsed.move(seconds=600)
    assert the(pods).immovable is None, "the right was granted since"


def test_an_eviction_is_of_exactly_this_pod_and_is_not_yet_its_end(world: World, pods: KubernetesWorkloads) -> None:
    add(world, pod("a", "n1"))
    workload = the(pods)
    assert pods.evict(workload, FENCE).kind == "done"
    again = the(pods)
    assert again.ending
    assert pods.evict(again, FENCE).kind == "already"
    del world.objects[PATH]
    assert pods.evict(workload, FENCE).kind == "gone"
    add(world, pod("a", "n1"))
    other = pods.evict(workload, FENCE)
    assert other.kind == "conflict"
    assert "another pod has this name" in other.message
    assert "deletionTimestamp" not in world.objects[PATH]["metadata"]
    assert pods.ask_checkpoint(workload, ASK, FENCE).kind == "conflict"
    assert pods.checkpoint_state(workload, ASK.key).kind == "gone"


def test_a_budget_blocks_and_nothing_is_forced(world: World, pods: KubernetesWorkloads) -> None:
    add(world, pod("a", "n1"))
    workload = the(pods)
    world.budgets[PATH] = "train-pdb"
    blocked = pods.evict(workload, FENCE)
    assert (blocked.kind, blocked.again_at) == ("blocked", None)
    assert "The disruption budget train-pdb needs 2" in blocked.message
    world.fail("POST", "eviction", 429, content={"message": "slow down"}, headers={"Retry-After": "7"})
    assert pods.evict(workload, FENCE).again_at == T0 + timedelta(seconds=7)
    world.fail("POST", "eviction", 500, content={"message": "This pod has more than one PodDisruptionBudget, which"})
    assert pods.evict(workload, FENCE).kind == "blocked"
    assert "deletionTimestamp" not in world.objects[PATH]["metadata"]


@pytest.mark.parametrize(("status", "kind"), [(403, "refused"), (500, "timeout"), (503, "timeout")])
def test_each_refusal_of_an_eviction_has_its_kind(world, pods, status, kind):
    add(world, pod("a", "n1"))
    world.fail("POST", "eviction", status, content={"message": "no"}, times=99)
    assert pods.evict(the(pods), FENCE).kind == kind


def test_without_the_lease_nobody_is_asked_or_moved(world: World, hand: Hand, pods: KubernetesWorkloads) -> None:
    add(world, pod("a", "n1"))
    workload = the(pods)
    sent = len(world.asked)
    assert pods.evict(workload, Fence("other", FENCE.until)).message == "other does not hold the lease"
    hand.elapsed.move(seconds=31)
    assert pods.evict(workload, FENCE).kind == pods.ask_checkpoint(workload, ASK, FENCE).kind == "refused"
    assert len(world.asked) == sent


def test_a_listing_that_is_not_whole_is_none(world: World, pods: KubernetesWorkloads) -> None:
    broken = pod("broken", "n1")
    del broken["spec"]["containers"]
    broken["metadata"]["ownerReferences"] = 7
    add(world, broken)
    with pytest.raises(SchedulerError, match="a pod on n1"):
        pods.on_node("n1")
    world.fail("GET", "/pods$", 500, times=99)
    with pytest.raises(SchedulerError, match="HTTP 500"):
        pods.on_node("n1")


HEAD = {"ray.io/node-type": "head"}


@pytest.mark.parametrize(
    ("group", "kind", "spec", "labels", "held"),
    [
        ("argoproj.io", "Workflow", {}, {}, True),
        ("tekton.dev", "TaskRun", {}, {}, True),
        ("sparkoperator.k8s.io", "SparkApplication", {}, {}, True),
        ("kubevirt.io", "VirtualMachineInstance", {}, {}, True),
        ("actions.github.com", "EphemeralRunner", {}, {}, True),
        ("actions.summerwind.dev", "Runner", {}, {}, True),
        ("flyte.lyft.com", "flyteworkflow", {}, {}, True),
        ("kubeflow.org", "PyTorchJob", {"restartPolicy": "Never"}, {}, True),
        ("training.kubedl.io", "PyTorchJob", {}, {}, True),
        ("run.ai", "RunaiJob", {}, {}, True),
        ("kubernetes.dask.org", "DaskJob", {}, {}, True),
        ("batch.example", "Job", {}, {}, True),
        ("shipwright.io", "BuildRun", {}, {}, True),
        ("apps.kruise.io", "CloneSet", {}, {}, False),
        ("kubeflow.org", "Notebook", {}, {}, False),
        ("grove.io", "PodClique", {}, {}, False),
        ("ray.io", "RayCluster", {}, HEAD, True),
        ("ray.io", "RayCluster", {}, {**HEAD, "ray.io/originated-from-crd": "RayJob"}, True),
        ("ray.io", "RayCluster", {}, {**HEAD, "ray.io/originated-from-crd": "RayService"}, False),
        ("ray.io", "RayCluster", {}, {"ray.io/node-type": "worker"}, False),
        ("apps", "ReplicaSet", {}, {"dask.org/component": "scheduler"}, True),
        ("apps", "ReplicaSet", {}, {"dask.org/component": "worker"}, False),
    ],
)  # fmt: skip
def test_work_that_nothing_starts_again_is_waited_for(pods, world, group, kind, spec, labels, held):
    for name, annotations in (("a", {}), ("b", {"predrain.io/evict": "true"})):
        raw = pod(name, "n1", annotations=annotations, **spec)
        raw["metadata"]["ownerReferences"][0].update(apiVersion=f"{group}/v1", kind=kind)
        raw["metadata"]["labels"] = labels
        add(world, raw)
    assert ("evict=true allows the eviction" in (the(pods).immovable or "")) is held
    assert the(pods, "b").immovable is None


def test_a_pod_whose_job_has_no_retry_left_is_waited_for_unless_it_allows_its_end(world: World, hand: Hand) -> None:
    for name, annotations in (("a", {}), ("b", {"predrain.io/evict": "true"})):
        raw = pod(name, "n1", annotations=annotations)
        raw["metadata"]["ownerReferences"][0].update(apiVersion="batch/v1", kind="Job")
        add(world, raw)
    job = {"metadata": {"name": "train"}, "spec": {"backoffLimit": 0}, "status": {}}
    world.put("/apis/batch/v1/namespaces/team/jobs/train", job)
    pods = KubernetesWorkloads(hand.scheduler)
    assert "Job train would fail permanently" in (the(pods).immovable or "")
    assert the(pods, "b").immovable is None


def test_a_pod_that_could_not_repeat_its_work_before_the_end_of_its_job_is_waited_for(world: World, hand: Hand) -> None:
    saved = {"predrain.io/checkpointed-at": "2026-11-21T11:55:00Z"}
    for name, annotations in (("a", {}), ("b", {"predrain.io/checkpoint": "webhook"}), ("c", saved)):
        raw = pod(name, "n1", annotations=annotations)  # it has run for 6 h
        raw["metadata"]["ownerReferences"][0].update(apiVersion="batch/v1", kind="Job")
        add(world, raw)
    for hours, held in ((11, True), (13, False)):
        job = {"spec": {"activeDeadlineSeconds": hours * 3600}, "status": {"startTime": "2026-11-21T06:00:00Z"}}
        world.put("/apis/batch/v1/namespaces/team/jobs/train", {"metadata": {"name": "train"}, **job})
        pods = KubernetesWorkloads(hand.scheduler)
        assert ("activeDeadlineSeconds" in (the(pods).immovable or "")) is held
        assert (the(pods, "b").immovable, the(pods, "c").immovable) == (None, None)


@pytest.mark.parametrize(
    ("owner", "stays", "held"),
    [("DaemonSet", True, False), ("ReplicaSet", False, False), ("StatefulSet", False, False), ("Job", False, True),
     (None, False, True)],
)  # fmt: skip
def test_the_owner_of_a_pod_of_a_virtual_cluster_is_the_one_inside_it(pods, world, owner, stays, held):
    add(world, pod("a", "n1", owner="Service", annotations={"vcluster.loft.sh/owner-set-kind": owner} if owner else {}))
    work = the(pods)
    assert (work.stays is not None, work.loss is not None) == (stays, held)
