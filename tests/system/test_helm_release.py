"""The Helm chart on a real API server: installed, at work and uninstalled by Helm's own code, and installed again."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, Config

from tests.chart import ALL, CHART, objects
from tests.processes import predrain
from tests.scheduler.score_files import record, write
from tests.system.kubernetes_cluster import Kubelets
from tests.system.kubernetes_server import KubernetesServer, kubernetes_server_in
from tests.waiting import wait

pytestmark = pytest.mark.system

EARLIER = {
    ">=1.25.0-0": ">=1.20.0-0",
    "policy/v1": "policy/v1beta1",
    "batch/v1\nkind: CronJob": "batch/v1beta1\nkind: CronJob",
    "  timeZone: Etc/UTC\n": "",
    "      targetPort:": "      protocol: TCP\n      targetPort:",
}
"""What the server of these tests, which is older than the chart allows, calls otherwise or does not have."""
RISKS = {"n1": 0.9, "n2": 0.3, "n3": 0.1, "n4": 0.001, "n5": None}
"""By node; ``None``: nothing is known."""
PODS = "/api/v1/namespaces/default/pods"
SIZE = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
POLICY = {
    "thresholds": {"watch": 0.05, "elevated": 0.2, "high": 0.6},
    "hysteresis": {"rise_after": 1},
    "stages": {"pinned": {"kubernetes/none": "hard"}},
    "budget": {"disruption_budgets": [{"scope": "fleet", "max_unavailable_share": 1.0}],
               "rate_limits": [{"scope": "fleet", "max_share": 1.0, "window": "1h"}]},
    "breaker": {"max_risky": 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with kubernetes_server_in(tmp_path_factory.mktemp("kubernetes")) as running:
        running.request("POST", "/api/v1/namespaces", {"metadata": {"name": "predrain"}})
        yield running


def rendered(server: KubernetesServer, namespace: str) -> dict[str, str]:
    config = Config(kubeconfig_path=server.kubeconfig("admin"), namespace=namespace)
    made: dict[str, str] = config.render(Chart.load(CHART), ALL, name="predrain", namespace=namespace)
    return made


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as this server takes it."""
    chart = tmp_path_factory.mktemp("chart") / "predrain"
    shutil.copytree(CHART, chart)
    for file in (chart / "Chart.yaml", *(chart / "templates").iterdir()):
        text = file.read_text(encoding="utf-8")
        for now, earlier in EARLIER.items():
            text = text.replace(now, earlier)
        file.write_text(text, encoding="utf-8")
    return chart


class Release:
    """One that Helm installs; its pods' commands run here, as the account that they name."""

    def __init__(self, server: KubernetesServer, folder: Path, name: str, full: str, prefix: str) -> None:
        self.server, self.name, self.full, self.prefix = server, name, full, prefix
        self.folder = folder / name
        self.folder.mkdir()
        self.config = Config(kubeconfig_path=server.kubeconfig("admin"), namespace="predrain")
        own = {"prefix": prefix, "device_taints": False}
        settings = {"policy": POLICY, "evacuation": {"enabled": True}, "kubernetes": own}
        dashboard = {"dashboard": True}  # the rest is of kinds that the Prometheus operator brings
        self.values = ALL | {"monitoring": dashboard, "act": ALL["act"] | {"settings": settings}}

    def install(self, chart: Path) -> None:
        loaded = Chart.load(chart)
        self.made = objects(self.config.render(loaded, self.values, name=self.name, namespace="predrain"))
        self.config.install(loaded, self.name, self.values, namespace="predrain")

    def act(self) -> None:
        """Do one round of the controller, as its pod would."""
        pod = self.made["StatefulSet", "predrain", f"{self.full}-act"]["spec"]["template"]["spec"]
        endless = ("--loop", "--listen", "--events")
        self.run(pod, *(word for word in pod["containers"][0]["args"] if not word.startswith(endless)))

    def run(self, pod: dict[str, Any], *instead: object) -> None:
        """Run a pod's one container to its end, with what it mounts; ``instead``: of its own options."""
        account = f"/api/v1/namespaces/predrain/serviceaccounts/{pod['serviceAccountName']}/token"
        token = self.server.request("POST", account, {"spec": {"expirationSeconds": 3600}})[1]["status"]["token"]
        access = yaml.safe_load(self.server.kubeconfig("admin").read_text())
        access["users"][0]["user"] = {"token": token}
        (self.folder / "access").write_text(yaml.safe_dump(access))
        (container,) = pod["containers"]
        places = "|".join(mount["mountPath"] for mount in container["volumeMounts"])
        for volume in pod["volumes"]:
            if "configMap" in volume:
                path = f"/api/v1/namespaces/predrain/configmaps/{volume['configMap']['name']}"
                for key, text in self.server.request("GET", path)[1]["data"].items():
                    (self.folder / key).write_text(re.sub(f": ({places})/", f": {self.folder}/", text))
        arguments = [re.sub(f"=({places})/", f"={self.folder}/", str(word)) for word in instead or container["args"]]
        assert container["command"] == ["predrain"]
        predrain(*arguments, cwd=self.folder, KUBECONFIG=str(self.folder / "access"))

    def present(self) -> set[tuple[str, str]]:
        """Give kind and name of what Helm made and is still there."""
        found = set()
        for (kind, namespace, name), document in self.made.items():
            version = document["apiVersion"]
            group = f"apis/{version}" if "/" in version else f"api/{version}"
            plural = (
                f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}es" if kind.endswith("s") else f"{kind}s"
            ).lower()
            path = "/".join(["", group, *(["namespaces", namespace] if namespace else []), plural, name])
            status, _ = self.server.request("GET", path, check=False)
            assert status in (200, 404), path
            if status == 200:
                found.add((kind, name))
        return found

    def uninstall(self) -> None:
        path = f"/apis/batch/v1/namespaces/predrain/jobs/{self.full}-release-all"
        with ThreadPoolExecutor(1) as pool:
            helm = pool.submit(self.config.uninstall, self.name, timeout=300)
            wait(lambda: helm.done() or self.server.request("GET", path, check=False)[0] == 200)
            assert not helm.done(), helm.result()
            self.run(self.server.request("GET", path)[1]["spec"]["template"]["spec"])
            done = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
            self.server.request("PATCH", f"{path}/status", {"status": done})
            helm.result(300)

    def marked(self) -> dict[str, list[str]]:
        """Give the nodes with what is ours on each: labels, annotations and taints."""
        found = {}
        for node in self.server.request("GET", "/api/v1/nodes")[1]["items"]:
            metadata = node["metadata"]
            keys = [*metadata.get("labels", {}), *metadata.get("annotations", {})]
            keys += [f"{taint['key']}:{taint['effect']}" for taint in node["spec"].get("taints", ())]
            if ours := sorted(key for key in keys if key.startswith(f"{self.prefix}/")):
                found[metadata["name"]] = ours
        return found


def test_two_releases_are_installed_act_and_go_again(server: KubernetesServer, chart: Path, tmp_path: Path) -> None:
    kubelets = Kubelets(server, list(RISKS))
    for name in RISKS:
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        kubelets.ready(name)
        server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"capacity": SIZE, "allocatable": SIZE}})
        server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train", "uid": "1", "controller": True}
    limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    job = {"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "x", **limits}]}
    server.request("POST", PODS, {"metadata": {"name": "train", "ownerReferences": [owner]}, "spec": job})
    bound = {"metadata": {"name": "train"}, "target": {"kind": "Node", "name": "n1"}}
    server.request("POST", f"{PODS}/train/binding", bound)  # as a scheduler does: who names a node pins the pod to it
    now = datetime.now(UTC).replace(microsecond=0)
    one = Release(server, tmp_path, "predrain", "predrain", "predrain.io")
    two = Release(server, tmp_path, "blue", "blue-predrain", "blue.example")
    for release in (one, two):
        release.install(chart)
        hook = {("Job", f"{release.full}-release-all")}
        assert release.present() == {(kind, name) for kind, _, name in release.made} - hook
        fleet = [record(f"GPU-{node}", node, risk, now) for node, risk in RISKS.items()]
        write(release.folder / "scores", *fleet, at=now, model={"fitted_at": now.isoformat()})
        release.act()
        marked = release.marked()
        assert set(marked) == {"n1", "n2", "n3"}, marked
        assert f"{release.prefix}/at-risk:NoSchedule" in marked["n1"]
    wait(lambda: one.act() or server.request("GET", f"{PODS}/train", check=False)[0] == 404)
    one.uninstall()
    assert (one.marked(), set(two.marked())) == ({}, {"n1", "n2", "n3"})
    two.uninstall()
    assert (one.marked(), two.marked()) == ({}, {})
    for release in (one, two):
        assert release.present() == {("PersistentVolumeClaim", f"{release.full}-data")}


def test_tokens_are_kept_and_what_an_uninstall_set_is_told(server: KubernetesServer) -> None:
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "elsewhere"}})
    first = rendered(server, "elsewhere")
    secret = objects(first)["Secret", "elsewhere", "predrain-tokens"]
    server.request("POST", "/api/v1/namespaces/elsewhere/secrets", secret)
    state = {"metadata": {"name": "predrain-state", "annotations": {"predrain.io/release-all": "true"}}}
    server.request("POST", "/api/v1/namespaces/elsewhere/configmaps", state)
    again = rendered(server, "elsewhere")
    assert objects(again)["Secret", "elsewhere", "predrain-tokens"] == secret
    notes = [next(text for name, text in made.items() if name.endswith("NOTES.txt")) for made in (first, again)]
    assert ["release-all is set" in text for text in notes] == [False, True]
    assert "kill is set" not in notes[1]
