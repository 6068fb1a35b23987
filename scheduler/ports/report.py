"""What a round did, for the terminal, the log and the metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from policy.plan import Action, NodeDecision, Plan
from scheduler.ports.codec import plain_of
from scheduler.ports.readings import Write

_BOUNDED = ("verify", "checkpoint")
# One answer among others, after which it continues all the same: a diagnostic is run again, a checkpoint has a
# deadline.


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one action.

    ``outcome``: ``done``, ``already``, ``skipped``, ``failed``, ``unknown``, or ``would`` in a rehearsal.
    ``message``: why not, or what the scheduler answered.
    ``writes``: what was, or would be, written.
    """

    action: Action
    outcome: str
    message: str = ""
    writes: tuple[Write, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkStep:
    """What became of one thing that was done, or waited for, to empty a node.

    ``verb``: ``checkpoint``, ``evict``, ``wait``, ``empty``, ``verify``, ``tell``, ``hold``.
    ``outcome``: ``done``, ``already``, ``blocked``, ``gone``, ``failed``, ``unknown``, ``waiting``, ``passed``,
    ``inconclusive``, ``held``, or ``would`` in a rehearsal.
    ``workload``: None: it is about the node.
    """

    node: str
    verb: str
    outcome: str
    workload: str | None = None
    message: str = ""
    writes: tuple[Write, ...] = ()

    @property
    def line(self) -> str:
        """The step in one line."""
        what = self.node if self.workload is None else f"{self.workload} on {self.node}"
        return f"{self.outcome:<8} {self.verb} {what}" + (f": {self.message}" if self.message else "")


@dataclass(slots=True)
class RoundReport:
    """What one round did.

    ``active``: whether the lease was held; a standby does nothing, and that is no failure.
    ``plan``: None: it came to no decision.
    ``number``: the decision's number in the ledger; None: not recorded, for there was nothing to do or report.
    ``work``: what was done to empty nodes.
    ``notes``: what was out of the ordinary.
    ``refused_scores``: records of the newest scores that were not used.
    ``probe_passes``: probes that passed in the last days: ``right`` where a failure followed, ``wrong`` where none did.
    """

    at: datetime
    active: bool = True
    plan: Plan | None = None
    number: int | None = None
    steps: list[Step] = field(default_factory=list)
    work: list[WorkStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rehearsed: bool = False
    refused_scores: int = 0
    probe_passes: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether an operator should look: an error, or an action that did not come to what it should.

        A checkpoint that could not be requested is reported in ``work`` and counted by the metrics; it fails no round.
        """
        outcomes = {step.outcome for step in self.steps}
        outcomes |= {step.outcome for step in self.work if step.verb not in _BOUNDED}
        return bool(self.errors) or not outcomes.isdisjoint(("failed", "unknown"))

    def at_risk(self) -> tuple[NodeDecision, ...]:
        """Return the nodes at risk on which there was nothing to do, the riskiest first."""
        if self.plan is None:
            return ()
        acted = {step.action.node for step in self.steps}
        at_risk = [node for node in self.plan.nodes.values() if node.tier != "clear" and node.node not in acted]
        return tuple(sorted(at_risk, key=lambda node: (-(node.risk or 0.0), node.node)))

    def to_json(self) -> dict[str, Any]:
        """Return the round as a JSON object."""
        plan = self.plan
        return {
            "at": self.at.isoformat(),
            "active": self.active,
            "rehearsed": self.rehearsed,
            "failed": self.failed,
            "decision": self.number,
            "steps": [
                _picked(step.action, "verb", "node", "to", "tier", "risk", "reasons")
                | {"outcome": step.outcome, "message": step.message, "writes": plain_of(step.writes)}
                for step in self.steps
            ],
            "work": plain_of(self.work),
            "at_risk": [
                _picked(decision, "node", "tier", "risk", "wanted", "target", "reasons") for decision in self.at_risk()
            ],
            "over_budget": dict(plan.over_budget) if plan else {},
            "breaker": {key: cause.message for key, cause in plan.open_causes.items()} if plan else {},
            "stages": {group: state.stage for group, state in plan.stages.items()} if plan else {},
            "fleet": list(plan.reasons) if plan else [],
            "notes": self.notes,
            "refused_scores": self.refused_scores,
            "probe_passes": dict(self.probe_passes),
            "errors": self.errors,
        }


def _picked(value: Action | NodeDecision, *names: str) -> dict[str, Any]:
    return {name: plain_of(getattr(value, name)) for name in names}
