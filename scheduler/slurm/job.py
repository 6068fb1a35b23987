"""A job as reported by Slurm, and the checkpoint options in its comment."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from foundation.kubernetes.opt_out import read_switch
from foundation.slurm import expand_hostlist, instant, number, states_of
from policy.fleet import JobView
from scheduler.ports.workloads import WorkState
from scheduler.slurm.node import count_of, kinds_of
from telemetry.collect.slurm.jobs import job_name, whole_gpus

HELD_STATES: Final = frozenset({
    "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "STOPPED", "SIGNALING",
})  # fmt: skip
"""States in which a job holds its nodes."""

_ENDING: Final = frozenset({"COMPLETING", "STAGE_OUT"})
_SUSPENDED: Final = frozenset({"SUSPENDED", "STOPPED"})
_AT_WORK: Final = frozenset({"RESIZING", "SIGNALING"})
# Flags of a running job; 22.05 reports the flag instead of RUNNING.
_TRES: Final = re.compile(r"(?:^|,)(?P<name>cpu|mem)=(?P<count>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)")
_UNITS: Final = {"": 1, "K": 2**-10, "M": 1, "G": 2**10, "T": 2**20, "P": 2**30}
_MINUTE: Final = timedelta(minutes=1)
_LIMITLESS: Final = timedelta(days=300)
# Slurm reports an end one year ahead for a job without a time limit.
PROBE_PREFIX: Final = "predrain-probe-"
CHECKPOINTED: Final = "checkpointed"
CHECKPOINT_FAILED: Final = "checkpoint-failed"
_TOKEN = re.compile(r"(?:^|[\s,;])predrain\.(?P<name>[a-z-]+)(?:=(?P<value>[^\s,;]*))?(?=$|[\s,;])", re.IGNORECASE)
_KEEP = re.compile(r"(?<!\w)predrain\W{0,2}_?keep\S{0,20}", re.IGNORECASE)
_SIGNAL = re.compile(r"(?P<batch>B:)?(?:SIG)?(?P<name>[A-Z][A-Z0-9]{1,9})(?:@(?P<seconds>\d{1,6}))?\Z")
_DEADLY: Final = frozenset({"KILL", "STOP", "TSTP", "TTIN", "TTOU"})


@dataclass(frozen=True, slots=True)
class CheckpointSignal:
    """The signal that makes a job write a checkpoint; ``name`` without ``SIG``.

    ``batch``: send it to the batch script only, not to the job's steps. ``takes``: duration of a checkpoint.
    """

    name: str
    batch: bool
    takes: timedelta | None


@dataclass(frozen=True, slots=True)
class Requirements:
    """Node requirements of a job.

    ``nodes``, ``excluded``: from ``--nodelist`` and ``--exclude``. ``features``: ``--constraint`` verbatim.
    ``contiguous``: ``--contiguous`` or ``--segment``.
    ``cpus``, ``memory_mb``, ``disk_mb``: per node. ``gres``: kinds of generic resources.
    ``minutes``: time limit; infinite without one. ``account``, ``qos``: empty: unknown.
    """

    nodes: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    features: str = ""
    reservation: str = ""
    contiguous: bool = False
    cpus: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    gres: frozenset[str] = frozenset()
    minutes: float = 0
    account: str = ""
    qos: str = ""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that holds nodes.

    ``number``: Slurm's job id. **It does not identify an array task**: the last task has the id of the whole array, and
    a request with the bare id reaches every task.
    ``name``: identifies exactly this job, array task (``123_7``) or heterogeneous component (``123+1``).
    ``leader``: id to requeue: the first component of a heterogeneous job, which includes the others, else the job
    itself.
    ``started_at``, ``ends_at``: aware; ``ends_at`` is the end of its time limit, None without one.
    ``start_by``: aware; a later restart could not end by its ``--deadline``, so Slurm would remove the job.
    ``held``: its priority is 0 (``scontrol hold``): after a requeue it would stay pending.
    ``burst_buffer``: it has data in a burst buffer. ``cron``: it is a job of ``scrontab``.
    """

    number: int
    name: str
    leader: int
    uid: str
    nodes: tuple[str, ...]
    states: frozenset[str]
    user: str = ""
    gpus: int = 0
    started_at: datetime | None = None
    ends_at: datetime | None = None
    requeue: bool = False
    batch: bool = False
    comment: str = ""
    held: bool = False
    needs: Requirements = Requirements()
    start_by: datetime | None = None
    burst_buffer: bool = False
    cron: bool = False

    @property
    def state(self) -> WorkState:
        """State of the workload."""
        if self.states & _ENDING:
            return "ending"
        if self.states & _SUSPENDED:
            return "suspended"
        return "held" if self.held else "running"

    @property
    def requeue_name(self) -> str:
        """Name to requeue; for a component, the whole heterogeneous job."""
        return str(self.leader) if "+" in self.name else self.name

    @property
    def signal(self) -> CheckpointSignal | None:
        """The signal in its comment, as in ``sbatch --signal``: ``predrain.checkpoint=B:USR1@300``; None if none.

        ``B:`` signals the batch script only; the seconds are the duration of a checkpoint. Signals that stop or kill
        are ignored.
        """
        match = _SIGNAL.match(self._tokens().get("checkpoint", ""))
        if match is None or match["name"] in _DEADLY:
            return None
        takes = None if match["seconds"] is None else timedelta(seconds=int(match["seconds"]))
        return CheckpointSignal(match["name"], match["batch"] is not None, takes)

    @property
    def answers(self) -> dict[str, str]:
        """Checkpoint values in its comment, which change when the job acknowledges a request."""
        tokens = self._tokens()
        return {name: tokens[name] for name in (CHECKPOINTED, CHECKPOINT_FAILED) if name in tokens}

    @property
    def checkpointed_at(self) -> datetime | None:
        """Time of its last checkpoint, from its comment: ``predrain.checkpointed=EPOCH_SECONDS``."""
        return _epoch(self._tokens().get(CHECKPOINTED))

    @property
    def opt_out(self) -> str | None:
        """Opt-out from requeues in its comment: ``predrain.keep``, or an invalid checkpoint signal."""
        tokens = self._tokens()
        keep, signal = tokens.get("keep"), tokens.get("checkpoint")
        unclear = _KEEP.search(_TOKEN.sub("", self.comment))
        if unclear is not None:
            return f"its comment says {unclear[0]}, which is read as predrain.keep"
        if keep is not None and read_switch(keep) is not False:
            return f"its comment says predrain.keep{keep and '='}{keep}"
        if signal is not None and self.signal is None:
            return f"its comment says predrain.checkpoint={signal}, which is not a checkpoint signal"
        return None

    def view(self) -> JobView:
        """Return the policy's view; the components of a heterogeneous job have one name."""
        return JobView(
            self.requeue_name, max(1, self.gpus), self.started_at, self.checkpointed_at, self.ends_at,
            self.signal is not None,
        )  # fmt: skip

    def _tokens(self) -> dict[str, str]:
        return {match["name"].lower(): match["value"] or "" for match in _TOKEN.finditer(self.comment)}


def job_of(row: Mapping[str, Any], gres: str) -> SlurmJob | None:
    """Parse a job; None if it holds no node. Raises ``ValueError`` if its state or id is missing."""
    states = frozenset(states_of(row.get("job_state")))
    if not states:
        raise ValueError(f"job {row.get('job_id')} without a state")
    states |= {"RUNNING"} if states & _AT_WORK else set()
    listed = row.get("nodes")
    if not states & HELD_STATES or not isinstance(listed, str) or listed.strip() in ("", "(null)"):
        return None
    job_id = number(row.get("job_id"))
    if not job_id:
        raise ValueError("a job without a number")
    nodes = tuple(expand_hostlist(listed))
    submitted, started = instant(row.get("submit_time")), instant(row.get("start_time"))
    restarts = number(row.get("restart_cnt")) or 0
    het = number(row.get("het_job_id"))
    comment = " ".join(str(row[key]) for key in ("comment", "extra", "admin_comment") if isinstance(row.get(key), str))
    user = str(row.get("user_name") or row.get("user_id") or "")
    uid = f"{job_id}.{restarts}.{0 if submitted is None else int(submitted.timestamp())}"
    return SlurmJob(
        job_id, job_name(row), het or job_id, uid, nodes, states, user, _gpus(row, len(nodes), gres),
        started, _end(row, started), row.get("requeue") is True, row.get("batch_flag") is True, comment,
        number(row.get("priority")) == 0 or row.get("hold") is True, _requirements(row, len(nodes)),
        _start_by(row), bool(_text(row.get("burst_buffer"))),
        bool(row.get("cron")) or "CRON_JOB" in str(row.get("flags")),
    )  # fmt: skip


def _requirements(row: Mapping[str, Any], nodes: int) -> Requirements:
    memory, per_cpu = number(row.get("memory_per_node")) or 0, number(row.get("memory_per_cpu")) or 0
    # totals of the job, including requests per task or per GPU; --mem=0 requests a node's whole memory
    total = {match["name"]: match for match in _TRES.finditer(_text(row.get("tres_req_str")))}
    cpus, megabytes = (_share(total.get(name), nodes) for name in ("cpu", "mem"))
    cpus = max(cpus, number(row.get("minimum_cpus_per_node")) or 0)
    kinds = kinds_of(",".join(_text(row.get(f"tres_per_{part}")) for part in ("node", "job", "task", "socket")))
    types = Counter(kind.partition(":")[0] for kind in kinds if ":" in kind)
    return Requirements(
        _node_set(row.get("required_nodes")), _node_set(row.get("excluded_nodes")),
        frozenset(filter(None, _text(row.get("partition")).split(","))), _text(row.get("features")),
        _text(row.get("resv_name")), row.get("contiguous") is True or bool(number(row.get("segment_size"))), cpus,
        max(memory or per_cpu * cpus, megabytes if per_cpu or _text(row.get("memory_per_tres")) else 0),
        number(row.get("minimum_tmp_disk_per_node")) or 0,
        # if several types of a resource are requested, a node needs only one of them
        frozenset(kind for kind in kinds if ":" not in kind or types[kind.partition(":")[0]] == 1),
        math.inf if (minutes := number(row.get("time_limit"))) is None else minutes,
        _text(row.get("account")), _text(row.get("qos")),
    )  # fmt: skip


def _share(total: re.Match[str] | None, nodes: int) -> int:
    """Return each node's share of a requested total, rounded up; memory in MB."""
    return 0 if total is None else math.ceil(float(total["count"]) * _UNITS[total["unit"]] / nodes)


def _node_set(value: object) -> frozenset[str]:
    return frozenset(expand_hostlist(_text(value)))


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) and value.strip() != "(null)" else ""


def views_by_node(jobs: tuple[SlurmJob, ...]) -> dict[str, tuple[JobView, ...]]:
    """Return the policy's view of the jobs on each node; heterogeneous jobs have the sum of their components."""
    by_job: dict[str, JobView] = {}
    jobs_of: dict[str, dict[str, None]] = {}
    for job in jobs:
        view = job.view()
        known = by_job.get(view.name)
        if known is not None and "+" in job.name:
            view = replace(
                known, gpus=known.gpus + view.gpus, checkpointed_at=known.checkpointed_at or view.checkpointed_at,
                can_checkpoint=known.can_checkpoint or view.can_checkpoint,
            )  # fmt: skip
        by_job[view.name] = view
        for node in job.nodes:
            jobs_of.setdefault(node, {})[view.name] = None
    return {node: tuple(by_job[name] for name in names) for node, names in jobs_of.items()}


def _gpus(row: Mapping[str, Any], nodes: int, gres: str) -> int:
    detail = row.get("gres_detail")
    if isinstance(detail, list) and detail:
        return sum(count_of(str(resources), gres) for resources in detail)
    return whole_gpus(row, nodes) if gres == "gpu" else 0


def _end(row: Mapping[str, Any], started: datetime | None) -> datetime | None:
    end = instant(row.get("end_time"))
    if end is None or started is None or number(row.get("time_limit")) is None or end - started > _LIMITLESS:
        return None
    return end


def _start_by(row: Mapping[str, Any]) -> datetime | None:
    deadline, limit = instant(row.get("deadline")), number(row.get("time_limit"))
    return None if deadline is None else deadline - timedelta(minutes=min(limit or 0, _LIMITLESS // _MINUTE))


def _epoch(text: str | None) -> datetime | None:
    if text is None or not text.isdecimal() or len(text) > 11:
        return None
    return datetime.fromtimestamp(int(text), UTC)
