"""Pods with GPUs as job rows: start, end, outcome and owner."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from foundation.instants import to_ms
from foundation.kubernetes.api import (
    CLAIM_VERSIONS,
    ApiRefused,
    Object,
    parse_quantity,
    required,
    text_of,
    timestamp_ms,
)
from foundation.kubernetes.client import KubernetesClient
from foundation.kubernetes.watching import Tracker
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.dataset.event import Event

CHECKPOINTED: Final = "checkpointed-at"
"""Annotation (with predrain's prefix) for the time of a job's last checkpoint (ISO 8601)."""

DELETED: Final = "Deleted"
"""Outcome of a pod that was deleted while running."""

UNKNOWN: Final = "Unknown"
"""Outcome of a pod that vanished between two listings; its end is the time of the second."""

_GROUP_LABELS: Final = (
    "jobset.sigs.k8s.io/jobset-name",
    "leaderworkerset.sigs.k8s.io/name",
    "training.kubeflow.org/job-name",
    "ray.io/cluster",
    "volcano.sh/job-name",
)
# Labels of multi-pod jobs whose pods are owned by an intermediate object, outermost first.

MAX_GPUS: Final = 4096
"""Cap on the GPUs of a pod; larger requests are implausible."""

_UNTELLING: Final = (None, "", "Completed", "Error")

log = logging.getLogger(__name__)

Key = tuple[str, str, int]
"""Key of a job row: job, node, start (Unix ms)."""


@dataclass(frozen=True, slots=True)
class PodRun:
    """A pod on its node. Times are Unix milliseconds.

    ``started_ms``: when the kubelet admitted the pod, which holds its GPUs from then on.
    ``claims``: ResourceClaims whose GPUs are not in ``gpus`` yet.
    ``outcome``: ``Succeeded``, or the reason of its failure (``Failed``, ``Evicted``, ``OOMKilled``, …); None while it
    runs.
    """

    uid: str
    namespace: str
    job: str
    node: str
    started_ms: int
    ended_ms: int | None
    gpus: int
    claims: tuple[str, ...] = ()
    checkpointed_ms: int | None = None
    outcome: str | None = None

    @property
    def key(self) -> Key:
        """Key of its job row."""
        return (self.job, self.node, self.started_ms)


def pod_run(pod: Object, rules: KubernetesRules) -> PodRun | None:
    """Return the run of a pod, or None if it has not started on a node or requests no GPU.

    The start is ``status.startTime``, which container restarts do not change. The pod has ended only if its phase says
    so, even if containers have terminated.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    started_ms = timestamp_ms(status.get("startTime"))
    node = text_of(spec.get("nodeName"))
    if not node or started_ms is None:
        return None
    gpus = _requested(spec, metadata.get("annotations") or {}, rules)
    claims = _claims(spec, status)
    if not gpus and not claims:
        return None
    phase = status.get("phase")
    ended_ms = outcome = None
    if phase in ("Succeeded", "Failed"):
        ended_ms = max(_ended_ms(metadata, status) or started_ms, started_ms)
        outcome = "Succeeded" if phase == "Succeeded" else _failure(status)
    return PodRun(
        uid=required(metadata["uid"]),
        namespace=text_of(metadata.get("namespace")) or "default",
        job=_job(metadata),
        node=node,
        started_ms=started_ms,
        ended_ms=ended_ms,
        gpus=gpus,
        claims=claims,
        checkpointed_ms=timestamp_ms((metadata.get("annotations") or {}).get(f"{rules.prefix}/{CHECKPOINTED}")),
        outcome=outcome,
    )


class JobTracker(Tracker[PodRun, PodRun]):
    """Tracks pods with GPUs, and which of their rows have changed.

    Rows are keyed by job, node and start. If several pods of a job start on a node in the same second, their starts
    are offset by a millisecond each.
    """

    def __init__(
        self, api: KubernetesClient, rules: KubernetesRules, known: Mapping[str, PodRun] | None = None
    ) -> None:
        super().__init__(known or {})
        self._api = api
        self._rules = rules
        self._keys = {run.key for run in self.known.values()}
        self._unwritten: dict[str, PodRun] = {}
        self._may_read_claims = True

    def update(self, view: PodRun, now: datetime) -> list[Event]:
        """Apply the current state of a pod."""
        run, known = view, self.known.get(view.uid)
        if known is not None:
            # A finished pod may lose its times when containers are deleted: keep what was reported first.
            if known.ended_ms is not None:
                run = replace(run, ended_ms=known.ended_ms, outcome=known.outcome)
            claims = run.claims if known.claims else ()
            run = replace(run, gpus=max(run.gpus, known.gpus), claims=claims)
            # The key must not change, even if the API server corrects the start.
            run = replace(run, job=known.job, node=known.node, started_ms=known.started_ms)
        if run.claims:
            claimed = sum(self._claimed_gpus(run.namespace, claim) for claim in run.claims)
            if claimed:
                run = replace(run, gpus=run.gpus + claimed, claims=())
            elif not run.gpus:
                return []
        while known is None and run.key in self._keys:
            run = replace(run, started_ms=run.started_ms + 1)
        if run != known:
            self._keys.add(run.key)
            self.known[run.uid] = self._unwritten[run.uid] = run
        return []

    def remove(self, key: str, now: datetime, *, watched: bool = True) -> list[Event]:
        """Remove a pod; if it was still running, it ended at ``now``."""
        run = self.known.pop(key, None)
        if run is not None:
            self._keys.discard(run.key)
            if run.ended_ms is None:
                outcome = DELETED if watched else UNKNOWN
                self._unwritten[key] = replace(run, ended_ms=max(to_ms(now), run.started_ms), outcome=outcome)
        return []

    def changed_rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``JOBS`` that changed since the last call, with times in Unix milliseconds."""
        changed, self._unwritten = self._unwritten.values(), {}
        return [
            {
                "job": run.job,
                "node": run.node,
                "started_at": run.started_ms,
                "ended_at": run.ended_ms,
                "gpus": run.gpus,
                "checkpointed_at": run.checkpointed_ms,
                "outcome": run.outcome,
            }
            for run in changed
        ]

    def _claimed_gpus(self, namespace: str, claim: str) -> int:
        """Return the GPUs of a ResourceClaim; 0 if it does not exist or may not be read."""
        for version in CLAIM_VERSIONS if self._may_read_claims else ():
            path = f"/apis/resource.k8s.io/{version}/namespaces/{namespace}/resourceclaims/{claim}"
            try:
                return gpus_of(self._api.get(path), self._rules)
            except ApiRefused as refused:
                if refused.status != 404:
                    log.warning("%s: GPUs of resource claims are not counted: %s", self._api.name, refused)
                    self._may_read_claims = False
                    break
        return 0


def _requested(spec: Object, annotations: Mapping[str, Any], rules: KubernetesRules) -> int:
    """Return the GPUs of a pod: the sum over containers, or an init container's request if larger.

    All GPU slices together count as one GPU; fractional requests are rounded up.
    """

    def of(container: Object) -> tuple[int, bool]:
        resources = container.get("resources") or {}
        # Extended resources cannot be overcommitted: limits equal requests if both are set.
        requests = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        amounts = {name: parse_quantity(text) or Decimal(0) for name, text in requests.items()}
        gpus = {name: amount for name, amount in amounts.items() if rules.is_gpu(name)}
        sliced = any(amount > 0 and rules.is_slice(name) for name, amount in amounts.items())
        # HAMi requests a number of GPUs plus memory or cores of each: only the number counts.
        return sum(map(math.ceil, gpus.values())), sliced and not any(gpus.values())

    running = [of(container) for container in spec.get("containers") or ()]
    initial = [of(container) for container in spec.get("initContainers") or ()]
    whole = max([sum(count for count, _ in running), *(count for count, _ in initial)])
    shared = any(annotations.get(name) for name in rules.slice_annotations) and not whole
    return min(whole, MAX_GPUS) + (shared or any(sliced for _, sliced in running + initial))


def _claims(spec: Object, status: Object) -> tuple[str, ...]:
    created = {claim["name"]: claim.get("resourceClaimName") for claim in status.get("resourceClaimStatuses") or ()}
    named = [claim.get("resourceClaimName") or created.get(claim["name"]) for claim in spec.get("resourceClaims") or ()]
    # Newer servers create a claim for extended resources; its GPUs are already in the containers' requests.
    return tuple(sorted({required(name) for name in named if name}))


def _job(metadata: Object) -> str:
    """Return ``namespace/name`` of the job that a pod belongs to; if that is its owner, with the owner's UID."""
    namespace = metadata.get("namespace") or "default"
    labels = metadata.get("labels") or {}
    group = next((labels[label] for label in _GROUP_LABELS if labels.get(label)), None)
    owners = metadata.get("ownerReferences") or ()
    owner = next((owner for owner in owners if owner.get("controller")), owners[0] if owners else metadata)
    if group is not None and (owner is metadata or owner["name"] != group):
        return f"{namespace}/{group}"
    return f"{namespace}/{owner['name']}/{owner['uid']}"


def _terminations(status: Object) -> list[Object]:
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    return [state.get("terminated") or {} for state in states]


def _ended_ms(metadata: Object, status: Object) -> int | None:
    """Return when the last container ended or, if the node never reported it, when the failure was recorded."""
    finished = [ms for end in _terminations(status) if (ms := timestamp_ms(end.get("finishedAt")))]
    if finished:
        return max(finished)
    conditions = {
        (condition.get("type"), condition.get("status")): condition for condition in status.get("conditions") or ()
    }
    telling = (("DisruptionTarget", "True"), ("Ready", "False"), ("ContainersReady", "False"))
    stamps = [conditions[key].get("lastTransitionTime") for key in telling if key in conditions]
    return next((ms for ms in map(timestamp_ms, [*stamps, metadata.get("deletionTimestamp")]) if ms), None)


def _failure(status: Object) -> str:
    if status.get("reason"):
        return str(status["reason"])
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return str(condition.get("reason") or "Disrupted")
    reasons = (str(end["reason"]) for end in _terminations(status) if end.get("reason") not in _UNTELLING)
    return next(reasons, "Failed")


def gpus_of(claim: Object, rules: KubernetesRules) -> int:
    """Return the GPUs of a ResourceClaim: allocated devices of GPU drivers, where MIG devices of one GPU count once."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    devices = set()
    for result in (allocation.get("devices") or {}).get("results") or ():
        if result.get("driver") in rules.claim_drivers and not result.get("adminAccess"):
            # NVIDIA's driver names full GPUs gpu-0, and MIG devices gpu-0-mig-1g.5gb-0-1.
            devices.add((result.get("pool"), str(result.get("device")).split("-mig-", 1)[0]))
    return len(devices)
