"""How the members of a parallel ensemble are joined: votes with top-K sets, ranks or scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from models.config import Combiner
from models.rows.ranking import Bools, Floats, Hashes, Ints, group_sizes, rank_within, top_nodes
from models.rows.row_reader import logit


@dataclass(frozen=True, slots=True)
class Stacker:
    """Logistic regression over members' log-odds, kept near their plain mean: positives are few."""

    weights: tuple[float, ...]
    intercept: float = 0.0

    @classmethod
    def mean(cls, members: int) -> Stacker:
        """Give all members the same weight."""
        return cls((1 / members,) * members if members else ())

    @classmethod
    def fit(cls, scores: Floats, y: Ints, weight: Floats | None = None) -> Stacker:
        """Fit by penalised maximum likelihood.

        ``scores``: Log-odds that the members gave out of fold; shape (n_rows, n_members).
        ``y``: 0 or 1; with one class only, the plain mean is returned; shape (n_rows,).
        Returns: weights have a normal prior around one over the number of members (standard deviation 0.3) and are cut
        at 0; the intercept has one around 0 (1.5).
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
        """Join log-odds of shape (n_rows, n_members) into one of shape (n_rows,)."""
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
    """Join members' scores.

    ``scores``: Members' scores, riskiest highest; only their order inside a decision time counts, except for
    ``mean_log_odds`` and ``stacked``; shape (n_rows, n_members).
    ``tie``: hash of the unit, which orders rows of equal score; shape (n_rows,).
    ``combiner``: ``intersection``: alerts are the units that every member alerts (:func:`top_nodes`), possibly none
    (the paper's PARALLEL); ``min_votes``: that at least ``min_votes`` members alert; ``mean_rank``: the lowest mean
    ranks; ``mean_log_odds``: the highest means (soft voting, a logarithmic opinion pool); ``stacked``: the highest
    scores of ``stacker``. Voted rows are ordered by votes, then by mean rank.
    ``min_votes``: for ``min_votes``, from 1 to the number of members, as ``model_names`` checks; None: all members.
    ``stacker``: for ``stacked``; None gives all members the same weight.
    Returns: the score, which orders rows inside a decision time: for ``mean_log_odds`` and ``stacked`` a log-odds,
    otherwise the logit of a share between 0 and 1, comparable between decision times as ranks are; and the alerts where
    members vote (None: those of the highest scores).
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
