"""The controller's own numbers, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from policy.fleet import Level
from policy.plan import Plan
from policy.stages import STAGES
from policy.tiers import TIERS, UNKNOWN
from scheduler.report import RoundReport
from telemetry.exposition.writer import family, labels

_RESULTS = ("decided", "standby", "failed")


class RoundMetrics:
    """What the rounds of this process did, and how the fleet stood at the last one.

    Labels are bounded: verbs, answers, tiers, levels, stages, kinds of causes and kinds of budgets; never nodes, groups
    or racks, which the ledger has.
    """

    def __init__(self) -> None:
        self._rounds: Counter[str] = Counter(dict.fromkeys(_RESULTS, 0))
        self._steps: Counter[tuple[str, str]] = Counter()
        self._work: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0
        self._last: RoundReport | None = None
        self._last_s = 0.0
        self._decided: Plan | None = None
        self._decided_at: datetime | None = None

    def note(self, report: RoundReport, seconds: float) -> None:
        """Count a round."""
        self._rounds["failed" if report.failed else "decided" if report.active else "standby"] += 1
        self._steps.update((step.action.verb, step.came_to) for step in report.steps)
        self._work.update((step.verb, step.came_to) for step in report.work)
        self._seconds += seconds
        self._last, self._last_s = report, seconds
        if report.plan is not None:
            self._decided, self._decided_at = report.plan, report.at
        elif not report.active:
            self._decided = None  # what this process decided before it lost the lease is not how things stand

    def exposition(self) -> str:
        """Return the page of ``GET /metrics``."""
        page = family("act_rounds_total", "counter", "Rounds, by what they came to.", _by("result", self._rounds))
        page += family("act_round_seconds_total", "counter", "Time that rounds took.", {"": self._seconds})
        page += family("act_actions_total", "counter", "Actions, by what became of them.", _by_two(self._steps))
        page += family("act_work_total", "counter", "What was done to empty nodes, likewise.", _by_two(self._work))
        last = self._last
        if last is not None:
            at = {"": last.at.timestamp()}
            page += family("act_last_round_timestamp_seconds", "gauge", "When the last round began.", at)
            page += family("act_last_round_seconds", "gauge", "What it took.", {"": self._last_s})
            refused = {"": last.refused_scores}
            page += family("act_refused_scores", "gauge", "Records of the newest scores that are refused.", refused)
            page += family("act_active", "gauge", "Whether this process holds the lease.", {"": last.active})
        if self._decided is not None and self._decided_at is not None:
            at = {"": self._decided_at.timestamp()}
            page += family("act_last_decision_timestamp_seconds", "gauge", "When it last decided.", at)
            page += _stand(self._decided)
        return page


def _stand(plan: Plan) -> str:
    """Say how the fleet stood at a decision; nodes that are clear and bear no mark of ours are not counted."""
    tiers: Counter[str] = Counter(dict.fromkeys((*TIERS, UNKNOWN), 0))
    tiers.update(node.tier for node in plan.nodes.values())
    targets: Counter[str] = Counter(dict.fromkeys((level.name.lower() for level in Level), 0))
    targets.update(node.target.name.lower() for node in plan.nodes.values())
    del tiers["clear"], targets["none"]
    stages: Counter[str] = Counter(dict.fromkeys(STAGES, 0))
    stages.update(each.stage for each in plan.stages.values())
    causes = Counter(key.split(" ", 1)[0] for key in plan.open_causes)
    page = family("act_nodes", "gauge", "Nodes by tier.", _by("tier", tiers))
    page += family("act_target_nodes", "gauge", "Nodes by what they are to be.", _by("level", targets))
    page += family(
        "act_over_budget_nodes", "gauge", "Nodes left in service for lack of budget.", {"": len(plan.over_budget)}
    )
    page += family("act_stage_groups", "gauge", "Groups of nodes by stage.", _by("stage", stages))
    page += family("act_breaker_causes", "gauge", "Causes that hold the breaker open.", {"": len(plan.open_causes)})
    page += family("act_breaker_open", "gauge", "The same by kind.", _by("cause", causes))
    left: dict[str, int] = {}
    for use in plan.uses:
        kind = use.scope[0]
        left[kind] = min(left.get(kind, use.allowed - use.lost), use.allowed - use.lost)
    text = "Nodes that the fullest budget of a kind still lets go; below zero where others took nodes out."
    return page + family("act_budget_left_nodes", "gauge", text, _by("scope", left))


def _by(name: str, counts: Counter[str] | dict[str, int]) -> dict[str, float]:
    return {labels(**{name: key}): float(count) for key, count in sorted(counts.items())}


def _by_two(counts: Counter[tuple[str, str]]) -> dict[str, float]:
    return {labels(verb=verb, came_to=came_to): float(count) for (verb, came_to), count in sorted(counts.items())}
