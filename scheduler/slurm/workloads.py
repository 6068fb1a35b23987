"""Jobs as workloads of an evacuation: checkpoint requests by signal, evictions by requeue."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Write, WriteResult
from scheduler.ports.workloads import (
    UNRESTRICTED,
    CheckpointAsk,
    CheckpointOffer,
    CheckpointState,
    Fence,
    Placement,
    Workload,
)
from scheduler.slurm.folder import SharedFolder
from scheduler.slurm.job import CHECKPOINT_FAILED, CHECKPOINTED, Requirements, SlurmJob, views_by_node
from scheduler.slurm.node import SlurmNode
from scheduler.slurm.port import Partition, SlurmPort

PROGRESS: Final = "progress"
ASKED: Final = "asked"
_REMEMBERED: Final = timedelta(days=7)

_LOOKS: Final = 3
# Attempts to read a node in use without a listed job: one may start after, or end before, the jobs are read.

_PLACES_FOR: Final = timedelta(seconds=20)
# Cache of nodes and partitions for the jobs of one round.


class SlurmWorkloads:
    """The jobs of a Slurm cluster.

    A signal cannot be revoked, and its delivery cannot be observed, so it is sent at least once. The checkpoint values
    in the job's comment are stored in the shared folder before the request; a change of them is the acknowledgement.
    Times are not compared, because the job's node has another clock.
    """

    def __init__(self, port: SlurmPort, folder: SharedFolder, clock: Clock) -> None:
        self._port, self._folder, self._clock = port, folder, clock
        self.load_progress, self.save_progress = partial(folder.load, PROGRESS), partial(folder.save, PROGRESS)
        self._places: tuple[datetime, tuple[SlurmNode, ...], Mapping[str, Partition]] | None = None

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List the jobs that hold a node.

        A node in COMPLETING is not empty, even if its job is no longer listed. An allocated node without a listed job
        raises ``SchedulerError``: this user may not see all jobs.
        """
        for _ in range(_LOOKS):
            jobs = self._port.jobs(node)
            if jobs:
                return self._listed(node, jobs)
            current = self._port.node(node)
            states = frozenset() if current is None else current.states
            if "COMPLETING" in states:
                return (Workload("a job that Slurm is ending", f"{node} completing", "job", node, state="ending"),)
            if not states & {"ALLOCATED", "MIXED"}:
                return ()
        raise SchedulerError(
            f"Slurm reports {node} as in use but lists no job: check whether this user can see all jobs (PrivateData)"
        )

    def _listed(self, node: str, jobs: tuple[SlurmJob, ...]) -> tuple[Workload, ...]:
        all_jobs = (
            self._port.jobs() if any("+" in job.name for job in jobs) else jobs
        )  # components may run on other nodes
        views = {view.name: view for view in views_by_node(all_jobs).get(node, ())}
        return tuple(
            replace(self._workload(job, node, all_jobs), job=views.get(job.requeue_name, job.view()), gang=_gang(job))
            for job in jobs
        )

    def _workload(self, job: SlurmJob, node: str, known: tuple[SlurmJob, ...] | None = None) -> Workload:
        """Return a job as a workload, both for lists and right before a requeue.

        A requeue includes all components of a heterogeneous job, so one immovable component makes it immovable.
        """
        parts = self._components(job, known)
        workload = self._component(job, node)
        if workload.immovable is None:
            others = (self._component(part, node) for part in parts if part.uid != job.uid)
            loss = next((f"component {part.name}: {part.immovable}" for part in others if part.immovable), None)
            workload = replace(workload, loss=loss)
        return replace(workload, checkpoint=_offer(_component_to_signal(job, parts)))

    def _component(self, job: SlurmJob, node: str) -> Workload:
        return Workload(
            job.name, job.uid, "job", node, f"user {job.user}", state=job.state, placement=self._placement(job, node),
            opt_out=job.opt_out, loss=self._port.cannot_requeue or _loss(job, self._clock.now()),
        )  # fmt: skip

    def _components(self, job: SlurmJob, known: tuple[SlurmJob, ...] | None = None) -> tuple[SlurmJob, ...]:
        if "+" not in job.name:
            return (job,)
        jobs = self._port.jobs() if known is None else known
        return tuple(other for other in jobs if other.requeue_name == job.requeue_name)

    def _placement(self, job: SlurmJob, node: str) -> Placement:
        if self._port.cannot_requeue is not None:
            return UNRESTRICTED
        now, reservation = self._clock.now(), job.needs.reservation
        try:
            if self._places is None or abs(now - self._places[0]) > _PLACES_FOR:
                self._places = now, self._port.nodes(), self._port.partitions()
            reserved = frozenset[str]().union(*map(self._port.reserved_nodes, filter(None, reservation.split(","))))
            return placement_of(job, node, *self._places[1:], reserved)
        except (SchedulerError, ValueError) as error:
            return Placement(None, str(error))

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> WriteResult:
        """Send the signal named in the job's comment, once per run even if several drains request it."""
        return self._fenced(workload, fence, lambda job: self._ask(job, ask))

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Return the state of a request, from the job's comment."""
        job = self._find(workload)
        if isinstance(job, WriteResult):
            return CheckpointState("gone", job.message)
        job = _component_to_signal(job, self._components(job))
        entry = self._folder.notes(ASKED).get(job.uid)
        if entry is None or key not in _keys(entry):
            return CheckpointState("waiting", "it has no request with this key")
        recorded = entry.get("answers")
        changed = {
            name for name, value in job.answers.items() if not isinstance(recorded, dict) or recorded.get(name) != value
        }
        if CHECKPOINTED in changed:
            return CheckpointState("acknowledged", "reported in its comment")
        if CHECKPOINT_FAILED in changed:
            return CheckpointState("failed", "failure reported in its comment")
        return CheckpointState("waiting")

    def evict(self, workload: Workload, fence: Fence) -> WriteResult:
        """Requeue the job or task; a heterogeneous job is requeued as a whole."""
        return self._fenced(workload, fence, lambda job: self._requeue(job, workload.node))

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Return the writes of an eviction."""
        if workload.immovable is not None or workload.ending:
            return ()
        return (Write(f"job {workload.name}", "JobState", "RUNNING", "REQUEUE"),)

    def _fenced(self, workload: Workload, fence: Fence, call: Callable[[SlurmJob], WriteResult]) -> WriteResult:
        """Make a call for exactly this run of a job, under the lease."""

        def call_current() -> WriteResult:
            job = self._find(workload)
            return job if isinstance(job, WriteResult) else call(job)

        return self._folder.guarded(fence.holder, fence.until, call_current)

    def _requeue(self, job: SlurmJob, node: str) -> WriteResult:
        workload = self._workload(job, node)
        if workload.ending:
            return WriteResult("already", "it is completing")
        if workload.immovable is not None:
            return WriteResult("refused", workload.immovable)
        states = "+".join(sorted(job.states))
        return _answer(self._port.requeue(job), Write(f"job {job.requeue_name}", "JobState", states, "REQUEUE"))

    def _find(self, workload: Workload) -> SlurmJob | WriteResult:
        jobs = self._port.jobs(workload.node)
        for job in jobs:
            if job.uid == workload.uid:
                return job
        if any(job.name == workload.name for job in jobs):
            return WriteResult("conflict", f"job {workload.name} was requeued and runs on {workload.node} again")
        return WriteResult("gone", f"job {workload.name} left {workload.node}")

    def _ask(self, job: SlurmJob, ask: CheckpointAsk) -> WriteResult:
        job = _component_to_signal(job, self._components(job))
        signal, now = job.signal, self._clock.now()
        if signal is None:
            return WriteResult("refused", "its comment names no signal")
        if "RUNNING" not in job.states:
            return WriteResult("refused", f"it is {'+'.join(sorted(job.states)).lower()}, and gets no signal")
        entry = self._folder.notes(ASKED).get(job.uid)
        if entry is None or (ask.key not in _keys(entry) and _seconds(entry, "until") <= now.timestamp()):
            until = int(ask.deadline.timestamp())
            entry = {"until": until, "keys": [ask.key], "answers": job.answers}
            self._note(job.uid, entry)
        elif ask.key not in _keys(entry):
            entry = {**entry, "keys": [*_keys(entry), ask.key]}
            self._note(job.uid, entry)
        if entry.get("sent") is True:
            return WriteResult("already", f"SIG{signal.name} was sent to it")
        answer = self._port.signal(job, signal)
        if answer.kind == "done":
            self._note(job.uid, {**entry, "sent": True})
        return _answer(answer, Write(f"job {job.name}", "signal", None, f"SIG{signal.name}"))

    def _note(self, uid: str, entry: dict[str, Any]) -> None:
        oldest = (self._clock.now() - _REMEMBERED).timestamp()
        self._folder.note(ASKED, uid, entry, lambda noted: _seconds(noted, "until") > oldest)


def _component_to_signal(job: SlurmJob, parts: Collection[SlurmJob]) -> SlurmJob:
    """Return the component to signal: the job itself, or the first component that names a signal if it names none."""
    return job if job.signal is not None else next((part for part in parts if part.signal is not None), job)


def _offer(job: SlurmJob) -> CheckpointOffer | None:
    signal = job.signal if "RUNNING" in job.states else None
    return None if signal is None else CheckpointOffer("scheduler", takes=signal.takes)


def _loss(job: SlurmJob, now: datetime) -> str | None:
    if not job.batch:
        return "it is not a batch job and cannot be requeued"
    if not job.requeue:
        return "it cannot be requeued (--no-requeue)"
    if job.burst_buffer:
        return "a requeue may remove the data in its burst buffer"
    if job.cron:
        return "a requeue would postpone it to the next time in its scrontab"
    is_late = job.start_by is not None and now >= job.start_by
    return "after a requeue it could not end before its --deadline" if is_late else None


def _gang(job: SlurmJob) -> str | None:
    return job.requeue_name if len(job.nodes) > 1 or "+" in job.name else None


def _answer(answer: WriteResult, write: Write) -> WriteResult:
    return WriteResult(answer.kind, answer.message, (write,) if answer.kind == "done" else ())


def _keys(entry: dict[str, Any]) -> list[str]:
    keys = entry.get("keys")
    return [str(key) for key in keys] if isinstance(keys, list) else []


def _seconds(entry: dict[str, Any], name: str) -> int:
    """Return a time of an entry in seconds; 0 if missing."""
    value = entry.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


_PLAIN: Final = re.compile(r"[\w.+:/-]+(?:(?:[&,][\w.+:/-]+)*|(?:\|[\w.+:/-]+)*)\Z")
_NAME: Final = re.compile(r"[\w.+:/-]+")


def placement_of(
    job: SlurmJob, node: str, nodes: Sequence[SlurmNode], partitions: Mapping[str, Partition], reserved: Collection[str]
) -> Placement:
    """Decide whether a job could run without one of its nodes.

    Free capacity does not matter, because a requeued job waits in its queue; likewise licenses, which are
    cluster-wide, and ``--switches``, which Slurm drops after a timeout. Memory, CPUs, disk, GPUs and kinds of generic
    resources are compared with an empty node.
    """
    need = job.needs
    if node in need.nodes:
        return Placement(False, f"it requires {','.join(sorted(need.nodes))} (--nodelist)")
    undecidable = _undecidable(need, partitions)
    if undecidable is not None:
        return Placement(None, undecidable)
    closed = {name: reason for name in need.partitions if (reason := _refusal(partitions[name], job)) is not None}
    if closed and len(closed) == len(need.partitions):
        return Placement(False, ", ".join(f"its partition {name} {reason}" for name, reason in sorted(closed.items())))
    need = replace(need, partitions=need.partitions - closed.keys())
    largest = max((other.gpus for other in nodes if other.name == node), default=job.gpus)
    gpus = min(math.ceil(job.gpus / max(1, len(job.nodes))), largest)  # no more than it has here
    usable = {
        other.name
        for other in nodes
        if other.name != node and _takes(other, need, gpus) and _admits(other, need, reserved)
    }
    if not need.nodes <= usable:
        return Placement(False, f"{','.join(sorted(need.nodes - usable))} of its --nodelist cannot run it")
    if len(usable) < len(job.nodes):
        return Placement(
            False, f"it needs {len(job.nodes)} nodes{_described(need, gpus)}, and only {len(usable)} other nodes fit"
        )
    return UNRESTRICTED


def _refusal(partition: Partition, job: SlurmJob) -> str | None:
    """Return why a job would stay pending in its partition, whose limits may have changed since the job started."""
    if partition["State"] != "UP":
        return f"is {partition['State']}"
    amounts = {
        "MaxTime": job.needs.minutes, "MaxNodes": len(job.nodes), "MaxCPUsPerNode": job.needs.cpus,
        "MaxMemPerNode": job.needs.memory_mb,
    }  # fmt: skip
    for name, amount in amounts.items():
        limit = partition.get(name, "UNLIMITED")
        if limit != "UNLIMITED" and amount > _amount(limit):
            return f"has {name}={limit} now"
    # AllowAccounts is not checked: newer Slurm versions also allow child accounts
    for name, value in (("DenyAccounts", job.needs.account), ("AllowQos", job.needs.qos), ("DenyQos", job.needs.qos)):
        listed = partition.get(name, "ALL").lower().split(",")
        if value and listed != ["all"] and (value.lower() in listed) is name.startswith("Deny"):
            return f"has {name}={partition[name]} now"
    return f"has MinNodes={partition['MinNodes']} now" if len(job.nodes) < int(partition.get("MinNodes", 0)) else None


def _amount(limit: str) -> float:
    """Parse a limit of a partition: a number, or a time (``1-12:00:00``) in minutes."""
    days, _, time = limit.rpartition("-")
    if ":" not in time:
        return float(limit)
    hours, minutes, _ = map(int, time.split(":"))
    return int(days or 0) * 1440 + hours * 60 + minutes


def _undecidable(need: Requirements, partitions: Mapping[str, Partition]) -> str | None:
    unlisted = need.partitions - partitions.keys()
    if unlisted:
        return f"Slurm does not list its partition {', '.join(sorted(unlisted))}"
    if need.contiguous:
        return "it requires consecutive nodes (--contiguous, --segment)"
    if need.features and not _PLAIN.match(need.features):
        return f"its constraint {need.features} is neither a plain AND nor a plain OR"
    return None


def _admits(node: SlurmNode, need: Requirements, reserved: Collection[str]) -> bool:
    if need.reservation:
        return node.name in reserved
    return not node.states & {"RESERVED", "MAINT", "MAINTENANCE"}


def _takes(node: SlurmNode, need: Requirements, gpus: int) -> bool:
    in_service = not node.out and not node.down and "FUTURE" not in node.states
    in_partition = not need.partitions or bool(need.partitions & set(node.partitions))
    big_enough = (
        node.gpus >= gpus
        and (node.cpus is None or node.cpus >= need.cpus)
        and (node.memory_mb is None or node.memory_mb >= need.memory_mb)
        and (node.disk_mb is None or node.disk_mb >= need.disk_mb)
        and need.gres <= node.gres
    )
    features = set(_NAME.findall(need.features))
    has = features & (set(node.features) - node.inactive)
    matches = not features or (bool(has) if "|" in need.features else has == features)
    return in_service and in_partition and big_enough and matches and node.name not in need.excluded


def _described(need: Requirements, gpus: int) -> str:
    named = {
        "partition": ",".join(sorted(need.partitions)), "reservation": need.reservation, "constraint": need.features,
        "GPUs per node:": gpus, "gres": ",".join(sorted(need.gres)), "MB of disk:": need.disk_mb,
    }  # fmt: skip
    parts = [f"{name} {value}" for name, value in named.items() if value]
    return f" ({', '.join(parts)})" if parts else ""
