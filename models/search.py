"""Settings of a learner searched on time-ordered folds of the past, before anything that is reported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score

from models.config import SEQUENCE
from models.fit_facts import FitFacts
from models.fitted import fitted_learners
from models.learners import fit_learners, make_learner
from models.odds import log_odds
from models.ranking import Floats, Ints, mix, seed_of
from models.row_reader import RowReader
from models.sequence.windows import tabular_values
from models.training_set import Labels, Rows, choose_rows, count_incidents, known_rows

if TYPE_CHECKING:
    from models.trainer import Trainer

FOLDS = 3
"""Validation periods; together they are the later half of the history."""

MIN_INCIDENTS = 3
"""Incidents that a validation period must hold to be a judge."""

JUDGED = 20_000
"""Negatives of a validation period that are scored at most, drawn by unit and time."""

_TREES = {
    "lambda_": (1.0, 5.0, 20.0, 50.0),
    "rows": (0.5, 0.7, 1.0),
    "columns": (0.1, 0.2, 0.4),
    "rounds": ((80, 0.05), (150, 0.05), (300, 0.03), (300, 0.05)),
}


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found for one learner.

    ``settings``: overrides of the learner's settings; those given where nothing was better.
    ``table``: one row a trial, the given settings first: ``learner``, ``trial``, ``settings`` (JSON), ``fold_1`` ...
    (average precision), ``mean``, ``chosen``. Empty where nothing could be compared.
    """

    learner: str
    settings: dict[str, Any]
    table: pd.DataFrame
    why: str


@dataclass(frozen=True, slots=True)
class Judge:
    """One fold: rows to fit on with their features, and later rows to score.

    ``X``, ``label``, ``weight``, ``facts``: what learners are fitted on.
    ``held``, ``truth``: features and labels of the rows that are scored.
    ``start_ms``, ``end_ms``: the validation period, in milliseconds since the epoch.
    """

    X: np.ndarray
    label: Ints
    weight: Floats
    facts: FitFacts
    held: np.ndarray
    truth: np.ndarray
    start_ms: int
    end_ms: int


def draw_settings(learner: str, *, draws: int, seed: int) -> list[dict[str, Any]]:
    """Draw settings of a learner at random from a space around its defaults.

    ``learner``: Which; sequence learners have no space.
    ``seed``: Seed; the same arguments give the same draws, and more draws begin with those of fewer.
    Returns: Distinct, at most ``draws``; empty for a learner without a space.
    """
    rng = np.random.default_rng(seed_of(seed, "search", learner))
    found: list[dict[str, Any]] = []
    # A small space may be used up: as many attempts again as it could take, then it is.
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        one = _draw(learner, rng)
        if one and one not in found:
            found.append(one)
    return found


def _draw(learner: str, rng: np.random.Generator) -> dict[str, Any]:
    def pick(values: Sequence[Any]) -> Any:
        return values[int(rng.integers(len(values)))]

    if learner.startswith(("lightgbm", "xgboost")):
        rounds, rate = pick(_TREES["rounds"])
        drawn = {
            "n_estimators": rounds,
            "learning_rate": rate,
            "reg_lambda": pick(_TREES["lambda_"]),
            "subsample": pick(_TREES["rows"]),
            "colsample_bytree": pick(_TREES["columns"]),
        }
        if learner.startswith("lightgbm"):
            drawn |= {"num_leaves": pick((2, 3, 4, 8, 15)), "min_child_samples": pick((20, 40, 80, 160))}
        else:
            drawn |= {"max_depth": pick((1, 2, 3, 4)), "min_child_weight": pick((0.02, 0.2, 1.0))}
        return drawn
    if learner == "random_forest":
        return {
            "max_depth": pick((5, 7, 10, 14)),
            "min_samples_leaf": pick((3, 10, 30)),
            "max_features": pick(("sqrt", 0.02, 0.1)),
            "max_samples": pick((0.1, 0.2, 0.5)),
        }
    if learner == "logistic":
        return {"C": pick((1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1))}
    if learner == "mlp":
        return {
            "hidden_layer_sizes": pick(((16,), (32,), (64,), (32, 16))),
            "alpha": pick((2.0, 8.0, 30.0)),
            "learning_rate_init": pick((1e-3, 2e-3)),
            "epochs": pick((5, 10, 20)),
        }
    return {}


def judges(
    read: RowReader,
    rows: Rows,
    labels: Labels,
    *,
    first_ms: int,
    before_ms: int,
    reach_ms: int,
    negative_ratio: int,
    seed: int,
    folds: int = FOLDS,
    most: int | None = None,
) -> list[Judge]:
    """Cut the history before an instant into folds: each validation period is later than what is fitted for it.

    ``read``, ``rows``, ``labels``: reader of features, the rows, and the labels as of ``before_ms``.
    ``first_ms``, ``before_ms``: beginning of the data, and the instant that everything must be known by, in
    milliseconds since the epoch.
    ``reach_ms``: gap + horizon. Labels that a model is fitted on are complete when its validation period begins.
    ``negative_ratio``: ``training.negative_ratio``.
    ``folds``: validation periods, of equal length, from the middle of the history to its end.
    ``most``: rows to fit on that there is room for, in all folds together; see :func:`models.training_set.choose_rows`.
    Returns: periods with fewer than :data:`MIN_INCIDENTS` incidents, or nothing to fit on before them, are left out.
    """
    end = before_ms - reach_ms
    borders = np.linspace((first_ms + end) // 2, end, folds + 1).astype(np.int64)
    found = []
    for start, until in pairwise(borders):
        chosen = choose_rows(
            rows,
            labels,
            start_ms=first_ms,
            complete_by_ms=int(start),
            as_of_ms=before_ms,
            negative_ratio=negative_ratio,
            seed=seed,
            most=None if most is None else most // folds,
        )
        known = known_rows(rows, labels, start_ms=int(start), complete_by_ms=before_ms, as_of_ms=before_ms)
        judged = np.flatnonzero(known & ~rows.augmented & (rows.time < until))
        truth = labels.label[judged] == 1
        enough = count_incidents(rows, labels, judged[truth]) >= MIN_INCIDENTS
        if not chosen.usable or not enough or truth.all():
            continue
        hashes = mix(mix(rows.tie[judged], rows.time[judged]), seed_of(seed, "judged"))
        healthy = np.flatnonzero(~truth)
        kept = healthy[np.lexsort((rows.time[judged[healthy]], hashes[healthy]))][:JUDGED]
        scored = np.sort(np.concatenate([np.flatnonzero(truth), kept]))
        found.append(
            Judge(
                X=read(chosen.rows),
                label=chosen.label,
                weight=chosen.weight,
                facts=chosen.facts,
                held=read(judged[scored]),
                truth=truth[scored],
                start_ms=int(start),
                end_ms=int(until),
            )
        )
    return found


def search_settings(
    learner: str, over: Sequence[Judge], *, draws: int, seed: int, given: Mapping[str, Any] | None = None
) -> Searched:
    """Try settings on every fold and take the best by mean average precision.

    The given settings stay unless another's mean is better by more than the standard error of the paired differences:
    with few incidents a fold, the best of many trials is better by luck.

    ``draws``: settings to draw besides the given ones (:func:`draw_settings`).
    ``given``: overrides that the user set; no draw changes them.
    Returns: the choice and how every trial did.
    """
    own = dict(given or {})
    trials = [own]
    for drawn in draw_settings(learner, draws=draws, seed=seed):
        trial = {**drawn, **own}
        if trial not in trials:
            trials.append(trial)
    if len(over) < 2 or len(trials) < 2:
        why = f"{len(over)} folds with enough incidents are too few" if len(over) < 2 else "nothing to try"
        return Searched(learner, own, pd.DataFrame(), f"settings of {learner} stay: {why}")
    scores = np.empty((len(trials), len(over)))
    for at, judge in enumerate(over):
        unfitted = {
            str(i): make_learner(learner, seed=seed_of(seed, learner, "search", at), settings=trial)
            for i, trial in enumerate(trials)
        }
        fitted = fit_learners(unfitted, judge.X, judge.label, judge.weight, judge.facts, kind=learner)
        for i, each in enumerate(fitted.values()):
            scores[i, at] = average_precision_score(judge.truth, log_odds(each, judge.held))
    best = 1 + int(np.argmax(scores[1:].mean(axis=1)))  # of those that are not given
    gain = scores[best] - scores[0]
    error = float(gain.std(ddof=1) / np.sqrt(len(over)))
    chosen = best if gain.mean() > error else 0
    table = pd.DataFrame(
        {
            "learner": learner,
            "trial": np.arange(len(trials)),
            "settings": [_written(trial) for trial in trials],
            **{f"fold_{at + 1}": scores[:, at] for at in range(len(over))},
            "mean": scores.mean(axis=1),
            "chosen": np.arange(len(trials)) == chosen,
        }
    )
    does = "gains" if gain.mean() > 0 else "loses"
    over_folds = f"{does} {abs(gain.mean()):.4f} in average precision over {len(over)} folds"
    why = (
        f"settings of {learner} stay: the best other one {over_folds}, with a standard error of {error:.4f}"
        if chosen == 0
        else f"trial {best} of {learner} {over_folds}, more than its standard error of {error:.4f}"
    )
    return Searched(learner, trials[chosen], table, why)


def search_all(trainer: Trainer, before_ms: int) -> dict[str, Searched]:
    """Search for every learner that ``training.search`` names and that a refit fits, on one set of folds.

    ``before_ms``: nothing that became known after this instant is used, in milliseconds since the epoch.
    Returns: by learner; empty where ``training.search.draws`` is 0. Learners on sequences are not searched.
    """
    asked = trainer.training.search
    if asked.draws == 0:
        return {}
    needed = (*fitted_learners(trainer.models), *trainer.models.cascade.stages)
    names = [name for name in dict.fromkeys(needed) if name not in SEQUENCE]
    over = judges(
        tabular_values(trainer.matrix, trainer.values),
        trainer.rows,
        trainer.labels_at(before_ms),
        first_ms=trainer.first_ms,
        before_ms=before_ms,
        reach_ms=trainer.reach_ms,
        negative_ratio=trainer.training.negative_ratio,
        seed=trainer.seed,
        most=trainer.most,
    )
    given = {str(key): value for key, value in trainer.models.settings.items()}
    return {
        name: search_settings(name, over, draws=asked.draws, seed=trainer.seed, given=given.get(name))
        for name in names
        if not asked.learners or name in asked.learners
    }


def search_table(found: Mapping[str, Searched]) -> pd.DataFrame | None:
    """Put the trials of all learners into one table, with ``why`` beside each; None where nothing was searched.

    A learner whose settings could not be compared has one row, its given settings with NaN for a mean.
    """
    if not found:
        return None
    tables = [
        (_uncompared(each) if each.table.empty else each.table).assign(why=each.why)
        # the compared ones say how many folds there are, and with that the columns
        for each in sorted(found.values(), key=lambda each: each.table.empty)
    ]
    return pd.concat(tables, ignore_index=True)


def _uncompared(found: Searched) -> pd.DataFrame:
    given = _written(found.settings)
    return pd.DataFrame({"learner": [found.learner], "trial": 0, "settings": given, "mean": np.nan, "chosen": True})


def _written(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=list)
