"""GPU-hours saved and spent by drains and taints, from marks, failures and jobs, with bootstrap intervals by node.

Jobs are placed as recorded. A job that is moved, or would have started on a marked node, runs on a spare node that does
not fail, until its own node is back; then it, or a similar one, runs there again. Failures occur as recorded. A GPU's
failure hits each job of its node with the probability that the job used that GPU; costs are expected values over this.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Final

import numpy as np

from evaluation.metrics.metrics import Interval, interval, resample
from evaluation.value.load import HOUR_MS, LEAVE, Placements, ReplayedFleet, evicted, job_views
from evaluation.value.marks import ReplayMarks
from evaluation.value.probing import NO_CHECKPOINTS, NO_PROBES, Checkpoints, Probes
from foundation.instants import from_ms
from foundation.times import NEVER, duration_ms
from policy.bounds import bound_of_sizes
from policy.episodes import Floats, Ints
from policy.fleet import JobView
from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, Price, hours_of
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import Rung
from policy.ladder.rungs import mean_prices as prices_of
from policy.tiers import may_use_risk

_CONFIDENCE: Final = 0.9
"""Confidence of a rung's precision bound; equal to that of rollout stages."""

_PRICED: Final = 24
"""Number of instants at which nodes are priced."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Outcome of a policy in the replay.

    ``drains``: marks; ``known``: marks on healthy nodes with a known outcome; ``right``: marks followed by a failure
    within reach.
    ``precision_low``: lower bound of the precision, clustered by node.
    ``caught``: failures preceded by a mark early enough.
    ``hits``, ``moved``: jobs hit by failures (weighted by probability), and jobs moved; means over loads.
    ``hit``: GPU-hours lost in jobs hit by failures, restarts included; shape (loads, nodes).
    ``spent``: GPU-hours of checkpoints (or lost work), restarts of moved jobs, and probes; ``idle``: GPU-hours of
    healthy nodes out of service; ``repaired``: GPU-hours saved because planned repairs are shorter; same shape.
    """

    drains: int
    known: int
    right: int
    caught: int
    precision_low: float
    hits: float
    moved: float
    hit: Floats
    spent: Floats
    idle: Floats
    repaired: Floats


@dataclass(frozen=True, slots=True)
class Extras:
    """Probes and checkpoints under one load, in addition to marks."""

    probes: Probes = NO_PROBES
    checkpoints: Checkpoints = NO_CHECKPOINTS
    config: ProbeConfig = field(default_factory=ProbeConfig)


def count_outcome(
    fleet: ReplayedFleet,
    loads: Sequence[Placements],
    marks: ReplayMarks,
    costs: CostBenefitConfig,
    *,
    reach: timedelta,
    soft: bool = False,
    extras: Sequence[Extras] | None = None,
) -> ReplayOutcome:
    """Compute the outcome of marks, probes and checkpoints.

    ``loads``: the fleet's own jobs, or several generated loads to average over.
    ``reach``: a mark is right if its node fails within this time.
    ``soft``: marks are soft taints: new jobs that may not use the node (:func:`policy.tiers.may_use_risk`) go to other
    nodes while GPUs are free, so no GPU is left idle.
    ``extras``: probes and checkpoints of each load; they count as actions if there are no marks.
    """
    reach_ms, ready = duration_ms(reach), duration_ms(costs.checkpoint + LEAVE)
    same = fleet.failed == marks.node[:, None]
    started = marks.at[:, None]
    was_up = ~(same & (fleet.at <= started) & (fleet.until > started)).any(axis=1)
    is_hit = was_up & (same & (fleet.at > started) & (fleet.at <= started + reach_ms)).any(axis=1)
    empty_at = marks.at + np.where(marks.drained < NEVER, np.minimum(marks.drained, marks.until) - marks.at + ready, 0)
    is_caught = (same & (fleet.at >= empty_at[:, None]) & (fleet.at < marks.until[:, None])).any(axis=0)
    cheap = [Extras()] * len(loads) if extras is None else extras
    counted = [_counted(fleet, jobs, marks, costs, extra, soft=soft) for jobs, extra in zip(loads, cheap, strict=True)]
    known = is_hit | (was_up & (marks.at + reach_ms <= fleet.end))
    hits, moved, hit, spent, idle, repaired = (np.stack(values) for values in zip(*counted, strict=True))
    actions, actions_right, actions_known = len(marks.at), int(is_hit.sum()), int(known.sum())
    probes = [extra.probes for extra in cheap]
    if extras is not None and not actions:
        finished = [len(probe.node) - int(probe.preempted.sum()) for probe in probes]
        found_counts = [int((probe.failure >= 0).sum()) for probe in probes]
        requested_counts = [len(extra.checkpoints.job) for extra in cheap]
        actions = round(float(np.mean([len(probe.node) for probe in probes]) + np.mean(requested_counts)))
        actions_right, actions_known = round(float(np.mean(found_counts))), round(float(np.mean(finished)))
    spared = [int((is_caught | np.isin(np.arange(len(is_caught)), probe.failure)).sum()) for probe in probes]
    nodes, alerts = np.unique(marks.node[known], return_counts=True)
    hit_by = np.array([int(is_hit[known & (marks.node == node)].sum()) for node in nodes], dtype=np.int64)
    precision_low = bound_of_sizes(alerts, hit_by, _CONFIDENCE).lower if len(nodes) else 0.0
    return ReplayOutcome(
        actions, actions_known, actions_right, round(float(np.mean(spared))), precision_low, float(hits.mean()),
        float(moved.mean()), hit, spent, idle, repaired,
    )  # fmt: skip


def _counted(
    fleet: ReplayedFleet, jobs: Placements, hard: ReplayMarks, costs: CostBenefitConfig, extras: Extras, *, soft: bool
) -> tuple[float, float, Floats, Floats, Floats, Floats]:
    """Return numbers of jobs hit and moved, and per node the GPU-hours lost, spent, idle and saved in repairs."""
    marks = hard if not len(extras.probes.node) else hard.joined(extras.probes.repairs(fleet))
    restart_times = jobs.restart_times(costs)
    bounds, size = np.searchsorted(jobs.node, np.arange(len(fleet.nodes) + 1)), jobs.size
    hits, moved, (hit, spent, idle, repaired) = 0.0, 0.0, np.zeros((4, len(fleet.nodes)))
    shorter = (costs.unplanned_repair - costs.planned_repair) / timedelta(hours=1)
    np.add.at(spent, extras.probes.node, extras.probes.spent(fleet, jobs, extras.config))
    for job, cost in zip(extras.checkpoints.job, extras.checkpoints.hours, strict=True):
        first_node = jobs.node[int(np.argmax(jobs.job == job))]  # the first node of a gang
        spent[first_node] += cost
    departures: list[Ints] = []  # per mark: when the jobs of its node left it
    left_at = np.full(len(size), NEVER)
    free = _free(fleet, jobs, marks) if soft else None
    ends_at = np.minimum(marks.until, marks.found)  # a found fault is repaired immediately
    for mark, (node, marked_at, until, drained) in enumerate(
        zip(marks.node, marks.at, marks.until, marks.drained, strict=True)
    ):
        entries = np.arange(bounds[node], bounds[node + 1])
        out = marks.found[mark] < NEVER
        repaired[node] += fleet.gpus[node] * shorter * out
        started = entries[(jobs.start[entries] > marked_at) & (jobs.start[entries] <= until)]
        if free is not None and not out:
            times = jobs.start[started]
            avoid = np.logical_not(may_use_risk(size[started], high=marks.high_at(node, times)))
            started = started[avoid & (jobs.gpus[started] <= free(times))]
        left_at[started] = jobs.start[started]  # it runs elsewhere
        if drained < until:
            departed_at, left_by = evicted(fleet, jobs, int(node), int(drained), left_at, costs.checkpoint)
            written = departed_at - duration_ms(LEAVE) - drained
            rework = np.where(jobs.writes(left_by), written, jobs.unsaved(left_by, int(drained)))
            left_at[left_by], moved = departed_at, moved + len(left_by)
            spent[node] += float((size[left_by] * (restart_times[left_by] + rework)).sum()) / HOUR_MS
        departures.append(left_at[entries].copy())
        left_at[entries] = NEVER
        occupied_until = np.minimum(jobs.end[entries], departures[mark])
        for since, ends in [] if soft else _up_intervals(fleet, int(node), int(marked_at), int(ends_at[mark])):
            busy = np.clip(occupied_until, since, ends) - np.clip(jobs.start[entries], since, ends)
            idle[node] += max(float(fleet.gpus[node] * (ends - since)) - float(jobs.gpus[entries] @ busy), 0) / HOUR_MS
    up_again = np.full(len(fleet.nodes), fleet.begin)
    for node, failed_at, unit, until in zip(fleet.failed, fleet.at, fleet.unit, fleet.until, strict=True):
        was_down = failed_at < up_again[node]  # no job was running
        up_again[node] = max(up_again[node], until)
        if was_down:
            continue
        marks_here = np.flatnonzero((marks.node == node) & (marks.at <= failed_at) & (failed_at < marks.until))
        entry = np.arange(bounds[node], bounds[node + 1])
        runs = (jobs.start[entry] <= failed_at) & (jobs.end[entry] >= failed_at)
        hit_entries = entry[runs & (departures[int(marks_here[0])] > failed_at) if len(marks_here) else runs]
        hit_share = jobs.gpus[hit_entries] / fleet.gpus[node] if unit else np.ones(len(hit_entries))
        hits += float(hit_share.sum())
        unsaved = jobs.unsaved(hit_entries, failed_at)
        if len(extras.checkpoints.job):
            asked = [extras.checkpoints.unsaved(int(job), int(failed_at)) for job in jobs.job[hit_entries]]
            unsaved = np.minimum(unsaved, np.array(asked, dtype=np.int64))
        hit[node] += float((hit_share * size[hit_entries] * (unsaved + restart_times[hit_entries])).sum()) / HOUR_MS
    return hits, moved, hit, spent, idle, repaired


def _free(fleet: ReplayedFleet, jobs: Placements, marks: ReplayMarks) -> Callable[[Ints], Ints]:
    """Return a function of times: a lower bound of the free GPUs on nodes that are neither marked nor down."""
    occupied = (
        (jobs.gpus, jobs.start, jobs.end), (fleet.gpus[marks.node], marks.at, marks.until),
        (fleet.gpus[fleet.failed], fleet.at, fleet.until),
    )  # fmt: skip
    steps = [(gpus, instants, sign) for gpus, begin, end in occupied for instants, sign in ((begin, 1), (end, -1))]
    instants = np.concatenate([times for _, times, _ in steps])
    order = np.argsort(instants, kind="stable")
    in_use = np.concatenate([[0], np.cumsum(np.concatenate([sign * gpus for gpus, _, sign in steps])[order])])
    instants, total = instants[order], int(fleet.gpus.sum())
    return lambda times: total - in_use[np.searchsorted(instants, times)]


def _up_intervals(fleet: ReplayedFleet, node: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the parts of an interval in which a node is not down."""
    parts = []
    is_here = fleet.failed == node
    for failed_at, until in [*zip(fleet.at[is_here], fleet.until[is_here], strict=True), (end, end)]:
        if begin < min(failed_at, end):
            parts.append((begin, min(int(failed_at), end)))
        begin = max(begin, int(until))
    return parts


def net_of(no_action: ReplayOutcome, acted: ReplayOutcome) -> Floats:
    """Return the net GPU-hours that a policy saves; shape (loads, nodes)."""
    return np.asarray(no_action.hit - acted.hit - acted.spent - acted.idle + acted.repaired)


def net_interval(net: Floats, *, replicates: int, seed: int) -> tuple[float, Interval]:
    """Return the total of net GPU-hours of shape (loads, nodes), with a bootstrap interval over nodes and loads."""
    weights = resample(net.shape[1], replicates, seed)
    load = np.arange(replicates) % len(net)
    return float(net.sum(axis=1).mean()), interval(np.einsum("rn,rn->r", weights, net[load]))


def net_row(no_action: ReplayOutcome, acted: ReplayOutcome, *, replicates: int, seed: int) -> dict[str, float]:
    """Return the net GPU-hours of a policy with their interval, as columns of reports."""
    net, bounds = net_interval(net_of(no_action, acted), replicates=replicates, seed=seed)
    return {"net": net, "net_low": bounds.low, "net_high": bounds.high}


def mean_prices(
    fleet: ReplayedFleet, loads: Sequence[Placements], reach: timedelta, costs: CostBenefitConfig, probes: ProbeConfig
) -> dict[Rung, Price]:
    """Return the mean price of each rung over nodes, loads and times, by the controller's own formulas.

    ``reach``: time within which a failure follows an action.
    """
    step = (fleet.end - fleet.begin) / _PRICED
    nodes: list[tuple[int, JobHours]] = []
    for jobs, number in product(loads, range(_PRICED)):
        at = fleet.begin + round((number + 0.5) * step)
        running = jobs.running(at, jobs.end)
        on_node: defaultdict[int, list[JobView]] = defaultdict(list)
        for node, job in zip(jobs.node[running].tolist(), job_views(jobs, running, at), strict=True):
            on_node[node].append(job)
        by_node = enumerate(fleet.gpus.tolist())
        nodes += [(gpus, hours_of(gpus, on_node[node], reach, costs, from_ms(at))) for node, gpus in by_node]
    return prices_of(nodes, costs, probes)
