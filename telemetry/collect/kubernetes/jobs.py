"""Pods that hold GPUs, as rows of jobs: when each began, how it ended, whose it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from telemetry.collect.kubernetes.api import CLAIM_VERSIONS, Api, Object, Refused, Unreachable, timestamp_ms
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.milliseconds import to_ms

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

_BETTER_FIRST: Final = ("Succeeded", DELETED, UNKNOWN)

_MAX_CLAIMS: Final = 50_000
_CLAIM_RETRY_S: Final = 600.0


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
    node = spec.get("nodeName")
    if not node or started_ms is None:
        return None
    gpus = _requested(spec, rules)
    claims = _claims(spec, status)
    if not gpus and not claims:
        return None
    phase = status.get("phase")
    ended_ms = outcome = None
    if phase in ("Succeeded", "Failed"):
        ended_ms = max(_ended_ms(metadata, status) or started_ms, started_ms)
        outcome = "Succeeded" if phase == "Succeeded" else _failure(status)
    return PodRun(
        uid=metadata["uid"],
        namespace=metadata.get("namespace") or "default",
        job=_job(metadata),
        node=node,
        started_ms=started_ms,
        ended_ms=ended_ms,
        gpus=gpus,
        claims=claims,
        checkpointed_ms=timestamp_ms((metadata.get("annotations") or {}).get(f"{rules.prefix}/{CHECKPOINTED}")),
        outcome=outcome,
    )


class JobTracker:
    """The pods that hold GPUs, and which of their rows are to be landed.

    Pods of one job that began on one node in the same second share a row, for a row is known by job, node and start:
    their GPUs add up, and the row ends with the last of them.

    ``gpus_of_claim``: ``(namespace, claim)`` to the number of GPUs that it holds.
    """

    def __init__(
        self, runs: Iterable[PodRun] = (), *, gpus_of_claim: Callable[[str, str], int] = lambda _namespace, _claim: 0
    ) -> None:
        self._groups: dict[Key, dict[str, PodRun]] = {}
        self._key_of: dict[str, Key] = {}
        self._gone: set[str] = set()
        self._dirty: dict[Key, None] = {}
        self._landed: dict[Key, dict[str, Any]] = {}
        self._gpus_of_claim = gpus_of_claim
        for run in runs:
            self._put(run)
        # What an earlier run knew, it has landed.
        self._landed = {key: _row(group.values()) for key, group in self._groups.items()}
        self._dirty.clear()

    def runs(self) -> list[PodRun]:
        """Return the pods that are known."""
        return [run for group in self._groups.values() for run in group.values()]

    def update(self, run: PodRun) -> None:
        """Take in how a pod is now."""
        known = self._known(run.uid)
        if known is not None:
            # Deleted containers may leave a finished pod without its times: what was reported once stays.
            if known.ended_ms is not None:
                run = replace(run, ended_ms=known.ended_ms, outcome=known.outcome)
            run = replace(run, gpus=max(run.gpus, known.gpus), claims=run.claims if known.claims else ())
        if run.claims:
            held = sum(self._gpus_of_claim(run.namespace, claim) for claim in run.claims)
            if not held and not run.gpus:
                return
            if held:
                run = replace(run, gpus=run.gpus + held, claims=())
        if run != known:
            self._put(run)

    def remove(self, uid: str, at: datetime, outcome: str = DELETED) -> None:
        """Take in that a pod was removed; if it ran until then, that is its end."""
        run = self._known(uid)
        if run is None:
            return
        if run.ended_ms is None:
            self._put(replace(run, ended_ms=max(to_ms(at), run.started_ms), outcome=outcome))
        self._gone.add(uid)
        self._dirty[run.key] = None

    def keep_only(self, uids: Iterable[str], at: datetime) -> None:
        """Apply a listing: a pod that is not in it vanished since the last one."""
        there = set(uids)
        for uid in [uid for uid in self._key_of if uid not in there and uid not in self._gone]:
            self.remove(uid, at, UNKNOWN)

    def changed_rows(self, wanted: Callable[[str], bool] = lambda _namespace: True) -> list[dict[str, Any]]:
        """Return the rows that changed since they were last returned, and forget pods that are gone.

        Returns: in the layout of :data:`telemetry.dataset.schema.JOBS`, instants in milliseconds.
        """
        rows = []
        for key in list(self._dirty):
            group = self._groups[key]
            if wanted(next(iter(group.values())).namespace):
                row = _row(group.values())
                if self._landed.get(key) != row:
                    rows.append(row)
                    self._landed[key] = row
                del self._dirty[key]
            if group.keys() <= self._gone:
                for uid in group:
                    del self._key_of[uid]
                    self._gone.discard(uid)
                del self._groups[key]
                self._landed.pop(key, None)
                self._dirty.pop(key, None)
        return rows

    def _known(self, uid: str) -> PodRun | None:
        key = self._key_of.get(uid)
        return None if key is None else self._groups[key][uid]

    def _put(self, run: PodRun) -> None:
        key = self._key_of.setdefault(run.uid, run.key)
        if key != run.key:  # its start was corrected: it stays where it was reported first
            run = replace(run, job=key[0], node=key[1], started_ms=key[2])
        self._groups.setdefault(key, {})[run.uid] = run
        self._dirty[key] = None


def _row(runs: Iterable[PodRun]) -> dict[str, Any]:
    members = list(runs)
    first = members[0]
    ends = [run.ended_ms for run in members]
    over = None if None in ends else max(end for end in ends if end is not None)
    saved = [run.checkpointed_ms for run in members if run.checkpointed_ms is not None]
    outcome = None
    if over is not None:
        rank = {name: place for place, name in enumerate(_BETTER_FIRST)}
        outcome = max((run.outcome or UNKNOWN for run in members), key=lambda name: rank.get(name, len(rank)))
    return {
        "job": first.job,
        "node": first.node,
        "gpu": None,
        "started_at": first.started_ms,
        "ended_at": over,
        "gpus": sum(run.gpus for run in members),
        "checkpointed_at": max(saved) if saved else None,
        "outcome": outcome,
    }


def _requested(spec: Object, rules: KubernetesRules) -> int:
    """Return the GPUs of a pod: its containers' together, or an init container's if that asks for more."""

    def of(container: Object) -> tuple[int, bool]:
        resources = container.get("resources") or {}
        # Extended resources are never overcommitted: limits equal requests wherever both are given.
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        whole = sum(int(text) for name, text in asked.items() if rules.is_gpu(name) and str(text).isdigit())
        return whole, any(rules.is_slice(name) and str(text) != "0" for name, text in asked.items())

    running = [of(container) for container in spec.get("containers") or ()]
    before = [of(container) for container in spec.get("initContainers") or ()]
    whole = max([sum(count for count, _ in running), *(count for count, _ in before)])
    return whole + any(sliced for _, sliced in running + before)


def _claims(spec: Object, status: Object) -> tuple[str, ...]:
    made = {each["name"]: each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or ()}
    named = [each.get("resourceClaimName") or made.get(each["name"]) for each in spec.get("resourceClaims") or ()]
    # Newer servers make a claim of their own for extended resources; its GPUs are in the containers' requests already.
    return tuple(sorted({name for name in named if name}))


def _job(metadata: Object) -> str:
    """Return ``namespace/name`` of the whole that the pod is part of, with the uid of its owner where that is it."""
    namespace = metadata.get("namespace") or "default"
    labels = metadata.get("labels") or {}
    whole = next((labels[label] for label in _GROUP_LABELS if labels.get(label)), None)
    owners = metadata.get("ownerReferences") or ()
    owner = next((each for each in owners if each.get("controller")), owners[0] if owners else None)
    if whole is not None and (owner is None or owner["name"] != whole):
        return f"{namespace}/{whole}"
    if owner is not None:
        return f"{namespace}/{owner['name']}/{owner['uid']}"
    return f"{namespace}/{metadata['name']}/{metadata['uid']}"


def _ended_ms(metadata: Object, status: Object) -> int | None:
    """When the last container ended, or, of a pod whose node never reported, when its failure was noted."""
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    finished = [ms for each in states if (ms := timestamp_ms((each.get("terminated") or {}).get("finishedAt")))]
    if finished:
        return max(finished)
    conditions = status.get("conditions") or ()
    for kind in ("DisruptionTarget", "Ready", "ContainersReady"):
        for condition in conditions:
            good = "True" if kind == "DisruptionTarget" else "False"
            if condition.get("type") == kind and condition.get("status") == good:
                ms = timestamp_ms(condition.get("lastTransitionTime"))
                if ms is not None:
                    return ms
    return timestamp_ms(metadata.get("deletionTimestamp"))


def _failure(status: Object) -> str:
    """Return why a pod failed, in the words of the server."""
    if status.get("reason"):
        return str(status["reason"])
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return str(condition.get("reason") or "Disrupted")
    ends = [(each.get("state") or {}).get("terminated") or {} for each in status.get("containerStatuses") or ()]
    reasons = [str(end["reason"]) for end in ends if end.get("reason") and end["reason"] not in ("Completed", "Error")]
    return reasons[0] if reasons else "Failed"


log = logging.getLogger(__name__)


def gpus_of(claim: Object, rules: KubernetesRules) -> int:
    """Return how many GPUs a ResourceClaim holds: its allocated devices of GPU drivers, parts of one GPU once."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    devices = set()
    for result in (allocation.get("devices") or {}).get("results") or ():
        if result.get("driver") in (rules.claim_drivers or ()) and not result.get("adminAccess"):
            # NVIDIA's driver calls whole GPUs gpu-0 and parts of one gpu-0-mig-1g.5gb-0-1.
            devices.add((result.get("pool"), str(result.get("device")).split("-mig-", 1)[0]))
    return len(devices)


class ClaimLookup:
    """Looks claims up when a pod names one; without the permission, or on a server without claims, each holds none.

    ``monotonic_s``: seconds of a clock that never jumps.
    """

    def __init__(self, api: Api, rules: KubernetesRules, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._rules = rules
        self._monotonic_s = monotonic_s
        self._known: dict[tuple[str, str], int] = {}
        self._version: str | None = None
        self._closed_until_s = float("-inf")

    def gpus(self, namespace: str, name: str) -> int:
        """Return how many GPUs a claim holds; 0 where that is unknown now."""
        key = (namespace, name)
        if key in self._known:
            return self._known[key]
        claim = self._read(namespace, name)
        if claim is None:
            return 0
        count = gpus_of(claim, self._rules)
        if count:
            if len(self._known) >= _MAX_CLAIMS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = count
        return count

    def _read(self, namespace: str, name: str) -> Object | None:
        if self._monotonic_s() < self._closed_until_s:
            return None
        for version in CLAIM_VERSIONS if self._version is None else (self._version,):
            path = f"/apis/resource.k8s.io/{version}/namespaces/{namespace}/resourceclaims/{name}"
            try:
                claim = self._api.get(path)
            except Refused as refused:
                if refused.status == 404:
                    continue
                self._close(refused)
                return None
            except Unreachable as error:
                self._close(error)
                return None
            self._version = version
            return claim
        return None

    def _close(self, error: Exception) -> None:
        log.warning("%s: GPUs of resource claims are not counted: %s", self._api.name, error)
        self._closed_until_s = self._monotonic_s() + _CLAIM_RETRY_S
