"""A Slurm in memory behind the adapter's port: what slurmctld does to nodes and jobs, and failures on demand."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from scheduler.ports.clock import ManualClock
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import WriteResult
from scheduler.slurm.job import CheckpointSignal, SlurmJob
from scheduler.slurm.node import NodeChange, SlurmNode


class MemorySlurm:
    """Its nodes and jobs may be changed by hand, as people do."""

    def __init__(self, clock: ManualClock, nodes: int = 8) -> None:
        self.clock = clock
        self.all = {f"n{i}": self._new(f"n{i}", i) for i in range(nodes)}
        self.configured = {name: item.weight for name, item in self.all.items()}
        self.running: dict[int, SlurmJob] = {}
        self.writes: list[tuple[str, NodeChange]] = []
        self.sent: list[tuple[int, str]] = []
        self.reservations: dict[str, frozenset[str]] = {}
        self.partition_states = {"g": {"State": "UP"}, "small": {"State": "UP"}, "closed": {"State": "DOWN"}}
        self.requeued: list[str] = []
        self.version_problem: str | None = None
        self.unreadable = False
        self.meanwhile: list[Callable[[], None]] = []  # what others do right after our next write
        self.failing: list[str] = []  # of the next writes: refused, timeout_before, timeout_after, timeout_late
        self.late: list[Callable[[], object]] = []  # what was not answered, and comes through when it is called

    def _new(self, name: str, i: int) -> SlurmNode:
        extra = ("", '{"rack": "r1", "n": [1, 2]}', "free text", '{"a": {}}')[i % 4]
        return SlurmNode(
            name, frozenset({"IDLE"}), booted_at=self.clock.now(), extra=extra, weight=1 + i % 3, gpus=8,
            features=(f"rack_{i // 3}", "h100"), partitions=("g",),
        )  # fmt: skip

    def nodes(self) -> tuple[SlurmNode, ...]:
        self._answers()
        return tuple(self.all.values())

    def node(self, name: str) -> SlurmNode | None:
        self._answers()
        return self.all.get(name)

    def jobs(self, node: str | None = None) -> tuple[SlurmJob, ...]:
        self._answers()
        return tuple(job for job in self.running.values() if node is None or node in job.nodes)

    def reserved_nodes(self, reservation: str) -> frozenset[str]:
        if reservation not in self.reservations:
            raise SchedulerError(f"the nodes of reservation {reservation} cannot be read")
        return self.reservations[reservation]

    def partitions(self) -> dict[str, dict[str, str]]:
        self._answers()
        return self.partition_states

    cannot_requeue: str | None = None

    def server_time(self) -> datetime:
        return self.clock.now()

    def read_only(self) -> str | None:
        return self.version_problem

    def update(self, node: str, change: NodeChange) -> WriteResult:
        fault = self.failing.pop(0) if self.failing else None
        if fault == "refused":
            return WriteResult("refused", "Access/permission denied")
        if fault == "timeout_before":
            return WriteResult("timeout", "no answer")
        if fault == "timeout_late":
            self.late.append(lambda: self.update(node, change))
            return WriteResult("timeout", "no answer")
        self.writes.append((node, change))
        self.person(node, change.state, change.reason, user="slurm")
        current = self.all[node]
        self.all[node] = replace(
            current,
            extra=current.extra if change.extra is None else change.extra,
            weight=current.weight if change.weight is None else change.weight,
        )
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return WriteResult("timeout", "no answer") if fault == "timeout_after" else WriteResult("done")

    def person(self, node: str, state: str | None, reason: str | None = None, user: str = "ann") -> None:
        """What `scontrol update State= Reason=` does to a node, by whomever."""
        current = self.all[node]
        states = current.states
        if state in ("DRAIN", "FAIL"):
            states = (states - {"DRAIN", "FAIL"}) | {state}
        elif state == "DOWN":
            states = (states - {"IDLE"}) | {"DOWN"}
        elif state == "UNDRAIN":
            states = states - {"DRAIN"} if "FAIL" in states else states - {"DRAIN", "FAIL"}
        elif state == "RESUME":
            states = frozenset({"IDLE"})
        current = replace(current, states=states)
        if reason is not None:
            current = replace(current, reason=reason, user=user, reason_at=self.now())
        elif not current.out and not current.down:
            current = replace(current, reason=None, user=None, reason_at=None)
        self.all[node] = current

    def reconfigure(self) -> None:
        """What `scontrol reconfigure` does: the weights are those of the configuration again."""
        self.all = {name: replace(item, weight=self.configured[name]) for name, item in self.all.items()}

    def now(self) -> datetime:
        return self.clock.now().replace(microsecond=0)

    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> WriteResult:
        if job.number not in self.running:
            return WriteResult("gone", "Invalid job id specified")
        fault = self.failing.pop(0) if self.failing else None
        if fault == "timeout_before":
            return WriteResult("timeout", "no answer")
        self.sent += [(other.number, signal.name) for other in self.reached(job.name)]
        return WriteResult("timeout", "no answer") if fault == "timeout_after" else WriteResult("done")

    def requeue(self, job: SlurmJob) -> WriteResult:
        if job.number not in self.running:
            return WriteResult("gone", "Invalid job id specified")
        self.requeued.append(job.requeue_name)
        reached = self.reached(job.requeue_name)
        self.running = {n: other for n, other in self.running.items() if other not in reached}
        return WriteResult("done")

    def reached(self, name: str) -> list[SlurmJob]:
        """The jobs that a request with this name reaches: that of an array or a heterogeneous job reaches all of it."""
        of = {job: {job.name, str(job.number), *re.split("[_+]", job.name)[:1]} for job in self.running.values()}
        return [job for job, names in of.items() if name in names]

    def _answers(self) -> None:
        if self.unreadable:
            raise SchedulerError("Unable to contact slurm controller")
