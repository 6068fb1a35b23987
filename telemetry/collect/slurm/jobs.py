"""Jobs from Slurm accounting (``sacct``) or, without accounting, from slurmctld's memory (``squeue``)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from foundation.instants import to_ms
from foundation.slurm import (
    UNFINISHED,
    check_row,
    expand_hostlist,
    gpus_of,
    instant,
    number,
    read_rows,
    shares_a_gpu,
    spread_gpus,
    state_of,
    states_of,
    text,
)
from foundation.text import storable
from telemetry.accounting import Accounting
from telemetry.staging.folder import rows_table

SACCT_COLUMNS: Final = ("JobID", "State", "Start", "End", "NodeList", "AllocTRES")
_NUMBERS: Final = (
    "job_id", "start_time", "end_time", "array_job_id", "array_task_id", "het_job_id", "het_job_offset"
)  # fmt: skip


_RESOURCES: Final = ("tres_alloc_str", "tres_per_node", "tres_per_job")
NOT_STARTED: Final = "has not started"
UNREADABLE: Final = "unreadable"
MAX_GPUS: Final = 4096
"""A count of GPUs per node above this is treated as corrupt."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a job; each requeue starts another.

    ``job``: Slurm's notation: ``123``, ``123_7`` for an array task, ``123+1`` for a component of a heterogeneous job.
    ``ended_at``: None while it runs.
    ``gpus``: GPUs on each node; None where Slurm reports only a total that is not a multiple of the node count.
    ``outcome``: Slurm's state in lower case (``completed``, ``failed``, ``node_fail``); None while it runs.
    """

    job: str
    nodes: tuple[str, ...]
    started_at: datetime
    ended_at: datetime | None
    gpus: tuple[int | None, ...]
    outcome: str | None

    @property
    def key(self) -> str:
        """Identity of the run: job and start time (Unix ms)."""
        return f"{self.job}@{to_ms(self.started_at)}"

    @property
    def digest(self) -> str:
        """Fingerprint of the fields that change during a run: end, outcome and node count."""
        return f"{None if self.ended_at is None else to_ms(self.ended_at)} {self.outcome} {len(self.nodes)}"


def jobs_table(jobs: Iterable[Job]) -> pa.Table:
    """Return one row per job and node, in the schema :data:`telemetry.dataset.schema.JOBS`."""
    rows = [
        {
            "job": job.job,
            "node": node,
            "started_at": to_ms(job.started_at),
            "ended_at": None if job.ended_at is None else to_ms(job.ended_at),
            "gpus": gpus,
            "outcome": job.outcome,
        }
        for job in jobs
        for node, gpus in zip(job.nodes, job.gpus, strict=True)
    ]
    return rows_table("jobs", rows)


def read_sacct(report: str, accounting: Accounting) -> list[Job]:
    """Parse ``sacct`` output of :data:`SACCT_COLUMNS` into started jobs; other rows are counted by reason."""
    return _read_jobs(filter(str.strip, storable(report).splitlines()), _accounted, accounting)


def read_squeue(report: str, accounting: Accounting) -> list[Job]:
    """Parse ``squeue --json`` as :func:`read_sacct` does; raises ``SlurmFormatError``."""
    return _read_jobs(read_rows(report, "jobs"), _remembered, accounting)


def _read_jobs(rows: Iterable[Any], read: Callable[[Any], Job | str], accounting: Accounting) -> list[Job]:
    jobs: list[Job] = []
    for row in rows:
        accounting.read("jobs")
        try:
            job = read(row)
        except (ValueError, TypeError, OverflowError) as error:
            accounting.left_out("jobs", UNREADABLE, example=f"{error}: {row}")
            continue
        if isinstance(job, Job):
            accounting.used("jobs")
            jobs.append(job)
        else:
            accounting.left_out("jobs", job, example=row)
    return jobs


def _accounted(line: str) -> Job | str:
    name, written_state, start, end, node_list, resources = (field.strip() for field in line.split("|"))
    started_at, ended_at, listed = _sacct_instant(start), _sacct_instant(end), text(node_list)
    state = state_of(written_state)
    if "." in name:
        return "step of a job"
    if started_at is None or listed is None or listed == "None assigned":
        return NOT_STARTED
    if not name:
        raise ValueError("a job without a number")
    nodes = tuple(expand_hostlist(listed))
    return _job(name, nodes, started_at, ended_at, [state], spread_gpus(resources, gpus_of(resources), len(nodes)))


def _sacct_instant(written: str) -> datetime | None:
    if written.isdecimal():
        return instant(int(written))
    # this sacct ignores SLURM_TIME_FORMAT; TZ=UTC still applies
    return None if text(written) is None else datetime.fromisoformat(written).replace(tzinfo=UTC)


def _remembered(stored: object) -> Job | str:
    row = check_row(stored, _NUMBERS)
    states = states_of(row.get("job_state"))
    started_at, ended_at = instant(row.get("start_time")), instant(row.get("end_time"))
    listed = text(row.get("nodes"))
    if not states or states[0] == "PENDING" or started_at is None or listed is None:
        return NOT_STARTED
    nodes = tuple(expand_hostlist(listed))
    return _job(job_name(row), nodes, started_at, ended_at, states, _remembered_gpus(row, len(nodes)))


def _job(
    name: str,
    nodes: tuple[str, ...],
    started_at: datetime,
    ended_at: datetime | None,
    states: list[str],
    gpus: tuple[int | None, ...],
) -> Job:
    if any(count is not None and count > MAX_GPUS for count in gpus):
        raise ValueError("more GPUs than a node can hold")
    if ended_at is None or set(states) & UNFINISHED:  # for a running job, squeue's end is its time limit
        return Job(name, nodes, started_at, None, gpus, None)
    if ended_at < started_at:
        raise ValueError("ends before it starts")
    return Job(name, nodes, started_at, ended_at, gpus, states[0].lower())


def _remembered_gpus(row: Mapping[str, Any], nodes: int) -> tuple[int | None, ...]:
    """Return the GPUs on each node: those bound there, else an even share of the total."""
    detail = row.get("gres_detail")  # empty once the job has ended
    if isinstance(detail, list) and len(detail) == nodes:
        return tuple(1 if shares_a_gpu(str(gres)) else gpus_of(str(gres)) for gres in detail)
    resources = ",".join(str(row.get(key) or "") for key in _RESOURCES)
    return spread_gpus(resources, whole_gpus(row, nodes), nodes)


def whole_gpus(row: Mapping[str, Any], nodes: int) -> int:
    """Return the total GPUs of a job: allocated if accounted, else requested."""
    accounted, per_node, per_job = (gpus_of(str(row.get(key) or "")) for key in _RESOURCES)
    return accounted or per_node * nodes or per_job


def job_name(row: Mapping[str, Any]) -> str:
    """Return a job's ID in Slurm's notation; raises ``ValueError`` if there is none."""
    job, array, task = (number(row.get(key)) for key in ("job_id", "array_job_id", "array_task_id"))
    het, offset = number(row.get("het_job_id")), number(row.get("het_job_offset"))
    if array and task is not None:
        return f"{array}_{task}"
    if het:
        return f"{het}+{offset or 0}"
    if job is None:
        raise ValueError("a job without a number")
    return str(job)
