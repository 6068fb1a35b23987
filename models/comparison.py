"""Models against each other on the same bootstrap samples, and at equal numbers of alerts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from models.assessment import Assessment, kind_of, precision_of
from models.bootstrap import interval
from models.config import LEARNERS
from models.metrics import Bools, Floats

SLIDING = "sliding"
TRAIN_ONCE = "train_once"

PAIRED: tuple[str, ...] = ("precision_at_k", "precision", "recall", "average_precision", "roc_auc", "capture")
"""Statistics that are compared in pairs."""

_PAIR_COLUMNS = (
    "comparison", "model", "variant", "other_model", "other_variant", "statistic",
    "value", "other_value", "difference", "low", "high", "share_better",
)  # fmt: skip

_EQUAL_COLUMNS = (
    "variant", "model", "other_model", "alerts", "precision", "other_precision",
    "difference", "low", "high", "share_better",
)  # fmt: skip


def best_learner(assessed: Sequence[Assessment], variant: str = SLIDING) -> Assessment | None:
    """Find the single learner with the highest precision at K.

    It is chosen after the fact on the rows it is then compared on, which favours it against the ensembles.

    Parameters
    ----------
    assessed : sequence of Assessment
        All models.
    variant : str
        The variant to choose among.

    Returns
    -------
    Assessment or None
        The best; the earlier in the order of reports where equal; None where no learner has a precision.
    """
    found = [
        (each.point["precision_at_k"], each.point["average_precision"], -LEARNERS.index(each.scored.model), each)
        for each in assessed
        if kind_of(each.scored.model) == "learner" and each.scored.variant == variant
        if np.isfinite(each.point["precision_at_k"]) and np.isfinite(each.point["average_precision"])
    ]
    return max(found, key=lambda entry: entry[:3])[3] if found else None


def paired_differences(assessed: Sequence[Assessment]) -> pd.DataFrame:
    """Differences that a reader asks about, with intervals from the same resamples on both sides.

    Comparisons: ``sliding`` (each model's sliding variant against its train-once variant), ``ensemble`` (each sliding
    ensemble against the best sliding learner), ``baseline`` (the best sliding learner against each sliding baseline).

    Parameters
    ----------
    assessed : sequence of Assessment
        All models, measured on the same resamples.

    Returns
    -------
    DataFrame
        One row a comparison and statistic: the two values, ``difference`` (positive: ``model`` is better), its
        interval ``low``, ``high`` (NaN: none), and ``share_better``, the share of resamples in which ``model`` is
        better.
    """
    by_name = {each.scored.name: each for each in assessed}
    pairs: list[tuple[str, Assessment, Assessment]] = []
    for (model, variant), each in by_name.items():
        if variant == SLIDING and (model, TRAIN_ONCE) in by_name:
            pairs.append(("sliding", each, by_name[model, TRAIN_ONCE]))
    best = best_learner(assessed)
    if best is not None:
        sliding = [each for each in assessed if each.scored.variant == SLIDING]
        pairs += [("ensemble", each, best) for each in sliding if kind_of(each.scored.model) == "ensemble"]
        pairs += [("baseline", best, each) for each in sliding if kind_of(each.scored.model) == "baseline"]
    rows = [_pair(comparison, one, two, name) for comparison, one, two in pairs for name in PAIRED]
    return pd.DataFrame(rows, columns=list(_PAIR_COLUMNS))


def equal_alerts(assessed: Sequence[Assessment], weights: Floats) -> pd.DataFrame:
    """Compare each model that alerts less than the budget with the others cut to as many alerts.

    An intersection looks precise only because it alerts less (DESIGN 5): here every other model of the same variant
    gives, at each decision time, as many alerts as the intersection does, taken from the top of its ranking.

    Parameters
    ----------
    assessed : sequence of Assessment
        All models.
    weights : ndarray, shape (replicates, units)
        Bootstrap samples.

    Returns
    -------
    DataFrame
        One row for each (sparing model, other model) of a variant: alerts, both precisions, ``difference`` (positive:
        the sparing model is better at equal alerts), its interval and the share of resamples in which it is better.
    """
    every = np.concatenate([np.ones((1, weights.shape[1])), weights])
    rows = []
    for one in assessed:
        scored = one.scored
        budget = scored.per_time(scored.alert)
        possible = np.minimum(scored.per_time(np.ones(len(scored.rank), np.bool_)), scored.shared.k)
        if kind_of(scored.model) == "oracle" or (budget >= possible).all():
            continue
        mine = precision_of(scored, scored.alert, every)
        for two in assessed:
            if two is one or two.scored.variant != scored.variant:
                continue
            theirs = precision_of(two.scored, _cut(two, budget), every)
            difference = mine - theirs
            bounds = interval(difference[1:])
            rows.append(
                (scored.variant, scored.model, two.scored.model, int(budget.sum()), mine[0], theirs[0], difference[0],
                 bounds.low, bounds.high, _share_better(difference[1:]))
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(_EQUAL_COLUMNS))


def oracle_shares(assessed: Sequence[Assessment], oracle: Assessment, statistics: Sequence[str]) -> pd.DataFrame:
    """Share of the oracle's statistics that each model reaches, on the same resamples.

    Parameters
    ----------
    assessed : sequence of Assessment
        All models.
    oracle : Assessment
        The oracle.
    statistics : sequence of str
        Statistics to compare.

    Returns
    -------
    DataFrame
        ``model``, ``variant`` and, for each statistic S, ``oracle_share_S`` with ``_low`` and ``_high``.
    """
    rows = []
    for each in assessed:
        row: dict[str, object] = {"model": each.scored.model, "variant": each.scored.variant}
        for name in statistics:
            best = oracle.point[name]
            with np.errstate(divide="ignore", invalid="ignore"):
                spread = interval(each.replicates[name] / oracle.replicates[name])
            row[f"oracle_share_{name}"] = each.point[name] / best if best else np.nan
            row |= {f"oracle_share_{name}_low": spread.low, f"oracle_share_{name}_high": spread.high}
        rows.append(row)
    return pd.DataFrame(rows)


def _cut(assessed: Assessment, budget: np.ndarray) -> Bools:
    return assessed.scored.top(budget)


def _pair(comparison: str, one: Assessment, two: Assessment, name: str) -> tuple[object, ...]:
    difference = one.replicates[name] - two.replicates[name]
    bounds = interval(difference)
    value, other = one.point[name], two.point[name]
    return (
        comparison, *one.scored.name, *two.scored.name, name,
        value, other, value - other, bounds.low, bounds.high, _share_better(difference),
    )  # fmt: skip


def _share_better(difference: Floats) -> float:
    finite = difference[np.isfinite(difference)]
    return float(np.mean(finite > 0)) if finite.size else np.nan
