"""The cascade ensemble: each stage passes on only the suspicious rows, and the last stage gives the score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Self

import numpy as np
from scipy.special import expit
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, StratifiedKFold

from features.times import duration_ms
from models.binary import BinaryClassifier, takes_nan
from models.ensembles.combining import Combined
from models.ensembles.scorer import Stages
from models.learners.factory import refusals
from models.rows.odds import log_odds
from models.rows.ranking import Bools, Floats, Ints, name_hashes, rank_within

BLOCKS = 3
"""Blocks of time; the first is never scored, each other one by a model fitted on all before it."""


def splits(
    y: Ints, *, times: Ints | None, groups: np.ndarray | None, purge_ms: int, blocks: int = BLOCKS
) -> Iterator[tuple[Ints, Ints]]:
    """Give pairs of row positions: to fit on, and to score.

    ``y``: 0 or 1; shape (n_rows,).
    ``times``: decision times in milliseconds. Borders between blocks hold equal numbers of positives apart. Rows to fit
    on end at least ``purge_ms`` before the block begins, so that no label window, and so no incident, reaches across;
    shape (n_rows,).
    ``groups``: Units. With times they need no further split: the purge keeps a unit's incident on one side. Without
    times the folds keep each unit whole; shape (n_rows,).
    ``blocks``: number of blocks, or of folds where there are no times.
    Yields: positions to fit on, with both classes among them, and positions to score.
    """
    if times is not None:
        borders = np.unique(np.quantile(times[y == 1], np.arange(1, blocks) / blocks, method="lower"))
        for i, border in enumerate(borders):
            until = borders[i + 1] if i + 1 < len(borders) else np.inf
            fit_on = np.flatnonzero(times < border - purge_ms)
            if len(np.unique(y[fit_on])) == 2:
                yield fit_on, np.flatnonzero((times >= border) & (times < until))
        return
    rare = min(int(y.sum()), int(len(y) - y.sum()))
    if groups is not None and len(np.unique(groups)) >= 2:
        folds = GroupKFold(min(blocks, len(np.unique(groups)))).split(y, y, groups)
    elif rare >= 2:
        folds = StratifiedKFold(min(blocks, rare)).split(y, y)
    else:
        return
    for fit_on, scored in folds:
        if len(np.unique(y[fit_on])) == 2:
            yield fit_on, scored


def out_of_fold(
    learner: Any,
    X: np.ndarray,
    y: Ints,
    weight: Floats,
    *,
    times: Ints | None,
    groups: np.ndarray | None,
    purge_ms: int,
) -> Floats:
    """Score rows out of fold.

    ``learner``: cloned for each fold.
    ``X``, ``y``, ``weight``: training rows: features, 0 or 1, weights.
    ``times``, ``groups``, ``purge_ms``: see :func:`splits`.
    Returns: Log-odds; NaN for rows that no fold scored; shape (n_rows,).
    """
    scores = np.full(len(y), np.nan)
    for fit_on, scored in splits(y, times=times, groups=groups, purge_ms=purge_ms):
        fitted = clone(learner).fit(X[fit_on], y[fit_on], sample_weight=weight[fit_on])
        scores[scored] = log_odds(fitted, X[scored])
    return scores


MIN_POSITIVES = 5
"""Positive rows that a threshold is set on at least; with fewer validation positives, out-of-fold ones are used."""

MIN_SURVIVORS = 100
"""Rows that a later stage is fitted on at least; where a filter leaves fewer, the stage learns from all rows."""


def keep_threshold(score: Floats, recall_floor: float) -> float:
    """Give the highest threshold that keeps at least a share of scores.

    ``score``: scores of positives, one or more; shape (n,).
    ``recall_floor``: share to keep, in (0, 1].
    Returns: a score of the input; at least ``recall_floor`` of them are greater or equal.
    """
    descending = np.sort(score)[::-1]
    # The product may come out a hair above a whole number (0.95 * 20), which would keep one more than asked.
    needed = math.ceil(recall_floor * len(descending) - 1e-9)
    return float(descending[max(needed, 1) - 1])


class CascadeEnsemble(BinaryClassifier):
    """Stages that filter, then one that scores; a scikit-learn classifier of its own.

    Every stage but the last keeps the rows at or above its threshold. The next is fitted on the rows that an
    *out-of-fold* model of the stage kept, because the stage itself has seen its training rows and would pass on
    hardly a negative.

    ``stages``: names and unfitted classifiers, from first to last; two or more in practice.
    ``recall_floor``: share of validation positives that each threshold keeps.
    ``purge``: gap + horizon, between the rows that an out-of-fold model is fitted on and those it scores; None: none.
    ``order_by``: what survivors are ordered by: ``last``, the last stage's log-odds; ``mean``, the mean of all stages'.
    The last stage has learnt to tell survivors apart and nothing else; the earlier ones still know how suspicious they
    were.
    ``k``: alert budget a decision time, for :meth:`select`.
    ``thresholds_``: Log-odds at or above which a row is passed on, one for each stage but the last.
    ``floor_``: Log-odds of the last stage that rows filtered out stay below, and survivors above: the first percentile
    of its training rows, at most 0, because to be filtered out is to be called healthy.

    With F the floor, z the log-odds of the last stage (or the mean of all stages') and n filters, a survivor's score is
    F + log(1 + exp(z - F)), practically z except near F. A row that filter i (from 0) takes out scores F - (n - i) + a
    share in (0, 1) that rises with its log-odds there: below all survivors, and below whatever a later filter takes
    out.
    """

    def __init__(
        self,
        stages: Sequence[tuple[str, Any]] = (),
        recall_floor: float = 0.95,
        purge: timedelta | None = None,
        order_by: Literal["last", "mean"] = "last",
        k: int = 10,
    ) -> None:
        self.stages = stages
        self.recall_floor = recall_floor
        self.purge = purge
        self.order_by = order_by
        self.k = k

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        times: Any = None,
        groups: Any = None,
        validation: tuple[Any, Any] | None = None,
        fitted_first: Any = None,
        thresholds: Sequence[float] | None = None,
    ) -> Self:
        """Fit the stages one after the other.

        ``X``: Features; NaN allowed if all stages take it; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``sample_weight``: Weights; shape (n_rows,).
        ``times``: decision times in milliseconds. Out-of-fold models are then fitted on earlier rows only; without
        times, folds keep ``groups`` whole or are stratified; shape (n_rows,).
        ``groups``: Units; shape (n_rows,).
        ``validation``: later rows that thresholds are set on. Without them, or with fewer than :data:`MIN_POSITIVES`
        positives, thresholds are set on the out-of-fold scores.
        ``fitted_first``: the first stage already fitted on the same rows, with classes 0 and 1, so that it is not
        fitted twice.
        ``thresholds``: thresholds set before, on rows that were held out, one for each stage but the last.
        Raises ``InputError`` if a stage's library refuses its settings; see :func:`models.learners.factory.refusals`.
        """
        X, codes, weight = self._begin_fit(X, y, sample_weight)
        if not self.stages:
            raise ValueError("CascadeEnsemble has no stages: give a list of (name, classifier).")
        if self.order_by not in ("last", "mean"):
            raise ValueError(f"CascadeEnsemble's order_by is {self.order_by!r}: give 'last' or 'mean'.")
        times = None if times is None else np.asarray(times, dtype=np.int64)
        groups = None if groups is None else np.asarray(groups)
        checked = self._validation_positives(validation)
        rows = np.arange(len(codes))
        self.stages_: list[tuple[str, Any]] = []
        self.thresholds_: list[float] = []
        for name, stage in self.stages[:-1]:
            if fitted_first is not None and not self.stages_:
                fitted = fitted_first
            else:
                with refusals(name):
                    fitted = clone(stage).fit(X[rows], codes[rows], sample_weight=weight[rows])
            oof = out_of_fold(
                stage,
                X[rows],
                codes[rows],
                weight[rows],
                times=None if times is None else times[rows],
                groups=None if groups is None else groups[rows],
                purge_ms=0 if self.purge is None else duration_ms(self.purge),
            )
            own, kept = self._survivors(oof, codes[rows])
            if own is None:
                own = keep_threshold(log_odds(fitted, X[rows][codes[rows] == 1]), self.recall_floor)
            if len(checked) >= MIN_POSITIVES:
                own = keep_threshold(log_odds(fitted, checked), self.recall_floor)
                checked = checked[log_odds(fitted, checked) >= own]
            if thresholds is not None:
                own = thresholds[len(self.thresholds_)]
            self.stages_.append((name, fitted))
            self.thresholds_.append(own)
            rows = rows[kept]
        name, last = self.stages[-1]
        with refusals(name):
            fitted = clone(last).fit(X[rows], codes[rows], sample_weight=weight[rows])
        self.stages_.append((name, fitted))
        lowest = float(np.quantile(self._final(X[rows]), 0.01, method="lower"))
        self.floor_ = min(lowest, 0.0)
        return self

    def _validation_positives(self, validation: tuple[Any, Any] | None) -> np.ndarray:
        if validation is None:
            return np.zeros((0, self.n_features_in_))
        X, y = np.asarray(validation[0]), np.asarray(validation[1])
        return X[y == self.classes_[1]]

    def _survivors(self, oof: Floats, y: Ints) -> tuple[float | None, Ints]:
        """Give the out-of-fold threshold (None: no positive was scored) and which rows it passes on."""
        scored = np.flatnonzero(~np.isnan(oof))
        positives = scored[y[scored] == 1]
        if len(positives) == 0:
            return None, np.arange(len(y))
        threshold = keep_threshold(oof[positives], self.recall_floor)
        kept = scored[oof[scored] >= threshold]
        # A stage that separates (nearly) perfectly leaves the next nothing to tell apart: it learns from all rows.
        if len(np.unique(y[kept])) < 2 or len(kept) < MIN_SURVIVORS:
            kept = scored if len(np.unique(y[scored])) == 2 else np.arange(len(y))
        return threshold, kept

    def log_odds(self, X: Any) -> Floats:
        """Give the score of rows, shape (n_rows,); see the class's notes."""
        return self._score(self._checked(X))[0]

    def survives(self, X: Any) -> Bools:
        """Tell which rows pass all filters, shape (n_rows,)."""
        return self._score(self._checked(X))[1]

    def fitted_stages(self) -> Stages:
        """Give what scores rows, once fitted."""
        return Stages(self.stages_, self.thresholds_, self.floor_, self.order_by)

    def score_rows(self, X: np.ndarray, first_log_odds: Floats | None = None) -> tuple[Floats, Bools]:
        """Give score and survival of rows in one pass, optionally reusing the first stage's log-odds of them."""
        return self.fitted_stages().score(np.asarray(X), first_log_odds)

    def _score(self, X: np.ndarray) -> tuple[Floats, Bools]:
        return self.fitted_stages().score(X)

    def _final(self, X: np.ndarray) -> Floats:
        """Give what survivors are ordered by, for rows that all survive."""
        stages = self.stages_ if self.order_by == "mean" else self.stages_[-1:]
        return np.sum([log_odds(stage, X) for _, stage in stages], axis=0) / len(stages)

    def select(self, X: Any, times: Any = None, units: Any = None) -> Combined:
        """Decide at each decision time: alerts are the ``k`` riskiest rows that survive, possibly fewer.

        ``X``: Features; shape (n_rows, n_features).
        ``times``: decision time of each row; None: all rows are of one; shape (n_rows,).
        ``units``: Units, which break ties; None: the position does; shape (n_rows,).
        Returns: Score, rank and alert of each row.
        """
        score, survived = self._score(self._checked(X))
        at = np.zeros(len(score), dtype=np.int64) if times is None else np.asarray(times, dtype=np.int64)
        tie = np.arange(len(score), dtype=np.uint64) if units is None else name_hashes(units)
        rank = rank_within(at, score, tie)
        return Combined(score, rank, survived & (rank <= self.k))

    def _positive(self, X: np.ndarray) -> np.ndarray:
        return expit(self._score(X)[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = bool(self.stages) and all(takes_nan(stage) for _, stage in self.stages)
        return tags
