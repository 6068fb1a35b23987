"""Evaluation of a backtest's predictions: every model and variant, pooled, by fold and by month."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
from pydantic_core import from_json, to_json

from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.comparison import equal_alerts, oracle_shares, paired_differences
from evaluation.metrics.estimates import Estimate, estimate_model, group_table, summarise
from evaluation.metrics.lead_time import recall_by_class
from evaluation.metrics.metrics import rank_curve, resample
from evaluation.metrics.oracle import ORACLE
from foundation.instants import from_ms

_BY_UNIT = "unit_"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of all models, per node and node incident unless stated otherwise.

    Every frame has columns ``model`` and ``variant``, with the model ``oracle`` if the truth was given.

    ``replicates``: number of bootstrap samples; 0: no intervals. A share of 0 or 1 has exact bounds instead
    (:func:`evaluation.metrics.metrics.share_interval`).
    ``oracle_coverage``: share of the decisions with a known true risk; NaN without truth.
    ``drain_hours``: duration of an episode, used for ``episode_precision``; 0: each alert is an episode.
    ``table``: one row per model and variant: counts, statistics (see ``Estimate``) with ``_low`` and ``_high``, lead
    time quartiles in hours, false episodes per 1000 node-days, per-unit metrics (``unit_``), calibration of the units'
    risks, shares of the oracle.
    ``folds``, ``monthly``: main statistics by ``fold`` and by calendar ``month`` (``YYYY-MM``, UTC) of decision time.
    ``lead_times``: one row per incident: node, classes, start, whether and when it was caught, lead time in hours (NaN
    if missed).
    ``calibration``: bins of the units' risks: ``bin``, ``mean_risk``, ``observed_rate``, ``rows``, ``positives``.
    ``pr_curves``: ``precision`` and ``recall`` by alert budget ``k`` (rows pooled by rank within the decision time).
    """

    k: int
    replicates: int
    nodes: int
    units: int
    times: int
    first_time: datetime
    last_time: datetime
    oracle_coverage: float
    drain_hours: float
    table: pd.DataFrame
    folds: pd.DataFrame
    monthly: pd.DataFrame
    by_class: pd.DataFrame
    lead_times: pd.DataFrame
    calibration: pd.DataFrame
    pr_curves: pd.DataFrame
    paired: pd.DataFrame
    equal_alerts: pd.DataFrame

    def row(self, model: str, variant: str) -> pd.Series | None:
        """Return one model's row of the table; None if there is none."""
        rows = self.table[(self.table["model"] == model) & (self.table["variant"] == variant)]
        return None if rows.empty else rows.iloc[0]

    def drain_horizon(self, gap: timedelta) -> timedelta:
        """Return the drain horizon, that is, the duration of an episode without the gap."""
        return max(timedelta(hours=self.drain_hours) - gap, timedelta(0))

    def to_metrics(self) -> dict[str, Any]:
        """Return the content of the metrics file: nested, JSON-able, deterministic; NaN is None."""
        models: dict[str, dict[str, Any]] = {}
        for record in self.table.to_dict("records"):
            name = record.pop("model"), record.pop("variant")
            entry: dict[Any, Any] = {key: value for key, value in record.items() if not key.startswith(_BY_UNIT)}
            entry["by_unit"] = {
                key.removeprefix(_BY_UNIT): value for key, value in record.items() if key.startswith(_BY_UNIT)
            }
            for key, frame, index in (
                ("by_class", self.by_class, "failure_class"),
                ("monthly", self.monthly, "month"),
                ("folds", self.folds, "fold"),
            ):
                of_model = frame[(frame["model"] == name[0]) & (frame["variant"] == name[1])]
                rows = of_model.drop(columns=["model", "variant"]).to_dict("records")
                entry[key] = {str(row.pop(index)): row for row in rows}
            models.setdefault(name[0], {})[name[1]] = entry
        content = {
            "k": self.k,
            "bootstrap": self.replicates,
            "nodes": self.nodes,
            "units": self.units,
            "decision_times": self.times,
            "first_time": self.first_time.isoformat(),
            "last_time": self.last_time.isoformat(),
            "oracle_coverage": self.oracle_coverage,
            "drain_hours": self.drain_hours,
            "models": models,
            "paired": self.paired.to_dict("records"),
            "equal_alerts": self.equal_alerts.to_dict("records"),
        }
        return dict(from_json(to_json(content, inf_nan_mode="null", fallback=lambda number: number.item())))


def evaluate(
    predictions: pd.DataFrame,
    *,
    k: int,
    bootstrap: int,
    seed: int,
    oracle: pd.DataFrame | None = None,
    drain_reach: timedelta = timedelta(0),
) -> Evaluation:
    """Evaluate every model and variant of a backtest.

    ``predictions``: as ``run_backtest`` returns it (``COLUMNS``), rows in any order.
    ``bootstrap``: number of bootstrap samples (:func:`evaluation.metrics.metrics.resample`); 0: no intervals.
    ``oracle``: predictions of the oracle on the same rows (``oracle_predictions``); adds the oracle as a model, and
    each model's share of it.
    Raises ``InputError`` if the predictions are empty.
    """
    parts = split_predictions(predictions, k, drain_reach, oracle)
    coverage = np.nan if oracle is None else float(np.isfinite(oracle["risk"].to_numpy(dtype=np.float64)).mean())
    shared = parts[0].shared
    weights = resample(shared.n_clusters, bootstrap, seed)
    estimates = [estimate_model(part, weights) for part in parts]
    table = pd.DataFrame([summarise(estimate) for estimate in estimates])
    best = next((estimate for estimate in estimates if estimate.scored.model == ORACLE), None)
    if best is not None:
        shares = oracle_shares(estimates, best)
        table = table.merge(shares, on=["model", "variant"], how="left", validate="one_to_one")
    calendar = shared.times_ms.astype("datetime64[ms]").astype("datetime64[M]").astype(str)
    months, month = np.unique(calendar, return_inverse=True)
    monthly = _stack([group_table(estimate, month[estimate.scored.rows.time], "month") for estimate in estimates])
    return Evaluation(
        k=k,
        replicates=bootstrap,
        nodes=len(shared.nodes),
        units=shared.units,
        times=len(shared.times_ms),
        first_time=from_ms(shared.times_ms[0]),
        last_time=from_ms(shared.times_ms[-1]),
        oracle_coverage=coverage,
        drain_hours=drain_reach / timedelta(hours=1),
        table=table,
        folds=_stack([group_table(estimate, estimate.scored.rows.fold, "fold") for estimate in estimates]),
        monthly=monthly.assign(month=months[monthly["month"]]),
        by_class=_stack([_named(recall_by_class(estimate.incidents), estimate) for estimate in estimates]),
        lead_times=_stack([_named(estimate.incidents, estimate) for estimate in estimates]),
        calibration=_stack([_bins(estimate) for estimate in estimates]),
        pr_curves=_stack([_curve(estimate) for estimate in estimates]),
        paired=paired_differences(estimates),
        equal_alerts=equal_alerts(estimates, weights),
    )


def _bins(estimate: Estimate) -> pd.DataFrame:
    measured = estimate.scored.units.calibration
    bins = pd.DataFrame(
        {
            "bin": np.arange(len(measured.rows)),
            "mean_risk": measured.mean_risk,
            "observed_rate": measured.observed_rate,
            "rows": measured.rows,
            "positives": measured.positives,
        }
    )
    return _named(bins, estimate)


def _curve(estimate: Estimate) -> pd.DataFrame:
    scored = estimate.scored
    curve = rank_curve(scored.rank[scored.known], scored.positive[scored.known])
    return _named(pd.DataFrame(curve), estimate)


def _named(frame: pd.DataFrame, estimate: Estimate) -> pd.DataFrame:
    named = frame.copy()
    named.insert(0, "model", estimate.scored.model)
    named.insert(1, "variant", estimate.scored.variant)
    return named


def _stack(frames: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if not frame.empty]
    return pd.concat(filled, ignore_index=True) if filled else frames[0]
