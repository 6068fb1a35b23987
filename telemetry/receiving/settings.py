"""What the receiver allows, and how it gathers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """Limits of the receiver.

    ``tokens``: file of bearer tokens, one a line; None takes requests of anybody who can reach the port.
    ``held_bytes``: most bytes of bodies in memory at a time, those beyond it are answered 503; one body is always
    taken.
    ``flush_interval_s``: samples of several requests become one landed file; the first of them waits this long at most.
    ``flush_samples``: a file is written at once when so many samples wait.
    ``held_samples``: most samples in memory; beyond it requests are answered 503 until a file was written.
    ``body_timeout_s``: longest time in which a client must have sent its body.
    ``head_timeout_s``: longest time in which a client must have sent the head of a request; its connection is closed
    then.
    ``concurrency``: most requests at a time, those beyond it are answered 503.
    ``retry_after_s``: what 503 asks a client to wait.
    ``inventory_every_s``: a GPU whose labels say nothing new is noted in the inventory this often.
    """

    tokens: Path | None = None
    body_bytes: int = 32 * MIB
    held_bytes: int = 256 * MIB
    decoded_bytes: int = 64 * MIB
    request_rows: int = 1_000_000
    flush_interval_s: float = 1.0
    flush_samples: int = 250_000
    held_samples: int = 4_000_000
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    concurrency: int = 512
    retry_after_s: int = 5
    inventory_every_s: float = 3600.0
