"""A cluster for thousands of histories: no threads, and a ledger without the inputs of decisions."""

import json
import sqlite3
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from random import Random
from typing import TypeVar

from foundation.running import Patience
from policy.breaker import BreakerConfig, CommonCauseConfig
from policy.budget import BudgetConfig
from policy.ladder.rungs import RUNGS
from policy.plan import Plan
from scheduler.controller.controller import Controller
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.codec import plain_of
from scheduler.ports.node_object import Keys
from scheduler.ports.records import RoundRecord, digest_of
from tests.policy.decide_world import config
from tests.scheduler.cluster import DISRUPTION_BUDGETS, RATE_LIMITS, Cluster
from tests.scheduler.evacuation.emptying_cluster import EmptyingCluster

T = TypeVar("T")

CALLS = {
    "scheduler": "apply apply save_state revalidate read_switches hold_lease load_state read_fleet",
    "workloads": "ask_checkpoint evict save_progress on_node checkpoint_state load_progress",
    "verification": "start result",
}
KINDS = "crash_before crash_after crash_before crash_after timeout_before timeout_after conflict refused unreadable"
BUDGETED = config(
    "g", budget=BudgetConfig(DISRUPTION_BUDGETS, RATE_LIMITS), rungs=RUNGS,
    breaker=BreakerConfig(max_risky=1.0, jump=100.0, common_cause=CommonCauseConfig(100)),
)  # fmt: skip
FREE = config("g", free=True, rungs=RUNGS)


class Direct(Patience):
    """It bounds nothing, and starts no thread."""

    def call(self, _: str, call: Callable[[], T]) -> T:
        return call()


def without_threads(controller: Controller) -> None:
    controller._evidence.patience = Direct(0)


@cache
def _empty() -> bytes:
    ledger = SqliteLedger(None)
    return ledger._link.serialize()


class LightLedger(SqliteLedger):
    """A ledger in memory: a copy of an empty one, whose decisions have no inputs."""

    def __init__(self) -> None:
        super().__init__(None)

    def _open(self) -> sqlite3.Connection:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.deserialize(_empty())
        weakref.finalize(self, self._connection.close).atexit = False
        return self._connection

    def begin(self, record: RoundRecord) -> int:
        number = self.begin_releases(record.plan, record.holder, record.code)
        for alert in record.plan.alerts:
            text = json.dumps(plain_of(alert))
            self._add("INSERT INTO alerts VALUES (?, ?, ?, ?)", number, alert.unit, alert.at.timestamp(), text)
        return number

    def begin_releases(self, plan: Plan, holder: str, code: str) -> int:
        return self._add(
            "INSERT INTO rounds (at, holder, code, inputs, plan, digest, summary) VALUES (?, ?, ?, '', '', ?, '')",
            plan.now.isoformat(), holder, code, digest_of(plan),
        )  # fmt: skip

    def _adding(self, *, at_once: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


def new_ledger(random: Random) -> SqliteLedger:
    """Return a light ledger mostly, and the whole one at times."""
    return SqliteLedger(None) if random.random() < 0.05 else LightLedger()


class LightCluster(EmptyingCluster):
    """A cluster whose controllers start no threads."""

    def restart(self, holder: str | None = None) -> None:
        super().restart(holder)
        without_threads(self.controller)


@cache
def _of_others() -> tuple[SqliteLedger, Keys]:
    return SqliteLedger(None), Keys(owner="other")


def another_installation(cluster: Cluster, lease: timedelta) -> Cluster:
    """Return another installation on the same nodes."""
    ledger, keys = _of_others()
    other = Cluster(0, ledger=ledger, lease=lease)
    other.names, other.clock, other.risks = cluster.names, cluster.clock, cluster.risks
    other.scheduler.nodes, other.scheduler._clock, other.scheduler.keys = cluster.scheduler.nodes, cluster.clock, keys
    other.restart()
    without_threads(other.controller)
    return other
