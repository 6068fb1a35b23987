"""The cheap rungs in a fleet's past: probes of idle nodes, and checkpoints that jobs on nodes at risk are asked for."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Final

import numpy as np

from evaluation.value.controller_replay import ReplayedFleet
from evaluation.value.load import HOUR_MS, Placements
from evaluation.value.marks import ReplayMarks
from evaluation.value.readings import Readings
from features.times import NEVER, duration_ms
from policy.episodes import Bools, Floats, Ints
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import IdleNode, ProbeConfig, choose_probes


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


def node_risks(fleet: ReplayedFleet, scores: Readings) -> Floats:
    """Return the risk of each node at each decision; NaN: not known; shape (decisions, nodes)."""
    stays = [(place, *stay) for place, units in enumerate(fleet.stays) for stay in units]
    code = scores.units.get_indexer([name for _, name, _, _ in stays])
    place, since, until = np.array([(place, since, until) for place, _, since, until in stays], dtype=np.int64).T
    risks = np.full((len(scores), len(fleet.nodes)), np.nan)
    for number, reading in enumerate(scores):
        here = (since <= reading.at) & (reading.at < until) & (code >= 0)
        risk = reading.risk[code[here]]
        known, of = ~np.isnan(risk), place[here]
        total = np.bincount(of[known], np.log1p(-np.minimum(risk[known], 1 - 1e-12)), len(fleet.nodes))
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
    fleet: ReplayedFleet, jobs: Placements, at: list[int], risks: Floats, closed: ReplayMarks, found: Bools,
    reach: timedelta, config: ProbeConfig, *, guided: bool = True,
) -> Probes:  # fmt: skip
    """Probe idle nodes, at the end of their jobs and at each decision.

    ``at``: decision times, in milliseconds; ``risks``: as :func:`node_risks` returns them.
    ``closed``: nodes out of service, which are not probed.
    ``found``: failures that a diagnostic finds when they begin within ``reach`` of its end.
    ``guided``: by risk; else those that rested longest go first.
    """
    node, since, until = idle_times(fleet, jobs, closed)
    times = np.array(at, dtype=np.int64)
    first, last = np.searchsorted(times, since, side="right"), np.searchsorted(times, until, side="left")
    again = np.repeat(np.arange(len(node)), np.maximum(last - first, 0))
    later = np.arange(len(again)) - np.repeat(np.cumsum(last - first) - (last - first), last - first) + first[again]
    when = np.concatenate([since, times[later]])
    of = np.concatenate([np.arange(len(node)), again])
    order = np.argsort(when, kind="stable")
    begins, ends = np.sort(since), np.sort(until)
    means = np.array([np.nanmean(row) if not np.isnan(row).all() else np.nan for row in risks])
    names = {item.name: place for place, item in enumerate(fleet.nodes)}
    takes, within = duration_ms(config.duration), duration_ms(reach)
    probed: dict[int, int] = {}
    shut: dict[int, int] = {}
    running: list[int] = []
    rows: list[tuple[int, int, int, bool, int]] = []
    for now, group in groupby(zip(when[order].tolist(), of[order].tolist(), strict=True), key=itemgetter(0)):
        while running and running[0] <= now:
            heapq.heappop(running)
        known = bisect_right(at, now) - 1
        if known < 0 or (guided and np.isnan(means[known])):
            continue
        closes, nodes = {}, []
        for _, gap in group:
            place = int(node[gap])
            if now >= shut.get(place, 0):
                closes[place] = int(until[gap])
                risk = float(risks[known, place])
                rested = timedelta(milliseconds=now - probed[place]) if place in probed else None
                nodes.append(IdleNode(fleet.nodes[place].name, None if np.isnan(risk) else risk, rested))
        idle = int(np.searchsorted(begins, now, side="right") - np.searchsorted(ends, now, side="right"))
        mean = float(means[known]) if guided else None
        for name in choose_probes(nodes, running=len(running), idle=idle, mean_risk=mean, config=config):
            place = names[name]
            over = min(now + takes, closes[place])
            preempted, failure = over < now + takes, -1
            if not preempted:
                ahead = (fleet.failed == place) & (fleet.at > over) & (fleet.at <= over + within) & found
                failure = int(ahead.argmax()) if ahead.any() else -1
            if failure >= 0:
                shut[place] = int(fleet.until[failure])
            probed[place] = now
            heapq.heappush(running, over)
            rows.append((place, now, over, preempted, failure))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Probes(columns[0], columns[1], columns[2], columns[3].astype(np.bool_), columns[4])


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints that jobs were asked for, ordered by time; all of shape (checkpoints,)."""

    job: Ints
    at: Ints
    hours: Floats

    def unsaved(self, job: int, at: int) -> int:
        """Return how long ago, in milliseconds, a job was last asked."""
        asked = self.at[(self.job == job) & (self.at <= at)]
        return at - int(asked[-1]) if len(asked) else NEVER


NO_CHECKPOINTS: Final = Checkpoints(_NONE, _NONE, _NONE.astype(np.float64))


def replay_checkpoints(
    jobs: Placements, at: list[int], risks: Floats, horizon: timedelta, costs: CostBenefitConfig
) -> Checkpoints:
    """Ask for a checkpoint where the work since the last one, times the risk until the next one, exceeds its cost."""
    if not jobs.on_request or not len(jobs.job):
        return NO_CHECKPOINTS
    jobs_of, cost, ahead = int(jobs.job.max()) + 1, duration_ms(costs.checkpoint), duration_ms(horizon)
    asked = np.full(jobs_of, -(NEVER // 4))
    rows: list[tuple[Ints, Ints, Floats]] = []
    for number, now in enumerate(at):
        runs = np.flatnonzero((jobs.start <= now) & (jobs.end > now) & (jobs.every > 0))
        risk = np.nan_to_num(risks[number, jobs.node[runs]])
        unsaved = jobs.unsaved(runs, now)
        left = np.minimum((jobs.every[runs] - unsaved) / ahead, 1.0)
        spared = np.bincount(jobs.job[runs], left * np.log1p(-np.minimum(risk, 1 - 1e-12)), jobs_of)
        since = np.minimum(unsaved, now - asked[jobs.job[runs]])
        worth = since * -np.expm1(spared[jobs.job[runs]]) > cost
        chosen, entry = np.unique(jobs.job[runs[worth]], return_index=True)
        asked[chosen] = now
        size = jobs.size[runs[worth][entry]]
        rows.append((chosen, np.full(len(chosen), now), size * cost / HOUR_MS))
    if not rows:
        return NO_CHECKPOINTS
    return Checkpoints(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))
