"""What drains and taints are worth in GPU-hours: marks counted against failures and jobs, with intervals by node.

Jobs stand where they stood. One that is moved, or would have started on a node that is kept out, runs on a spare node
that does not fail until its own is back; then it, or one like it, runs there again. Failures come as they came. A GPU's
failure hits each job of its node with the probability that the job had that GPU; what it costs is the mean over these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from evaluation.metrics.bootstrap import Interval, interval, resample_units
from evaluation.value.controller_replay import LEAVE, Fleet, Marks, evicted
from evaluation.value.load import HOUR_MS, Placements
from features.times import NEVER, duration_ms
from policy.cost_benefit import CostBenefitConfig, Costs
from policy.episodes import Floats, Ints


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy came to.

    ``drains``, ``known``, ``right``: marks, those of nodes that had not failed and of known outcome, and those of them
    that a failure followed in time.
    ``caught``: failures that a mark came before, early enough.
    ``hit``: GPU-hours lost in jobs that failures hit, restarts included; shape (loads, nodes).
    ``hits``, ``moved``: jobs that failures hit, by their share of the node, and jobs that were moved; means over loads.
    ``spent``: GPU-hours of checkpoints (or lost work) and restarts of moved jobs, shape (loads, nodes); ``idle``: of
    sound nodes kept out, likewise.
    ``repaired``: GPU-hours that planned repairs are shorter than unplanned ones; shape (nodes,).
    """

    drains: int
    known: int
    right: int
    caught: int
    hits: float
    moved: float
    hit: Floats
    spent: Floats
    idle: Floats
    repaired: Floats


def count_outcome(
    fleet: Fleet, loads: Sequence[Placements], marks: Marks, costs: CostBenefitConfig, *, reach: timedelta,
    soft: bool = False,
) -> Outcome:  # fmt: skip
    """Count what comes of marking nodes.

    ``loads``: the fleet's own jobs, or several generated loads, which are averaged.
    ``reach``: a mark is right if its node fails within it.
    ``soft``: new jobs only prefer other nodes: they go there while GPUs are free, so that none stand idle for it.
    """
    within, ready = duration_ms(reach), duration_ms(costs.checkpoint + LEAVE)
    same = fleet.failed == marks.node[:, None]
    began = marks.at[:, None]
    sound = ~(same & (fleet.at <= began) & (fleet.until > began)).any(axis=1)
    right = sound & (same & (fleet.at > began) & (fleet.at <= began + within)).any(axis=1)
    early = marks.at + np.where(marks.drained < NEVER, np.minimum(marks.drained, marks.until) - marks.at + ready, 0)
    caught = (same & (fleet.at >= early[:, None]) & (fleet.at < marks.until[:, None])).any(axis=0)
    planned = np.bincount(marks.node[marks.found < NEVER], minlength=len(fleet.nodes))
    shorter = (costs.unplanned_repair - costs.planned_repair) / timedelta(hours=1)
    counted = [_counted(fleet, jobs, marks, costs, soft=soft) for jobs in loads]
    known = right | (sound & (marks.at + within <= fleet.end))
    hits, moved, hit, spent, idle = (np.stack(values) for values in zip(*counted, strict=True))
    return Outcome(
        len(marks.at), int(known.sum()), int(right.sum()), int(caught.sum()),
        float(hits.mean()), float(moved.mean()), hit, spent, idle, (fleet.gpus * planned).astype(np.float64) * shorter,
    )  # fmt: skip


def _counted(
    fleet: Fleet, jobs: Placements, marks: Marks, costs: CostBenefitConfig, *, soft: bool
) -> tuple[float, float, Floats, Floats, Floats]:
    """Count jobs hit and moved, and by node GPU-hours lost, spent and idle, under one load."""
    again = jobs.again(costs)
    bounds, size = np.searchsorted(jobs.node, np.arange(len(fleet.nodes) + 1)), jobs.size
    hits, moved, (hit, spent, idle) = 0.0, 0.0, np.zeros((3, len(fleet.nodes)))
    left: list[Ints] = []  # of each mark: when the jobs of its node are off it
    off = np.full(len(size), NEVER)
    free = _free(fleet, jobs, marks) if soft else None
    over = np.minimum(marks.until, marks.found)  # what is found to be broken goes straight into its repair
    for mark, (node, at, until, drained) in enumerate(
        zip(marks.node, marks.at, marks.until, marks.drained, strict=True)
    ):
        mine = np.arange(bounds[node], bounds[node + 1])
        begun = mine[(jobs.start[mine] > at) & (jobs.start[mine] <= until)]
        if free is not None:
            begun = begun[jobs.gpus[begun] <= free(jobs.start[begun])]
        off[begun] = jobs.start[begun]  # it runs elsewhere
        if drained < until:
            gone, out = evicted(fleet, jobs, int(node), int(drained), off, costs.checkpoint)
            rework = gone - duration_ms(LEAVE) - drained if jobs.on_request else jobs.unsaved(out, int(drained))
            off[out], moved = gone, moved + len(out)
            spent[node] += float((size[out] * (again[out] + rework)).sum()) / HOUR_MS
        left.append(off[mine].copy())
        off[mine] = NEVER
        stays = np.minimum(jobs.end[mine], left[mark])
        for since, ends in [] if soft else _sound(fleet, int(node), int(at), int(over[mark])):
            busy = np.clip(stays, since, ends) - np.clip(jobs.start[mine], since, ends)
            idle[node] += max(float(fleet.gpus[node] * (ends - since)) - float(jobs.gpus[mine] @ busy), 0) / HOUR_MS
    back = np.full(len(fleet.nodes), fleet.begin)
    for node, at, unit, until in zip(fleet.failed, fleet.at, fleet.unit, fleet.until, strict=True):
        was_down = at < back[node]  # then nothing ran there
        back[node] = max(back[node], until)
        if was_down:
            continue
        stood = np.flatnonzero((marks.node == node) & (marks.at <= at) & (at < marks.until))
        entry = np.arange(bounds[node], bounds[node + 1])
        runs = (jobs.start[entry] <= at) & (jobs.end[entry] >= at)
        met = entry[runs & (left[int(stood[0])] > at) if len(stood) else runs]
        share = jobs.gpus[met] / fleet.gpus[node] if unit else np.ones(len(met))
        hits += float(share.sum())
        hit[node] += float((share * size[met] * (jobs.unsaved(met, at) + again[met])).sum()) / HOUR_MS
    return hits, moved, hit, spent, idle


def _free(fleet: Fleet, jobs: Placements, marks: Marks) -> Callable[[Ints], Ints]:
    """Give what counts the GPUs that are free at a time on nodes that are neither marked nor down, at least."""
    held = (
        (jobs.gpus, jobs.start, jobs.end), (fleet.gpus[marks.node], marks.at, marks.until),
        (fleet.gpus[fleet.failed], fleet.at, fleet.until),
    )  # fmt: skip
    steps = [(gpus, at, sign) for gpus, begin, end in held for at, sign in ((begin, 1), (end, -1))]
    at = np.concatenate([times for _, times, _ in steps])
    order = np.argsort(at, kind="stable")
    taken = np.concatenate([[0], np.cumsum(np.concatenate([sign * gpus for gpus, _, sign in steps])[order])])
    at, total = at[order], int(fleet.gpus.sum())
    return lambda times: total - taken[np.searchsorted(at, times)]


def _sound(fleet: Fleet, node: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Give the parts of a time in which a node is not down."""
    parts = []
    for at, until in [*zip(fleet.at[fleet.failed == node], fleet.until[fleet.failed == node], strict=True), (end, end)]:
        if begin < min(at, end):
            parts.append((begin, min(int(at), end)))
        begin = max(begin, int(until))
    return parts


def net_interval(nobody: Outcome, acted: Outcome, *, replicates: int, seed: int) -> tuple[float, Interval]:
    """Give the GPU-hours that a policy saves, net of what it spends, with a bootstrap interval by node and load."""
    net = nobody.hit - acted.hit - acted.spent - acted.idle + acted.repaired
    weights = resample_units(net.shape[1], replicates, seed)
    load = np.arange(replicates) % len(net)
    return float(net.sum(axis=1).mean()), interval(np.einsum("rn,rn->r", weights, net[load]))


def break_even(fleet: Fleet, loads: Sequence[Placements], costs: CostBenefitConfig) -> Costs | None:
    """Give what a drain of the mean node costs and saves, as the controller weighs it.

    See :func:`policy.cost_benefit.worth_of`. None: with such jobs no drain is ever worth it.
    """
    hours = np.mean([_mean_load(fleet, jobs, costs) for jobs in loads], axis=0)
    stop, fail = (float(value) for value in hours)
    verify, planned, unplanned = (
        float(fleet.gpus.mean()) * (time / timedelta(hours=1))
        for time in (costs.verify, costs.planned_repair, costs.unplanned_repair)
    )
    if unplanned + fail <= stop + planned:
        return None
    return Costs(stop + verify, unplanned, lost_job=fail, needed_drain=stop + planned)


def _mean_load(fleet: Fleet, jobs: Placements, costs: CostBenefitConfig) -> Floats:
    """Give the GPU-hours that stopping a node's jobs costs, and that a failure of one of its GPUs does."""
    lasted = np.maximum(np.minimum(jobs.end, fleet.end) - np.maximum(jobs.start, fleet.begin), 0)
    busy = jobs.size * lasted / (len(fleet.nodes) * (fleet.end - fleet.begin))
    again = jobs.again(costs) / HOUR_MS
    stop = costs.checkpoint / timedelta(hours=1) + again
    fail = jobs.every / 2 / HOUR_MS + again
    return np.array([float((busy * stop).sum()), float((busy * fail * jobs.gpus / fleet.gpus[jobs.node]).sum())])
