"""The node condition ``GPUFailurePredicted``, for operators and tools that watch conditions.

Decisions ignore it: predrain reads its markers from the label, annotations and taints.
"""

from datetime import datetime, timedelta
from typing import Final

from foundation.kubernetes.api import Object
from policy.fleet import Level, Published
from policy.plan import Action
from policy.risk_record import format_utc
from scheduler.ports.codec import instant
from scheduler.ports.readings import Write

CONDITION: Final = "GPUFailurePredicted"

UNKNOWN_KEPT: Final = timedelta(days=1)
"""How long ``Unknown`` is kept on a node without a prediction."""

_MAX_MESSAGE: Final = 1000
_REMOVED: Final[Object] = {"type": CONDITION, "$patch": "delete"}
_OF_TIER: Final = {
    "high": ("True", "RiskHigh"),
    "elevated": ("False", "RiskElevated"),
    "watch": ("False", "RiskWatched"),
    "clear": ("False", "RiskClear"),
}


def condition_after(action: Action, current: Object | None, now: datetime) -> Object | None:
    """Return the condition after an action that changes the prediction; None if it stays unchanged.

    Only tier ``high`` is ``True``, because repair tools react to it. On a node released without a prediction it becomes
    ``Unknown``; on a clear node it is removed.
    """
    if action.verb != "release":
        status, reason = _OF_TIER.get(action.tier, ("Unknown", "RiskUnknown"))
        end = "" if action.expires_at is None else f", valid until {format_utc(action.expires_at)}"
        risk = "" if action.risk is None else f" (risk {action.risk:.3g})"
        message = f"tier {action.tier}{risk}{end}: {'; '.join(action.reasons[:3]) or 'no reasons given'}"
        return _condition(status, reason, message, current, now)
    if action.to < Level.PUBLISH:
        if action.tier == "unknown":
            return _condition("Unknown", "PredictionExpired", "no prediction", current, now)
        return None if current is None else _REMOVED
    return None


def condition_repaired(current: Object | None, published: Published | None, now: datetime) -> Object | None:
    """Return the correction of an outdated condition; None if it is up to date.

    A condition becomes outdated if a process died after writing the marker, or no controller ran when the prediction
    expired.
    """
    if current is None or (published is not None and published.expires_at > now):
        return None
    if current.get("status") != "Unknown":
        return _condition("Unknown", "PredictionExpired", "the prediction has expired", current, now)
    since = instant(current.get("lastTransitionTime"))
    return _REMOVED if published is None and (since is None or now - since > UNKNOWN_KEPT) else None


def condition_write(node: str, current: Object | None, condition: Object) -> Write:
    """Return a change of the condition as a write."""
    old = None if current is None else f"{current.get('status')} ({current.get('reason')})"
    new = None if condition is _REMOVED else f"{condition['status']} ({condition['reason']}): {condition['message']}"
    return Write(f"node {node}", f"status.conditions[{CONDITION}]", old, new)


def _condition(status: str, reason: str, message: str, current: Object | None, now: datetime) -> Object:
    since = current.get("lastTransitionTime") if current is not None and current.get("status") == status else None
    return {
        "type": CONDITION, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE],
        "lastHeartbeatTime": format_utc(now), "lastTransitionTime": since or format_utc(now),
    }  # fmt: skip
