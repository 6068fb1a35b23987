"""Pods as workloads of an evacuation: checkpoint requests by annotation, evictions by the Eviction API."""

import contextlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

from foundation.kubernetes.api import Object, Response, Unreachable
from foundation.kubernetes.client import MERGE_PATCH
from foundation.kubernetes.opt_out import read_switch, unclear
from policy.fleet import JobView
from scheduler.kubernetes.api import CachedReads
from scheduler.kubernetes.config_map import ConfigMapText
from scheduler.kubernetes.placement import PlacementCheck
from scheduler.kubernetes.pods import (
    LIVING,
    OPT_OUTS,
    PODS,
    OptOuts,
    annotations_of,
    duration,
    jobs_of,
    opt_outs_of,
    pod_part,
)
from scheduler.kubernetes.restarts import RestartCheck
from scheduler.kubernetes.scheduler import FIELD_MANAGER, KubernetesScheduler
from scheduler.ports.codec import instant, json_object
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Write, WriteResult
from scheduler.ports.workloads import (
    UNRESTRICTED,
    CheckpointAsk,
    CheckpointMeans,
    CheckpointOffer,
    CheckpointState,
    Fence,
    Workload,
)

_CORE: Final = "/api/v1"
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_TOO_MANY: Final = 429
_FAULT: Final = 500
_TWO_BUDGETS: Final = "more than one poddisruptionbudget"
_AGAIN_AFTER_FAULT: Final = timedelta(minutes=5)
_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_REVIEW: Final = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
_REVIEW_TIMEOUT: Final = timedelta(seconds=3)
_REVIEWED_FOR_S: Final = 300.0
_MAX_GRACE_S: Final = 30 * 86_400  # a pod may request any int64

_REMOVED: Final = WriteResult("gone", "the pod was removed")
_MIRROR: Final = "kubernetes.io/config.mirror"
_SOURCE: Final = "kubernetes.io/config.source"
_SLURM_GROUPS: Final = ("slinky.slurm.net/", "sunk.coreweave.com/")
_SLURM_WORKER: Final = "slurm.nebius.ai/nodeset"

_SYSTEM_PATHS: Final = ("/dev", "/sys", "/proc", "/run", "/var/run", "/etc", "/usr", "/lib", "/lib64", "/boot")
_NO_DATA: Final = ("Socket", "CharDevice", "BlockDevice")
_REPLICAS: Final = ("ReplicaSet", "ReplicationController")
_VIRTUAL_OWNER: Final = "vcluster.loft.sh/owner-set-kind"  # pods of a virtual cluster are owned by its Service
_STATIC: Final = ("file", "http")
_MEANS: Final[Mapping[str, CheckpointMeans]] = {"annotation": "scheduler", "webhook": "webhook", "command": "command"}


class KubernetesWorkloads:
    """The pods of a cluster."""

    def __init__(self, scheduler: KubernetesScheduler) -> None:
        self._scheduler = scheduler
        self._api = scheduler.api
        self._keys = scheduler.pod_keys
        self._settings = scheduler.settings
        progress = ConfigMapText(self._api, scheduler.settings.namespace, scheduler.settings.progress)
        self.load_progress, self.save_progress = progress.load, progress.save
        self._version: str | None = None
        self._may_patch: dict[str, tuple[bool, float]] = {}
        reads = CachedReads(self._api)
        self._restarts = RestartCheck(reads, scheduler.clock.now)
        self._placements = PlacementCheck(reads, kueue_replaces_nodes=self._settings.kueue_replaces_nodes)

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List the running pods of a node; raises ``SchedulerError``.

        A pod whose checkpoints are requested by annotation is immovable if the controller may not patch pods.
        """

        def view(raw: Object) -> Workload:
            try:
                workload = self._workload(raw)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise SchedulerError(f"a pod on {node} is invalid: {error!r}") from error
            asks = workload.checkpoint is not None and workload.checkpoint.means == "scheduler"
            namespace = workload.name.partition("/")[0]
            if workload.immovable is not None or not asks or self._may_annotate(namespace):
                return workload
            return replace(workload, loss=f"it asks for a checkpoint by annotation, but {_forbidden(namespace)}")

        params = {"fieldSelector": f"{LIVING},spec.nodeName={node}"}
        return tuple(self._api.listing(PODS, params, self._settings.pod_page_size, view))

    def _workload(self, pod: Object) -> Workload:
        metadata, spec, annotations = pod["metadata"], pod["spec"], annotations_of(pod)
        namespace = metadata.get("namespace") or "default"
        owner = next((owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), None)
        job = self._job(pod)
        grace = spec.get("terminationGracePeriodSeconds")
        means: Any = _MEANS.get(annotations.get(self._keys.checkpoint, ""))
        takes = duration(annotations.get(self._keys.checkpoint_takes))
        name, gang, stays = f"{namespace}/{metadata['name']}", _gang(job, owner), self._stays(pod, owner, job)
        opt_out = self._opt_out(pod, owner) or self._opt_out_elsewhere(gang, name)
        ending = bool(metadata.get("deletionTimestamp"))
        matters = stays is None and opt_out is None and not ending
        return Workload(
            name, metadata["uid"], "pod", spec["nodeName"],
            owner=None if owner is None else f"{owner['kind']} {namespace}/{owner['name']}",
            origin=_origin(metadata, namespace, owner), job=job,
            gang=gang, stays=stays,
            state="ending" if ending else "running",
            placement=self._placements.placement_of(pod) if matters else UNRESTRICTED, opt_out=opt_out,
            loss=self._loss(pod, owner) if matters else None,
            grace=timedelta(seconds=min(grace, _MAX_GRACE_S)) if isinstance(grace, int) else None,
            finalizers=tuple(map(str, metadata.get("finalizers") or ())) if ending else (),
            checkpoint=None if means is None else CheckpointOffer(means, takes),
        )  # fmt: skip

    def _job(self, pod: Object) -> JobView | None:
        """Return the whole job of a pod, even before its containers start."""
        status = dict(pod.get("status") or {})
        status.setdefault("startTime", pod["metadata"].get("creationTimestamp"))
        part = pod_part({**pod, "status": status}, self._scheduler.rules, self._keys)
        return None if part is None else self._scheduler.whole_job(jobs_of([part])[part.node][part.job])

    def _stays(self, pod: Object, owner: Object | None, job: JobView | None) -> str | None:
        if self._keys.is_diagnostic(pod):
            return "it is predrain's diagnostic"
        annotations, kind = annotations_of(pod), "" if owner is None else str(owner.get("kind"))
        if _MIRROR in annotations or annotations.get(_SOURCE) in _STATIC or kind == "Node":
            return "it is a mirror pod, managed by the kubelet"
        if "DaemonSet" in (kind, annotations.get(_VIRTUAL_OWNER)):
            return f"daemon set {(owner or {}).get('name')} runs it on every node"
        if job is None and owner is not None and ("DaemonSet" in kind or _bound_by_name(pod["spec"])):
            return f"{kind} {owner.get('name')} places it on this node, like a DaemonSet"
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return "it has ended"
        return "it has no GPU" if self._settings.eviction_scope == "gpu" and job is None else None

    def _opt_out(self, pod: Object, owner: Object | None) -> str | None:
        """Return the opt-out of a pod, if any. Only a clear value allows eviction; a duration counts from its start."""
        keys, labels = self._keys, pod["metadata"].get("labels") or {}
        started = instant((pod.get("status") or {}).get("startTime") or pod["metadata"].get("creationTimestamp"))
        reason = self._active_opt_out(opt_outs_of(pod, keys), started)
        if reason is not None:
            return reason
        if _SLURM_WORKER in labels or str((owner or {}).get("apiVersion")).startswith(_SLURM_GROUPS):
            return "it runs slurmd: its jobs leave through Slurm"
        setting = annotations_of(pod).get(keys.checkpoint)
        if setting is not None and setting not in _MEANS:  # evicted without a request, it would lose its work
            return f"{keys.checkpoint}={setting} is not one of {', '.join(_MEANS)}"
        return None

    def _opt_out_elsewhere(self, gang: str | None, name: str) -> str | None:
        """Return the opt-out of another pod of a gang, if any: it would stop as well."""
        for part in self._scheduler.opted_out(gang):
            reason = None if part.name == name else self._active_opt_out(part.opt_outs, part.started_at)
            if reason is not None:
                return f"{part.name} of the same job, on {part.node}, has {reason}"
        return None

    def _active_opt_out(self, opt_outs: OptOuts, started: datetime | None) -> str | None:
        for key, value in opt_outs:
            wait = None if OPT_OUTS.get(key, True) else duration(value)
            if wait is None:
                return unclear(key, value) or f"{key}={value}"
            if started is None or self._scheduler.clock.now() - started < wait:
                return f"{key}={value}, counted from its start"
        return None

    def _loss(self, pod: Object, owner: Object | None) -> str | None:
        """Return what an eviction would destroy, unless the pod allows it."""
        evict = self._keys.evict
        if read_switch(annotations_of(pod).get(evict) or "") is True:
            return None
        if owner is None and not self._settings.evict_unmanaged:
            return f"it has no controller that would restart it ({evict}=true allows the eviction)"
        if owner is not None and owner.get("kind") == "Service":
            kind = annotations_of(pod).get(_VIRTUAL_OWNER, "no controller")
            if kind not in (*_REPLICAS, "StatefulSet"):
                return (
                    f"{kind} in virtual cluster {owner['name']} might not restart it ({evict}=true allows the eviction)"
                )
        since = None  # start of the work that a new pod would repeat; unknown if a checkpoint is requested
        if self._keys.checkpoint not in annotations_of(pod):
            saved = instant(annotations_of(pod).get(self._keys.checkpointed))
            since = saved or instant((pod.get("status") or {}).get("startTime"))
        failure = None if owner is None else self._restarts.permanent_failure(pod, owner, since)
        if failure is not None:
            return f"{failure} ({evict}=true allows the eviction)"
        local = _local_data(pod["spec"])
        if local is not None and not self._settings.evict_local_data:
            return f"the data in its volume {local} would be lost ({evict}=true allows the eviction)"
        return None

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WriteResult:
        """Write the request to an annotation, which the pod reads as a file of the downward API."""
        return self._scheduler.leadership.fenced(fence.holder, fence.until, lambda: self._request(workload, ask))

    def _request(self, workload: Workload, ask: CheckpointAsk) -> WriteResult:
        current = self._api.request("GET", _path(workload))
        other = self._another(current, workload)
        if other is not None:
            return other
        recorded = annotations_of(current.content).get(self._keys.requested)
        if _key_of(recorded) == ask.key:
            return WriteResult("already", "it was already requested")
        request = {"key": ask.key, "deadline": ask.deadline.astimezone(UTC).isoformat(), "why": ask.why[:500]}
        text = json.dumps(request, ensure_ascii=False, sort_keys=True)
        # The uid makes the server reject the patch for a successor with the same name.
        content = {"metadata": {"uid": workload.uid, "annotations": {self._keys.requested: text}}}
        response = self._api.request(
            "PATCH", _path(workload), {"fieldManager": FIELD_MANAGER}, content, content_type=MERGE_PATCH,
            timeout=self._scheduler.leadership.remaining(),
        )  # fmt: skip
        if response.ok and annotations_of(response.content).get(self._keys.requested) != text:
            return WriteResult("refused", "the request is missing from the response: an admission webhook removed it")
        if response.ok:
            write = Write(f"pod {workload.name}", f"metadata.annotations[{self._keys.requested}]", recorded, text)
            return WriteResult("done", "", (write,))
        answer = self._failed(response, workload)
        if response.status == _FORBIDDEN:
            answer = replace(answer, message=f"{_forbidden(workload.name.partition('/')[0])} ({response.problem})")
        return answer

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Read the acknowledgement annotation: the key, or JSON with ``key`` and ``failed``."""
        pod = self._api.read(_path(workload), named=workload.name.partition("/")[2])
        if pod is None or _uid(pod) != workload.uid:
            return CheckpointState("gone", "the pod was removed")
        text = annotations_of(pod).get(self._keys.acknowledged)
        if text is None or _key_of(text) != key:
            return CheckpointState("waiting", "" if text is None else "it acknowledged another request")
        failed = json_object(text).get("failed")
        return CheckpointState("failed", str(failed)[:500]) if failed else CheckpointState("acknowledged")

    def evict(self, workload: Workload, fence: Fence) -> WriteResult:
        """Evict exactly this pod; the server rejects it if a disruption budget is exhausted."""
        return self._scheduler.leadership.fenced(fence.holder, fence.until, lambda: self._evict(workload))

    def _evict(self, workload: Workload) -> WriteResult:
        if workload.ending:
            return WriteResult("already", "it is already terminating")
        if self._version is None:
            self._version = self._offered()
        namespace, _, name = workload.name.partition("/")
        eviction = {  # no grace period: the pod's own applies
            "apiVersion": self._version,
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": workload.uid}},
        }
        response = self._api.request(
            "POST", f"{_path(workload)}/eviction", None, eviction, final=frozenset({_TOO_MANY, _FAULT}),
            timeout=self._scheduler.leadership.remaining(),
        )  # fmt: skip
        if response.ok:
            return WriteResult("done", "the eviction was accepted", self.preview(workload))
        return self._failed(response, workload)

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Return the writes of :meth:`evict`."""
        if workload.ending:
            return ()
        return (Write(f"pod {workload.name}", "eviction", None, f"uid {workload.uid}"),)

    def _may_annotate(self, namespace: str) -> bool:
        """Whether the controller may patch pods in a namespace; True if unknown."""
        allowed, until = self._may_patch.get(namespace, (True, float("-inf")))
        if self._api.elapsed() < until:
            return allowed
        access = {"namespace": namespace, "verb": "patch", "resource": "pods"}
        review = {**_REVIEW, "spec": {"resourceAttributes": access}}
        try:
            response = self._api.request("POST", _REVIEWS, body=review, timeout=_REVIEW_TIMEOUT)
        except Unreachable:
            return True
        status = response.content.get("status") if response.ok else None
        allowed = not isinstance(status, dict) or status.get("allowed") is not False
        self._may_patch[namespace] = (allowed, self._api.elapsed() + _REVIEWED_FOR_S)
        return allowed

    def _offered(self) -> str:
        for resource in (self._api.read(_CORE) or {}).get("resources") or ():
            if isinstance(resource, dict) and resource.get("name") == "pods/eviction":
                return f"{resource.get('group') or 'policy'}/{resource.get('version') or 'v1'}"
        raise SchedulerError("the server does not support evictions")

    def _another(self, current: Response, workload: Workload) -> WriteResult | None:
        """Return the result for a pod that is gone or was replaced; None if it is the expected one."""
        if current.status == _NOT_FOUND:
            return _REMOVED
        if not current.ok:
            return WriteResult("refused", current.problem)
        if _uid(current.content) != workload.uid:
            return WriteResult("conflict", f"another pod has this name (uid {_uid(current.content)})")
        return None

    def _failed(self, response: Response, workload: Workload) -> WriteResult:
        if response.status == _NOT_FOUND:
            return _REMOVED
        if response.status == _TOO_MANY:
            seconds = response.retry_after_s
            retry_at = None if seconds is None else self._scheduler.clock.now() + timedelta(seconds=seconds)
            causes = "; ".join(str(cause.get("message")) for cause in response.causes if cause.get("message"))
            return WriteResult("blocked", f"{response.problem}{f' ({causes})' if causes else ''}", again_at=retry_at)
        if response.status == _FAULT:
            if _TWO_BUDGETS in response.problem.lower():
                return WriteResult(
                    "blocked", response.problem, again_at=self._scheduler.clock.now() + _AGAIN_AFTER_FAULT
                )
            return WriteResult("timeout", response.problem)
        if response.status in (_CONFLICT, 422):
            other = None
            with contextlib.suppress(Unreachable):
                other = self._another(self._api.request("GET", _path(workload)), workload)
            # the same pod: another client is updating it or its budget
            return other or WriteResult("blocked" if response.status == _CONFLICT else "refused", response.problem)
        return WriteResult("refused", response.problem)


def _forbidden(namespace: str) -> str:
    return (
        f"the controller may not patch pods in namespace {namespace}: apply "
        "deploy/kubernetes/checkpoint-rbac.yaml (Helm: act.roles.checkpointAnnotations), or let the job ask by webhook"
    )


def _path(workload: Workload) -> str:
    namespace, _, name = workload.name.partition("/")
    return f"{_CORE}/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def _uid(pod: Object) -> str | None:
    metadata = pod.get("metadata")
    return metadata.get("uid") if isinstance(metadata, dict) else None


def _key_of(text: str | None) -> str | None:
    if text is None:
        return None
    key = json_object(text).get("key")
    return key if isinstance(key, str) else text.strip()


def _origin(metadata: Object, namespace: str, owner: Object | None) -> str:
    """Return what starts a pod's successor: its controller, or else its (generated) name."""
    if owner is not None:
        return f"{owner['kind']} {namespace}/{owner['name']}"
    return f"{namespace}/{metadata.get('generateName') or metadata['name']}"


def _gang(job: JobView | None, owner: Object | None) -> str | None:
    """Return the job that stops as a whole with any of its pods; None for elastic jobs and replicas of a service."""
    if job is None or job.can_shrink:
        return None
    replica = owner is not None and owner["kind"] in _REPLICAS and job.name.endswith(f"/{owner['name']}/{owner['uid']}")
    return None if replica else job.name


def _bound_by_name(spec: Object) -> bool:
    """Whether a controller binds a pod to one node by name, like a DaemonSet."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    rules = [rule for term in terms for rule in term.get("matchFields") or ()]
    return bool(rules) and all(rule.get("key") == "metadata.name" and rule.get("operator") == "In" for rule in rules)


def _local_data(spec: Object) -> str | None:
    """Return the name of a volume whose data would be lost or left behind on the node, if any.

    In-memory ``emptyDir`` volumes, devices, sockets and system folders hold no data.
    """
    for volume in spec.get("volumes") or ():
        empty, host = volume.get("emptyDir"), volume.get("hostPath")
        if isinstance(empty, dict) and not empty.get("medium"):
            return str(volume.get("name"))
        if volume.get("ephemeral") is not None:
            return str(volume.get("name"))
        if isinstance(host, dict) and host.get("type") not in _NO_DATA:
            path = posixpath.normpath(str(host.get("path") or "/"))
            if not any(path == system or path.startswith(f"{system}/") for system in _SYSTEM_PATHS):
                return str(volume.get("name"))
    return None
