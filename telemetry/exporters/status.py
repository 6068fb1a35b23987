"""What the collectors of a dataset say of themselves and of each target: ``state/exporters.json``.

The file::

    {"written_at": "2026-01-31T10:00:00+00:00",
     "collectors": {"HOST:PID": {"started_at": …, "seen_at": …, "interval_s": 30.0, "targets": 1250, "owned": 1250,
                                 "scrapes": …, "good": …, "failed": …, "late": …, "repeated": …,
                                 "worst_late_s": …, "rows_landed": …, "rows_held": …, "rows_dropped": …,
                                 "rows_out_of_order": …, "events_landed": …, "clock_jumps": …, "problem": null}},
     "targets": {"node07:9400": {"url": …, "node": null, "collector": "HOST:PID", "seen_at": …, "scrapes": …,
                                 "last_scrape_at": …, "last_success_at": …, "page_changed_at": …,
                                 "failures_total": 2, "failures_in_row": 0, "failures": {"timeout": 2},
                                 "last_failure_kind": "timeout", "last_failure": "…", "last_failure_at": …,
                                 "page_age_s": 0.0, "hung": false, "repeats": 0, "scrape_duration_s": 0.01,
                                 "clock_skew_s": 0.1, "gpus": {"GPU-…": 41}, "problems": {}, "unexplained": []}}}

Instants are ISO 8601 in UTC, null where nothing happened yet; ``gpus`` counts the channels that have a value, by GPU.
Several collectors write one file, each its own targets; what none has written for an hour is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from telemetry.atomic import disk_errors, write_bytes
from telemetry.exporters.collector import Collector
from telemetry.exporters.failures import FAILURE_KINDS
from telemetry.exporters.watch import TargetWatch
from telemetry.exposition.writer import family, labels

STATE_NAME: Final = "exporters.json"
"""Name of the state file in the landing folder's ``state``."""

LOCK_NAME: Final = "exporters.lock"
"""Name of the lock file that says which process scrapes which target."""

_FORGET: Final = timedelta(hours=1)
_SILENT_INTERVALS: Final = 5


def collector_name() -> str:
    """Return the name of this process among the collectors of a dataset."""
    return f"{socket.gethostname()}:{os.getpid()}"


def collector_state(collector: Collector, now: datetime) -> dict[str, Any]:
    """Return a collector's own totals."""
    counts, holding = collector.counts, collector.holding
    return {
        "started_at": collector.started_at.isoformat(),
        "seen_at": now.isoformat(),
        "interval_s": collector.settings.interval_s,
        "targets": len(collector.watches),
        "owned": sum(watch.owned for watch in collector.watches.values()),
        "scrapes": counts.scrapes,
        "good": counts.good,
        "failed": counts.failed,
        "late": counts.late,
        "worst_late_s": round(counts.worst_late_s, 3),
        "repeated": counts.repeated,
        "rows_landed": holding.landed_rows,
        "rows_held": holding.rows,
        "rows_dropped": holding.dropped_rows,
        "rows_out_of_order": collector.newest.dropped,
        "events_landed": holding.landed_events,
        "clock_jumps": collector.clock.jumps,
        "problem": holding.problem,
    }


def target_state(watch: TargetWatch, now_s: float) -> dict[str, Any]:
    """Return what is known of a target; ``now_s`` is the monotonic clock."""
    age_s = watch.page_age_s(now_s)
    return {
        "url": watch.target.url.partition("?")[0],
        "node": watch.target.node,
        "scrapes": watch.scrapes,
        "last_scrape_at": _iso(watch.last_scrape_at),
        "last_success_at": _iso(watch.last_success_at),
        "page_changed_at": _iso(watch.changed_at),
        "failures_total": watch.failures.total(),
        "failures_in_row": watch.failures_in_row,
        "failures": dict(watch.failures),
        "last_failure_kind": None if watch.last_failure is None else watch.last_failure.kind,
        "last_failure": None if watch.last_failure is None else watch.last_failure.detail,
        "last_failure_at": _iso(watch.last_failure_at),
        "page_age_s": None if age_s is None else round(age_s, 3),
        "hung": watch.is_hung,
        "repeats": watch.repeats,
        "scrape_duration_s": watch.duration_s,
        "clock_skew_s": watch.skew_s,
        "gpus": watch.channels,
        "problems": watch.problems,
        "unexplained": list(watch.unexplained),
    }


def own_state(collector: Collector, now: datetime) -> dict[str, Any]:
    """Return this process's part of the file."""
    name, now_s = collector_name(), collector.clock.monotonic_s()
    targets = {
        watch.target.address: target_state(watch, now_s) | {"collector": name, "seen_at": now.isoformat()}
        for watch in collector.watches.values()
        if watch.owned
    }
    return {"collectors": {name: collector_state(collector, now)}, "targets": targets}


def write_state(path: Path, own: dict[str, Any], now: datetime, *, leaving: str | None = None) -> None:
    """Write this process's part into the file, atomically, beside what others wrote.

    ``own``: of :func:`own_state`.
    ``leaving``: a collector that has ended as it was told: it is left out, its targets stay.
    Raises ``InputError`` if the disk is full or may not be written to; the old file is unchanged.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_name(f".{path.name}.lock")):
            merged: dict[str, Any] = {"written_at": now.isoformat(), "collectors": {}, "targets": {}}
            before = _read(path)
            for part in ("collectors", "targets"):
                old = before.get(part)
                for key, entry in (old if isinstance(old, dict) else {}).items():
                    if _is_recent(entry, now):
                        merged[part][key] = entry
                merged[part].update(own[part])
            busy = {entry.get("collector") for entry in merged["targets"].values()} | own["collectors"].keys()
            for name, entry in list(merged["collectors"].items()):
                if name == leaving or (name not in busy and _is_silent(entry, now)):
                    del merged["collectors"][name]  # ended, or others have taken over all that it had
            write_bytes(path, (json.dumps(merged, indent=1, sort_keys=True) + "\n").encode())


def metrics_text(collector: Collector, now: datetime) -> str:
    """Return the collector's own metrics in the Prometheus text format."""
    state = collector_state(collector, now)
    page = "".join(
        family(f"exporters_{name}", kind, text, {"": state[key]}) for name, (kind, key, text) in _METRICS.items()
    )
    watches = [watch for watch in collector.watches.values() if watch.owned]
    failures = {labels(kind=kind): sum(watch.failures[kind] for watch in watches) for kind in FAILURE_KINDS}
    failing = sum(watch.failures_in_row > 0 for watch in watches)
    hung = sum(watch.is_hung and not watch.failures_in_row for watch in watches)
    states = {"failing": failing, "hung": hung, "good": len(watches) - failing - hung}
    by_state = {labels(state=word): number for word, number in states.items()}
    text = "Failed scrapes by kind, of the targets that are scraped now."
    page += family("exporters_failures_total", "gauge", text, failures)
    return page + family("exporters_targets_in", "gauge", "Targets by state.", by_state)


def illness(collector: Collector) -> str | None:
    """Return what is wrong with the collector itself, or None: failing targets are not its illness."""
    behind_s = collector.clock.monotonic_s() - collector.ticked_s
    if behind_s > max(10.0, collector.settings.interval_s):
        return f"nothing was scraped for {behind_s:.0f} s"
    if collector.holding.problem is not None:
        return f"nothing can be landed: {collector.holding.problem}"
    return None


_METRICS: Final = {
    "targets": ("gauge", "targets", "Targets that are named."),
    "targets_owned": ("gauge", "owned", "Targets that this process scrapes."),
    "scrapes_total": ("counter", "scrapes", "Scrapes started."),
    "scrapes_failed_total": ("counter", "failed", "Scrapes that gave no usable page."),
    "scrapes_late_total": ("counter", "late", "Scrapes that started more than 1 s after they were due."),
    "pages_repeated_total": ("counter", "repeated", "Pages that were the one before again."),
    "rows_landed_total": ("counter", "rows_landed", "Rows of samples landed."),
    "rows_held": ("gauge", "rows_held", "Rows of samples that wait to be landed."),
    "rows_dropped_total": ("counter", "rows_dropped", "Rows dropped because nothing could be landed for too long."),
    "rows_out_of_order_total": ("counter", "rows_out_of_order", "Rows dropped because they were not newer."),
    "events_landed_total": ("counter", "events_landed", "Events landed."),
    "clock_jumps_total": ("counter", "clock_jumps", "Times that this machine's clock was set."),
}


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.astimezone(UTC).isoformat()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # the first round, or a file that somebody has damaged: made anew
        return {}
    return content if isinstance(content, dict) else {}


def _is_recent(entry: object, now: datetime) -> bool:
    try:
        seen_at = datetime.fromisoformat(entry["seen_at"])  # type: ignore[index]  # anything but our entry is caught
        return abs(now - seen_at) < _FORGET
    except (KeyError, TypeError, ValueError):
        return False


def _is_silent(entry: dict[str, Any], now: datetime) -> bool:
    interval_s = entry.get("interval_s")
    limit_s = _SILENT_INTERVALS * (interval_s if isinstance(interval_s, int | float) else 0.0)
    return (now - datetime.fromisoformat(entry["seen_at"])).total_seconds() > limit_s


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the last writer wins
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
