"""Fits on a Dask cluster: LightGBM and XGBoost over all workers at once, every other learner on one of them.

``xgboost.dask`` and ``lightgbm.dask`` do the fits; their workers talk to each other past Dask, on connections of their
own that nothing encrypts: see ``docs/scale.md``. Neither library goes on without a worker that it began with, so a fit
that loses one begins anew on those that are left.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import io
import operator
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightgbm
import xgboost

from features.engine import Result
from features.errors import InputError
from features.matrix.matrix import FeatureMatrix
from models.cascade import CascadeEnsemble
from models.config import ModelsSection
from models.fits import FitRows, RowFits, Told
from models.ranking import Ints
from models.spread import (
    CascadeTask,
    FitTask,
    OneFit,
    ShareTask,
    SpreadOrder,
    can_spread,
    class_factors,
    classifier_of,
    deal,
    most_shares,
    take_lightgbm,
    take_xgboost,
)
from pipeline.dask_engine import CONNECT_S, DaskEngine, within
from telemetry.atomic import disk_errors

RESTARTS = 3
"""How often a fit that lost a worker begins anew."""

EXCHANGE_S = 1800
"""How long workers wait for each other within a fit: as long as one may take for what another has done already."""

NOTICE_S = 10.0
"""How long the scheduler may take to notice that a worker is gone, when a fit has broken off."""

END_S = 20.0
"""How long a fit that was given up may go on in a worker; then that worker is ended."""

_POLL_S = 0.5
_BROKEN = re.compile(r"socket|connect|\bport\b|allreduce|allgather|broadcast|tracker|\bEOF\b|worker", re.IGNORECASE)
_KEYS = ("_train_part-", "fn-")
"""How the libraries name their tasks."""


class DaskFits:
    """Fits on a cluster; see :class:`models.fits.Fits`.

    Results of learners that are fitted on one worker equal this process's bit for bit. A model fitted over several is
    the same again for the same number of workers with the same number of threads, and close to this process's:
    ``docs/scale.md`` says how close.

    ``scratch``: folder for the rows of a fit, which all machines see and nobody else uses; removed after each fit.
    """

    def __init__(self, engine: DaskEngine, matrix: FeatureMatrix, models: ModelsSection, scratch: Path) -> None:
        self._engine, self._matrix, self._models, self._scratch = engine, matrix, models, scratch

    @contextlib.contextmanager
    def on(self, rows: FitRows) -> Iterator[RowFits]:
        """Write the rows of a fit for all machines; see :meth:`models.fits.Fits.on`."""
        shutil.rmtree(self._scratch, ignore_errors=True)  # left behind by a command that was killed
        try:
            with disk_errors(self._scratch):
                order = SpreadOrder.write(self._scratch, self._matrix.path, self._matrix.digest, self._models, rows)
            yield _DaskRowFits(self._engine, order, rows, columns=len(self._matrix.columns))
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)


class _DaskRowFits:
    def __init__(self, engine: DaskEngine, order: SpreadOrder, rows: FitRows, *, columns: int) -> None:
        self._engine, self._order, self._rows, self._columns = engine, order, rows, columns
        self._features = len(order.open().columns)  # more than the matrix's own where rows hold raw windows

    def learners(self, unfitted: Mapping[str, Any], told: Told | None = None) -> dict[str, Any]:
        fitted: dict[str, Any] = {}

        def take(name: str, done: Any) -> None:
            fitted[name] = done
            if told is not None:
                told(name)

        alone = [OneFit(name, learner) for name, learner in unfitted.items() if not can_spread(learner)]
        self._engine.each(FitTask(self._order), alone, lambda fit, done: take(fit.name, done), most=1)
        for name, learner in unfitted.items():
            if can_spread(learner):
                take(name, self._spread(name, learner))
        return {name: fitted[name] for name in unfitted}

    def cascade(
        self,
        unfitted: CascadeEnsemble,
        *,
        first: Any,
        held: Ints | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> CascadeEnsemble:
        task = CascadeTask.of(self._order, unfitted, first, held, thresholds)
        fitted: list[CascadeEnsemble] = []
        self._engine.each(task, ["cascade"], lambda _name, done: fitted.append(done), most=1)
        stages = fitted[0].stages_
        stages[0] = (stages[0][0], first)  # the very one, not its copy: a bundle saves it once
        return fitted[0]

    def _spread(self, name: str, learner: Any) -> Any:
        job = ShareTask(self._order, self._columns, class_factors(learner, self._rows.label))
        for _ in range(RESTARTS + 1):
            self._engine.check_workers()
            with Team(self._engine, most_shares(self._rows.label, len(self._engine.workers))) as team:
                try:
                    return self._fit_over(team, job, name, learner)
                except BrokenTeamError as error:
                    why = str(error)
        raise InputError(
            f"the fit of {name} was begun {RESTARTS + 1} times and lost a worker each time; the last time {why}",
            self._engine.place,
            "Look into the workers' logs; most often they need more memory. Or use --engine local.",
        )

    def _fit_over(self, team: Team, job: ShareTask, name: str, learner: Any) -> Any:
        sizes = [len(each) for each in deal(len(self._rows.label), team.size)]
        X, y, weight = team.arrays(job, sizes, self._columns)
        own = classifier_of(learner)
        if isinstance(own, xgboost.XGBClassifier):
            host = "127.0.0.1" if self._engine.started_workers else None
            booster = team.run(name, lambda: _train_xgboost(team.client, own, X, y, weight, host))
            return take_xgboost(learner, booster, self._features)
        fitted = team.run(name, lambda: _train_lightgbm(team.client, own, X, y, weight))
        return take_lightgbm(learner, fitted, self._features)


class BrokenTeamError(Exception):
    """A fit that broke off because workers no longer reach each other."""


class Team:
    """The workers of one fit, each with its share of the rows; a context manager that lets go of them.

    Their order is that of the ranks which XGBoost gives them, so that the same share always has the same rank: sums
    over workers are then taken in the same order.
    """

    def __init__(self, engine: DaskEngine, most: int) -> None:
        self._engine = engine
        self.client = engine.client
        names = engine.names
        self._members = sorted(names, key=lambda address: f"[xgboost.dask-{names[address]}]:{address}")[:most]
        if engine.started_workers:
            with contextlib.suppress(Exception):  # one that was just lost shows soon enough
                within(CONNECT_S, lambda: self.client.run(drop_stdout, workers=self._members))
        self._futures: list[Any] = []
        self._running: concurrent.futures.Future[Any] | None = None

    @property
    def size(self) -> int:
        """How many workers."""
        return len(self._members)

    def arrays(self, job: ShareTask, sizes: Sequence[int], columns: int) -> tuple[Any, Any, Any]:
        """Have each worker read its share.

        ``sizes``: rows of each share.
        Raises ``BrokenTeamError`` if a worker is lost.
        Raises ``InputError`` if one cannot read.
        """
        shares = [
            self.client.submit(job, number, self.size, workers=[member], allow_other_workers=False, pure=False)
            for number, member in enumerate(self._members)
        ]
        self._futures += shares
        parts = [
            [
                self.client.submit(
                    operator.itemgetter(at), share, workers=[member], allow_other_workers=False, pure=False
                )
                for share, member in zip(shares, self._members, strict=True)
            ]
            for at in range(3)
        ]
        self._futures += [each for part in parts for each in part]
        deadline = time.monotonic() + EXCHANGE_S
        while late := [
            member for number, member in enumerate(self._members) if not all(part[number].done() for part in parts)
        ]:
            if time.monotonic() >= deadline:
                raise InputError(
                    f"a worker has not read its rows within {EXCHANGE_S} seconds",
                    f"worker {', '.join(late)}",
                    "Look whether it is busy with something else, or its file system hangs.",
                )
            self._look()
            time.sleep(_POLL_S / 5)
        self._look()
        for future in self._futures:
            if future.status == "error":
                error = future.exception(timeout=CONNECT_S)
                if isinstance(error, importlib.import_module("distributed").KilledWorker):
                    raise BrokenTeamError(f"a worker went while it read its rows: {error}") from error
                raise error
        return tuple(
            _chunked(part, [(size, columns) if at == 0 else (size,) for size in sizes], dtype)
            for at, (part, dtype) in enumerate(zip(parts, ("float32", "int64", "float64"), strict=True))
        )

    def run(self, name: str, job: Callable[[], Result]) -> Result:
        """Run a library's trainer while all workers are there.

        ``job``: blocks until the fit is done.
        Raises ``BrokenTeamError`` if a worker is lost, or workers do not reach each other.
        Raises ``InputError`` if the library gives up for another reason.
        """
        answer: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._running = answer

        def blocking() -> None:
            try:
                with self.client.as_current():
                    answer.set_result(job())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=blocking, daemon=True).start()
        # XGBoost's tracker and LightGBM tell on stdout who has joined; a verb's stdout is its result
        with contextlib.redirect_stdout(io.StringIO()):
            while not concurrent.futures.wait([answer], timeout=_POLL_S).done:
                self._look()
        error = answer.exception()
        if error is None:
            return answer.result()
        noticed = time.monotonic() + NOTICE_S
        while time.monotonic() < noticed:
            self._look()
            time.sleep(_POLL_S)
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if _BROKEN.search(first):  # the lines below are a stack with paths, in which any word may stand
            raise BrokenTeamError(f"workers did not reach each other: {first}") from error
        raise InputError(
            f"{name} could not be fitted over {self.size} workers: {first}",
            f"parameter models.settings.{name}",
            "Correct the setting that is named, or use --engine local.",
        ) from error

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def _look(self) -> None:
        gone = set(self._members) - set(self._engine.workers)
        if gone:
            raise BrokenTeamError(f"{len(gone)} of {self.size} workers went: {', '.join(sorted(gone))}")

    def _let_go(self) -> None:
        """End workers that go on with a fit whose other members are gone; forget the shares.

        Futures are released, not cancelled: Dask's scheduler drops a client that cancels what has dependents.
        """
        running, self._running = self._running, None
        if running is not None and not (running.done() and running.exception() is None):
            deadline = time.monotonic() + END_S
            while (busy := self._busy()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if busy:
                with contextlib.suppress(TimeoutError):
                    within(CONNECT_S, lambda: self.client.run(end_process, workers=busy, on_error="ignore"))
            concurrent.futures.wait([running], timeout=NOTICE_S)
            self._leave_networks()
        del running
        gc.collect()  # what was raised in the library still refers to the shares, in a circle
        for future in self._futures:
            future.release()
        self._futures.clear()

    def _leave_networks(self) -> None:
        """Have LightGBM forget the broken network in each thread of the members: a fit of one would still use it."""
        threads = self._engine.workers
        tasks = [
            self.client.submit(leave_network, workers=[member], allow_other_workers=False, pure=False)
            for member in self._members
            for _ in range(threads.get(member, 0))
        ]
        self._futures += tasks
        deadline = time.monotonic() + NOTICE_S
        while not all(task.done() for task in tasks) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)

    def _busy(self) -> list[str]:
        """List members in which a task of the libraries still runs, whatever the scheduler thinks of it."""
        there = sorted(set(self._members) & set(self._engine.workers))
        try:
            found = within(CONNECT_S, lambda: self.client.run(running_tasks, workers=there, on_error="ignore"))
        except Exception:
            return []
        return [member for member, keys in found.items() if any(str(key).startswith(_KEYS) for key in keys)]


def running_tasks(dask_worker: Any) -> list[str]:
    """List the keys of the tasks that run in a worker's threads; Dask hands the worker in."""
    return [str(key) for key in list(dask_worker.active_threads.values())]


def leave_network() -> None:
    """Forget LightGBM's network in this thread, and hold the thread while others are told the same."""
    lightgbm.basic._LIB.LGBM_NetworkFree()
    time.sleep(0.2)


def drop_stdout() -> None:
    """Drop what a process of ours prints, LightGBM's greetings: its stdout is the command's, which holds a result."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def end_process() -> None:
    """End the worker's process: a thread inside a library cannot be ended by itself. A nanny starts a new one."""
    os._exit(1)


def _train_xgboost(
    client: Any, learner: xgboost.XGBClassifier, X: Any, y: Any, weight: Any, host: str | None
) -> xgboost.Booster:
    """Fit over the workers that hold the chunks; they use the threads that their owner gave them.

    ``host`` is where the tracker listens; None: on the address by which the scheduler's machine is known.
    """
    dask_trainer = importlib.import_module("xgboost.dask")
    config = importlib.import_module("xgboost.collective").Config(
        timeout=EXCHANGE_S, tracker_timeout=EXCHANGE_S, tracker_host_ip=host
    )
    params = {key: value for key, value in learner.get_xgb_params().items() if key not in ("n_jobs", "nthread")}
    rows = dask_trainer.DaskQuantileDMatrix(
        client, X, y, weight=weight, missing=learner.missing, max_bin=learner.max_bin
    )
    done = dask_trainer.train(
        client, params, rows, num_boost_round=learner.get_num_boosting_rounds(), coll_cfg=config, verbose_eval=False
    )
    return done["booster"]


def _train_lightgbm(
    client: Any, learner: lightgbm.LGBMClassifier, X: Any, y: Any, weight: Any
) -> lightgbm.LGBMClassifier:
    """Fit over the workers that hold the chunks; they use the threads that their owner gave them."""
    trainer = importlib.import_module("lightgbm.dask")
    settings = {**learner.get_params(), "class_weight": None, "time_out": EXCHANGE_S // 60}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Parameter n_jobs will be ignored", category=UserWarning)
        made = trainer.DaskLGBMClassifier(client=_InOrder(client), **settings)
        return made.fit(X, y, sample_weight=weight).to_local()


class _InOrder:
    """A client that tells where parts lie in the order of the parts.

    Dask's tells it in the order of a set of strings, another one in each process, and LightGBM numbers its workers by
    it: which of them finds which feature's bin edges, and with them the model, would change from run to run.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def who_has(self, futures: Sequence[Any]) -> dict[Any, Any]:
        found = self._client.who_has(futures)
        return {future.key: found[future.key] for future in futures}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _chunked(futures: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtype: str) -> Any:
    dask, array = importlib.import_module("dask"), importlib.import_module("dask.array")
    chunks = zip(futures, shapes, strict=True)
    return array.concatenate([array.from_delayed(dask.delayed(each), shape, dtype) for each, shape in chunks])
