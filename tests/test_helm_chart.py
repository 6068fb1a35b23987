"""The Helm chart: one value brings everything up, in shadow, and what it makes fits the published schemas."""

import hashlib
import itertools
import json
import re
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft7Validator

from foundation.version import VERSION
from scheduler.controller.settings import ActSettings, read_settings
from scheduler.ports.codec import object_of
from tests.chart import ALL, CHART, FOLDER, NEEDED, VERSIONS, objects, options, rendered
from tests.chart_schema import settings_schemas

RIGHTS = ("publisher-rbac.yaml", "actuator-rbac.yaml", "collector-rbac.yaml")
CUSTOM = ("PodMonitor", "PrometheusRule")
PUBLISHER: dict[str, Any] = {
    **NEEDED,
    "act": {
        "rights": "publisher",
        "settings": {"policy": {"thresholds": {"watch": 0.05, "elevated": None, "high": None}}},
    },
    "serve": {"enabled": False}, "score": {"enabled": False}, "retrain": {"enabled": False},
}  # fmt: skip
CASES = {"defaults": NEEDED, "all": ALL, "publisher": PUBLISHER}


def pods(made: dict[tuple[str, str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    specs = {}
    for (kind, _, name), document in made.items():
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            specs[f"{kind}/{name}"] = spec["template"]["spec"]
    return specs


def test_without_a_place_where_telemetry_is_it_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"set prometheus\.url, collect\.receiver\.enabled"):
        rendered({})


def test_helm_finds_nothing_wrong_with_it() -> None:
    found = helm_python.lint(CHART, values=NEEDED)
    assert not [message for message in found["messages"] if "ERROR" in str(message)], found


def test_its_version_and_the_images_tag_are_predrains_own() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == chart["version"] == VERSION
    assert {pod["containers"][0]["image"] for pod in pods(objects(rendered())).values()} == {f"predrain:{VERSION}"}


def test_one_value_brings_up_the_whole_loop_and_marks_nothing() -> None:
    made = objects(rendered())
    verbs = [
        " ".join(word for word in pod["containers"][0]["args"][:2] if word[0] != "-") for pod in pods(made).values()
    ]
    collectors = ["collect compact", "collect kubernetes", "collect prometheus"]
    assert sorted(verbs) == ["act", "act", *collectors, "retrain", "score", "serve"]
    settings = yaml.safe_load(made["ConfigMap", "predrain", "predrain-settings"]["data"]["act.yaml"])
    assert object_of(ActSettings, settings, "settings").policy.stages.ceiling == "shadow"
    for pod in pods(made).values():  # nothing that the user has to make first
        for volume in pod["volumes"]:
            claim, secret = volume.get("persistentVolumeClaim"), volume.get("secret")
            assert claim is None or ("PersistentVolumeClaim", "predrain", claim["claimName"]) in made
            assert secret is None or ("Secret", "predrain", secret["secretName"]) in made
            assert "hostPath" not in volume


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_what_it_makes_fits_the_published_schemas_and_is_allowed_no_more_than_it_needs(values: dict[str, Any]) -> None:
    made = objects(rendered(values, release="r", namespace="gpu-health"))
    for (kind, _, _), document in made.items():
        for version in VERSIONS if kind not in CUSTOM else ():
            kubernetes_validate.validate(document, version, strict=True)
        for subject in document.get("subjects", ()):
            assert ("ServiceAccount", "gpu-health", subject["name"]) in made, (
                "each right is that of an account that the chart makes"
            )
        for role in [document["roleRef"]] if "roleRef" in document else []:
            names = {key[2] for key in made if key[0] == role["kind"]}
            assert role["name"] in names
    for name, pod in pods(made).items():
        # the host's journal is root's, and so is what the kubelet makes on it
        assert pod["securityContext"]["runAsNonRoot"] is not name.startswith("DaemonSet")
        assert pod.get("automountServiceAccountToken") is False or "serviceAccountName" in pod
        for container in pod["containers"]:
            used = {word.partition("=")[0] for word in container["args"] if word.startswith("--")}
            verb = container["args"][: 1 + (container["args"][0] == "collect")]
            assert used <= options(*verb), name
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
            }  # fmt: skip
            assert container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= {
                "ledger", *(volume["name"] for volume in pod["volumes"])
            }  # fmt: skip
    patching = {
        key[2] for key, document in made.items() for rule in document.get("rules", ())
        if "pods" in rule["resources"] and "patch" in rule["verbs"]
    }  # fmt: skip
    assert patching == ({"gpu-health-r-predrain-checkpoint"} if values is ALL else set())
    actuating = {key[2] for key in made if "actuator" in key[2]}
    assert bool(actuating) == (values is not PUBLISHER)


def test_its_rights_are_those_of_the_plain_files() -> None:
    def meaning(document: dict[str, Any]) -> dict[str, Any]:
        return {name: document.get(name) for name in ("kind", "rules", "roleRef", "subjects")}

    made = objects(rendered(ALL))
    plain = [objects({name: (FOLDER / name).read_text(encoding="utf-8")}).items() for name in RIGHTS]
    for key, document in itertools.chain(*plain):
        if document["kind"] != "Namespace":
            assert meaning(made[key]) == meaning(document), key


def test_the_manifest_of_a_diagnostic_is_where_the_controller_looks_for_it() -> None:
    data = objects(rendered(ALL))["ConfigMap", "predrain", "predrain-settings"]["data"]
    assert yaml.safe_load(data["act.yaml"])["kubernetes"]["diagnostic_job"] == "/etc/predrain/diagnostic-job.yaml"
    assert yaml.safe_load(data["diagnostic-job.yaml"]) == yaml.safe_load(ALL["act"]["diagnosticJob"])


def test_two_releases_share_nothing_in_one_cluster() -> None:
    one, two, other = (
        objects(rendered(ALL, release=release, namespace=namespace))
        for release, namespace in (("predrain", "predrain"), ("blue", "predrain"), ("predrain", "elsewhere"))
    )
    assert not one.keys() & two.keys()
    assert not one.keys() & other.keys()
    selectors = [
        made[key]["spec"]["selector"]["matchLabels"] for made in (one, two) for key in made if key[0] == "StatefulSet"
    ]
    assert selectors[0] != selectors[1]
    stored = yaml.safe_load(two["ConfigMap", "predrain", "blue-predrain-settings"]["data"]["act.yaml"])["kubernetes"]
    names = {name for key, document in two.items() if key[0] == "Role" and key[1] == "predrain"
             for rule in document["rules"] for name in rule.get("resourceNames", ())}  # fmt: skip
    assert {stored["lease"], stored["state"], stored["progress"]} == names


def test_the_token_that_it_makes_is_read_by_the_service_and_the_receiver() -> None:
    made = objects(rendered(ALL))
    secret = made["Secret", "predrain", "predrain-tokens"]["stringData"]
    service = made["Deployment", "predrain", "predrain-serve"]["spec"]["template"]["spec"]
    (held,) = [volume["secret"]["items"] for volume in service["volumes"] if "secret" in volume]
    assert held == [{"key": "tokens.txt", "path": "tokens.txt"}], "hashes alone"
    digest = hashlib.sha256(secret["token"].encode()).hexdigest()
    assert len(secret["token"]) >= 40
    assert secret["tokens.txt"] == f"admin sha256:{digest} predrain"
    assert secret["receiver-tokens.txt"].splitlines() == [secret["token"], secret["push"]]


def test_gpu_nodes_push_to_the_receiver_with_a_token_that_only_it_takes() -> None:
    made = objects(rendered(ALL))
    pod = made["DaemonSet", "predrain", "predrain-nodes"]["spec"]["template"]["spec"]
    containers = {container["name"]: container for container in pod["containers"]}
    service = made["Service", "predrain", "predrain-receiver"]
    address = f"http://{service['metadata']['name']}.predrain:{service['spec']['ports'][0]['port']}"
    for name, container in containers.items():
        assert {f"--push={address}", "--node=$(NODE)", f"--spool=/spool/{name}"} <= set(container["args"])
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert all(mounts[name].get("readOnly") for name in mounts if name not in ("spool", "tmp"))
    assert sorted(containers) == ["kernel-log", "nvml"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["token"]["secret"] == {"secretName": "predrain-tokens", "items": [{"key": "push", "path": "push"}]}
    # on the host, for a pod that replaces another begins where that stopped; one folder a release
    assert volumes["spool"]["hostPath"] == {"path": "/var/lib/predrain/predrain", "type": "DirectoryOrCreate"}
    assert pod["tolerations"] == [{"operator": "Exists"}], "also where predrain has tainted the node"
    (rule,) = made["NetworkPolicy", "predrain", "predrain"]["spec"]["ingress"]
    assert "from" not in rule, "the receiver is reached from every node"


def test_a_node_runs_what_is_asked_for_alone() -> None:
    def pod(**nodes: bool) -> dict[str, Any]:
        collect = {"receiver": {"enabled": True}, "nodes": nodes}
        made = objects(rendered({**NEEDED, "collect": collect}))
        return {key[0]: document for key, document in made.items()}.get("DaemonSet", {})

    assert not pod(), "the receiver alone puts nothing on nodes"
    log = pod(kernelLog=True)["spec"]["template"]["spec"]
    assert [container["name"] for container in log["containers"]] == ["kernel-log"]
    assert "runtimeClassName" not in log
    nvml = pod(nvml=True)["spec"]["template"]["spec"]
    assert [container["name"] for container in nvml["containers"]] == ["nvml"]
    assert nvml["runtimeClassName"] == "nvidia"
    assert ("affinity" in log, "affinity" in nvml) == (False, True), "NVML makes way for the driver"
    assert [volume["name"] for volume in nvml["volumes"] if "hostPath" in volume] == ["spool"]
    with pytest.raises(ValueError, match=r"set collect\.receiver\.enabled=true"):
        rendered({**NEEDED, "collect": {"nodes": {"nvml": True}}})


@pytest.mark.parametrize(
    ("values", "thresholds"),
    [
        ({}, {"watch": 0.05, "elevated": 0.15, "high": 0.4}),
        ({"params": {"policy": {"thresholds": {"high": 0.5}}}}, {"watch": 0.05, "elevated": 0.15, "high": 0.5}),
        ({"act": {"settings": {"policy": {"thresholds": None, "thresholds_from": "scores"}}}}, None),
    ],
)
def test_scores_have_their_tiers_by_the_controllers_thresholds(values: dict[str, Any], thresholds: Any) -> None:
    made = objects(rendered({**NEEDED, **values}))
    texts = [
        one["data"]["params.yaml"] for (kind, _, name), one in made.items() if kind == "ConfigMap" and "params" in name
    ]
    assert [yaml.safe_load(text) for text in texts] == [{"policy": {"thresholds": thresholds}}] * (
        thresholds is not None
    )


def test_the_registrys_address_is_given_to_those_alone_that_read_models() -> None:
    known = {
        name
        for name, pod in pods(objects(rendered(ALL))).items()
        if any(entry["name"] == "MLFLOW_TRACKING_URI" for entry in pod["containers"][0].get("env", ()))
    }
    assert known == {"CronJob/predrain-retrain", "CronJob/predrain-score", "Deployment/predrain-serve"}


def test_all_marks_are_off_before_it_is_uninstalled() -> None:
    job = objects(rendered())["Job", "predrain", "predrain-release-all"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert {"--release-all", "--wait=10m"} <= set(job["spec"]["template"]["spec"]["containers"][0]["args"])


def test_jobs_never_overlap_and_write_to_their_claim_only() -> None:
    made = objects(rendered(ALL))
    jobs = {key[2]: document["spec"] for key, document in made.items() if key[0] == "CronJob"}
    assert sorted(jobs) == [f"predrain-{name}" for name in ("compact", "prometheus", "retrain", "score", "tickets")]
    for job in jobs.values():
        inner = job["jobTemplate"]["spec"]
        assert (job["concurrencyPolicy"], inner["backoffLimit"]) == ("Forbid", 0)
        assert inner["activeDeadlineSeconds"] > 0
        (container,) = inner["template"]["spec"]["containers"]
        paths = [word.partition("=")[2] for word in container["args"] if "=/" in word]
        assert all(path.startswith(("/data/", "/etc/predrain-params/")) for path in paths), paths
    assert re.fullmatch(r"\*/5( \*){4}", jobs["predrain-score"]["schedule"])


def test_what_asks_for_a_token_is_scraped_with_one() -> None:
    monitor = objects(rendered(ALL))["PodMonitor", "predrain", "predrain"]["spec"]
    endpoints = {endpoint["port"]: endpoint.get("authorization") for endpoint in monitor["podMetricsEndpoints"]}
    assert endpoints == {"metrics": None, "http": {"credentials": {"name": "predrain-tokens", "key": "token"}}}


def test_rules_and_dashboard_are_those_that_are_tested() -> None:
    made = objects(rendered(ALL))
    rules = yaml.safe_load((CHART / "files" / "predrain-rules.yaml").read_text(encoding="utf-8"))
    assert made["PrometheusRule", "predrain", "predrain"]["spec"] == rules
    shown = made["ConfigMap", "predrain", "predrain-dashboard"]["data"]["predrain.json"]
    assert json.loads(shown) == json.loads((CHART / "files" / "predrain.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ({"settings": {"kubernetes": {"device_taints": True}}}, "needs act.roles.deviceTaints"),
        ({"settings": {"kubernetes": {"namespace": "elsewhere"}}}, "set it to predrain"),
        ({"rights": "publisher"}, r"thresholds\.watch only"),
        ({"rights": "publisher", "settings": {"policy": {"thresholds_from": "scores"}}}, r"thresholds\.watch only"),
    ],
)
def test_settings_that_the_chart_does_not_allow_are_refused_when_it_is_rendered(act, message):
    with pytest.raises(ValueError, match=message):
        rendered({**NEEDED, "act": act})


@pytest.mark.parametrize(
    "wrong",
    [
        {"act": {"replica": 2}},
        {"act": {"rights": "admin"}},
        {"serve": {"resources": {"limits": {"memory": None}}}},
        {"data": {"claim": "Not a name"}},
        {"prometheus": {"url": "prometheus:9090"}},
        {"act": {"settings": {"policy": {"stages": {"ceiling": "medium"}}}}},
        {"act": {"settings": {"policy": {"stages": {"pinned": {"east/a": "drain"}}}}}},
        {"act": {"settings": {"policy": {"threshold": {"watch": 0.05}}}}},
        {"act": {"settings": {"policy": {"budget": {"disruption_budgets": [{"scope": "row"}]}}}}},
        {"act": {"settings": {"kubernetes": {"eviction_scope": "some"}}}},
        {"act": {"settings": {"evacuation": {"enabled": "yes please"}}}},
        {"params": {"models": {"learners": ["lightgm"]}}},
        {"params": {"trainig": {"window": "28d"}}},
        {"params": {"channels": {"mine": {"kind": "gauge_"}}}},
        {"collect": {"tickets": {"enabled": True, "path": "tickets"}}},
    ],
)
def test_unknown_and_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    Draft7Validator.check_schema(schema)
    with pytest.raises(ValueError, match="at '/"):
        rendered({**NEEDED, **wrong})


def test_the_schema_has_the_keys_and_choices_of_the_programs_settings() -> None:
    definitions = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["definitions"]
    made = settings_schemas()
    assert {name: definitions[name] for name in made} == made, "bring it up to date: python -m tests.chart_schema"


def test_tickets_are_staged_from_the_claim_and_compacted() -> None:
    made = objects(rendered({**NEEDED, "collect": {"kubernetes": {"enabled": False}, "tickets": {"enabled": True}}}))
    jobs = {key[2]: document["spec"] for key, document in made.items() if key[0] == "CronJob"}
    assert "predrain-compact" in jobs
    job = jobs["predrain-tickets"]
    assert job["schedule"] == "7 * * * *"
    (container,) = job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][:4] == ["collect", "tickets", "/data/tickets", "--dataset=/data/fleet"]
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]


def test_the_settings_that_it_begins_with_can_be_read(tmp_path: Any) -> None:
    text = objects(rendered(ALL))["ConfigMap", "predrain", "predrain-settings"]["data"]["act.yaml"]
    (tmp_path / "act.yaml").write_text(text)
    assert list(read_settings(tmp_path / "act.yaml").kubernetes.gpu_annotations) == ["team.example/gpus: all #1"]


def test_probes_have_a_priority_class_that_never_preempts() -> None:
    given = {"act": {"enabled": True, "roles": {"diagnostics": True}}}
    made = objects(rendered({**NEEDED, **given}))
    data = made["ConfigMap", "predrain", "predrain-settings"]["data"]
    name = yaml.safe_load(data["act.yaml"])["kubernetes"]["probe_priority_class"]
    classes = {key[-1]: made[key] for key in made if key[0] == "PriorityClass"}
    assert classes[name]["preemptionPolicy"] == "Never"
    assert classes[name]["value"] < 0
