"""Risk thresholds from earlier decisions, for a target precision or an alert budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from evaluation.metrics.scored import clusters, shared_causes
from policy.bounds import NO_ALERTS, PrecisionBound, precision_bound
from policy.episodes import Bools, Floats, Ints, caught_causes, openings

START, MIN_START = 3, 30
"""Testing starts at the threshold that alerts ``START`` times the nodes needed if every alert were correct, and at
least ``MIN_START`` nodes: with fewer, one false positive fails the test; more take longer to collect."""

DEEPEST = 0.1
"""Share of the riskiest rows in which thresholds are searched; a threshold that alerts more rows is of no use."""

_STEP = 1.1


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """A threshold and its expected performance.

    ``asked``: target precision, or alert budget per decision time.
    ``confidence``: one-sided confidence of every bound.
    ``promised``: for a precision, whether its lower bound reaches the target; for a budget, whether there is a
    threshold.
    ``threshold``: alert if the risk is at least this; None: alert nothing.
    ``bound``: precision of the drains on earlier data (its ``alerts``); that of the last test if nothing is promised.
    ``drains_per_decision``: drains started per decision time on earlier data.
    ``recall``: share of the incidents in earlier data that were caught; NaN without incidents.
    ``best``: the highest precision that can be promised at this confidence; None: not computed, or none.
    """

    kind: Literal["precision", "budget"]
    asked: float
    confidence: float
    promised: bool
    threshold: float | None
    bound: PrecisionBound
    drains_per_decision: float
    recall: float
    best: float | None = None
    why: str = ""


def for_precisions(evidence: "ScoredDecisions", targets: Sequence[float], confidence: float) -> list[ThresholdChoice]:
    """Choose for each target the lowest threshold whose precision can be promised; targets are tested independently.

    ``targets``: precisions, between 0 and 1 exclusive.
    ``confidence``: one-sided, between 0 and 1 exclusive. The probability that the true precision at the chosen
    threshold is below the target is at most ``1 - confidence``, if later decisions resemble earlier ones.
    Returns: ``promised`` is False if no threshold passes; ``best`` is then the highest precision that would pass.

    Choosing the best of many thresholds is optimistic. Thresholds are therefore tested in an order fixed in advance,
    from strict to loose by the number of nodes alerted (which does not depend on outcomes), up to the first failure:
    fixed-sequence testing, which needs no correction for multiple testing (Angelopoulos, Bates, Candes, Jordan and
    Lei, Learn then Test, 2021, section 4). Precision is that of drains (:attr:`ScoredDecisions.reach_ms`).
    """
    ordered = _Ordered.of(evidence)
    best = _best(ordered, confidence)
    return [_precision(ordered, target, confidence, best) for target in targets]


def _precision(ordered: "_Ordered", target: float, confidence: float, best: float | None) -> ThresholdChoice:
    passed: tuple[int, PrecisionBound] | None = None
    tested: PrecisionBound | None = None
    nodes = _first_tested(target, confidence)
    while (end := ordered.end_of(nodes)) is not None:
        tested = ordered.bound(end, confidence)
        if tested.lower < target:
            break
        passed = end, tested
        nodes = max(nodes + 1, math.ceil(nodes * _STEP))
    if passed is None:
        nodes = int(ordered.nodes_before[-1]) if len(ordered.order) else 0
        why = _refusal(ordered.evidence, nodes, target, confidence, tested, best)
        refused = no_promise(target, confidence, why, ordered.evidence)
        return replace(refused, bound=tested or NO_ALERTS, best=best)
    end, bound = passed
    why = f"{bound.hits} of {bound.alerts} earlier drains of {bound.clusters} nodes would have been right"
    decision = ordered.promise("precision", target, confidence, end, bound, why)
    return replace(decision, best=max(best or 0.0, target))


def no_promise(target: float, confidence: float, why: str, evidence: "ScoredDecisions") -> ThresholdChoice:
    """Return a choice without a promise; its recall is 0, or NaN if the evidence holds no incident."""
    recall = 0.0 if evidence.incidents else math.nan
    return ThresholdChoice("precision", target, confidence, False, None, NO_ALERTS, 0.0, recall, why=why)


def for_budget(evidence: "ScoredDecisions", k: float, confidence: float) -> ThresholdChoice:
    """Choose the threshold that alerts ``k`` nodes per decision time on earlier data, and bound its precision.

    The threshold depends on the risks alone, so the bound needs no correction for multiple testing. Tied risks are
    alerted together or not at all, never beyond the budget.

    ``confidence``: one-sided, between 0 and 1 exclusive.
    """
    rows = math.floor(k * evidence.times)
    # one extra row, to see whether a tie crosses the budget
    ordered = _Ordered.of(evidence, min((rows + 1) / max(len(evidence.risk), 1), 1.0))
    end = ordered.at_most(rows) if len(evidence.risk) else 0
    if end == 0:
        none = not len(evidence.risk)
        why = "there are no earlier decisions" if none else "more rows share the highest risk than the budget allows"
        return ThresholdChoice("budget", k, confidence, False, None, NO_ALERTS, 0.0, math.nan, why=why)
    bound = ordered.bound(end, confidence)
    why = f"{bound.hits} of {bound.alerts} drains within the budget would have been right"
    return ordered.promise("budget", k, confidence, end, bound, why)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Rows sorted by descending risk; an alert set is a prefix that splits no ties."""

    evidence: "ScoredDecisions"
    order: Ints
    node: Ints
    nodes_before: Ints
    ends: Ints
    by_node: Ints
    """Positions in ``order``, sorted by node and time."""
    cluster: Ints

    @classmethod
    def of(cls, evidence: "ScoredDecisions", deepest: float = DEEPEST) -> "_Ordered":
        selected = np.arange(len(evidence.risk))
        rows = math.ceil(deepest * len(selected))
        if rows < len(selected):
            # Keep ties at the cut together, so that a prefix is the same as among all rows.
            selected = np.flatnonzero(
                evidence.risk >= np.partition(evidence.risk, len(selected) - rows)[len(selected) - rows]
            )
        by_risk = np.lexsort((evidence.node[selected], evidence.time[selected], -evidence.risk[selected]))
        order = selected[by_risk].astype(np.int64)
        risk = evidence.risk[order]
        _, first, node = np.unique(evidence.node[order], return_index=True, return_inverse=True)
        fresh = np.zeros(len(order), dtype=np.int64)
        fresh[first] = 1
        ends = np.flatnonzero(np.append(np.diff(risk) != 0, True)) + 1 if len(order) else np.zeros(0, np.int64)
        by_node = np.lexsort((evidence.time[order], node))
        cluster = evidence.cluster(order)
        return cls(evidence, order, node.astype(np.int64), np.cumsum(fresh), ends.astype(np.int64), by_node, cluster)

    def end_of(self, nodes: int) -> int | None:
        """Return the length of the shortest prefix that alerts this many nodes; None if there are fewer nodes."""
        if not len(self.order) or nodes > self.nodes_before[-1]:
            return None
        row = int(np.searchsorted(self.nodes_before, nodes)) + 1
        return int(self.ends[np.searchsorted(self.ends, row)])

    def at_most(self, rows: int) -> int:
        """Return the length of the longest prefix with at most this many rows."""
        position = int(np.searchsorted(self.ends, rows, side="right"))
        return int(self.ends[position - 1]) if position else 0

    def drain_starts(self, end: int) -> Ints:
        """Return the positions in ``order`` of the alerts within a prefix that start a drain."""
        places = self.by_node[self.by_node < end]
        return places[openings(self.node[places], self.evidence.time[self.order[places]], self.evidence.reach_ms)]

    def bound(self, end: int, confidence: float) -> PrecisionBound:
        drains = self.drain_starts(end)
        return precision_bound(self.evidence.hit[self.order[drains]], self.cluster[drains], confidence)

    def threshold(self, end: int) -> float:
        return float(self.evidence.risk[self.order[end - 1]])

    def promise(
        self,
        kind: Literal["precision", "budget"],
        asked: float,
        confidence: float,
        end: int,
        bound: PrecisionBound,
        why: str,
    ) -> ThresholdChoice:
        """Return the choice whose threshold alerts this prefix."""
        why = f"{why}; with {confidence:.0%} confidence at least {_low(bound.lower)}"
        threshold, recall = self.threshold(end), self.evidence.recall(self.order[self.drain_starts(end)])
        drains = bound.alerts / self.evidence.times
        return ThresholdChoice(kind, asked, confidence, True, threshold, bound, drains, recall, bound.lower, why=why)


def _best(ordered: _Ordered, confidence: float) -> float | None:
    """Find the highest target that would be promised, by the same tests in ascending order of targets.

    This order is also fixed in advance, so it needs no correction for multiple testing.
    """
    best, nodes = 0.0, MIN_START
    while (end := ordered.end_of(nodes)) is not None:
        highest = (1 - confidence) ** (START / nodes)  # highest target whose testing starts at this many nodes
        lower = ordered.bound(end, confidence).lower
        best = max(best, min(lower, highest))
        if lower < highest:
            break
        nodes += START
    return best or None


def _first_tested(target: float, confidence: float) -> int:
    return max(START * clusters_needed(target, confidence), MIN_START)


def clusters_needed(target: float, confidence: float) -> int:
    """Return how many independent alerts, all correct, a promise needs: (1 - confidence) ** (1 / n) >= target."""
    # Minus 1e-9: a rounding error of the logarithms must not add an alert.
    return max(1, math.ceil(math.log(1 - confidence) / math.log(target) - 1e-9))


def _refusal(
    evidence: "ScoredDecisions",
    nodes: int,
    target: float,
    confidence: float,
    tested: PrecisionBound | None,
    best: float | None,
) -> str:
    attainable = (
        "no precision can be promised" if not best else f"the highest precision that can be promised is {_low(best)}"
    )
    if not evidence.hit.any():
        return f"no incident among {len(evidence.hit)} earlier decisions: {attainable}"
    if tested is None:
        needed = _first_tested(target, confidence)
        return (
            f"a promise of {target:.0%} needs {needed} nodes, and the riskiest tenth of earlier decisions has {nodes} "
            f"({needed - nodes} missing); {attainable}"
        )
    return (
        f"{tested.hits} of {tested.alerts} earlier drains of {tested.clusters} nodes would have been right: with "
        f"{confidence:.0%} confidence at least {_low(tested.lower)}, below the target of {target:.0%}; {attainable}"
    )


def _low(value: float) -> str:
    """Format a lower bound as a percentage, rounded down."""
    return f"{math.floor(1000 * value) / 10:.1f}%"


@dataclass(frozen=True, slots=True)
class ScoredDecisions:
    """Scored decisions about nodes with known labels; arrays have shape (n,).

    The scores must be out of sample; otherwise no bound holds.

    ``risk``: any monotone score works.
    ``hit``: whether an incident followed within the horizon.
    ``node``: code of the node; decisions about one node may be dependent.
    ``time``: decision times in milliseconds since the epoch.
    ``incident``: node incident behind a hit; -1: none or unknown.
    ``cause``: its common cause, which other node incidents may share; -1: none or unknown.
    ``reach_ms``: duration of a drain for :func:`policy.episodes.openings`; 0: every alert counts as a drain.
    """

    risk: Floats
    hit: Bools
    node: Ints
    time: Ints
    incident: Ints
    cause: Ints
    reach_ms: int = 0

    def __post_init__(self) -> None:
        if not np.isfinite(self.risk).all():
            raise ValueError("evidence holds a risk that is not a number")

    @property
    def times(self) -> int:
        """Number of distinct decision times."""
        return len(np.unique(self.time))

    @property
    def incidents(self) -> int:
        """Number of distinct failures that a decision could have caught; a common cause counts once."""
        return len(np.unique(self.cause[self.hit & (self.incident >= 0)]))

    def cluster(self, rows: Ints) -> Ints:
        """Return the cluster of each of these rows (:func:`evaluation.metrics.scored.clusters`)."""
        node, cause = self.node[rows], np.where(self.hit[rows], self.cause[rows], -1)
        failing = np.flatnonzero(self.hit & (self.incident >= 0))
        shared = shared_causes(self.node[failing], self.cause[failing])
        return clusters(node, cause, shared, int(self.node.max(initial=-1)) + 1)

    def recall(self, alert: Bools | Ints) -> float:
        """Return the share of failures that at least one alert caught; NaN without failures.

        A common cause counts once (:func:`policy.episodes.caught_causes`).

        ``alert``: a mask of rows, or their positions.
        """
        failing = np.flatnonzero(self.hit & (self.incident >= 0))
        incident, first = np.unique(self.incident[failing], return_index=True)
        if not len(incident):
            return math.nan
        alerted = self.incident[alert][self.hit[alert]]
        _, caught = caught_causes(self.cause[failing][first], np.isin(incident, alerted))
        return float(caught.mean())
