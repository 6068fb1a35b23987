"""Whether the scores of one model wandered off: the newer half against the older one."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from models.rows.ranking import Floats, Hashes, Ints, mix, seed_of
from models.training.distribution import Distribution, shift_of

LEAST_STEP = 0.1
"""Change of the mean rank (0 to 1) that counts: smaller ones come and go with the hours of the day and the week."""

PER_TIME = 64
"""Units of a decision time that are compared, at most; and at most a quarter of them, drawn anew each time, so that
values are nearly independent, as the test asks."""

LEVEL = 0.001
"""Probability at which equal halves are told apart."""


def score_drift(
    reference: Distribution, model: str, time: Ints, tie: Hashes, score: Floats, *, seed: int
) -> dict[str, Any]:
    """Look at a model's scores since it was fitted.

    ``time``, ``tie``, ``score``: decision times (milliseconds since the epoch), hashes of the units and scores of all
    rows scored since the fit; shape (n_rows,).
    Returns: as :attr:`evaluation.drift.verdict.Findings.scores`; empty without scores.
    """
    if not len(score) or not reference.present:
        return {}
    priority = mix(mix(tie, time), seed_of(seed, "score drift"))
    order = np.lexsort((priority, time))
    time, score = time[order], score[order].astype(np.float64)
    first = np.r_[True, time[1:] != time[:-1]]
    begins = np.flatnonzero(first)
    sizes = np.diff(np.r_[begins, len(time)])
    place = np.arange(len(time)) - np.repeat(begins, sizes)
    kept = place < np.repeat(np.clip(sizes // 4, 1, PER_TIME), sizes)
    time_of_all, time, rank = time, time[kept], ranks_among(reference, score[kept])
    middle = begins[len(begins) // 2]
    cut: int | None = int(time_of_all[middle]) if middle else None
    before = now = float(rank.mean())
    if cut is not None:
        older, newer = rank[time < cut], rank[time >= cut]
        before, now = float(older.mean()), float(newer.mean())
        if abs(now - before) < LEAST_STEP or mannwhitneyu(older, newer).pvalue >= LEVEL:
            cut, before, now = None, float(rank.mean()), float(rank.mean())
    shift = shift_of(reference, score)
    return {
        "model": model,
        "psi": round(shift.psi, 6),
        "ks": round(shift.ks, 6),
        "cut_ms": cut,
        "before": round(before, 6),
        "now": round(now, 6),
    }


def ranks_among(reference: Distribution, score: Floats) -> Floats:
    """Give the share of the reference's scores below each score, ties counted half; from 0 to 1, shape kept."""
    upto = np.r_[0.0, reference.cumulative]
    left = upto[np.searchsorted(reference.knots, score, side="left")]
    right = upto[np.searchsorted(reference.knots, score, side="right")]
    # Between two knots of a summary nothing is known but that all lies there: take the middle.
    after = np.r_[reference.cumulative, 1.0][np.searchsorted(reference.knots, score, side="left")]
    between = left == right
    return np.clip(np.where(between, (left + after) / 2, (left + right) / 2), 0.0, 1.0)
