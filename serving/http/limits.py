"""Limits of the service as settings: sizes, time, concurrency; worker threads with a bounded queue; host names."""

import asyncio
import ipaddress
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from foundation.server.problems import RequestRefused

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Limits of the service.

    ``decoded_bytes``: most memory of an Arrow table once its dictionaries are decoded.
    ``held_bytes``: most bytes of bodies in memory at a time; beyond it 503, but one body is always taken.
    ``concurrent_anonymous`` and so on: most requests at a time of callers without a token that holds, of others, and
    of pages; beyond it 503.
    ``scoring``: most requests at a time that wait for the model; one is scored at a time.
    ``head_timeout_s``: a connection whose request's head is not there by then is closed.
    ``work_timeout_s``: longest time of an answer after the body was received; then 503.
    ``stale_after_s``: ``/readyz`` fails when the decision is older than this, and the extender takes nothing from it;
    None: only when all scores have expired.
    ``extender_filter``: which nodes the extender removes: ``ledger``: those that the controller's newest decision keeps
    new work off; ``scores``: those of tier high.
    ``extender_max_share``: the largest share of the nodes that it removes, of the fleet and of each request; of few
    nodes, one.
    ``grace_s``: how long requests under way may take to end after SIGTERM.
    """

    body_bytes: int = 32 * MIB
    decoded_bytes: int = 64 * MIB
    held_bytes: int = 256 * MIB
    rows: int = 10_000
    concurrent_anonymous: int = 64
    concurrent_reads: int = 256
    concurrent_pages: int = 64
    scoring: int = 16
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    work_timeout_s: float = 30.0
    retry_after_s: int = 2
    poll_s: float = 1.0
    stale_after_s: float | None = None
    extender_filter: Literal["ledger", "scores"] = "scores"
    extender_max_share: float = 0.1
    grace_s: int = 20


Result = TypeVar("Result")

_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")


def is_own_host(header: str | None, names: Iterable[str] = ()) -> bool:
    """Tell whether a ``Host`` header names this service; none at all comes from no browser.

    A page from anywhere may have its own name resolve to 127.0.0.1 (DNS rebinding) and read what listens there; the
    name is in the request's ``Host``, which the page cannot change. An address cannot be rebound.
    ``names``: in addition to ``localhost``, such as that of a proxy before the service, without port.
    """
    if header is None:
        return True
    form = _HOST.fullmatch(header)
    name = "" if form is None else form.group(1).strip("[]").lower().rstrip(".")
    if name in ("localhost", *(host.lower().rstrip(".") for host in names)):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class ThreadWork:
    """A few threads with a bounded queue."""

    def __init__(self, name: str, threads: int, max_jobs: int, retry_after_s: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._max_jobs = max_jobs
        self._retry_after_s = retry_after_s
        self._jobs: set[Future[Any]] = set()

    async def run(self, job: Callable[[], Result]) -> Result:
        """Do a job in a thread and wait for it.

        Raises ``RequestRefused``: 503, if too many jobs wait.

        A job whose request has ended continues counting until it is done: threads cannot be stopped.
        """
        if len(self._jobs) >= self._max_jobs:
            raise RequestRefused(503, "too many waiting requests", "work", retry_after_s=self._retry_after_s)
        future = self._executor.submit(job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no further job; drop those that have not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)
