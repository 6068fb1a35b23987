"""A job as Slurm tells it, and what its comment says about checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from policy.fleet import JobView
from scheduler.slurm.node import count_of
from telemetry.collect.slurm.hostlist import expand_hostlist
from telemetry.collect.slurm.jobs import job_name, whole_gpus
from telemetry.collect.slurm.slurm_json import instant, number, states_of

HELD: Final = frozenset({
    "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "STOPPED", "SIGNALING",
})  # fmt: skip
"""States in which a job holds its nodes."""

_ENDING: Final = frozenset({"COMPLETING", "STAGE_OUT"})
_LIMITLESS: Final = timedelta(days=300)
# Slurm gives a job without a time limit an end a year ahead.
_TOKEN = re.compile(r"(?:^|[\s,;])predrain\.(?P<name>[a-z-]+)(?:=(?P<value>[^\s,;]+))?(?=$|[\s,;])")
_SIGNAL = re.compile(r"(?P<batch>B:)?(?:SIG)?(?P<name>[A-Z][A-Z0-9]{1,9})(?:@(?P<seconds>\d{1,6}))?\Z")
_DEADLY: Final = frozenset({"KILL", "STOP", "TSTP", "TTIN", "TTOU"})


@dataclass(frozen=True, slots=True)
class CheckpointSignal:
    """The signal on which a job writes a checkpoint.

    ``name``: without ``SIG``.
    ``batch``: to the batch script alone; else to the job's steps.
    ``takes``: how long it says it needs.
    """

    name: str
    batch: bool
    takes: timedelta | None


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that holds nodes.

    ``number``: Slurm's job id; each running task of an array and each component of a heterogeneous job has its own.
    ``name``: as Slurm writes it: ``123``, ``123_7`` in an array, ``123+1`` in a heterogeneous job.
    ``leader``: whom a requeue names: the first component of a heterogeneous job, which goes as a whole; else the job
    itself.
    ``uid``: of this run of it.
    ``submitted_at``, ``started_at``, ``ends_at``: Aware; ``ends_at`` is the end of its time limit, None without one.
    ``requeue``, ``batch``: whether it may be requeued; whether it is a batch job.
    ``comment``: its comment and its ``extra``.
    """

    number: int
    name: str
    leader: int
    uid: str
    nodes: tuple[str, ...]
    states: frozenset[str]
    user: str = ""
    gpus: int = 0
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    ends_at: datetime | None = None
    requeue: bool = False
    batch: bool = False
    comment: str = ""

    @property
    def ending(self) -> bool:
        """Whether it is on its way out already."""
        return bool(self.states & _ENDING)

    @property
    def signal(self) -> CheckpointSignal | None:
        """The signal it asks for in its comment: ``predrain.checkpoint=B:USR1@300``; None: it names none that is one.

        It is written as in ``sbatch --signal``: ``B:`` for the batch script alone, the seconds that it takes after the
        ``@``. Signals that stop or kill are none.
        """
        found = _SIGNAL.match(self._tokens().get("checkpoint", ""))
        if found is None or found["name"] in _DEADLY:
            return None
        takes = None if found["seconds"] is None else timedelta(seconds=int(found["seconds"]))
        return CheckpointSignal(found["name"], found["batch"] is not None, takes)

    @property
    def checkpointed_at(self) -> datetime | None:
        """When it says that it last wrote a checkpoint: ``predrain.checkpointed=EPOCH_SECONDS``."""
        return _epoch(self._tokens().get("checkpointed"))

    @property
    def gave_up_at(self) -> datetime | None:
        """When it says that it could not write one: ``predrain.checkpoint-failed=EPOCH_SECONDS``."""
        return _epoch(self._tokens().get("checkpoint-failed"))

    @property
    def stays_by_wish(self) -> bool:
        """Whether its comment says ``predrain.keep``: it is not requeued."""
        return "keep" in self._tokens()

    def view(self) -> JobView:
        """See it as the policy does; the components of a heterogeneous job are one job."""
        name = str(self.leader) if "+" in self.name else self.name
        return JobView(
            name, max(1, self.gpus), self.started_at, self.checkpointed_at, self.ends_at, self.signal is not None
        )

    def _tokens(self) -> dict[str, str]:
        return {found["name"]: found["value"] or "" for found in _TOKEN.finditer(self.comment)}


def job_of(row: Mapping[str, Any], gres: str) -> SlurmJob | None:
    """Read a job from a report's row; None where it holds no node.

    Raises ``ValueError`` if it cannot be told what it is or where it runs.
    """
    states = frozenset(states_of(row.get("job_state")))
    if not states:
        raise ValueError(f"job {row.get('job_id')} without a state")
    listed = row.get("nodes")
    if not states & HELD or not isinstance(listed, str) or listed.strip() in ("", "(null)"):
        return None
    found = number(row.get("job_id"))
    if not found:
        raise ValueError("a job without a number")
    nodes = tuple(expand_hostlist(listed))
    submitted, started = instant(row.get("submit_time")), instant(row.get("start_time"))
    restarts = number(row.get("restart_cnt")) or 0
    het = number(row.get("het_job_id"))
    comment = " ".join(str(row[key]) for key in ("comment", "extra") if isinstance(row.get(key), str))
    user = str(row.get("user_name") or row.get("user_id") or "")
    uid = f"{found}.{restarts}.{0 if submitted is None else int(submitted.timestamp())}"
    return SlurmJob(
        found, job_name(row), het or found, uid, nodes, states, user, _gpus(row, len(nodes), gres),
        submitted, started, _end(row, started), row.get("requeue") is True, row.get("batch_flag") is True, comment,
    )  # fmt: skip


def views_by_node(jobs: tuple[SlurmJob, ...]) -> dict[str, tuple[JobView, ...]]:
    """Give the jobs of each node as the policy sees them, the components of a heterogeneous job as one with the sum."""
    whole: dict[str, JobView] = {}
    on: dict[str, dict[str, None]] = {}
    for job in jobs:
        view = job.view()
        known = whole.get(view.name)
        if known is not None and "+" in job.name:
            view = replace(
                known, gpus=known.gpus + view.gpus, checkpointed_at=known.checkpointed_at or view.checkpointed_at,
                can_checkpoint=known.can_checkpoint or view.can_checkpoint,
            )  # fmt: skip
        whole[view.name] = view
        for node in job.nodes:
            on.setdefault(node, {})[view.name] = None
    return {node: tuple(whole[name] for name in names) for node, names in on.items()}


def _gpus(row: Mapping[str, Any], nodes: int, gres: str) -> int:
    detail = row.get("gres_detail")
    if isinstance(detail, list) and detail:
        return sum(count_of(str(each), gres) for each in detail)
    return whole_gpus(row, nodes) if gres == "gpu" else 0


def _end(row: Mapping[str, Any], started: datetime | None) -> datetime | None:
    end = instant(row.get("end_time"))
    if end is None or started is None or number(row.get("time_limit")) is None or end - started > _LIMITLESS:
        return None
    return end


def _epoch(text: str | None) -> datetime | None:
    if text is None or not text.isdecimal() or len(text) > 11:
        return None
    return datetime.fromtimestamp(int(text), UTC)
