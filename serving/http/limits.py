"""Limits of the service (sizes, timeouts, concurrency), thread pools with a bounded queue, and allowed host names."""

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

    ``decoded_bytes``: maximum memory of an Arrow table after its dictionaries are decoded.
    ``held_bytes``: maximum bytes of bodies in memory, otherwise 503; one body is always accepted.
    ``concurrent_anonymous``, ``concurrent_reads``, ``concurrent_pages``: maximum concurrent requests without a valid
    token, with one, and for pages; otherwise 503.
    ``scoring``: maximum number of requests scored or queued; the model scores one at a time.
    ``head_timeout_s``: timeout for the request head; the connection is then closed.
    ``work_timeout_s``: timeout for the response once the body has arrived; then 503.
    ``stale_after_s``: age of a decision above which ``/readyz`` fails and the extender ignores its scores; None: only
    expiry counts.
    ``extender_filter``: nodes that the extender removes: ``scores``: nodes of tier high; ``ledger``: of those, the ones
    that the controller's newest decision closes to new work.
    ``extender_max_share``: maximum share of nodes to remove, of the fleet and of each request; at least one node.
    ``grace_s``: grace period for in-flight requests after SIGTERM.
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
    """Return whether a ``Host`` header names this service, as a defence against DNS rebinding.

    A malicious page can let its own domain resolve to 127.0.0.1 and read local services, but cannot change the ``Host``
    header. An IP address cannot be rebound, and a request without the header does not come from a browser.
    ``names``: names besides ``localhost``, without port, e.g. that of a reverse proxy.
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
    """Thread pool with a bounded queue."""

    def __init__(self, name: str, threads: int, max_jobs: int, retry_after_s: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._max_jobs = max_jobs
        self._retry_after_s = retry_after_s
        self._jobs: set[Future[Any]] = set()

    async def run(self, job: Callable[[], Result]) -> Result:
        """Run a job in a thread and wait for it.

        An abandoned job counts until it is done, because threads cannot be stopped.
        Raises ``RequestRefused`` (503) if the queue is full.
        """
        if len(self._jobs) >= self._max_jobs:
            raise RequestRefused(503, "too many waiting requests", "work", retry_after_s=self._retry_after_s)
        future = self._executor.submit(job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Accept no more jobs, and drop queued ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)
