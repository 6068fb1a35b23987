"""Settings of the policy."""

from dataclasses import field, replace
from datetime import datetime, timedelta
from typing import Literal

from pydantic.dataclasses import dataclass as checked

from foundation.settings import PositiveTime
from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig
from policy.fleet import NodeView
from policy.ladder.cost_benefit import CostBenefitConfig, hours_of
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import Rung, prices
from policy.maintenance import MaintenanceWindow
from policy.node_tier.hard_rules import HardRulesConfig
from policy.node_tier.hysteresis import HysteresisConfig, NodeRiskConfig
from policy.stages import StagesConfig
from policy.tiers import ChosenThresholds, TierThresholds


@checked(frozen=True, slots=True)
class PolicyConfig:
    """Settings of all parts of the policy.

    ``thresholds``: lowest node risk of each tier; without any, scores have no tier.
    ``thresholds_from``: ``settings``: those of ``thresholds``. ``scores``: those that scoring used. ``costs``: ``high``
    is the break-even risk of each node, and ``watch`` and ``elevated`` are those of ``thresholds``.
    ``rungs``: actions allowed on a prediction. Without ``drain``, jobs are left to finish. Hard rules drain regardless.
    Further rungs, off by default: ``probe``, ``checkpoint``.
    ``horizon``: prediction horizon of a risk, gap included.
    ``renew``: a published prediction is rewritten if its expiry is later by at least this, or less than this ahead.
    ``maintenance``: maintenance windows; they allow no new action except publish, and void evidence from within them.
    ``forget``: how long a node missing from the listing is remembered.
    """

    thresholds: TierThresholds = field(default_factory=TierThresholds)
    thresholds_from: Literal["settings", "scores", "costs"] = "settings"
    rungs: tuple[Rung, ...] = ("publish", "avoid", "swap", "drain")
    horizon: PositiveTime = timedelta(hours=24)
    renew: PositiveTime = timedelta(hours=1)
    forget: PositiveTime = timedelta(days=7)
    maintenance: tuple[MaintenanceWindow, ...] = ()
    node_risk: NodeRiskConfig = field(default_factory=NodeRiskConfig)
    hysteresis: HysteresisConfig = field(default_factory=HysteresisConfig)
    rules: HardRulesConfig = field(default_factory=HardRulesConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    cost_benefit: CostBenefitConfig = field(default_factory=CostBenefitConfig)
    probes: ProbeConfig = field(default_factory=ProbeConfig)

    @property
    def hard_rung(self) -> Rung:
        """The rung that a node in tier ``high`` gets."""
        return "drain" if "drain" in self.rungs else "swap"

    def thresholds_of(self, node: NodeView, now: datetime) -> TierThresholds:
        """Return the thresholds of one node.

        With ``costs``, ``high`` is the break-even risk of :attr:`hard_rung` on this node with its current jobs, at
        least the thresholds of lower tiers. Without a break-even, ``thresholds`` apply as set.
        """
        if self.thresholds_from != "costs":
            return self.thresholds
        gpus = max(1, len(node.units))
        hours = hours_of(gpus, node.jobs, self.horizon, self.cost_benefit, now)
        break_even = prices(gpus, hours, self.cost_benefit, self.probes)[self.hard_rung].break_even
        if break_even is None:
            return self.thresholds
        lower_tiers = [value for _, value in self.thresholds.items() if value is not None]
        return replace(self.thresholds, high=max(break_even, *lower_tiers) if lower_tiers else break_even)

    def by_scores(self, chosen: ChosenThresholds) -> "PolicyConfig":
        """Return the settings with the thresholds that scoring used, and the node risk they apply to."""
        return replace(self, thresholds=chosen.thresholds, node_risk=NodeRiskConfig(chosen.basis))
