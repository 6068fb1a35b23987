"""What runs on a node, as any scheduler can say it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from policy.fleet import JobView

CheckpointMeans = Literal["scheduler", "webhook", "command", "exec"]


@dataclass(frozen=True, slots=True)
class CheckpointOffer:
    """How a workload can be asked to write a checkpoint.

    ``means``: ``scheduler``: through the scheduler itself (Kubernetes: an annotation that it watches; Slurm: a signal);
    ``webhook``: a POST; ``command``: the operator's own command; ``exec``: the operator's own command in the workload's
    container.
    ``url``: of the webhook, where the workload names one itself; it is asked only if the settings allow its host. None:
    the operator's.
    ``takes``: how long the workload says it needs; None: not known. The settings bound it.
    """

    means: CheckpointMeans
    url: str | None = None
    takes: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One pod, or one job's part on a node.

    ``name``: for people and as the scheduler's key: ``namespace/pod``; Slurm's job id with array index or component.
    ``uid``: another run has another one: a pod's UID; a Slurm job's id with its restart count or start time, so that a
    requeued job that comes back is another workload.
    ``kind``: ``pod``, ``job``.
    ``owner``: what it belongs to, in words: ``Job team-a/train``, ``user ann``.
    ``job``: as the policy sees it: GPUs of the whole job, when it began, when its time is over, its last checkpoint.
    None: it does no work that could be lost.
    ``stays``: why it neither has to go nor counts for emptiness: a daemon set's pod, a mirror pod, a finished one.
    None: the node is not empty while it is there.
    ``held``: why it may not be moved: an opt-out of its own (``karpenter.sh/do-not-disrupt``), no controller that would
    start it elsewhere, local data, a job that may not be requeued. It is waited for, and never forced. None: it may.
    ``ending``: it is on its way out already, by whatever hand: nothing more is asked of it.
    ``grace``: its own grace time, which an eviction leaves it; None: not known, or none.
    ``checkpoint``: None: it names no way.
    """

    name: str
    uid: str
    kind: Literal["pod", "job"]
    node: str
    owner: str | None = None
    job: JobView | None = None
    stays: str | None = None
    held: str | None = None
    ending: bool = False
    grace: timedelta | None = None
    checkpoint: CheckpointOffer | None = None

    @property
    def ends_at(self) -> datetime | None:
        """When it ends by itself at the latest; None: not known."""
        return None if self.job is None else self.job.ends_at
