"""Runs a diagnostic on an empty node as a Job from the operator's manifest, and reads its result."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

from foundation.errors import InputError
from foundation.files import read_text
from foundation.kubernetes.api import Object, Unreachable
from foundation.yaml import read_yaml
from policy.ladder.remedies import Remedy
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.ports.codec import instant, json_object
from scheduler.ports.readings import WriteResult
from scheduler.ports.workloads import DiagnosticResult, Fence

_ENDED: Final = ("Complete", "Failed")
_MAX_UNITS: Final = 64
_EXISTS: Final = 409
_PROBE_DEADLINE_S: Final = 1800
_PROBE_GRACE_S: Final = 30
"""Maximum grace period of a probe: half of the delay that ``policy.probes.preemption`` assumes."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a YAML file with one ``batch/v1`` Job; raises ``InputError``. predrain sets name, node and retries."""
    try:
        content = read_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"cannot read the manifest of the diagnostic: {error}", str(path), "Give a YAML file."
        ) from None
    try:
        job: dict[str, Any] = content
        containers = job["spec"]["template"]["spec"]["containers"]
        is_job = (job["apiVersion"], job["kind"]) == ("batch/v1", "Job") and isinstance(containers, list)
        is_job = is_job and bool(containers) and all(isinstance(container, dict) for container in containers)
    except (KeyError, TypeError):
        is_job = False
    if not is_job:
        raise InputError("the manifest is not a batch/v1 Job with containers", str(path), "Correct it.")
    return job


class KubernetesVerification:
    """Runs diagnostics as Jobs in predrain's namespace, from a manifest of the operator.

    The Job is bound to its node by name and tolerates predrain's taints. Its containers get ``PREDRAIN_NODE``,
    ``PREDRAIN_KEY``, ``PREDRAIN_GPUS`` and ``PREDRAIN_REMEDY`` (empty: diagnose only). One of them reports in its
    termination message: ``{"result": "passed" | "failed", "node": …, "key": …}``. A Job without such a report, with
    more than one, or that reports ``passed`` but failed, is inconclusive. A probe has the priority class of the
    settings, never preempts, and does not run on a cordoned node.
    """

    def __init__(self, scheduler: KubernetesScheduler, manifest: Mapping[str, Any]) -> None:
        self._scheduler = scheduler
        self._api = scheduler.api
        self._manifest = manifest
        self._namespace = scheduler.settings.namespace
        self._folder = f"/apis/batch/v1/namespaces/{self._namespace}/jobs"

    def start(
        self, node: str, units: Sequence[str], key: str, fence: Fence, remedy: Remedy | None, *, probe: bool
    ) -> WriteResult:
        """Create the Job; ``already`` if one with this key exists."""
        leadership = self._scheduler.leadership

        def create() -> WriteResult:
            response = self._api.request(
                "POST",
                self._folder,
                body=self._job(node, units, key, remedy, probe=probe),
                timeout=leadership.remaining(),
            )
            if response.ok:
                return WriteResult("done", f"Job {self._namespace}/{name_of(key)}")
            if response.status == _EXISTS:
                return WriteResult("already", "it was started before")
            return WriteResult("refused", response.problem)

        return leadership.fenced(fence.holder, fence.until, create)

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Read the state of the diagnostic; raises ``SchedulerError``."""
        job = self._api.read(f"{self._folder}/{name_of(key)}", named=name_of(key))
        if job is None:
            return DiagnosticResult("missing")
        conditions = (job.get("status") or {}).get("conditions") or ()
        ended = (
            condition
            for condition in conditions
            if condition.get("type") in _ENDED and condition.get("status") == "True"
        )
        pods, end = self._pods(key), next(ended, None)
        if end is None:
            return DiagnosticResult("running", "; ".join(map(_phase, pods)) or "no pod of it yet")
        statements = [statement for pod in pods for statement in _statements(pod, node, key)]
        time, complete = instant(end.get("lastTransitionTime")), end["type"] == "Complete"
        if len(statements) != 1:
            reason = (
                "it reports more than one result" if statements else "it ended and reports neither passed nor failed"
            )
            return DiagnosticResult("inconclusive", f"{reason} ({end.get('message') or end['type']})", (), time)
        (statement,) = statements
        message = str(statement.get("message") or "")[:500]
        if statement["result"] == "passed" and not complete:
            return DiagnosticResult("inconclusive", f"it reports passed, and failed ({end.get('message')})", (), time)
        units = statement.get("failed_units")
        failed = tuple(str(unit) for unit in units[:_MAX_UNITS]) if isinstance(units, list) else ()
        return DiagnosticResult(statement["result"], message, failed, time)

    def drop(self, node: str, key: str) -> None:
        """Delete the Job with its pods; failures are ignored, because the Job has its own deadline."""
        body = {"propagationPolicy": "Background"}
        try:
            self._api.request("DELETE", f"{self._folder}/{name_of(key)}", None, body)
        except Unreachable:
            return

    def _pods(self, key: str) -> list[Object]:
        selector = {"labelSelector": f"{self._label}={name_of(key)}"}
        path = f"/api/v1/namespaces/{quote(self._namespace, safe='')}/pods"
        return self._api.listing(path, selector, self._scheduler.settings.pod_page_size, lambda pod: pod)

    @property
    def _label(self) -> str:
        return self._scheduler.pod_keys.diagnostic

    def _job(self, node: str, units: Sequence[str], key: str, remedy: Remedy | None, *, probe: bool) -> dict[str, Any]:
        job = copy.deepcopy(dict(self._manifest))
        metadata = job.setdefault("metadata", {})
        metadata |= {"name": name_of(key), "namespace": self._namespace}
        metadata["annotations"] = {**(metadata.get("annotations") or {}), self._label: key}
        spec = job["spec"]
        spec["backoffLimit"] = 0
        spec.setdefault("activeDeadlineSeconds", 7200)
        spec.setdefault("ttlSecondsAfterFinished", 86_400)
        template = spec["template"]
        template["metadata"] = template.get("metadata") or {}
        for labelled in (metadata, template["metadata"]):
            labelled["labels"] = {**(labelled.get("labels") or {}), self._label: name_of(key)}
        pod = template["spec"]
        pod["restartPolicy"] = "Never"
        on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        pod["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [on_node]}}
        }
        own_taint = {"key": self._scheduler.keys.taint, "operator": "Exists"}
        pod["tolerations"] = [*(pod.get("tolerations") or ()), own_taint, *(() if probe else (_OWN_CORDON,))]
        if probe:
            spec["activeDeadlineSeconds"] = min(spec["activeDeadlineSeconds"], _PROBE_DEADLINE_S)
            pod.pop("priority", None)
            pod["priorityClassName"] = self._scheduler.settings.probe_priority_class
            pod["preemptionPolicy"] = "Never"
            pod["terminationGracePeriodSeconds"] = min(pod.get("terminationGracePeriodSeconds", 30), _PROBE_GRACE_S)
        variables = {"PREDRAIN_NODE": node, "PREDRAIN_KEY": key, "PREDRAIN_GPUS": ",".join(units)}
        variables["PREDRAIN_REMEDY"] = remedy or ""
        for container in pod["containers"]:
            variables_left = [entry for entry in container.get("env") or () if entry.get("name") not in variables]
            container["env"] = [*variables_left, *({"name": name, "value": value} for name, value in variables.items())]
        return job


_OWN_CORDON = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}
"""With ``kubernetes.cordon`` predrain cordons the node itself; diagnostics never start on nodes cordoned by others."""


def name_of(key: str) -> str:
    """Return the name of the Job with this key."""
    return f"predrain-diagnostic-{hashlib.sha256(key.encode()).hexdigest()[:20]}"


def _phase(pod: Object) -> str:
    status = pod.get("status") or {}
    waits = next(
        (str(condition.get("message")) for condition in status.get("conditions") or () if condition.get("message")), ""
    )
    return f"its pod is {status.get('phase')}{f': {waits[:200]}' if waits else ''}"


def _statements(pod: Object, node: str, key: str) -> list[dict[str, Any]]:
    """Return the results for this node and key in the termination messages of a pod's containers."""
    if (pod.get("spec") or {}).get("nodeName") != node:
        return []
    statements = []
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        statement = json_object(((container.get("state") or {}).get("terminated") or {}).get("message"))
        named = (statement.get("node"), statement.get("key")) == (node, key)
        if named and statement.get("result") in ("passed", "failed"):
            statements.append(statement)
    return statements
