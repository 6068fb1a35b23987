"""Which pods could run on another node, by their selectors, affinity, volumes and size, and by what nodes take."""

import copy
from typing import Any

import pytest

from foundation.kubernetes.client import KubernetesClient
from scheduler.kubernetes.api import ApiServer, CachedReads
from scheduler.kubernetes.placement import PlacementCheck
from tests.clock import Clock
from tests.scheduler.kubernetes.api_world import Raw, World
from tests.scheduler.kubernetes.objects import add, node, pod

HOST = "kubernetes.io/hostname"
OURS = {"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule"}


def affinity(*rules: Raw, fields: list[Raw] | None = None) -> Raw:
    terms = [{"matchExpressions": list(rules), **({} if fields is None else {"matchFields": fields})}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def rule(key: str, operator: str, *values: str) -> Raw:
    return {"key": key, "operator": operator, "values": list(values)}


def pods_affinity(kind: str, key: str = HOST, **term: Any) -> Raw:
    wanted = {"topologyKey": key, "labelSelector": {"matchLabels": {"app": "db"}}, **term}
    return {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [wanted]}}


def claims(name: str = "data") -> list[Raw]:
    return [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]


class Place:
    """Nodes n1 to n3, on whose n1 the pod runs."""

    def __init__(self, world: World, client: KubernetesClient) -> None:
        self.world, self.elapsed = world, Clock()
        add(world, node("n3"))
        for name in ("n1", "n2", "n3"):
            self.change(name, lambda raw, name=name: raw["metadata"]["labels"].update({HOST: name, "slot": name[1:]}))
        self.api = ApiServer(client, self.elapsed.monotonic)
        self.placements = PlacementCheck(CachedReads(self.api), kueue_replaces_nodes=False)

    def change(self, name: str, how: Any) -> None:
        self.world.edit(f"/api/v1/nodes/{name}", how)

    def volume(self, name: str = "data", **spec: Any) -> None:
        claim = {"metadata": {"name": name}, "spec": {"volumeName": f"pv-{name}"}}
        self.world.put(f"/api/v1/namespaces/team/persistentvolumeclaims/{name}", claim)
        self.world.put(f"/api/v1/persistentvolumes/pv-{name}", {"metadata": {"name": f"pv-{name}"}, "spec": spec})

    def decide(self, **spec: Any) -> Any:
        self.elapsed.move(seconds=60)
        return self.placements.placement_of(
            {**pod("a", "n1", **spec), "metadata": {"name": "a", "namespace": "team", "uid": "u"}}
        )

    def lists(self) -> int:
        return sum(asked == ("GET", "/api/v1/nodes") for asked in self.world.asked)


@pytest.fixture
def place(world: World, cluster: KubernetesClient) -> Place:
    return Place(world, cluster)


@pytest.mark.parametrize(
    ("spec", "elsewhere"),
    [
        ({}, True),
        ({"nodeSelector": {HOST: "n1"}}, False),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"affinity": affinity(rule(HOST, "In", "n1"))}, False),
        ({"affinity": affinity(rule(HOST, "In", "n1", "n2"))}, True),
        ({"affinity": affinity(rule(HOST, "NotIn", "n2", "n3"))}, False),
        ({"affinity": affinity(rule("ssd", "Exists"))}, False),
        ({"affinity": affinity(rule("ssd", "DoesNotExist"))}, True),
        ({"affinity": affinity(rule("slot", "Lt", "2"))}, False),
        ({"affinity": affinity(rule("slot", "Gt", "1"))}, True),
        ({"affinity": affinity(rule("slot", "Matches", "1"))}, None),
        ({"affinity": affinity(fields=[rule("metadata.name", "In", "n1")])}, False),
        ({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}, True),
        ({"affinity": {"nodeAffinity": 7}}, None),
        ({"gpus": 9}, False),
        ({"gpus": 0, "containers": [{"resources": {"requests": {"cpu": "64"}}}]}, True),
        ({"gpus": 0, "containers": [{"resources": {"requests": {"cpu": "64001m"}}}]}, False),
        ({"gpus": 0, "containers": [{"resources": {"requests": {"rdma/hca": "1"}}}]}, False),
        ({"gpus": 0, "containers": [{"resources": {"requests": {"hugepages-1Gi": "4Gi"}}}]}, False),
        ({"gpus": 4, "initContainers": [{"resources": {"limits": {"nvidia.com/gpu": "16"}}}]}, False),
        ({"gpus": 4, "initContainers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}, True),
        ({"gpus": 4, "initContainers": [{"restartPolicy": "Always", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]},
         False),
        ({"gpus": 8, "overhead": {"cpu": "65"}}, False),
        ({"gpus": 8, "overhead": {"cpu": "250m"}}, True),
        ({"gpus": 8, "resources": {"requests": {"cpu": "65"}}}, False),
        ({"affinity": affinity(fields=[rule("metadata.name", "NotIn", "n2", "n3")])}, False),
        ({"nodeSelector": {"zone": "a"}, "affinity": affinity(rule("slot", "In", "1"))}, False),
    ],
)  # fmt: skip
def test_what_a_pod_requires_decides_where_it_can_run(place, spec, elsewhere):
    decided = place.decide(**spec)
    assert decided.elsewhere is elsewhere
    assert bool(decided.reason) is (elsewhere is not True)


@pytest.mark.parametrize(
    ("source", "elsewhere"),
    [
        ({"local": {"path": "/disks/1"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [rule(HOST, "In", "n1")]}]}}}, False),
        ({"csi": {"driver": "topolvm"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [rule("slot", "In", "1")]}]}}}, False),
        ({"csi": {"driver": "zonal"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [rule("zone", "In", "a")]}]}}}, True),
        ({"hostPath": {"path": "/data"}}, False),
        ({"nfs": {"server": "nfs"}}, True),
    ],
)  # fmt: skip
def test_a_volume_that_is_bound_to_a_node_binds_its_pod(place, source, elsewhere):
    place.volume(**source)
    assert place.decide(volumes=claims()).elsewhere is elsewhere


@pytest.mark.parametrize(
    ("claim", "labels", "elsewhere"),
    [
        ({}, {}, True),
        ({}, {"topology.kubernetes.io/zone": "z1"}, False),
        ({}, {"topology.kubernetes.io/zone": "z1__z2"}, True),
        ({"status": {"phase": "Lost"}}, {}, None),
        ({"metadata": {"name": "data", "deletionTimestamp": "2026-11-20T00:00:00Z"}}, {}, None),
    ],
)
def test_a_volume_that_no_successor_can_use_elsewhere_holds_its_pod(place, claim, labels, elsewhere):
    for name, zone in (("n1", "z1"), ("n2", "z2"), ("n3", "z2")):
        place.change(
            name, lambda raw, zone=zone: raw["metadata"]["labels"].update({"topology.kubernetes.io/zone": zone})
        )
    place.volume(gcePersistentDisk={"pdName": "d"})
    place.world.edit("/api/v1/namespaces/team/persistentvolumeclaims/data", lambda raw: raw.update(claim))
    place.world.edit("/api/v1/persistentvolumes/pv-data", lambda raw: raw["metadata"].update(labels=labels))
    assert place.decide(volumes=claims()).elsewhere is elsewhere


def test_a_claim_that_is_missing_or_unbound_leaves_it_undecided(place):
    assert place.decide(volumes=claims("nowhere")).elsewhere is None
    place.world.put("/api/v1/namespaces/team/persistentvolumeclaims/new", {"metadata": {"name": "new"}, "spec": {}})
    assert place.decide(volumes=claims("new")).reason == "its claim new is not bound"


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("persistentvolumeclaims/data", "get persistentvolumeclaims"),
        ("persistentvolumes/pv-data", "get persistentvolumes"),
        ("/api/v1/nodes$", "list nodes"),
        ("/pods$", "list pods"),
    ],
)
def test_a_missing_right_leaves_it_undecided_and_is_named(place, path, right):
    place.volume(nfs={})
    spec = {"volumes": claims(), "affinity": pods_affinity("podAntiAffinity")}
    place.world.fail("GET", path, 403, content={"message": "forbidden"})
    decided = place.decide(**spec)
    assert decided.elsewhere is None
    assert f"lacks the right to {right} (deploy/kubernetes/actuator-rbac.yaml)" in decided.reason
    assert place.decide(**spec).elsewhere is True, "the right was granted since"


NODE_TROUBLES = {
    "cordoned": lambda raw: raw["spec"].update(unschedulable=True),
    "not ready": lambda raw: raw["status"].update(conditions=[{"type": "Ready", "status": "Unknown"}]),
    "tainted": lambda raw: raw["spec"].update(taints=[OURS]),
    "being deleted": lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-21T12:00:00Z"),
    "without its GPUs": lambda raw: raw["status"].update(allocatable={"cpu": "64", "nvidia.com/gpu": "0"}),
    "small": lambda raw: raw["status"].update(allocatable={"cpu": "64", "nvidia.com/gpu": "4"}),
}


@pytest.mark.parametrize("trouble", sorted(NODE_TROUBLES))
def test_nodes_that_take_no_such_pod_are_no_other_place(place, trouble):
    place.change("n2", NODE_TROUBLES[trouble])
    assert place.decide().elsewhere is True
    place.change("n3", NODE_TROUBLES[trouble])
    assert place.decide().elsewhere is False


@pytest.mark.parametrize(
    ("toleration", "elsewhere"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "predrain.io/at-risk", "operator": "Exists"}, True),
        ({"key": "predrain.io/at-risk", "value": "high"}, True),
        ({"key": "predrain.io/at-risk", "value": "elevated"}, False),
        ({"key": "predrain.io/at-risk", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_a_taint_counts_unless_the_pod_tolerates_it(place, toleration, elsewhere):
    for name in ("n2", "n3"):
        place.change(name, NODE_TROUBLES["tainted"])
    assert place.decide(tolerations=[toleration]).elsewhere is elsewhere
    for name in ("n2", "n3"):
        place.change(name, NODE_TROUBLES["cordoned"])
    assert place.decide(tolerations=[toleration]).elsewhere is False, "a cordon holds for everybody"


def test_a_template_that_names_the_node_is_told_from_a_scheduler_that_bound_the_pod(place):
    def decide(manager: str, **entry: Any) -> bool | None:
        raw = pod("a", "n1")
        fields = {"manager": manager, "fieldsV1": {"f:spec": {"f:nodeName": {}}}, **entry}
        return place.placements.placement_of(
            {**raw, "metadata": {**raw["metadata"], "managedFields": [fields]}}
        ).elsewhere

    assert decide("kube-controller-manager") is False
    assert decide("kube-controller-manager", fieldsV1={"f:spec": {"f:containers": {}}}) is True
    assert decide("kube-scheduler") is True
    assert decide("kubelet", subresource="status") is True


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("labels", "kueue.x-k8s.io/tas"),
        ("annotations", "kueue.x-k8s.io/podset-required-topology"),
        ("annotations", "kueue.x-k8s.io/podset-slice-required-topology"),
    ],
)
def test_a_node_that_kueue_assigned_is_no_requirement_of_the_pod(place, part, key):
    def decide(*, replaces: bool, **selector: str) -> bool | None:
        raw = pod("a", "n1", nodeSelector={HOST: "n1", **selector})
        raw["metadata"][part] = {key: "x"}
        return PlacementCheck(CachedReads(place.api), kueue_replaces_nodes=replaces).placement_of(raw).elsewhere

    assert decide(replaces=False) is None
    assert decide(replaces=True) is True
    assert decide(replaces=True, slot="1") is False, "the template requires more"


def test_a_pod_that_must_be_apart_from_others_needs_a_node_without_them(place):
    def other(name: str, on: str, namespace: str = "team") -> None:
        raw = copy.deepcopy(pod(name, on))
        raw["metadata"].update(labels={"app": "db"}, namespace=namespace)
        add(place.world, raw)

    apart = pods_affinity("podAntiAffinity")
    other("b", "n2")
    other("c", "n3", "elsewhere")
    assert place.decide(affinity=apart).elsewhere is True
    other("d", "n3")
    assert place.decide(affinity=apart).elsewhere is None
    assert place.decide(affinity=pods_affinity("podAntiAffinity", "zone")).elsewhere is None
    assert place.decide(affinity=pods_affinity("podAntiAffinity", namespaces=["x"])).elsewhere is None
    wanted = {"labelSelector": {"matchExpressions": [rule("app", "In", "web")]}}
    assert place.decide(affinity=pods_affinity("podAntiAffinity", **wanted)).elsewhere is True


def test_a_pod_that_must_be_near_others_stays_within_the_domain_of_its_node(place):
    near = pods_affinity("podAffinity", "zone")
    assert place.decide(affinity=near).elsewhere is True
    place.change("n2", lambda raw: raw["metadata"]["labels"].update(zone="b"))
    place.change("n3", lambda raw: raw["metadata"]["labels"].update(zone="b"))
    assert place.decide(affinity=near).elsewhere is None
    assert place.decide(affinity=pods_affinity("podAffinity")).elsewhere is None


def test_the_nodes_are_listed_once_for_the_pods_of_a_round(place):
    for name, slot in (("a", "2"), ("b", "3"), ("c", "9")):
        assert place.placements.placement_of(pod(name, "n1", nodeSelector={"slot": slot})).elsewhere is (slot != "9")
    assert place.lists() == 1


def spread(key: str = HOST, skew: Any = 1, **more: Any) -> list[Raw]:
    selector = {"matchLabels": {"app": "db"}}
    return [{"topologyKey": key, "maxSkew": skew, "labelSelector": selector, **more}]


@pytest.mark.parametrize(
    ("constraints", "others", "elsewhere"),
    [
        (spread(), ["n2"], True),  # 0, 1, 0 without the pod: n3 makes 0, 1, 1
        (spread(), ["n2", "n3"], None),  # the drained node still counts, as one without
        (spread(skew=2), ["n2", "n3"], True),
        (spread(whenUnsatisfiable="ScheduleAnyway"), ["n2", "n3"], True),
        (spread("zone"), ["n2", "n3"], True),  # all nodes are in one zone
        (spread("rack"), [], None),  # no node has this label
        (spread(minDomains=4), ["n2"], True),
        (spread(minDomains=4), ["n2", "n3"], None),
        (spread(matchLabelKeys=["version"]), ["n2", "n3"], True),  # they are of an earlier version
        (spread(skew="many"), [], None),
    ],
)
def test_a_pod_goes_where_its_spread_allows_it(place, constraints, others, elsewhere):
    for number, on in enumerate(others):
        raw = copy.deepcopy(pod(f"db-{number}", on))
        raw["metadata"].update(labels={"app": "db", "version": "1"}, namespace="team")
        add(place.world, raw)
    place.elapsed.move(seconds=60)
    mine = pod("a", "n1", topologySpreadConstraints=constraints)
    labels = {"app": "db", "version": "2"}
    mine = {**mine, "metadata": {"name": "a", "namespace": "team", "uid": "u", "labels": labels}}
    assert place.placements.placement_of(mine).elsewhere is elsewhere


@pytest.mark.parametrize(("users", "elsewhere"), [(["a"], True), ([], True), (["a", "b"], None)])
def test_a_claim_that_other_pods_use_keeps_its_pods_where_its_devices_are(place, users, elsewhere):
    place.world.discovery["/apis/resource.k8s.io/v1"] = {"resources": []}
    place.world.kinds = ("/resourceslices", "/nodes")
    claim = {"metadata": {"name": "gpus"}, "status": {"reservedFor": [{"name": user} for user in users]}}
    place.world.put("/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/gpus", claim)
    claims = [{"name": "g", "resourceClaimName": "gpus"}]
    assert place.decide(resourceClaims=claims).elsewhere is elsewhere
    place.world.fail("GET", "resource.k8s.io/v1$", 403, content={"message": "no"}, times=9)
    place.elapsed.move(seconds=-60)  # the devices are still cached
    assert place.decide(resourceClaims=claims).elsewhere is None


def test_a_pod_with_claims_needs_a_node_with_devices_of_the_same_drivers(place):
    claims = [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
    assert "cannot be read" in place.decide(resourceClaims=claims).reason
    place.world.discovery["/apis/resource.k8s.io/v1"] = {"resources": []}
    place.world.kinds = ("/resourceslices", "/nodes")

    def offer(on: str, driver: str) -> None:
        item = {"metadata": {"name": f"{on}-{driver}"}, "spec": {"nodeName": on, "driver": driver}}
        place.world.put(f"/apis/resource.k8s.io/v1/resourceslices/{on}-{driver}", item)

    offer("n1", "gpu.example")
    offer("n2", "nic.example")
    decided = place.decide(resourceClaims=claims)
    assert (decided.elsewhere, "devices of gpu.example" in decided.reason) == (False, True)
    assert place.decide().elsewhere is True, "without claims it does not matter"
    offer("n3", "gpu.example")
    assert place.decide(resourceClaims=claims).elsewhere is True
    place.world.fail("GET", "/resourceslices", 403, content={"message": "forbidden"})
    assert place.decide(resourceClaims=claims).elsewhere is None
