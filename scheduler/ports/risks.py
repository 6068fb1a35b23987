"""The newest scores of a fleet, and what its units reported themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from foundation.durations import Duration
from policy.episodes import Alert, AlertOutcome
from policy.fleet import Fact, UnitView
from policy.risk_record import ModelName
from policy.tiers import ChosenThresholds


@dataclass(frozen=True, slots=True)
class Risks:
    """The scores of one decision time.

    ``nodes``: by node, with scores and without facts, expired ones too: the policy names them in its reasons.
    ``decided_at``: the decision time, aware; None: nothing was scored yet.
    ``model_fitted_at``: until when the model's training data reach.
    ``missing_channels``: channels that the model was trained on and that no longer arrive.
    ``tiers``: the thresholds behind the scores' tiers; None: not stated.
    ``horizon``: what a score looks ahead.
    ``refused``: records that were not used, with why. The units that they name are among the nodes, without a score.
    """

    nodes: Mapping[str, tuple[UnitView, ...]] = field(default_factory=dict)
    decided_at: datetime | None = None
    model: ModelName | None = None
    model_fitted_at: datetime | None = None
    missing_channels: tuple[str, ...] = ()
    tiers: ChosenThresholds | None = None
    horizon: Duration | None = None
    refused: tuple[str, ...] = ()


NO_RISKS = Risks()


@dataclass(frozen=True, slots=True)
class ReportedFacts:
    """What is known of a unit in addition to its score, and of a node.

    ``valid_from``: earlier scores and facts are void.
    ``probed_at``: when the unit last passed a probe.
    ``planned``: of a node, as :attr:`policy.fleet.NodeView.planned`.
    """

    facts: tuple[Fact, ...] = ()
    valid_from: datetime | None = None
    planned: tuple[tuple[datetime, datetime], ...] = ()
    probed_at: datetime | None = None


class MemoryRisks:
    """Scores, or a failure, that are set by hand."""

    def __init__(self, risks: Risks = NO_RISKS) -> None:
        self.risks = risks
        self.failure: Exception | None = None

    def read(self) -> Risks:
        """Return what was set, or raise it."""
        if self.failure is not None:
            raise self.failure
        return self.risks


class MemoryFacts:
    """Facts that are set by hand, none at first. No alert is evaluated."""

    unreadable_events = 0

    def __init__(self) -> None:
        self.facts: dict[str, ReportedFacts] = {}

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return what was set, up to ``now``."""
        return {
            unit: replace(known, facts=tuple(fact for fact in known.facts if fact.seen_at <= now))
            for unit, known in self.facts.items()
        }

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[AlertOutcome]:
        """Evaluate none."""
        return ()
