"""The refits of a backtest done by others, several at a time, before its folds are gone through in their order.

Three things of a fold depend on the folds before it: the span, which the one in use may outlast; the check for drift;
and the models that were trained once. So this process chooses the spans first; then everything is fitted and scored,
all refits at once; and what is left to do in order are the checks. A refit that finds one class only falls back on an
earlier one, and is left to that last round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evaluation.backtest.checkpoint import ROOMS, FoldStore
from evaluation.backtest.frames import Fold
from evaluation.backtest.sliding import NOTHING_AHEAD, Ahead, Begun, begin_backtest
from features.engine import Engine, source_digest
from features.errors import InputError
from features.matrix.matrix import FeatureMatrix
from models.config import BacktestSection, ModelsSection, TrainingSection
from models.rows.training_set import Matrix

SHARED = "Give every machine of the cluster the same folders under the same paths."
"""What to do about a machine that does not see a folder."""

TURN = threading.Lock()
"""Learners limit the threads of the whole process: one fit at a time in each."""


def open_shared(path: Path, digest: str) -> FeatureMatrix:
    """Open the matrix that another machine means.

    Raises ``InputError`` if this machine does not see it, or sees another one.
    """
    try:
        matrix = FeatureMatrix.open(path)
    except InputError as error:
        raise InputError(f"a worker cannot read the matrix: {error.what}", error.where, SHARED) from None
    if matrix.digest != digest:
        raise InputError("a worker sees another matrix", str(path), SHARED)
    return matrix


@dataclass(frozen=True, slots=True)
class BacktestOrder:
    """Everything that a backtest is a function of, small enough to be sent along with each task.

    ``matrix``: folder of the matrix; absolute.
    ``code``: digest of the code that the order comes from.
    """

    matrix: Path
    digest: str
    training: TrainingSection
    models: ModelsSection
    backtest: BacktestSection
    seed: int
    explain: int
    code: str

    @classmethod
    def of(
        cls,
        matrix: Matrix,
        *,
        training: TrainingSection,
        models: ModelsSection,
        backtest: BacktestSection,
        seed: int,
        explain: int,
    ) -> BacktestOrder:
        """Make an order.

        Raises ``InputError`` if the matrix is not in a folder.
        """
        path = getattr(matrix, "path", None)
        if path is None:
            raise InputError("the matrix is in no folder that others could read", "matrix", "Use the engine local.")
        return cls(
            Path(path).resolve(), matrix.digest, training, models, backtest, seed, explain, source_digest(*ROOMS)
        )

    def open(self) -> Matrix:
        """Open the matrix.

        Raises ``InputError`` if this machine does not see it, or has other code.
        """
        if source_digest(*ROOMS) != self.code:
            raise InputError(
                "a worker runs other code of predrain's than the command",
                "refit",
                "Install the same versions on every machine, and start the workers again.",
            )
        return open_shared(self.matrix, self.digest)


@dataclass(frozen=True, slots=True)
class Refit:
    """A refit to do.

    ``once_for``: see :meth:`evaluation.backtest.sliding.SlidingTrainer.refit_apart`.
    """

    fold: int
    span: timedelta
    why_span: str
    once_for: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RefitTask:
    """Does a refit; can be sent to another machine."""

    order: BacktestOrder
    name: str = "refit"

    def __call__(self, refit: Refit) -> Fold:
        """Do one."""
        with TURN:
            sliding = _joined(self.order).sliding
            return sliding.refit_apart(refit.fold, refit.span, refit.why_span, once_for=refit.once_for)


def refits_ahead(
    engine: Engine,
    order: BacktestOrder,
    begun: Begun,
    *,
    finished: FoldStore | None,
    kept: FoldStore | None,
    progress: Callable[[int, int, str], None] | None,
) -> Ahead:
    """Do all refits that are not done yet.

    ``finished``: finished folds; their refits are not done again.
    ``kept``: where each refit is stored as it comes in, for a later run.
    ``progress``: called with the refits done, all of them, and what is being done.
    """
    total = len(begun.schedule.refits_ms)
    done, settled = _folds(kept, total), {fold: each.facts for fold, each in _folds(finished, total).items()}
    if len(settled) == total:
        return NOTHING_AHEAD

    def tell() -> None:
        if progress is not None:
            progress(len(done), total, "refits")

    def take(refit: Refit, result: Fold) -> None:
        if kept is not None:
            kept.save(refit.fold, result.table, result.facts)
        done[refit.fold] = result
        tell()

    def run(refits: Sequence[Refit]) -> None:
        engine.run(RefitTask(order), refits, take, max_workers=1)

    try:
        tell()
        once = next((fold for fold in sorted(settled) if settled[fold]["unfit"] is None), None)
        first = next(fold for fold in range(total) if fold not in settled) if once is None else once
        todo = [fold for fold in range(total) if fold not in done and (fold not in settled or fold == first)]
        spans = _spans(begun, {**settled, **{fold: each.facts for fold, each in done.items()}})
        run([Refit(fold, *spans[fold], tuple(range(total)) if fold == first else ()) for fold in todo])
        fitted = (fold for fold in sorted(done) if done[fold].facts["unfit"] is None)
        first = next(fitted, first) if once is None else once
        if done[first].facts["unfit"] is None and not done[first].facts["once_for"]:
            run([Refit(first, *spans[first], tuple(range(total)))])
    finally:
        engine.everywhere(leave_backtests)
    return Ahead(done)


def _folds(store: FoldStore | None, total: int) -> dict[int, Fold]:
    found = {} if store is None else {fold: store.load(fold) for fold in range(total)}
    return {fold: Fold(*each) for fold, each in found.items() if each is not None}


def _spans(begun: Begun, known: Mapping[int, Mapping[str, Any]]) -> list[tuple[timedelta, str]]:
    """Give each fold's span and why it is that one; ``known`` are the facts of folds that were done earlier."""
    spans: list[tuple[timedelta, str]] = []
    for fold, refit_ms in enumerate(begun.schedule.refits_ms):
        if fold in known:
            spans.append((timedelta(milliseconds=known[fold]["span_ms"]), known[fold]["why_span"]))
            continue
        labels = begun.trainer.labels_at(refit_ms)
        choice = begun.trainer.choose_span(refit_ms, labels, spans[-1][0] if spans else None)
        assert choice is not None  # the schedule begins where a span fits
        spans.append((choice.span, choice.why))
    return spans


_JOINED: dict[str, Begun] = {}


def _joined(order: BacktestOrder) -> Begun:
    """Give this process's beginning of an order; it holds the last one only."""
    key = repr(order)
    if key not in _JOINED:
        _JOINED.clear()
        _JOINED[key] = begin_backtest(
            order.open(),
            training=order.training,
            models=order.models,
            backtest=order.backtest,
            seed=order.seed,
            explain=order.explain,
        )
    return _JOINED[key]


def leave_backtests() -> None:
    """Let go of what this process holds of backtests of others."""
    with TURN:
        _JOINED.clear()
