"""Probes of idle nodes: low-priority jobs that run the operator's script, evaluated by exit code."""

import re
from collections.abc import Sequence
from typing import Any, Final

from foundation.slurm import expand_hostlist, number, states_of
from policy.ladder.remedies import Remedy
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import WriteResult
from scheduler.ports.workloads import DiagnosticResult, Fence
from scheduler.slurm.commands import SlurmCommands
from scheduler.slurm.folder import SharedFolder
from scheduler.slurm.job import PROBE_PREFIX
from scheduler.slurm.settings import ProbeJobSettings

_SUBMITTED: Final = "probes"
_NICE: Final = 1_000_000
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+\Z")
_RUNNING: Final = frozenset({"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING"})


class SlurmProbes:
    """Submits probes by ``sbatch``, and reads them by ``squeue``.

    A probe passed if its job is ``COMPLETED``, and failed if it ended with ``failed_exit_code``. Any other end (e.g.
    preemption, time limit, script error) is inconclusive. The job id is stored in the shared folder for other
    controllers.
    """

    def __init__(self, port: SlurmCommands, folder: SharedFolder, settings: ProbeJobSettings, clock: Clock) -> None:
        self._port, self._folder, self._settings, self._clock = port, folder, settings, clock

    def start(
        self, node: str, units: Sequence[str], key: str, fence: Fence, remedy: Remedy | None, *, probe: bool
    ) -> WriteResult:
        """Submit the job; ``already`` if it was submitted with this key before."""
        if not probe or remedy is not None or not _NAME.match(node):
            return WriteResult("refused", f"a probe job needs a single node, not {node!r}")
        return self._folder.guarded(fence.holder, fence.until, lambda: self._submit(node, len(units), key))

    def _submit(self, node: str, gpus: int, key: str) -> WriteResult:
        if self._job(key) is not None:
            return WriteResult("already", "it was already submitted")
        answer = self._port.submit(*self._arguments(node, key), self._settings.script)
        number = answer.message.partition(";")[0]
        if answer.kind == "done" and not number.isdecimal():
            return WriteResult("refused", f"sbatch returned no job id: {answer.message[:80]}")
        if answer.kind == "done":
            oldest, entry = self._now_s() - 86_400, {"job": int(number), "gpus": gpus, "at": self._now_s()}
            self._folder.note(_SUBMITTED, key, entry, lambda noted: int(noted.get("at") or 0) > oldest)
        return answer

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Read the state of the job; raises ``SchedulerError`` if it cannot be read."""
        job = self._job(key)
        row = None if job is None else self._port.job_row(job)
        if row is None:
            return DiagnosticResult("missing")
        states = frozenset(states_of(row.get("job_state")))
        if states & _RUNNING:
            return DiagnosticResult("running", f"job {job} is {'+'.join(sorted(states)).lower()}")
        if expand_hostlist(str(row.get("nodes") or "")) != [node]:
            return DiagnosticResult("inconclusive", f"job {job} did not run on {node}")
        if "COMPLETED" in states:
            return DiagnosticResult("passed", f"job {job} completed")
        if "FAILED" in states and exit_code(row.get("exit_code")) == self._settings.failed_exit_code:
            return DiagnosticResult("failed", f"job {job} ended with exit code {self._settings.failed_exit_code}")
        return DiagnosticResult("inconclusive", f"job {job} ended as {'+'.join(sorted(states)).lower()}")

    def drop(self, node: str, key: str) -> None:
        """Cancel the job; failures are ignored, because it has a time limit."""
        try:
            job = self._job(key)
        except SchedulerError:
            return
        if job is not None:
            self._port.cancel(job)

    def _job(self, key: str) -> int | None:
        job = (self._folder.notes(_SUBMITTED).get(key) or {}).get("job")
        # after a timeout of sbatch or a full disk, only Slurm knows the job
        return job if isinstance(job, int) else self._port.job_named(f"{PROBE_PREFIX}{key}")

    def _now_s(self) -> int:
        return int(self._clock.now().timestamp())

    def _arguments(self, node: str, key: str) -> list[str]:
        settings = self._settings
        minutes = max(1, round(settings.time_limit.total_seconds() / 60))
        chosen = {"partition": settings.partition, "qos": settings.qos, "account": settings.account}
        return [
            "--parsable", f"--job-name={PROBE_PREFIX}{key}", f"--nodelist={node}", "--nodes=1", "--exclusive",
            "--no-requeue", f"--nice={_NICE}", f"--time={minutes}", f"--deadline=now+{2 * minutes}minutes",
            f"--output={settings.output}", f"--export=PREDRAIN_NODE={node},PREDRAIN_KEY={key}",
            *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
        ]  # fmt: skip


def exit_code(value: Any) -> int | None:
    """Return the exit code of a job; None if it ended by a signal, or has none.

    22.05 reports the ``wait`` status, later versions an object.
    """
    if isinstance(value, dict):
        return number(value.get("return_code"))
    return value >> 8 if isinstance(value, int) and value > 255 else None
