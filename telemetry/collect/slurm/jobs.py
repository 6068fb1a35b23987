"""Jobs from Slurm: its accounting (``sacct``), or, where there is none, what the controller remembers (``squeue``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import pyarrow as pa

from foundation.instants import to_ms
from foundation.slurm import expand_hostlist, instant, number, read_rows, states_of, text
from telemetry.landing.tables import rows_table

SACCT_COLUMNS: Final = ("JobID", "State", "Start", "End", "NodeList", "AllocTRES")
"""Columns that we ask sacct for."""

_UNFINISHED: Final = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "STOPPED"}
)
_TRES_GPU = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TRES_TYPED = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_GRES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,()=]+)?[:=](\d+)")
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one job: a requeued job has several.

    ``job``: as Slurm writes it: ``123``, ``123_7`` in an array, ``123+1`` in a heterogeneous job.
    ``ended_at``: Aware; None while it runs.
    ``gpus``: on each node; None where Slurm gives a sum that does not divide evenly.
    ``outcome``: Slurm's state in lower case, such as ``completed``, ``failed`` and ``node_fail``; None while it runs.
    """

    job: str
    nodes: tuple[str, ...]
    started_at: datetime
    ended_at: datetime | None
    gpus: tuple[int | None, ...]
    outcome: str | None

    @property
    def key(self) -> str:
        """What stays the same while a run goes on."""
        return f"{self.job}@{to_ms(self.started_at)}"

    @property
    def digest(self) -> str:
        """What changes when there is news."""
        return f"{None if self.ended_at is None else to_ms(self.ended_at)} {self.outcome} {len(self.nodes)}"


def jobs_table(jobs: Iterable[Job]) -> pa.Table:
    """Return a row for each job and node, in the layout of :data:`telemetry.dataset.schema.JOBS`."""
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


def read_sacct(report: str) -> tuple[list[Job], int]:
    """Read ``sacct`` with :data:`SACCT_COLUMNS`; return started jobs, and how many rows are unreadable."""
    return _read_jobs(filter(str.strip, report.splitlines()), _accounted)


def read_squeue(report: str) -> tuple[list[Job], int]:
    """Read ``squeue --json``, as :func:`read_sacct`; raises ``SlurmFormatError``."""
    return _read_jobs(read_rows(report, "jobs"), _remembered)


def _read_jobs(rows: Iterable[Row], read: Callable[[Row], Job | None]) -> tuple[list[Job], int]:
    jobs: list[Job] = []
    unreadable = 0
    for row in rows:
        try:
            job = read(row)
        except (ValueError, TypeError):
            unreadable += 1
        else:
            jobs += [] if job is None else [job]
    return jobs, unreadable


def _accounted(line: str) -> Job | None:
    name, written_state, start, end, node_list, resources = (field.strip() for field in line.split("|"))
    started_at, ended_at, listed = _sacct_instant(start), _sacct_instant(end), text(node_list)
    state = (written_state.split() or [""])[0].rstrip("+")  # "CANCELLED by 1000"; a narrow column ends in "+"
    if started_at is None or listed is None or listed == "None assigned" or not name or "." in name:
        return None
    nodes = tuple(expand_hostlist(listed))
    return _job(name, nodes, started_at, ended_at, [state], _shared(gpus_of(resources), len(nodes)))


def _sacct_instant(written: str) -> datetime | None:
    if written.isdecimal():
        return instant(int(written))
    # a sacct that knows no time format, under TZ=UTC
    return None if text(written) is None else datetime.fromisoformat(written).replace(tzinfo=UTC)


def gpus_of(resources: str) -> int:
    """Return the GPUs in AllocTRES (``cpu=8,gres/gpu=4,gres/gpu:h100=4``) or gres (``gpu:h100:4(IDX:0-3)``).

    TRES give the sum next to its parts by type, or, where the sum is not accounted for, the parts alone.
    """
    whole = _TRES_GPU.search(resources)
    if whole is not None:
        return int(whole[1])
    typed = _TRES_TYPED.findall(resources) or _GRES_GPU.findall(re.sub(r"\([^)]*\)", "", resources))
    return sum(map(int, typed))


def _shared(total: int, nodes: int) -> tuple[int | None, ...]:
    return (total // nodes if total % nodes == 0 else None,) * nodes


def _remembered(row: Mapping[str, Any]) -> Job | None:
    states = states_of(row.get("job_state"))
    started_at, ended_at = instant(row.get("start_time")), instant(row.get("end_time"))
    listed = text(row.get("nodes"))
    if not states or states[0] == "PENDING" or started_at is None or listed is None:
        return None
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
    if ended_at is None or set(states) & _UNFINISHED:  # squeue gives one that runs the end of its time limit
        return Job(name, nodes, started_at, None, gpus, None)
    if ended_at < started_at:
        raise ValueError("ends before it starts")
    return Job(name, nodes, started_at, ended_at, gpus, states[0].lower())


def _remembered_gpus(row: Mapping[str, Any], nodes: int) -> tuple[int | None, ...]:
    """Return the GPUs on each node: what is bound there, else an even share of the whole."""
    detail = row.get("gres_detail")  # empty again when the job has ended
    if isinstance(detail, list) and len(detail) == nodes:
        return tuple(gpus_of(str(gres)) for gres in detail)
    return _shared(whole_gpus(row, nodes), nodes)


def whole_gpus(row: Mapping[str, Any], nodes: int) -> int:
    """Return the GPUs of a whole job: the accounted sum, else what was asked for."""
    accounted, per_node, per_job = (
        gpus_of(str(row.get(key) or "")) for key in ("tres_alloc_str", "tres_per_node", "tres_per_job")
    )
    return accounted or per_node * nodes or per_job


def job_name(row: Mapping[str, Any]) -> str:
    """Return a job's name as Slurm writes it; raises ``ValueError`` if it has no number."""
    job, array, task = (number(row.get(key)) for key in ("job_id", "array_job_id", "array_task_id"))
    het, offset = number(row.get("het_job_id")), number(row.get("het_job_offset"))
    if array and task is not None:
        return f"{array}_{task}"
    if het:
        return f"{het}+{offset or 0}"
    if job is None:
        raise ValueError("a job without a number")
    return str(job)
