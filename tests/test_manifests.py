"""The shipped Kubernetes manifests fit the published schemas, and run verbs with options that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from predrain.command import app
from scheduler.controller.settings import ActSettings
from scheduler.kubernetes.condition import CONDITION
from scheduler.ports.codec import object_of

FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
VERSIONS = ("1.25", "1.30", "1.37")


def documents() -> list[tuple[str, dict[str, Any]]]:
    objects = []
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if "metadata" in document:  # kube-scheduler reads its own file, in the system tests
                name = f"{path.name}:{document['kind']}/{document['metadata']['name']}"
                objects.append((name, document))
    return objects


DOCUMENTS = documents()


@pytest.mark.parametrize("document", [document for _, document in DOCUMENTS], ids=[name for name, _ in DOCUMENTS])
def test_a_manifest_fits_the_published_schema_of_old_and_new_servers(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = {**document, "specification": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def pod_specs() -> dict[str, dict[str, Any]]:
    specs = {}
    for name, document in DOCUMENTS:
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            specs[name] = spec["template"]["spec"]
    return specs


def test_a_stateful_set_names_a_service_that_exists_and_selects_its_pods() -> None:
    services = {
        document["metadata"]["name"]: document["spec"] for _, document in DOCUMENTS if document["kind"] == "Service"
    }
    (spec,) = (document["spec"] for _, document in DOCUMENTS if document["kind"] == "StatefulSet")
    service = services[spec["serviceName"]]
    assert service["clusterIP"] == "None"
    assert service["selector"] == spec["selector"]["matchLabels"]


def options(verb: str) -> set[str]:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(("name", "pod"), pod_specs().items(), ids=list(pod_specs()))
def test_what_runs_has_the_options_that_it_is_given_and_no_rights_that_it_does_not_need(
    name: str, pod: dict[str, Any]
) -> None:
    (container,) = pod["containers"]
    verb, *given = container["args"]
    assert container["command"] == ["predrain"]
    used = {word.partition("=")[0] for word in given}
    assert used <= options(verb), f"{name}: {used - options(verb)}"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod.get("automountServiceAccountToken") is False or "serviceAccountName" in pod
    assert container["resources"]["limits"]["memory"]


def test_nvsentinel_reads_the_condition_that_we_write_and_does_nothing_by_itself() -> None:
    values = yaml.safe_load((FOLDER / "nvsentinel-values.yaml").read_text(encoding="utf-8"))
    monitor = values.pop("kubernetes-object-monitor")
    assert values == {"global": {"kubernetesObjectMonitor": {"enabled": True}}}
    (policy,) = monitor["policies"]
    # the keys that NVSentinel documents for a policy of its Kubernetes Object Monitor
    assert set(policy) == {"name", "enabled", "resource", "predicate", "healthEvent"}
    assert policy["resource"] == {"group": "", "version": "v1", "kind": "Node"}
    assert f'c.type == "{CONDITION}" && c.status == "True"' in policy["predicate"]["expression"]
    event = policy["healthEvent"]
    assert (event["isFatal"], event["processingStrategy"], event["componentClass"]) == (False, "STORE_ONLY", "GPU")
    assert event["recommendedAction"] == "RUN_DCGMEUD"
    assert isinstance(event["message"], str)
    assert event["errorCode"] == ["PREDRAIN_GPU_FAILURE_PREDICTED"]


def test_no_role_but_its_own_may_patch_pods_or_set_device_taints_and_none_runs_commands_in_them() -> None:
    roles: dict[str, set[str]] = {}
    for name, document in DOCUMENTS:
        for rule in document.get("rules", ()):
            for resource in rule["resources"]:
                roles.setdefault(resource, set()).add(name)
    assert "pods/exec" not in roles
    patching = {
        name for name, document in DOCUMENTS for rule in document.get("rules", ())
        if "pods" in rule["resources"] and "patch" in rule["verbs"]
    }  # fmt: skip
    assert patching == {"checkpoint-rbac.yaml:ClusterRole/predrain-checkpoint"}
    assert roles["devicetaintrules"] == {"device-taints-rbac.yaml:ClusterRole/predrain-device-taints"}


def test_the_settings_of_the_controllers_manifest_are_read() -> None:
    (settings,) = (document for _, document in DOCUMENTS if document["kind"] == "ConfigMap")
    act_settings = object_of(ActSettings, yaml.safe_load(settings["data"]["act.yaml"]), "settings")
    assert act_settings.policy.stages.ceiling == "soft"
