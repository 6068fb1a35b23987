"""All settings of the policy together."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig
from policy.hard_rules import HardRulesConfig
from policy.hysteresis import HysteresisConfig
from policy.readings import NodeRiskConfig
from policy.stages import StagesConfig
from policy.tiers import TierThresholds
from policy.worth import WorthConfig


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """All that can be set.

    Attributes
    ----------
    thresholds : TierThresholds
        Given, promised or from costs: see :func:`policy.tiers.choose_thresholds`.
    horizon : timedelta
        What a risk looks ahead, gap included.
    renew : timedelta
        What is published is written anew when its end moves by so much, or is so near.
    forget : timedelta
        How long a node that is missing from the listing is remembered.
    node_risk, hysteresis, rules, budget, stages, breaker, worth
        One for each concept.
    """

    thresholds: TierThresholds
    horizon: timedelta = timedelta(hours=24)
    renew: timedelta = timedelta(hours=1)
    forget: timedelta = timedelta(days=7)
    node_risk: NodeRiskConfig = field(default_factory=NodeRiskConfig)
    hysteresis: HysteresisConfig = field(default_factory=HysteresisConfig)
    rules: HardRulesConfig = field(default_factory=HardRulesConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    worth: WorthConfig = field(default_factory=WorthConfig)

    def __post_init__(self) -> None:
        for name in ("horizon", "renew", "forget"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive time")
