"""Why a unit was alerted: what each feature added to the model's score, and the largest additions as text.

See :mod:`models.explanation.contributions` for one learner's score. An ensemble's is the sum of its members'
additions, each weighed as the ensemble weighs its score: exact for ``stacked`` and ``mean_log_odds``, whose score is
that sum; for ``mean_rank``, ``min_votes`` and ``intersection``, which join ranks, the plain mean. A cascade's score is
its last stage's, or the mean of all. It costs about half a millisecond a row and tree member, so only alerts are
explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.config import BASELINES, CASCADE, COMBINERS, PRIOR
from models.explanation.contributions import contributions, explainable
from models.explanation.reasons import ADDITIVE
from models.rows.ranking import Floats
from models.training.fitted import FittedModels


def members_of(fitted: FittedModels, model: str) -> list[tuple[str, Any]]:
    """Find the learners whose scores make a model's alerts.

    ``model``: one of ``fitted.models``.
    Returns: the learner itself; an ensemble's members; behind them the prior that they are pooled with; of a cascade
    the stages whose log-odds make a survivor's score; what stands in for all models where nothing could be fitted.
    Raises ``ValueError`` if there is no such model.
    """
    if model not in fitted.models:
        raise ValueError(f"{model} is not among {', '.join(fitted.models)}")
    if model in BASELINES or fitted.stand_in is not None:
        name = model if model in BASELINES else str(fitted.stand_in)
        return [(name, fitted.baselines[name] if name in fitted.baselines else fitted.learners[name])]
    if model == CASCADE:
        assert fitted.cascade is not None
        return list(fitted.cascade.stages[0 if fitted.cascade.order_by == "mean" else -1 :])
    names = fitted.members if model in COMBINERS else (model,)
    return [(name, fitted.learners[name]) for name in (*names, *((PRIOR,) if fitted.prior_weight else ()))]


def weights_in(fitted: FittedModels, model: str) -> tuple[float, ...]:
    """Give what each of :func:`members_of` weighs in a model's score.

    Returns: ``stacked``: the weights fitted; else all alike, adding up to 1; a prior takes its share of either.
    """
    names = [name for name, _ in members_of(fitted, model)]
    pooled = fitted.prior_weight if names[-1] == PRIOR and fitted.prior_weight and fitted.stand_in is None else None
    own = len(names) - (pooled is not None)
    weights = (1 / own,) * own
    if model == "stacked" and fitted.stand_in is None and any(fitted.stacker.weights):
        weights = fitted.stacker.weights
    return weights if pooled is None else (*((1 - pooled) * weight for weight in weights), pooled * sum(weights))


def attribute_score(
    members: Sequence[tuple[str, Any]], X: np.ndarray, weights: Sequence[float] | None = None
) -> tuple[Floats, str]:
    """Take a joint score apart by its members.

    Members whose contributions add up to log-odds are weighed and summed; others join in only where no member is one,
    because their contributions have a scale of their own.

    ``X``: shape (rows, features).
    ``weights``: weight of each member; by default all alike.
    Returns ``values``: additions to the score; all 0 where no member can be explained; shape (rows, features).
    """
    shares = [1 / len(members)] * len(members) if weights is None else list(weights)
    parts = [
        (name, weight, *contributions(learner, X))
        for (name, learner), weight in zip(members, shares, strict=True)
        if explainable(learner) or len(members) == 1
    ]
    parts = [part for part in parts if part[3] in ADDITIVE] or parts
    names_by_method: dict[str, list[str]] = {}
    for name, _, _, method in parts:
        names_by_method.setdefault(method, []).append(name)
    text = "; ".join(f"{method} of {', '.join(names)}" for method, names in names_by_method.items())
    used = {name for name, *_ in parts}
    missing = [name for name, _ in members if name not in used]
    if missing:
        text += f" (without {', '.join(missing)})"
    share = sum(weight for _, weight, _, _ in parts)
    # what is left out is taken to say what the others say, so that sizes stay those of the whole score
    scale = sum(shares) / share if share > 0 else 1.0
    total = np.zeros(X.shape)
    for _, weight, values, _ in parts:
        total += weight * scale * values
    return total, text.strip()


def explained_by(fitted: FittedModels, model: str, X: np.ndarray) -> tuple[Floats, str]:
    """Contributions to a model's score, and how they were computed; see :func:`attribute_score`."""
    return attribute_score(members_of(fitted, model), X, weights_in(fitted, model))
