"""The newest scores of a fleet, and the reported facts of its GPUs."""

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

    ``nodes``: units with scores and without facts, by node; includes expired scores, which the policy reports.
    ``decided_at``: the decision time, aware; None: no scores yet.
    ``model_fitted_at``: end of the model's training data.
    ``missing_channels``: channels that the model was trained on and that no longer arrive.
    ``tiers``: thresholds of the scores' tiers; None: not stated.
    ``refused``: rejected records with the reason; their units are in ``nodes`` without a score.
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
    """Facts about a unit or a node, other than scores.

    ``valid_from``: earlier scores and facts are void.
    ``planned``: planned maintenance of a node, as in :attr:`policy.fleet.NodeView.planned`.
    """

    facts: tuple[Fact, ...] = ()
    valid_from: datetime | None = None
    planned: tuple[tuple[datetime, datetime], ...] = ()
    probed_at: datetime | None = None


class MemoryRisks:
    """In-memory scores."""

    def __init__(self, risks: Risks = NO_RISKS) -> None:
        self.risks = risks

    def read(self) -> Risks:
        """Return the scores."""
        return self.risks


class MemoryFacts:
    """In-memory facts; evaluates no alerts."""

    unreadable_events = 0

    def __init__(self) -> None:
        self.facts: dict[str, ReportedFacts] = {}

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return the facts seen up to ``now``."""
        return {
            unit: replace(known, facts=tuple(fact for fact in known.facts if fact.seen_at <= now))
            for unit, known in self.facts.items()
        }

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[AlertOutcome]:
        """Return no outcomes."""
        return ()
