"""Refits of a backtest, several at a time: in threads that share a matrix, or on machines that open it themselves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_limits

from evaluation.backtest.checkpoint import ROOMS
from evaluation.backtest.frames import Fold
from evaluation.backtest.sliding import Backtest, BacktestSetup, Refit
from features.engine import Engine, source_digest
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from models.recipe import THREADS
from models.rows.training_set import Matrix
from models.training.trainer import AT_ONCE

_SHARED = "Give every machine of the cluster the same folders under the same paths."

_TURN = threading.Lock()
"""Learners limit the threads of the whole process: one fit at a time in each."""


@dataclass(frozen=True, slots=True)
class RefitTask:
    """Does a refit; small enough to be sent along with each.

    ``matrix``, ``digest``: absolute folder of the matrix, and what it must hold.
    ``code``: digest of the code that the task comes from.
    """

    matrix: Path
    digest: str
    setup: BacktestSetup
    code: str
    name: str = "refit"

    @classmethod
    def of(cls, matrix: Matrix, setup: BacktestSetup) -> RefitTask:
        """Make a task; raises ``InputError`` if the matrix is not in a folder."""
        path = getattr(matrix, "path", None)
        if path is None:
            raise InputError("the matrix is in no folder that others could read", "matrix", "Use the engine local.")
        return cls(Path(path).resolve(), matrix.digest, setup, source_digest(*ROOMS))

    def __call__(self, refit: Refit) -> Fold:
        """Do a refit; this process holds the last backtest that it joined."""
        with _TURN, threadpool_limits(limits=THREADS):
            key = repr(self)
            if key not in _JOINED:
                _JOINED.clear()
                _JOINED[key] = Backtest(self.open(), self.setup)
            return _JOINED[key].refit(refit)

    def open(self) -> Matrix:
        """Open the matrix; raises ``InputError`` if this machine does not see it, or has other code."""
        if source_digest(*ROOMS) != self.code:
            raise InputError(
                "a worker runs other code of predrain's than the command",
                "refit",
                "Install the same versions on every machine, and start the workers again.",
            )
        try:
            matrix = FeatureMatrix.open(self.matrix)
        except InputError as error:
            raise InputError(f"a worker cannot read the matrix: {error.what}", error.where, _SHARED) from None
        if matrix.digest != self.digest:
            raise InputError("a worker sees another matrix", str(self.matrix), _SHARED)
        return matrix


_JOINED: dict[str, Backtest] = {}


def run_here(begun: Backtest, done: Mapping[int, Fold], take: Callable[[Refit, Fold], None]) -> None:
    """Do the refits that are not done in threads of this process; ``take`` is called here with each result, in order.

    While some are fitted the next ones are planned.
    """
    running: deque[tuple[Refit, Future[Fold]]] = deque()

    def take_first() -> None:
        refit, fold = running.popleft()
        take(refit, fold.result())

    # One limit around all: set and lifted by each of several fits, it would be lifted too early for the others.
    with threadpool_limits(limits=THREADS), ThreadPoolExecutor(AT_ONCE, thread_name_prefix="refit") as pool:
        try:
            for refit in begun.plan(done):
                running.append((refit, pool.submit(begun.refit, refit)))
                if len(running) > AT_ONCE:
                    take_first()
            while running:
                take_first()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_refits(engine: Engine, task: RefitTask, refits: Sequence[Refit], take: Callable[[Refit, Fold], None]) -> None:
    """Do refits on an engine's workers; ``take`` is called here with each result as it comes in."""
    try:
        engine.run(task, refits, take, max_workers=1)
    finally:
        engine.everywhere(_leave)


def _leave() -> None:
    with _TURN:
        _JOINED.clear()
