"""How a fitted cascade scores rows: each stage filters, the last one orders the survivors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import expit

from models.rows.odds import log_odds
from models.rows.ranking import Bools, Floats


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a cascade and what separates them; see :class:`models.ensembles.cascade.CascadeEnsemble`.

    ``learners``: names and fitted classifiers, from first to last.
    ``thresholds``: Log-odds at or above which a row is passed on, one for each stage but the last.
    ``floor``: Log-odds that rows filtered out stay below, and survivors above.
    ``order_by``: what survivors are ordered by: the ``last`` stage's log-odds, or the ``mean`` of all stages'.
    """

    learners: Sequence[tuple[str, Any]]
    thresholds: Sequence[float]
    floor: float
    order_by: Literal["last", "mean"] = "last"

    def score(self, X: np.ndarray, first_log_odds: Floats | None = None) -> tuple[Floats, Bools]:
        """Score rows.

        ``X``: Features; shape (n_rows, n_features).
        ``first_log_odds``: the first stage's log-odds of the rows, where they are known already; shape (n_rows,).
        Returns: the score, and whether a row passes all filters; shape (n_rows,).
        """
        filters = len(self.thresholds)
        alive = np.arange(len(X))
        score = np.empty(len(X))
        total = np.zeros(len(X))
        for i, threshold in enumerate(self.thresholds):
            stage = self.learners[i][1]
            z = first_log_odds if i == 0 and first_log_odds is not None else log_odds(stage, X[alive])
            out = z < threshold
            # 0.999: in float32, too, the band's upper end must not touch the next band.
            score[alive[out]] = self.floor - (filters - i) + 0.999 * 2 * expit(z[out] - threshold)
            total[alive] += z
            alive = alive[~out]
        z = log_odds(self.learners[-1][1], X[alive])
        if self.order_by == "mean":
            z = (total[alive] + z) / len(self.learners)
        score[alive] = self.floor + np.logaddexp(0, z - self.floor)
        survived = np.zeros(len(X), dtype=bool)
        survived[alive] = True
        return score, survived
