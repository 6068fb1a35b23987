"""Backtest: run all refits, sequentially or in parallel, and assemble the result."""

import errno
import hashlib
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter
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
from foundation.files import replacing
from models.bundle.serialization import FitStore
from models.calibration.horizons import horizon_maps
from models.config import THREADS, BacktestSection, ModelsSection, TrainingSection
from models.explanation.alert_reasons import alert_reasons, attribution_frame
from models.learners.prior import load_prior
from models.rows.training_set import Matrix
from models.training.fitted import model_names
from models.training.schedule import (
    Schedule,
    format_candidates,
    format_instant,
)
from models.training.spans import EXPANDING
from models.training.trainer import MAX_CONCURRENT_FITS, Progress

_KEY = b"predrain.fold"
_FINDINGS: TypeAdapter[CheckFindings | None] = TypeAdapter(CheckFindings | None)
_LIBRARIES = ("numpy", "pandas", "pyarrow", "scipy", "scikit-learn", "lightgbm", "xgboost-cpu")
ROOMS = ("evaluation", "features", "foundation", "models", "policy", "telemetry")
"""Packages whose code affects predictions."""


def digest_of(**inputs: Any) -> str:
    """Hash everything that a fold's predictions depend on: inputs, library versions and the code of ``ROOMS``.

    Returns: 16 hexadecimal digits.
    """
    libraries = {name: version(name) for name in _LIBRARIES}
    content = {"code": source_digest(*ROOMS), "libraries": libraries, "inputs": inputs}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class FoldStore:
    """Checkpoint: one Parquet file per finished fold and one JSON file per drift check, in ``folder/digest``.

    ``folder``: parent of all checkpoints.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder = folder / digest

    def forget_others(self, keep: Path) -> None:
        """Remove every other folder next to this checkpoint, except ``keep``."""
        for entry in self._folder.parent.iterdir() if self._folder.parent.is_dir() else ():
            if entry not in (self._folder, keep):
                shutil.rmtree(entry, ignore_errors=True)

    def load(self, fold: int) -> Fold | None:
        """Read a finished fold; None if it is missing or unreadable."""
        try:
            table = pq.read_table(self._path(fold))
        except (FileNotFoundError, pa.ArrowInvalid):
            return None
        facts = (table.schema.metadata or {}).get(_KEY)
        return None if facts is None else Fold(table, json.loads(facts))

    def save(self, fold: int, result: Fold) -> None:
        """Write a finished fold atomically.

        Raises ``InputError`` if it cannot be written, for example on a full disk; earlier folds are kept.
        """
        stamped = result.table.replace_schema_metadata({_KEY: json.dumps(result.facts, sort_keys=True).encode()})
        with self._replacing(self._path(fold), f"the finished fold {fold}") as temporary:
            pq.write_table(stamped, temporary, compression="zstd")

    def load_check(self, fold: int) -> tuple[CheckFindings | None] | None:
        """Read the stored drift check before a fold, as a 1-tuple of its findings; None if there is none."""
        try:
            return (_FINDINGS.validate_python(json.loads(self._check_path(fold).read_bytes())),)
        except (FileNotFoundError, ValueError):
            return None

    def save_check(self, fold: int, findings: CheckFindings | None) -> None:
        """Write the findings of the drift check before a fold, as :meth:`save` does."""
        with self._replacing(self._check_path(fold), f"the check before fold {fold}") as temporary:
            temporary.write_text(json.dumps(None if findings is None else findings.to_json()), encoding="utf-8")

    @contextmanager
    def _replacing(self, path: Path, problem: str) -> Iterator[Path]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                yield temporary
        except OSError as error:
            advice = "Free some space" if error.errno == errno.ENOSPC else "Make the folder writable"
            raise InputError(
                f"cannot write {problem}: {error.strerror or error}",
                str(path.parent),
                f"{advice} and run again. Earlier folds are kept.",
            ) from error

    def _path(self, fold: int) -> Path:
        return self._folder / f"fold-{fold:04d}.parquet"

    def _check_path(self, fold: int) -> Path:
        return self._folder / f"check-{fold:04d}.json"


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


def run_here(backtest: Backtest, done: Mapping[int, Fold], take: Callable[[Refit, Fold], None]) -> None:
    """Run the missing refits in threads of this process; the calling thread passes each result to ``take``, in order.

    Planning of later refits overlaps with fitting.
    """
    running: deque[tuple[Refit, Future[Fold]]] = deque()

    def take_first() -> None:
        refit, fold = running.popleft()
        take(refit, fold.result())

    # One limit around all fits: set by each fit, it would be lifted by the first to finish.
    with threadpool_limits(limits=THREADS), ThreadPoolExecutor(MAX_CONCURRENT_FITS, thread_name_prefix="refit") as pool:
        try:
            for refit in backtest.plan(done):
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
    checkpoint: Path | None = None,
    explain: int = 0,
    full: bool = True,
    watch: bool = True,
    engine: Engine | None = None,
) -> BacktestResult:
    """Replay the test period: at every refit, fit all models on the past and score until the next refit.

    A refit at R uses rows whose labels are complete (decision time + gap + horizon) and known by R. Its training
    window ends gap + horizon before R, and it scores decisions from R on. The result is bit-for-bit reproducible, also
    when resumed, and the same with every ``engine``.

    ``checkpoint``: folder for finished folds and fitted learners. A later run with the same inputs and code reuses the
    folds; parameters of the evaluation alone do not invalidate them. A run with another profile or other ensemble
    members reuses the learners. Stale checkpoints are removed when all folds are done.
    ``explain``: number of alerts of ``models.profile`` to explain in each fold, riskiest first; 0: none.
    ``full``: compare all models, sliding and trained once; False: only the baselines and what the profile needs. The
    profile's predictions are the same in both cases.
    ``watch``: check for drift before each fold.
    ``engine``: runs the refits; default: threads of this process. Other engines read the matrix from its folder.
    Raises ``InputError`` if no training window fits, the test period is empty or starts too early, a model name is
    unknown, or no refit has both classes. A single refit that lacks a class falls back to the last fitted models (or,
    before any, to ``history_count``) and is listed in ``skipped``.
    """
    fits = None if checkpoint is None else checkpoint.resolve() / f"fits-{digest_of()}"
    setup = BacktestSetup(training, models, backtest, seed, explain, full, fits)
    backtest_run = Backtest(matrix, setup)
    store, total = None, len(backtest_run.schedule.refits_ms)
    if checkpoint is not None:
        content: dict[str, Any] = {
            "training": training.model_dump(mode="json"),
            "models": models.model_dump(mode="json", exclude={"precision_targets"}),
            "backtest": backtest.model_dump(mode="json", exclude={"bootstrap", "cooldown"}),
        }
        if training.prior is not None:
            content["prior"] = load_prior(training.prior).card.sha256
        digest = digest_of(matrix=backtest_run.matrix.digest, seed=seed, explain=explain, full=full, **content)
        store = FoldStore(checkpoint.resolve(), digest)
    stored_folds = {} if store is None else {fold: store.load(fold) for fold in range(total)}
    done = {fold: stored for fold, stored in stored_folds.items() if stored is not None}

    def report() -> None:
        if progress is not None:
            progress(len(done), total, "refits")

    def take(refit: Refit, result: Fold) -> None:
        if store is not None:
            store.save(refit.fold, result)
        done[refit.fold] = result
        check_drift()
        pa.default_memory_pool().release_unused()  # otherwise the allocator holds on to memory that the fit freed
        report()

    def check_drift() -> None:
        while watch and (number := len(drift)) < total and all(fold in done for fold in range(number)):
            stored = None if store is None else store.load_check(number)
            drift.append(
                backtest_run.check_drift([done[fold] for fold in range(number)]) if stored is None else stored[0]
            )
            if store is not None and stored is None:
                store.save_check(number, drift[number])

    drift: list[CheckFindings | None] = []
    check_drift()
    report()
    if engine is None:
        run_here(backtest_run, done, take)
    else:
        run_refits(engine, RefitTask.of(matrix, setup), list(backtest_run.plan(done)), take)
    folds = [done[fold] for fold in range(total)]
    if store is not None and fits is not None:
        store.forget_others(keep=fits)
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
    return BacktestResult(
        predictions=predictions,
        folds=fold_frame(folds, backtest_run.schedule, backtest_run.rows, full=full),
        k=backtest_run.k,
        drain_reach=reach,
        horizons=horizon_maps([fold.facts["horizons"] for fold in folds]),
        skipped=skipped_of(folds, backtest_run.schedule),
        models=backtest_run.names,
        drift=tuple(drift),
        reasons=alert_reasons(backtest_run.matrix, [reason for fold in folds for reason in fold.facts["reasons"]]),
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
