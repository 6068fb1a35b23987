"""Runs tasks on a Dask cluster: on local workers, or on an existing cluster.

Only tasks and small results travel through Dask; large data goes through a file system that all machines share. Dask's
protocol uses pickle, so anyone who can connect to a scheduler can run code as its user: local workers use TLS with an
ephemeral certificate; for other clusters see ``docs/scale.md``.
"""

import contextlib
import logging
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Self

from features.engine import Item, Result, source_digest
from foundation.errors import InputError
from pipeline.tracking import library_versions

CONNECT_S = 30.0
"""Timeout for a response of the scheduler."""

NO_WORKER_S = 120.0
"""Maximum time without any worker: long enough for a machine to reboot."""

_POLL_S = 2.0
_ROOMS = ("foundation", "telemetry", "policy", "features", "models", "evaluation", "pipeline")
_COMPARED = (
    "numpy", "pandas", "pyarrow", "numba", "scipy", "scikit-learn", "lightgbm", "xgboost-cpu", "torch", "distributed",
)  # fmt: skip


class DaskEngine:
    """Runs tasks on a Dask cluster; a context manager that stops the workers it started.

    A task whose worker is lost is retried on another one, up to the scheduler's
    ``distributed.scheduler.allowed-failures`` (3). A task that raises is not retried: it would fail again.

    ``address``: scheduler of a running cluster, ``tcp://HOST:PORT`` or ``tls://HOST:PORT``; None: start local workers.
    ``workers``: number of local worker processes; default: one per core.
    Raises ``InputError`` if the scheduler does not respond or has no workers, or a worker runs other versions, and
    ``ModuleNotFoundError`` if Dask is not installed.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        self.place = "workers of this machine" if address is None else f"cluster at {address}"
        self._last_seen_s = time.monotonic()
        for name in ("distributed", "distributed.client"):  # users get an InputError instead
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with contextlib.ExitStack() as closing:
            target = closing.enter_context(_local_cluster(closing, workers)) if address is None else address
            self.client = closing.enter_context(_connected(target))
            self.check_workers()
            self._closing = closing.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Disconnect; stop the cluster if it was started here."""
        self._closing.close()

    def run(
        self,
        job: Callable[[Item], Result],
        items: Sequence[Item],
        on_result: Callable[[Item, Result], None],
        *,
        max_workers: int,
    ) -> None:
        """Run a function over items; see :meth:`features.engine.Engine.run`."""
        distributed = import_module("distributed")

        name = f"{_name_of(job)}-{secrets.token_hex(8)}"
        futures: dict[Any, Item] = {
            self.client.submit(job, item, key=f"{name}-{number}", pure=False): item for number, item in enumerate(items)
        }
        pending = set(futures)
        try:
            while pending:
                try:
                    with self.client.as_current():  # `wait` uses the current client
                        finished, pending = distributed.wait(pending, timeout=_POLL_S, return_when="FIRST_COMPLETED")
                except TimeoutError:
                    self.any_worker()
                    continue
                for future in finished:
                    try:
                        result = future.result(timeout=CONNECT_S)
                    except TimeoutError:
                        if future.status == "error":  # raised by the task
                            raise
                        pending.add(future)  # its worker was lost with the result: Dask reruns it
                        continue
                    on_result(futures[future], result)
                    future.release()
        except distributed.KilledWorker as error:
            raise InputError(
                f"every worker that ran {_name_of(job)} died ({error})",
                self.place,
                "Check the logs of the workers. Usually they need more memory, or fewer threads each.",
            ) from error
        except distributed.CancelledError as error:
            raise self._lost() from error
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self.client.cancel(list(pending))

    def everywhere(self, job: Callable[[], Any]) -> None:
        """Call a function once in each process; see :meth:`features.engine.Engine.everywhere`."""
        with contextlib.suppress(Exception):
            self.client.run(job, on_error="ignore")

    def check_workers(self) -> None:
        """Wait for a worker, and check that all workers run the same versions as this process.

        Raises ``InputError`` if no worker appears, or one cannot run predrain or runs another version of something that
        results depend on.
        """
        while not self.any_worker():
            time.sleep(0.2)
        try:
            by_worker = self.client.run(running_versions)
        except Exception as error:
            raise InputError(
                f"a worker cannot run predrain: {error or 'it does not respond'}",
                self.place,
                "Install predrain and its libraries there, in the same versions as here.",
            ) from error
        refuse_other_versions(by_worker)

    def any_worker(self) -> bool:
        """Return whether there is a worker.

        Raises ``InputError`` if there has been none for :data:`NO_WORKER_S`, or the scheduler is gone.
        """
        try:
            workers = self.client.nthreads()
        except Exception as error:
            raise self._lost() from error
        if workers:
            self._last_seen_s = time.monotonic()
        elif time.monotonic() - self._last_seen_s > NO_WORKER_S:
            raise InputError(
                f"no worker for {NO_WORKER_S:.0f} seconds",
                self.place,
                "Start workers and run again.",
            )
        return bool(workers)

    def _lost(self) -> InputError:
        return InputError("the connection to the Dask scheduler was lost", self.place, "Restart it, then run again.")


def _local_cluster(closing: contextlib.ExitStack, workers: int | None) -> Any:
    distributed = import_module("distributed")

    cores = os.cpu_count() or 1
    count = workers or cores
    try:
        return distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=max(1, cores // count),
            processes=True,
            host="127.0.0.1",
            security=True,
            dashboard_address="127.0.0.1:0",  # None would use a fixed port
            worker_dashboard_address="127.0.0.1:0",
            local_directory=closing.enter_context(tempfile.TemporaryDirectory(prefix="predrain-dask-")),
            memory_limit=0,  # tasks manage their own memory; Dask must not spill it
            silence_logs=logging.CRITICAL,
        )
    except (OSError, RuntimeError, TimeoutError) as error:
        raise InputError(
            f"workers could not be started: {error}",
            f"option --dask-workers {count}",
            "Check the memory and process limits of this machine, or use --engine local.",
        ) from error


def _connected(target: Any) -> Any:
    """Return a client of a local cluster, or of the one at an address."""
    distributed = import_module("distributed")

    location = f"option --dask-address {target}"
    if isinstance(target, str) and re.fullmatch(r"(tcp|tls)://[^\s/]+:\d{1,5}", target) is None:
        raise InputError(
            f"{target!r} is not the address of a Dask scheduler",
            location,
            "Write it as tcp://HOST:PORT or tls://HOST:PORT.",
        )
    try:
        return distributed.Client(target, timeout=CONNECT_S, set_as_default=False)
    except TypeError as error:  # tls:// without certificates
        raise InputError(
            f"the scheduler cannot be reached over TLS: {error}",
            location,
            "Give certificates by DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY.",
        ) from error
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(
            f"no Dask scheduler responds: {error}",
            location,
            "Check the address (tcp://HOST:PORT or tls://HOST:PORT) and that the scheduler is running.",
        ) from error


def refuse_other_versions(by_worker: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ``InputError`` if a worker runs other versions than this process."""
    local = running_versions()
    for worker, versions in by_worker.items():
        differing = [
            f"{name} {versions.get(name)} instead of {local[name]}"
            for name in local
            if versions.get(name) != local[name]
        ]
        if differing:
            raise InputError(
                f"a worker runs {', '.join(differing)}",
                f"worker {worker}",
                "Install the same versions on every machine: otherwise results differ.",
            )


def running_versions() -> dict[str, str]:
    """Return the versions that results depend on, including the digest of predrain's code."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python, **library_versions(_COMPARED), "predrain's code": source_digest(*_ROOMS)[:12]}


def _name_of(job: Any) -> str:
    job = getattr(job, "func", job)  # of a partial
    return str(getattr(job, "name", None) or getattr(job, "__name__", None) or type(job).__name__)
