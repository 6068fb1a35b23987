"""Controllers on an API server in memory, and the nodes that they look after."""

import copy
from datetime import timedelta

from foundation.kubernetes.client import KubernetesClient
from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig, DisruptionBudget
from policy.config import PolicyConfig
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.node_tier.hysteresis import HysteresisConfig
from policy.stages import StagesConfig
from policy.tiers import TierThresholds
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.kubernetes.workloads import KubernetesWorkloads
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from scheduler.ports.report import RoundReport
from scheduler.ports.risks import MemoryFacts, MemoryRisks
from tests.clock import Clock
from tests.scheduler.cluster import risks_of
from tests.scheduler.kubernetes.api_world import World
from tests.scheduler.kubernetes.objects import SETTINGS, T0

NAMES = [f"n{i}" for i in range(5)]
MOST_OUT = 2
POLICY = PolicyConfig(
    TierThresholds(0.1, 0.3, 0.6),
    hysteresis=HysteresisConfig(rise_after=1, fall_after=1),
    stages=StagesConfig(pinned={"kubernetes/none": "hard"}),
    budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable=MOST_OUT),), ()),
    breaker=BreakerConfig(max_risky=1.0, jump=100.0),
    cost_benefit=CostBenefitConfig(always=True, may_wait=False),
)
OURS = "predrain.io/"


class Fleet:
    """Controllers, one after another, on a world."""

    def __init__(self, cluster: KubernetesClient, world: World, settings: KubernetesSettings = SETTINGS) -> None:
        self.cluster, self.world, self.settings = cluster, world, settings
        self.clock, self.elapsed = ManualClock(T0), Clock()
        world.now = self.clock.now
        self.risks, self.values = MemoryRisks(), dict.fromkeys(NAMES, 0.01)
        self.restarts = 0
        self.evacuation = EvacuationSettings()
        self.theirs: dict[str, object] = {}
        self.claimed: dict[str, set[str]] = {}  # what somebody made of our marks on a node, and is theirs since
        self.scored()
        self.restart()

    def restart(self) -> None:
        """Another process on another machine takes over: no ledger, no memory."""
        self.restarts += 1
        scheduler = KubernetesScheduler(
            self.cluster, self.clock, self.settings, elapsed=self.elapsed.monotonic, sleep=self.elapsed.sleep
        )
        self.workloads = KubernetesWorkloads(scheduler)
        self.ledger = SqliteLedger(None)
        evacuation = Evacuation(scheduler, self.workloads, self.clock, self.evacuation, {}, None)
        self.controller = Controller(
            scheduler, self.risks, VerifiedFacts(MemoryFacts(), evacuation.results), self.ledger, self.clock,
            POLICY, ControllerSettings(), holder=f"p{self.restarts}", code="1.0", evacuation=evacuation,
        )  # fmt: skip

    def scored(self, **values: float) -> None:
        """A new decision time."""
        self.values |= values
        self.risks.risks = risks_of(self.values, self.clock.now())

    def later(self, by: timedelta) -> None:
        self.clock.move(by)
        self.elapsed.move(seconds=by.total_seconds())

    def round(self) -> RoundReport:
        """One round, a minute after the last."""
        self.later(timedelta(minutes=1))
        self.world.evicted.clear()
        report = self.controller.round()
        for target, home in self.world.evicted:
            assert target["metadata"].get("labels", {}).get("kind", "free") in MOVABLE
            assert f"{OURS}drain" in home["metadata"]["annotations"], "nothing drains its node"
            assert home["metadata"]["name"] not in self.claimed
            assert not home["spec"].get("unschedulable"), "somebody else has its node"
        return report

    def ours(self, name: str) -> list[str]:
        """The effects of our taints on a node."""
        taints = self.world.objects[f"/api/v1/nodes/{name}"]["spec"].get("taints") or []
        return [taint["effect"] for taint in taints if taint["key"] == f"{OURS}at-risk"]

    def named_ours(self, name: str) -> set[str]:
        """All that stands on a node under our names."""
        raw = self.world.objects[f"/api/v1/nodes/{name}"]
        taints = [taint for taint in raw["spec"].get("taints") or [] if taint["key"] == f"{OURS}at-risk"]
        texts = [*(raw["metadata"].get("labels") or {}).items(), *(raw["metadata"].get("annotations") or {}).items()]
        return {repr(item) for item in (*taints, *(text for text in texts if text[0].startswith(OURS)))}

    def foreign(self) -> dict[str, object]:
        """All that is not ours."""
        result = {}
        for name in NAMES:
            raw = self.world.objects[f"/api/v1/nodes/{name}"]
            metadata = raw["metadata"]
            result[name] = copy.deepcopy(
                (
                    {k: v for k, v in (metadata.get("labels") or {}).items() if not k.startswith(OURS)},
                    {k: v for k, v in (metadata.get("annotations") or {}).items() if not k.startswith(OURS)},
                    [t for t in raw["spec"].get("taints") or [] if t["key"] != f"{OURS}at-risk"],
                    raw["spec"].get("unschedulable"),
                )
            )
        return result


JOBS = "/apis/batch/v1/namespaces/team/jobs"
MOVABLE = ("free", "indexed")
