"""The cheap rungs in a fleet's past: probes of idle nodes, and checkpoints that jobs on nodes at risk are asked for.

What is requested is decided by the controller's own :func:`policy.ladder.requests.requests_of`, in a group that has
earned it; simulated are the diagnostic and the jobs. Taints and drains do not know of probes that passed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Final

import numpy as np

from evaluation.value.controller_replay import ReplayedFleet, job_views
from evaluation.value.load import HOUR_MS, Placements
from evaluation.value.marks import ReplayMarks
from evaluation.value.readings import Readings, instant
from features.times import NEVER, duration_ms
from policy.config import PolicyConfig
from policy.episodes import Bools, Floats, Ints
from policy.fleet import JobView, Signals, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.requests import Candidate, requests_of, risk_after_pass
from policy.plan import LastRequest

_MINUTE_MS: Final = 60_000
"""The controller goes round each minute."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Diagnostics on idle nodes; all of shape (probes,).

    ``begin``, ``end``: in milliseconds; ``end`` of one that is preempted is the start of the job.
    ``failure``: the failure that it found, as a position in the fleet's; -1: none.
    """

    node: Ints
    begin: Ints
    end: Ints
    preempted: Bools
    failure: Ints

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Probes:
        """Take rows of these."""
        node, begin, end, preempted, failure = np.array(list(rows), dtype=np.int64).reshape(-1, 5).T
        return cls(node, begin, end, preempted.astype(np.bool_), failure)

    def repairs(self, fleet: ReplayedFleet) -> list[list[int]]:
        """Return rows of :class:`ReplayMarks`: a node with a found fault is out of service until it is over."""
        hit = self.failure >= 0
        over = fleet.until[self.failure[hit]]
        ends = self.end[hit]
        return np.column_stack([self.node[hit], ends, over, ends, ends]).tolist()

    def spent(self, fleet: ReplayedFleet, jobs: Placements, config: ProbeConfig) -> Floats:
        """Return the GPU-hours that each costs: energy and wear, and the jobs that it delayed."""
        hours = fleet.gpus[self.node] * (self.end - self.begin) / HOUR_MS * config.idle_cost
        delay = config.preemption / timedelta(hours=1)
        for probe in np.flatnonzero(self.preempted):
            mine = slice(*np.searchsorted(jobs.node, (self.node[probe], self.node[probe] + 1)))
            starts = jobs.start[mine] == self.end[probe]
            hours[probe] += float(jobs.size[mine][starts].sum()) * delay
        return hours


_NONE: Final = np.array([], dtype=np.int64)
NO_PROBES: Final = Probes(_NONE, _NONE, _NONE, _NONE.astype(np.bool_), _NONE)


def findable(fleet: ReplayedFleet, found: Mapping[str, float], seed: int) -> Bools:
    """Draw which failures a diagnostic can find before they begin: each once and for all.

    ``found``: the share by failure family. A larger share finds what a smaller one does, and more.
    """
    share = np.array([found.get(family, found.get("other", 0.0)) for family in fleet.family], dtype=np.float64)
    return np.asarray(np.random.default_rng(seed).random(len(fleet.at)) < share)


def node_risks(fleet: ReplayedFleet, scores: Readings, found: float = 0.0) -> Floats:
    """Return the risk of each node at each decision; NaN: not known; shape (decisions, nodes).

    ``found``: share found by a diagnostic that all units have passed; 0: they have passed none.
    """
    stays = [(place, *stay) for place, units in enumerate(fleet.stays) for stay in units]
    code = scores.units.get_indexer([name for _, name, _, _ in stays])
    place, since, until = np.array([(place, since, until) for place, _, since, until in stays], dtype=np.int64).T
    risks = np.full((len(scores), len(fleet.nodes)), np.nan)
    for number, reading in enumerate(scores):
        here = (since <= reading.at) & (reading.at < until) & (code >= 0)
        risk = risk_after_pass(np.minimum(reading.risk[code[here]], 1 - 1e-12), found)
        known, of = ~np.isnan(risk), place[here]
        total = np.bincount(of[known], np.log1p(-risk[known]), len(fleet.nodes))
        scored = np.bincount(of[known], minlength=len(fleet.nodes)) > 0
        risks[number, scored] = -np.expm1(total[scored])
    return risks


def idle_times(fleet: ReplayedFleet, jobs: Placements, closed: ReplayMarks) -> tuple[Ints, Ints, Ints]:
    """Return node, begin and end of the times in which a node has no job, is not down and is not out of service."""
    node = np.concatenate([jobs.node, fleet.failed, closed.node])
    begin = np.concatenate([jobs.start, fleet.at, closed.at])
    end = np.concatenate([jobs.end, fleet.until, closed.until])
    order = np.lexsort((begin, node))
    bounds = np.searchsorted(node[order], np.arange(len(fleet.nodes) + 1))
    parts = []
    for place, rows in enumerate(pairwise(bounds)):
        mine = order[slice(*rows)]
        since = np.maximum.accumulate(np.concatenate([[fleet.begin], end[mine]]))
        until = np.minimum(np.concatenate([begin[mine], [fleet.end]]), fleet.end)
        gap = until > since
        parts.append(np.stack([np.full(int(gap.sum()), place), since[gap], until[gap]]))
    node, since, until = np.concatenate(parts, axis=1)
    return node, since, until


def replay_probes(
    fleet: ReplayedFleet, jobs: Placements, at: list[int], risks: Floats, passed: Floats, closed: ReplayMarks,
    found: Bools, reach: timedelta, policy: PolicyConfig,
) -> Probes:  # fmt: skip
    """Probe idle nodes: a round follows each decision, and each minute in which a node becomes idle or a probe ends.

    ``at``: when the scores of each decision are available, in milliseconds; ``risks``, ``passed``: of each node, as
    :func:`node_risks` returns them, and those after a diagnostic that passed.
    ``closed``: nodes out of service, which are not probed.
    ``found``: failures that a diagnostic finds when they begin within ``reach`` of its end.
    """
    config = policy.probes
    takes, within, lowers = duration_ms(config.duration), duration_ms(reach), duration_ms(config.lowers_for)
    gaps = sorted(zip(*(column.tolist() for column in idle_times(fleet, jobs, closed)), strict=True), key=_since)
    views = [
        replace(node, units=tuple(UnitView(f"{unit}") for unit in range(gpus)))
        for node, gpus in zip(fleet.nodes, fleet.gpus.tolist(), strict=True)
    ]
    names = {view.name: place for place, view in enumerate(views)}
    passed_until = np.zeros(len(views), dtype=np.int64)
    probed: dict[int, LastRequest] = {}
    shut: dict[int, int] = {}
    running: dict[str, int] = {}
    rows: list[tuple[int, int, int, bool, int]] = []
    idle: dict[int, int] = {}  # until when, by node
    rounds = sorted({*at, *(_next_round(since) for _, since, _ in gaps)})
    next_gap = 0
    while rounds:
        now = heapq.heappop(rounds)
        while next_gap < len(gaps) and gaps[next_gap][1] <= now:
            idle[gaps[next_gap][0]] = gaps[next_gap][2]
            next_gap += 1
        idle = {place: until for place, until in idle.items() if until > now}
        running = {name: ends for name, ends in running.items() if ends > now}
        known = bisect_right(at, now) - 1
        if known < 0 or np.isnan(risks[known]).all():
            continue
        risk = np.where(passed_until > now, passed[known], risks[known])
        decided_at, expires_at = instant(at[known]), instant(at[known]) + policy.horizon
        candidates = [
            Candidate(views[place], float(risk[place]), decided_at, expires_at, _FREE, True, probed.get(place))
            for place in idle
            if now >= shut.get(place, 0) and not np.isnan(risk[place])
        ]
        signals = Signals(read_at=instant(now), probes=tuple(running))
        requests, _, _ = requests_of(candidates, float(np.nanmean(risk)), signals, {}, policy, instant(now))
        for request in requests:
            place = names[request.node]
            ends = min(now + takes, idle[place])
            preempted, failure = ends < now + takes, -1
            if not preempted:
                ahead = (fleet.failed == place) & (fleet.at > ends) & (fleet.at <= ends + within) & found
                failure = int(ahead.argmax()) if ahead.any() else -1
            if failure >= 0:
                shut[place] = int(fleet.until[failure])
            elif not preempted:
                passed_until[place] = ends + lowers
            probed[place] = LastRequest(instant(now), request.risk, decided_at)
            running[request.node] = ends
            heapq.heappush(rounds, _next_round(ends))
            rows.append((place, now, ends, preempted, failure))
    return Probes.of(rows)


_FREE: Final[Mapping[str, str | None]] = {"probe": None, "checkpoint": None}


def _since(gap: tuple[int, int, int]) -> int:
    return gap[1]


def _next_round(at: int) -> int:
    return -(-at // _MINUTE_MS) * _MINUTE_MS


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints that jobs were asked for, ordered by time; all of shape (checkpoints,)."""

    job: Ints
    at: Ints
    hours: Floats

    @classmethod
    def of(cls, jobs: Placements, rows: Iterable[tuple[int, int]], costs: CostBenefitConfig) -> Checkpoints:
        """Take rows of jobs and times."""
        job, at = np.array(list(rows), dtype=np.int64).reshape(-1, 2).T
        sizes = dict(zip(jobs.job.tolist(), jobs.size.tolist(), strict=True))
        hours = [sizes[one] * (costs.checkpoint / timedelta(hours=1)) for one in job.tolist()]
        return cls(job, at, np.array(hours, dtype=np.float64))

    def unsaved(self, job: int, at: int) -> int:
        """Return how long ago, in milliseconds, a job was last asked."""
        asked = self.at[(self.job == job) & (self.at <= at)]
        return at - int(asked[-1]) if len(asked) else NEVER


NO_CHECKPOINTS: Final = Checkpoints(_NONE, _NONE, _NONE.astype(np.float64))


def replay_checkpoints(
    fleet: ReplayedFleet, jobs: Placements, at: list[int], risks: Floats, policy: PolicyConfig
) -> Checkpoints:
    """Ask jobs on nodes at risk for checkpoints, once at each decision; ``at``, ``risks``: of :func:`replay_probes`."""
    if not np.any(jobs.on_request) or not len(jobs.job):
        return NO_CHECKPOINTS
    cost, jobs_of = duration_ms(policy.cost_benefit.checkpoint), int(jobs.job.max()) + 1
    last_asked = np.full(jobs_of, -1)
    remembered: Mapping[str, LastRequest] = {}
    rows: list[tuple[int, int]] = []
    for number, now in enumerate(at):
        runs = np.flatnonzero((jobs.start <= now) & (jobs.end > now) & ~np.isnan(risks[number, jobs.node]))
        # no more work can be lost than the interval, and no job is at more than the sum of its nodes' risks
        most = np.bincount(jobs.job[runs], risks[number, jobs.node[runs]], jobs_of)
        runs = runs[jobs.every[runs] * most[jobs.job[runs]] > cost]
        views: dict[int, JobView] = {}
        on_node: defaultdict[int, list[JobView]] = defaultdict(list)
        names: dict[str, int] = {}
        for entry, view in zip(runs.tolist(), job_views(jobs, runs, now), strict=True):
            job, saved_at = int(jobs.job[entry]), view.checkpointed_at
            if saved_at is not None and last_asked[job] >= 0:
                saved_at = max(saved_at, instant(int(last_asked[job])))
            views.setdefault(job, replace(view, checkpointed_at=saved_at))
            on_node[int(jobs.node[entry])].append(views[job])
            names[view.name] = job
        decided_at = instant(now)
        candidates = [
            Candidate(
                replace(fleet.nodes[place], jobs=tuple(running)), float(risks[number, place]), decided_at,
                decided_at + policy.horizon, _FREE, idle=False,
            )
            for place, running in on_node.items()
        ]  # fmt: skip
        signals = Signals(read_at=decided_at, checkpoints=True)
        requests, _, remembered = requests_of(candidates, 0.0, signals, remembered, policy, decided_at)
        for job in (names[name] for request in requests for name in request.jobs):
            last_asked[job] = now
            rows.append((job, now))
    return Checkpoints.of(jobs, rows, policy.cost_benefit)
