"""The node condition ``GPUFailurePredicted`` and the event beside it: for people, and for tools that follow conditions.

Neither is part of what decides: our own marks are read from label, annotation and taints only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from policy.fleet import Level, Published
from policy.plan import Action
from policy.risk_record import instant_words
from scheduler.ports.codec import instant
from scheduler.ports.readings import Write
from telemetry.collect.kubernetes.api import Object

CONDITION: Final = "GPUFailurePredicted"

UNKNOWN_KEPT: Final = timedelta(days=1)
"""How long ``Unknown`` is kept on a node without a prediction."""

_MAX_MESSAGE: Final = 1000
_EVENT_NAMESPACE: Final = "default"
_REMOVED: Final[Object] = {"status": {"conditions": [{"type": CONDITION, "$patch": "delete"}]}}

Status = Literal["True", "False", "Unknown"]

_OF_TIER: Final[dict[str, tuple[Status, str]]] = {
    "high": ("True", "RiskHigh"),
    "elevated": ("False", "RiskElevated"),
    "watch": ("False", "RiskWatched"),
    "clear": ("False", "RiskClear"),
}


@dataclass(frozen=True, slots=True)
class CurrentCondition:
    """The current state of the predrain condition on a node."""

    status: str
    reason: str
    since: datetime | None

    @classmethod
    def of(cls, raw: Object) -> CurrentCondition:
        """Read it as the server gives it."""
        return cls(str(raw.get("status")), str(raw.get("reason")), instant(raw.get("lastTransitionTime")))


def condition_after(action: Action, current: CurrentCondition | None, now: datetime) -> Object | None:
    """Return the status patch that reports the outcome of an action; None: there is nothing to report.

    ``True`` means tier ``high``, for tools that repair nodes follow it. A node that is released because nothing is
    known of it any more becomes ``Unknown``; on one that is clear the condition is removed.
    """
    if action.verb == "publish":
        status, reason = _OF_TIER.get(action.tier, ("Unknown", "RiskUnknown"))
        end = "" if action.expires_at is None else f", holds until {instant_words(action.expires_at)}"
        risk = "" if action.risk is None else f" (risk {action.risk:.3g})"
        message = f"tier {action.tier}{risk}{end}: {'; '.join(action.reasons[:3]) or 'no reasons given'}"
        return _set(status, reason, message, current, now)
    if action.verb == "release" and action.to < Level.PUBLISHED:
        if action.tier == "unknown":
            return _set("Unknown", "PredictionExpired", "nothing is known of it any more", current, now)
        return None if current is None else _REMOVED
    return None


def condition_repaired(current: CurrentCondition | None, published: Published | None, now: datetime) -> Object | None:
    """Return the status patch for a condition that is out of date; None: it is up to date.

    A condition is written after its mark: one may be left behind where a process died between the two, or where the
    prediction expired and no controller ran.
    """
    if current is None or (published is not None and published.expires_at > now):
        return None
    if current.status != "Unknown":
        return _set("Unknown", "PredictionExpired", "the prediction has expired", current, now)
    if published is None and (current.since is None or now - current.since > UNKNOWN_KEPT):
        return _REMOVED
    return None


def condition_write(node: str, current: CurrentCondition | None, content: Object) -> Write:
    """Describe a status patch as a change of the node."""
    (wanted,) = content["status"]["conditions"]
    gone = wanted.get("$patch") == "delete"
    return Write(
        f"node {node}",
        f"status.conditions[{CONDITION}]",
        None if current is None else f"{current.status} ({current.reason})",
        None if gone else f"{wanted['status']} ({wanted['reason']}): {wanted['message']}",
    )


def event_write(event: Object) -> Write:
    """Describe the creation of an event as a change."""
    target = f"node {event['involvedObject']['name']}"
    return Write(target, f"event {event['reason']}", None, f"{event['type']}: {event['message']}")


def event_of(action: Action, node: str, before: Published | None, now: datetime) -> tuple[str, Object] | None:
    """Return the path of the event that reports an action, and the event; None: it only renews a prediction."""
    if action.verb == "publish" and (before is None or before.tier != action.tier):
        kind = "Warning" if action.tier in ("high", "elevated") else "Normal"
        risk = "" if action.risk is None else f", risk {action.risk:.3g}"
        reason, message = "GPUFailurePredicted", f"tier {action.tier}{risk}: {'; '.join(action.reasons[:3])}"
    elif action.verb == "release" and action.to < Level.PUBLISHED:
        kind, reason = "Normal", "GPUFailurePredictionWithdrawn"
        message = "; ".join(action.reasons[:3]) or "nothing stands any more"
    else:
        return None
    stamp = instant_words(now)
    digest = hashlib.sha256(f"{node} {action.verb} {action.tier} {stamp}".encode()).hexdigest()[:16]
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node[:200]}.{digest}", "namespace": _EVENT_NAMESPACE},
        # kubelets name the node as the uid, and that is what `kubectl describe node` looks for
        "involvedObject": {"kind": "Node", "name": node, "uid": node},
        "reason": reason,
        "message": message[:_MAX_MESSAGE],
        "type": kind,
        "source": {"component": "predrain"},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
    return f"/api/v1/namespaces/{_EVENT_NAMESPACE}/events", event


def _set(status: Status, reason: str, message: str, current: CurrentCondition | None, now: datetime) -> Object:
    unchanged = current is not None and current.status == status
    content = {
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message[:_MAX_MESSAGE],
        "lastHeartbeatTime": instant_words(now),
        "lastTransitionTime": instant_words((current.since if unchanged and current else None) or now),
    }
    return {"status": {"conditions": [content]}}
