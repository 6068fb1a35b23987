"""The refits of a backtest done by others, several at a time, before its folds are gone through in their order.

Three things of a fold depend on the folds before it: the span, which the one in use may outlast; the check for drift;
and the models that were trained once. So candidates are judged first, all refits at once; then spans follow from each
other, in no time; then everything is fitted and scored, all refits at once; and what is left to do in order are the
checks. A refit that finds one class only falls back on an earlier one, and is left to that last round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evaluation.backtest.checkpoint import FoldStore, code_digest
from evaluation.backtest.frames import Fold
from evaluation.backtest.sliding import NOTHING_AHEAD, Ahead, Begun, begin_backtest
from features.engine import Engine
from features.errors import InputError
from features.matrix.matrix import FeatureMatrix
from models.config import BacktestSection, ModelsSection, TrainingSection
from models.rows.training_set import Matrix
from models.training.spans import SpanChoice, stay_or_go

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
        return cls(Path(path).resolve(), matrix.digest, training, models, backtest, seed, explain, code_digest())

    def open(self) -> Matrix:
        """Open the matrix.

        Raises ``InputError`` if this machine does not see it, or has other code.
        """
        if code_digest() != self.code:
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
class SpanTask:
    """Judges the candidate spans of a refit, as if none were in use; can be sent to another machine."""

    order: BacktestOrder
    name: str = "span"

    def __call__(self, fold: int) -> SpanChoice:
        """Do one."""
        with TURN:
            begun = _joined(self.order)
            refit_ms = begun.schedule.refits_ms[fold]
            choice = begun.trainer.choose_span(refit_ms, begun.trainer.labels_at(refit_ms), None)
            assert choice is not None  # the schedule begins where a span fits
            return choice


@dataclass(frozen=True, slots=True)
class RefitTask:
    """Does a refit; can be sent to another machine.

    ``kept``: where finished refits are kept, for this process to find; None: they are returned.
    """

    order: BacktestOrder
    kept: FoldStore | None
    name: str = "refit"

    def __call__(self, refit: Refit) -> Fold | None:
        """Do one."""
        with TURN:
            sliding = _joined(self.order).sliding
            done = sliding.refit_apart(refit.fold, refit.span, refit.why_span, once_for=refit.once_for)
        if self.kept is None:
            return done
        self.kept.save(refit.fold, done.table, done.facts)
        return None


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
    ``progress``: called with the refits done, all of them, and what is being done.
    """
    total = len(begun.schedule.refits_ms)
    done, settled = _folds(kept, total), {fold: each.facts for fold, each in _folds(finished, total).items()}
    if len(settled) == total:
        return NOTHING_AHEAD

    def tell() -> None:
        if progress is not None:
            progress(len(done), total, "refits")

    def take(refit: Refit, result: Fold | None) -> None:
        found = result if kept is None or result is not None else None
        if found is None and kept is not None:
            loaded = kept.load(refit.fold)
            found = None if loaded is None else Fold(*loaded)
        if found is None:
            raise InputError(
                f"a worker kept refit {refit.fold} where this process does not see it", "folder of the output", SHARED
            )
        done[refit.fold] = found
        tell()

    def run(refits: Sequence[Refit]) -> None:
        engine.run(RefitTask(order, kept), refits, take, max_workers=1)

    try:
        tell()
        once = next((fold for fold in sorted(settled) if settled[fold]["unfit"] is None), None)
        first = next(fold for fold in range(total) if fold not in settled) if once is None else once
        todo = [fold for fold in range(total) if fold not in done and (fold not in settled or fold == first)]
        spans = _spans(engine, order, begun, todo, {**settled, **{fold: each.facts for fold, each in done.items()}})
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


def _spans(
    engine: Engine, order: BacktestOrder, begun: Begun, todo: Sequence[int], known: Mapping[int, Mapping[str, Any]]
) -> dict[int, tuple[timedelta, str]]:
    """Give each fold's span and why it is that one; ``known`` are the facts of folds that were done earlier."""
    trainer, refits_ms = begun.trainer, begun.schedule.refits_ms
    best: dict[int, SpanChoice] = {}
    compared = []
    for fold in todo:
        if fold in known:
            continue
        if len(trainer.spans_at(refits_ms[fold])) > 1:
            compared.append(fold)
        else:
            only = trainer.choose_span(refits_ms[fold], trainer.labels_at(refits_ms[fold]), None)
            assert only is not None  # the schedule begins where a span fits
            best[fold] = only
    engine.run(SpanTask(order), compared, best.__setitem__, max_workers=1)
    found: dict[int, tuple[timedelta, str]] = {}
    for fold in range(len(refits_ms)):
        if fold in known:
            found[fold] = timedelta(milliseconds=known[fold]["span_ms"]), known[fold]["why_span"]
        else:
            current = found[fold - 1][0] if fold else None
            choice = stay_or_go(best[fold], current, trainer.training.hysteresis)
            found[fold] = choice.span, choice.why
    return found


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
