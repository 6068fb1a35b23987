"""The Kubernetes collector against a real API server: what is staged, with the least rights, across cuts and kills."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.kubernetes.credentials import connect
from telemetry.collect.kubernetes.collector import KubernetesCollector
from telemetry.collect.kubernetes.rules import load_rules
from telemetry.staging.folder import StagingFolder
from tests.processes import PREDRAIN, running
from tests.staged import staged_table
from tests.system.kubernetes_server import KubernetesServer, kubernetes_server_in
from tests.waiting import wait

pytestmark = pytest.mark.system

RBAC = Path(__file__).parents[2] / "deploy" / "kubernetes" / "collector-rbac.yaml"
WITHIN_S = 240.0
T0 = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with kubernetes_server_in(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest.fixture(scope="module")
def allowed(server: KubernetesServer) -> KubernetesServer:
    server.apply(RBAC)
    # the authorizer wants a moment to see new roles
    wait(lambda: server.request("GET", "/api/v1/nodes?limit=1", user="collector", check=False)[0] == 200)
    return server


def stamp(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


class Hands:
    """What kubelets, operators and people do."""

    def __init__(self, server: KubernetesServer) -> None:
        self.server = server

    def node(self, name: str, *, boot: str = "b1", machine: str = "M1", gpus: int = 8) -> None:
        labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": "z1", "nvidia.com/gpu.clique": "c.7"}
        self.server.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        info = {"bootID": boot, "systemUUID": machine, "machineID": "x"}
        capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        self.status(name, {"capacity": capacity, "allocatable": capacity, "nodeInfo": info})
        self.ready(name, "True", T0)

    def status(self, name: str, status: dict[str, Any]) -> None:
        self.server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def ready(self, name: str, status: str, when: datetime) -> None:
        condition = {
            "type": "Ready",
            "status": status,
            "reason": "NodeStatusUnknown" if status == "Unknown" else "Kubelet",
            "lastHeartbeatTime": stamp(when),
            "lastTransitionTime": stamp(when),
        }
        self.status(name, {"conditions": [condition]})

    def condition(self, name: str, kind: str, message: str, began: datetime, last: datetime) -> None:
        stamps = {"lastTransitionTime": stamp(began), "lastHeartbeatTime": stamp(last)}
        found = {"type": kind, "status": "True", "reason": f"{kind}IsNotHealthy", "message": message, **stamps}
        self.status(name, {"conditions": [found]})

    def cordon(self, name: str, on: bool = True) -> None:
        path = f"/api/v1/nodes/{name}?fieldManager=kubectl-cordon"
        self.server.request("PATCH", path, {"spec": {"unschedulable": on or None}})

    def taint(self, name: str, taints: list[dict[str, str]]) -> None:
        self.server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": taints}})

    def event(self, name: str, node: str, reason: str, message: str, when: datetime, count: int = 1) -> None:
        self.server.request(
            "POST",
            "/api/v1/namespaces/default/events",
            {
                "metadata": {"name": name, "namespace": "default"},
                "involvedObject": {"kind": "Node", "name": node},
                "reason": reason,
                "message": message,
                "type": "Warning",
                "source": {"component": "test", "host": node},
                "firstTimestamp": stamp(when),
                "lastTimestamp": stamp(when),
                "count": count,
            },
        )

    def pod(self, name: str, node: str, started: datetime, gpus: int = 4, owner: str | None = None) -> None:
        container = {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}}
        owners = [{"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": f"uid-{owner}", "controller": True}]
        metadata = {"name": name, "namespace": "default", **({"ownerReferences": owners} if owner else {})}
        pods = "/api/v1/namespaces/default/pods"
        self.server.request("POST", pods, {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}})
        self.pod_status(name, {"phase": "Running", "startTime": stamp(started)})

    def pod_status(self, name: str, status: dict[str, Any]) -> None:
        self.server.request("PATCH", f"/api/v1/namespaces/default/pods/{name}/status", {"status": status})

    def finish(self, name: str, phase: str, when: datetime, reason: str) -> None:
        ended = {"exitCode": 0 if phase == "Succeeded" else 1, "reason": reason, "finishedAt": stamp(when)}
        container = {"name": "c", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        self.pod_status(name, {"phase": phase, "containerStatuses": [{**container, "state": {"terminated": ended}}]})

    def remove(self, path: str) -> None:
        self.server.request("DELETE", path, {"gracePeriodSeconds": 0})


def stored_events(root: Path, node: str) -> list[tuple[str, str, str]]:
    events = staged_table(root, "events").to_pandas()
    if events.empty:
        return []
    own = events[events["node"] == node]
    return list(zip(own["type"], own["code"], own["source"], strict=True))


class Running:
    """A collector in a thread."""

    def __init__(self, server: KubernetesServer, root: Path) -> None:
        self._stop = threading.Event()
        api = connect(server.kubeconfig("collector"))
        staging = StagingFolder(root, writer="kubernetes")
        self._collector = KubernetesCollector(api, staging, load_rules(None), cluster="east")
        self._thread = threading.Thread(target=self._collector.run, args=(self._stop,), kwargs={"interval_s": 0.2})

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WITHIN_S)
        self._collector.close()
        assert not self._thread.is_alive()


def test_without_rights_it_says_which(server: KubernetesServer, tmp_path: Path) -> None:
    api = connect(server.kubeconfig("collector"))
    server.request("DELETE", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/predrain-collector", check=False)
    wait(lambda: server.request("GET", "/api/v1/nodes?limit=1", user="collector", check=False)[0] == 403)
    collector = KubernetesCollector(api, StagingFolder(tmp_path / "d.live", writer="k"), load_rules(None))
    with pytest.raises(InputError, match=r'cannot list resource "nodes".*collector-rbac\.yaml'):
        collector.once()
    collector.close()


def test_the_rights_are_the_least(allowed: KubernetesServer) -> None:
    for path in ("/api/v1/secrets", "/api/v1/configmaps", "/api/v1/namespaces", "/apis/apps/v1/deployments"):
        assert allowed.request("GET", path, user="collector", check=False)[0] == 403
    patched = allowed.request(
        "PATCH", "/api/v1/nodes/any", {"spec": {"unschedulable": True}}, user="collector", check=False
    )
    assert patched[0] == 403


def test_a_cluster_lives(allowed: KubernetesServer, tmp_path: Path) -> None:  # noqa: PLR0915 - one life, in its order
    hands, root = Hands(allowed), tmp_path / "fleet.live"
    hands.node("life-1")
    hands.node("cpu-1", gpus=0)
    hands.pod("earlier", "life-1", T0 + timedelta(minutes=1), owner="llama")
    with Running(allowed, root):
        wait(lambda: len(staged_table(root, "jobs")))
        hands.cordon("life-1")
        hands.cordon("cpu-1")
        wait(lambda: stored_events(root, "life-1"))
        allowed.kill_api()  # a server that dies loses nothing
        time.sleep(0.5)
        allowed.start_api()
        hands.taint("life-1", [{"key": "medik8s.io/drain", "effect": "NoSchedule"}])
        wait(lambda: len(stored_events(root, "life-1")) == 2)
        hands.cordon("life-1", False)
        wait(lambda: len(stored_events(root, "life-1")) == 3)
        hands.taint("life-1", [{"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule"}])
        wait(lambda: len(stored_events(root, "life-1")) == 5)
        hands.ready("life-1", "Unknown", T0 + timedelta(minutes=30))
        wait(lambda: len(stored_events(root, "life-1")) == 6)
        hands.status("life-1", {"nodeInfo": {"bootID": "b2"}})
        hands.ready("life-1", "True", T0 + timedelta(minutes=33))
        wait(lambda: len(stored_events(root, "life-1")) == 8)
        xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
        hands.event("xid.1", "life-1", "KernelXid", xid, T0 + timedelta(minutes=29))
        hands.event("pull.1", "life-1", "Pulled", "nothing to do with GPUs", T0 + timedelta(minutes=29))
        wait(lambda: len(stored_events(root, "life-1")) == 9)
        repeated = {"count": 3, "lastTimestamp": stamp(T0 + timedelta(minutes=40))}
        allowed.request("PATCH", "/api/v1/namespaces/default/events/xid.1", repeated)
        wait(lambda: len(stored_events(root, "life-1")) == 10)
        hands.pod("later", "life-1", T0 + timedelta(minutes=2))
        hands.pod("no-gpu", "life-1", T0 + timedelta(minutes=2), gpus=0)
        wait(lambda: len(staged_table(root, "jobs")) == 2)
        note = {"metadata": {"annotations": {"predrain.io/checkpointed-at": stamp(T0 + timedelta(minutes=20))}}}
        allowed.request("PATCH", "/api/v1/namespaces/default/pods/earlier", note)
        wait(lambda: len(staged_table(root, "jobs")) == 3)
        hands.finish("earlier", "Failed", T0 + timedelta(minutes=29), "Error")
        wait(lambda: len(staged_table(root, "jobs")) == 4)
        hands.remove("/api/v1/namespaces/default/pods/later")
        wait(lambda: len(staged_table(root, "jobs")) == 5)
        hands.remove("/api/v1/nodes/life-1")
        wait(lambda: len(stored_events(root, "life-1")) == 11)
        hands.node("life-1", boot="b9", machine="M2")
        wait(lambda: len(stored_events(root, "life-1")) == 13)

    history = stored_events(root, "life-1")
    assert history[:6] + history[8:] == [
        ("drain", "cordon", "kubernetes"),
        ("drain", "medik8s.io/drain", "kubernetes"),
        ("other", "cordon_ended", "kubernetes"),  # the taint still holds the drain
        ("drain", "undrain", "kubernetes"),
        ("drain", "at-risk", "predrain"),
        ("other", "node_not_ready", "kubernetes"),
        ("xid", "79", "kubernetes"),
        ("xid", "79", "kubernetes"),
        ("other", "node_removed", "kubernetes"),
        ("drain", "undrain", "predrain"),  # the new node lacks the taint
        ("replacement", "node_replaced", "kubernetes"),
    ]
    assert {code for _, code, _ in history[6:8]} == {"boot", "node_ready"}
    assert stored_events(root, "cpu-1") == []  # no GPUs, no business of ours
    events = staged_table(root, "events").to_pandas().query("node == 'life-1'").set_index("code")
    assert events.loc["node_not_ready", "timestamp"] == T0 + timedelta(minutes=30)
    assert events.loc["node_ready", "timestamp"] == T0 + timedelta(minutes=33)
    assert list(events.loc["79", "timestamp"]) == [T0 + timedelta(minutes=29), T0 + timedelta(minutes=40)]
    assert set(events.loc["79", "pci_bus_id"]) == {"00000000:3b:00"}
    assert (events["known_at"] >= events["timestamp"]).all()
    assert "kubectl-cordon" in events.loc["cordon", "detail"]

    jobs = (
        staged_table(root, "jobs")
        .to_pandas()
        .drop_duplicates(["job", "node", "started_at"], keep="last")
        .set_index("job")
    )
    llama = jobs.loc["default/llama/uid-llama"]
    assert (llama["node"], llama["gpus"], llama["outcome"]) == ("life-1", 4, "Failed")
    assert llama["ended_at"] == T0 + timedelta(minutes=29)
    assert llama["checkpointed_at"] == T0 + timedelta(minutes=20)
    (later,) = [jobs.loc[name] for name in jobs.index if name.startswith("default/later/")]
    assert later["outcome"] == "Deleted"
    assert len(jobs) == 2

    places = staged_table(root, "inventory").to_pandas()
    assert set(places["node"]) >= {"life-1"}
    assert places["gpu"].isna().all()
    row = places[places["node"] == "life-1"].iloc[-1]
    assert (row["cluster"], row["group"], row["nvlink_domain"]) == ("east", "z1", "c.7")


def test_each_xid_that_nvsentinel_writes_to_a_node_arrives_once(allowed: KubernetesServer, tmp_path: Path) -> None:
    hands, root = Hands(allowed), tmp_path / "fleet.live"
    hands.node("sick-1")
    began, later = T0 + timedelta(minutes=5), T0 + timedelta(minutes=25)
    lost = "ErrorCode:79 PCI:0000:3b:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=1, x Recommended Action=RESTART_BM;"
    memory = "ErrorCode:94 PCI:0000:5e:00 NVRM: Xid (PCI:0000:5e:00): 94, pid=2, y Recommended Action=CONTACT_SUPPORT;"
    with Running(allowed, root):
        wait(lambda: len(staged_table(root, "inventory")))
        hands.condition("sick-1", "SysLogsXIDError", lost, began, began)
        wait(lambda: len(stored_events(root, "sick-1")) == 1)
        hands.condition("sick-1", "SysLogsXIDError", lost, began, later)
        hands.condition("sick-1", "SysLogsXIDError", lost + memory, began, later)
        wait(lambda: len(stored_events(root, "sick-1")) == 2)
    events = staged_table(root, "events").to_pandas().query("node == 'sick-1'")
    assert events[["type", "code", "pci_bus_id", "timestamp"]].to_numpy().tolist() == [
        ["xid", "79", "00000000:3b:00", began],
        ["xid", "94", "00000000:5e:00", later],
    ]


def test_a_killed_collector_goes_on_with_what_happened_meanwhile(allowed: KubernetesServer, tmp_path: Path) -> None:
    hands, root = Hands(allowed), tmp_path / "fleet.live"
    hands.node("kill-1")
    command = [*PREDRAIN, "collect", "kubernetes", "--dataset", tmp_path / "fleet", "--interval", "1s"]
    command += ["--kubeconfig", allowed.kubeconfig("collector")]
    for seen in (0, 2, 4):
        with running(command, tmp_path / "log"):
            wait(lambda seen=seen: len(staged_table(root, "inventory")) and len(stored_events(root, "kill-1")) >= seen)
        hands.cordon("kill-1")
        hands.cordon("kill-1", on=False)
    codes = [code for _, code, _ in stored_events(root, "kill-1")]
    assert codes == ["cordon", "uncordon"] * 2, "the server kept it for the watch that goes on"
