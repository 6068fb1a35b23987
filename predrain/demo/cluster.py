"""Simulated cluster in memory under the real controller.

The controller is real: policy, budgets, breaker, re-validation and evacuation. Scheduler and workloads are those of its
tests, in memory. :mod:`evaluation.value.gpu_hours` counts the outcomes of its drains. The only replay of a history is
:mod:`evaluation.value.controller_replay`, whose tests compare it with this cluster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd

from evaluation.value.controller_replay import Diagnostic, finds, procedure
from evaluation.value.load import LEAVE, Placements, ReplayedFleet, job_views
from evaluation.value.marks import ReplayMarks
from foundation.times import NEVER, duration_ms, instant_ms
from policy.config import PolicyConfig
from policy.episodes import Bools, Ints
from policy.fleet import Level, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.remedies import Remedy
from policy.plan import NodeDecision
from policy.tiers import may_use_risk
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts, facts_at
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import EvacuationSettings, VerificationSettings
from scheduler.file import MemoryNode, MemoryScheduler, MemoryWorkloads
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from scheduler.ports.node_object import NodeObject
from scheduler.ports.protocols import RiskSource
from scheduler.ports.readings import WriteResult
from scheduler.ports.risks import ReportedFacts
from scheduler.ports.workloads import CheckpointOffer, DiagnosticResult, Fence, Workload

MINUTE: Final = timedelta(minutes=1)
_FURTHER: Final = (1 * MINUTE, 6 * MINUTE, 8 * MINUTE)
"""Times of further rounds after a drain: request, response, jobs gone. A controller runs every minute; in the rounds
between, nothing changes here."""

_PROBE: Final = ProbeConfig().duration


class InMemoryDiagnostic:
    """Simulated remedies and diagnostics: they take time, and find nothing, or every failure up to ``within`` ahead."""

    def __init__(
        self,
        clock: ManualClock,
        costs: CostBenefitConfig,
        fleet: ReplayedFleet,
        within: timedelta,
        diagnostic: Diagnostic,
    ) -> None:
        self.runs: dict[str, tuple[datetime, Remedy | None]] = {}
        self.probes: dict[str, list[int]] = {}
        """Node, start, end, whether it was preempted, and failure found (-1: none) of each probe, by its key."""
        self.failed: dict[str, datetime] = {}
        self._clock, self._costs, self._fleet, self._within, self._kind = clock, costs, fleet, within, diagnostic

    def start(
        self,
        node: str,
        units: Sequence[str],
        key: str,
        fence: Fence,
        remedy: Remedy | None = None,
        *,
        probe: bool = False,
    ) -> WriteResult:
        """Start a diagnostic."""
        if key in self.runs:
            return WriteResult("already")
        self.runs[key] = now, _ = self._clock.now(), "diagnose" if node in self.failed else remedy
        if probe:
            begin = instant_ms(now)
            self.probes[key] = [self._fleet.names.get_loc(node), begin, begin + duration_ms(_PROBE), 1, -1]
        return WriteResult("done")

    def ends(self, key: str) -> datetime | None:
        """Return when a diagnostic ends; None: none is run."""
        began, remedy = self.runs[key]
        if key in self.probes:
            return began + _PROBE
        takes = procedure(remedy, self._kind, self._costs)
        return None if takes is None else began + takes

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Return the result of a diagnostic, which may still be running."""
        if key not in self.runs:
            return DiagnosticResult("missing")
        (began, remedy), ends = self.runs[key], self.ends(key)
        if ends is None:
            return DiagnosticResult("inconclusive", "no diagnostic is run")
        if self._clock.now() < ends:
            return DiagnosticResult("running")
        ended_ms, place = instant_ms(ends), self._fleet.names.get_loc(node)
        ahead = (self._fleet.failed == place) & (self._fleet.at <= ended_ms + duration_ms(self._within))
        faults = np.flatnonzero(ahead & (ended_ms < self._fleet.until))
        if key in self.probes:
            self.probes[key][2:] = [ended_ms, 0, int(faults[0]) if len(faults) else -1]
        sick = tuple(self._fleet.unit[fault] for fault in faults)
        if not ((finds(remedy, self._kind) or key in self.probes) and sick):
            return DiagnosticResult("passed", at=ends)
        self.failed.setdefault(node, began if remedy == "replace" else ends)
        return DiagnosticResult("failed", "a fault", () if "" in sick else sick, ends)

    def drop(self, node: str, key: str) -> None:
        """Forget a diagnostic."""
        self.runs.pop(key, None)
        if key in self.probes and self.probes[key][3]:
            self.probes[key][2] = min(self.probes[key][2], instant_ms(self._clock.now()))


class SimulatedCluster:
    """The cluster, under a controller; arguments as for :class:`evaluation.value.controller_replay.Controlled`.

    ``clock``: at the start of the fleet's period.
    ``gangs_avoid``: new jobs respect soft taints while GPUs are free.

    A job that is moved, or would have started on a node out of service, runs elsewhere. Nodes fail at their recorded
    times, drained or not.
    """

    def __init__(
        self,
        fleet: ReplayedFleet,
        risks: RiskSource,
        events: Sequence[Mapping[str, Any]],
        jobs: Placements,
        policy: PolicyConfig,
        clock: ManualClock,
        ledger: SqliteLedger,
        *,
        diagnostic: Diagnostic,
        reach: timedelta,
        gangs_avoid: bool = False,
    ) -> None:
        self._gangs_avoid = gangs_avoid
        self.fleet, self.jobs, self.policy, self.clock = fleet, jobs, policy, clock
        nodes = [MemoryNode(NodeObject(node.name), node, "boot") for node in fleet.nodes]
        self.scheduler = MemoryScheduler(nodes, self.clock)
        self.workloads = MemoryWorkloads()
        self.diagnostic = InMemoryDiagnostic(self.clock, policy.cost_benefit, fleet, reach, diagnostic)
        method = VerificationSettings(method="scheduler", timeout=timedelta(days=9))
        evacuation = Evacuation(
            self.scheduler, self.workloads, self.clock, EvacuationSettings(enabled=True, verification=method), {},
            self.diagnostic, self.diagnostic if "probe" in policy.rungs else None,
        )  # fmt: skip
        self.controller = Controller(
            self.scheduler, risks, VerifiedFacts(_Reported(events), evacuation.results), ledger, self.clock, policy,
            ControllerSettings(), holder="replay", code="replay", evacuation=evacuation,
        )  # fmt: skip
        self.left = np.full(len(jobs.node), NEVER)
        self._requested_at: dict[str, datetime] = {}
        self.checkpoints: dict[str, tuple[int, int]] = {}
        """Job and time of each checkpoint requested while the job's node stayed in service, by key."""
        self.softly: list[list[int]] = []
        """Rows of :class:`ReplayMarks` for the periods in which nodes had a soft taint."""
        self.swaps: set[tuple[int, int]] = set()
        """Node and start of the marks whose jobs ended by themselves, or have not ended yet."""
        self._high: Bools = np.zeros(len(fleet.nodes), dtype=np.bool_)
        self._soft: dict[int, list[int]] = {}
        self._rows: list[list[int]] = []
        self._open: dict[int, list[int]] = {}

    def marks_by(self, until_ms: int) -> ReplayMarks:
        """Return the marks until a time; active marks end there."""
        return ReplayMarks.of([[*row[:2], min(row[2], until_ms), *row[3:]] for row in self._rows])

    def follow(self, now: datetime) -> None:
        """Run further rounds, as a controller does every minute, while jobs leave the nodes drained at ``now``."""
        for delay in _FURTHER:
            drained = {name for name, level in self._levels().items() if level is Level.DRAIN}
            if not any(workload.node in drained for workload in self.workloads.running.values()):
                return
            self.go_round(now + delay)

    def go_round(self, now: datetime) -> Mapping[str, NodeDecision]:
        """Run a round, and return the decisions by node."""
        since = self.clock.now()
        started = np.flatnonzero((self.jobs.start > instant_ms(since)) & (self.jobs.start <= instant_ms(now)))
        started = started[self._elsewhere(started, instant_ms(now))]
        self.left[started] = np.minimum(self.left[started], self.jobs.start[started])
        self.clock.move(now - since)
        self._show(now)
        report = self.controller.round()
        if report.errors:
            raise SystemExit(f"the controller failed at {now}: {report.errors}")
        for uid, workload in self.workloads.running.items():
            if workload.ending:
                self.left[int(uid)] = min(self.left[int(uid)], instant_ms(now + LEAVE))
        levels = self._levels()
        for uid, ask in self.workloads.asked.items():
            if ask.key not in self._requested_at and not levels[self.fleet.nodes[self.jobs.node[int(uid)]].name].hard:
                self.checkpoints[ask.key] = int(self.jobs.job[int(uid)]), instant_ms(now)
            self._requested_at.setdefault(ask.key, now)
        decisions: Mapping[str, NodeDecision] = {} if report.plan is None else report.plan.nodes
        self._high[:] = [node.name in decisions and decisions[node.name].tier == "high" for node in self.fleet.nodes]
        busy = {workload.node for workload in self.workloads.running.values()}
        for place, level in enumerate(levels.values()):
            self._follow_soft(place, level, now)
            if level.hard and place not in self._open:
                self._open[place] = [place, instant_ms(now), NEVER, NEVER, NEVER]
                self._rows.append(self._open[place])
            if level is Level.SWAP:
                self.swaps.add((place, self._open[place][1]))
            if level is Level.DRAIN and self._open[place][3] == NEVER:
                self._open[place][3] = instant_ms(now)
                if self.fleet.nodes[place].name in busy:
                    self.swaps.discard((place, self._open[place][1]))
            found_at = self.diagnostic.failed.get(self.fleet.nodes[place].name)
            if level is Level.DRAIN and found_at is not None:
                self._open[place][4] = min(self._open[place][4], instant_ms(found_at))
            if not level.hard and place in self._open:
                self.diagnostic.failed.pop(self.fleet.nodes[place].name, None)
                self._open.pop(place)[2] = instant_ms(now)
                self.left[self.jobs.node == place] = NEVER  # jobs are back
        return decisions

    def _follow_soft(self, place: int, level: Level, now: datetime) -> None:
        if level is Level.AVOID and place not in self._soft:
            self._soft[place] = [place, instant_ms(now), self.fleet.end, NEVER, NEVER]
            self.softly.append(self._soft[place])
        elif level is not Level.AVOID and place in self._soft:
            self._soft.pop(place)[2] = instant_ms(now)
            if not level.hard:
                self.left[self.jobs.node == place] = NEVER  # jobs are back

    def _elsewhere(self, started: Ints, now: int) -> Bools:
        """Return which of the starting jobs run elsewhere, because their node is out of service or at risk."""
        jobs, fleet, level = self.jobs, self.fleet, np.array(list(self._levels().values()))
        hard, usable = level >= Level.SWAP, level < Level.AVOID
        usable[list(fleet.down(now))] = False
        runs = jobs.running(now, self.left)
        free = fleet.gpus[usable].sum() - jobs.gpus[runs[usable[jobs.node[runs]]]].sum()
        node = jobs.node[started]
        avoids = np.logical_not(may_use_risk(jobs.size[started], high=self._high[node]))
        avoids &= self._gangs_avoid & (level[node] == Level.AVOID) & (jobs.gpus[started] <= free)
        return np.asarray(hard[node] | avoids)

    def _show(self, now: datetime) -> None:
        """Update running jobs and down nodes in the scheduler."""
        takes = self.policy.cost_benefit.checkpoint
        self.workloads.written |= {key for key, asked_at in self._requested_at.items() if now - asked_at >= takes}
        now_ms, jobs = instant_ms(now), self.jobs
        running: dict[str, Workload] = {}
        present = jobs.running(now_ms, self.left)
        down = self.fleet.down(now_ms)
        for place, installed in enumerate(self.fleet.installations):
            name = self.fleet.nodes[place].name
            views = []
            entries = present[(jobs.node[present] == place) & (place not in down)]
            for entry, view in zip(entries, job_views(jobs, entries, now_ms), strict=True):
                offer = CheckpointOffer("scheduler") if view.can_checkpoint else None
                workload = self.workloads.running.get(str(entry))
                running[str(entry)] = workload or Workload(
                    view.name, str(entry), "job", name, job=view, checkpoint=offer
                )
                views.append(view)
            units = tuple(UnitView(unit) for unit, since, until in installed if since <= now_ms < until)
            base = replace(self.fleet.nodes[place], jobs=tuple(views), down=place in down, units=units)
            if base != self.scheduler.nodes[name].base:
                self.scheduler.edit(name, partial(replace, base=base))
        self.workloads.running = running

    def _levels(self) -> dict[str, Level]:
        return {reading.view.name: reading.view.marks.level for reading in self.scheduler.read_fleet().nodes}


class _Reported:
    """Facts about units from events."""

    unreadable_events = 0

    def __init__(self, events: Sequence[Mapping[str, object]]) -> None:
        self._events = [
            row
            | {name: pd.Timestamp(row[name]).to_pydatetime() for name in ("timestamp", "known_at")}  # for the ledger
            for row in map(dict, events)
        ]

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return the facts known at ``now``."""
        return facts_at(self._events, now)
