"""The whole loop on a real control plane, with the commands that the chart's containers run.

The server keeps the real time, which is years before that of predrain's processes; the kubelets have theirs.
"""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.dataset.store import Dataset
from tests.chart import objects, rendered
from tests.system.kubernetes_cluster import (
    DIAGNOSTIC,
    PODS,
    RBAC,
    TEAM,
    KubernetesCluster,
    condition,
    effects,
    kubernetes_cluster_in,
    passed,
)
from tests.system.prometheus_server import prometheus
from tests.system.whole_loop import ADMINS, PARAMS, POLICY, RETRY_AFTER, SICK, SINCE, Fleet, Loop, simulated
from tests.waiting import wait

pytestmark = pytest.mark.system
SPARE = "node-00000"


class KubernetesLoop(Loop):
    """A release in a cluster; what its pods mount is in a folder of the same path below ``root/pod``.

    ``marks``: the effects of our taints on the sick node, each time that they changed.
    ``results``: what each diagnostic said of which node.
    """

    scheduler = "kubernetes"

    def __init__(self, root: Path, fleet: Fleet, url: str, cluster: KubernetesCluster) -> None:
        super().__init__(root, fleet, root / "pod" / "data", os.environ)
        self.cluster, self.marks, self.results = cluster, list[list[str]](), dict[str, tuple[str, str]]()
        self._install(url)
        cluster.server.apply(RBAC / "collector-rbac.yaml")
        cluster.kubelets.now = lambda: self.now
        cluster.kubelets.ends = self._diagnosed
        cluster.change(ADMINS, unschedulable=True, taints=[TEAM])
        cluster.change(SPARE, unschedulable=True)
        count = len(fleet.nodes) - 2
        asks = {"predrain.io/checkpoint": "annotation", "predrain.io/checkpoint-takes": "15m"}
        cluster.deploy("train", count, 8, asks)
        self._pods = count
        cluster.running("train", count)
        (self._victim,) = cluster.on(SICK)
        cluster.change(SPARE, unschedulable=None)
        self._before = self._nodes()

    def _install(self, url: str) -> None:
        """Render the chart, and lay out what the pods of it mount."""
        settings = {
            "policy": yaml.safe_load(POLICY.replace("GROUP", "kubernetes/none")), "controller": {"lease": "5s"},
            "evacuation": {"enabled": True, "verification": {"method": "scheduler", "retry_after": RETRY_AFTER}},
        }  # fmt: skip
        values = {
            "prometheus": {"url": url, "since": SINCE}, "params": yaml.safe_load(PARAMS),
            "act": {
                "roles": {"checkpointAnnotations": True}, "diagnosticJob": DIAGNOSTIC.read_text(), "settings": settings,
            },
        }  # fmt: skip
        self._made = objects(rendered(values))
        for folder in ("data", "ledger", "tmp", "etc/predrain", "etc/predrain-params"):
            (self.root / "pod" / folder).mkdir(parents=True)
        for name, place in (("settings", "etc/predrain"), ("params", "etc/predrain-params")):
            for file, text in self._made["ConfigMap", "predrain", f"predrain-{name}"]["data"].items():
                (self.root / "pod" / place / file).write_text(self._inside(text))

    def _inside(self, text: str) -> str:
        return re.sub(r"(?<!\w)/(data|ledger|tmp|etc/predrain(-params)?)(?=/|$)", rf"{self.root}/pod\g<0>", text)

    def installed(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Give the command of a container, to its end where it would go on."""
        kind = {"act": "StatefulSet", "kubernetes": "Deployment"}.get(name, "CronJob")
        spec = self._made[kind, "predrain", f"predrain-{name}"]["spec"]
        pod = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["predrain"]
        words = [self._inside(word) for word in container["args"] if not word.startswith(("--loop", "--listen"))]
        words += ["--once"] if name == self.scheduler else []
        variables = {variable["name"]: self._inside(variable["value"]) for variable in container["env"]}
        if account := pod.get("serviceAccountName"):
            variables["KUBECONFIG"] = str(self.cluster.server.kubeconfig(account.removeprefix("predrain-")))
        return words, variables

    def round(self) -> None:
        """A round, after which a diagnostic that began has ended."""
        super().round()
        marks = effects(self.cluster.node(SICK))
        self.marks += [marks] if [marks] != self.marks[-1:] else []

        def ended() -> bool:
            jobs = self.cluster.server.request("GET", "/apis/batch/v1/namespaces/predrain/jobs")[1]["items"]
            return all(job["status"].get("conditions") for job in jobs)

        wait(ended)
        for pod in self.cluster.pods("train"):
            asked = "predrain.io/checkpoint-requested" in pod["metadata"]["annotations"]
            if asked and pod["metadata"]["name"] != self._victim:
                self._acknowledge(pod)

    def _diagnosed(self, pod: dict[str, Any]) -> str | None:
        """What a diagnostic says when it ends."""
        message = passed(pod)
        if message is None:
            return None
        said = json.loads(message)
        said["result"] = "failed" if said["node"] in self.broken.read_text() else "passed"
        self.results[said["key"]] = (said["node"], said["result"])
        return json.dumps(said)

    def out(self) -> frozenset[str]:
        """Name the nodes that are drained."""
        return frozenset(name for name in self.cluster.nodes if "NoSchedule" in effects(self.cluster.node(name)))

    def checkpoint(self) -> None:
        """See that the pod is still where it was, and acknowledge the checkpoint that it was asked for."""
        pod = self.cluster.server.request("GET", f"{PODS}/{self._victim}")[1]
        assert "deletionTimestamp" not in pod["metadata"], "nothing moves before its checkpoint is written"
        self._acknowledge(pod)

    def _acknowledge(self, pod: dict[str, Any]) -> None:
        key = json.loads(pod["metadata"]["annotations"]["predrain.io/checkpoint-requested"])["key"]
        done = {"metadata": {"annotations": {"predrain.io/checkpoint-acknowledged": key}}}
        self.cluster.server.request("PATCH", f"{PODS}/{pod['metadata']['name']}", done)

    def moved(self) -> bool:
        """Whether nothing is on the sick node, and the whole job runs elsewhere."""
        return not self.cluster.on(SICK) and bool(self.cluster.running("train", self._pods))

    def untouched(self) -> bool:
        """Whether each node stands as it did."""
        return self._nodes() == self._before

    def _nodes(self) -> list[list[Any]]:
        nodes = [self.cluster.node(name) for name in self.cluster.nodes]
        kept = ("labels", "annotations")
        return [
            [node["spec"], condition(node) == "True", *(node["metadata"].get(key) or {} for key in kept)]
            for node in nodes
        ]


def test_a_week_on_kubernetes_from_the_chart_to_a_model_that_learned_from_the_failure_it_foresaw(
    tmp_path: Path,
) -> None:
    fleet = simulated(tmp_path)
    with (
        prometheus(tmp_path / "data") as url,
        kubernetes_cluster_in(tmp_path, fleet.nodes) as cluster,
        contextlib.closing(KubernetesLoop(tmp_path, fleet, url, cluster)) as loop,
    ):
        loop.week()
        assert loop.marks[:2] == [["PreferNoSchedule"], ["PreferNoSchedule", "NoSchedule"]]
        assert loop.marks[-1] == []
        *before, last = (result for node, result in loop.results.values() if node == SICK)
        assert (set(before), last) == ({"failed"}, "passed")
        dataset = Dataset.open(loop.state / "fleet")
        events = dataset.events()
        assert set(events["node"][events["source"] == "kubernetes"]) == {ADMINS}, (
            "what is predrain's own is no event of others"
        )
        assert {job.partition("/")[0] for job in dataset.jobs()["job"]} == {"default"}, "a diagnostic is no job"
