"""Promises walked forward: at each refit a precision is promised from earlier outcomes, then kept or broken."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from features.service import milliseconds
from models.as_of_rows import labels_of_rows
from models.config import PromisesSection
from models.ranking import Bools, Floats, Ints
from models.training_set import Labels, Matrix
from policy.costs import Costs, for_costs
from policy.evidence import Evidence
from policy.thresholds import Decision, for_budget, for_precisions

FOLD_COLUMNS: tuple[str, ...] = (
    "model", "target", "fold", "refit_at", "promised", "threshold", "lower", "best", "earlier_alerts", "earlier_hits",
    "earlier_units", "alerts", "known_alerts", "hits", "incidents", "caught", "why",
)  # fmt: skip
"""Columns of :attr:`Promises.folds`."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What was promised, and what became of it.

    Attributes
    ----------
    folds : DataFrame
        One row for each model, target and fold (:data:`FOLD_COLUMNS`): whether a promise was made at ``refit_at``, at
        which ``threshold`` of risk, its ``lower`` bound and the ``earlier_alerts`` (with ``earlier_hits``, on
        ``earlier_units`` units) behind it, the highest precision that could be promised (``best``; NaN: none), and in
        the fold itself: ``alerts``, those of known outcome, ``hits``, ``incidents`` and those ``caught``.
    pooled : DataFrame
        One row for each model and target: ``folds``, ``promised`` (folds with a promise), ``alerts``,
        ``known_alerts``, ``hits``, ``precision``, ``kept`` (the precision reached the target; null where no promise
        brought an alert), ``recall`` of incidents over the whole test period, and ``recall_promised`` over the folds
        with a promise; ``best`` at the last refit.
    current : dict of str to list of Decision
        For each model the decisions that all outcomes known at the end would give: one for each target, then the
        budget's.
    until : datetime
        The end that ``current`` looks back from (aware UTC).
    """

    folds: pd.DataFrame
    pooled: pd.DataFrame
    current: dict[str, list[Decision]]
    until: datetime


@dataclass(frozen=True, slots=True)
class _Replayed:
    """One model's predictions as arrays; rows stand alike for all models."""

    risk: Floats
    time: Ints
    unit: Ints
    fold: Ints

    def evidence(self, labels: Labels, chosen: Bools) -> Evidence:
        return Evidence(
            self.risk[chosen],
            labels.label[chosen] == 1,
            self.unit[chosen],
            self.time[chosen],
            np.where(labels.label[chosen] == 1, labels.incident[chosen], -1),
        )


def walk_promises(
    predictions: pd.DataFrame, folds: pd.DataFrame, matrix: Matrix, section: PromisesSection, *, k: int
) -> Promises:
    """Set promises at every refit on the outcomes of the folds before it, and see which were kept.

    Parameters
    ----------
    predictions : DataFrame
        As :func:`models.sliding.run_backtest` returns it; its ``sliding`` variant is used.
    folds : DataFrame
        The backtest's folds.
    matrix : Matrix
        Tells which labels were known when.
    section : PromisesSection
        Targets and confidence.
    k : int
        Alert budget a decision time, for the budget's threshold.

    Returns
    -------
    Promises
        At a fold's refit only labels count that were complete and known by then. Thresholds are set on the calibrated
        risk: it is what the scores of different refits have in common.
    """
    sliding = predictions[(predictions["variant"] == "sliding").to_numpy()]
    names = list(dict.fromkeys(sliding["model"].astype("str")))
    codes = sliding["model"].astype("str").to_numpy()
    one = sliding[codes == names[0]]
    unit = pd.factorize(one["unit"].astype("str"), sort=True)[0].astype(np.int64)
    time, fold = milliseconds(one["decision_time"]), one["fold"].to_numpy(dtype=np.int64)
    models = {
        name: _Replayed(sliding["risk"].to_numpy(dtype=np.float64)[codes == name], time, unit, fold) for name in names
    }
    read = labels_of_rows(matrix, one)
    final = Labels.of(one.assign(complete_at=one["decision_time"]))
    order = folds[folds["variant"] == "sliding"].sort_values("fold")
    tested = [(int(each.fold), _refit_of(each, time, fold)) for each in order.itertuples()]
    records: list[dict[str, Any]] = []
    for number, refit_at in tested:
        labels = read(refit_at)
        cut = pd.Timestamp(refit_at).value // 1_000_000
        earlier = (fold < number) & (labels.label >= 0) & (labels.complete <= cut)
        for name, model in models.items():
            before = model.evidence(labels, earlier)
            for decision in for_precisions(before, section.targets, section.confidence):
                records.append(
                    {"model": name, "target": decision.asked, "fold": number, "refit_at": refit_at}
                    | _told(decision)
                    | _outcome(decision, model, final, fold == number)
                )
    by_fold = pd.DataFrame.from_records(records, columns=FOLD_COLUMNS)
    pooled = _pool(pd.DataFrame.from_records(records))
    until = max(pd.Timestamp(matrix.span[1]), pd.Timestamp(tested[-1][1])).to_pydatetime()
    labels = read(until)
    known = (labels.label >= 0) & (labels.complete <= pd.Timestamp(until).value // 1_000_000)
    current: dict[str, list[Decision]] = {}
    for name, model in models.items():
        everything = model.evidence(labels, known)
        current[name] = [
            *for_precisions(everything, section.targets, section.confidence),
            for_budget(everything, k, section.confidence),
            *_by_costs(everything, section, labels, time),
        ]
    return Promises(by_fold, pooled, current, until)


def decisions_frame(promises: Promises) -> pd.DataFrame:
    """Give :attr:`Promises.current` as a frame: one row for each model and decision, the bound's parts as columns."""
    rows = []
    for model, decisions in promises.current.items():
        for decision in decisions:
            told = asdict(decision)
            bound = told.pop("bound")
            rows.append({"model": model, "until": promises.until} | told | {f"bound_{k}": v for k, v in bound.items()})
    frame = pd.DataFrame.from_records(rows)
    numbers = ["threshold", "best", "best_threshold", "saving", "saving_lower"]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _by_costs(evidence: Evidence, section: PromisesSection, labels: Labels, time: Ints) -> list[Decision]:
    if section.costs is None:
        return []
    reach = int((labels.complete - time).max())
    costs = Costs(**section.costs.model_dump())
    return [for_costs(evidence, costs, section.confidence, repeat_ms=reach)]


def _refit_of(row: Any, time: Ints, fold: Ints) -> datetime:
    # A fold without a fit of its own uses older models, but its promise looks back from its own beginning.
    start = int(time[fold == int(row.fold)].min())
    return pd.Timestamp(start, unit="ms", tz="UTC").to_pydatetime()


def _told(decision: Decision) -> dict[str, Any]:
    return {
        "promised": decision.promised,
        "threshold": math.nan if decision.threshold is None else decision.threshold,
        "lower": decision.bound.lower,
        "best": math.nan if decision.best is None else decision.best,
        "earlier_alerts": decision.bound.alerts,
        "earlier_hits": decision.bound.hits,
        "earlier_units": decision.bound.clusters,
        "why": decision.why,
    }


def _outcome(decision: Decision, model: _Replayed, final: Labels, tested: Bools) -> dict[str, Any]:
    positive = tested & (final.label == 1)
    alert = tested & (model.risk >= decision.threshold) if decision.threshold is not None else np.zeros_like(tested)
    there, caught = np.unique(final.incident[positive]), np.unique(final.incident[positive & alert])
    return {
        "alerts": int(alert.sum()),
        "known_alerts": int((alert & (final.label >= 0)).sum()),
        "hits": int((alert & positive).sum()),
        "incidents": len(there),
        "caught": len(caught),
        # An incident may begin in one fold's horizon and be alerted in two.
        "there": set(there.tolist()),
        "those": set(caught.tolist()),
    }


def _pool(folds: pd.DataFrame) -> pd.DataFrame:
    records = []
    for (model, target), part in folds.groupby(["model", "target"], sort=False):
        made = part[part["promised"].to_numpy(dtype=bool)]
        known, hits = int(made["known_alerts"].sum()), int(made["hits"].sum())
        precision = hits / known if known else math.nan
        there, within, caught = (set[int]().union(*each) for each in (part["there"], made["there"], made["those"]))
        records.append(
            {
                "model": model,
                "target": target,
                "folds": len(part),
                "promised": len(made),
                "alerts": int(made["alerts"].sum()),
                "known_alerts": known,
                "hits": hits,
                "precision": precision,
                "kept": precision >= target if known else None,
                "incidents": len(there),
                "caught": len(caught),
                "recall": _share(len(caught), len(there)),
                "recall_promised": _share(len(caught), len(within)),
                "best": float(part["best"].iloc[-1]),
            }
        )
    frame = pd.DataFrame.from_records(records)
    return frame.assign(kept=frame["kept"].astype("boolean"))


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else math.nan
