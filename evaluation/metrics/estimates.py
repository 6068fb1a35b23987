"""Point estimates and bootstrap replicates of every statistic, for one model and variant."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from evaluation.metrics.lead_time import incident_table
from evaluation.metrics.metrics import Bools, Floats, Interval, Ints, Ranking, interval, ratio, share_interval
from evaluation.metrics.oracle import ORACLE
from evaluation.metrics.scored import Scored
from models.config import ALL_LEARNERS, BASELINES

STATISTICS: tuple[str, ...] = (
    "episode_precision",
    "precision_at_k",
    "precision",
    "recall",
    "capture",
    "average_precision",
    "roc_auc",
)
"""Statistics with bootstrap intervals, defined in :class:`Estimate`."""

LEAD_QUANTILES: dict[str, float] = {
    "lead_time_q25_hours": 0.25,
    "lead_time_median_hours": 0.5,
    "lead_time_q75_hours": 0.75,
}
"""Columns of the lead time quartiles."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Statistics of one model and variant, per node; unlabelled rows are ignored.

    ``episode_precision``: share of right episodes among those of known outcome; ``precision_at_k``: positives among
    the K riskiest rows of each decision time, pooled (micro average); ``precision``: positives among the model's own
    alerts, of which an intersection has fewer than K; ``recall``: failures caught (``incident_table``); ``capture``:
    failures whose node was in the top 5 % at the last decision before them within the horizon; ``average_precision``
    and ``roc_auc`` pool rows by rank within the decision time, because scores of different refits are not comparable.

    ``replicates``: the statistics on each bootstrap sample; all models share the samples; shape (replicates,).
    ``counts``: for ratios: rows (or incidents) of each cluster in the denominator; shape (clusters,).
    """

    scored: Scored
    point: dict[str, float]
    replicates: dict[str, Floats]
    counts: dict[str, Floats]
    incidents: pd.DataFrame

    def bounds(self, name: str) -> Interval:
        """Interval of a statistic; exact if it is a share of 0 or 1 (``share_interval``)."""
        if name not in self.counts:
            return interval(self.replicates[name])
        return share_interval(self.replicates[name], point=self.point[name], counts=self.counts[name])


def kind_of(model: str) -> str:
    """Return the kind of a model: ``learner``, ``baseline``, ``oracle`` or ``ensemble``."""
    if model in ALL_LEARNERS:
        return "learner"
    if model in BASELINES:
        return "baseline"
    return "oracle" if model == ORACLE else "ensemble"


def estimate_model(scored: Scored, weights: Floats) -> Estimate:
    """Compute all statistics of one model and variant."""
    incidents = incident_table(scored)
    weightings = np.concatenate([np.ones((1, scored.shared.n_clusters)), weights])
    values, counts = _ratios(scored, incidents, weightings)
    known = scored.known
    cluster = scored.rows.cluster[known]
    ranking = Ranking.build(-scored.rank[known], scored.positive[known], cluster, scored.shared.n_clusters)
    values["average_precision"], values["roc_auc"] = ranking.precision_and_auc(weightings)
    return Estimate(
        scored=scored,
        point={name: float(values[name][0]) for name in STATISTICS},
        replicates={name: values[name][1:] for name in STATISTICS},
        counts=counts,
        incidents=incidents,
    )


def precision_of(scored: Scored, alerted: Bools, weights: Floats) -> Floats:
    """Precision of a set of alerts on each resample: hits over labelled alerts; NaN without labelled alerts.

    ``weights``: weight of each cluster; shape (replicates, clusters).
    """
    hits = weights @ scored.per_cluster(alerted & scored.positive)
    return ratio(hits, weights @ scored.per_cluster(alerted & scored.known))


def summarise(estimate: Estimate) -> dict[str, object]:
    """Return the model's row of :attr:`evaluation.metrics.evaluation.Evaluation.table`, without oracle shares."""
    scored, rows = estimate.scored, estimate.scored.rows
    known, alert = scored.known, scored.alert
    episodes, outcome = scored.episodes()
    node_days = len(np.unique((scored.day * len(scored.shared.nodes) + rows.node)[known]))
    row: dict[str, object] = {
        "model": scored.model,
        "variant": scored.variant,
        "kind": kind_of(scored.model),
        "rows": len(known),
        "labelled": int(known.sum()),
        "positives": int(scored.positive.sum()),
        "base_rate": float(ratio(scored.positive.sum(), known.sum())),
        "episode_base_rate": float(ratio((rows.drain_label == 1).sum(), (rows.drain_label >= 0).sum())),
        "alerts": int(alert.sum()),
        "alerts_labelled": int((alert & known).sum()),
        "hits": int((alert & scored.positive).sum()),
        "alerts_of_one_node": int(np.bincount(rows.node[alert]).max(initial=0)),
        "episodes": len(episodes),
        "episodes_known": int((outcome >= 0).sum()),
        "episodes_right": int((outcome == 1).sum()),
        "episodes_per_day": len(episodes) / len(np.unique(scored.day)),
        "false_episodes_per_1000_node_days": float(ratio(1000 * (outcome == 0).sum(), node_days)),
        "incidents": len(estimate.incidents),
        "caught": int(estimate.incidents["caught"].sum()),
    }
    for name in STATISTICS:
        bounds = estimate.bounds(name)
        row |= {name: estimate.point[name], f"{name}_low": bounds.low, f"{name}_high": bounds.high}
    lead = estimate.incidents["lead_time_hours"].dropna().to_numpy()
    row |= {name: float(np.quantile(lead, share)) if lead.size else np.nan for name, share in LEAD_QUANTILES.items()}
    measured = scored.units.calibration
    return (
        row
        | scored.units.columns()
        | {
            "calibration_error": measured.error,
            "brier_skill": measured.brier_skill,
            "risk_ratio": measured.risk_ratio,
        }
    )


def group_table(estimate: Estimate, group: Ints, name: str) -> pd.DataFrame:
    """Compute the main statistics by group of rows, for example by fold or month.

    ``group``: code of each row's group, from 0; shape (rows,).
    Returns: one row per group, ascending. An incident counts in every group that could have caught it.
    """
    scored = estimate.scored
    occurs = np.bincount(group) > 0
    groups, code = np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[group]
    n = len(groups)

    def count(chosen: Bools) -> Floats:
        return np.bincount(code[chosen], minlength=n).astype(np.float64)

    known, positive, alert = scored.known, scored.positive, scored.alert & scored.known
    top = scored.top(scored.shared.k) & known
    incidents, caught = scored.rows.incidents.caught_in(scored.alert, code, n)
    rankings = []
    for i in range(n):
        rows = known & (code == i)
        average, area = Ranking.build(-scored.rank[rows], positive[rows]).precision_and_auc()
        rankings.append((float(average[0]), float(area[0])))
    return pd.DataFrame(
        {
            "model": scored.model,
            "variant": scored.variant,
            name: groups,
            "labelled": count(known).astype(np.int64),
            "positives": count(positive).astype(np.int64),
            "base_rate": ratio(count(positive), count(known)),
            "alerts_labelled": count(alert).astype(np.int64),
            "hits": count(alert & positive).astype(np.int64),
            "precision": ratio(count(alert & positive), count(alert)),
            "precision_at_k": ratio(count(top & positive), count(top)),
            "incidents": incidents,
            "caught": caught,
            "recall": ratio(caught, incidents),
            "average_precision": [ranking[0] for ranking in rankings],
            "roc_auc": [ranking[1] for ranking in rankings],
        }
    )


def _ratios(scored: Scored, incidents: pd.DataFrame, weights: Floats) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return each ratio on every resample, and its denominator per cluster."""
    top = scored.top(scored.shared.k)
    cluster, n = scored.rows.incidents.cluster, scored.shared.n_clusters
    alert, positive = scored.alert, scored.positive
    draws = np.bincount(cluster, minlength=n).astype(np.float64)
    episodes, outcome = scored.episodes()
    shares = {
        "episode_precision": (scored.per_cluster(episodes[outcome == 1]), scored.per_cluster(episodes[outcome >= 0])),
        "precision_at_k": (scored.per_cluster(top & positive), scored.per_cluster(top & scored.known)),
        "precision": (scored.per_cluster(alert & positive), scored.per_cluster(alert & scored.known)),
        "recall": (np.bincount(cluster, incidents["caught"], n), draws),
        "capture": (np.bincount(cluster, incidents["in_top"], n), draws),
    }
    values = {name: ratio(weights @ part, weights @ denominator) for name, (part, denominator) in shares.items()}
    return values, {name: denominator for name, (_, denominator) in shares.items()}
