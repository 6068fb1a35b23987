"""Work that would hold up the event loop: done in threads, a bounded number of jobs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from telemetry.receiving.problems import Refused

Result = TypeVar("Result")


class Work:
    """A few threads with a bounded queue."""

    def __init__(self, name: str, threads: int, waiting: int, retry_after_s: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = waiting
        self._retry_after_s = retry_after_s
        self._jobs: set[Future[Any]] = set()

    async def run(self, job: Callable[[], Result]) -> Result:
        """Do a job in a thread and wait for it.

        Raises ``Refused``: 503, if too many jobs wait.

        A job whose request has ended goes on counting until it is done: threads cannot be stopped.
        """
        if len(self._jobs) >= self._most:
            raise Refused(503, "too much work waits", "work", retry_after_s=self._retry_after_s)
        future = self._executor.submit(job)
        self._jobs.add(future)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda done: _tell(loop, self._jobs, done))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no further job; those that nobody has begun are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _tell(loop: asyncio.AbstractEventLoop, jobs: set[Future[Any]], done: Future[Any]) -> None:
    try:
        loop.call_soon_threadsafe(jobs.discard, done)
    except RuntimeError:  # the loop has ended
        jobs.discard(done)
