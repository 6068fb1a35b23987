"""Settings out of their range are refused by name."""

from datetime import timedelta

import pytest

from policy.breaker import BreakerConfig
from policy.budget import DisruptionBudget, RateLimit
from policy.fleet import JobView, Score
from policy.node_tier.hard_rules import RULES, HardRule, HardRulesConfig
from policy.stages import Bar
from tests.policy.decide_world import HOUR, T0

ZERO = timedelta(0)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (BreakerConfig, {"max_risky": 20}, "max_risky"),
        (BreakerConfig, {"history": 2}, r"min_history is 4: give at most history \(2\)"),
        (DisruptionBudget, {"scope": "group"}, "the disruption budget of scope group has no limit: give max_.*"),
        (RateLimit, {"scope": "fleet"}, "the rate limit of scope fleet has no limit: give max_nodes or max_share"),
        (Bar, {"min_precision": 1.5}, "min_precision"),
        (HardRule, {"fact": "x", "tier": "high", "holds": ZERO, "description": ""}, "holds"),
        (HardRulesConfig, {"rules": (*RULES, RULES[0])}, "rules has more than one rule on xid 64: .*"),
        (
            HardRulesConfig,
            {"rules": (HardRule("row_remap_failure", "high", HOUR, "no spare rows"),)},
            "rules names facts that nothing reports: row_remap_failure: .*",
        ),
        (Score, {"risk": 1.5, "decided_at": T0, "expires_at": T0}, "risk is 1.5: give a number from 0 to 1, or None"),
        (JobView, {"name": "j", "gpus": 0}, "gpus of job j is 0: give a positive number"),
    ],
)
def test_a_value_out_of_its_range_is_refused(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(**given)
