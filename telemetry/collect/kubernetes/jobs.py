"""Pods that hold GPUs, as rows of jobs: when each began, how it ended, whose it was."""

import logging
import math
from collections.abc import Callable, Mapping
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
"""Annotation under the prefix with the time of a job's last checkpoint (ISO 8601)."""

DELETED: Final = "Deleted"
"""Outcome of a pod that was deleted while it ran."""

UNKNOWN: Final = "Unknown"
"""Outcome of a pod that vanished between two listings; its end is when that was noticed."""

_GROUP_LABELS: Final = (
    "jobset.sigs.k8s.io/jobset-name",
    "leaderworkerset.sigs.k8s.io/name",
    "training.kubeflow.org/job-name",
    "ray.io/cluster",
    "volcano.sh/job-name",
)
# Whole jobs of several pods whose direct owner is only a part of them, outermost first.

MAX_GPUS: Final = 4096
"""More GPUs than any pod can hold: a larger number is damaged."""

_UNTELLING: Final = (None, "", "Completed", "Error")

log = logging.getLogger(__name__)

Key = tuple[str, str, int]
"""job, node, start: what a row of jobs is known by."""


@dataclass(frozen=True, slots=True)
class PodRun:
    """One pod on its node. Instants are milliseconds since 1970 UTC.

    ``started_ms``: when the node took the pod in: from then on its GPUs are held.
    ``claims``: names of resource claims whose GPUs are not in ``gpus`` yet.
    ``outcome``: ``Succeeded``, or why it failed (``Failed``, ``Evicted``, ``OOMKilled``, …); None while it runs.
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
        """What identifies its row."""
        return (self.job, self.node, self.started_ms)


def pod_run(pod: Object, rules: KubernetesRules) -> PodRun | None:
    """Return what matters of a pod, or None where it is on no node yet or asks for no GPU.

    The start is ``status.startTime``, which stays when containers restart. A container that ended does not end the pod
    while the pod's phase says that it runs.
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
    """The pods that hold GPUs, and which of their rows are to be written.

    A row is known by job, node and start. Of pods of one job that began on one node in the same second, each further
    one begins a millisecond later.
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

    def update(self, view: PodRun, at: datetime) -> list[Event]:
        """Apply how a pod is now."""
        run, known = view, self.known.get(view.uid)
        if known is not None:
            # Deleted containers may leave a finished pod without its times: what was reported once stays.
            if known.ended_ms is not None:
                run = replace(run, ended_ms=known.ended_ms, outcome=known.outcome)
            claims = run.claims if known.claims else ()
            run = replace(run, gpus=max(run.gpus, known.gpus), claims=claims)
            # A start that was corrected: it stays where it was reported first.
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

    def remove(self, key: str, at: datetime, *, watched: bool = True) -> list[Event]:
        """Remove a pod; if it ran until then, that is its end."""
        run = self.known.pop(key, None)
        if run is not None:
            self._keys.discard(run.key)
            if run.ended_ms is None:
                outcome = DELETED if watched else UNKNOWN
                self._unwritten[key] = replace(run, ended_ms=max(to_ms(at), run.started_ms), outcome=outcome)
        return []

    def changed_rows(self, wanted: Callable[[str], bool] = lambda _namespace: True) -> list[dict[str, Any]]:
        """Return the rows that changed since they were last returned; those of unwanted namespaces wait.

        Returns: columns of :data:`telemetry.dataset.schema.JOBS`, instants in milliseconds.
        """
        changed = self._unwritten.values()
        rows = [_row(run) for run in changed if wanted(run.namespace)]
        self._unwritten = {run.uid: run for run in changed if not wanted(run.namespace) and run.uid in self.known}
        return rows

    def _claimed_gpus(self, namespace: str, claim: str) -> int:
        """Return how many GPUs a resource claim holds; 0 without the right to read it, or where there is none."""
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


def _row(run: PodRun) -> dict[str, Any]:
    return {
        "job": run.job,
        "node": run.node,
        "started_at": run.started_ms,
        "ended_at": run.ended_ms,
        "gpus": run.gpus,
        "checkpointed_at": run.checkpointed_ms,
        "outcome": run.outcome,
    }


def _requested(spec: Object, annotations: Mapping[str, Any], rules: KubernetesRules) -> int:
    """Return the GPUs of a pod: its containers' together, or an init container's if that asks for more.

    Parts of GPUs count as one together, and so does a fraction of a whole one.
    """

    def of(container: Object) -> tuple[int, bool]:
        resources = container.get("resources") or {}
        # Extended resources are never overcommitted: limits equal requests wherever both are given.
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        amounts = {name: parse_quantity(text) or Decimal(0) for name, text in asked.items()}
        whole = {name: amount for name, amount in amounts.items() if rules.is_gpu(name)}
        sliced = any(amount > 0 and rules.is_slice(name) for name, amount in amounts.items())
        # HAMi asks for GPUs by number and, next to it, for the memory or cores of each: the number counts.
        return sum(map(math.ceil, whole.values())), sliced and not any(whole.values())

    running = [of(container) for container in spec.get("containers") or ()]
    before = [of(container) for container in spec.get("initContainers") or ()]
    whole = max([sum(count for count, _ in running), *(count for count, _ in before)])
    shared = any(annotations.get(name) for name in rules.slice_annotations) and not whole
    return min(whole, MAX_GPUS) + (shared or any(sliced for _, sliced in running + before))


def _claims(spec: Object, status: Object) -> tuple[str, ...]:
    made = {claim["name"]: claim.get("resourceClaimName") for claim in status.get("resourceClaimStatuses") or ()}
    named = [claim.get("resourceClaimName") or made.get(claim["name"]) for claim in spec.get("resourceClaims") or ()]
    # Newer servers make a claim of their own for extended resources; its GPUs are in the containers' requests already.
    return tuple(sorted({required(name) for name in named if name}))


def _job(metadata: Object) -> str:
    """Return ``namespace/name`` of the whole that the pod is part of, with the uid of its owner where that is it."""
    namespace = metadata.get("namespace") or "default"
    labels = metadata.get("labels") or {}
    whole = next((labels[label] for label in _GROUP_LABELS if labels.get(label)), None)
    owners = metadata.get("ownerReferences") or ()
    owner = next((owner for owner in owners if owner.get("controller")), owners[0] if owners else metadata)
    if whole is not None and (owner is metadata or owner["name"] != whole):
        return f"{namespace}/{whole}"
    return f"{namespace}/{owner['name']}/{owner['uid']}"


def _terminations(status: Object) -> list[Object]:
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    return [state.get("terminated") or {} for state in states]


def _ended_ms(metadata: Object, status: Object) -> int | None:
    """When the last container ended, or, of a pod whose node never reported, when its failure was noted."""
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
    """Return why a pod failed, as the server reports it."""
    if status.get("reason"):
        return str(status["reason"])
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return str(condition.get("reason") or "Disrupted")
    reasons = (str(end["reason"]) for end in _terminations(status) if end.get("reason") not in _UNTELLING)
    return next(reasons, "Failed")


def gpus_of(claim: Object, rules: KubernetesRules) -> int:
    """Return how many GPUs a ResourceClaim holds: its allocated devices of GPU drivers, parts of one GPU once."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    devices = set()
    for result in (allocation.get("devices") or {}).get("results") or ():
        if result.get("driver") in rules.claim_drivers and not result.get("adminAccess"):
            # NVIDIA's driver calls whole GPUs gpu-0 and parts of one gpu-0-mig-1g.5gb-0-1.
            devices.add((result.get("pool"), str(result.get("device")).split("-mig-", 1)[0]))
    return len(devices)
