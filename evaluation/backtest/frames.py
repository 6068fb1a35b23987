"""Assembly of a backtest's result from its folds: frames, alerts after the cool-down, and what was skipped."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from evaluation.drift.verdict import CheckFindings
from features.matrix.meta import ACTED_ON
from foundation.times import duration_ms, instants, milliseconds
from models.calibration.horizons import HorizonMap
from models.explanation.alert_reasons import AlertReasons
from models.rows.ranking import Bools, Floats, Ints, group_starts, top_nodes
from models.rows.training_set import Matrix, TrainingRows, node_codes
from models.training.schedule import Schedule, format_days, format_instant
from policy.episodes import NEW_EVIDENCE

VARIANTS: tuple[str, ...] = ("sliding", "train_once")
"""``sliding``: refitted for every fold; ``train_once``: fitted once, at the first refit that has both classes."""

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class BacktestResult:
    """Predictions, folds and explanations of a backtest.

    ``predictions``: one row per variant, model and tested grid row, sorted in this order. Columns: ``decision_time``,
    ``node``, ``gpu``, ``unit``, ``model``, ``variant`` (categories), ``score``, ``risk`` (float32), ``rank`` (int32,
    of the unit), ``alert`` (bool), ``label`` (Int8; null: censored or not yet known), ``failure_class``, ``incident``,
    ``node_incident``, ``common_cause`` (Int64; null unless the label is 1), ``incident_start``, ``drain_label``
    (``label`` within the drain horizon, used to evaluate episodes), ``fold`` (int32). Baselines appear under
    ``sliding`` only, since they need no fit.
    ``folds``: one row per variant and fold: ``fold``, ``variant``, ``refit_at`` (when the models used were fitted),
    ``test_start``, ``test_end`` (first and last decision time scored), ``span``, ``train_start``, ``train_end``,
    ``n_positive``, ``n_negative``, ``n_augmented``, ``n_incidents``, ``calibrated``, ``fitted`` (False: a baseline
    stood in), ``refit_fold`` (the fold whose refit produced the models).
    ``k``: alert budget in nodes per decision time.
    ``drain_reach``: duration of an episode: gap plus drain horizon.
    ``skipped``: what was skipped or replaced, and why.
    ``drift``: findings of the drift check before each fold, against the last fit; None before the first fit.
    ``horizons``: risks of the profile's model at additional horizons for each fold, see ``add_risks``; empty if none
    were requested.
    ``reasons``: reasons for the riskiest alerts of the profile's model in each fold.
    ``attributions``: feature attributions of the profile's model, see ``attribution_frame``; None if ``explain`` is 0.
    """

    predictions: pd.DataFrame
    folds: pd.DataFrame
    k: int
    drain_reach: timedelta
    skipped: tuple[str, ...]
    models: tuple[str, ...]
    horizons: tuple[HorizonMap, ...] = ()
    reasons: tuple[AlertReasons, ...] = ()
    drift: tuple[CheckFindings | None, ...] = ()
    attributions: pd.DataFrame | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """A finished fold.

    ``table``: ``row`` (position in the matrix), ``variant`` and ``model`` (codes), ``score``, ``risk``, ``rank``,
    ``alert``. The first fitted fold also holds the ``train_once`` rows of all later folds.
    ``facts``: ``fold``, ``unfit`` (why the fold could not be fitted; None if it was), ``refit_fold`` (fold whose models
    were used), ``sliding`` (metadata of those models), ``horizons``, ``reasons``, ``attributions``.
    """

    table: pa.Table
    facts: dict[str, Any]


def skipped_of(folds: list[Fold], schedule: Schedule) -> tuple[str, ...]:
    """List what a backtest skipped or replaced, and why.

    ``window``: a candidate longer than the history; ``fold``: a refit that lacks a class or has no new data;
    ``calibration``: a refit with too few incidents to calibrate; ``prior``: a refit that the prior did not improve;
    ``negatives``: a refit whose memory limit reduced the number of sampled negatives.
    """
    messages = [f"window: {format_days(span)} is longer than the history at every refit" for span in schedule.never_fit]
    for fold in folds:
        facts, models, number = fold.facts, fold.facts["sliding"], f"(fold {fold.facts['fold']})"
        if facts["unfit"] is not None:
            earlier = f"the models of {format_instant(models['refit_ms'])}"
            stand_in = earlier if models["fitted"] else f"{models['stand_in']} only"
            messages.append(f"fold {number}: {facts['unfit']}; scored by {stand_in}")
        elif not models["calibrated"]:
            reason = "too few incidents for a calibration slice; risks are scores corrected for sampling"
            messages.append(f"calibration {number}: {reason}")
        if facts["unfit"] is None and models["prior_weight"] == 0:
            messages.append(
                f"prior {number}: not used, because the data of the fleet alone predict the newest labels as well"
            )
        if facts["unfit"] is None and models["thinned_to"] is not None:
            messages.append(f"negatives {number}: training.memory limited them to {models['thinned_to']} per positive")
    return tuple(messages)


def fold_frame(folds: list[Fold], schedule: Schedule, rows: TrainingRows, *, full: bool) -> pd.DataFrame:
    """Return :attr:`BacktestResult.folds`."""
    records = []
    first_fitted = next(fold.facts for fold in folds if fold.facts["unfit"] is None)
    for variant in VARIANTS if full else VARIANTS[:1]:
        for number, fold in enumerate(folds):
            facts = first_fitted if variant == "train_once" and first_fitted["fold"] <= number else fold.facts
            times = rows.time[schedule.fold_rows(rows, number)]
            ends = {"test_start_ms": int(times.min()), "test_end_ms": int(times.max())}
            key = {"fold": number, "variant": variant, "refit_fold": facts["refit_fold"]}
            records.append(key | ends | facts["sliding"])
    frame = pd.DataFrame.from_records(records)
    for name in ("refit", "test_start", "test_end", "train_start", "train_end"):
        column = instants(frame.pop(f"{name}_ms").to_numpy(dtype=np.int64))
        frame["refit_at" if name == "refit" else name] = column
    frame["span"] = pd.to_timedelta(frame.pop("span_ms"), unit="ms")
    order = [
        "fold", "variant", "refit_at", "test_start", "test_end", "span", "train_start", "train_end",
        "n_positive", "n_negative", "n_augmented", "n_incidents", "calibrated", "fitted",
        "refit_fold",
    ]  # fmt: skip
    return frame[order]


def drain_labels(matrix: Matrix, horizon: timedelta | None) -> pd.DataFrame:
    """Return final labels of the rows within the longer of the drain horizon and the matrix's own label horizon."""
    matrix_labels = matrix.labels(None)
    drain_horizon_labels = matrix_labels if horizon is None else matrix.labels(None, horizon=horizon)
    return max(matrix_labels, drain_horizon_labels, key=lambda labels: labels["complete_at"].iloc[0])


def cooled_down(predictions: pd.DataFrame, k: int, reach: timedelta, cooldown: timedelta) -> np.ndarray:
    """Select the alerts of every model and variant, with a cool-down per node (:func:`newly_alerted`).

    A node is alerted by its riskiest unit. The alert budget of a node in cool-down goes to the next node in rank. A
    model that alerts fewer nodes than its budget (an intersection or a cascade) alerts only nodes it already chose.

    ``k``: maximum number of nodes newly alerted within any 24 hours.
    """
    alert, opens_episode = predictions["alert"].to_numpy(), np.zeros(len(predictions), dtype=np.bool_)
    node, time = node_codes(predictions), milliseconds(predictions["decision_time"], "decision_time")
    rank, risk = predictions["rank"].to_numpy(dtype=np.int64), predictions["risk"].to_numpy()
    for rows in predictions.groupby(["variant", "model"], observed=True).indices.values():
        fills_budget = np.array_equal(alert[rows], top_nodes(time[rows], rank[rows], node[rows], k))
        candidates = rows if fills_budget else rows[alert[rows]]
        candidates = candidates[np.lexsort((rank[candidates], node[candidates], time[candidates]))]
        candidates = candidates[group_starts(time[candidates], node[candidates])]
        opens_episode[candidates] = newly_alerted(
            node[candidates], time[candidates], rank[candidates], risk[candidates], k,
            reach_ms=duration_ms(reach), cooldown_ms=duration_ms(cooldown),
        )  # fmt: skip
    return opens_episode


def predictions_of(
    matrix: Matrix,
    folds: list[Fold],
    names: tuple[str, ...],
    schedule: Schedule,
    drain_label: pd.Series,
    categories: tuple[str, ...] | None = None,
) -> pd.DataFrame:
    """Return :attr:`BacktestResult.predictions`; the folds' model codes are positions in ``names``.

    ``drain_label``: labels of the matrix's rows from :func:`drain_labels`.
    ``categories``: categories of the ``model`` column, a superset of ``names``; the same for every ``full``.
    """
    tables = [fold.table for fold in folds]
    order = np.lexsort([np.concatenate([t[name].to_numpy() for t in tables]) for name in ("row", "model", "variant")])

    # one column at a time, so that a large fleet does not have several copies of the whole table in memory
    def column(name: str) -> np.ndarray:
        return np.concatenate([table[name].to_numpy() for table in tables])[order]

    row: Ints = column("row")
    labels = matrix.labels(None)
    out: dict[str, Any] = {"decision_time": matrix.rows["decision_time"].array[row]}
    for name in [name for name in ("node", "gpu", "unit", ACTED_ON) if name in matrix.rows]:
        out[name] = pd.Categorical(matrix.rows[name])[row]
    fitted = pd.Categorical.from_codes(column("model"), categories=list(names))
    out["model"] = fitted.set_categories(list(categories or names))
    out["variant"] = pd.Categorical.from_codes(column("variant"), categories=list(VARIANTS))
    out |= {name: column(name) for name in ("score", "risk", "rank", "alert")}
    out["label"] = labels["label"].array[row]
    out["failure_class"] = pd.Categorical(labels["failure_class"])[row]
    for name in ("incident", "node_incident", "common_cause", "incident_start"):
        out[name] = labels[name].array[row]
    out["drain_label"] = drain_label.array[row]
    decided = milliseconds(out["decision_time"], "decision_time")
    out["fold"] = (np.searchsorted(schedule.refits_ms, decided, side="right") - 1).astype(np.int32)
    return pd.DataFrame(out, copy=False)


def newly_alerted(
    node: Ints, time: Ints, rank: Ints, risk: Floats, budget: int, *, reach_ms: int, cooldown_ms: int
) -> Bools:
    """Alert the lowest ranks within a daily budget; re-alert a node in cool-down only on new evidence.

    ``node``: codes from 0; ``time`` in milliseconds; ``rank``: 1 is the riskiest; ``risk``: NaN is never new evidence;
    rows in any order; shape (n,).
    ``budget``: maximum number of nodes alerted within any 24 hours.
    ``reach_ms``: duration of an episode, during which its node is not alerted again.
    ``cooldown_ms``: time after an alert in which its node is re-alerted only if its risk is at least
    :data:`NEW_EVIDENCE` times that of the alert; at least ``reach_ms``.
    Returns: mask of the alerts, each of which opens an episode; causal (no look-ahead); shape (n,).
    """
    chosen = np.zeros(len(node), dtype=np.bool_)
    if not len(node):
        return chosen
    order = np.lexsort((rank, time))
    # Earlier than any episode, cool-down or day, so that a node without an alert needs no case of its own.
    long_ago = int(time.min()) - max(reach_ms, cooldown_ms, _DAY_MS) - 1
    alerted_at = np.full(int(node.max()) + 1, long_ago, dtype=np.int64)
    alerted_risk = np.zeros(len(alerted_at))
    for rows in np.split(order, np.flatnonzero(np.diff(time[order])) + 1):
        nodes = node[rows]
        now = time[rows[0]]
        since = now - alerted_at[nodes]
        risen = (since > reach_ms) & (risk[rows] >= NEW_EVIDENCE * alerted_risk[nodes])
        budget_left = max(budget - np.count_nonzero(alerted_at > now - _DAY_MS), 0)
        new_alerts = rows[(since > max(reach_ms, cooldown_ms)) | risen][:budget_left]
        chosen[new_alerts] = True
        alerted_at[node[new_alerts]], alerted_risk[node[new_alerts]] = now, risk[new_alerts]
    return chosen
