"""Report of a round, for the terminal, the log and the metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from policy.plan import Action, NodeDecision, Plan
from scheduler.ports.codec import plain_of
from scheduler.ports.readings import Write

_TOLERATED_VERBS = ("verify", "checkpoint")
# A failure of these does not fail the round: diagnostics are retried, checkpoint requests have a deadline.


@dataclass(frozen=True, slots=True)
class Step:
    """Outcome of one action.

    ``outcome``: ``done``, ``already``, ``skipped``, ``failed``, ``unknown``, or ``would`` in a dry run.
    """

    action: Action
    outcome: str
    message: str = ""
    writes: tuple[Write, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkStep:
    """One step of an evacuation, probe or checkpoint request.

    ``verb``: ``checkpoint``, ``evict``, ``wait``, ``empty``, ``verify``, ``probe``, ``report``, ``hold``.
    ``outcome``: ``done``, ``already``, ``blocked``, ``gone``, ``failed``, ``unknown``, ``waiting``, ``passed``,
    ``inconclusive``, ``held``, or ``would`` in a dry run.
    ``workload``: None: the step is about the node.
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
        target = self.node if self.workload is None else f"{self.workload} on {self.node}"
        return f"{self.outcome:<8} {self.verb} {target}" + (f": {self.message}" if self.message else "")


@dataclass(slots=True)
class RoundReport:
    """Report of one round.

    ``active``: whether the lease was held; a standby round does nothing, and is not a failure.
    ``number``: number of the decision in the ledger; None: not recorded.
    ``probe_passes``: recently passed probes by verdict: ``right`` if a failure followed, ``wrong`` if not, ``open``.
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
        """Whether the round had an error or a failed action.

        Failed checkpoint requests and diagnostics are reported in ``work`` and the metrics, but do not fail the round.
        """
        outcomes = {step.outcome for step in self.steps}
        outcomes |= {step.outcome for step in self.work if step.verb not in _TOLERATED_VERBS}
        return bool(self.errors) or not outcomes.isdisjoint(("failed", "unknown"))

    def at_risk(self) -> tuple[NodeDecision, ...]:
        """Return the nodes at risk without an action in this round, highest risk first."""
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
                _subset(step.action, "verb", "node", "to", "tier", "risk", "reasons")
                | {"outcome": step.outcome, "message": step.message, "writes": plain_of(step.writes)}
                for step in self.steps
            ],
            "work": plain_of(self.work),
            "at_risk": [
                _subset(decision, "node", "tier", "risk", "wanted", "target", "reasons") for decision in self.at_risk()
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


def _subset(value: Action | NodeDecision, *names: str) -> dict[str, Any]:
    return {name: plain_of(getattr(value, name)) for name in names}
