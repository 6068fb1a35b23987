"""Lands the verdicts of diagnostics as events."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from telemetry.collect.diagnostics import read_diagnostics
from telemetry.collect.event import Event, events_table
from telemetry.collect.gpu_names import GpuNames, unknown_gpu
from telemetry.errors import InputError
from telemetry.landing.folder import Landing

SOURCE: Final = "dcgmi-diag"
_MOST_BYTES: Final = 64 << 20


def collect_diagnostics(
    path: Path,
    landing: Landing,
    *,
    node: str,
    names: GpuNames,
    delay: timedelta,
    at: datetime | None = None,
    may_skip: Collection[str] = (),
) -> dict[str, int] | None:
    """Land the verdicts of one report.

    ``path``: output of ``dcgmi diag -j``.
    ``landing``: takes a report of the same node, time and content once.
    ``delay``: ``known_at`` is the run's time plus this.
    ``at``: Aware; when the run ended. Default: when the file was last written.
    ``may_skip``: see :func:`read_diagnostics`.
    Returns: verdicts by code; None where the report landed before.
    Raises ``InputError`` if the file cannot be read, or a GPU of it cannot be named.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("the report is over 64 MiB", str(path), "Give the output of one `dcgmi diag -j`.")
        content = path.read_bytes()
        when = at or datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise InputError(f"the report cannot be read: {error.strerror}", str(path), "Check the path.") from None
    if content.strip() and b"{" not in content:
        raise InputError("the file holds no JSON", str(path), "Give the output of `dcgmi diag -j`.")
    counts: Counter[str] = Counter()
    events = []
    for verdict in read_diagnostics(content.decode("utf-8", errors="replace"), may_skip=may_skip):
        gpu = names.find(verdict.index, verdict.serial) if verdict.index else None
        if verdict.index and gpu is None:
            raise unknown_gpu(verdict.index, verdict.serial, f"{path}, node {node}")
        counts[verdict.code] += 1
        events.append(
            Event(when, node, "diagnostic", SOURCE, when + delay, verdict.code, verdict.detail, gpu),
        )
    digest = hashlib.sha256(content + f"\0{node}\0{when.isoformat()}".encode()).hexdigest()[:24]
    name = f"diagnostics-{re.sub('[^A-Za-z0-9.-]', '-', node)[:80]}-{digest}"
    return None if landing.land("events", events_table(events), name=name) is None else dict(counts)
