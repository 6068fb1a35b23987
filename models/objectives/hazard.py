"""Discrete-time survival: trees that tell how soon a failure comes, and so whether it comes within the horizon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import lightgbm
import numpy as np
import xgboost
from scipy.special import expit

from models.objective_maps import hazard_risk, room_for_interval
from models.objectives.boosted import BoostedObjective, Library, library_settings, margin, shap_values
from models.ranking import Floats

EDGES_HOURS: tuple[float, ...] = (1.0, 6.0)
"""Borders between intervals, in hours after the decision; the last interval ends with the horizon."""

MIN_EVENTS = 5
"""Positive rows in an interval at least; intervals with fewer are joined with the next."""


def used_edges(hours: Floats, edges: Sequence[float]) -> list[float]:
    """Keep the borders that leave at least :data:`MIN_EVENTS` positives on either side, up to the next border.

    ``hours``: hours to the incident; shape (n_positives,).
    Returns: Ascending; possibly empty.
    """
    kept: list[float] = []
    before = 0
    for edge in sorted({float(each) for each in edges}):
        until = int((hours <= edge).sum())
        if until - before >= MIN_EVENTS and len(hours) - until >= MIN_EVENTS:
            kept.append(edge)
            before = until
    return kept


class HazardClassifier(BoostedObjective):
    """Trees fitted on one row for each training row and interval it was at risk in (person-period rows).

    The target of such a row is whether the incident starts in the interval, its features are the row's and the number
    of the interval, and the trees start from the interval's own average hazard. The probability of the positive class
    is 1 - the product over intervals of (1 - hazard).

    ``library``: ``lightgbm`` or ``xgboost``.
    ``settings``: settings of ``lightgbm.LGBMClassifier`` or ``xgboost.XGBClassifier``.
    ``random_state``: Seed; None counts as 0.
    ``booster_``: the trees; their last feature is the number of the interval.
    ``edges_``: borders in use, in hours: those with enough positives between them.
    ``start_``: Log-odds of the average hazard of each interval, one more than there are borders.

    Discrete-time hazards by a binary likelihood on person-period rows: Allison, "Discrete-Time Methods for the Analysis
    of Event Histories" (1982); Tutz and Schmid, "Modeling Discrete Time-to-Event Data" (2016).
    """

    _saved: ClassVar[tuple[str, ...]] = ("edges_", "start_")

    def __init__(
        self,
        library: Library = "lightgbm",
        edges_hours: Sequence[float] = EDGES_HOURS,
        settings: Any = None,
        random_state: int | None = None,
    ) -> None:
        self.library = library
        self.edges_hours = edges_hours
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, hours_to_incident: Any = None) -> Self:
        """Fit the trees on person-period rows.

        ``X``: Features; NaN allowed; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``sample_weight``: Weights; shape (n_rows,).
        ``hours_to_incident``: hours from the decision to the incident of positive rows; the values of negatives are not
        looked at. A positive without one (NaN) counts for the last interval. Without any there is one interval; shape
        (n_rows,).
        """
        X, codes, weight = self._begin_fit(X, y, sample_weight)
        hours = np.full(len(codes), np.nan) if hours_to_incident is None else np.asarray(hours_to_incident, np.float64)
        hours = np.where(np.isnan(hours), np.inf, hours)
        edges = used_edges(hours[(codes == 1) & np.isfinite(hours)], self.edges_hours)
        last = np.where(codes == 1, np.searchsorted(edges, hours, side="left"), len(edges))
        # Row by row, interval by interval up to the one with the incident.
        row = np.repeat(np.arange(len(codes)), last + 1)
        first = np.cumsum(last + 1) - (last + 1)
        interval = np.arange(len(row)) - first[row]
        event = ((codes[row] == 1) & (interval == last[row])).astype(np.int64)
        weights = weight[row]
        happened = np.bincount(interval, weights * event, len(edges) + 1)
        at_risk = np.bincount(interval, weights, len(edges) + 1)
        start = np.log((happened + 0.5) / (at_risk - happened + 0.5))
        with_interval = np.column_stack([X[row], interval.astype(X.dtype)])
        settings = library_settings(self.library, self.settings, self.random_state)
        if self.library == "lightgbm":
            trees = lightgbm.LGBMClassifier(**settings, objective="binary")
            trees.fit(with_interval, event, sample_weight=weights, init_score=start[interval])
            self.booster_ = trees.booster_
        else:
            boosted = xgboost.XGBClassifier(**settings, objective="binary:logistic", base_score=0.5)
            boosted.fit(with_interval, event, sample_weight=weights, base_margin=start[interval].astype(np.float32))
            self.booster_ = boosted.get_booster()
        self.edges_, self.start_ = edges, [float(each) for each in start]
        return self

    def hazards(self, X: Any) -> Floats:
        """Give the probability of an incident in each interval if there was none before, shape (n_rows, intervals)."""
        return expit(self._margins(self._checked(X)))

    def risks(self, X: Any) -> Floats:
        """Give the probability of an incident up to the end of each interval, shape (n_rows, intervals), rising."""
        return -np.expm1(-np.cumsum(np.logaddexp(0, self._margins(self._checked(X))), axis=1))

    def _margins(self, X: np.ndarray) -> Floats:
        rows = room_for_interval(X)
        out = np.empty((len(X), len(self.start_)))
        for interval, start in enumerate(self.start_):
            rows[:, -1] = interval
            out[:, interval] = margin(self.booster_, rows, np.full(len(X), start))
        return out

    def _positive(self, X: np.ndarray) -> np.ndarray:
        return hazard_risk(self._margins(X))

    def contributions(self, X: np.ndarray) -> Floats:
        """Contribution of each feature to the log-odds of the risk, shape of ``X``.

        TreeSHAP of every interval's hazard, each weighed by how the risk's log-odds moves with it: its hazard over the
        risk (a first-order weighing, where a single interval is exact).
        """
        X = self._checked(X)
        hazard = expit(self._margins(X))
        risk = np.maximum(-np.expm1(np.log1p(-hazard).sum(axis=1)), 1e-12)
        rows = room_for_interval(X)
        out = np.zeros(X.shape)
        for interval in range(len(self.start_)):
            rows[:, -1] = interval
            out += shap_values(self.booster_, rows)[:, :-1] * (hazard[:, interval] / risk)[:, None]
        return out

    def _restored(self) -> None:
        if len(self.start_) != len(self.edges_) + 1 or self.edges_ != sorted(self.edges_):
            raise ValueError("its intervals do not fit their borders")
        self.n_features_in_ -= 1
