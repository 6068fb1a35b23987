"""Pods as jobs: what runs on a node, and how large the whole is that each pod belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from policy.fleet import JobView
from scheduler.kubernetes.api import ApiServer
from scheduler.ports.codec import instant
from scheduler.ports.errors import SchedulerError
from telemetry.collect.kubernetes.api import CLAIM_VERSIONS, Object
from telemetry.collect.kubernetes.jobs import gpus_of, pod_run
from telemetry.collect.kubernetes.rules import KubernetesRules

LIVING: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that hold anything."""

_DURATION: Final = re.compile(r"(\d{1,6})(s|m|h|)")
_SECONDS: Final = {"s": 1, "": 1, "m": 60, "h": 3600}

_GROUP: Final = "/apis/resource.k8s.io"
_PAGE: Final = 250

Claim = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class PodPart:
    """A pod's part of a job.

    ``gpus``: of this pod, without those of its claims.
    ``claims``: names of the resource claims by which it holds more.
    """

    node: str
    job: str
    gpus: int
    started_at: datetime | None
    checkpointed_at: datetime | None
    ends_at: datetime | None
    can_checkpoint: bool
    namespace: str = ""
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodKeys:
    """Annotations of pods under the prefix, by which a job states what may be done with it.

    ``namespace``: Ours, where diagnostics run.
    """

    prefix: str
    namespace: str

    def is_diagnostic(self, pod: Object) -> bool:
        """Whether a pod is a predrain diagnostic.

        It is no job, and nothing that has to go. In our own namespace only: elsewhere anybody could hide a job by a
        label.
        """
        metadata = pod["metadata"]
        return metadata.get("namespace") == self.namespace and self.diagnostic in (metadata.get("labels") or {})

    @property
    def checkpoint(self) -> str:
        """How it is asked for a checkpoint: ``annotation``, ``webhook`` or ``command``."""
        return f"{self.prefix}/checkpoint"

    @property
    def checkpoint_url(self) -> str:
        """Of its webhook."""
        return f"{self.prefix}/checkpoint-url"

    @property
    def checkpoint_takes(self) -> str:
        """How long it needs for one: ``90s``, ``5m``."""
        return f"{self.prefix}/checkpoint-takes"

    @property
    def requested(self) -> str:
        """Written by us: a checkpoint is asked for."""
        return f"{self.prefix}/checkpoint-requested"

    @property
    def acknowledged(self) -> str:
        """Written by the job: the checkpoint with this key is written, or cannot be."""
        return f"{self.prefix}/checkpoint-acknowledged"

    @property
    def ends_at(self) -> str:
        """When the job expects to end (ISO 8601 with a zone)."""
        return f"{self.prefix}/ends-at"

    @property
    def evict(self) -> str:
        """``true``: it may be evicted although no controller restarts it, or its local data is lost."""
        return f"{self.prefix}/evict"

    @property
    def diagnostic(self) -> str:
        """Label of our own diagnostics."""
        return f"{self.prefix}/diagnostic"

    @property
    def managed(self) -> str:
        """``false``: keep off."""
        return f"{self.prefix}/managed"


def pod_part(pod: Object, rules: KubernetesRules, keys: PodKeys) -> PodPart | None:
    """Read a pod's part of a job; None: it is on no node yet, asks for no GPU, has ended, or is ours."""
    try:
        if keys.is_diagnostic(pod):
            return None
        run = pod_run(pod, rules)
    except (KeyError, TypeError, AttributeError, ValueError):
        return _unreadable(pod)
    if run is None or run.outcome is not None:
        return None
    annotations = annotations_of(pod)
    return PodPart(
        run.node,
        run.job,
        run.gpus,
        _instant(run.started_ms),
        None if run.checkpointed_ms is None else _instant(run.checkpointed_ms),
        ends_at(pod, keys),
        keys.checkpoint in annotations,
        run.namespace,
        run.claims,
    )


def jobs_of(parts: Iterable[PodPart]) -> dict[str, dict[str, JobView]]:
    """Return the jobs of each node, each with the GPUs of the whole job on all nodes among ``parts``."""
    wholes: dict[str, JobView] = {}
    gpus: dict[str, int] = {}
    of_node: dict[str, set[str]] = {}
    for part in parts:
        gpus[part.job] = gpus.get(part.job, 0) + part.gpus  # 0: its claims were counted with another pod
        of_node.setdefault(part.node, set()).add(part.job)
        whole = wholes.get(part.job)
        mine = JobView(part.job, 1, part.started_at, part.checkpointed_at, part.ends_at, part.can_checkpoint)
        wholes[part.job] = mine if whole is None else _joined(whole, mine)
    wholes = {name: replace(job, gpus=max(1, gpus[name])) for name, job in wholes.items()}
    return {node: {name: wholes[name] for name in sorted(names)} for node, names in of_node.items()}


def annotations_of(thing: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    metadata = thing.get("metadata") or {}
    found = metadata.get("annotations") or {}
    return found if isinstance(found, dict) else {}


def ends_at(pod: Object, keys: PodKeys) -> datetime | None:
    """Return when a pod ends by itself at the latest: by its annotation, or its ``activeDeadlineSeconds``."""
    stated = instant(annotations_of(pod).get(keys.ends_at))
    if stated is not None:
        return stated
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    started, lasts = instant(status.get("startTime")), spec.get("activeDeadlineSeconds")
    if started is None or not isinstance(lasts, int):
        return None
    try:
        return started + timedelta(seconds=lasts)
    except OverflowError:
        return None


def version_of(thing: Object) -> int:
    """Return the resourceVersion of an object as a number, to compare versions of one kind; 0: none."""
    metadata = thing.get("metadata")
    text = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else 0


def duration(text: str | None) -> timedelta | None:
    """Read a duration such as ``90s``, ``5m`` or ``1h``; None: it is none."""
    found = _DURATION.fullmatch((text or "").strip())
    return None if found is None else timedelta(seconds=int(found[1]) * _SECONDS[found[2]])


def _joined(one: JobView, other: JobView) -> JobView:
    """Join two parts of one job, but for its GPUs.

    It ends with its first part; any part may be the one that notes its checkpoints.
    """

    def first(a: datetime | None, b: datetime | None) -> datetime | None:
        return min(a, b) if a is not None and b is not None else a or b

    saved = (
        max(one.checkpointed_at, other.checkpointed_at)
        if one.checkpointed_at is not None and other.checkpointed_at is not None
        else one.checkpointed_at or other.checkpointed_at
    )
    return JobView(
        one.name,
        1,
        first(one.started_at, other.started_at),
        saved,
        first(one.ends_at, other.ends_at),
        one.can_checkpoint or other.can_checkpoint,
    )


def _unreadable(pod: Object) -> PodPart | None:
    """Return a job of its own for a pod that cannot be parsed: it occupies its node nevertheless."""
    metadata = pod.get("metadata") if isinstance(pod.get("metadata"), dict) else {}
    spec = pod.get("spec") if isinstance(pod.get("spec"), dict) else {}
    node = spec.get("nodeName") if spec else None
    if not isinstance(node, str) or not node:
        return None
    name = f"{(metadata or {}).get('namespace')}/{(metadata or {}).get('name')}"
    return PodPart(node, name, 1, None, None, None, can_checkpoint=False)


def _instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class ClaimCounts:
    """The GPUs of claims, as of the last listing; a claim that is not known counts as one GPU."""

    def __init__(self, api: ApiServer, rules: KubernetesRules) -> None:
        self._api = api
        self._rules = rules
        self._version: str | None = None
        self._held: Mapping[Claim, int] = {}

    def refresh(self, parts: Iterable[PodPart]) -> None:
        """List the claims again, where any pod has one; a failed listing keeps the last one."""
        if not any(part.claims for part in parts):
            return
        try:
            if self._version is None:
                self._version = self._offered()
            if self._version is None:
                return
            path = f"{_GROUP}/{self._version}/resourceclaims"
            self._held = dict(self._api.listing(path, {}, _PAGE, self._view))
        except SchedulerError:
            self._version = None  # without the right to, or on another server by now

    def counted(self, parts: Iterable[PodPart]) -> Iterator[PodPart]:
        """Yield the parts of jobs with the GPUs that they hold by claims.

        Pods may share a claim, and its GPUs with it: within one job it counts once, with the first pod that has it.
        """
        seen: set[tuple[str, str, str]] = set()
        for part in parts:
            held = 0
            for claim in part.claims:
                if (part.job, part.namespace, claim) not in seen:
                    seen.add((part.job, part.namespace, claim))
                    held += self._held.get((part.namespace, claim), 1)
            yield replace(part, gpus=part.gpus + held) if part.claims else part

    def _view(self, raw: Object) -> tuple[Claim, int] | None:
        try:
            metadata = raw["metadata"]
            return (metadata["namespace"], metadata["name"]), gpus_of(raw, self._rules)
        except (KeyError, TypeError, AttributeError):
            return None

    def _offered(self) -> str | None:
        group = self._api.read(_GROUP) or {}
        named = {str(each.get("version")) for each in group.get("versions") or () if isinstance(each, dict)}
        return next((version for version in CLAIM_VERSIONS if version in named), None)
