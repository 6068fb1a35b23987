"""A fleet and its failures while it was scored, and its jobs as a controller sees them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pandas as pd

from evaluation.value.load import Placements
from evaluation.value.readings import instant
from features.times import duration_ms, milliseconds
from policy.config import PolicyConfig
from policy.episodes import Ints
from policy.fleet import JobView, NodeView
from policy.node_assessment import BOOT
from policy.stages import Stage, StagesConfig

LEAVE: Final = timedelta(minutes=1)
"""From an eviction until the job is gone; assumption."""


@dataclass(frozen=True, slots=True)
class ReplayedFleet:
    """A fleet while it was scored.

    ``nodes``: without units, jobs and marks; other fields hold positions in it.
    ``stays``: of each node, its units with begin and end of their time there.
    ``gpus``: GPUs of each node; shape (nodes,).
    ``failed``, ``unit``, ``at``, ``until``: node, unit (empty: the whole node), begin and end of each failure, ordered
    by time; a node is down in between; shape (failures,).
    ``begin``, ``end``: in milliseconds, as all times.
    ``family``: class of each failure.
    """

    nodes: tuple[NodeView, ...]
    stays: tuple[tuple[tuple[str, int, int], ...], ...]
    gpus: Ints
    failed: Ints
    unit: tuple[str, ...]
    at: Ints
    until: Ints
    begin: int
    end: int
    family: tuple[str, ...] = ()

    @classmethod
    def of(cls, inventory: pd.DataFrame, failures: pd.DataFrame, begin: int, end: int) -> ReplayedFleet:
        """Take a fleet from its tables; ``failures``: ``gpu``, ``node``, ``start``, ``end`` (null: not over)."""
        known = inventory.astype(object).where(inventory.notna(), None)
        since, until = milliseconds(inventory["installed_at"]), milliseconds(inventory["removed_at"])
        nodes: dict[str, NodeView] = {}
        stays: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
        domains = [known[name] if name in known else [None] * len(known) for name in _PLACE]
        for node, gpu, first, last, *place in zip(known["node"], known["gpu"], since, until, *domains, strict=True):
            if first < end and last > begin:
                cluster, group, rack, domain = place
                nodes[node] = NodeView(node, cluster or "cluster", group or "all", rack, domain)
                stays[node].append((gpu or node, int(first), int(last)))
        names = sorted(nodes)
        most = [max(sum(a <= since < b for _, a, b in stays[name]) for _, since, _ in stays[name]) for name in names]
        place, at = pd.Index(names).get_indexer(failures["node"].astype("str")), milliseconds(failures["start"])
        chosen = np.flatnonzero((place >= 0) & (at < end) & (milliseconds(failures["end"]) > begin))
        chosen = chosen[np.argsort(at[chosen], kind="stable")]
        return cls(
            tuple(nodes[name] for name in names), tuple(tuple(stays[name]) for name in names),
            np.array(most, dtype=np.int64), place[chosen].astype(np.int64),
            tuple(failures["gpu"].astype(object).where(failures["gpu"].notna(), "").iloc[chosen]),
            at[chosen], np.minimum(milliseconds(failures["end"]), end)[chosen], begin, end,
            tuple(failures["failure_class"].iloc[chosen]) if "failure_class" in failures else ("other",) * len(chosen),
        )  # fmt: skip

    @property
    def names(self) -> pd.Index:
        """The nodes' names."""
        return pd.Index([node.name for node in self.nodes])

    def boots(self) -> list[dict[str, Any]]:
        """Return an event for each end of a failure: a node that is back in service has booted since it failed."""
        ends = sorted({*zip(self.until.tolist(), self.failed.tolist(), strict=True)})
        return [
            dict.fromkeys(("timestamp", "known_at"), instant(until))
            | {"node": self.nodes[node].name, "gpu": None, "type": BOOT[0], "code": BOOT[1], "detail": None}
            for until, node in ends
        ]

    def down(self, at: int) -> set[int]:
        """Give the nodes in repair at a time, on which no job runs."""
        return set(self.failed[(self.at <= at) & (at < self.until)].tolist())

    def stage(self, policy: PolicyConfig, stage: Stage) -> PolicyConfig:
        """Give settings with every group in a stage, as if it had earned that."""
        return replace(policy, stages=StagesConfig(pinned={node.group_key: stage for node in self.nodes}))


_PLACE: Final = ("cluster", "group", "rack", "nvlink_domain")


def job_views(jobs: Placements, entries: Ints, at: int) -> list[JobView]:
    """Show jobs as a scheduler does, which knows when they last wrote a checkpoint, and not when they end."""
    columns = (jobs.job, jobs.size, jobs.start, jobs.every, jobs.shrinks)
    more = (jobs.writes(entries), jobs.unsaved(entries, at))
    rows = zip(*(column.tolist() for column in (*(column[entries] for column in columns), *more)), strict=True)
    return [
        JobView(
            f"job-{job}", int(size), instant(start), instant(at - unsaved) if every else None,
            can_checkpoint=writes, can_shrink=shrinks,
        )
        for job, size, start, every, shrinks, writes, unsaved in rows
    ]  # fmt: skip


def evicted(
    fleet: ReplayedFleet, jobs: Placements, node: int, at: int, left: Ints, checkpoint: timedelta
) -> tuple[Ints, Ints]:
    """Give when jobs of a node that is emptied at a time are gone, and which: those that run on until then.

    ``left``: when jobs have left their node; shape (entries,).
    """
    entry = np.arange(*np.searchsorted(jobs.node, (node, node + 1)))
    entry = entry[(jobs.start[entry] <= at) & (left[entry] > at) & (node not in fleet.down(at))]
    writes = at + np.where(jobs.writes(entry), duration_ms(checkpoint), 0)
    stays = jobs.end[entry] > writes
    return writes[stays] + duration_ms(LEAVE), entry[stays]
