"""What an operator should know of the thresholds in force: that there are none, or which promise was not made."""

from __future__ import annotations

from datetime import timedelta

from policy.config import PolicyConfig
from policy.tiers import TierThresholds
from scheduler.risks import Risks

_HOUR = timedelta(hours=1)


def odd_thresholds(policy: PolicyConfig, risks: Risks) -> tuple[str, ...]:
    """Say in words what is odd about the thresholds, and about the horizon that they are for.

    Returns: Nothing, where all is as it should be.
    """
    said: list[str] = []
    if risks.horizon is not None and risks.horizon != policy.horizon:
        wrong = "too early" if risks.horizon > policy.horizon else "by more than they said"
        said.append(
            f"the scores look {risks.horizon / _HOUR:g} h ahead and policy.horizon is {policy.horizon / _HOUR:g} h: "
            f"alerts are judged {wrong}"
        )
    if policy.thresholds_from == "settings":
        if policy.thresholds == TierThresholds():
            said.append(
                "the settings give no threshold (policy.thresholds), so no score has a tier: only hard rules act"
            )
    elif policy.thresholds_from == "costs":
        if policy.thresholds.elevated is None:
            said.append(
                "the settings give no threshold of tier elevated (policy.thresholds): no node is softly tainted before "
                "a drain of it is worth its cost"
            )
    elif risks.tiers is None:
        said.append("the scores name no thresholds, so none of them has a tier: only hard rules act")
    else:
        said += [
            f"no node is of tier {name} ({risks.tiers.sources.get(name, 'no reason given')})"
            for name, value in risks.tiers.thresholds.items()
            if value is None
        ]
    return tuple(said)
