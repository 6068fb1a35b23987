"""Maps pods to jobs: the pods of each node, by watch or list, and the size of each job over all its nodes."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, Final

from foundation.durations import parse_duration
from foundation.instants import from_ms
from foundation.kubernetes.api import CLAIM_VERSIONS, Object
from foundation.kubernetes.client import IDLE_S
from foundation.kubernetes.opt_out import read_switch
from foundation.kubernetes.watching import ChangeKind, Resource, Tracker, follow
from policy.fleet import JobView
from scheduler.kubernetes.api import ApiServer
from scheduler.ports.codec import instant
from scheduler.ports.errors import SchedulerError
from telemetry.collect.kubernetes.jobs import CHECKPOINTED, gpus_of, pod_run
from telemetry.collect.kubernetes.rules import KubernetesRules

PODS: Final = "/api/v1/pods"
LIVING: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector for pods that have not terminated."""

_GROUP: Final = "/apis/resource.k8s.io"
_PAGE: Final = 250
_GROUP_INDEX: Final = "leaderworkerset.sigs.k8s.io/group-index"

OPT_OUTS: Final[Mapping[str, bool]] = {
    "karpenter.sh/do-not-disrupt": False, "karpenter.sh/do-not-evict": False,
    "cluster-autoscaler.kubernetes.io/safe-to-evict": True, "descheduler.alpha.kubernetes.io/prefer-no-eviction": False,
    "nodeset.slinky.slurm.net/pod-protect": False, "cluster.x-k8s.io/drain": False,
    "autoscaling.cast.ai/removal-disabled": False, "spotinst.io/restrict-scale-down": False,
    "nvidia.com/gpu-driver-upgrade-drain.skip": False, "nvidia.com/ofed-driver-upgrade-drain.skip": False,
    "node-lifecycle.datadoghq.com/enabled": True, "agones.dev/safe-to-evict": True,
}  # fmt: skip
"""Annotations and labels of other tools that opt a pod out of eviction, and the value that allows it."""

OptOuts = tuple[tuple[str, str], ...]
"""Keys and values of annotations and labels that do not clearly allow eviction."""

Claim = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class PodPart:
    """A pod's part of a job; ``gpus`` excludes GPUs of resource claims, whose names are in ``claims``.

    ``name``: ``namespace/pod``; empty for an unparsable pod.
    """

    node: str
    job: str
    gpus: int
    started_at: datetime | None = None
    checkpointed_at: datetime | None = None
    ends_at: datetime | None = None
    can_checkpoint: bool = False
    elastic: bool = False
    namespace: str = ""
    claims: tuple[str, ...] = ()
    name: str = ""
    opt_outs: OptOuts = ()


class PodKeys:
    """Keys of pod annotations and labels under the prefix."""

    def __init__(self, prefix: str, namespace: str) -> None:
        self.namespace = namespace
        self.checkpoint = f"{prefix}/checkpoint"  # means of requesting one: annotation, webhook or command
        self.checkpointed = f"{prefix}/{CHECKPOINTED}"  # time of the last checkpoint
        self.checkpoint_takes = f"{prefix}/checkpoint-takes"  # duration of a checkpoint: 90s, 5m
        self.elastic = f"{prefix}/elastic"  # true: the job continues with its other pods
        self.requested = f"{prefix}/checkpoint-requested"  # written by predrain
        self.acknowledged = f"{prefix}/checkpoint-acknowledged"  # written by the job
        self.ends_at = f"{prefix}/ends-at"  # expected end
        self.evict = f"{prefix}/evict"  # true: may be evicted without a controller, or despite local data
        self.diagnostic = f"{prefix}/diagnostic"  # label of predrain's diagnostic pods
        self.managed = f"{prefix}/managed"  # false: opt-out

    def is_diagnostic(self, pod: Object) -> bool:
        """Whether a pod is a diagnostic in predrain's namespace; in other namespaces the label could hide a job."""
        metadata = pod["metadata"]
        return metadata.get("namespace") == self.namespace and self.diagnostic in (metadata.get("labels") or {})


def pod_part(pod: Object, rules: KubernetesRules, keys: PodKeys) -> PodPart | None:
    """Return a pod's part of a job; None if it is unscheduled, requests no GPU, has ended, or is a diagnostic.

    An unparsable pod counts as a job of its own, because it occupies its node.
    """
    try:
        if keys.is_diagnostic(pod):
            return None
        run = pod_run(pod, rules)
    except (KeyError, TypeError, AttributeError, ValueError):
        metadata, spec = (part if isinstance(part := pod.get(key), dict) else {} for key in ("metadata", "spec"))
        node = spec.get("nodeName")
        if not isinstance(node, str) or not node:
            return None
        return PodPart(node, f"{metadata.get('namespace')}/{metadata.get('name')}", 1)
    if run is None or run.outcome is not None:
        return None
    annotations = annotations_of(pod)
    checkpointed_at = None if run.checkpointed_ms is None else from_ms(run.checkpointed_ms)
    # each group of a LeaderWorkerSet is a replica that stops independently
    group = (pod["metadata"].get("labels") or {}).get(_GROUP_INDEX)
    job = run.job if group is None else f"{run.job}/{group}"
    return PodPart(
        run.node, job, run.gpus, from_ms(run.started_ms), checkpointed_at, ends_at(pod, keys),
        keys.checkpoint in annotations, annotations.get(keys.elastic) == "true", run.namespace, run.claims,
        f"{run.namespace}/{pod['metadata']['name']}", opt_outs_of(pod, keys),
    )  # fmt: skip


def opt_outs_of(pod: Object, keys: PodKeys) -> OptOuts:
    """Return the opt-outs of a pod. A value that is neither true nor false is one."""
    labels, annotations = pod["metadata"].get("labels") or {}, annotations_of(pod)
    return tuple(
        (key, str(value))
        for key, lets_go in {keys.managed: True, **OPT_OUTS}.items()
        for value in (annotations.get(key), labels.get(key))
        if value is not None and read_switch(str(value)) is not lets_go
    )


def jobs_of(parts: Iterable[PodPart]) -> dict[str, dict[str, JobView]]:
    """Return the jobs of each node, each with its total GPUs over all ``parts``.

    A job ends with its first part; any part may record its checkpoints.
    """
    of_job: dict[str, list[PodPart]] = {}
    of_node: dict[str, set[str]] = {}
    for part in parts:
        of_job.setdefault(part.job, []).append(part)
        of_node.setdefault(part.node, set()).add(part.job)
    wholes = {
        name: JobView(
            name,
            max(1, sum(part.gpus for part in job)),  # 0: its claims are counted with another pod
            _pick(min, (part.started_at for part in job)),
            _pick(max, (part.checkpointed_at for part in job)),
            _pick(min, (part.ends_at for part in job)),
            any(part.can_checkpoint for part in job),
            any(part.elastic for part in job) and len({part.node for part in job}) > 1,
        )
        for name, job in of_job.items()
    }
    return {node: {name: wholes[name] for name in sorted(names)} for node, names in of_node.items()}


def annotations_of(manifest: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    annotations = (manifest.get("metadata") or {}).get("annotations") or {}
    return annotations if isinstance(annotations, dict) else {}


def ends_at(pod: Object, keys: PodKeys) -> datetime | None:
    """Return the latest end of a pod: from its annotation, else from ``activeDeadlineSeconds``."""
    stated = instant(annotations_of(pod).get(keys.ends_at))
    if stated is not None:
        return stated
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    started, deadline_s = instant(status.get("startTime")), spec.get("activeDeadlineSeconds")
    if started is None or not isinstance(deadline_s, int):
        return None
    try:
        return started + timedelta(seconds=deadline_s)
    except OverflowError:
        return None


def version_of(manifest: Object) -> int:
    """Return an object's resourceVersion as a number, comparable within one kind; 0 if it has none."""
    metadata = manifest.get("metadata")
    text = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else 0


def duration(text: str | None) -> timedelta | None:
    """Parse a duration like ``90s``, ``5m`` or ``1h``; None if it is invalid."""
    try:
        return parse_duration((text or "").strip())
    except (ValueError, OverflowError):
        return None


def _pick(choose: Callable[..., datetime | None], times: Iterable[datetime | None]) -> datetime | None:
    return choose((time for time in times if time is not None), default=None)


class ClaimCounts:
    """GPUs of resource claims, as of the last list; an unknown claim counts as one GPU."""

    def __init__(self, api: ApiServer, rules: KubernetesRules) -> None:
        self._api = api
        self._rules = rules
        self._version: str | None = None
        self._gpus_of: Mapping[Claim, int] = {}

    def refresh(self, parts: Iterable[PodPart]) -> None:
        """List the claims if any pod has one; if that fails, the previous list is kept."""
        if not any(part.claims for part in parts):
            return
        try:
            if self._version is None:
                self._version = next((v for v in CLAIM_VERSIONS if self._api.read(f"{_GROUP}/{v}") is not None), None)
            if self._version is not None:
                path = f"{_GROUP}/{self._version}/resourceclaims"
                self._gpus_of = dict(self._api.listing(path, {}, _PAGE, self._view))
        except SchedulerError:
            self._version = None  # no permission, or the server has changed

    def counted(self, parts: Iterable[PodPart]) -> Iterator[PodPart]:
        """Yield the parts of jobs with the GPUs of their claims added.

        Pods can share a claim: within a job it counts once, for the first pod that has it.
        """
        counted: set[tuple[str, str, str]] = set()
        for part in parts:
            claimed = 0
            for claim in part.claims:
                if (part.job, part.namespace, claim) not in counted:
                    counted.add((part.job, part.namespace, claim))
                    claimed += self._gpus_of.get((part.namespace, claim), 1)
            yield replace(part, gpus=part.gpus + claimed) if part.claims else part

    def _view(self, raw: Object) -> tuple[Claim, int] | None:
        try:
            metadata = raw["metadata"]
            return (metadata["namespace"], metadata["name"]), gpus_of(raw, self._rules)
        except (KeyError, TypeError, AttributeError):
            return None


_BOUND: Final = {"fieldSelector": f"{LIVING},spec.nodeName!="}

PodUpdate = tuple[str, PodPart | None]
"""``namespace/name`` of a pod, and its part of a job, if any."""


class _Parts(Tracker[PodUpdate, PodPart]):
    """Parts of jobs by pod and by node."""

    key = itemgetter(0)

    def __init__(self) -> None:
        super().__init__({})
        self.of_node: dict[str, dict[str, PodPart]] = {}

    def update(self, view: PodUpdate, now: datetime) -> list[Any]:
        name, part = view
        self.remove(name, now)
        if part is not None:
            self.known[name] = part
            self.of_node.setdefault(part.node, {})[name] = part
        return []

    def remove(self, key: str, now: datetime, *, watched: bool = True) -> list[Any]:
        part = self.known.pop(key, None)
        if part is not None:
            of_node = self.of_node[part.node]
            del of_node[key]
            if not of_node:
                del self.of_node[part.node]
        return []


class RunningPods:
    """The parts of jobs on all nodes.

    ``read``: returns a pod's part; must not raise.
    ``follows``: start a watch on the first :meth:`everywhere`, for a long-running process. The watch is current while
    the server has sent something within ``IDLE_S`` (a change, a bookmark or a new watch); otherwise pods are listed.
    """

    def __init__(
        self, api: ApiServer, read: Callable[[Object], PodPart | None], page_size: int, *, follows: bool
    ) -> None:
        self._api, self._read, self._page_size, self._follows = api, read, page_size, follows
        self._newest = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._resource: Resource | None = None
        self._parts = _Parts()
        self._by_watch = False

    def everywhere(self) -> list[PodPart]:
        """Return the parts on all nodes; raises ``SchedulerError`` if a list is needed and fails."""
        self._by_watch = self.watched
        if self._by_watch:
            with self._lock:
                return list(self._parts.known.values())
        self._newest = 0
        pods, version = self._api.listing_at(PODS, _BOUND, self._page_size, self._read_pod)
        if self._follows and (self._thread is None or not self._thread.is_alive()):
            self._begin(pods, version)
            self._by_watch = True
        return [part for _, part in pods if part is not None]

    def on(self, node: str) -> list[PodPart]:
        """Return the parts on one node, at least as new as the last :meth:`everywhere`; raises ``SchedulerError``."""
        if self._by_watch and self.watched:  # a watch that was interrupted may be older than the last list
            with self._lock:
                return list(self._parts.of_node.get(node, {}).values())
        params = {"fieldSelector": f"{LIVING},spec.nodeName={node}"}
        if self._newest:
            # "Not older than" lets the server answer from its watch cache, indexed by node, instead of etcd. The
            # version is that of the newest pod, not of the list: before 1.31 the cache reaches the list's version only
            # with the next change of a pod, and the server would wait for it.
            params["resourceVersion"] = str(self._newest)
        return self._api.listing(PODS, params, 0, self._read)

    @property
    def watched(self) -> bool:
        """Whether the watch is running and current."""
        resource, thread = self._resource, self._thread
        if resource is None or resource.version is None or thread is None or not thread.is_alive():
            return False
        return time.monotonic() - resource.heard_s < IDLE_S

    def stop(self) -> None:
        """Stop the watch, at the latest when the server ends it; the next :meth:`everywhere` starts a new one."""
        self._stop.set()
        self._resource = self._thread = None

    def _begin(self, pods: list[PodUpdate], version: str) -> None:
        self._stop, self._parts = threading.Event(), _Parts()
        resource = Resource("pods", PODS, _BOUND, self._read_pod, self._parts, version, self._page_size, relists=True)
        self._take(resource, "listed", pods, version)
        resource.hear()
        arguments = (self._api.client, resource, self._take, self._stop.wait)
        self._thread = threading.Thread(target=follow, args=arguments, name="follow pods", daemon=True)
        self._thread.start()
        self._resource = resource

    def _take(self, resource: Resource, kind: ChangeKind, pods: list[Any], version: str) -> None:
        with self._lock:
            resource.tracker.take(kind, pods, datetime.now(UTC))
            resource.version = version

    def _read_pod(self, raw: Object) -> PodUpdate:
        metadata = raw.get("metadata") or {}
        self._newest = max(self._newest, version_of(raw))
        return f"{metadata.get('namespace')}/{metadata.get('name')}", self._read(raw)
