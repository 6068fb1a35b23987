"""Fleet and jobs of a replay: jobs of the dataset, or a generated load with the distribution of a real trace."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import Any, Final

import numpy as np
import pandas as pd

from foundation.instants import from_ms
from foundation.times import NEVER, duration_ms, milliseconds, name_codes
from policy.config import PolicyConfig
from policy.episodes import Bools, Floats, Ints
from policy.fleet import JobView, NodeView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.node_tier.hard_rules import BOOT
from policy.stages import Stage, StagesConfig

HOUR_MS: Final = 3_600_000
_LATE_MS: Final = HOUR_MS
"""A job killed by a node failure may end up to this long before the failure is logged."""

UTILIZATION: Final = 0.9
"""Share of the fleet's GPU-hours that a generated load requests; assumption."""

_QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_SHAPE: Final = (
    (1, 0.9317, (0.00028, 0.017, 0.034, 0.31, 0.75, 2.4, 5.3, 38.0, 240.0)),
    (2, 0.0221, (0.00056, 0.0031, 0.0044, 0.0058, 0.021, 20.0, 55.0, 150.0, 410.0)),
    (4, 0.0227, (0.00083, 0.038, 0.21, 4.8, 25.0, 51.0, 76.0, 250.0, 680.0)),
    (8, 0.0200, (0.00028, 0.06, 0.52, 6.6, 48.0, 98.0, 150.0, 290.0, 740.0)),
    (16, 0.0025, (0.00056, 0.017, 0.11, 10.0, 45.0, 94.0, 140.0, 320.0, 460.0)),
    (32, 0.0009, (0.00028, 0.092, 0.24, 1.0, 14.0, 17.0, 21.0, 40.0, 57.0)),
    (128, 0.00011, (0.00028, 0.092, 0.24, 1.0, 14.0, 17.0, 21.0, 40.0, 57.0)),
)
"""GPUs of a gang, share of all jobs, and hours at :data:`_QUANTILES`. Rounded from the 82,247 jobs of the trace
of Microsoft's Philly cluster, September to December 2017 (Jeon et al., USENIX ATC 2019; msr-fiddle/philly-traces,
CC-BY-4.0): sizes rounded up to powers of two, from 33 GPUs to 128; hours pooled for sizes from 17 GPUs."""

_LARGEST: Final = 16
"""Largest size with hundreds of jobs in the trace."""


@dataclass(frozen=True, slots=True)
class Placements:
    """Jobs on nodes, one entry per job and node, sorted by node and start; arrays of shape (n,).

    ``job``, ``node``: positions.
    ``gpus``: GPUs of the job on that node; ``size``: GPUs on all its nodes, which stop together.
    ``start``, ``end``: milliseconds since the epoch.
    ``every``: checkpoint interval in milliseconds; 0: the job loses no work.
    ``saved``: last checkpoint before ``end``; -1: unknown.
    ``shrinks``: whether the job continues on its other GPUs.
    ``on_request``: whether jobs with checkpoints also write one on request; for all, or for each entry.
    """

    job: Ints
    node: Ints
    gpus: Ints
    start: Ints
    end: Ints
    every: Ints
    saved: Ints
    size: Floats
    shrinks: Bools
    on_request: Bools | bool = True

    @classmethod
    def ordered(
        cls,
        job: Ints,
        node: Ints,
        gpus: Ints,
        start: Ints,
        end: Ints,
        every: Ints | int,
        saved: Ints | int = -1,
        fewest: Ints | int = NEVER,
    ) -> "Placements":
        """Build from entries in any order; ``fewest``: minimum number of GPUs that the job can run on."""
        order = np.lexsort((start, node))
        size = np.bincount(job, weights=gpus)[job[order]].astype(np.float64)
        every_ms, saved_at, min_gpus = (np.broadcast_to(given, job.shape)[order] for given in (every, saved, fewest))
        shrinks = size - gpus[order] >= np.maximum(min_gpus, 1)
        return cls(job[order], node[order], gpus[order], start[order], end[order], every_ms, saved_at, size, shrinks)

    def unsaved(self, entry: Ints, stop_ms: Ints | int) -> Ints:
        """Return the work that jobs lose if they stop at ``stop_ms``, in milliseconds.

        Uses the last checkpoint if it is known and the job ended then, otherwise the checkpoint interval.
        """
        start, every, saved = self.start[entry], self.every[entry], self.saved[entry]
        known = (saved >= start) & (saved <= stop_ms) & (self.end[entry] <= stop_ms + _LATE_MS)
        return np.where(every > 0, np.where(known, stop_ms - saved, (stop_ms - start) % np.maximum(every, 1)), 0)

    def writes(self, entry: Ints) -> Bools:
        """Return whether jobs write a checkpoint on request."""
        return np.asarray(np.broadcast_to(self.on_request, self.every.shape)[entry] & (self.every[entry] > 0))

    def restart_times(self, costs: CostBenefitConfig) -> Ints:
        """Return the time from a job's stop on a node until it computes again, in milliseconds; shape (n,)."""
        return np.where(self.shrinks, duration_ms(costs.resize), duration_ms(costs.restart))

    def running(self, now_ms: int, left: Ints) -> Ints:
        """Return the entries that run at a time; ``left``: when each left its node; shape (n,)."""
        return np.flatnonzero((self.start <= now_ms) & (self.end >= now_ms) & (left > now_ms))

    def turns(self, entry: Ints, now_ms: int) -> Ints:
        """Return when jobs write their next checkpoint, or end."""
        every = self.every[entry]
        return np.minimum(np.where(every > 0, now_ms - self.unsaved(entry, now_ms) + every, NEVER), self.end[entry])


def jobs_of_table(jobs: pd.DataFrame, nodes: pd.Index, gpus: Ints, end: int, checkpoint_every: timedelta) -> Placements:
    """Read the jobs of a dataset.

    ``nodes``, ``gpus``: the fleet's nodes and their numbers of GPUs; jobs on other nodes are ignored.
    ``end``: end of jobs without a recorded end.
    ``checkpoint_every``: checkpoint interval if the table has none for a job (``checkpoint_every_s``).
    """
    place = nodes.get_indexer(jobs["node"].astype("str"))
    jobs, place = jobs[place >= 0], place[place >= 0].astype(np.int64)
    on_node = jobs["gpus"].to_numpy(dtype=np.float64, na_value=np.nan)
    gpus_of_job = np.where(jobs["gpu"].notna().to_numpy(), 1.0, gpus[place].astype(np.float64))
    gpus_on_node = np.where(np.isnan(on_node), gpus_of_job, on_node).astype(np.int64)
    hit = jobs["outcome"].astype("str").str.lower().eq("node_fail").to_numpy()
    every = np.full(len(jobs), checkpoint_every.total_seconds())
    if "checkpoint_every_s" in jobs:
        recorded = jobs["checkpoint_every_s"].to_numpy(dtype=np.float64, na_value=np.nan)
        every = np.where(recorded >= 0, recorded, every)
    saved = milliseconds(jobs["checkpointed_at"])
    fewest = jobs["min_gpus"].astype("Float64") if "min_gpus" in jobs else pd.Series(pd.NA, jobs.index, "Float64")
    return Placements.ordered(
        name_codes(jobs["job"].astype("str"))[0].astype(np.int64), place, np.minimum(gpus_on_node, gpus[place]),
        milliseconds(jobs["started_at"]), np.minimum(milliseconds(jobs["ended_at"]), end) + _LATE_MS * hit,
        (every * 1000).astype(np.int64), np.where(saved == NEVER, -1, saved),
        fewest.fillna(float(NEVER // 2)).to_numpy(dtype=np.int64),
    )  # fmt: skip


def generated_load(
    gpus: Ints,
    begin: int,
    end: int,
    seed: int,
    checkpoint_every: timedelta,
    gpus_per_job: int | None = None,
    largest: int | None = None,
) -> Placements:
    """Generate a load and schedule it by first fit.

    ``gpus``: GPUs of each node.
    ``gpus_per_job``: size of all jobs, with durations of the next larger size in the trace, up to :data:`_LARGEST`
    GPUs; None: sizes as in the trace.
    ``largest``: size of the largest jobs, instead of that in the trace.
    """
    rng = np.random.default_rng(seed)
    sizes, shares = np.array([row[0] for row in _SHAPE]), np.array([row[1] for row in _SHAPE])
    if largest is not None:
        sizes = np.minimum(np.append(sizes[:-1], largest), largest)
    if gpus_per_job is not None:
        shares = (sizes == sizes[np.searchsorted(sizes, min(gpus_per_job, _LARGEST))]).astype(np.float64)
        sizes = np.full(len(sizes), gpus_per_job)
    total, span = int(gpus.sum()), end - begin
    hours = np.array([_hours_of(row[2], (np.arange(1000) + 0.5) / 1000).mean() for row in _SHAPE])
    capped = np.minimum(sizes, total)
    target_hours = UTILIZATION * total * span / HOUR_MS
    count = max(1, round(target_hours / float((shares * capped * hours).sum() / shares.sum())))
    kind = rng.choice(len(sizes), count, p=shares / shares.sum())
    durations = np.empty(count)
    for number, row in enumerate(_SHAPE):
        of_kind = kind == number
        durations[of_kind] = _hours_of(row[2], rng.random(int(of_kind.sum())))
    arrival = np.sort(rng.integers(begin, end, count))
    durations_ms = np.maximum(1, (durations * HOUR_MS)).astype(np.int64)
    return first_fit(gpus, capped[kind], arrival, durations_ms, end, duration_ms(checkpoint_every))


def _hours_of(quantiles: tuple[float, ...], shares: Floats) -> Floats:
    """Interpolate quantiles of hours, linearly in the logarithm."""
    return np.asarray(np.exp(np.interp(shares * _QUANTILES[-1], _QUANTILES, np.log(np.maximum(quantiles, 1 / 60)))))


def first_fit(gpus: Ints, size: Ints, arrival: Ints, duration: Ints, end: int, every: int) -> Placements:
    """Schedule gangs first come, first served without backfilling, each on the first nodes it fits on.

    ``gpus``: GPUs of each node. A job that fits on one node gets all its GPUs there; a larger one takes whole nodes.
    ``size``: at most the fleet's GPUs; ``arrival``: ascending; ``duration``, ``end``, ``every``: milliseconds.
    Returns: the jobs that start before ``end``; a gang starts on all its nodes together.
    """
    free_nodes, now = _FreeNodes(gpus.tolist()), 0
    starts: list[int] = []
    allocations: list[list[tuple[int, int]]] = []
    running: list[tuple[int, int]] = []
    for job, (wanted, arrived, long) in enumerate(zip(size.tolist(), arrival.tolist(), duration.tolist(), strict=True)):
        now = max(now, arrived)
        while True:
            while running and running[0][0] <= now:
                for node, count in allocations[heapq.heappop(running)[1]]:
                    free_nodes.add(node, count)
            allocation = free_nodes.room(wanted)
            if allocation:
                break
            # Terminates: a job is no larger than the fleet, so it fits once all others have ended.
            now = running[0][0]
        if now >= end:
            break
        for node, count in allocation:
            free_nodes.add(node, -count)
        starts.append(now)
        allocations.append(allocation)
        heapq.heappush(running, (now + long, job))
    nodes, on_node = np.array([*chain.from_iterable(allocations)], dtype=np.int64).reshape(-1, 2).T
    number = np.repeat(np.arange(len(starts)), [len(allocation) for allocation in allocations])
    start = np.array(starts, dtype=np.int64)[number]
    return Placements.ordered(number, nodes, on_node, start, start + duration[number], every)


class _FreeNodes:
    """Nodes with free GPUs, as sets of bits, of which the lowest is the first node."""

    def __init__(self, gpus: list[int]) -> None:
        self._gpus, self._free, self._most = gpus, [0] * len(gpus), max(gpus)
        self._with_free = [0] * (self._most + 1)  # nodes with at least so many free GPUs
        self._empty = self._empty_gpus = 0  # nodes without jobs
        for node, count in enumerate(gpus):
            self._empty |= (count == 0) << node
            self.add(node, count)

    def add(self, node: int, count: int) -> None:
        """Add free GPUs to a node, or remove them."""
        before, after, gpus, bit = self._free[node], self._free[node] + count, self._gpus[node], 1 << node
        for least in range(min(before, after) + 1, max(before, after) + 1):
            self._with_free[least] ^= bit
        if (before == gpus) != (after == gpus):
            self._empty ^= bit
            self._empty_gpus += gpus if after == gpus else -gpus
        self._free[node] = after

    def room(self, wanted: int) -> list[tuple[int, int]]:
        """Return the first nodes that a job fits on now, and its GPUs on each; empty if it does not fit."""
        if wanted <= self._most:
            nodes = self._with_free[wanted]
            return [(_lowest(nodes), wanted)] if nodes else []
        allocation: list[tuple[int, int]] = []
        nodes, lacking = self._empty, wanted if self._empty_gpus >= wanted else 0
        while lacking > 0:
            node = _lowest(nodes)
            nodes ^= 1 << node
            lacking -= self._gpus[node]
            allocation.append((node, self._gpus[node]))
        return allocation


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


LEAVE: Final = timedelta(minutes=1)
"""Time from an eviction until the job has left; assumption."""


@dataclass(frozen=True, slots=True)
class ReplayedFleet:
    """A fleet during the scored period; times in milliseconds.

    ``nodes``: without units, jobs and marks; other fields refer to them by position.
    ``installations``: units of each node, with start and end of their installation.
    ``gpus``: GPUs of each node; shape (nodes,).
    ``failed``, ``unit``, ``at``, ``until``: node, unit (empty: the whole node), start and end of each failure, ordered
    by time; the node is down in between; shape (failures,).
    ``family``: class of each failure.
    """

    nodes: tuple[NodeView, ...]
    installations: tuple[tuple[tuple[str, int, int], ...], ...]
    gpus: Ints
    failed: Ints
    unit: tuple[str, ...]
    at: Ints
    until: Ints
    begin: int
    end: int
    family: tuple[str, ...] = ()

    @classmethod
    def of(cls, inventory: pd.DataFrame, failures: pd.DataFrame, begin: int, end: int) -> "ReplayedFleet":
        """Build from tables; ``failures``: ``gpu``, ``node``, ``start``, ``end`` (null: ongoing)."""
        known = inventory.astype(object).where(inventory.notna(), None)
        since, until = milliseconds(inventory["installed_at"]), milliseconds(inventory["removed_at"])
        nodes: dict[str, NodeView] = {}
        units: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
        domains = [known[name] if name in known else [None] * len(known) for name in _PLACE]
        for node, gpu, first, last, *place in zip(known["node"], known["gpu"], since, until, *domains, strict=True):
            if first < end and last > begin:
                cluster, group, rack, domain = place
                nodes[node] = NodeView(node, cluster or "cluster", group or "all", rack, domain)
                units[node].append((gpu or node, int(first), int(last)))
        names = sorted(nodes)
        most = [max(sum(a <= since < b for _, a, b in units[name]) for _, since, _ in units[name]) for name in names]
        place, failed_at = pd.Index(names).get_indexer(failures["node"].astype("str")), milliseconds(failures["start"])
        chosen = np.flatnonzero((place >= 0) & (failed_at < end) & (milliseconds(failures["end"]) > begin))
        chosen = chosen[np.argsort(failed_at[chosen], kind="stable")]
        return cls(
            tuple(nodes[name] for name in names), tuple(tuple(units[name]) for name in names),
            np.array(most, dtype=np.int64), place[chosen].astype(np.int64),
            tuple(failures["gpu"].astype(object).where(failures["gpu"].notna(), "").iloc[chosen]),
            failed_at[chosen], np.minimum(milliseconds(failures["end"]), end)[chosen], begin, end,
            tuple(failures["failure_class"].iloc[chosen]) if "failure_class" in failures else ("other",) * len(chosen),
        )  # fmt: skip

    @property
    def names(self) -> pd.Index:
        """Node names."""
        return pd.Index([node.name for node in self.nodes])

    def boots(self) -> list[dict[str, Any]]:
        """Return a boot event at the end of each failure: a node that is back in service has booted since."""
        ends = sorted({*zip(self.until.tolist(), self.failed.tolist(), strict=True)})
        return [
            dict.fromkeys(("timestamp", "known_at"), from_ms(until))
            | {"node": self.nodes[node].name, "gpu": None, "type": BOOT[0], "code": BOOT[1], "detail": None}
            for until, node in ends
        ]

    def down(self, now_ms: int) -> set[int]:
        """Return the nodes that are down at an instant; they run no jobs."""
        return set(self.failed[(self.at <= now_ms) & (now_ms < self.until)].tolist())

    def stage(self, policy: PolicyConfig, stage: Stage) -> PolicyConfig:
        """Return the settings with every group pinned to a stage."""
        return replace(policy, stages=StagesConfig(pinned={node.group_key: stage for node in self.nodes}))


_PLACE: Final = ("cluster", "group", "rack", "nvlink_domain")


def job_views(
    jobs: Placements, entries: Ints, now_ms: int, known: dict[int, tuple[int, JobView]] | None = None
) -> list[JobView]:
    """Return jobs as a scheduler sees them: with the time of their last checkpoint, without their end.

    ``known``: cached views by entry, each with its last checkpoint; updated in place.
    """
    known = {} if known is None else known
    saved_at = np.where(jobs.every[entries] > 0, now_ms - jobs.unsaved(entries, now_ms), -1)
    rows = list(zip(entries.tolist(), saved_at.tolist(), jobs.writes(entries).tolist(), strict=True))
    for entry, saved, writes in rows:
        if entry not in known or known[entry][0] != saved:
            known[entry] = saved, JobView(
                f"job-{jobs.job[entry]}", int(jobs.size[entry]), from_ms(int(jobs.start[entry])),
                None if saved < 0 else from_ms(saved), can_checkpoint=writes, can_shrink=bool(jobs.shrinks[entry]),
            )  # fmt: skip
    return [known[entry][1] for entry, *_ in rows]


def evicted(
    fleet: ReplayedFleet, jobs: Placements, node: int, evicted_at: int, left: Ints, checkpoint: timedelta
) -> tuple[Ints, Ints]:
    """Return when the jobs of a node drained at ``evicted_at`` have left, and which entries these are.

    Jobs that end before their checkpoint is written are not included.

    ``left``: when jobs left their node; shape (entries,).
    """
    entry = np.arange(*np.searchsorted(jobs.node, (node, node + 1)))
    entry = entry[(jobs.start[entry] <= evicted_at) & (left[entry] > evicted_at) & (node not in fleet.down(evicted_at))]
    writes = evicted_at + np.where(jobs.writes(entry), duration_ms(checkpoint), 0)
    outlasts = jobs.end[entry] > writes
    return writes[outlasts] + duration_ms(LEAVE), entry[outlasts]
