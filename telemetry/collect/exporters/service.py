"""``predrain collect exporters`` put together: lock, state file, own /metrics and /healthz, signals.

The state file ``state/exporters.json``, which ``predrain doctor DATASET.live`` reads::

    {"written_at": "2026-01-31T10:00:00+00:00",
     "collectors": {"HOST:PID": {"started_at": …, "seen_at": …, "interval_s": 30.0, "targets": 1250, "owned": 1250,
                                 "scrapes": …, "good": …, "failed": …, "late": …, "repeated": …, "worst_late_s": …,
                                 "rows_landed": …, "rows_held": …, "rows_dropped": …, "events_landed": …,
                                 "problem": null}},
     "targets": {"node07:9400": {"collector": "HOST:PID", "seen_at": …, …}}}

with the keys of :meth:`telemetry.collect.exporters.watch.TargetWatch.as_state` for each target. Collectors of other
targets write into the same file; what none has written for an hour is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock, Timeout

from telemetry.atomic import disk_errors, write_bytes
from telemetry.collect.exporters.collector import Collector, ScrapeSettings
from telemetry.collect.exporters.page import NodeFrom, PageReader, fleet_catalogue, target_labels
from telemetry.collect.exporters.scraping import FAILURE_KINDS, Scraper
from telemetry.collect.exporters.target_lists import read_target_options
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channel import Channel
from telemetry.errors import InputError
from telemetry.http import Connection
from telemetry.landing.folder import Landing, landing_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)

STATE_NAME: Final = "exporters.json"
"""Name of the state file in the landing folder's ``state``."""

_FORGET: Final = timedelta(hours=1)
_STANDBY_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ExporterOptions:
    """How exporters are collected; ``connection`` holds credentials and trust, ``listen`` the own page's address."""

    dataset: Path
    targets: tuple[str, ...]
    channels: Mapping[str, Channel]
    mapping: SourceMapping = field(default_factory=SourceMapping)
    settings: ScrapeSettings = field(default_factory=ScrapeSettings)
    node_from: NodeFrom = "auto"
    connection: Connection = field(default_factory=lambda: Connection("http://targets"))
    listen: str | None = None


async def collect_exporters(options: ExporterOptions, *, once: bool) -> dict[str, Any]:
    """Collect until SIGTERM or SIGINT, or one round; return the collector's totals.

    Raises InputError if an option cannot be used, the targets cannot be read, rows were scraped that could not be
    landed, or no target of the one round could be scraped.
    """
    landing = Landing(landing_of(options.dataset), writer="exporters", channels=options.channels)
    fleet = fleet_catalogue(options.channels, options.mapping)
    state_path = landing.state(STATE_NAME)
    settings = options.settings

    async def write(collector: Collector) -> None:
        try:
            await asyncio.to_thread(write_state, state_path, own_state(collector), collector.clock())
        except (InputError, OSError) as error:
            _log.error("the state of the targets cannot be written: %s", error)

    targets = read_target_options(options.targets)
    collector = Collector(
        targets=targets,
        scraper=Scraper(options.connection, timeout_s=settings.timeout_s),
        landing=landing,
        reader_of=lambda target: PageReader(fleet, target_labels(target, options.node_from)),
        settings=settings,
        on_round=write,
    )
    # Collectors of the same targets stand in for each other: one scrapes, the others wait for its lock.
    name = hashlib.sha256("\n".join(sorted(options.targets)).encode()).hexdigest()[:12]
    lock = FileLock(landing.state(f"exporters-{name}.lock"), fallback_to_soft=False)
    with stop_event() as stop:
        async with listening(collector, options.listen):
            if not await _acquired(lock, collector, stop, wait=not once):
                return collector_state(collector)
            try:
                landed = await (collector.once() if once else collector.run(stop))
            finally:
                lock.release()
    with contextlib.suppress(InputError, OSError):  # the round before has told of a full disk
        write_state(state_path, own_state(collector), collector.clock(), leaving=collector_name())
    return _checked(collector, landing.root, landed=landed, once=once)


def _checked(collector: Collector, root: Path, *, landed: bool, once: bool) -> dict[str, Any]:
    state = collector_state(collector)
    if not landed:
        raise InputError(
            f"{collector.rows_held} rows could not be landed and are lost: {collector.problem}",
            str(root),
            "Free space and start the collector again.",
        )
    if once and state["scrapes"] and state["failed"] == state["scrapes"]:
        worst = next(watch for watch in collector.watches.values() if watch.last_failure is not None)
        example = f"{worst.target.address}: {worst.last_failure}"
        raise InputError(
            f"none of {state['scrapes']} targets could be scraped, such as {example}",
            "--targets",
            "Check the addresses, and that the exporters run.",
        )
    return state


async def _acquired(lock: FileLock, collector: Collector, stop: asyncio.Event, *, wait: bool) -> bool:
    while not stop.is_set():
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if not wait:
                raise InputError(
                    "another collector scrapes these targets", lock.lock_file, "Stop it first, or leave it to work."
                ) from None
            if not collector.is_standby:
                _log.info("standby: another collector scrapes these targets")
            collector.is_standby = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _STANDBY_POLL_S)
        else:
            collector.is_standby = False
            return True
    return False


@contextlib.contextmanager
def stop_event() -> Iterator[asyncio.Event]:
    """Give an event that SIGTERM and SIGINT set; for use in a running loop of the main thread."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def collector_name() -> str:
    """Return the name of this process among the collectors of a dataset."""
    return f"{socket.gethostname()}:{os.getpid()}"


def collector_state(collector: Collector) -> dict[str, Any]:
    """Return a collector's own totals."""
    counts = asdict(collector.counts) | {"worst_late_s": round(collector.counts.worst_late_s, 3)}
    return {
        "started_at": collector.started_at.isoformat(),
        "seen_at": collector.clock().isoformat(),
        "interval_s": collector.settings.interval_s,
        "targets": len(collector.watches),
        "owned": 0 if collector.is_standby else len(collector.watches),
        **counts,
        "rows_held": collector.rows_held,
        "problem": collector.problem,
    }


def own_state(collector: Collector) -> dict[str, Any]:
    """Return this process's part of the state file."""
    name, now_s, seen_at = collector_name(), time.monotonic(), collector.clock().isoformat()
    targets = {
        watch.target.address: watch.as_state(now_s) | {"collector": name, "seen_at": seen_at}
        for watch in collector.watches.values()
    }
    return {"collectors": {name: collector_state(collector)}, "targets": targets}


def write_state(path: Path, own: dict[str, Any], now: datetime, *, leaving: str | None = None) -> None:
    """Write this process's part into the file, atomically, beside what collectors of other targets wrote.

    ``leaving``: a collector that has ended as it was told: it is left out, its targets stay. Raises InputError if the
    disk is full or may not be written to.
    """
    with disk_errors(path), FileLock(path.with_name(f".{path.name}.lock"), timeout=30, fallback_to_soft=False):
        merged: dict[str, Any] = {"written_at": now.isoformat(), "collectors": {}, "targets": {}}
        before = _read(path)
        for part in ("collectors", "targets"):
            old = before.get(part)
            for key, entry in (old if isinstance(old, dict) else {}).items():
                if _is_recent(entry, now):
                    merged[part][key] = entry
            merged[part].update(own[part])
        # A collector whose targets are all scraped by others now has ended.
        busy = {entry.get("collector") for entry in merged["targets"].values()} | own["collectors"].keys()
        merged["collectors"] = {
            name: entry for name, entry in merged["collectors"].items() if name in busy and name != leaving
        }
        write_bytes(path, (json.dumps(merged, indent=1, sort_keys=True) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # the first round, or a damaged file: made anew
        return {}
    return content if isinstance(content, dict) else {}


def _is_recent(entry: object, now: datetime) -> bool:
    try:
        seen_at = datetime.fromisoformat(entry["seen_at"])  # type: ignore[index]  # anything but our entry is caught
        return abs(now - seen_at) < _FORGET
    except (KeyError, TypeError, ValueError):
        return False


class CollectorMetrics:
    """The collector's numbers as ``prometheus_client`` collects them."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        state = collector_state(self._collector)
        for name, key, text in _COUNTERS:
            yield CounterMetricFamily(f"predrain_exporters_{name}", text, value=state[key])
        for name, key, text in _GAUGES:
            yield GaugeMetricFamily(f"predrain_exporters_{name}", text, value=state[key])
        watches = list(self._collector.watches.values())
        failures = CounterMetricFamily("predrain_exporters_failures", "Failed scrapes by kind.", labels=["kind"])
        for kind in FAILURE_KINDS:
            failures.add_metric([kind], sum(watch.failures[kind] for watch in watches))
        yield failures
        failing = sum(watch.consecutive_failures > 0 for watch in watches)
        hung = sum(watch.is_hung and not watch.consecutive_failures for watch in watches)
        states = GaugeMetricFamily("predrain_exporters_targets_in", "Targets by state.", labels=["state"])
        for name, count in (("failing", failing), ("hung", hung), ("good", len(watches) - failing - hung)):
            states.add_metric([name], count)
        yield states


_COUNTERS: Final = (
    ("scrapes", "scrapes", "Scrapes started."),
    ("scrapes_failed", "failed", "Scrapes that gave no usable page."),
    ("scrapes_late", "late", "Scrapes that started more than 1 s after they were due."),
    ("pages_repeated", "repeated", "Pages that were the one before again."),
    ("rows_landed", "rows_landed", "Rows of samples landed."),
    ("rows_dropped", "rows_dropped", "Rows dropped because nothing could be landed for too long."),
    ("events_landed", "events_landed", "Events landed."),
)
_GAUGES: Final = (
    ("targets", "targets", "Targets that are named."),
    ("targets_owned", "owned", "Targets that this process scrapes."),
    ("rows_held", "rows_held", "Rows of samples that wait to be landed."),
)


@contextlib.asynccontextmanager
async def listening(collector: Collector, address: str | None) -> AsyncIterator[int | None]:
    """Serve the collector's ``/metrics`` and ``/healthz`` at ``host:port`` while the context lasts; yields the port.

    Failing targets are not the collector's illness: it is unhealthy only while nothing can be landed. Raises InputError
    if the address cannot be used.
    """
    if address is None:
        yield None
        return
    import uvicorn  # noqa: PLC0415
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import PlainTextResponse, Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    from telemetry.collect.remote_write.connections import QuietServer, listen, parse_listen  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(CollectorMetrics(collector))

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(_: Request) -> Response:
        if collector.problem is not None:
            return PlainTextResponse(f"nothing can be landed: {collector.problem}\n", 503)
        return PlainTextResponse("standby\n" if collector.is_standby else "ok\n")

    app = Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz)])
    host, port = parse_listen(address if not address.startswith(":") else f"127.0.0.1{address}")
    listener = listen(host, port)
    server = QuietServer(
        uvicorn.Config(app, log_config=None, log_level="error", access_log=False, ws="none", lifespan="off")
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
        listener.close()
