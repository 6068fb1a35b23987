"""The Helm chart on a real API server: what it makes is admitted, and what an earlier release left is heeded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helm_python import Chart, Config

from tests.chart import ALL, CHART, objects
from tests.system.kubernetes_server import KubernetesServer, kubernetes_server_in

pytestmark = pytest.mark.system

LATER = {"CronJob", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"}
"""Kinds in versions that the server of these tests does not have."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with kubernetes_server_in(tmp_path_factory.mktemp("kubernetes")) as running:
        running.request("POST", "/api/v1/namespaces", {"metadata": {"name": "predrain"}})
        yield running


def rendered(server: KubernetesServer) -> dict[str, str]:
    config = Config(kubeconfig_path=server.kubeconfig("admin"), namespace="predrain")
    made: dict[str, str] = config.render(Chart.load(CHART), ALL, name="predrain", namespace="predrain")
    return made


def test_the_server_admits_what_it_makes(server: KubernetesServer) -> None:
    for (kind, namespace, _), document in objects(rendered(server)).items():
        version = document["apiVersion"]
        group = f"apis/{version}" if "/" in version else f"api/{version}"
        place = f"namespaces/{namespace}/" if namespace else ""
        plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        path = f"/{group}/{place}{plural.lower()}"
        status, answer = server.request("POST", f"{path}?dryRun=All", document, check=False)
        assert status == (404 if kind in LATER else 201), (kind, answer)


def test_tokens_are_kept_and_what_an_uninstall_set_is_told(server: KubernetesServer) -> None:
    first = rendered(server)
    secret = objects(first)["Secret", "predrain", "predrain-tokens"]
    server.request("POST", "/api/v1/namespaces/predrain/secrets", secret)
    state = {"metadata": {"name": "predrain-state", "annotations": {"predrain.io/release-all": "true"}}}
    server.request("POST", "/api/v1/namespaces/predrain/configmaps", state)
    again = rendered(server)
    assert objects(again)["Secret", "predrain", "predrain-tokens"] == secret
    notes = [next(text for name, text in made.items() if name.endswith("NOTES.txt")) for made in (first, again)]
    assert ["release-all IS SET" in text for text in notes] == [False, True]
    assert "kill IS SET" not in notes[1]
