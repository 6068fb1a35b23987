"""How much callers may ask for: requests in a time, requests and jobs at a time, and under which host names."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar

from telemetry.collect.remote_write.problems import Refused

Result = TypeVar("Result")
RequestClass = Literal["anonymous", "read", "write", "page"]
"""Who asks: ``anonymous`` shows no token that holds where one is asked for, ``page`` is a person with a browser."""

_MOST: Final = 20_000
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")
_REMEMBERED: Final = 64


class ClassLimits:
    """Requests at a time, each class by itself: a flood of one takes nothing from the others."""

    def __init__(self, limits: Mapping[RequestClass, int], retry_after_s: int) -> None:
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._active: Counter[RequestClass] = Counter()

    @contextmanager
    def place(self, who: RequestClass) -> Iterator[None]:
        """Hold a place for a request.

        Raises ``Refused``: 503, if all of the class are taken.
        """
        if self._active[who] >= self._limits[who]:
            raise Refused(503, "too many requests at a time", "concurrency", retry_after_s=self._retry_after_s)
        self._active[who] += 1
        try:
            yield
        finally:
            self._active[who] -= 1


class RateLimit:
    """Token buckets. Lives in the event loop.

    ``per_s``: requests a second in the long run.
    ``burst``: requests at once after a rest.
    ``monotonic``: seconds that never go back.

    At most 20,000 callers are remembered; the one that was not heard for longest is forgotten first, which gives it a
    full bucket again.
    """

    def __init__(self, per_s: float, burst: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        if per_s <= 0 or burst < 1:
            raise ValueError(f"{per_s} requests a second with bursts of {burst}: give a positive rate and at least 1")
        self.refused = 0
        self._per_s = per_s
        self._burst = burst
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what was left, and when

    def wait_s(self, caller: str) -> float:
        """Take one request of a caller.

        Returns: 0: it is let through. Else it is not, and this is after how many seconds the next would be.
        """
        now_s = self._monotonic()
        left, then_s = self._buckets.pop(caller, (self._burst, now_s))
        left = min(self._burst, left + (now_s - then_s) * self._per_s)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now_s)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        if allowed:
            return 0.0
        self.refused += 1
        return (1 - left) / self._per_s


class AllowedHosts:
    """Tells whether a request was meant for this service. Lives in the event loop.

    A page from anywhere may have its own name resolve to 127.0.0.1 (DNS rebinding) and read what listens there; the
    name stands in the request's ``Host``, which the page cannot change. An address cannot be rebound.
    ``names``: names beside ``localhost``, such as that of a proxy before the service, without port.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._seen: set[str] = set()

    def allows(self, header: str | None) -> bool:
        """Tell whether a ``Host`` header names this service; none at all comes from no browser."""
        if header is None or header in self._seen:
            return True
        form = _HOST.fullmatch(header)
        if form is None or not self._own(form.group(1).strip("[]").lower().rstrip(".")):
            return False
        if len(self._seen) < _REMEMBERED:
            self._seen.add(header)
        return True

    def _own(self, name: str) -> bool:
        if name == "localhost" or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class ThreadWork:
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
