"""Jobs from Slurm: its accounting (``sacct``), or, where there is none, what the controller remembers (``squeue``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from telemetry.collect.slurm.hostlist import expand_hostlist
from telemetry.collect.slurm.slurm_json import instant, load, number, text, words
from telemetry.dataset.schema import JOBS
from telemetry.milliseconds import to_ms

SACCT_COLUMNS: Final = ("JobID", "State", "Start", "End", "NodeList", "AllocTRES")
"""Columns that we ask sacct for."""

_UNFINISHED: Final = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "STOPPED"}
)
_TRES_GPU = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TRES_TYPED = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_GRES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,()=]+)?[:=](\d+)")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one job: a requeued job has several.

    ``job``: as Slurm writes it: ``123``, ``123_7`` in an array, ``123+1`` in a heterogeneous job.
    ``ended_at``: Aware; None while it runs.
    ``gpus``: on each node; None where Slurm tells a sum that does not divide evenly.
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
            "gpu": None,
            "started_at": to_ms(job.started_at),
            "ended_at": None if job.ended_at is None else to_ms(job.ended_at),
            "gpus": gpus,
            "checkpointed_at": None,
            "outcome": job.outcome,
        }
        for job in jobs
        for node, gpus in zip(job.nodes, job.gpus, strict=True)
    ]
    return pa.Table.from_arrays([pa.array([r[f.name] for r in rows], type=f.type) for f in JOBS], schema=JOBS)


def read_sacct(report: str) -> tuple[list[Job], dict[str, int]]:
    """Read ``sacct --parsable2 --noheader`` with :data:`SACCT_COLUMNS`.

    Returns ``counts``: ``jobs``, and rows left out: ``steps``, ``not_started``, ``unreadable``.
    """
    counts: Counter[str] = Counter()
    jobs: list[Job] = []
    for line in filter(str.strip, report.splitlines()):
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != len(SACCT_COLUMNS):
            counts["unreadable"] += 1
            continue
        row = dict(zip(SACCT_COLUMNS, fields, strict=True))
        if "." in row["JobID"]:
            counts["steps"] += 1
            continue
        try:
            job = _accounted(row)
        except ValueError:
            counts["unreadable"] += 1
            continue
        if job is None:
            counts["not_started"] += 1
        else:
            jobs.append(job)
    counts["jobs"] = len(jobs)
    return jobs, dict(counts)


def _accounted(row: Mapping[str, str]) -> Job | None:
    started_at, ended_at = _instant(row["Start"]), _instant(row["End"])
    nodes = () if row["NodeList"].lower() in ("", "none assigned", "none") else tuple(expand_hostlist(row["NodeList"]))
    state = (row["State"].split() or [""])[0].rstrip("+")  # "CANCELLED by 1000"; a narrow column ends in "+"
    if started_at is None or not nodes or not row["JobID"]:
        return None
    if ended_at is not None and ended_at < started_at:
        raise ValueError("ends before it starts")
    done = ended_at is not None and state not in _UNFINISHED
    gpus = _each(gpus_of(row["AllocTRES"]), len(nodes))
    return Job(row["JobID"], nodes, started_at, ended_at if done else None, gpus, state.lower() if done else None)


def _instant(written: str) -> datetime | None:
    if written.lower() in ("", "unknown", "none", "n/a"):
        return None
    if written.isdecimal():
        return instant(int(written))
    return datetime.fromisoformat(written).replace(tzinfo=UTC)  # a sacct that knows no time format, under TZ=UTC


def gpus_of(resources: str) -> int:
    """Return the GPUs in AllocTRES (``cpu=8,gres/gpu=4,gres/gpu:h100=4``) or gres (``gpu:h100:4(IDX:0-3)``).

    TRES give the sum beside its parts by type, or, where the sum is not accounted for, the parts alone.
    """
    whole = _TRES_GPU.search(resources)
    if whole is not None:
        return int(whole[1])
    typed = _TRES_TYPED.findall(resources) or _GRES_GPU.findall(re.sub(r"\([^)]*\)", "", resources))
    return sum(int(each) for each in typed)


def _each(total: int, nodes: int) -> tuple[int | None, ...]:
    return (total // nodes if total % nodes == 0 else None,) * nodes


def read_squeue(report: str) -> tuple[list[Job], dict[str, int]]:
    """Read ``squeue --json``: jobs that run, and those that ended within the controller's memory (``MinJobAge``).

    Returns: as :func:`read_sacct`.
    Raises ``SlurmFormatError`` if it is no such report.
    """
    _, rows = load(report, ("jobs",))
    counts: Counter[str] = Counter()
    jobs: list[Job] = []
    for row in rows:
        try:
            job = _remembered(row)
        except (ValueError, TypeError):
            counts["unreadable"] += 1
            continue
        if job is None:
            counts["not_started"] += 1
        else:
            jobs.append(job)
    counts["jobs"] = len(jobs)
    return jobs, dict(counts)


def _remembered(row: Mapping[str, Any]) -> Job | None:
    states = words(row.get("job_state"))
    started_at, ended_at = instant(row.get("start_time")), instant(row.get("end_time"))
    listed = text(row.get("nodes"))
    if not states or states[0] == "PENDING" or started_at is None or listed is None:
        return None
    nodes = tuple(expand_hostlist(listed))
    done = not set(states) & _UNFINISHED and ended_at is not None  # while it runs, the end is that of its time limit
    if done and ended_at is not None and ended_at < started_at:
        raise ValueError("ends before it starts")
    gpus = _remembered_gpus(row, len(nodes))
    return Job(_name(row), nodes, started_at, ended_at if done else None, gpus, states[0].lower() if done else None)


def _remembered_gpus(row: Mapping[str, Any], nodes: int) -> tuple[int | None, ...]:
    """Return the GPUs on each node: what is bound there, else the accounted sum, else what was asked for."""
    detail = row.get("gres_detail")  # empty again when the job has ended
    if isinstance(detail, list) and len(detail) == nodes:
        return tuple(gpus_of(str(each)) for each in detail)
    total = gpus_of(str(row.get("tres_alloc_str") or ""))
    if total:
        return _each(total, nodes)
    for key, over in (("tres_per_node", None), ("tres_per_job", nodes)):
        asked = gpus_of(str(row.get(key) or ""))
        if asked:
            return (asked,) * nodes if over is None else _each(asked, over)
    return (0,) * nodes


def _name(row: Mapping[str, Any]) -> str:
    job, array, task = (number(row.get(key)) for key in ("job_id", "array_job_id", "array_task_id"))
    het, offset = number(row.get("het_job_id")), number(row.get("het_job_offset"))
    if array and task is not None:
        return f"{array}_{task}"
    if het:
        return f"{het}+{offset or 0}"
    if job is None:
        raise ValueError("a job without a number")
    return str(job)
