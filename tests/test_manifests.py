"""The shipped Kubernetes manifests fit the published schemas, and give no right that is not needed."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from scheduler.kubernetes.condition import CONDITION
from tests.chart import FOLDER, VERSIONS


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


def test_no_role_of_ours_may_delete_a_pod_so_that_a_stuck_budget_cannot_be_forced() -> None:
    rules = [rule for _, document in DOCUMENTS for rule in document.get("rules", ())]
    assert any("pods/eviction" in rule["resources"] for rule in rules)
    for rule in rules:
        if {"pods", "*"} & set(rule["resources"]):
            assert not {"delete", "deletecollection", "*"} & set(rule["verbs"]), rule
