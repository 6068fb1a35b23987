"""The execution engine of long jobs: the cores of this machine, or (:mod:`pipeline.dask_engine`) a cluster.

Tasks share nothing but files, and a task that is run twice writes the same bytes twice. So who runs it, where, and how
often does not show in what comes out.
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
"""Folder of the rooms."""


@functools.cache
def source_digest(*rooms: str, root: Path = ROOT) -> str:
    """Return the SHA-256 of the source files of rooms: what other code made is not the same."""
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
        """Run a function over items, in any order; the first error ends it.

        ``job``: survives being sent to another machine, as its items and results do; may be run again for an item whose
        machine was lost.
        ``on_result``: called in this process with an item and its result, once for each item, as they come in.
        ``max_workers``: concurrent items in one process of this machine; what it holds in memory is counted with it.
        Machines of a cluster have as many threads as their owner gave them.
        """

    def everywhere(self, job: Callable[[], None]) -> None:
        """Call a function once in each process that runs tasks; one that cannot be reached is left out."""


class LocalEngine:
    """Runs tasks in threads of this process, as many as there are cores."""

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
