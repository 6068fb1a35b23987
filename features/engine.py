"""Execution engines for long jobs: threads on this machine or a Dask cluster (:mod:`pipeline.dask_engine`).

Tasks share nothing but files and are idempotent: running one twice writes the same bytes. Results therefore do not
depend on the engine, the worker or retries.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


ROOT = Path(__file__).resolve().parents[1]
"""Parent folder of the packages."""


@functools.cache
def source_digest(*rooms: str, root: Path = ROOT) -> str:
    """Return the SHA-256 of the packages' source files, to invalidate results of other code."""
    total = hashlib.sha256()
    for path in sorted(path for room in rooms for path in (root / room).rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


class Engine(Protocol):
    """Runs one function over many items."""

    def run(
        self,
        job: Callable[[Item], Result],
        items: Sequence[Item],
        on_result: Callable[[Item, Result], None],
        *,
        max_workers: int,
    ) -> None:
        """Call a function on every item, in any order; the first error aborts the run.

        ``job``: serializable, as are items and results; runs again for an item whose worker was lost.
        ``on_result``: called in this process, once per item, in order of completion.
        ``max_workers``: concurrent items on this machine, limited by memory. Cluster workers use their own thread
        count.
        """

    def everywhere(self, job: Callable[[], None]) -> None:
        """Call a function once in each worker process; unreachable workers are skipped."""


class LocalEngine:
    """Runs tasks in threads of this process, at most one per core."""

    def run(
        self,
        job: Callable[[Item], Result],
        items: Sequence[Item],
        on_result: Callable[[Item, Result], None],
        *,
        max_workers: int,
    ) -> None:
        """See :meth:`Engine.run`."""
        with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, max_workers)) as pool:
            running = {pool.submit(job, item): item for item in items}
            try:
                for future in as_completed(running):
                    on_result(running[future], future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def everywhere(self, job: Callable[[], None]) -> None:
        """See :meth:`Engine.everywhere`."""
        job()
