"""Replay of probes on idle nodes, and of checkpoint requests to jobs on nodes at risk.

The controller's own :func:`policy.ladder.requests.requests_of` decides on requests; diagnostics and jobs are simulated.
A passed probe lowers the node's risk for every rung.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Final

import numpy as np

from evaluation.value.load import HOUR_MS, Placements, ReplayedFleet, job_views
from evaluation.value.marks import ReplayMarks
from evaluation.value.readings import Readings
from foundation.instants import from_ms
from foundation.times import NEVER, duration_ms
from policy.config import PolicyConfig
from policy.episodes import Bools, Floats, Ints
from policy.fleet import JobView, Signals, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.requests import Candidate, FleetRisk, requests_of, risk_after_pass
from policy.node_tier.hysteresis import changed
from policy.plan import LastRequest

_MINUTE_MS: Final = 60_000
"""Interval of the controller's rounds."""

_LONG_AGO: Final = -(10**15)
"""Stands for never; as a duration in microseconds, the time since then still fits into 64 bits."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Diagnostics on idle nodes; arrays of shape (probes,).

    ``begin``, ``end``: in milliseconds; a preempted probe ends when the job starts.
    ``failure``: position of the failure it found; -1: none.
    """

    node: Ints
    begin: Ints
    end: Ints
    preempted: Bools
    failure: Ints

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "Probes":
        """Build from rows of ``node``, ``begin``, ``end``, ``preempted`` and ``failure``."""
        node, begin, end, preempted, failure = np.array(list(rows), dtype=np.int64).reshape(-1, 5).T
        return cls(node, begin, end, preempted.astype(np.bool_), failure)

    def repairs(self, fleet: ReplayedFleet) -> list[list[int]]:
        """Return rows of :class:`ReplayMarks`: a node with a found fault is out of service until its repair ends."""
        hit = self.failure >= 0
        repaired_at = fleet.until[self.failure[hit]]
        ends = self.end[hit]
        return np.column_stack([self.node[hit], ends, repaired_at, ends, ends]).tolist()

    def spent(self, fleet: ReplayedFleet, jobs: Placements, config: ProbeConfig) -> Floats:
        """Return the cost of each probe in GPU-hours: energy and wear, and delayed jobs."""
        hours = fleet.gpus[self.node] * (self.end - self.begin) / HOUR_MS * config.idle_cost
        delay = config.preemption / timedelta(hours=1)
        for probe in np.flatnonzero(self.preempted):
            on_node = slice(*np.searchsorted(jobs.node, (self.node[probe], self.node[probe] + 1)))
            starts = jobs.start[on_node] == self.end[probe]
            hours[probe] += float(jobs.size[on_node][starts].sum()) * delay
        return hours


_NONE: Final = np.array([], dtype=np.int64)
NO_PROBES: Final = Probes(_NONE, _NONE, _NONE, _NONE.astype(np.bool_), _NONE)


def findable(fleet: ReplayedFleet, shares: Mapping[str, float], seed: int) -> Bools:
    """Sample which failures a diagnostic can find before they start, fixed for the whole replay.

    ``shares``: share by failure family; a larger share finds a superset of a smaller one.
    """
    share = np.array([shares.get(family, shares.get("other", 0.0)) for family in fleet.family], dtype=np.float64)
    return np.asarray(np.random.default_rng(seed).random(len(fleet.at)) < share)


def node_risks(fleet: ReplayedFleet, scores: Readings, sensitivity: float = 0.0) -> Floats:
    """Return the risk of each node at each decision; NaN: unknown; shape (decisions, nodes).

    ``sensitivity``: sensitivity of a diagnostic that all units have passed; 0: none.
    """
    rows = [(place, *unit) for place, units in enumerate(fleet.installations) for unit in units]
    code = scores.units.get_indexer([name for _, name, _, _ in rows])
    place, since, until = np.array([(place, since, until) for place, _, since, until in rows], dtype=np.int64).T
    risks = np.full((len(scores), len(fleet.nodes)), np.nan)
    for number, reading in enumerate(scores):
        installed = (since <= reading.at) & (reading.at < until) & (code >= 0)
        # log1p(-1) would be infinite.
        risk = risk_after_pass(np.minimum(reading.risk[code[installed]], 1 - 1e-12), sensitivity)
        known, node = ~np.isnan(risk), place[installed]
        total = np.bincount(node[known], np.log1p(-risk[known]), len(fleet.nodes))
        scored = np.bincount(node[known], minlength=len(fleet.nodes)) > 0
        risks[number, scored] = -np.expm1(total[scored])
    return risks


def idle_times(fleet: ReplayedFleet, jobs: Placements) -> list[tuple[int, int, int]]:
    """Return start, end and node of the intervals in which a node has no job and is not down, in order of time."""
    node = np.concatenate([jobs.node, fleet.failed])
    begin, end = np.concatenate([jobs.start, fleet.at]), np.concatenate([jobs.end, fleet.until])
    order = np.lexsort((begin, node))
    bounds = np.searchsorted(node[order], np.arange(len(fleet.nodes) + 1))
    gaps: list[tuple[int, int, int]] = []
    for place, rows in enumerate(pairwise(bounds)):
        on_node = order[slice(*rows)]
        since = np.maximum.accumulate(np.concatenate([[fleet.begin], end[on_node]]))
        until = np.minimum(np.concatenate([begin[on_node], [fleet.end]]), fleet.end)
        gaps += [(*gap, place) for gap in zip(since.tolist(), until.tolist(), strict=True) if gap[1] > gap[0]]
    return sorted(gaps)


_FREE: Final[Mapping[str, str | None]] = {"probe": None, "checkpoint": None}


class ProbeReplay:
    """Replay of probes, with a round at each decision, and at each minute in which a node becomes idle or a probe ends.

    ``available_ms``: when the scores of each decision are available; ``risks``: from :func:`node_risks`;
    ``passed``: the same after a passed diagnostic.
    ``found``: failures that a diagnostic finds if they start within ``reach`` of its end.
    """

    def __init__(
        self,
        fleet: ReplayedFleet,
        jobs: Placements,
        available_ms: list[int],
        risks: Floats,
        passed: Floats,
        found: Bools,
        reach: timedelta,
        policy: PolicyConfig,
    ) -> None:
        self._fleet, self._available_ms, self._findable = fleet, available_ms, found
        self._risks, self._passed_risks = risks, passed
        self._policy, self._reach = policy, duration_ms(reach)
        self._gaps = deque(idle_times(fleet, jobs))
        self._views = [
            replace(node, units=tuple(UnitView(f"{unit}") for unit in range(gpus)))
            for node, gpus in zip(fleet.nodes, fleet.gpus.tolist(), strict=True)
        ]
        self._place = {view.name: place for place, view in enumerate(self._views)}
        nodes = len(fleet.nodes)
        self._idle_until = np.zeros(nodes, dtype=np.int64)  # end of the last idle interval that began, by node
        self._closed = np.zeros(nodes, dtype=np.bool_)
        self._broken_until = np.zeros(nodes, dtype=np.int64)
        self._passed_at = np.full(nodes, _LONG_AGO)
        self._probed: dict[int, LastRequest] = {}
        self._probed_at, self._probed_risk = np.full(nodes, _LONG_AGO), np.zeros(nodes)
        # cache by decision and nodes with a risk lowered by a passed probe: risks of all nodes, and their mean
        self._known, self._lowered = -1, np.zeros(nodes, dtype=np.bool_)
        self._risk, self._mean_risk = np.full(nodes, np.nan), 0.0
        self._running: dict[int, list[int]] = {}
        self._rows: list[list[int]] = []
        self._rounds = sorted({*available_ms, *(_next_round(since) for since, *_ in self._gaps)})

    @property
    def next_round(self) -> int:
        """Time of the next round; :data:`foundation.times.NEVER` if there is none."""
        return self._rounds[0] if self._rounds else NEVER

    @property
    def probes(self) -> Probes:
        """Probes so far."""
        return Probes.of(self._rows)

    def passes(self, now: int) -> Mapping[int, int]:
        """Return when each node whose risk is lowered passed its probe, by position."""
        self._settle(now)
        return {place: int(self._passed_at[place]) for place in np.flatnonzero(self._is_lowered(now)).tolist()}

    def _is_lowered(self, now: int) -> Bools:
        return np.asarray(now < self._passed_at + duration_ms(self._policy.probes.lowers_for))

    def set_closed(self, places: Iterable[int], now: int) -> None:
        """Set the nodes out of service; their running probes are aborted."""
        self._settle(now)
        closed = np.zeros(len(self._views), dtype=np.bool_)
        closed[[*places]] = True
        for place, row in self._running.items():
            if closed[place]:
                row[2:] = [now, 1, -1]
        if (self._closed & ~closed).any():
            heapq.heappush(self._rounds, _next_round(now))
        self._closed = closed

    def _settle(self, now: int) -> None:
        """Record the results of the probes that have ended."""
        for place, (_, _, ends, preempted, failure) in [*self._running.items()]:
            if ends <= now:
                del self._running[place]
                if failure >= 0:
                    self._broken_until[place] = int(self._fleet.until[failure])
                elif not preempted:
                    self._passed_at[place] = ends

    def go_round(self) -> list[tuple[int, int]]:
        """Run one round; return the nodes whose probes start, each with the end of its probe."""
        now, config = heapq.heappop(self._rounds), self._policy.probes
        while self._rounds and self._rounds[0] == now:
            heapq.heappop(self._rounds)
        while self._gaps and self._gaps[0][0] <= now:
            _, until, place = self._gaps.popleft()
            self._idle_until[place] = until
        self._settle(now)
        known = bisect_right(self._available_ms, now) - 1
        if known < 0 or np.isnan(self._risks[known]).all():
            return []
        lowered = self._is_lowered(now)
        if known != self._known or (lowered != self._lowered).any():
            self._known, self._lowered = known, lowered
            self._risk = np.where(lowered, self._passed_risks[known], self._risks[known])
            self._mean_risk = float(np.nanmean(self._risk))
        idle = (self._idle_until > now) & ~self._closed & (self._broken_until <= now) & ~np.isnan(self._risk)
        rested = (now - self._probed_at).view("timedelta64[ms]")
        is_due = config.is_due(self._risk, rested, self._mean_risk)
        is_due |= config.is_new(self._risk, self._probed_risk, self._mean_risk)
        places = np.flatnonzero(idle & is_due).tolist()
        if not places:
            return []
        decided_at = from_ms(self._available_ms[known])
        ends = decided_at + self._policy.horizon
        candidates = [
            Candidate(
                self._views[place], float(self._risk[place]), decided_at, ends, _FREE, True, self._probed.get(place)
            )
            for place in places
        ]
        running = tuple(self._views[place].name for place in self._running)
        signals = Signals(read_at=from_ms(now), probes=running)
        fleet = FleetRisk(self._mean_risk, int(idle.sum()))
        requests, _, _ = requests_of(candidates, fleet, signals, {}, self._policy, from_ms(now))
        started = []
        for request in requests:
            place = self._place[request.node]
            self._probed[place] = LastRequest(from_ms(now), request.risk, decided_at)
            self._probed_at[place], self._probed_risk[place] = now, request.risk
            started.append((place, self._begin(place, now)))
        return started

    def _begin(self, place: int, now: int) -> int:
        fleet, takes = self._fleet, duration_ms(self._policy.probes.duration)
        ends = min(now + takes, int(self._idle_until[place]))
        preempted, failure = ends < now + takes, -1
        if not preempted:
            is_ahead = (fleet.failed == place) & (fleet.at > ends) & (fleet.at <= ends + self._reach) & self._findable
            failure = int(is_ahead.argmax()) if is_ahead.any() else -1
        self._running[place] = [place, now, ends, preempted, failure]
        self._rows.append(self._running[place])
        heapq.heappush(self._rounds, _next_round(ends))
        return ends


def replay_probes(replay: ProbeReplay, closed: ReplayMarks) -> Probes:
    """Run all rounds; ``closed``: intervals in which nodes are out of service and not probed."""
    turns = sorted({*closed.at.tolist(), *closed.until.tolist()})
    while replay.next_round < NEVER:
        while turns and turns[0] <= replay.next_round:
            now = turns.pop(0)
            replay.set_closed(closed.node[(closed.at <= now) & (now < closed.until)].tolist(), now)
        replay.go_round()
    return replay.probes


def after_passes(available_ms: list[int], risks: Floats, passed: Floats, probes: Probes, config: ProbeConfig) -> Floats:
    """Return the risks at each decision, lowered for nodes that recently passed a probe."""
    lowered, times = risks.copy(), np.array(available_ms)
    is_pass = (probes.failure < 0) & ~probes.preempted
    for node, end in zip(probes.node[is_pass], probes.end[is_pass], strict=True):
        rows = (times >= end) & (times < end + duration_ms(config.lowers_for))
        lowered[rows, node] = passed[rows, node]
    return lowered


def _next_round(time_ms: int) -> int:
    return -(-time_ms // _MINUTE_MS) * _MINUTE_MS


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Requested checkpoints, ordered by time; arrays of shape (checkpoints,)."""

    job: Ints
    at: Ints
    hours: Floats

    @classmethod
    def of(cls, jobs: Placements, rows: Iterable[tuple[int, int]], costs: CostBenefitConfig) -> "Checkpoints":
        """Build from rows of job and time."""
        job, at = np.array(list(rows), dtype=np.int64).reshape(-1, 2).T
        sizes = dict(zip(jobs.job.tolist(), jobs.size.tolist(), strict=True))
        hours = [sizes[job_number] * (costs.checkpoint / timedelta(hours=1)) for job_number in job.tolist()]
        return cls(job, at, np.array(hours, dtype=np.float64))

    def unsaved(self, job: int, stop_ms: int) -> int:
        """Return the time since a job's last requested checkpoint, in milliseconds; ``NEVER`` if there is none."""
        requests = self.at[(self.job == job) & (self.at <= stop_ms)]
        return stop_ms - int(requests[-1]) if len(requests) else NEVER


NO_CHECKPOINTS: Final = Checkpoints(_NONE, _NONE, _NONE.astype(np.float64))


def replay_checkpoints(
    fleet: ReplayedFleet, jobs: Placements, available_ms: list[int], risks: Floats, policy: PolicyConfig
) -> Checkpoints:
    """Replay checkpoint requests at each decision; ``available_ms``, ``risks``: as for :class:`ProbeReplay`."""
    if not np.any(jobs.on_request) or not len(jobs.job):
        return NO_CHECKPOINTS
    cost, jobs_of = duration_ms(policy.cost_benefit.checkpoint), int(jobs.job.max()) + 1
    last_asked = np.full(jobs_of, -1)
    remembered: Mapping[str, LastRequest] = {}
    rows: list[tuple[int, int]] = []
    for number, now in enumerate(available_ms):
        runs = np.flatnonzero((jobs.start <= now) & (jobs.end > now) & ~np.isnan(risks[number, jobs.node]))
        # prefilter by upper bounds: the interval bounds the unsaved work, the sum of node risks bounds the job's risk
        highest_risk = np.bincount(jobs.job[runs], risks[number, jobs.node[runs]], jobs_of)
        runs = runs[jobs.every[runs] * highest_risk[jobs.job[runs]] > cost]
        views: dict[int, JobView] = {}
        on_node: defaultdict[int, list[JobView]] = defaultdict(list)
        names: dict[str, int] = {}
        for entry, view in zip(runs.tolist(), job_views(jobs, runs, now), strict=True):
            job, saved_at = int(jobs.job[entry]), view.checkpointed_at
            if saved_at is not None and last_asked[job] >= 0:
                saved_at = max(saved_at, from_ms(int(last_asked[job])))
            views.setdefault(job, changed(view, checkpointed_at=saved_at))
            on_node[int(jobs.node[entry])].append(views[job])
            names[view.name] = job
        decided_at = from_ms(now)
        candidates = [
            Candidate(
                changed(fleet.nodes[place], jobs=tuple(running)), float(risks[number, place]), decided_at,
                decided_at + policy.horizon, _FREE, idle=False,
            )
            for place, running in on_node.items()
        ]  # fmt: skip
        signals = Signals(read_at=decided_at, checkpoints=True)
        requests, _, remembered = requests_of(candidates, FleetRisk(0.0, 0), signals, remembered, policy, decided_at)
        for job in (names[name] for request in requests for name in request.jobs):
            last_asked[job] = now
            rows.append((job, now))
    return Checkpoints.of(jobs, rows, policy.cost_benefit)
