"""The controller itself on a fleet's history, as the oracle of `evaluation.value.controller_replay`."""

import heapq
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from evaluation.value.controller_replay import Diagnostic
from evaluation.value.load import Placements, ReplayedFleet
from evaluation.value.marks import ReplayMarks
from evaluation.value.readings import Readings
from foundation.instants import from_ms
from foundation.times import duration_ms, instant_ms
from policy.config import PolicyConfig
from policy.plan import NodeDecision
from policy.risk_record import ModelName
from predrain.demo.cluster import MINUTE, SimulatedCluster
from scheduler.evacuation.settings import VerificationSettings
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from scheduler.ports.risks import NO_RISKS, Risks

VALID_FOR = VerificationSettings().valid_for
"""Validity of a passed diagnostic, after which a node that is drained again is evacuated."""


class ControllerOracle:
    """The controller on a simulated cluster, with a round whenever an input changes; arguments as for `Controlled`."""

    def __init__(
        self,
        fleet: ReplayedFleet,
        scores: Readings,
        events: Sequence[Mapping[str, Any]],
        jobs: Placements,
        policy: PolicyConfig,
        reach: timedelta,
        diagnostic: Diagnostic = "none",
    ) -> None:
        self._clock, model = ManualClock(from_ms(fleet.begin)), ModelName("0" * 64, "lightgbm", None)
        code = {name: code for code, name in enumerate(scores.units)}
        self._risks = {
            reading.at: Risks(
                {
                    node.name: tuple(
                        reading.view(unit, code[unit])
                        for unit, *_ in installed
                        if unit in code and reading.scored[code[unit]]
                    )
                    for node, installed in zip(fleet.nodes, fleet.installations, strict=True)
                },
                reading.decided_at, model, reading.fitted_at,
            )
            for reading in scores
        }  # fmt: skip
        self._known = {instant_ms(event["known_at"]) for event in events}
        self._cluster = SimulatedCluster(
            fleet, self, events, jobs, policy, self._clock, SqliteLedger(None), diagnostic=diagnostic, reach=reach
        )

    def read(self) -> Risks:
        """Return the newest scores."""
        decided = [time for time in self._risks if time <= instant_ms(self._clock.now())]
        return self._risks[decided[-1]] if decided else NO_RISKS

    def marks(self) -> ReplayMarks:
        """Run all rounds, and return the marks."""
        cluster, end = self._cluster, self._cluster.fleet.end
        todo = sorted({*self._risks, *self._known, *cluster.fleet.until.tolist()})
        while todo:
            now = from_ms(heapq.heappop(todo))
            if now <= self._clock.now() or instant_ms(now) >= end:
                continue
            marked = self._marked()
            turns = self._turns(cluster.go_round(now), instant_ms(now))
            todo = sorted({*todo, *(turn for turn in turns if turn < end)})
            if self._marked() < marked:  # the budget has room for another node now
                heapq.heappush(todo, instant_ms(now + MINUTE))
            cluster.follow(now)
            for ends in map(cluster.diagnostic.ends, cluster.diagnostic.runs):  # one round reads it, the next acts
                for more in (MINUTE, 2 * MINUTE, VALID_FOR + MINUTE, VALID_FOR + 2 * MINUTE):
                    again = 0 if ends is None else instant_ms(ends + more)
                    if again > instant_ms(self._clock.now()) and again not in todo:
                        heapq.heappush(todo, again)
        return cluster.marks_by(end)

    def _marked(self) -> int:
        """Return the number of nodes that are out of service."""
        end = self._cluster.fleet.end
        return int((self._cluster.marks_by(end).until == end).sum())

    def _turns(self, decisions: Mapping[str, NodeDecision], time: int) -> list[int]:
        """Return when the jobs that drains wait for write a checkpoint or end."""
        fleet, jobs = self._cluster.fleet, self._cluster.jobs
        waits = [name for name, plan in decisions.items() if plan.worth is not None and plan.worth.choice == "wait"]
        entries = jobs.running(time, self._cluster.left)
        entries = entries[np.isin(jobs.node[entries], fleet.names.get_indexer(waits))]
        return [turn + duration_ms(MINUTE) for turn in jobs.turns(entries, time).tolist()]
