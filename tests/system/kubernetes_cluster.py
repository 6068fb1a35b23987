"""A whole control plane on :mod:`tests.system.kubernetes_server`: controllers, a scheduler, and hands for kubelets.

The kubelets are one thread: it tells that nodes are ready, lets bound pods run, and finishes pods that were deleted
after their own grace time, as kubelets do.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from policy.risk_record import format_utc
from tests.processes import running
from tests.system.kubernetes_server import KubernetesServer, build_components, kubernetes_server_in
from tests.waiting import free_port, wait

COMPONENTS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
RBAC = Path(__file__).parents[2] / "deploy" / "kubernetes"
PODS = "/api/v1/namespaces/default/pods"
_RESOURCES = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}


class Kubelets(threading.Thread):
    """All kubelets of a cluster.

    ``ends``: gives the termination message of a running pod that ends well now; None: it runs on.
    ``now``: their clock.
    """

    def __init__(self, server: KubernetesServer, nodes: list[str]) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._nodes = nodes
        self._ending: dict[str, float] = {}
        self.ends: Callable[[dict[str, Any]], str | None] = lambda _pod: None
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.halt = threading.Event()

    def run(self) -> None:
        """Work until halted; whatever fails is tried again, as a kubelet does."""
        beat = 0.0
        while not self.halt.wait(0.1):
            with contextlib.suppress(Exception):
                if time.monotonic() - beat > 5:
                    for name in self._nodes:
                        self.ready(name)
                    beat = time.monotonic()
                for pod in self._server.request("GET", "/api/v1/pods")[1]["items"]:
                    self._tend(pod)

    def ready(self, name: str) -> None:
        now = format_utc(self.now())
        condition = {"type": "Ready", "status": "True", "reason": "Kubelet", "lastHeartbeatTime": now}
        status = {
            "capacity": _RESOURCES, "allocatable": _RESOURCES, "conditions": [condition],
            "nodeInfo": {"bootID": f"boot-{name}", "systemUUID": name, "machineID": name},
        }  # fmt: skip
        # by type, so that other conditions stay
        path = f"/api/v1/nodes/{name}/status"
        self._server.request("PATCH", path, {"status": status}, patch="strategic-merge-patch")

    def _tend(self, pod: dict[str, Any]) -> None:
        metadata, path = pod["metadata"], f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"
        if not pod["spec"].get("nodeName"):
            return
        if metadata.get("deletionTimestamp"):
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            since = self._ending.setdefault(metadata["uid"], time.monotonic())
            if time.monotonic() - since >= grace:
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
                self._server.request("DELETE", f"{path}/{metadata['name']}", body, check=False)
        elif pod["status"].get("phase") == "Pending":
            status = {
                "phase": "Running",
                "startTime": format_utc(self.now()),
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            self._server.request(
                "PATCH", f"{path}/{metadata['name']}/status", {"status": status}, patch="strategic-merge-patch",
                check=False,
            )  # fmt: skip
        elif pod["status"].get("phase") == "Running" and (message := self.ends(pod)) is not None:
            state = {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}
            container = {"name": "c", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
            status = {"phase": "Succeeded", "containerStatuses": [container]}
            self._server.request("PATCH", f"{path}/{metadata['name']}/status", {"status": status}, check=False)


class KubernetesCluster:
    """A control plane with nodes of 8 GPUs; use :func:`kubernetes_cluster_in`."""

    def __init__(self, server: KubernetesServer, nodes: list[str], kubelets: Kubelets) -> None:
        self.server = server
        self.nodes = nodes
        self.kubelets = kubelets

    def node(self, name: str) -> dict[str, Any]:
        return self.server.request("GET", f"/api/v1/nodes/{name}")[1]

    def change(self, name: str, **spec: Any) -> None:
        """Change a node's spec by a person's hand."""
        self.server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": spec})

    def tracked(self, name: str) -> None:
        """Make a server before 1.22 tell from now on who writes what of a node, as later ones do."""
        content = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        path = f"/api/v1/nodes/{name}?fieldManager=test&force=true"
        self.server.request("PATCH", path, content, patch="apply-patch")

    def deploy(self, name: str, replicas: int, gpus: int, annotations: dict[str, str] | None = None) -> None:
        container = {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
        template = {
            "metadata": {"labels": {"app": name}, "annotations": annotations or {}},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
        }
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        path = "/apis/apps/v1/namespaces/default/deployments"
        self.server.request("POST", path, {"metadata": {"name": name}, "spec": spec})

    def pod(self, name: str, gpus: int = 1, annotations: dict[str, str] | None = None, **more: Any) -> None:
        """Create a pod of its own; ``more``: of its spec."""
        limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
        spec = {"containers": [{"name": "c", "image": "x", "resources": {"limits": limits}}], **more}
        self.server.request("POST", PODS, {"metadata": {"name": name, "annotations": annotations or {}}, "spec": spec})

    def budget(self, name: str, available: int) -> None:
        """Create a disruption budget for a deployment."""
        spec = {"minAvailable": available, "selector": {"matchLabels": {"app": name}}}
        path = "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets"
        self.server.request("POST", path, {"metadata": {"name": name}, "spec": spec})

    def drop_budget(self, name: str) -> None:
        self.server.request("DELETE", f"/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets/{name}")

    def pods(self, app: str | None = None) -> list[dict[str, Any]]:
        """List the pods that are bound."""
        pods = self.server.request("GET", PODS)[1]["items"]
        return [
            pod
            for pod in pods
            if pod["spec"].get("nodeName") and (app is None or pod["metadata"].get("labels", {}).get("app") == app)
        ]

    def on(self, node: str) -> list[str]:
        """Name the pods on a node."""
        return sorted(pod["metadata"]["name"] for pod in self.pods() if pod["spec"]["nodeName"] == node)

    def running(self, app: str, count: int) -> list[dict[str, Any]]:
        """Wait until so many pods run, none of them on its way out."""

        def all_run() -> list[dict[str, Any]] | None:
            pods = self.pods(app)
            good = all(
                pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp") for pod in pods
            )
            return pods if good and len(pods) == count else None

        return wait(all_run)

    def clear(self) -> None:
        """Delete all deployments and pods, and free all nodes."""
        for path in (
            "/apis/apps/v1/namespaces/default/deployments",
            "/apis/apps/v1/namespaces/default/daemonsets",
            "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets",
        ):
            self.server.request("DELETE", path)
        for path in (
            "/apis/coordination.k8s.io/v1/namespaces/predrain/leases",
            "/api/v1/namespaces/predrain/configmaps",
            "/apis/batch/v1/namespaces/predrain/jobs?propagationPolicy=Background",
        ):
            self.server.request("DELETE", path)
        wait(lambda: self.server.request("GET", "/apis/apps/v1/namespaces/default/replicasets")[1]["items"] == [])
        self.server.request("DELETE", f"{PODS}?gracePeriodSeconds=0")
        wait(lambda: self.server.request("GET", PODS)[1]["items"] == [])
        for name in self.nodes:
            raw = self.node(name)
            raw["metadata"]["labels"] = {}
            raw["metadata"]["annotations"] = {}
            raw["spec"] = {}
            del raw["metadata"]["resourceVersion"]
            self.server.request("PUT", f"/api/v1/nodes/{name}", raw)


@contextlib.contextmanager
def kubernetes_cluster_in(
    folder: Path, nodes: list[str], scheduler_config: Callable[[KubernetesServer], dict[str, Any]] | None = None
) -> Iterator[KubernetesCluster]:
    """Run a whole control plane until the block ends."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(kubernetes_server_in(folder, *COMPONENTS))
        for account in ("publisher", "actuator"):
            server.apply(RBAC / f"{account}-rbac.yaml")
        server.apply(RBAC / "checkpoint-rbac.yaml")
        binaries, config = build_components(*COMPONENTS), server.kubeconfig("admin")
        for name in nodes:
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {}}})
        kubelets = Kubelets(server, nodes)
        for name in nodes:
            kubelets.ready(name)
            server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        kubelets.start()
        stack.callback(kubelets.join, 10)
        stack.callback(kubelets.halt.set)
        scheduler = folder / "scheduler.yaml"
        scheduler.write_text(yaml.safe_dump((scheduler_config or _scheduler_config)(server)))
        command = (binaries / "kube-scheduler", f"--config={scheduler}", "--bind-address=127.0.0.1",
             f"--secure-port={free_port()}", f"--cert-dir={folder / 'scheduler'}")  # fmt: skip
        stack.enter_context(running(command, folder / "kube-scheduler.log"))
        command = (binaries / "kube-controller-manager", f"--kubeconfig={config}", "--bind-address=127.0.0.1",
             f"--secure-port={free_port()}", "--port=0", "--leader-elect=false", f"--cert-dir={folder / 'controllers'}",
             f"--service-account-private-key-file={folder / 'sa.key'}", "--use-service-account-credentials=false",
             "--controllers=deployment,replicaset,daemonset,job,disruption,garbagecollector")  # fmt: skip
        stack.enter_context(running(command, folder / "kube-controller-manager.log"))
        cluster = KubernetesCluster(server, nodes, kubelets)
        wait(lambda: server.request("GET", "/api/v1/nodes?limit=1", user="actuator", check=False)[0] == 200)
        yield cluster


def _scheduler_config(server: KubernetesServer) -> dict[str, Any]:
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1beta1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(server.kubeconfig("admin"))},
        "leaderElection": {"leaderElect": False},
        "healthzBindAddress": f"127.0.0.1:{free_port()}",
        "metricsBindAddress": f"127.0.0.1:{free_port()}",
        # a pod that found no room is tried again soon
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 1,
    }


TEAM = {"key": "team.example/reserved", "value": "yes", "effect": "PreferNoSchedule"}
DIAGNOSTIC = Path(__file__).parents[2] / "deploy" / "kubernetes" / "diagnostic-job.yaml"


def effects(node: dict[str, Any]) -> list[str]:
    return [taint["effect"] for taint in node["spec"].get("taints", []) if taint["key"] == "predrain.io/at-risk"]


def condition(node: dict[str, Any]) -> str | None:
    statuses = [state["status"] for state in node["status"]["conditions"] if state["type"] == "GPUFailurePredicted"]
    return statuses[0] if statuses else None


def passed(pod: dict[str, Any]) -> str | None:
    """What our own diagnostic says when it passed."""
    if "predrain.io/diagnostic" not in pod["metadata"].get("labels", {}):
        return None
    variables = {variable["name"]: variable.get("value", "") for variable in pod["spec"]["containers"][0]["env"]}
    return json.dumps({"result": "passed", "node": variables["PREDRAIN_NODE"], "key": variables["PREDRAIN_KEY"]})
