"""The parallel ensemble: several models vote with their top-K sets, or join their ranks or scores."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import numpy as np
from scipy.special import expit
from sklearn.base import clone

from features.times import duration_ms
from models.binary import BinaryClassifier, takes_nan
from models.combining import Combined, Stacker, combine
from models.config import Combiner
from models.fit_facts import FitFacts
from models.odds import log_odds
from models.ranking import Floats, name_hashes
from models.walk_forward import out_of_fold


class ParallelEnsemble(BinaryClassifier):
    """Several classifiers whose alerts are joined at each decision time; a scikit-learn classifier of its own.

    ``predict_proba`` looks at one row at a time (mean or stacked log-odds); the joint decision at a decision time is
    :meth:`select`.

    ``combiner``: see :func:`combine`.
    ``min_votes``: for ``min_votes``; None means all members.
    ``purge``: gap + horizon, for the out-of-fold scores of ``stacked``; None: none.
    ``stacker_``: how log-odds are joined; the plain mean unless ``stacked``.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, Any]] = (),
        combiner: Combiner = "intersection",
        k: int = 10,
        min_votes: int | None = None,
        purge: timedelta | None = None,
    ) -> None:
        self.members = members
        self.combiner = combiner
        self.k = k
        self.min_votes = min_votes
        self.purge = purge

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        times: Any = None,
        groups: Any = None,
    ) -> Self:
        """Fit every member and, for ``stacked``, the stacker on their walk-forward out-of-fold scores.

        ``X``: Features; NaN allowed if all members take it; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``sample_weight``: Weights; shape (n_rows,).
        ``times``: decision times in milliseconds; without them the folds of ``stacked`` are not ordered in time; shape
        (n_rows,).
        ``groups``: Units, kept whole by folds that are not ordered in time; shape (n_rows,).
        """
        X, codes, weight = self._begin_fit(X, y, sample_weight)
        if not self.members:
            raise ValueError("ParallelEnsemble has no members: give a list of (name, classifier).")
        facts = FitFacts.of(times)
        self.members_ = [
            (name, clone(member).fit(X, codes, sample_weight=weight, **facts.wanted_by(member)))
            for name, member in self.members
        ]
        self.stacker_ = Stacker.mean(len(self.members))
        if self.combiner == "stacked":
            scores = np.column_stack(
                [
                    out_of_fold(
                        member,
                        X,
                        codes,
                        weight,
                        facts=facts,
                        groups=None if groups is None else np.asarray(groups),
                        purge_ms=0 if self.purge is None else duration_ms(self.purge),
                    )
                    for _, member in self.members
                ]
            )
            scored = ~np.isnan(scores).any(axis=1)
            self.stacker_ = Stacker.fit(scores[scored], codes[scored], weight[scored])
        return self

    def member_log_odds(self, X: Any) -> Floats:
        """Give each member's log-odds, shape (n_rows, n_members)."""
        X = self._checked(X)
        return np.column_stack([log_odds(member, X) for _, member in self.members_])

    def select(self, X: Any, times: Any = None, units: Any = None) -> Combined:
        """Decide jointly at each decision time.

        ``X``: Features; shape (n_rows, n_features).
        ``times``: decision time of each row; None: all rows are of one; shape (n_rows,).
        ``units``: Units, which break ties; None: the position does; shape (n_rows,).
        Returns: Score, rank and alert of each row.
        """
        scores = self.member_log_odds(X)
        at = np.zeros(len(scores), dtype=np.int64) if times is None else np.asarray(times, dtype=np.int64)
        tie = np.arange(len(scores), dtype=np.uint64) if units is None else name_hashes(units)
        return combine(
            scores, at, tie, k=self.k, combiner=self.combiner, min_votes=self.min_votes, stacker=self.stacker_
        )

    def _positive(self, X: np.ndarray) -> np.ndarray:
        scores = np.column_stack([log_odds(member, X) for _, member in self.members_])
        return expit(self.stacker_.log_odds(scores))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = bool(self.members) and all(takes_nan(member) for _, member in self.members)
        return tags
