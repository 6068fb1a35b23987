"""A simulated fleet as a cluster in memory: its jobs run, its GPUs fail when they failed, and a controller acts.

What is real here is the controller: policy, budgets, breaker, re-validation and evacuation, on the scheduler and the
workloads in memory that its tests use. What is simulated is the fleet, and what is assumed stands in :class:`Assumed`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from policy.config import PolicyConfig
from policy.fleet import JobView, Level, NodeView, UnitView
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import EvacuationSettings, VerificationSettings
from scheduler.file import MemoryNode, MemoryScheduler
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from scheduler.ports.node_object import NodeObject, marks_of
from scheduler.ports.protocols import FactReader, RiskSource
from scheduler.ports.readings import Answer
from scheduler.ports.workloads import CheckpointOffer, DiagnosticResult, Fence, Workload
from tests.scheduler.faults import MemoryWorkloads

MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
_FURTHER: Final = (1 * MINUTE, 6 * MINUTE, 8 * MINUTE)
"""Rounds after one that drained something: the request, what was answered, what is gone. A controller goes round each
minute; in between nothing of these changes here."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What neither fleet nor controller tells.

    ``checkpoint``: from the request until a training job has written its checkpoint; a serving job writes none, and
    loses none.
    ``leave``: from an eviction until the job is gone.
    ``restart``: from a job's end until it computes again elsewhere.
    """

    checkpoint: timedelta = timedelta(minutes=5)
    leave: timedelta = timedelta(minutes=1)
    restart: timedelta = timedelta(minutes=15)


class BlindDiagnostic:
    """A diagnostic that takes its time and never finds anything: what it costs to believe one that sees too little."""

    def __init__(self, clock: ManualClock, takes: timedelta) -> None:
        self.begun: dict[str, datetime] = {}
        self.takes = takes
        self._clock = clock

    def start(self, node: str, units: Sequence[str], key: str, fence: Fence) -> Answer:  # noqa: ARG002
        """Start one."""
        if key in self.begun:
            return Answer("already")
        self.begun[key] = self._clock.now()
        return Answer("done")

    def result(self, node: str, key: str) -> DiagnosticResult:  # noqa: ARG002
        """Say that it runs, or that it passed."""
        if key not in self.begun:
            return DiagnosticResult("missing")
        ends = self.begun[key] + self.takes
        return DiagnosticResult("running") if self._clock.now() < ends else DiagnosticResult("passed", at=ends)

    def drop(self, node: str, key: str) -> None:  # noqa: ARG002
        """Forget one."""
        self.begun.pop(key, None)


class SightedDiagnostic(BlindDiagnostic):
    """A diagnostic that finds each fault that is there or will show in time, and nothing else: the best that could be.

    Parameters
    ----------
    clock : ManualClock
    takes : timedelta
    fleet : Fleet
    within : timedelta
        How long before it shows a fault can be found.
    """

    def __init__(self, clock: ManualClock, takes: timedelta, fleet: Fleet, within: timedelta) -> None:
        super().__init__(clock, takes)
        self._fleet, self._within = fleet, within

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Say that it runs, or what it found."""
        result = super().result(node, key)
        if result.kind != "passed":
            return result
        assert result.at is not None
        sick = self._fleet.faulty(node, result.at, self._within)
        return DiagnosticResult("failed", "a fault", sick, result.at) if sick else result


@dataclass(frozen=True, slots=True)
class Job:
    """A job on the whole of one node, as the fleet's scheduler had it.

    ``saved``: its last checkpoint before it ended; None: it writes none.
    """

    name: str
    node: str
    gpus: int
    began: datetime
    ended: datetime
    saved: datetime | None

    def runs(self, at: datetime) -> bool:
        """Whether it is running; at its very end it still is, for a failure ends it."""
        return self.began <= at <= self.ended


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a GPU."""

    gpu: str
    node: str
    at: datetime
    repaired: datetime


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU in a node for a time; ``until`` None: it still is."""

    gpu: str
    node: str
    since: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a simulated fleet was.

    ``failures``: in order of time.
    """

    jobs: tuple[Job, ...]
    failures: tuple[Failure, ...]
    places: tuple[Place, ...]
    groups: Mapping[str, str]
    racks: Mapping[str, str]
    begin: datetime
    end: datetime

    def needed(self, node: str, at: datetime, within: timedelta) -> bool:
        """Whether a drain that begins now is right: the node has failed, and is not repaired, or fails in time."""
        return bool(self.faulty(node, at, within))

    def faulty(self, node: str, at: datetime, within: timedelta) -> tuple[str, ...]:
        """Give the GPUs of a node that have failed, and are not repaired, or fail in time."""
        return tuple(
            failure.gpu
            for failure in self.failures
            if failure.node == node and failure.at <= at + within and at < max(failure.at, failure.repaired)
        )

    def with_jobs_of(self, nodes: int) -> Fleet:
        """Give the fleet with each job a part of one on so many nodes, the others of which stand elsewhere.

        When it is hit or moved, all of it stops and goes on from the same checkpoint. Its other nodes are taken never
        to fail: what they would add is not counted, for anybody.
        """
        return replace(self, jobs=tuple(replace(job, gpus=job.gpus * nodes) for job in self.jobs))

    def hit(self, failure: Failure) -> Job | None:
        """Give the job that a failure meets where nobody moves any."""
        return next((job for job in self.jobs if job.node == failure.node and job.runs(failure.at)), None)


@dataclass(slots=True)
class Count:
    """What came of it.

    ``failures``, ``hits``, ``moved``, ``drains``, ``unneeded``: Failures; jobs that they hit; jobs that were moved;
    drains that began; those of nodes that had not failed, nor did in time.
    ``lost``, ``spent``, ``idle``: GPU-hours: of work and restarts in the jobs that were hit; of checkpoints and
    restarts in the jobs that were moved; of sound nodes that we kept out of service.
    ``most_out``: nodes out of service by us at once.
    """

    failures: int = 0
    hits: int = 0
    moved: int = 0
    drains: int = 0
    unneeded: int = 0
    lost: float = 0.0
    spent: float = 0.0
    idle: float = 0.0
    most_out: int = 0


def lost_in(job: Job, failure: Failure, assumed: Assumed) -> float:
    """Give the GPU-hours that a job loses when it is hit: what it did since its last checkpoint, and a restart."""
    work = failure.at - max(job.saved, job.began) if job.saved is not None else timedelta(0)
    return job.gpus * ((max(work, timedelta(0)) + assumed.restart) / HOUR)


class ReplayedCluster:
    """The cluster, under a controller.

    ``right_within``: a drain was needed if its node fails within it.
    ``diagnostic``: a diagnostic of this length follows each drain; None: none does.
    ``sighted``: whether it is a :class:`SightedDiagnostic` rather than a :class:`BlindDiagnostic`.

    A job that is moved, or would have begun on a node that we keep out of service, runs on a spare node that does not
    fail; how many were needed at once is ``most_out``. Nodes fail as they failed, drained or not.
    """

    def __init__(
        self,
        fleet: Fleet,
        risks: Callable[[ManualClock], RiskSource],
        facts: FactReader,
        policy: PolicyConfig,
        assumed: Assumed,
        right_within: timedelta,
        diagnostic: timedelta | None = None,
        *,
        sighted: bool = False,
    ) -> None:
        self.fleet, self.assumed, self.right_within = fleet, assumed, right_within
        self.clock = ManualClock(fleet.begin)
        names = sorted(fleet.groups)
        nodes = [
            MemoryNode(NodeObject(name), NodeView(name, "cluster", fleet.groups[name], rack=fleet.racks[name]), "boot")
            for name in names
        ]
        self.scheduler = MemoryScheduler(nodes, self.clock)
        self.workloads = MemoryWorkloads([], self.clock)
        ledger = SqliteLedger(None)
        self.diagnostic: BlindDiagnostic | None = None
        if diagnostic is not None:
            blind = BlindDiagnostic(self.clock, diagnostic)
            sees = SightedDiagnostic(self.clock, diagnostic, fleet, right_within)
            self.diagnostic = sees if sighted else blind
        settings = EvacuationSettings(
            enabled=True, verification=VerificationSettings(method="none" if diagnostic is None else "scheduler")
        )
        evacuation = Evacuation(self.scheduler, self.workloads, self.clock, settings, {}, self.diagnostic)
        verified = VerifiedFacts(facts, evacuation.results)
        self.controller = Controller(
            self.scheduler, risks(self.clock), verified, ledger, self.clock, policy, ControllerSettings(),
            holder="benchmark", code="benchmark", evacuation=evacuation,
        )  # fmt: skip
        self.count = Count()
        self._jobs = _by_node(fleet.jobs)
        self._left: dict[str, datetime] = {}  # jobs that are not on their node any more, since when
        self._known: set[str] = set()
        self._asked: dict[str, datetime] = {}
        self._failures = [failure for failure in fleet.failures if fleet.begin <= failure.at < fleet.end]
        self._next = 0
        self._out: set[str] = set()

    def run(self, times: Iterable[datetime]) -> Count:
        """Go round at some times, in order, and count."""
        todo = sorted(times)
        while todo:
            at = heapq.heappop(todo)
            if at <= self.clock.now() or at >= self.fleet.end:
                continue
            self._round(at)
            for more in _FURTHER:
                if not any(level is Level.DRAINED and self._busy(name) for name, level in self._levels().items()):
                    break
                self._round(at + more)
            if self.diagnostic is not None:  # its result is read, and then decided on
                for begun in self.diagnostic.begun.values():
                    ends = begun + self.diagnostic.takes
                    for more in (MINUTE, 2 * MINUTE):
                        if ends + more > self.clock.now() and ends + more not in todo:
                            heapq.heappush(todo, ends + more)
        self._pass_to(self.fleet.end)
        return self.count

    def _round(self, at: datetime) -> None:
        self._pass_to(at)
        self._show(at)
        before = self._levels()
        report = self.controller.round()
        if report.errors:
            raise SystemExit(f"the controller failed at {at}: {report.errors}")
        for uid, workload in list(self.workloads.running.items()):
            if workload.ending and uid not in self._left:
                self._left[uid] = at + self.assumed.leave
                self.count.moved += 1
                work = self.assumed.checkpoint if workload.checkpoint is not None else timedelta(0)
                assert workload.job is not None
                self.count.spent += workload.job.gpus * ((work + self.assumed.restart) / HOUR)
        after = self._levels()
        for name, level in after.items():
            if level is Level.DRAINED and before.get(name) is not Level.DRAINED:
                self._drained(name, at)
        self._out = {name for name, level in after.items() if level.hard}
        self.count.most_out = max(self.count.most_out, len(self._out))

    def _drained(self, node: str, at: datetime) -> None:
        self.count.drains += 1
        self.count.unneeded += not self.fleet.needed(node, at, self.right_within)

    def _pass_to(self, to: datetime) -> None:
        """Let jobs begin and GPUs fail up to a time, with the marks that stand since the last round."""
        since = self.clock.now()
        for node in self._out:
            gpus = sum(1 for _ in self._units(node, since))
            self.count.idle += gpus * ((to - since - self._down_within(node, since, to)) / HOUR)
            for job in self._jobs[node]:
                if since < job.began <= to:
                    self._left.setdefault(job.name, job.began)  # it begins elsewhere
        while self._next < len(self._failures) and self._failures[self._next].at <= to:
            failure = self._failures[self._next]
            self._next += 1
            self.count.failures += 1
            met = self.fleet.hit(failure)
            if met is not None and not self._gone(met.name, failure.at):
                self.count.hits += 1
                self.count.lost += lost_in(met, failure, self.assumed)
        self.clock.move(to - since)

    def _show(self, at: datetime) -> None:
        """Let the scheduler see what runs and what is down now."""
        for uid, ask in self.workloads.asked.items():
            if at - self._asked.setdefault(uid, at) >= self.assumed.checkpoint:
                self.workloads.written.add(ask.key)
        running: dict[str, Workload] = {}
        for name, known in self.scheduler.nodes.items():
            jobs = [job for job in self._jobs[name] if job.runs(at) and not self._gone(job.name, at)]
            views = tuple(_view(job) for job in jobs)
            for job, view in zip(jobs, views, strict=True):
                held = self.workloads.running.get(job.name)
                offer = CheckpointOffer("scheduler") if view.can_checkpoint else None
                running[job.name] = held or Workload(job.name, job.name, "job", name, job=view, checkpoint=offer)
            down = any(failure.node == name and failure.at <= at < failure.repaired for failure in self.fleet.failures)
            base = replace(known.base, jobs=views, down=down, units=tuple(map(UnitView, self._units(name, at))))
            if base != known.base:
                self.scheduler.edit(name, lambda node, base=base: replace(node, base=base))  # type: ignore[misc]
        self.workloads.running = running

    def _busy(self, node: str) -> bool:
        return any(workload.node == node for workload in self.workloads.running.values())

    def _gone(self, job: str, at: datetime) -> bool:
        left = self._left.get(job)
        return left is not None and left <= at

    def _units(self, node: str, at: datetime) -> Sequence[str]:
        return [
            place.gpu
            for place in self.fleet.places
            if place.node == node and place.since <= at and (place.until is None or at < place.until)
        ]

    def _down_within(self, node: str, since: datetime, to: datetime) -> timedelta:
        spans = [(max(f.at, since), min(f.repaired, to)) for f in self.fleet.failures if f.node == node]
        down, reached = timedelta(0), since
        for begin, end in sorted(spans):
            down += max(timedelta(0), end - max(begin, reached))
            reached = max(reached, end)
        return down

    def _levels(self) -> dict[str, Level]:
        now = self.clock.now()
        levels = {
            name: marks_of(node.object, self.scheduler.keys, now).level for name, node in self.scheduler.nodes.items()
        }
        return {name: level for name, level in levels.items() if level}


def _view(job: Job) -> JobView:
    # when it will end and when it last wrote a checkpoint is not known to a scheduler
    return JobView(job.name, job.gpus, job.began, can_checkpoint=job.saved is not None)


def _by_node(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    by_node: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        by_node[job.node].append(job)
    return by_node
