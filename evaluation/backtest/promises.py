"""Walk-forward test of precision targets: thresholds set at each refit from earlier outcomes, evaluated on the fold.

A promise is a lower confidence bound on the precision of drains, that is, of a node's episodes
(:mod:`policy.episodes`). Decisions are per node (:mod:`evaluation.metrics.scored`); ``threshold_choice`` sets the
thresholds on their risks.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Self

import numpy as np
import pandas as pd

from evaluation.backtest.threshold_choice import (
    ScoredDecisions,
    ThresholdChoice,
    for_budget,
    for_precisions,
    no_promise,
)
from evaluation.metrics.aggregation import Grouping
from foundation.times import milliseconds
from models.config import PrecisionTargetsSection
from models.rows.ranking import Bools, Floats, Ints
from models.rows.training_set import IncidentGroups, Labels, LabelsAt, Matrix, labels_of_rows, node_codes, row_positions
from models.training.fitted import ORDERS_ONLY
from policy.episodes import caught_causes, openings

FOLD_COLUMNS: tuple[str, ...] = (
    "model", "target", "fold", "refit_at", "promised", "threshold", "lower", "best", "earlier_drains", "earlier_hits",
    "earlier_nodes", "drains", "known_drains", "hits", "incidents", "caught", "why",
)  # fmt: skip
"""Columns of :attr:`Promises.folds`."""

_NONE = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Promises:
    """Promised precisions and the precisions reached.

    ``folds``: one row per model, target and fold (:data:`FOLD_COLUMNS`): whether a promise was made at ``refit_at``,
    its ``threshold`` of risk, its ``lower`` bound from ``earlier_drains`` (of which ``earlier_hits``) on
    ``earlier_nodes`` nodes, and the highest precision that could be promised (``best``; NaN: none). Then the outcomes
    in the fold: ``drains``, ``known_drains`` (with a known outcome), ``hits``, ``incidents``, and ``caught`` (preceded
    by a true-positive drain); a cause shared by several nodes counts once.
    ``pooled``: one row per model and target: ``folds``, ``promised`` (folds with a promise), ``drains``,
    ``known_drains``, ``hits``, ``precision``, ``kept`` (the precision reached the target; null without known drains),
    ``recall`` of incidents over the whole test period, ``recall_promised`` over the folds with a promise, and ``best``
    at the last refit.
    ``current``: thresholds of each model from all outcomes known by ``until``: one per target, then that of the
    alert budget.
    ``until``: end of the history that ``current`` uses (aware UTC).
    """

    folds: pd.DataFrame
    pooled: pd.DataFrame
    current: dict[str, list[ThresholdChoice]]
    until: datetime


@dataclass(frozen=True, slots=True)
class _Replayed:
    """Predictions as arrays: risks by model; all models share one row order."""

    risks: dict[str, Floats]
    time: Ints
    node: Ints
    fold: Ints

    def evidence(
        self, labels: Labels, groups: IncidentGroups, chosen: Bools, reach_ms: int
    ) -> Iterator[tuple[str, ScoredDecisions]]:
        """Aggregate the chosen rows of units to decisions about nodes, for each model."""
        if not chosen.any():
            none = np.zeros(0, dtype=np.int64)
            for name in self.risks:
                yield name, ScoredDecisions(np.zeros(0), none == 1, none, none, none, none, reach_ms)
            return
        rows = np.flatnonzero(chosen)
        nodes = self.nodes(rows, labels)
        node, time = self.node[rows][nodes.first], self.time[rows][nodes.first]
        hit = nodes.highest(labels.label[rows]) == 1
        incident, cause = self.followed(nodes, rows, labels, groups)
        for name, risk in self.risks.items():
            highest = nodes.highest(risk[rows]).astype(np.float64)
            yield name, ScoredDecisions(highest, hit, node, time, incident, cause, reach_ms)

    def nodes(self, rows: Ints, labels: Labels) -> Grouping:
        """Group rows of units by node and time."""
        return Grouping.of(self.time[rows], self.node[rows], labels.label[rows])

    def followed(self, nodes: Grouping, rows: Ints, labels: Labels, groups: IncidentGroups) -> tuple[Ints, Ints]:
        """Return the first node incident after each decision, and its common cause; -1: none."""
        # Incidents are numbered by start: the highest negated number is the first incident.
        first = nodes.highest(np.where(labels.label[rows] == 1, -1 - labels.incident[rows], _NONE))
        incident = np.where(first > _NONE, -1 - first, -1)
        return groups.node_incident[incident], groups.common_cause[incident]


def walk_promises(
    predictions: pd.DataFrame, folds: pd.DataFrame, matrix: Matrix, section: PrecisionTargetsSection, *, k: int
) -> Promises:
    """Set thresholds at every refit from the outcomes of earlier folds, and evaluate them out of sample.

    A refit uses only labels that were complete and known by then. Thresholds apply to the calibrated risk, the one
    scale that scores of different refits share. Models in ``ORDERS_ONLY`` get no precision threshold, because
    their riskiest unit has the same risk at every decision time. They get an alert budget only.

    ``predictions``: as :func:`evaluation.backtest.run.run_backtest` returns it; its ``sliding`` variant is used.
    """
    sliding = (predictions["variant"] == "sliding").to_numpy()
    rows = {
        name: sliding & (predictions["model"] == name).to_numpy() for name in predictions["model"][sliding].unique()
    }
    of_one_model = predictions[next(iter(rows.values()))]
    time, fold = milliseconds(of_one_model["decision_time"]), of_one_model["fold"].to_numpy(dtype=np.int64)
    risk = predictions["risk"].to_numpy()
    models = _Replayed(
        {str(name): risk[selected] for name, selected in rows.items()}, time, node_codes(of_one_model), fold
    )
    read, final = _of_drains(matrix, row_positions(matrix, of_one_model), section)
    reach_ms = int((final.complete - time).max())
    order = folds[folds["variant"] == "sliding"].sort_values("fold")
    tested = [(int(row.fold), _refit_of(row, time, fold)) for row in order.itertuples()]
    decided: dict[tuple[str, float], list[ThresholdChoice]] = {}
    for number, refit_at in tested:
        labels, groups = read(refit_at), IncidentGroups.of(matrix.incidents(refit_at))
        earlier = (fold < number) & _known(labels, refit_at)
        for name, evidence in models.evidence(labels, groups, earlier, reach_ms):
            for decision in _promised(name, evidence, section):
                decided.setdefault((name, decision.asked), []).append(decision)
    numbers = [number for number, _ in tested]
    drains = _DrainOutcomes.of(models, final, IncidentGroups.of(matrix.incidents(None)), reach_ms)
    outcomes = {
        (name, target): drains.outcomes(dict(zip(numbers, choices, strict=True)), models.risks[name])
        for (name, target), choices in decided.items()
    }
    records = [
        {"model": name, "target": target, "fold": number, "refit_at": refit_at}
        | _summary(decided[name, target][i])
        | outcomes[name, target][i]
        for i, (number, refit_at) in enumerate(tested)
        for name, target in decided
    ]
    by_fold = pd.DataFrame.from_records(records, columns=FOLD_COLUMNS)
    pooled = _pool(pd.DataFrame.from_records(records))
    until = max(pd.Timestamp(matrix.span[1]), pd.Timestamp(tested[-1][1])).to_pydatetime()
    labels = read(until)
    known = _known(labels, until)
    current: dict[str, list[ThresholdChoice]] = {}
    for name, all_evidence in models.evidence(labels, IncidentGroups.of(matrix.incidents(until)), known, reach_ms):
        current[name] = [
            *_promised(name, all_evidence, section),
            for_budget(all_evidence, k, section.confidence),
        ]
    return Promises(by_fold, pooled, current, until)


def decisions_frame(promises: Promises) -> pd.DataFrame:
    """Return :attr:`Promises.current` as a frame, one row per model and decision; ``bound`` becomes ``bound_*``."""
    rows = []
    for model, decisions in promises.current.items():
        for decision in decisions:
            record = asdict(decision)
            bound = record.pop("bound")
            rows.append(
                {"model": model, "until": promises.until} | record | {f"bound_{k}": v for k, v in bound.items()}
            )
    frame = pd.DataFrame.from_records(rows)
    return frame.astype({"threshold": "float64", "best": "float64"})


def _of_drains(matrix: Matrix, rows: Ints, section: PrecisionTargetsSection) -> tuple[LabelsAt, Labels]:
    """Return a reader of the labels that drains are evaluated with, and their final values.

    Their horizon is the longer of ``section.horizon`` and the matrix's own.
    """
    horizons = (None,) if section.horizon is None else (None, section.horizon)
    readers = [labels_of_rows(matrix, rows, horizon) for horizon in horizons]
    return max(((read, read(None)) for read in readers), key=lambda pair: int(pair[1].complete[0]))


def _promised(name: str, evidence: ScoredDecisions, section: PrecisionTargetsSection) -> list[ThresholdChoice]:
    if name in ORDERS_ONLY:
        why = (
            f"{name} only ranks the units of one decision time: a threshold on its risk does not carry over to another"
        )
        return [no_promise(target, section.confidence, why, evidence) for target in section.values]
    return for_precisions(evidence, section.values, section.confidence)


def _known(labels: Labels, instant: datetime) -> Bools:
    return (labels.label >= 0) & (labels.complete <= pd.Timestamp(instant).value // 1_000_000)


def _refit_of(row: Any, time: Ints, fold: Ints) -> datetime:
    # A fold that was not refitted uses older models, but its thresholds use all outcomes known when it starts.
    start = int(time[fold == int(row.fold)].min())
    return pd.Timestamp(start, unit="ms", tz="UTC").to_pydatetime()


def _summary(decision: ThresholdChoice) -> dict[str, Any]:
    return {
        "promised": decision.promised,
        "threshold": math.nan if decision.threshold is None else decision.threshold,
        "lower": decision.bound.lower,
        "best": math.nan if decision.best is None else decision.best,
        "earlier_drains": decision.bound.alerts,
        "earlier_hits": decision.bound.hits,
        "earlier_nodes": decision.bound.clusters,
        "why": decision.why,
    }


@dataclass(frozen=True, slots=True)
class _DrainOutcomes:
    """Decisions about nodes with their final labels.

    ``nodes``: groups rows of units by node and time. The other arrays have one entry per group.
    """

    nodes: Grouping
    time: Ints
    node: Ints
    fold: Ints
    label: np.ndarray
    incident: Ints
    cause: Ints
    reach_ms: int

    @classmethod
    def of(cls, models: _Replayed, final: Labels, groups: IncidentGroups, reach_ms: int) -> Self:
        rows = np.arange(len(models.time))
        nodes = models.nodes(rows, final)
        first = nodes.first
        incident, cause = models.followed(nodes, rows, final, groups)
        label = nodes.highest(final.label)
        return cls(nodes, models.time[first], models.node[first], models.fold[first], label, incident, cause, reach_ms)

    def outcomes(self, decisions: dict[int, ThresholdChoice], unit_risk: Floats) -> list[dict[str, Any]]:
        """Return the outcomes of one target's thresholds by fold; a drain counts in the fold in which it starts."""
        thresholds = np.full(max(decisions) + 1, np.inf)
        for fold, decision in decisions.items():
            thresholds[fold] = np.inf if decision.threshold is None else decision.threshold
        alerts = np.flatnonzero(self.nodes.highest(unit_risk) >= thresholds[self.fold])
        # across folds: a node that is still alerted after a refit is already drained
        episode_starts = alerts[openings(self.node[alerts], self.time[alerts], self.reach_ms)]
        positive = np.flatnonzero(self.incident >= 0)
        out = []
        for fold in decisions:
            drains = episode_starts[self.fold[episode_starts] == fold]
            hits = drains[self.label[drains] == 1]
            in_fold = positive[self.fold[positive] == fold]
            out.append(
                {
                    "drains": len(drains),
                    "known_drains": int((self.label[drains] >= 0).sum()),
                    "hits": len(hits),
                    # An incident may lie within the horizon of decisions in two folds.
                    "causes": dict(zip(self.incident[in_fold].tolist(), self.cause[in_fold].tolist(), strict=True)),
                    "caught_incidents": set(self.incident[hits].tolist()),
                }
            )
            out[-1]["incidents"], out[-1]["caught"] = _count_caught(out[-1:])
        return out


def _count_caught(folds: list[dict[str, Any]]) -> tuple[int, int]:
    """Count failures, and those caught, over folds; a cause shared by several nodes counts once."""
    causes: dict[int, int] = {}
    for fold in folds:
        causes |= fold["causes"]
    caught_ids = set[int]().union(*(fold["caught_incidents"] for fold in folds))
    incident, cause = (np.array(list(values), dtype=np.int64) for values in (causes.keys(), causes.values()))
    _, is_caught = caught_causes(cause, np.isin(incident, list(caught_ids)))
    return len(is_caught), int(is_caught.sum())


def _pool(folds: pd.DataFrame) -> pd.DataFrame:
    records = []
    for (model, target), part in folds.groupby(["model", "target"], sort=False):
        promised_folds = part[part["promised"].to_numpy(dtype=bool)]
        known, hits = int(promised_folds["known_drains"].sum()), int(promised_folds["hits"].sum())
        precision = hits / known if known else math.nan
        (total, _), (total_promised, caught) = (
            _count_caught(rows.to_dict("records")) for rows in (part, promised_folds)
        )
        records.append(
            {
                "model": model,
                "target": target,
                "folds": len(part),
                "promised": len(promised_folds),
                "drains": int(promised_folds["drains"].sum()),
                "known_drains": known,
                "hits": hits,
                "precision": precision,
                "kept": precision >= target if known else None,
                "incidents": total,
                "caught": caught,
                "recall": _share(caught, total),
                "recall_promised": _share(caught, total_promised),
                "best": float(part["best"].iloc[-1]),
            }
        )
    frame = pd.DataFrame.from_records(records)
    return frame.assign(kept=frame["kept"].astype("boolean"))


def _share(part: float, total: float) -> float:
    return float(part) / float(total) if total else math.nan
