"""The jobs on a Slurm node: asked for a checkpoint by a signal, moved by a requeue."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Answer, Write
from scheduler.ports.workloads import CheckpointAsk, CheckpointOffer, CheckpointState, Fence, Workload
from scheduler.slurm.folder import SharedFolder
from scheduler.slurm.job import SlurmJob, views_by_node
from scheduler.slurm.port import SlurmPort

PROGRESS: Final = "progress"
ASKED: Final = "asked"
_REMEMBERED: Final = timedelta(days=7)

_LOOKS: Final = 3
# How often a node in use is looked at on which no job is listed: one may begin after the jobs are read, or end before.


class SlurmWorkloads:
    """What runs on the nodes of a Slurm cluster.

    A signal cannot be taken back, and nothing shows whether it came: it is sent at least once, and its time is kept in
    the shared folder before. A job acknowledges by its comment, with the time at which its checkpoint was written, or
    by its end. A job that may not be requeued is waited for.
    """

    def __init__(self, port: SlurmPort, folder: SharedFolder, clock: Clock) -> None:
        self._port, self._folder, self._clock = port, folder, clock
        self.load_progress, self.save_progress = partial(folder.load, PROGRESS), partial(folder.save, PROGRESS)

    def on_node(self, node: str) -> tuple[Workload, ...]:
        """List the jobs that hold a node now.

        A node on which Slurm still ends a job is not empty, also where the job is not listed there any more. One that
        is allocated without a listed job cannot be read wholly: perhaps this user may not see all jobs.
        """
        for _ in range(_LOOKS):
            jobs = self._port.jobs(node)
            if jobs:
                return self._listed(node, jobs)
            current = self._port.node(node)
            states = frozenset() if current is None else current.states
            if "COMPLETING" in states:
                return (Workload("a job that Slurm is ending", f"{node} completing", "job", node, ending=True),)
            if not states & {"ALLOCATED", "MIXED"}:
                return ()
        raise SchedulerError(f"Slurm says that {node} is in use and lists no job on it: may this user see all jobs?")

    def _listed(self, node: str, jobs: tuple[SlurmJob, ...]) -> tuple[Workload, ...]:
        whole = self._port.jobs() if any("+" in job.name for job in jobs) else jobs  # components run elsewhere too
        views = {view.name: view for view in views_by_node(whole).get(node, ())}
        return tuple(
            Workload(
                job.name, job.uid, "job", node, f"user {job.user}", views.get(job.view().name, job.view()),
                held=_held(job), ending=job.ending, checkpoint=_offer(job),
            )
            for job in jobs
        )  # fmt: skip

    def ask_checkpoint(self, workload: Workload, ask: CheckpointAsk, fence: Fence) -> Answer:
        """Send the job the signal that its comment names; once for a run, whatever drains ask for it meanwhile."""
        return self._fenced(workload, fence, lambda job: self._ask(job, ask))

    def checkpoint_state(self, workload: Workload, key: str) -> CheckpointState:
        """Read whether the job says in its comment that it wrote a checkpoint since it was asked."""
        job = self._find(workload)
        if isinstance(job, Answer):
            return CheckpointState("gone", job.message)
        entry = self._folder.notes(ASKED).get(job.uid)
        if entry is None or key not in _keys(entry) or not _seconds(entry, "at"):
            return CheckpointState("waiting", "it was not asked with this key")
        asked = _seconds(entry, "at")
        wrote, gave_up = job.checkpointed_at, job.gave_up_at
        if wrote is not None and int(wrote.timestamp()) >= asked:
            return CheckpointState("acknowledged", "its comment says so", wrote)
        if gave_up is not None and int(gave_up.timestamp()) >= asked:
            return CheckpointState("failed", "its comment says that it cannot")
        return CheckpointState("waiting")

    def evict(self, workload: Workload, fence: Fence) -> Answer:
        """Requeue the job; a heterogeneous one goes as a whole."""
        return self._fenced(workload, fence, self._requeue)

    def preview(self, workload: Workload) -> tuple[Write, ...]:
        """Return what an eviction would do."""
        if workload.held is not None or workload.ending:
            return ()
        return (Write(f"job {workload.name}", "JobState", "RUNNING", "REQUEUE"),)

    def _fenced(self, workload: Workload, fence: Fence, call: Callable[[SlurmJob], Answer]) -> Answer:
        """Make a call about the very run of a job that is meant, under the lease."""
        try:
            with self._folder.fenced(fence.holder, fence.until) as barred:
                if barred is not None:
                    return Answer("refused", barred)
                job = self._find(workload)
                return job if isinstance(job, Answer) else call(job)
        except SchedulerError as error:
            return Answer("refused", str(error))

    def _requeue(self, job: SlurmJob) -> Answer:
        if job.ending:
            return Answer("already", "it is completing")
        held = _held(job)
        if held is not None:
            return Answer("refused", held)
        before = "+".join(sorted(job.states))
        return _answer(self._port.requeue(job), Write(f"job {job.leader}", "JobState", before, "REQUEUE"))

    def _find(self, workload: Workload) -> SlurmJob | Answer:
        jobs = self._port.jobs(workload.node)
        for job in jobs:
            if job.uid == workload.uid:
                return job
        if any(job.name == workload.name for job in jobs):
            return Answer("conflict", f"job {workload.name} was requeued and runs on {workload.node} again")
        return Answer("gone", f"job {workload.name} holds {workload.node} no more")

    def _ask(self, job: SlurmJob, ask: CheckpointAsk) -> Answer:
        signal, now = job.signal, self._clock.now()
        if signal is None:
            return Answer("refused", "its comment names no signal")
        if "RUNNING" not in job.states:
            return Answer("refused", f"it is {'+'.join(sorted(job.states)).lower()}, and gets no signal")
        entry = self._folder.notes(ASKED).get(job.uid)
        if entry is None or (ask.key not in _keys(entry) and _seconds(entry, "until") <= now.timestamp()):
            entry = {"at": int(now.timestamp()), "until": int(ask.deadline.timestamp()), "keys": [ask.key]}
            self._note(job.uid, entry)
        elif ask.key not in _keys(entry):
            entry = {**entry, "keys": [*_keys(entry), ask.key]}
            self._note(job.uid, entry)
        if entry.get("sent") is True:
            return Answer("already", f"SIG{signal.name} was sent to it")
        answer = self._port.signal(job, signal)
        if answer.kind == "done":
            self._note(job.uid, {**entry, "sent": True})
        return _answer(answer, Write(f"job {job.name}", "signal", None, f"SIG{signal.name}"))

    def _note(self, uid: str, entry: dict[str, Any]) -> None:
        oldest = (self._clock.now() - _REMEMBERED).timestamp()
        self._folder.note(ASKED, uid, entry, lambda noted: _seconds(noted, "until") > oldest)


def _offer(job: SlurmJob) -> CheckpointOffer | None:
    signal = job.signal if "RUNNING" in job.states else None
    return None if signal is None else CheckpointOffer("scheduler", takes=signal.takes)


def _held(job: SlurmJob) -> str | None:
    if job.stays_by_wish:
        return "its comment says predrain.keep"
    if not job.batch:
        return "it is no batch job, and cannot be requeued"
    return None if job.requeue else "it may not be requeued"


def _answer(answer: Answer, write: Write) -> Answer:
    return Answer(answer.kind, answer.message, (write,) if answer.kind == "done" else ())


def _keys(entry: dict[str, Any]) -> list[str]:
    keys = entry.get("keys")
    return [str(key) for key in keys] if isinstance(keys, list) else []


def _seconds(entry: dict[str, Any], name: str) -> int:
    """Read an instant of an entry, in seconds; 0 where it has none."""
    value = entry.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
