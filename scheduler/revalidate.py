"""Whether an action is still right just before it is carried out: what was decided on, against what is there now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from policy.fleet import Level, Marks, NodeView, UnitView
from policy.plan import Action
from scheduler.readings import NodeReading, Switches


@dataclass(frozen=True, slots=True)
class Expected:
    """What an action was decided on.

    ``level``: what of ours must stand on the node now: what stood at the decision, with what was done since.
    """

    view: NodeView
    boot_id: str | None
    level: Level


def why_not(
    action: Action,
    expected: Expected,
    reading: NodeReading,
    units: tuple[UnitView, ...],
    switches: Switches,
    now: datetime,
) -> str | None:
    """Say why an action must not be carried out any more.

    Returns: in words; None: it is still right. A release only has to find a node that can be read: it takes off nothing
    but what is ours, so that no change of anything else makes it wrong.
    """
    view = reading.view
    if not view.readable:
        return "its state cannot be read now"
    if action.verb == "release":
        return None
    return (
        _told_otherwise(action, view, switches)
        or _other_node(expected, reading)
        or _other_marks(action, expected, view)
        or _other_evidence(action, expected.view, view, units, now)
    )


def stands(action: Action, marks: Marks) -> bool:
    """Tell whether what an action asks for stands on a node."""
    if action.verb == "release":
        return marks.level <= action.to
    if action.verb == "publish":
        found = marks.published
        return found is not None and (found.tier, found.expires_at) == (action.tier, action.expires_at)
    return {"soft_taint": marks.soft, "taint": marks.tainted, "drain": marks.drained}[action.verb]


def level_after(action: Action, level: Level) -> Level:
    """Give the level of a node that stood at ``level`` after an action."""
    return min(level, action.to) if action.verb == "release" else max(level, action.to)


def _told_otherwise(action: Action, view: NodeView, switches: Switches) -> str | None:
    if switches.kill:
        return "the kill switch was set"
    if switches.release_all:
        return "everything is to be released"
    if view.opt_out is not None:
        return f"it opted out ({view.opt_out})"
    if action.verb == "publish":
        return None
    if view.foreign is not None:
        return view.foreign
    return "a person took our mark off" if view.undone else None


def _other_node(expected: Expected, reading: NodeReading) -> str | None:
    if reading.boot_id != expected.boot_id:
        return "it booted since the decision"
    now_in, then_in = ({unit.name for unit in view.units} for view in (reading.view, expected.view))
    if now_in and now_in != then_in:
        return f"other devices are in it than at the decision: {', '.join(sorted(now_in ^ then_in))}"
    return None


def _other_marks(action: Action, expected: Expected, view: NodeView) -> str | None:
    if view.marks.level != expected.level:
        return (
            f"{view.marks.level.name.lower()} stands on it, {expected.level.name.lower()} was expected: "
            "somebody changed our marks"
        )
    if action.verb == "drain" and not view.marks.tainted:
        return "it is to be drained, and nothing keeps new work off it"
    return None


def _other_evidence(
    action: Action, then: NodeView, view: NodeView, units: tuple[UnitView, ...], now: datetime
) -> str | None:
    if action.expires_at is None or now >= action.expires_at:
        return "what it rests on has expired"
    if {unit.name: unit for unit in units} != {unit.name: unit for unit in then.units}:
        return "its scores or facts changed since the decision"
    if view.scopes != then.scopes:
        return "its jobs or its place changed since the decision, and with them the floors it counts in"
    if view.down and not then.down:
        return "it went down since the decision"
    return None
