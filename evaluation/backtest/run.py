"""Backtest: run all refits, sequentially or in parallel, and assemble the result."""

import hashlib
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import pyarrow as pa
from threadpoolctl import threadpool_limits

from evaluation.backtest.frames import (
    BacktestResult,
    Fold,
    cooled_down,
    drain_labels,
    fold_frame,
    predictions_of,
    skipped_of,
)
from evaluation.backtest.sliding import Backtest, BacktestSetup, Refit
from evaluation.drift.verdict import CheckFindings
from features.engine import Engine, source_digest
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from models.bundle.serialization import FitStore
from models.config import THREADS, BacktestSection, ModelsSection, TrainingSection
from models.explanation.alert_reasons import attribution_frame
from models.rows.training_set import Matrix
from models.training.fitted import model_names
from models.training.schedule import (
    Schedule,
    format_candidates,
    format_instant,
)
from models.training.spans import EXPANDING
from models.training.trainer import MAX_CONCURRENT_FITS, Progress

_LIBRARIES = ("numpy", "pandas", "pyarrow", "scipy", "scikit-learn", "lightgbm", "xgboost-cpu")
ROOMS = ("evaluation", "features", "foundation", "models", "policy", "telemetry")
"""Packages whose code affects predictions."""


def _code_digest() -> str:
    """Hash library versions and the code of ``ROOMS``, on which predictions depend besides parameters and data."""
    content = {"code": source_digest(*ROOMS), "libraries": {name: version(name) for name in _LIBRARIES}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


_SHARED = "Give every machine of the cluster the same folders under the same paths."

_FIT_LOCK = threading.Lock()
"""Thread limits apply to the whole process, so each worker process fits one model at a time."""


@dataclass(frozen=True, slots=True)
class RefitTask:
    """A refit as a serializable callable for workers.

    ``matrix``, ``digest``: absolute path of the matrix folder, and the matrix digest that a worker must find there.
    """

    matrix: Path
    digest: str
    setup: BacktestSetup
    code: str
    name: str = "refit"

    @classmethod
    def of(cls, matrix: Matrix, setup: BacktestSetup) -> Self:
        """Create a task; raises ``InputError`` if the matrix is in memory only."""
        path = getattr(matrix, "path", None)
        if path is None:
            raise InputError("the matrix is in memory, where workers cannot read it", "matrix", "Use --engine local.")
        return cls(Path(path).resolve(), matrix.digest, setup, source_digest(*ROOMS))

    def __call__(self, refit: Refit) -> Fold:
        """Run a refit; the process caches the backtest between calls."""
        with _FIT_LOCK, threadpool_limits(limits=THREADS):
            key = repr(self)
            if key not in _BACKTESTS:
                _BACKTESTS.clear()
                _BACKTESTS[key] = Backtest(self.open(), self.setup)
            return _BACKTESTS[key].refit(refit)

    def open(self) -> Matrix:
        """Open the matrix; raises ``InputError`` if it is missing or different here, or the code version differs."""
        if source_digest(*ROOMS) != self.code:
            raise InputError(
                "a worker runs a different version of predrain",
                "refit",
                "Install the same versions on every machine, and restart the workers.",
            )
        try:
            matrix = FeatureMatrix.open(self.matrix)
        except InputError as error:
            raise InputError(f"a worker cannot read the matrix: {error.problem}", error.location, _SHARED) from None
        if matrix.digest != self.digest:
            raise InputError("a worker sees a different matrix", str(self.matrix), _SHARED)
        return matrix


_BACKTESTS: dict[str, Backtest] = {}


def run_here(backtest: Backtest, take: Callable[[Refit, Fold], None]) -> None:
    """Run refits in threads. ``take`` receives each result in order, in the calling thread.

    Planning of later refits overlaps with fitting.
    """
    running: deque[tuple[Refit, Future[Fold]]] = deque()

    def take_first() -> None:
        refit, fold = running.popleft()
        take(refit, fold.result())

    # One limit around all fits: set by each fit, it would be lifted by the first to finish.
    with threadpool_limits(limits=THREADS), ThreadPoolExecutor(MAX_CONCURRENT_FITS, thread_name_prefix="refit") as pool:
        try:
            for refit in backtest.plan():
                running.append((refit, pool.submit(backtest.refit, refit)))
                # One more than can run, to keep the threads busy while the oldest is taken; more would only hold folds
                # in memory.
                if len(running) > MAX_CONCURRENT_FITS:
                    take_first()
            while running:
                take_first()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_refits(engine: Engine, task: RefitTask, refits: Sequence[Refit], take: Callable[[Refit, Fold], None]) -> None:
    """Run refits on an engine's workers; the calling process passes each result to ``take`` as it arrives."""
    try:
        engine.run(task, refits, take, max_workers=1)
    finally:
        engine.everywhere(_leave)


def _leave() -> None:
    with _FIT_LOCK:
        _BACKTESTS.clear()


def run_backtest(
    matrix: Matrix,
    *,
    training: TrainingSection,
    models: ModelsSection,
    backtest: BacktestSection,
    seed: int,
    progress: Progress | None = None,
    cache: Path | None = None,
    explain: int = 0,
    full: bool = True,
    watch: bool = True,
    engine: Engine | None = None,
) -> BacktestResult:
    """Replay the test period: at every refit, fit all models on the past and score until the next refit.

    A refit at R uses rows whose labels are complete (decision time + gap + horizon) and known by R. Its training
    window ends gap + horizon before R, and it scores decisions from R on. The result is bit-for-bit reproducible, also
    with cached learners, and the same with every ``engine``.

    ``cache``: folder for fitted learners. A later run on the same rows with the same code reuses them, after a kill or
    with other parameters. Learners of other versions of the code are removed at the end.
    ``explain``: number of alerts of ``models.profile`` to explain in each fold, riskiest first; 0: none.
    ``full``: compare all models, sliding and trained once; False: only the baselines and what the profile needs. The
    profile's predictions are the same in both cases.
    ``watch``: check for drift before each fold.
    ``engine``: runs the refits; default: threads of this process. Other engines read the matrix from its folder.
    Raises ``InputError`` if no training window fits, the test period is empty or starts too early, a model name is
    unknown, or no refit has both classes. A single refit that lacks a class falls back to the last fitted models (or,
    before any, to ``history_count``) and is listed in ``skipped``.
    """
    fits = None if cache is None else cache.resolve() / _code_digest()
    setup = BacktestSetup(training, models, backtest, seed, explain, full, fits)
    backtest_run = Backtest(matrix, setup)
    fold_results: dict[int, Fold] = {}
    total = len(backtest_run.schedule.refits_ms)

    def report() -> None:
        if progress is not None:
            progress(len(fold_results), total, "refits")

    def take(refit: Refit, result: Fold) -> None:
        fold_results[refit.fold] = result
        check_drift()
        pa.default_memory_pool().release_unused()  # otherwise the allocator holds on to memory that the fit freed
        report()

    def check_drift() -> None:
        while watch and (number := len(drift)) < total and all(fold in fold_results for fold in range(number)):
            drift.append(backtest_run.check_drift([fold_results[fold] for fold in range(number)]))

    drift: list[CheckFindings | None] = []
    check_drift()
    report()
    if engine is None:
        run_here(backtest_run, take)
    else:
        run_refits(engine, RefitTask.of(matrix, setup), list(backtest_run.plan()), take)
    folds = [fold_results[fold] for fold in range(total)]
    if fits is not None:
        for entry in fits.parent.iterdir() if fits.parent.is_dir() else ():
            if entry != fits:
                shutil.rmtree(entry, ignore_errors=True)
        FitStore(fits).shrink()
    _refuse_if_none_fitted(folds, backtest_run.schedule, training)
    drains = drain_labels(backtest_run.matrix, models.precision_targets.horizon)
    reach = (drains["complete_at"].iloc[0] - backtest_run.matrix.rows["decision_time"].iloc[0]).to_pytimedelta()
    categories = model_names(models)
    predictions = predictions_of(
        backtest_run.matrix, folds, backtest_run.names, backtest_run.schedule, drains["label"], categories
    )
    if backtest.cooldown is not None:
        predictions["alert"] = cooled_down(predictions, backtest_run.k, reach, backtest.cooldown)
    maps = [fold.facts["horizons"] for fold in folds]
    return BacktestResult(
        predictions=predictions,
        folds=fold_frame(folds, backtest_run.schedule, backtest_run.rows, full=full),
        k=backtest_run.k,
        drain_reach=reach,
        horizons=() if None in maps else tuple(maps),
        skipped=skipped_of(folds, backtest_run.schedule),
        models=backtest_run.names,
        drift=tuple(drift),
        reasons=tuple(reason for fold in folds for reason in fold.facts["reasons"]),
        attributions=attribution_frame(
            backtest_run.matrix, models.profile, [fold.facts["attributions"] for fold in folds]
        )
        if explain
        else None,
    )


def _refuse_if_none_fitted(folds: list[Fold], schedule: Schedule, training: TrainingSection) -> None:
    if any(fold.facts["unfit"] is None for fold in folds):
        return
    last = folds[-1].facts
    fixed = "" if training.window == EXPANDING else "a longer window, or "
    raise InputError(
        f"every training window lacks failures, or rows without failures ({len(folds)} refits from "
        f"{format_instant(schedule.refits_ms[0])} to {format_instant(schedule.refits_ms[-1])}); {last['unfit']}",
        f"parameter training.window, {format_candidates(training)}",
        f"Give {fixed}a dataset with more history; check labels.xids if failures seem to be missing.",
    )
