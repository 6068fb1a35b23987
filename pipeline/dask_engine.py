"""Tasks on a Dask cluster: on workers of this machine, or on a cluster that somebody else started.

Nothing but tasks, their numbers and small results travel through Dask; what is large goes through a file system that
all machines see. Dask's own wire is pickle, so whoever reaches a scheduler can run code as its user: workers started
here speak TLS with a certificate made for the occasion; for other clusters see ``docs/scale.md``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import queue
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from features.engine import Item, Result
from features.errors import InputError

NEEDED = ("dask", "distributed")
"""Packages of the extra."""

CONNECT_S = 30.0
"""How long a scheduler may take to answer."""

FETCH_S = 30.0
"""How long the result of a finished task may take, before it is asked whether the cluster is still there.

A worker that is lost takes the results on it along, and a scheduler tries to reach one as long as
``distributed.comm.timeouts.connect`` says (30 seconds) before it runs the task again.
"""

NO_WORKER_S = 120.0
"""How long a cluster may be without any worker: long enough for a machine to start again."""

_POLL_S = 2.0
_ROOMS = ("telemetry", "policy", "features", "models", "evaluation", "pipeline")
_COMPARED = (
    "numpy", "pandas", "pyarrow", "numba", "scipy", "scikit-learn", "lightgbm", "xgboost-cpu", "torch", "distributed",
)  # fmt: skip


def require_dask() -> None:
    """Refuse to go on without Dask.

    Raises ``InputError`` if a package of the extra is not installed.
    """
    absent = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if absent:
        raise InputError(
            f"the engine dask needs {' and '.join(absent)}, which predrain does not install by itself",
            "option --engine",
            "Run: pip install 'predrain[dask]', here and on the machines of the cluster.",
        )


class DaskEngine:
    """Runs tasks on a Dask cluster; a context manager, which ends what it started.

    A task whose worker is lost is run again on another one, until it has lost as many as the scheduler's
    ``distributed.scheduler.allowed-failures`` says (3). A task that fails by an error is not: it would fail again.

    ``address``: scheduler of a running cluster, ``tcp://HOST:PORT`` or ``tls://HOST:PORT``; None: start workers here.
    ``workers``: worker processes to start here; default: as many as there are cores.
    ``threads``: threads of each worker started here; default: the cores shared among them.
    Raises ``InputError`` if Dask is not installed, the scheduler does not answer or has no workers, or a worker runs
    other versions.
    """

    in_process = False

    def __init__(self, address: str | None = None, workers: int | None = None, threads: int | None = None) -> None:
        require_dask()
        self._address = address
        self._closing = contextlib.ExitStack()
        try:
            self._client = self._connect(address, workers or os.cpu_count() or 1, threads)
            self.check_workers()
        except BaseException:
            self._closing.close()
            raise

    def run(
        self,
        job: Callable[[Item], Result],
        items: Sequence[Item],
        on_result: Callable[[Item, Result], None],
        *,
        max_workers: int,  # noqa: ARG002 - a cluster's machines have the threads that their owner gave them
    ) -> None:
        """Run a function over items; see :meth:`features.engine.Engine.run`."""
        if not items:
            return
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        run = secrets.token_hex(8)
        name = _name_of(job)
        futures = {
            self._client.submit(job, item, key=f"{name}-{run}-{number}", pure=False): item
            for number, item in enumerate(items)
        }
        try:
            for future in futures:
                future.add_done_callback(done.put)
            watch = _Watch(self._client, self.place)
            for _ in range(len(futures)):
                future = self._next(done, watch)
                on_result(futures[future], self._result(future, watch, name, futures[future]))
                future.release()
        finally:
            with contextlib.suppress(Exception):  # a cluster that is gone has nothing to cancel
                with_timeout(
                    CONNECT_S, lambda: self._client.cancel([future for future in futures if not future.done()])
                )

    def everywhere(self, job: Callable[[], Any]) -> None:
        """Call a function once in each process; see :meth:`features.engine.Engine.everywhere`."""
        with contextlib.suppress(Exception):
            with_timeout(CONNECT_S, lambda: self._client.run(job, on_error="ignore"))

    def close(self) -> None:
        """Leave the cluster; end it if it was started here."""
        self._closing.close()

    def __enter__(self) -> DaskEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def started_workers(self) -> bool:
        """Whether the workers were started here."""
        return self._address is None

    @property
    def client(self) -> Any:
        """Dask's own client."""
        return self._client

    @property
    def workers(self) -> Mapping[str, int]:
        """Threads of each worker, by its address."""
        found = self._asked(self._client.nthreads)
        return {str(address): int(threads) for address, threads in found.items()}

    @property
    def names(self) -> Mapping[str, str]:
        """Name that each worker was given, by its address."""
        found = self._asked(lambda: self._client.scheduler_info(n_workers=-1))["workers"]
        return {str(address): str(each["name"]) for address, each in found.items()}

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return with_timeout(CONNECT_S, question)
        except Exception as error:
            raise _lost(self.place) from error

    @property
    def place(self) -> str:
        """Which cluster, in words."""
        return "workers of this machine" if self._address is None else f"cluster at {self._address}"

    def _connect(self, address: str | None, workers: int, threads: int | None) -> Any:
        distributed = importlib.import_module("distributed")
        self._closing.enter_context(_silenced())
        target: Any = address
        if address is None:
            folder = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="predrain-dask-"))
            try:
                cluster = distributed.LocalCluster(
                    n_workers=workers,
                    threads_per_worker=threads or max(1, (os.cpu_count() or 1) // workers),
                    processes=True,
                    host="127.0.0.1",
                    security=True,
                    dashboard_address="127.0.0.1:0",  # None would take a fixed port
                    worker_dashboard_address="127.0.0.1:0",
                    local_directory=folder,
                    memory_limit=0,  # what tasks hold is theirs, not Dask's to spill
                    silence_logs=logging.CRITICAL,
                )
            except (OSError, RuntimeError, TimeoutError) as error:
                raise InputError(
                    f"workers could not be started: {error}",
                    f"option --dask-workers {workers}",
                    "Look whether this machine has memory and processes left for them, or use --engine local.",
                ) from error
            target = self._closing.enter_context(cluster)
        elif re.fullmatch(r"(tcp|tls)://[^\s/]+:\d{1,5}", address) is None:
            raise InputError(
                f"{address!r} is no address of a Dask scheduler",
                "option --dask-address",
                "Write it as tcp://HOST:PORT or tls://HOST:PORT.",
            )
        try:
            client = distributed.Client(target, timeout=CONNECT_S, set_as_default=False)
        except TypeError as error:  # tls:// without certificates
            raise InputError(
                f"the scheduler cannot be reached by TLS: {error}",
                f"option --dask-address {address}",
                "Name the certificates in DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY.",
            ) from error
        except (OSError, ValueError, TimeoutError) as error:
            raise InputError(
                f"no Dask scheduler answers: {error}",
                f"option --dask-address {address}",
                "Check the address (tcp://HOST:PORT or tls://HOST:PORT) and that the scheduler runs.",
            ) from error
        return self._closing.enter_context(client)

    def check_workers(self) -> None:
        """Wait for a worker, and compare what runs here with what runs there, worker by worker.

        Raises ``InputError`` if none comes, one cannot run predrain, or runs another version of something that results
        depend on.
        """
        watch = _Watch(self._client, self.place)
        while not watch.any_worker():
            time.sleep(min(_POLL_S, 0.2))
        for last in (False, False, True):
            try:
                found = with_timeout(CONNECT_S, lambda: self._client.run(running_versions))
                break
            except Exception as error:
                if last:
                    raise InputError(
                        f"a worker cannot run predrain: {error or 'it does not answer'}",
                        self.place,
                        "Install predrain and its libraries there, in the same versions as here.",
                    ) from error
                time.sleep(_POLL_S)  # one that was just lost is still on the scheduler's list
        refuse_other_versions(found)

    def _next(self, done: queue.SimpleQueue[Any], watch: _Watch) -> Any:
        while True:
            try:
                return done.get(timeout=_POLL_S)
            except queue.Empty:
                watch.any_worker()

    def _result(self, future: Any, watch: _Watch, name: str, item: Any) -> Any:
        distributed = importlib.import_module("distributed")

        try:
            while True:
                try:
                    return future.result(timeout=FETCH_S)
                except TimeoutError:  # a task's own error, or its worker was lost with the result: it is run again
                    if future.status == "error":
                        raise
                    watch.any_worker()
        except distributed.KilledWorker as error:
            raise InputError(
                f"every worker that took {name} {item} was lost on the way",
                self.place,
                "Look into the workers' logs; most often they need more memory, or fewer threads each.",
            ) from error
        except distributed.CancelledError as error:
            raise _lost(self.place) from error


class _Watch:
    """Tells whether a cluster is still there."""

    def __init__(self, client: Any, place: str) -> None:
        self._client, self.place = client, place
        self._seen = time.monotonic()

    def any_worker(self) -> bool:
        """Whether there is a worker; an error where there has been none for too long."""
        try:
            workers = with_timeout(CONNECT_S, self._client.nthreads)
        except Exception as error:
            raise _lost(self.place) from error
        if workers:
            self._seen = time.monotonic()
            return True
        if time.monotonic() - self._seen > NO_WORKER_S:
            raise InputError(
                f"there has been no worker for {NO_WORKER_S:.0f} seconds",
                self.place,
                "Start workers and run again.",
            )
        return False


def refuse_other_versions(found: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse workers that run something else than this process.

    ``found``: what :func:`running_versions` gave in each worker, by its address.
    Raises ``InputError`` if one differs.
    """
    here = running_versions()
    for worker, versions in found.items():
        other = [
            f"{name} {versions.get(name)} instead of {here[name]}" for name in here if versions.get(name) != here[name]
        ]
        if other:
            raise InputError(
                f"a worker runs {', '.join(other)}",
                f"worker {worker}",
                "Install the same versions on every machine: results could not be the same otherwise.",
            )


@functools.cache
def running_versions() -> dict[str, str]:
    """Give the versions of everything that results depend on, our own code's digest among them."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in _COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    total = hashlib.sha256()
    top = Path(__file__).resolve().parents[1]
    for room in _ROOMS:
        for path in sorted((top / room).rglob("*.py")):
            total.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {**found, "predrain's code": total.hexdigest()[:12]}


def with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Give what a call gives, or a TimeoutError: Dask's own calls wait for ever for a machine that hangs."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout=seconds)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep Dask's own log off the terminal: what a user has to know comes as an error of ours."""
    found = [each for name in ("distributed", "distributed.client") for each in logging.getLogger(name).handlers]
    before = [(handler, handler.level) for handler in found]
    for handler, _ in before:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in before:
            handler.setLevel(level)


def _lost(place: str) -> InputError:
    return InputError("the scheduler was lost", place, "Start it again and run again.")


def _name_of(job: Any) -> str:
    job = getattr(job, "func", job)  # of a partial
    return str(getattr(job, "name", None) or getattr(job, "__name__", None) or type(job).__name__)
