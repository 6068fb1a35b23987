"""A pod as a workload: whether it has to leave its node, whether it may be moved, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from policy.fleet import JobView
from scheduler.kubernetes.pods import PodKeys, annotations_of, duration, jobs_of, pod_part
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.workloads import CheckpointMeans, CheckpointOffer, Workload
from telemetry.collect.kubernetes.api import Object
from telemetry.collect.kubernetes.rules import KubernetesRules

_MIRROR: Final = "kubernetes.io/config.mirror"
_OURS: Final = "it is our own diagnostic"
_SLURM_GROUP: Final = "slinky.slurm.net/"

OPT_OUTS: Final[Mapping[str, str]] = {
    "karpenter.sh/do-not-disrupt": "true",
    "karpenter.sh/do-not-evict": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "nodeset.slinky.slurm.net/pod-protect": "true",
}
"""Annotations and labels of other tools by which a pod asks not to be moved."""

_MEANS: Final[Mapping[str, CheckpointMeans]] = {
    "annotation": "scheduler",
    "webhook": "webhook",
    "command": "command",
    "exec": "exec",
}


def pod_workload(
    pod: Object,
    settings: KubernetesSettings,
    rules: KubernetesRules,
    keys: PodKeys,
    whole: Callable[[JobView], JobView],
) -> Workload:
    """Read a pod that is bound to a node.

    ``whole``: gives the whole job for the part of it that this pod is.
    Raises ``KeyError, TypeError, AttributeError`` if it is not of the form that a pod has.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    namespace = metadata.get("namespace") or "default"
    owner = _owner(metadata)
    job = _job(pod, rules, keys)
    annotations = annotations_of(pod)
    grace = spec.get("terminationGracePeriodSeconds")
    return Workload(
        name=f"{namespace}/{metadata['name']}",
        uid=metadata["uid"],
        kind="pod",
        node=spec["nodeName"],
        owner=None if owner is None else f"{owner['kind']} {namespace}/{owner['name']}",
        job=None if job is None else whole(job),
        stays=_OURS if keys.is_diagnostic(pod) else _stays(pod, owner, job, settings),
        held=_held(metadata, spec, annotations, owner, settings, keys),
        ending=bool(metadata.get("deletionTimestamp")),
        grace=timedelta(seconds=grace) if isinstance(grace, int) else None,
        checkpoint=_offer(annotations, keys),
    )


def _owner(metadata: Object) -> Object | None:
    return next((each for each in metadata.get("ownerReferences") or () if each.get("controller")), None)


def _job(pod: Object, rules: KubernetesRules, keys: PodKeys) -> JobView | None:
    """Give the job that a pod is part of, also where its containers have not begun yet."""
    status = dict(pod.get("status") or {})
    status.setdefault("startTime", pod["metadata"].get("creationTimestamp"))
    part = pod_part({**pod, "status": status}, rules, keys)
    return None if part is None else jobs_of([part])[part.node][part.job]


def _stays(pod: Object, owner: Object | None, job: JobView | None, settings: KubernetesSettings) -> str | None:
    if _MIRROR in annotations_of(pod) or (owner is not None and owner.get("kind") == "Node"):
        return "its kubelet runs it by itself (a mirror pod)"
    if owner is not None and owner.get("kind") == "DaemonSet":
        return f"daemon set {owner.get('name')} runs it on every node"
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return "it has ended"
    if settings.evict == "gpu" and job is None:
        return "it has no GPU"
    return None


def _held(
    metadata: Object,
    spec: Object,
    annotations: Mapping[str, str],
    owner: Object | None,
    settings: KubernetesSettings,
    keys: PodKeys,
) -> str | None:
    labels = metadata.get("labels") or {}
    for key, value in {keys.managed: "false", **OPT_OUTS}.items():
        if value in (annotations.get(key), labels.get(key)):
            return f"{key}={value}"
    if owner is not None and str(owner.get("apiVersion") or "").startswith(_SLURM_GROUP):
        return "Slurm runs in it: its jobs leave through Slurm"
    if annotations.get(keys.evict) == "true":
        return None
    if owner is None and not settings.evict_unmanaged:
        return f"nothing would start it elsewhere ({keys.evict}=true lets it go)"
    local = _local_data(spec)
    if local is not None and not settings.evict_local_data:
        return f"the data in its volume {local} would be lost ({keys.evict}=true lets it go)"
    return None


def _local_data(spec: Object) -> str | None:
    """Give the name of a volume that is lost with the pod; one in memory is no data that anybody keeps."""
    for volume in spec.get("volumes") or ():
        empty = volume.get("emptyDir")
        if isinstance(empty, dict) and empty.get("medium") != "Memory":
            return str(volume.get("name"))
    return None


def _offer(annotations: Mapping[str, str], keys: PodKeys) -> CheckpointOffer | None:
    means: Any = _MEANS.get(annotations.get(keys.checkpoint, ""))
    if means is None:
        return None
    url = annotations.get(keys.checkpoint_url) if means == "webhook" else None
    return CheckpointOffer(means, url, duration(annotations.get(keys.checkpoint_takes)))
