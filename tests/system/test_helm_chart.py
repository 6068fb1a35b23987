"""The Helm chart, rendered: with its defaults it makes what the plain manifests make, and all of it fits the schemas.

Helm itself is in no Debian release: the templates are rendered by Go's own text/template, which Helm is built on, with
those of Helm's functions that the chart uses.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft7Validator

from scheduler.controller.settings import ActSettings
from scheduler.ports.codec import object_of

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "predrain"
PLAIN = ROOT / "deploy" / "kubernetes"
LIKE = ("publisher-rbac.yaml", "actuator-rbac.yaml", "act.yaml", "serve.yaml", "score-cronjob.yaml")
VERSIONS = ("1.25", "1.30", "1.37")
HELMS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")

Values = dict[str, Any]
Render = Callable[..., dict[str, str]]
Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    binary = tmp_path_factory.mktemp("chart") / "render"
    environment = {**os.environ, "GO111MODULE": "off", "CGO_ENABLED": "0", "GOFLAGS": ""}
    source = Path(__file__).with_name("render_chart.go")
    subprocess.run(["go", "build", "-o", str(binary), str(source)], check=True, env=environment, timeout=240)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    named = {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]}

    def rendered(values: Values | None = None, namespace: str = "predrain") -> dict[str, str]:
        release = {"Name": "r", "Namespace": namespace, "Service": "Helm"}
        given = {"Folder": str(CHART), "Values": values or defaults(), "Release": release, "Chart": named}
        done = subprocess.run([str(binary)], input=json.dumps(given), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return dict(json.loads(done.stdout))

    return rendered


def defaults() -> Values:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def schema() -> Draft7Validator:
    content = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    Draft7Validator.check_schema(content)
    return Draft7Validator(content)


def objects(texts: dict[str, str]) -> dict[Key, Any]:
    by_key: dict[Key, Any] = {}
    for name, text in texts.items():
        if not name.endswith(".yaml"):
            continue
        for document in yaml.safe_load_all(text):
            if document is None:
                continue
            key = (document["kind"], document["metadata"].get("namespace", ""), document["metadata"]["name"])
            assert key not in by_key, key
            by_key[key] = document
    return by_key


def meaning(document: Any) -> Any:
    """An object without what only tells who made it."""
    document = copy.deepcopy(document)
    metadata = document["metadata"]
    labels = {name: value for name, value in metadata.pop("labels", {}).items() if name not in HELMS}
    labels.pop("app.kubernetes.io/name", None)
    if labels:
        metadata["labels"] = labels
    if document["kind"] == "ConfigMap":
        document["data"] = {name: yaml.safe_load(text) for name, text in document["data"].items()}
    template = document.get("spec", {}).get("jobTemplate", document).get("spec", {}).get("template")
    if template:
        template["metadata"].get("annotations", {}).pop("predrain.io/settings", None)
        for container in template["spec"]["containers"]:
            container.pop("imagePullPolicy", None)
    return document


def test_with_its_defaults_it_makes_what_the_plain_manifests_make(render: Render) -> None:
    texts = render()
    ours = {key: meaning(document) for key, document in objects(texts).items()}
    plain = objects({name: (PLAIN / name).read_text(encoding="utf-8") for name in LIKE})
    theirs = {key: meaning(document) for key, document in plain.items() if document["kind"] != "Namespace"}
    assert ours.keys() == theirs.keys()
    for key, wanted in theirs.items():
        assert ours[key] == wanted, key
    assert "BEFORE you uninstall" in texts["NOTES.txt"]


def with_all() -> Values:
    """All that can be asked for."""
    values = defaults()
    values["imagePullSecrets"] = [{"name": "registry"}]
    values["act"]["roles"] |= {"checkpointAnnotations": True, "deviceTaints": True}
    values["collect"]["exporters"]["enabled"] = values["collect"]["receiver"]["enabled"] = True
    values["act"]["ledger"]["storageClass"] = "local"
    values["act"]["settings"]["kubernetes"] = {
        "namespace": "gpu-health", "device_taints": True, "gpu_annotations": ["team.example/gpus: all #1"],
    }  # fmt: skip
    for part in ("act", "serve", "score"):
        values[part]["tolerations"] = [{"key": "team.example/x", "operator": "Exists", "effect": "NoSchedule"}]
    return values


def publisher() -> Values:
    values = defaults()
    values["act"] |= {"rights": "publisher", "replicas": 1}
    values["act"]["settings"]["policy"]["thresholds"] = {"watch": 0.05}
    values["serve"]["enabled"] = values["score"]["enabled"] = False
    return values


@pytest.mark.parametrize(
    ("values", "namespace"), [(defaults(), "predrain"), (with_all(), "gpu-health"), (publisher(), "predrain")]
)
def test_what_it_makes_fits_the_published_schemas_and_its_settings_are_read(
    render: Render, values: Values, namespace: str
) -> None:
    schema().validate(values)
    made = objects(render(values, namespace))
    for document in made.values():
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        for subject in document.get("subjects", ()):
            assert ("ServiceAccount", namespace, subject["name"]) in made, "every right is some account's of ours"
            assert subject["namespace"] == namespace
    text = made["ConfigMap", namespace, "predrain-settings"]["data"]["act.yaml"]
    settings = object_of(ActSettings, yaml.safe_load(text), "settings")
    wanted = values["act"]["settings"].get("kubernetes", {}).get("gpu_annotations", [])
    assert list(settings.kubernetes.gpu_annotations) == wanted
    pod = made["StatefulSet", namespace, "predrain-act"]["spec"]["template"]["spec"]
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    account = pod["serviceAccountName"]
    assert account == f"predrain-{values['act']['rights']}"
    if values["act"]["rights"] == "publisher":
        assert not [key for key in made if "actuator" in key[2]]
        assert not [key for key in made if key[0] in ("Deployment", "CronJob")]
    assert ("Service", namespace, made["StatefulSet", namespace, "predrain-act"]["spec"]["serviceName"]) in made
    patching = {
        key[2] for key, document in made.items() for rule in document.get("rules", ())
        if "pods" in rule["resources"] and "patch" in rule["verbs"]
    }  # fmt: skip
    assert patching == ({"predrain-checkpoint"} if values["act"]["roles"]["checkpointAnnotations"] else set())
    assert ("CronJob", namespace, "predrain-compact") in made or not values["collect"]["exporters"]["enabled"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kubernetes": {"device_taints": True}}, "needs act.roles.deviceTaints"),
        ({"kubernetes": {"namespace": "elsewhere"}}, "set act.settings.kubernetes.namespace to predrain"),
    ],
)
def test_settings_that_the_chart_does_not_allow_are_refused_when_it_is_rendered(
    render: Render, change: Values, message: str
) -> None:
    values = defaults()
    values["act"]["settings"] |= change
    with pytest.raises(ValueError, match=message):
        render(values)
    for policy in ({"thresholds": {"watch": 0.05, "high": 0.4}}, {"thresholds_from": "scores"}):
        values = defaults()
        values["act"]["rights"] = "publisher"
        values["act"]["settings"]["policy"] = policy
        with pytest.raises(ValueError, match=r"thresholds\.watch alone"):
            render(values)


def test_the_schema_refuses_what_nobody_reads() -> None:
    wrong: list[Values] = [defaults() for _ in range(4)]
    wrong[0]["act"]["replica"] = 2
    wrong[1]["act"]["rights"] = "admin"
    wrong[2]["serve"]["resources"] = {"requests": {"cpu": "1"}}
    wrong[3]["data"]["claim"] = "Not a name"
    for values in wrong:
        assert list(schema().iter_errors(values))
    assert not list(schema().iter_errors(defaults()))
