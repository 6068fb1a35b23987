"""What the HTTP service allows."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Limits of the service.

    ``decoded_bytes``: largest body after gzip, and most memory of an Arrow table; checked while it is unpacked.
    ``held_bytes``: most bytes of bodies in memory at a time, those beyond it are answered 503; one body is always
    taken.
    ``page``: most nodes of one page of ``GET /v1/nodes``.
    ``concurrent_anonymous``, ``concurrent_reads``, ``concurrent_writes``, ``concurrent_pages``: most requests at a time
    of callers without a token that holds, of those that read, of tokens that may only write, and of pages; those beyond
    it are answered 503 (``/healthz``, ``/readyz``, ``/ping`` and ``/metrics`` excepted).
    ``scoring``: most requests at a time that wait for the model; one is scored at a time.
    ``body_timeout_s``: longest time in which a client must have sent its body.
    ``head_timeout_s``: longest time in which a client must have sent the head of a request; its connection is closed
    then.
    ``work_timeout_s``: longest time that an answer may take once the body is there; 503 after it.
    ``retry_after_s``: what 503 asks a client to wait.
    ``stale_after_s``: ``/readyz`` fails when the decision is older than this, and the extender takes nothing from it;
    None: only when all scores have expired.
    ``rate_per_s``: most requests a second of one token, or of one address where no token is shown; 429 beyond it. None:
    any. ``/healthz``, ``/readyz``, ``/ping`` and ``/metrics`` are excepted.
    ``rate_burst``: most of them at once after a rest.
    ``grace_s``: how long requests under way may take to end after SIGTERM.
    """

    body_bytes: int = 32 * MIB
    decoded_bytes: int = 64 * MIB
    held_bytes: int = 256 * MIB
    rows: int = 10_000
    page: int = 1_000
    concurrent_anonymous: int = 64
    concurrent_reads: int = 256
    concurrent_writes: int = 64
    concurrent_pages: int = 64
    scoring: int = 16
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    work_timeout_s: float = 30.0
    retry_after_s: int = 2
    poll_s: float = 1.0
    stale_after_s: float | None = None
    rate_per_s: float | None = None
    rate_burst: int = 200
    grace_s: int = 20
