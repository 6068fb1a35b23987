"""Models against each other on the same bootstrap samples, and at equal numbers of alerts."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from evaluation.metrics.estimates import Estimate, kind_of, precision_of
from evaluation.metrics.metrics import Floats, Interval, honest_interval, interval, ratio
from models.config import ALL_LEARNERS

SLIDING = "sliding"
TRAIN_ONCE = "train_once"

PAIRED: tuple[str, ...] = ("precision_at_k", "precision", "recall", "average_precision", "roc_auc", "capture")
"""Statistics that are compared in pairs."""

FACTORS: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0)
"""Budgets that are compared, as multiples of K."""

_PAIR_COLUMNS = (
    "comparison", "model", "variant", "other_model", "other_variant", "statistic",
    "value", "other_value", "difference", "low", "high", "share_better",
)  # fmt: skip

_EQUAL_COLUMNS = (
    "variant", "model", "other_model", "alerts", "precision", "other_precision",
    "difference", "low", "high", "share_better", "best",
)  # fmt: skip

_BUDGET_COLUMNS = ("model", "variant", "k", "alerts", "hits", "precision", "low", "high", "row_recall")


def best_learner(estimates: Sequence[Estimate], variant: str = SLIDING) -> Estimate | None:
    """Find the single learner with the highest precision at K.

    It is chosen after the fact on the rows it is then compared on, which favours it against the ensembles.

    Returns: the best; the earlier in the order of reports where equal; None where no learner has a precision.
    """
    candidates = [
        (
            estimate.point["precision_at_k"],
            estimate.point["average_precision"],
            -ALL_LEARNERS.index(estimate.scored.model),
            estimate,
        )
        for estimate in estimates
        if kind_of(estimate.scored.model) == "learner" and estimate.scored.variant == variant
        if np.isfinite(estimate.point["precision_at_k"]) and np.isfinite(estimate.point["average_precision"])
    ]
    return max(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None


def paired_differences(estimates: Sequence[Estimate]) -> pd.DataFrame:
    """Differences that a reader asks about, with intervals from the same resamples on both sides.

    Where neither side has a hit there is no interval: nothing is known of the difference.

    Comparisons: ``sliding`` (each model's sliding variant against its train-once variant), ``ensemble`` (each sliding
    ensemble against the best sliding learner), ``baseline`` (the best sliding learner against each sliding baseline).

    Returns: one row a comparison and statistic: the two values, ``difference`` (positive: ``model`` is better), its
    interval ``low``, ``high`` (NaN: none), and ``share_better``, the share of resamples in which ``model`` is better.
    """
    by_name = {estimate.scored.name: estimate for estimate in estimates}
    pairs: list[tuple[str, Estimate, Estimate]] = []
    for (model, variant), estimate in by_name.items():
        if variant == SLIDING and (model, TRAIN_ONCE) in by_name:
            pairs.append(("sliding", estimate, by_name[model, TRAIN_ONCE]))
    best = best_learner(estimates)
    if best is not None:
        sliding = [estimate for estimate in estimates if estimate.scored.variant == SLIDING]
        pairs += [("ensemble", estimate, best) for estimate in sliding if kind_of(estimate.scored.model) == "ensemble"]
        pairs += [("baseline", best, estimate) for estimate in sliding if kind_of(estimate.scored.model) == "baseline"]
    rows = [pair(comparison, one, two, name) for comparison, one, two in pairs for name in PAIRED]
    return pd.DataFrame(rows, columns=list(_PAIR_COLUMNS))


def equal_alerts(estimates: Sequence[Estimate], weights: Floats) -> pd.DataFrame:
    """Compare each ensemble with the learners of its variant at as many alerts.

    An intersection looks precise only because it alerts less: here a learner gives, at each decision time, as many
    alerts as the ensemble does, taken from the top of its ranking.

    Returns: one row for each (model, other model) of a variant: alerts, both precisions, ``difference`` (positive:
    ``model`` is better at equal alerts), its interval, the share of resamples in which it is better, and ``best`` (no
    learner is more precise at as many alerts than ``other_model``; chosen after the fact, which favours it).
    """
    every = np.concatenate([np.ones((1, weights.shape[1])), weights])
    rows = []
    for one in estimates:
        scored = one.scored
        if kind_of(scored.model) != "ensemble":
            continue
        budget = scored.per_time(scored.alert)
        mine = precision_of(scored, scored.alert, every)
        learner_precisions = []
        for two in estimates:
            if two.scored.variant == scored.variant and kind_of(two.scored.model) == "learner":
                learner_precisions.append((two.scored.model, precision_of(two.scored, two.scored.top(budget), every)))
        best = most_precise({model: theirs[0] for model, theirs in learner_precisions})
        for model, theirs in learner_precisions:
            difference = mine - theirs
            bounds = difference_interval(mine, theirs)
            rows.append(
                (scored.variant, scored.model, model, int(budget.sum()), mine[0], theirs[0], difference[0],
                 bounds.low, bounds.high, share_better(difference[1:]), model == best)
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(_EQUAL_COLUMNS))


def difference_interval(one: Floats, two: Floats) -> Interval:
    """Interval of the difference of two shares; none where neither has a hit, since then there is nothing to resample.

    ``one``, ``two``: the shares on the fleet as it is, and then on each resample; shape (1 + replicates,).
    Returns: of ``one - two``.
    """
    if one[0] == two[0] == 0:
        return Interval(np.nan, np.nan)
    return interval(one[1:] - two[1:])


def most_precise(precision: Mapping[str, float]) -> str | None:
    """Name the learner of the highest precision; the earlier in the order of reports where equal; None: none has one.

    ``precision``: precision by model; models that are no learners are passed over.
    """
    known = [name for name in ALL_LEARNERS if np.isfinite(precision.get(name, np.nan))]
    return max(known, key=lambda name: precision[name]) if known else None


def budgets(estimates: Sequence[Estimate], weights: Floats) -> pd.DataFrame:
    """Precision of the riskiest nodes of each decision time at several budgets.

    Returns: ``model``, ``variant``, ``k`` (by :data:`FACTORS`, at least 1), ``alerts`` and ``hits`` (with a label),
    ``precision`` with ``low`` and ``high``, ``row_recall`` (alerts among the positive rows).
    """
    every = np.concatenate([np.ones((1, weights.shape[1])), weights])
    rows: list[tuple[object, ...]] = []
    for estimate in estimates:
        scored = estimate.scored
        for k in sorted({max(1, int(scored.shared.k * factor)) for factor in FACTORS}):
            top = scored.top(k)
            counts = scored.per_cluster(top & scored.known)
            hits = scored.per_cluster(top & scored.positive)
            precision = ratio(every @ hits, every @ counts)
            bounds = honest_interval(precision[1:], point=float(precision[0]), counts=counts)
            caught = float(ratio(hits.sum(), scored.positive.sum()))
            rows.append(
                (*scored.name, k, int(counts.sum()), int(hits.sum()), precision[0], bounds.low, bounds.high, caught)
            )
    return pd.DataFrame(rows, columns=list(_BUDGET_COLUMNS))


def oracle_shares(estimates: Sequence[Estimate], oracle: Estimate, statistics: Sequence[str]) -> pd.DataFrame:
    """Share of the oracle's statistics that each model reaches, on the same resamples.

    Returns: ``model``, ``variant`` and, for each statistic S, ``oracle_share_S`` with ``_low`` and ``_high``.
    """
    rows = []
    for estimate in estimates:
        row: dict[str, object] = {"model": estimate.scored.model, "variant": estimate.scored.variant}
        for name in statistics:
            best = oracle.point[name]
            with np.errstate(divide="ignore", invalid="ignore"):
                spread = interval(estimate.replicates[name] / oracle.replicates[name])
            row[f"oracle_share_{name}"] = estimate.point[name] / best if best else np.nan
            if best and estimate.point[name] == 0 and name in estimate.counts:
                # no resample holds a hit: the exact bound of the share itself, over the oracle as it is
                spread = Interval(0.0, estimate.bounds(name).high / best)
            row |= {f"oracle_share_{name}_low": spread.low, f"oracle_share_{name}_high": spread.high}
        rows.append(row)
    return pd.DataFrame(rows)


def pair(comparison: str, one: Estimate, two: Estimate, name: str) -> tuple[object, ...]:
    """Compare one statistic of two models on the same resamples: a row of :func:`paired_differences`."""
    difference = one.replicates[name] - two.replicates[name]
    bounds = interval(difference)
    value, other = one.point[name], two.point[name]
    if value == other == 0:
        bounds = Interval(np.nan, np.nan)  # neither has a hit, so there is nothing to resample
    return (
        comparison, *one.scored.name, *two.scored.name, name,
        value, other, value - other, bounds.low, bounds.high, share_better(difference),
    )  # fmt: skip


def share_better(difference: Floats) -> float:
    """Share of the resamples in which a difference is positive; NaN where none is known."""
    finite = difference[np.isfinite(difference)]
    return float(np.mean(finite > 0)) if finite.size else np.nan
