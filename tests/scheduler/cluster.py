"""A small cluster in memory with a controller over it, and hands that change it as people and other tools do."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from policy.breaker import BreakerConfig, CommonCauseConfig
from policy.budget import BudgetConfig, RateLimit
from policy.budget import DisruptionBudget as Budget
from policy.config import PolicyConfig
from policy.fleet import JobView, Level, NodeView, Score, UnitView
from policy.plan import Action
from policy.risk_record import ModelName
from scheduler.controller.controller import Controller
from scheduler.controller.settings import ControllerSettings
from scheduler.file import MemoryNode
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from scheduler.ports.node_object import NodeObject, Taint, view_of
from scheduler.ports.readings import FleetReading, NodeReading, Precondition, WriteResult
from scheduler.ports.report import RoundReport
from scheduler.ports.risks import MemoryFacts, MemoryRisks, Risks
from tests.policy.decide_world import STEP, T0, config
from tests.scheduler.faults import FaultyScheduler

FOREIGN = Taint("team.example/reserved", "yes", "NoSchedule")
DISRUPTION_BUDGETS = (
    Budget("cluster", max_unavailable_share=0.4, min_available=2),
    Budget("rack", max_unavailable=1),
    Budget("job", max_unavailable=1),
)
RATE_LIMITS = (RateLimit("cluster", 2, timedelta(hours=24)),)
MODEL = ModelName("d" * 64, "stacked", 3)


def risks_of(values: Mapping[str, float | None], now: datetime, duration: timedelta = timedelta(hours=6)) -> Risks:
    """What was scored on one GPU of each node."""
    scores = {name: Score(value, now, now + duration, ("its errors rise",)) for name, value in values.items()}
    units = {name: (UnitView(f"{name}-0", score),) for name, score in scores.items()}
    return Risks(units, now, MODEL, now - timedelta(days=1))


class Cluster:
    """All of it."""

    def __init__(
        self, nodes: int = 8, ledger: SqliteLedger | None = None, policy: PolicyConfig | None = None, **settings: object
    ) -> None:
        self.clock = ManualClock(T0)
        self.names = [f"n{i}" for i in range(nodes)]
        self.scheduler = FaultyScheduler([self._node(i) for i in range(nodes)], self.clock)
        self.risks = MemoryRisks()
        self.facts = MemoryFacts()
        self.ledger = ledger or SqliteLedger(None)
        self.policy = policy or config(
            "g", budget=BudgetConfig(DISRUPTION_BUDGETS, RATE_LIMITS),
            breaker=BreakerConfig(max_risky=1.0, jump=100.0, common_cause=CommonCauseConfig(100)),
        )  # fmt: skip
        self.settings = ControllerSettings(**settings)
        self.restarts = 0
        self._levels: dict[str, tuple[MemoryNode, Level]] = {}
        self.values = dict.fromkeys(self.names, 0.01)
        self.scored()
        self.restart()

    def _node(self, i: int) -> MemoryNode:
        name = f"n{i}"
        base = NodeView(
            name, "c", "g", f"r{i // 3}", units=(UnitView(f"{name}-0"), UnitView(f"{name}-1")),
            jobs=(JobView(f"j{i // 2}", 4),), software="550",
        )  # fmt: skip
        target = NodeObject(
            name, {"zone": "a", "team": f"t{i % 2}"}, {"note": "theirs"}, (FOREIGN,) if i % 3 == 0 else ()
        )
        return MemoryNode(target, base, f"boot-{i}")

    def restart(self, holder: str | None = None) -> None:
        """Another process takes over."""
        self.restarts += 1
        self.controller = Controller(
            self.scheduler, self.risks, self.facts, self.ledger, self.clock, self.policy, self.settings,
            holder=holder or f"p{self.restarts}", code="1.0",
        )  # fmt: skip

    def knows_nodes(self) -> None:
        """Let the scheduler give nodes as they were listed, until they are written to, as Kubernetes' adapter does."""
        known: dict[str, NodeReading] = {}
        read_fleet, apply = self.scheduler.read_fleet, self.scheduler.apply

        def read() -> FleetReading:
            fleet = read_fleet()
            known.update({reading.view.name: reading for reading in fleet.nodes})
            return fleet

        def applied(action: Action, precondition: Precondition) -> WriteResult:
            known.pop(action.node, None)
            return apply(action, precondition)

        for name, call in (("read_fleet", read), ("apply", applied), ("as_known", known.get)):
            setattr(self.scheduler, name, call)

    def scored(self, at: datetime | None = None, duration: timedelta = 2 * STEP, **risks: float | None) -> None:
        """A new decision time: risks by node, on its first GPU."""
        when = at or self.clock.now()
        self.values |= risks
        self.risks.risks = Risks(
            {
                name: (
                    UnitView(f"{name}-0", Score(value, when, when + duration, ("its errors rise",))),
                    UnitView(f"{name}-1", Score(0.01, when, when + duration)),
                )
                for name, value in self.values.items()
            },
            when, MODEL, when - timedelta(days=1),
        )  # fmt: skip

    def round(self) -> RoundReport:
        return self.controller.round()

    def clear_faults(self) -> None:
        """What was planned to fail does not."""
        self.scheduler.faults.clear()

    def level(self, name: str) -> Level:
        node = self.scheduler.nodes[name]
        known = self._levels.get(name)
        if known is None or known[0] is not node:
            view = view_of(node.object, node.base, self.scheduler.keys, self.clock.now())
            known = self._levels[name] = (node, view.marks.level)
        return known[1]

    def levels(self) -> dict[str, Level]:
        """What of ours stands, by node; nodes without anything are left out."""
        levels = {name: self.level(name) for name in self.scheduler.nodes}
        return {name: level for name, level in levels.items() if level}

    def change(self, name: str, **base: object) -> None:
        self.scheduler.edit(name, lambda node: replace(node, base=replace(node.base, **base)))

    def write(self, name: str, change: Callable[[NodeObject], NodeObject]) -> None:
        """Somebody else writes to a node."""
        self.scheduler.edit(name, lambda node: replace(node, object=change(node.object)))

    def foreign(self) -> dict[str, object]:
        """Everything in the cluster that is not ours."""
        keys = self.scheduler.keys
        ours = {keys.tier, keys.prediction, keys.applied, keys.drain}
        return {
            name: (
                {k: v for k, v in node.object.labels.items() if k not in ours},
                {k: v for k, v in node.object.annotations.items() if k not in ours},
                tuple(taint for taint in node.object.taints if taint.key != keys.taint),
                node.object.unschedulable,
            )
            for name, node in self.scheduler.nodes.items()
        }


def at_risk(nodes: int = 8, **risks: float) -> Cluster:
    """Return a cluster whose nodes have these risks."""
    cluster = Cluster(nodes)
    cluster.scored(**risks)
    return cluster


def marked(nodes: int = 8, **risks: float) -> Cluster:
    """Return the same after a round."""
    cluster = at_risk(nodes, **risks)
    cluster.round()
    return cluster


def without_our_taints(node: NodeObject, cluster: Cluster) -> NodeObject:
    """A person takes our taints off."""
    kept = tuple(taint for taint in node.taints if taint.key != cluster.scheduler.keys.taint)
    return replace(node, taints=kept)
