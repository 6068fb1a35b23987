"""Thresholds from earlier decisions: where a precision can be promised, a budget of alerts kept, or a drain pays."""

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
"""Thresholds are tested from that on which alerts this many times the nodes that would do if all were right, and at
least so many: fewer leave no room for an error, more need longer to gather."""

DEEPEST = 0.1
"""Share of the riskiest rows among which thresholds are looked for: who alerts more has none worth a promise."""

_STEP = 1.1


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """A threshold and what may be expected of it.

    ``kind``: ``precision``, ``budget`` or ``cost``.
    ``asked``: the target precision, the budget a decision time, or the cost of an unneeded drain over that of a missed
    failure.
    ``confidence``: One-sided confidence of every bound in here.
    ``promised``: whether the lower bound of the precision reaches what was asked; for a budget and for costs, whether
    there is evidence at all.
    ``threshold``: alert where the risk is at least this; None: alert nothing.
    ``bound``: of the drains on earlier data (its ``alerts``); of the last try where nothing is promised.
    ``drains_per_decision``: drains started per decision time on earlier data.
    ``recall``: share of the earlier data's incidents that were caught; NaN without any.
    ``best``: the highest precision that can be promised at this confidence; None: not looked for, or none.
    ``saving``, ``saving_lower``: for costs: what is saved per decision time against alerting nothing, and its bound.
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
        """Give the decision as a JSON object; NaN is null."""
        content: dict[str, Any] = orjson.loads(orjson.dumps(self, option=orjson.OPT_SERIALIZE_NUMPY))
        return content

    @classmethod
    def refused(
        cls, kind: Literal["precision", "budget", "cost"], asked: float, confidence: float, why: str, recall: float
    ) -> "ThresholdChoice":
        """Give the decision that sets no threshold, with the reason."""
        return cls(kind, asked, confidence, False, None, NO_ALERTS, 0.0, recall, why=why)


def for_precisions(evidence: "ScoredDecisions", targets: Sequence[float], confidence: float) -> list[ThresholdChoice]:
    """Choose for each target the lowest threshold whose precision can be promised; each promise is one on its own.

    ``targets``: precisions, between 0 and 1 exclusive.
    ``confidence``: One-sided, between 0 and 1 exclusive: the chance that the true precision of the chosen threshold
    lies below the target is at most ``1 - confidence``, if later decisions are like the earlier ones.
    Returns: ``promised`` False where no threshold passes; ``best`` then says what could be promised.

    Choosing the best of many thresholds would promise too much. So thresholds are tested in an order fixed beforehand,
    from strict to loose by the number of nodes alerted (which the outcomes do not tell), and the first failure ends
    it: fixed-sequence testing, which needs no correction for the search (Angelopoulos, Bates, Candes, Jordan and Lei,
    Learn then Test, 2021, section 4). What is counted are drains (:attr:`ScoredDecisions.reach_ms`).
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
    """Give the decision for a precision that is not promised; the evidence tells whether an incident was missed."""
    return ThresholdChoice.refused("precision", target, confidence, why, 0.0 if evidence.incidents else math.nan)


def for_budget(evidence: "ScoredDecisions", k: float, confidence: float) -> ThresholdChoice:
    """Choose the threshold that alerts ``k`` nodes a decision time on earlier data, and bound its precision.

    ``confidence``: One-sided, between 0 and 1 exclusive.
    Returns: the one threshold is set by the risks alone, so its bound needs no correction for a search. Rows of equal
    risk are alerted together or not at all: never more than the budget.
    """
    rows = math.floor(k * evidence.times)
    # one row more tells whether those of the lowest risk are all within the budget
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
    """Rows from the riskiest on; a set of alerts is a prefix that splits no ties."""

    evidence: "ScoredDecisions"
    order: Ints
    node: Ints
    nodes_before: Ints
    ends: Ints
    by_node: Ints
    """Places in ``order``, sorted by node and time."""
    cluster: Ints

    @classmethod
    def of(cls, evidence: "ScoredDecisions", deepest: float = DEEPEST) -> "_Ordered":
        selected = np.arange(len(evidence.risk))
        rows = math.ceil(deepest * len(selected))
        if rows < len(selected):
            # Ties at the edge stay together, so a prefix means the same as it would among all rows.
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
        """Give the shortest prefix that alerts this many nodes; None if there are not so many."""
        if not len(self.order) or nodes > self.nodes_before[-1]:
            return None
        row = int(np.searchsorted(self.nodes_before, nodes)) + 1
        return int(self.ends[np.searchsorted(self.ends, row)])

    def at_most(self, rows: int) -> int:
        """Give the longest prefix of at most this many rows."""
        at = int(np.searchsorted(self.ends, rows, side="right"))
        return int(self.ends[at - 1]) if at else 0

    def begun(self, end: int) -> Ints:
        """Give the places in ``order`` of the alerts of a prefix that begin a drain."""
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
        """Give the decision that alerts a prefix."""
        why = f"{why}; with {confidence:.0%} confidence at least {_low(bound.lower)}"
        threshold, recall = self.threshold(end), self.evidence.recall(self.order[self.begun(end)])
        drains = bound.alerts / self.evidence.times
        return ThresholdChoice(kind, asked, confidence, True, threshold, bound, drains, recall, bound.lower, why=why)


def _best(ordered: _Ordered, confidence: float) -> float | None:
    """Find the precision up to which every target would be promised: the same tests, from low targets to high ones.

    Their order is fixed beforehand, too, so that looking needs no correction either.
    """
    best, nodes = 0.0, START_AT_LEAST
    while (end := ordered.end_of(nodes)) is not None:
        highest = (1 - confidence) ** (START / nodes)  # of the targets that are tested from so many nodes on
        lower = ordered.bound(end, confidence).lower
        best = max(best, min(lower, highest))
        if lower < highest:
            break
        nodes += START
    return best or None


def _first_tested(target: float, confidence: float) -> int:
    return max(START * clusters_needed(target, confidence), START_AT_LEAST)


def clusters_needed(target: float, confidence: float) -> int:
    """Give how many independent alerts, all right, promise a precision: (1 - confidence) ** (1 / n) >= target."""
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
    """Write a lower bound, rounded down."""
    return f"{math.floor(1000 * value) / 10:.1f}%"


@dataclass(frozen=True, slots=True)
class ScoredDecisions:
    """Scored decisions about nodes with known labels, each array of shape (n,).

    They must have been scored by models that had not seen their labels; else no bound holds.

    ``risk``: what thresholds are set on: the riskiest highest. Any monotone score does, except for costs.
    ``hit``: whether an incident followed within the horizon.
    ``node``: whose decision it is; decisions about one node may depend on each other.
    ``time``: decision times in milliseconds since the epoch.
    ``incident``: the node incident behind a hit; -1: none, or unknown.
    ``cause``: its common cause, which other node incidents may share; -1: none, or unknown.
    ``reach_ms``: how long a drain lasts, as :func:`policy.episodes.openings` takes it; 0: every alert counts by itself.
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
        """Number of distinct failures that a decision could have caught, a common cause counted once."""
        return len(np.unique(self.cause[self.hit & (self.incident >= 0)]))

    def cluster(self, rows: Ints) -> Ints:
        """Give the cluster of each of some rows (:func:`evaluation.metrics.scored.clusters`)."""
        node, cause = self.node[rows], np.where(self.hit[rows], self.cause[rows], -1)
        failing = np.flatnonzero(self.hit & (self.incident >= 0))
        shared = shared_causes(self.node[failing], self.cause[failing])
        return clusters(node, cause, shared, int(self.node.max(initial=-1)) + 1)

    def opened(self, alert: Bools) -> Ints:
        """Give the rows of the alerts that open an episode, which is a drain."""
        rows = np.flatnonzero(alert)
        return rows[openings(self.node[rows], self.time[rows], self.reach_ms)]

    def recall(self, alert: Bools | Ints) -> float:
        """Give the share of failures that at least one alert caught; NaN without any.

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
    """Choose the threshold of least expected cost, and tell what it would have saved.

    ``evidence``: earlier decisions, scored out of time; ``risk`` must be a calibrated probability.
    Returns: the threshold is ``costs.break_even``, which no search has touched; ``promised`` says whether the lower
    bound of the saving is above zero. ``saving`` is a decision time's, against draining nothing.

    What is counted are drains (:meth:`ScoredDecisions.opened`): a failure is saved once, and a false drain
    counts each time it begins. The bound is normal over clusters (:meth:`ScoredDecisions.cluster`).
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
    """Give the decision where costs set no threshold, with the reason."""
    return ThresholdChoice.refused("cost", costs.unneeded_drain / costs.saved, confidence, why, math.nan)
