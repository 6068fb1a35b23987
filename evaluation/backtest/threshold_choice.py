"""Risk thresholds from earlier decisions, for a target precision, an alert budget, or minimum expected cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import orjson

from evaluation.metrics.scored import clusters, shared_causes
from models.config import CostsSection
from policy.bounds import NO_ALERTS, PrecisionBound, precision_bound
from policy.episodes import Bools, Floats, Ints, caught_causes, openings

START, START_AT_LEAST = 3, 30
"""Testing starts at the threshold that alerts ``START`` times the nodes needed if every alert were correct, and at
least ``START_AT_LEAST`` nodes: with fewer, one false positive fails the test; more take longer to collect."""

DEEPEST = 0.1
"""Share of the riskiest rows in which thresholds are searched; a threshold that alerts more rows is of no use."""

_STEP = 1.1


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """A threshold and its expected performance.

    ``kind``: ``precision``, ``budget`` or ``cost``.
    ``asked``: target precision, alert budget per decision time, or cost of an unneeded drain relative to the saving
    of a needed one.
    ``confidence``: one-sided confidence of every bound.
    ``promised``: for a precision, whether its lower bound reaches the target; for a budget, whether there is a
    threshold; for costs, whether the lower bound of the saving is positive.
    ``threshold``: alert if the risk is at least this; None: alert nothing.
    ``bound``: precision of the drains on earlier data (its ``alerts``); that of the last test if nothing is promised.
    ``drains_per_decision``: drains started per decision time on earlier data.
    ``recall``: share of the incidents in earlier data that were caught; NaN without incidents.
    ``best``: the highest precision that can be promised at this confidence; None: not computed, or none.
    ``saving``, ``saving_lower``: for costs: saving per decision time over never draining, and its lower bound.
    """

    kind: Literal["precision", "budget", "cost"]
    asked: float
    confidence: float
    promised: bool
    threshold: float | None
    bound: PrecisionBound
    drains_per_decision: float
    recall: float
    best: float | None = None
    saving: float | None = None
    saving_lower: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON object; NaN becomes null."""
        content: dict[str, Any] = orjson.loads(orjson.dumps(self, option=orjson.OPT_SERIALIZE_NUMPY))
        return content

    @classmethod
    def refused(
        cls, kind: Literal["precision", "budget", "cost"], asked: float, confidence: float, why: str, recall: float
    ) -> "ThresholdChoice":
        """Return a choice without a threshold, with the reason."""
        return cls(kind, asked, confidence, False, None, NO_ALERTS, 0.0, recall, why=why)


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
    tried: PrecisionBound | None = None
    nodes = _first_tested(target, confidence)
    while (end := ordered.end_of(nodes)) is not None:
        tried = ordered.bound(end, confidence)
        if tried.lower < target:
            break
        passed = end, tried
        nodes = max(nodes + 1, math.ceil(nodes * _STEP))
    if passed is None:
        nodes = int(ordered.nodes_before[-1]) if len(ordered.order) else 0
        why = _refusal(ordered.evidence, nodes, target, confidence, tried, best)
        refused = no_promise(target, confidence, why, ordered.evidence)
        return replace(refused, bound=tried or NO_ALERTS, best=best)
    end, bound = passed
    why = f"{bound.hits} of {bound.alerts} earlier drains of {bound.clusters} nodes would have been right"
    decision = ordered.promise("precision", target, confidence, end, bound, why)
    return replace(decision, best=max(best or 0.0, target))


def no_promise(target: float, confidence: float, why: str, evidence: "ScoredDecisions") -> ThresholdChoice:
    """Return a choice without a promise; its recall is 0, or NaN if the evidence holds no incident."""
    return ThresholdChoice.refused("precision", target, confidence, why, 0.0 if evidence.incidents else math.nan)


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
        return ThresholdChoice.refused("budget", k, confidence, why, math.nan)
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
        within = np.lexsort((evidence.node[selected], evidence.time[selected], -evidence.risk[selected]))
        order = selected[within].astype(np.int64)
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
        at = int(np.searchsorted(self.ends, rows, side="right"))
        return int(self.ends[at - 1]) if at else 0

    def begun(self, end: int) -> Ints:
        """Return the positions in ``order`` of the alerts within a prefix that start a drain."""
        places = self.by_node[self.by_node < end]
        return places[openings(self.node[places], self.evidence.time[self.order[places]], self.evidence.reach_ms)]

    def bound(self, end: int, confidence: float) -> PrecisionBound:
        drains = self.begun(end)
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
        threshold, recall = self.threshold(end), self.evidence.recall(self.order[self.begun(end)])
        drains = bound.alerts / self.evidence.times
        return ThresholdChoice(kind, asked, confidence, True, threshold, bound, drains, recall, bound.lower, why=why)


def _best(ordered: _Ordered, confidence: float) -> float | None:
    """Find the highest target that would be promised, by the same tests in ascending order of targets.

    This order is also fixed in advance, so it needs no correction for multiple testing.
    """
    best, nodes = 0.0, START_AT_LEAST
    while (end := ordered.end_of(nodes)) is not None:
        highest = (1 - confidence) ** (START / nodes)  # highest target whose testing starts at this many nodes
        lower = ordered.bound(end, confidence).lower
        best = max(best, min(lower, highest))
        if lower < highest:
            break
        nodes += START
    return best or None


def _first_tested(target: float, confidence: float) -> int:
    return max(START * clusters_needed(target, confidence), START_AT_LEAST)


def clusters_needed(target: float, confidence: float) -> int:
    """Return how many independent alerts, all correct, a promise needs: (1 - confidence) ** (1 / n) >= target."""
    return max(1, math.ceil(math.log(1 - confidence) / math.log(target) - 1e-9))


def _refusal(
    evidence: "ScoredDecisions",
    nodes: int,
    target: float,
    confidence: float,
    tried: PrecisionBound | None,
    best: float | None,
) -> str:
    could = (
        "no precision can be promised" if not best else f"the highest precision that can be promised is {_low(best)}"
    )
    if not evidence.hit.any():
        return f"no incident among {len(evidence.hit)} earlier decisions: {could}"
    if tried is None:
        needed = _first_tested(target, confidence)
        return (
            f"a promise of {target:.0%} needs {needed} nodes, and the riskiest tenth of earlier decisions has {nodes} "
            f"({needed - nodes} missing); {could}"
        )
    return (
        f"{tried.hits} of {tried.alerts} earlier drains of {tried.clusters} nodes would have been right: with "
        f"{confidence:.0%} confidence at least {_low(tried.lower)}, below the target of {target:.0%}; {could}"
    )


def _low(value: float) -> str:
    """Format a lower bound as a percentage, rounded down."""
    return f"{math.floor(1000 * value) / 10:.1f}%"


@dataclass(frozen=True, slots=True)
class ScoredDecisions:
    """Scored decisions about nodes with known labels; arrays have shape (n,).

    The scores must be out of sample; otherwise no bound holds.

    ``risk``: any monotone score works, except for costs, which need a calibrated probability.
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

    def opened(self, alert: Bools) -> Ints:
        """Return the rows of the alerts that open an episode, that is, start a drain."""
        rows = np.flatnonzero(alert)
        return rows[openings(self.node[rows], self.time[rows], self.reach_ms)]

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


def for_costs(evidence: ScoredDecisions, costs: CostsSection, confidence: float) -> ThresholdChoice:
    """Choose the threshold of minimum expected cost, and estimate what it would have saved.

    The threshold is ``costs.break_even``, so its bound needs no correction for multiple testing. Each failure is saved
    at most once, and each false drain costs (:meth:`ScoredDecisions.opened`). The bound of the saving is a normal
    approximation over clusters (:meth:`ScoredDecisions.cluster`).

    ``evidence``: earlier decisions, scored out of sample; ``risk`` must be a calibrated probability.
    """
    if not len(evidence.risk):
        return no_threshold(costs, confidence, "there are no earlier decisions")
    threshold, times = costs.break_even, evidence.times
    drains = evidence.opened(evidence.risk >= threshold)
    false = drains[~evidence.hit[drains]]
    hits = drains[evidence.hit[drains] & (evidence.incident[drains] >= 0)]
    saved = hits[np.unique(evidence.incident[hits], return_index=True)[1]]
    cluster = np.unique(evidence.cluster(np.arange(len(evidence.risk))), return_inverse=True)[1]
    n = int(cluster.max()) + 1
    gain = costs.saved * np.bincount(cluster[saved], minlength=n)
    gain -= costs.unneeded_drain * np.bincount(cluster[false], minlength=n)
    total = float(gain.sum())
    spread = float(gain.std(ddof=1)) * math.sqrt(n) if n > 1 else math.inf
    lower = (total - NormalDist().inv_cdf(confidence) * spread) / times if math.isfinite(spread) else -math.inf
    if len(drains):
        why = (
            f"{len(saved)} failures saved and {len(false)} unneeded drains in {times} decision times: "
            f"{total / times:.3g} per decision time, with {confidence:.0%} confidence at least {lower:.3g}"
        )
    else:
        why = f"no earlier decision had a risk of {threshold:.1%}, above the break-even of a drain"
    return ThresholdChoice(
        kind="cost",
        asked=costs.unneeded_drain / costs.saved,
        confidence=confidence,
        promised=bool(len(drains) and lower > 0),
        threshold=threshold,
        bound=precision_bound(evidence.hit[drains], cluster[drains], confidence),
        drains_per_decision=len(drains) / times,
        recall=evidence.recall(drains),
        saving=total / times,
        saving_lower=lower if math.isfinite(lower) else None,
        why=why,
    )


def no_threshold(costs: CostsSection, confidence: float, why: str) -> ThresholdChoice:
    """Return a cost choice without a threshold, with the reason."""
    return ThresholdChoice.refused("cost", costs.unneeded_drain / costs.saved, confidence, why, math.nan)
