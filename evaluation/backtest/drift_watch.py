"""Watching for drift in a backtest: at each check, the rows since the last fit against those it was made on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from evaluation.backtest.frames import VARIANTS, Fold
from evaluation.drift.check import examine
from evaluation.drift.outcomes import AlertCounts, count_in_windows
from evaluation.drift.verdict import CheckFindings
from features.times import duration_ms
from models.sequence.windows import tabular_columns, tabular_values
from models.training.reference import LabelledRows, Reference, make_reference
from models.training.trainer import Trainer

RECENT_SPAN = timedelta(days=14)
"""Features are compared on the rows of this much time before a check, or since the last check where that is longer."""

EARLIER_ALERTS = timedelta(days=56)
"""Alerts are compared with those of this much time before the last fit, in windows as long as the time since it."""


class DriftWatch:
    """Checks the folds of a backtest for drift."""

    def __init__(self, trainer: Trainer, refits_ms: Sequence[int], profile: str) -> None:
        self._trainer = trainer
        self._refits_ms = tuple(refits_ms)
        self._profile = profile
        self._read = tabular_values(trainer.matrix, trainer.values)
        self._columns_read = tabular_columns(trainer.matrix)
        self._references: dict[int, Reference] = {}
        self._last: tuple[int, LabelledRows] | None = None

    def check(self, fold: int, before: Sequence[Fold], labelled: LabelledRows) -> CheckFindings | None:
        """Look at what changed since the last fit before a fold.

        Returns: none where nothing has been fitted yet.
        """
        fits = [past.facts["fold"] for past in before if past.facts["unfit"] is None]
        if not fits:
            self._last = fold, labelled
            return None
        fit = fits[-1]
        now_ms, fit_ms = self._refits_ms[fold], self._refits_ms[fit]
        width = max(duration_ms(RECENT_SPAN), now_ms - self._refits_ms[fold - 1])
        reference = self._reference(fit, before[fit].facts)
        self._last = fold, labelled
        numbers = {name: at for at, name in enumerate(self._trainer.names)}
        since = before[fit:]
        return examine(
            reference,
            labelled,
            self._read,
            self._trainer.matrix.rows["node"],
            start_ms=max(fit_ms, now_ms - width),
            end_ms=now_ms,
            seed=self._trainer.seed,
            alerts=(
                self._alerts(
                    [past for past in before[:fit] if self._refits_ms[past.facts["fold"]] >= fit_ms - _EARLIER_MS],
                    numbers[self._profile],
                    labelled,
                    length=len(since),
                ),
                self._alerts(since, numbers[self._profile], labelled, length=len(since)),
            ),
        )

    def _reference(self, fit: int, facts: Mapping[str, Any]) -> Reference:
        """Summarise the rows of a fold's fit; the same after a restart, since it depends on the matrix alone."""
        if fit not in self._references:
            labelled = (
                self._last[1] if self._last and self._last[0] == fit else self._trainer.labels_at(self._refits_ms[fit])
            )
            fit_facts = facts["sliding"]
            made = make_reference(
                labelled,
                self._read,
                self._columns_read,
                start_ms=fit_facts["train_start_ms"],
                end_ms=fit_facts["train_end_ms"],
                as_of_ms=self._refits_ms[fit],
                seed=self._trainer.seed,
            )
            self._references = {fit: made}
        return self._references[fit]

    def _alerts(self, folds: Sequence[Fold], model: int, labelled: LabelledRows, *, length: int) -> AlertCounts:
        alerted = []
        for fold in folds:
            columns = {name: fold.table[name].to_numpy() for name in ("row", "alert", "model", "variant")}
            mine = (columns["model"] == model) & (columns["variant"] == VARIANTS.index("sliding")) & columns["alert"]
            alerted.append(columns["row"][mine])
        return count_in_windows([(self._trainer.rows.node[rows], labelled.label[rows]) for rows in alerted], length)


_EARLIER_MS = duration_ms(EARLIER_ALERTS)
