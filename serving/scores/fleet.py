"""A fleet's scores seen by node: which nodes are at risk now, and by how much."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from policy.risk_record import RiskRecord
from policy.tiers import TIERS, UNKNOWN, ChosenThresholds, Tier, node_risk, worst_tier
from serving.scores.reading import PastScore, Scores
from telemetry.identity.devices import GpuNames
from telemetry.identity.nodes import NodeNames

ALL_TIERS: Final[tuple[str, ...]] = (*TIERS, UNKNOWN)
"""Tiers as a query or a label may name them."""

_BEFORE_ALL: Final = datetime.min.replace(tzinfo=UTC)  # when no score has expired yet


@dataclass(frozen=True, slots=True)
class ScoredNode:
    """A node at one time.

    ``tier``: by the scores that hold, as the controller takes it before any hysteresis; ``unknown`` if none does.
    ``risk``: that any of those has an incident; None if none is known.
    ``known``, ``unknown``, ``expired``: its units by what is known of them.
    """

    node: str
    tier: str
    risk: float | None
    known: int
    unknown: int
    expired: int

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key, the worst first: by risk, then by name; nodes of unknown risk last."""
        return (0, -self.risk, self.node) if self.risk is not None else (1, 0.0, self.node)


def state_of(
    node: str, records: Iterable[RiskRecord], thresholds: ChosenThresholds | None, now: datetime
) -> ScoredNode:
    """Return a node's state: what is unknown or expired neither raises nor lowers it."""
    every = list(records)
    known = [record for record in every if record.status == "ok"]
    holding = [record for record in known if not record.expired(now)]
    return ScoredNode(
        node,
        tier_of(holding, thresholds),
        node_risk(record.risk for record in holding),
        len(holding),
        len(every) - len(known),
        len(known) - len(holding),
    )


def tier_of(scores: Sequence[RiskRecord | PastScore], thresholds: ChosenThresholds | None) -> Tier:
    """Return a node's tier from its units' scores: the worst, or that of the node's own risk if that is higher."""
    risks = [score.risk for score in scores if score.risk is not None]
    return worst_tier((*(score.tier for score in scores), UNKNOWN if thresholds is None else thresholds.tier(risks)))


class ScoredFleet:
    """Scores, with the nodes' states computed once, and again whenever some of the scores expire.

    ``tiers``, ``node_tiers``: units and nodes by tier, as they were scored.
    ``known``: units whose risk is known, expired or not.
    ``thresholds``: behind the tiers; None: not stated, or damaged.
    ``names``: resolves the names that clients ask for, such as a host name of the operating system.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.names = NodeNames(scores.nodes)
        self._gpus = GpuNames(scores.units)
        try:
            self.thresholds = ChosenThresholds.of_summary(scores.summary)
        except ValueError:
            self.thresholds = None
        self._expiries = sorted({record.expires_at for record in scores.units.values() if record.status == "ok"})
        self._computed = 0, self._compute(_BEFORE_ALL)
        self.tiers = dict.fromkeys(ALL_TIERS, 0) | Counter(record.tier for record in scores.units.values())
        self.node_tiers = dict.fromkeys(ALL_TIERS, 0) | Counter(state.tier for state in self._computed[1].values())
        self.known = sum(record.status == "ok" for record in scores.units.values())

    def state(self, node: str, now: datetime) -> ScoredNode | None:
        """Return a node's state, None if there is no score of it."""
        return self._states_at(now).get(self.names.written(node))

    def unit(self, name: str) -> RiskRecord | None:
        """Return the record of a GPU (or node, where nodes are scored); None if there is no score of it."""
        return self.scores.units.get(self._gpus.find(name) or self.names.written(name))

    def states(self, now: datetime) -> list[ScoredNode]:
        """Return all nodes, the riskiest first, then by name."""
        return list(self._states_at(now).values())

    def expired(self, now: datetime) -> bool:
        """Tell whether no score holds any longer."""
        return now >= self.scores.expires

    def holds(self, now: datetime) -> bool:
        """Tell whether some unit's risk is known and has not expired."""
        return self.known > 0 and not self.expired(now)

    def stale(self, now: datetime, after_s: float | None) -> bool:
        """Tell whether the decision is older than some seconds; None: it never is."""
        return after_s is not None and (now - self.scores.decided).total_seconds() > after_s

    def _states_at(self, now: datetime) -> dict[str, ScoredNode]:
        """Return all nodes by name, the riskiest first; computed again whenever some scores have expired since."""
        epoch, states = self._computed
        if (present := bisect_right(self._expiries, now)) != epoch:
            states = self._compute(now)
            self._computed = present, states
        return states

    def _compute(self, now: datetime) -> dict[str, ScoredNode]:
        states = [state_of(node, records, self.thresholds, now) for node, records in self.scores.nodes.items()]
        return {state.node: state for state in sorted(states, key=lambda state: state.order)}
