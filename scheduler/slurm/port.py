"""What the adapter needs of Slurm, whichever way it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from scheduler.slurm.job import CheckpointSignal, SlurmJob
from scheduler.slurm.node import NodeChange, SlurmNode

SlurmAnswerKind = Literal["done", "already", "gone", "refused", "timeout"]


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """What Slurm said to a write.

    ``kind``: ``timeout``: nobody knows whether it had an effect.
    """

    kind: SlurmAnswerKind
    words: str = ""


class SlurmPort(Protocol):
    """Slurm. Reads raise SchedulerError; what is not listed wholly is not listed at all."""

    def nodes(self) -> tuple[SlurmNode, ...]:
        """List the nodes."""
        ...

    def node(self, name: str) -> SlurmNode | None:
        """Read one node; None: there is no such node."""
        ...

    def jobs(self, node: str | None = None) -> tuple[SlurmJob, ...]:
        """List the jobs that hold nodes: one node's, or all."""
        ...

    def read_only(self) -> str | None:
        """Say why nothing may be written, by what was read so far; None: it may."""
        ...

    def update(self, node: str, change: NodeChange) -> SlurmAnswer:
        """Write to a node, all of the change in one request."""
        ...

    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> SlurmAnswer:
        """Send a job a signal; at least once."""
        ...

    def requeue(self, job: SlurmJob) -> SlurmAnswer:
        """Requeue a batch job; it goes with Slurm's own KillWait between SIGTERM and SIGKILL."""
        ...
