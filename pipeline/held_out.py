"""Held-out decisions, which none of several bundles was trained on, and the bundles' predictions for them."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.scored import Scored
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import ACTED_ON
from features.vocabulary import FeatureColumn
from foundation.durations import Duration
from foundation.errors import InputError, TooEarlyError
from foundation.times import instant_ms, instants, milliseconds
from models.bundle.store import Bundle
from models.learners.baselines import Baseline, make_baseline
from models.rows.ranking import Floats, Hashes, mix, rank_within, top_nodes
from models.rows.row_reader import RowReader, batches
from models.rows.training_set import TrainingRows
from models.sequence.layout import with_windows

Ints = np.ndarray[Any, np.dtype[np.int64]]

SUGGESTED = timedelta(days=14)
"""Period of newest decisions that `train --until` should leave for the gate."""


def untouched(matrix: FeatureMatrix, bundles: Sequence[tuple[str, Bundle]], period: timedelta) -> Ints:
    """Find the newest decisions that no bundle was trained on and whose labels are complete.

    A bundle knows labels up to its refit, gap + horizon after its last training decision. So decisions from the latest
    refit on share neither rows nor label windows with any training set.

    Returns: their positions in the matrix, at least one of them labelled.
    Raises ``InputError`` if a bundle was trained with another gap or horizon than the matrix's.
    Raises ``TooEarlyError`` if there is no such decision yet; the message names the time at which there will be one,
    and a `train --until` that works immediately.
    """
    for name, bundle in bundles:
        _same_question(matrix, name, bundle)
    labels = matrix.labels(None)
    times_ms, complete = milliseconds(matrix.rows["decision_time"]), milliseconds(labels["complete_at"])
    grid = ~matrix.rows["augmented"].to_numpy(dtype=bool)
    name, last = max(((name, bundle.fitted.refit_at) for name, bundle in bundles), key=lambda dated: dated[1])
    is_complete = grid & (complete <= instant_ms(matrix.span[1]))
    fresh = is_complete & (times_ms >= instant_ms(last))
    if not (fresh & labels["label"].notna().to_numpy()).any():
        raise _too_early(matrix, name, last)
    newest = int(times_ms[fresh].max())
    fresh &= times_ms > newest - int(period / timedelta(milliseconds=1))
    return np.flatnonzero(fresh)


def contend(
    matrix: FeatureMatrix,
    rows: Ints,
    bundles: Sequence[tuple[str, Bundle]],
    baselines: Sequence[str],
    *,
    k: int,
    seed: int,
) -> list[Scored]:
    """Score the same decisions with bundles and baselines; each alerts on its K riskiest nodes per decision time.

    ``bundles``: display name and bundle; each scores with its own profile.
    Returns: results in the order given, baselines last.
    Raises ``InputError`` if a bundle needs a feature that the matrix does not have.
    """
    readers = [_reader(matrix, bundle, name) for name, bundle in bundles]
    known = TrainingRows.of(matrix.rows)
    times, ties = known.time[rows], known.tie[rows]
    first = bundles[0][1].fitted
    baselines_made = {name: make_baseline(name, columns=first.columns, seed=seed) for name in baselines}
    names = [name for name, _ in bundles] + list(baselines)
    rank: dict[str, Ints] = {}
    risk = {name: np.full(len(rows), np.nan) for name in names}
    for (name, bundle), reader in zip(bundles, readers, strict=True):
        rank[name], risk[name] = _answers(bundle, reader, rows, known)
    for name, points in _points(baselines_made, readers[0], rows, mix(ties, times)).items():
        rank[name] = rank_within(times, points.astype(np.float32), ties)
    alert = {name: top_nodes(times, rank[name], known.node[rows], k) for name in names}
    return _as_scored(matrix, rows, rank, risk, alert, k)


def mean_risks(matrix: FeatureMatrix, bundles: Sequence[tuple[str, Bundle]], period: timedelta) -> list[float]:
    """Return the mean risk of the newest decisions by each bundle, whether their labels are known or not.

    ``period``: length of the period of newest decisions.
    Raises ``InputError`` if a bundle needs a feature that the matrix does not have.
    """
    known = TrainingRows.of(matrix.rows)
    newest = known.grid_times[-1] - int(period / timedelta(milliseconds=1))
    rows = np.flatnonzero(~known.augmented & (known.time > newest))
    return [
        float(np.nanmean(_answers(bundle, _reader(matrix, bundle, name), rows, known)[1])) for name, bundle in bundles
    ]


def _answers(bundle: Bundle, reader: RowReader, rows: Ints, matrix_rows: TrainingRows) -> tuple[Ints, Floats]:
    """Return ranks and risks of rows by a bundle's profile."""
    scored = bundle.fitted.score_rows(reader, rows, matrix_rows)[bundle.profile]
    return scored.rank, bundle.fitted.risk(bundle.profile, scored.score)


def _reader(matrix: FeatureMatrix, bundle: Bundle, name: str) -> RowReader:
    """Return a reader of a matrix's rows with the columns and category codes that a bundle was trained on."""
    columns = bundle.fitted.columns
    source = with_windows(matrix, bundle.fitted.learner_names)
    have = {column.name: (i, column) for i, column in enumerate(source.columns)}
    absent = [column.name for column in columns if column.name not in have]
    if absent:
        raise InputError(
            f"{len(absent)} of its {len(columns)} features are not in the matrix ({', '.join(absent[:3])})",
            f"the bundle of {name}",
            "Compute the matrix with the parameters of the bundle.",
        )
    names = [column.name for column in columns]
    order = [have[name][0] for name in names]
    # only a matrix without raw windows can read a subset of columns from disk
    read: RowReader = (
        (lambda rows: matrix.values(rows, columns=names))
        if source is matrix
        else (lambda rows: source.values(rows)[:, order])
    )
    return in_codes_of(columns, [have[name][1] for name in names], read)


def in_codes_of(target: Sequence[FeatureColumn], source: Sequence[FeatureColumn], read: RowReader) -> RowReader:
    """Return a reader of the same rows with the category codes of other columns.

    ``target``: the columns whose codes to use. A category that they lack becomes NaN, as in serving.
    ``source``: the columns as read: the same features in the same order.
    """
    recoded = {
        i: np.array([_code(category, new.categories) for category in old.categories], np.float32)
        for i, (new, old) in enumerate(zip(target, source, strict=True))
        if new.categories != old.categories
    }

    def values(rows: Ints) -> np.ndarray[Any, np.dtype[np.float32]]:
        block: np.ndarray[Any, np.dtype[np.float32]] = read(rows)
        for index, codes in recoded.items():
            known = np.isfinite(block[:, index])
            block[known, index] = codes[block[known, index].astype(np.int64)] if len(codes) else np.nan
        return block

    return values


def _code(category: str, categories: Sequence[str]) -> float:
    return float(categories.index(category)) if category in categories else np.nan


def _points(baselines: Mapping[str, Baseline], reader: RowReader, rows: Ints, identity: Hashes) -> dict[str, Floats]:
    """Score rows with baselines, in batches."""
    points = {name: np.empty(len(rows)) for name in baselines}
    for part in batches(len(rows)) if baselines else ():
        values = reader(rows[part])
        for name, baseline in baselines.items():
            points[name][part] = baseline.points(values, identity[part])
    return points


def _as_scored(
    matrix: FeatureMatrix, positions: Ints, rank: dict[str, Ints], risk: dict[str, Any], alert: dict[str, Any], k: int
) -> list[Scored]:
    rows, labels = matrix.rows.iloc[positions], matrix.labels(None).iloc[positions]
    shared = {name: rows[name].array for name in ("decision_time", "node", "unit", ACTED_ON) if name in rows}
    of_incident = ("incident", "node_incident", "common_cause", "incident_start")
    shared |= {name: labels[name].array for name in ("label", "failure_class", *of_incident)}
    frames = [
        pd.DataFrame(shared).assign(
            model=name,
            variant="held out",
            score=-rank[name].astype(np.float64),
            risk=risk[name],
            rank=rank[name],
            alert=alert[name],
            fold=0,
        )
        for name in rank
    ]
    scored = {side.model: side for side in split_predictions(pd.concat(frames, ignore_index=True), k)}
    return [scored[name] for name in rank]


def _same_question(matrix: FeatureMatrix, name: str, bundle: Bundle) -> None:
    trained = (bundle.manifest.get("params") or {}).get("labels") or {}
    labels = matrix.config.labels.model_dump(mode="json")
    for key in ("gap", "horizon"):
        if key in trained and trained[key] != labels[key]:
            raise InputError(
                f"{name} was trained for labels.{key} {trained[key]}, but the matrix has {labels[key]}",
                f"bundle {bundle.digest[:12]}",
                "Compare bundles with the same labels; train the other one again.",
            )


def _too_early(matrix: FeatureMatrix, name: str, refit: datetime) -> TooEarlyError:
    section = matrix.config.labels
    reach: Duration = section.gap + section.horizon
    end = matrix.span[1]
    interval, origin = matrix.config.decision.every, matrix.config.decision.origin
    first = origin + -(-(refit - origin) // interval) * interval
    leave = end - reach - SUGGESTED
    until = instants(np.array([instant_ms(max(leave, matrix.span[0]))]))[0].floor("h").isoformat()
    return TooEarlyError(
        f"no decisions to compare on: {name} knows labels up to {refit.isoformat()}, and the data end at "
        f"{end.isoformat()}",
        f"matrix {matrix.path}",
        f"Wait for data after {(first + reach).isoformat()}, better for some weeks, or train a challenger that does "
        f"not use the newest decisions: `predrain train --until {until}`.",
    )
