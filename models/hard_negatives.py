"""Negatives that a first, cheap model takes for positives: drawn more often, and weighted so that nothing shifts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.learners import make_learner
from models.ranking import Bools, Ints, mix, seed_of
from models.row_batches import log_odds_of
from models.row_reader import RowReader
from models.training_set import Labels, Rows, TrainingSet, facts_of

AMONG = 5
"""Rows that hard negatives are looked for among, for each negative that is drawn at times without a positive."""

MOST = 0.8
"""Share of those draws that may be hard: the rest stands for all other rows, and few rows would weigh too much."""

_CHEAP = {"n_estimators": 60, "learning_rate": 0.1}
_BLOCKS = 3


def with_hard_negatives(
    made: TrainingSet, read: RowReader, rows: Rows, labels: Labels, pool: Bools, *, share: float, seed: int
) -> TrainingSet:
    """Exchange negatives that were drawn at random for ones that look like positives.

    Only negatives on the grid at times without a positive are exchanged: those at the positives' own times keep the
    clock from telling anything. Of a random sample, :data:`AMONG` times as large, those that :func:`hardest` picks are
    one stratum and all others the second. A drawn row weighs its stratum's share of the sample over the rows drawn from
    the stratum, so the weighted negatives are distributed as they were, and ``prior_shift`` stays what it was: more
    rows stand where they are hard to tell apart, none of them counts for more.

    ``made``: as :func:`models.training_set.choose_rows` gives it.
    ``pool``: negatives on the grid that may be drawn; shape (n_rows,).
    ``share``: share of all on-grid negatives that are to be hard ones, from 0 to 0.4; fewer where there are too few.
    Returns: with as many rows as before; ``made`` itself where nothing can be told.
    """
    on_grid = ~rows.augmented[made.rows]
    own_times = np.unique(rows.time[made.rows[(made.label == 1) & on_grid]])
    others = (made.label == 0) & on_grid & ~np.isin(rows.time[made.rows], own_times)
    drawn = int(others.sum())
    sample = np.flatnonzero(pool & ~np.isin(rows.time, own_times))
    priority = mix(mix(rows.tie[sample], rows.time[sample]), seed_of(seed, "hard"))
    sample = sample[np.lexsort((rows.time[sample], priority))][: AMONG * drawn]
    wanted = min(round(share * int(((made.label == 0) & on_grid).sum())), int(MOST * drawn))
    if not made.usable or wanted < 1 or len(sample) <= drawn:
        return made
    picked = hardest(made, read, rows, labels, sample, count=wanted, seed=seed)
    if len(picked) == 0:
        return made
    rest = sample[~np.isin(sample, picked)][: drawn - len(picked)]
    total = made.weight[others].sum()
    share_picked = len(picked) / len(sample)
    weight = np.concatenate(
        [
            made.weight[~others],
            np.full(len(picked), total * share_picked / len(picked)),
            np.full(len(rest), total * (1 - share_picked) / len(rest)),
        ]
    )
    taken = np.concatenate([made.rows[~others], picked, rest])
    label = np.concatenate([made.label[~others], np.zeros(len(picked) + len(rest), dtype=np.int64)])
    order = np.argsort(taken, kind="stable")
    return replace(
        made,
        rows=taken[order],
        label=label[order],
        weight=weight[order],
        facts=facts_of(rows, taken[order]),
        n_hard=len(picked),
    )


def hardest(
    made: TrainingSet, read: RowReader, rows: Rows, labels: Labels, candidates: Ints, *, count: int, seed: int
) -> Ints:
    """Pick the candidates that models of earlier rows of the same training set score highest.

    The span is cut into three blocks of equally many positives. A small LightGBM model is fitted on the rows whose
    labels were complete when a block began, and scores the block's candidates; those of the first are not scored.

    ``made``, ``read``, ``rows``, ``labels``: as :func:`with_hard_negatives` takes them.
    Returns: at most ``count`` positions, the same share of each block's candidates; none where no block has both
    classes before it.
    """
    positive_times = rows.time[made.rows[made.label == 1]]
    borders = np.unique(np.quantile(positive_times, np.arange(1, _BLOCKS) / _BLOCKS, method="lower"))
    complete = labels.complete[made.rows]
    scored: list[tuple[Ints, np.ndarray]] = []
    for i, border in enumerate(borders):
        until = borders[i + 1] if i + 1 < len(borders) else np.inf
        fit_on = np.flatnonzero(complete <= border)
        judged = candidates[(rows.time[candidates] >= border) & (rows.time[candidates] < until)]
        if len(judged) == 0 or len(np.unique(made.label[fit_on])) < 2:
            continue
        learner = make_learner("lightgbm", seed=seed_of(seed, "hard", i), settings=_CHEAP)
        learner.fit(read(made.rows[fit_on]), made.label[fit_on], sample_weight=made.weight[fit_on])
        scored.append((judged, log_odds_of([learner], read, judged)[0]))
    total = sum(len(judged) for judged, _ in scored)
    picked = [
        judged[np.lexsort((rows.time[judged], rows.tie[judged], -score))][: count * len(judged) // total]
        for judged, score in scored
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *picked])
