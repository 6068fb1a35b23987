"""Ensembles of fitted learners.

Parallel members are combined by votes of top-K sets, ranks or scores. In a cascade, each stage passes on only
suspicious rows, and the last stage determines the score.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.base import clone

from models.config import Combiner
from models.learners.factory import Fit, FitRows, LearnerStore, fit_all
from models.rows.ranking import Bools, Floats, Hashes, Ints, group_sizes, rank_within, top_nodes
from models.rows.row_reader import log_odds, logit
from models.rows.training_set import purged


@dataclass(frozen=True, slots=True)
class Stacker:
    """Logistic regression on members' log-odds, shrunk to their plain mean because positives are few."""

    weights: tuple[float, ...]
    intercept: float = 0.0

    @classmethod
    def mean(cls, members: int) -> "Stacker":
        """Return equal weights for all members."""
        return cls((1 / members,) * members if members else ())

    @classmethod
    def fit(cls, scores: Floats, y: Ints, weight: Floats | None = None) -> "Stacker":
        """Fit by penalized maximum likelihood.

        ``scores``: out-of-fold log-odds of the members; shape (n_rows, n_members).
        ``y``: 0 or 1; with a single class, the plain mean is returned; shape (n_rows,).
        Returns: weights have a normal prior around 1 / n_members (standard deviation 0.3) and are non-negative; the
        intercept has one around 0 (1.5).
        """
        members = scores.shape[1]
        start = 1 / members
        if len(np.unique(y)) < 2:
            return cls.mean(members)
        from scipy.optimize import minimize  # scoring needs no optimizer

        w = np.ones(len(y)) if weight is None else weight

        def loss(point: Floats) -> tuple[float, Floats]:
            z = scores @ point[:-1] + point[-1]
            residual = w * (expit(z) - y)
            penalty = 0.5 * np.sum(((point[:-1] - start) / 0.3) ** 2) + 0.5 * (point[-1] / 1.5) ** 2
            slope = np.append(scores.T @ residual + (point[:-1] - start) / 0.3**2, residual.sum() + point[-1] / 1.5**2)
            return float(np.sum(w * (np.logaddexp(0, z) - y * z)) + penalty), slope

        bounds = [(0, None)] * members + [(None, None)]
        optimum = minimize(loss, np.append(np.full(members, start), 0.0), jac=True, method="L-BFGS-B", bounds=bounds)
        return cls(tuple(map(float, optimum.x[:-1])), float(optimum.x[-1]))

    def log_odds(self, scores: Floats) -> Floats:
        """Combine log-odds of shape (n_rows, n_members) into one of shape (n_rows,)."""
        # Summed member by member: a matrix product may round a row differently in another batch.
        total = np.full(len(scores), self.intercept)
        for member, weight in enumerate(self.weights):
            total += weight * scores[:, member]
        return total


def combine(
    scores: Floats,
    times: Ints,
    tie: Hashes,
    node: Ints | Hashes,
    *,
    k: int,
    combiner: Combiner,
    min_votes: int | None = None,
    stacker: Stacker | None = None,
) -> tuple[Floats, Bools | None]:
    """Combine members' scores.

    ``scores``: members' scores, riskiest highest; only their order within a decision time matters, except for
    ``mean_log_odds`` and ``stacked``; shape (n_rows, n_members).
    ``tie``: hash of the unit, which orders rows of equal score; shape (n_rows,).
    ``combiner``: ``intersection``: alerts are the units that every member alerts (:func:`top_nodes`), possibly none
    (the paper's PARALLEL); ``min_votes``: those that at least ``min_votes`` members alert; ``mean_rank``: the lowest
    mean ranks; ``mean_log_odds``: the highest means (soft voting, a logarithmic opinion pool); ``stacked``: the highest
    scores of ``stacker``. Voted rows are ordered by votes, then by mean rank.
    ``min_votes``: for ``min_votes``, from 1 to the number of members, as ``model_names`` checks; None: all members.
    ``stacker``: for ``stacked``; None weights all members equally.
    Returns: the score, which orders rows within a decision time: for ``mean_log_odds`` and ``stacked`` a log-odds,
    otherwise the logit of a share between 0 and 1, comparable across decision times as ranks are; and the alerts if
    members vote (None: the highest scores).
    """
    members = scores.shape[1]
    if combiner in ("mean_log_odds", "stacked"):
        weighed = stacker if combiner == "stacked" else None
        return (weighed or Stacker.mean(members)).log_odds(scores), None
    ranks = np.column_stack([rank_within(times, scores[:, member], tie) for member in range(members)])
    share = 1 - (ranks.mean(axis=1) - 0.5) / group_sizes(times)
    if combiner == "mean_rank":
        return logit(share), None
    needed = members if combiner == "intersection" or min_votes is None else min_votes
    votes = np.sum([top_nodes(times, ranks[:, member], node, k) for member in range(members)], axis=0)
    return logit((votes + share) / (members + 1)), votes >= needed


BLOCKS = 3
"""Time blocks; the first is never scored, each other one is scored by a model fitted on all earlier blocks."""

MIN_POSITIVES = 5
"""Minimum positive rows to set a threshold on; with fewer validation positives, out-of-fold ones are used."""

MIN_SURVIVORS = 100
"""Minimum rows to fit a later stage on; if a filter leaves fewer, the stage learns from all rows."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """Fitted stages and their thresholds.

    With F the floor, z the log-odds of the last stage and n filters, a survivor's score is
    F + log(1 + exp(z - F)), practically z except near F. A row rejected by filter i (from 0) scores F - (n - i) + a
    share in (0, 1) that rises with its log-odds there: below all survivors and all rows that later filters reject.

    ``thresholds``: log-odds at or above which a row is passed on, one per stage but the last.
    ``floor``: log-odds that separate survivors (above) from rejected rows: the first percentile of the last stage's
    training rows, at most 0, because rejection means healthy.
    """

    stages: Sequence[tuple[str, Any]]
    thresholds: Sequence[float]
    floor: float

    def score(self, X: np.ndarray, first_log_odds: Floats | None = None) -> tuple[Floats, Bools]:
        """Score rows; return the score, and whether a row passes all filters."""
        filters = len(self.thresholds)
        alive = np.arange(len(X))
        score = np.empty(len(X))
        for i, threshold in enumerate(self.thresholds):
            stage = self.stages[i][1]
            z = first_log_odds if i == 0 and first_log_odds is not None else log_odds(stage, X[alive])
            out = z < threshold
            # 0.999: keeps the bands apart in float32, too.
            score[alive[out]] = self.floor - (filters - i) + 0.999 * 2 * expit(z[out] - threshold)
            alive = alive[~out]
        z = log_odds(self.stages[-1][1], X[alive])
        score[alive] = self.floor + np.logaddexp(0, z - self.floor)
        survived = np.zeros(len(X), dtype=bool)
        survived[alive] = True
        return score, survived


def fit_cascade(
    stages: Sequence[tuple[str, Any]],
    X: np.ndarray,
    y: Ints,
    weight: Floats,
    *,
    times: Ints,
    purge_ms: int,
    recall_floor: float,
    later_positives: np.ndarray | None = None,
    fitted_first: Any = None,
    thresholds: Sequence[float] | None = None,
    store: LearnerStore | None = None,
) -> Cascade:
    """Fit the stages one after the other.

    Every stage but the last keeps the rows at or above its threshold. The next one is fitted on the rows that an
    *out-of-fold* model of the stage kept, because the stage has seen its own training rows and would pass on hardly any
    negatives.

    ``stages``: names and unfitted classifiers, from first to last.
    ``times``: decision times in milliseconds; shape (n_rows,).
    ``purge_ms``: gap + horizon, between the rows that an out-of-fold model is fitted on and those it scores.
    ``recall_floor``: share of validation positives that each threshold keeps.
    ``later_positives``: validation positives that thresholds are set on. With fewer than :data:`MIN_POSITIVES`, or
    none, thresholds are set on the out-of-fold scores.
    ``fitted_first``: the first stage fitted on the same rows, to avoid fitting it twice.
    ``thresholds``: thresholds set earlier on held-out rows, one per stage but the last.
    Raises ``InputError`` if a stage's library rejects its settings.
    """

    def rows_of(train: Ints) -> FitRows:
        return FitRows(X[train], y[train], weight[train], times[train], purge_ms)

    later_positives = np.zeros((0, X.shape[1])) if later_positives is None else later_positives
    rows = np.arange(len(y))
    fitted_stages: list[tuple[str, Any]] = []
    own_thresholds: list[float] = []
    for name, stage in stages[:-1]:
        folds = list(splits(y[rows], times=times[rows], purge_ms=purge_ms))
        fits = [Fit(name, clone(stage), rows_of(rows[train])) for train, _ in folds]
        first = fitted_first if not fitted_stages else None
        if first is None:
            fits.append(Fit(name, clone(stage), rows_of(rows)))
        models = fit_all(fits, store=store)
        fitted = models.pop() if first is None else first
        oof = np.full(len(rows), np.nan)
        for model, (_, scored) in zip(models, folds, strict=True):
            oof[scored] = log_odds(model, X[rows[scored]])
        threshold, survived = _survivors(oof, y[rows], recall_floor)
        if threshold is None:
            threshold = keep_threshold(log_odds(fitted, X[rows][y[rows] == 1]), recall_floor)
        if len(later_positives) >= MIN_POSITIVES:
            score = log_odds(fitted, later_positives)
            threshold = keep_threshold(score, recall_floor)
            later_positives = later_positives[score >= threshold]
        own_thresholds.append(threshold if thresholds is None else thresholds[len(fitted_stages)])
        fitted_stages.append((name, fitted))
        rows = rows[survived]
    name, last = stages[-1]
    fitted_stages.append((name, fit_all([Fit(name, clone(last), rows_of(rows))], store=store)[0]))
    final = log_odds(fitted_stages[-1][1], X[rows])
    return Cascade(fitted_stages, own_thresholds, min(float(np.quantile(final, 0.01, method="lower")), 0.0))


def splits(y: Ints, *, times: Ints, purge_ms: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield pairs of row positions: to fit on (both classes present), and to score.

    Borders split the positives into equal parts; between both kinds of rows is a gap (:func:`purged`).
    """
    borders = np.unique(np.quantile(times[y == 1], np.arange(1, BLOCKS) / BLOCKS, method="lower"))
    for i, border in enumerate(borders):
        until = borders[i + 1] if i + 1 < len(borders) else np.inf
        fit_on = np.flatnonzero(purged(times, border, purge_ms))
        if len(np.unique(y[fit_on])) == 2:
            yield fit_on, np.flatnonzero((times >= border) & (times < until))


def keep_threshold(score: Floats, recall_floor: float) -> float:
    """Return the highest threshold that keeps at least a share in (0, 1] of one or more positive scores."""
    descending = np.sort(score)[::-1]
    # Rounding may put the product just above an integer (0.95 * 20), which would keep one too many.
    needed = math.ceil(recall_floor * len(descending) - 1e-9)
    return float(descending[max(needed, 1) - 1])


def _survivors(oof: Floats, y: Ints, recall_floor: float) -> tuple[float | None, Ints]:
    """Return the out-of-fold threshold (None: no positive was scored) and the rows it passes on."""
    scored = np.flatnonzero(~np.isnan(oof))
    positives = scored[y[scored] == 1]
    if len(positives) == 0:
        return None, np.arange(len(y))
    threshold = keep_threshold(oof[positives], recall_floor)
    survivors = scored[oof[scored] >= threshold]
    # If a stage separates (nearly) perfectly, the next one has nothing to learn from survivors: use all rows.
    if len(np.unique(y[survivors])) < 2 or len(survivors) < MIN_SURVIVORS:
        survivors = scored if len(np.unique(y[scored])) == 2 else np.arange(len(y))
    return threshold, survivors
