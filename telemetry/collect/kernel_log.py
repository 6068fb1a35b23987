"""Kernel log collector: the loop of ``predrain collect kernel-log``, which stages messages as events."""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from foundation.running import Wait
from telemetry.accounting import Accounting
from telemetry.collect.outbox import Outbox
from telemetry.kernel_log.catalogue import MessageCatalogue, shipped
from telemetry.kernel_log.reader import KernelLogReader, LogSource

_log = logging.getLogger(__name__)
_SAVE_EVERY_S: Final = 5.0
_WAIT_S: Final = 0.5
# How often the flag that signals set is polled.


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
    catalogue: MessageCatalogue | None = None,
) -> Accounting:
    """Stage events until the source is drained (``once``) or ``stop(seconds)``, which waits, returns true.

    ``node``: node of lines without a host; with ``fixed``, of all lines.
    ``delay``: from a past event to its ``known_at``, at most now.
    Returns: accounting of the lines. Raises ``InputError`` if the source cannot be read, the disk is full, or the node
    of an event is unknown.
    """
    position = dict(outbox.position.get("source", {}))
    source = open_source(dict(position))
    # Duplicates are removed across sources but not within one, so events carry the source's name.
    name = f"kernel_log:{source.name}"
    try:
        state = outbox.position.get("nodes")
        reader = KernelLogReader(catalogue or shipped(), node=node, fixed=fixed, state=state, source=name)
        reader.accounting = outbox.accounting
        saved_at_s = time.monotonic()
        while True:
            batch = source.read(0.0 if once else _WAIT_S)
            reader.count(max(batch.n_lines, len(batch.lines)), len(batch.lines))
            events = list(reader.read(batch.lines, partial(known_at, clock(), delay)))
            _report(reader)
            leaving = stop(0.0) or (once and batch.drained)
            is_due = leaving or time.monotonic() - saved_at_s >= _SAVE_EVERY_S
            if events or (is_due and batch.position != position):
                outbox.commit({"source": batch.position, "nodes": reader.state()}, events=events)
                outbox.flush()
                saved_at_s, position = time.monotonic(), batch.position
            if leaving:
                return reader.accounting
            if once and not batch.lines:
                stop(0.01)
    finally:
        source.close()


def known_at(now: datetime, delay: timedelta, logged_at: datetime, is_history: bool) -> datetime:
    """Return ``known_at``: for events before the collector's start ``logged_at`` + ``delay``, at most ``now``."""
    return min(now, logged_at + delay) if is_history else now


def _report(reader: KernelLogReader) -> None:
    """Log the first unusable line for each reason; further ones are only counted."""
    for _, line, reason in reader.unused:
        if reason not in reader.reported:
            reader.reported.add(reason)
            _log.warning("%s: %r (further ones are only counted)", reason, line[:160])
    reader.unused.clear()
