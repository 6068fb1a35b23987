"""All settings of the policy together."""

from dataclasses import field, replace
from datetime import datetime, timedelta
from typing import Literal

from pydantic.dataclasses import dataclass as checked

from foundation.settings import PositiveTime
from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig
from policy.fleet import NodeView
from policy.ladder.cost_benefit import CostBenefitConfig, worth_of
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import Rung
from policy.maintenance import MaintenanceWindow
from policy.node_tier.hard_rules import HardRulesConfig
from policy.node_tier.hysteresis import HysteresisConfig, NodeRiskConfig
from policy.stages import StagesConfig
from policy.tiers import ChosenThresholds, TierThresholds


@checked(frozen=True, slots=True)
class PolicyConfig:
    """All that can be set.

    ``thresholds``: lowest node risk of each tier; none of them: no score has a tier.
    ``thresholds_from``: ``settings``: those above. ``scores``: those that the scores themselves were given their tiers
    by (:func:`policy.tiers.choose_thresholds`: given, promised by the model, or neither), applied as there: see
    :meth:`by_scores`. ``costs``: ``high`` is what it costs to be wrong, node by node: see :meth:`thresholds_of`.
    ``rungs``: of the ladder, what may be done on a prediction; without ``drain``, jobs end by themselves. Hard rules
    drain all the same. ``probe`` and ``checkpoint`` have to be added by name.
    ``horizon``: what a risk looks ahead, gap included.
    ``renew``: what is published is written again when its end moves by so much, or is so near.
    ``maintenance``: planned ones: nothing new is put on their nodes, and what is seen in them is no evidence.
    ``forget``: how long a node that is missing from the listing is remembered.
    The other fields: one for each concept.
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

    def thresholds_of(self, node: NodeView, now: datetime) -> TierThresholds:
        """Give the thresholds of one node.

        With ``costs``, ``high`` is the risk at or above which a drain of this very node, with the jobs that run on it
        now, saves more than it costs (``Worth.break_even``), and never below a lower tier. A
        node of which no drain is worth its cost is never ``high``.
        """
        if self.thresholds_from != "costs":
            return self.thresholds
        gpus, found = max(1, len(node.units)), self.probes.mean_found
        even = worth_of(gpus, node.jobs, 0.0, self.horizon, self.cost_benefit, now, found).break_even
        if even is None:
            return self.thresholds
        below = [value for _, value in self.thresholds.items() if value is not None]
        return replace(self.thresholds, high=max(even, *below) if below else even)

    def by_scores(self, chosen: ChosenThresholds) -> "PolicyConfig":
        """Give the settings with the thresholds behind the scores, and the risk of a node that these are for."""
        return replace(self, thresholds=chosen.thresholds, node_risk=NodeRiskConfig(chosen.basis))
