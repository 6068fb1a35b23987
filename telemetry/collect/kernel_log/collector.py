"""Reads kernel messages from a source and lands their events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from telemetry.collect.kernel_log.lines import KernelEvents, LogSource
from telemetry.collect.outbox import Outbox
from telemetry.collect.running import Wait
from telemetry.errors import InputError

_log = logging.getLogger(__name__)
_SAVE_EVERY_S: Final = 5.0
_WAIT_S: Final = 0.5
# A signal sets a flag; it is looked at this often.
_COUNTS: Final = ("lines", "events", "unknown_codes", "unclear", "undated")


def collect_kernel_log(
    outbox: Outbox,
    open_source: Callable[[dict[str, Any]], LogSource],
    *,
    node: str | None,
    fixed: bool,
    clock: Callable[[], datetime],
    stop: Wait,
    once: bool,
    delay: timedelta = timedelta(minutes=10),
    monotonic: Callable[[], float] = time.monotonic,
) -> dict[str, int]:
    """Read until the source is drained (``once``) or ``stop`` says so, and land the events found.

    ``outbox``: holds where an earlier process stopped.
    ``node``, ``fixed``, ``clock``, ``delay``: as in :class:`KernelEvents`.
    ``stop``: ``stop(0)`` is true when the collector shall leave; ``stop(s)`` waits.
    ``once``: leave when nothing more is there.
    Returns: counts of :class:`KernelEvents`, and ``lost``: messages that the kernel dropped before they were read.
    Raises ``InputError`` if the source cannot be read, the disk is full, or a line about a GPU names no node and
    ``node`` is not given.
    """
    held = outbox.position
    source = open_source(dict(held.get("source", {})))
    try:
        events = KernelEvents(source.name, node=node, fixed=fixed, clock=clock, delay=delay, state=held.get("nodes"))
        lost = saved_lost = 0
        saved_at = monotonic()
        position = dict(held.get("source", {}))
        while True:
            got = source.read(0.0 if once else _WAIT_S)
            found = events.read(got.lines)
            if events.counts["no_node"]:  # before anything is noted as read
                raise InputError(
                    "a line about a GPU names no host",
                    f"--source {source.name}, line {events.counts['lines']} or before",
                    "Give --node NAME.",
                )
            lost += got.lost
            if lost and saved_lost == 0:
                _log.warning("the kernel's ring overran: %d messages were lost before they could be read", lost)
            saved_lost = lost
            moved = got.position != position
            leaving = stop(0.0) or (once and got.drained)
            if found or (moved and (leaving or monotonic() - saved_at >= _SAVE_EVERY_S)):
                outbox.commit({"source": got.position, "nodes": events.state()}, found)
                saved_at, position = monotonic(), got.position
            if leaving:
                break
            if once and not got.lines:
                stop(0.01)
        return {name: int(events.counts[name]) for name in _COUNTS} | {"lost": lost}
    finally:
        source.close()
