"""The controller's own numbers: ``/metrics`` and ``/healthz``."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from policy.fleet import Level
from policy.plan import Plan
from policy.stages import STAGES
from policy.tiers import TIERS, UNKNOWN
from scheduler.ports.protocols import Clock
from scheduler.ports.report import RoundReport
from telemetry.errors import InputError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_RESULTS = ("decided", "standby", "failed")
_ANSWER_WITHIN_S = 5.0
_ROUNDS = 3


class RoundMetrics:
    """What the rounds of this process did, and how the fleet stood at the last one.

    Rounds are noted by one thread, pages written by others. Labels are bounded: verbs, answers, tiers, levels, stages,
    kinds of causes and kinds of budgets; never nodes, groups or racks, which the ledger has.
    """

    def __init__(self, clock: Clock, every: timedelta, max_round_duration: timedelta) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._silent = _ROUNDS * (every + max_round_duration)
        self._since = clock.now()
        self._rounds: Counter[str] = Counter(dict.fromkeys(_RESULTS, 0))
        self._steps: Counter[tuple[str, ...]] = Counter()
        self._work: Counter[tuple[str, ...]] = Counter()
        self._seconds = 0.0
        self._last: tuple[RoundReport, float] | None = None
        self._decided: tuple[Plan, datetime] | None = None

    def note(self, report: RoundReport, seconds: float) -> None:
        """Count a round that has ended."""
        with self._lock:
            self._since = self._clock.now()
            self._rounds["failed" if report.failed else "decided" if report.active else "standby"] += 1
            self._steps.update((step.action.verb, step.outcome) for step in report.steps)
            self._work.update((step.verb, step.outcome) for step in report.work)
            self._seconds += seconds
            self._last = report, seconds
            if report.plan is not None:
                self._decided = report.plan, report.at
            elif not report.active:
                self._decided = None  # what this process decided before it lost the lease is not how things stand

    def collect(self) -> Iterator[Metric]:
        """Give the numbers to ``prometheus_client``."""
        rounds: dict[tuple[str, ...], float] = {(result,): count for result, count in self._rounds.items()}
        yield _counter("rounds", "Rounds, by what they came to.", ("result",), rounds)
        yield _counter("round_duration_seconds", "Time that rounds took.", (), {(): self._seconds})
        labels = ("verb", "outcome")
        yield _counter("actions", "Actions, by what became of them.", labels, self._steps)
        yield _counter("evacuation_steps", "What was done to empty nodes, likewise.", labels, self._work)
        if self._last is not None:
            last, seconds = self._last
            yield _gauge("last_round_timestamp_seconds", "When the last round began.", last.at.timestamp())
            yield _gauge("last_round_duration_seconds", "What it took.", seconds)
            yield _gauge("refused_scores", "Records of the newest scores that are refused.", last.refused_scores)
            yield _gauge("leader", "Whether this process holds the lease.", last.active)
        if self._decided is not None:
            plan, at = self._decided
            yield _gauge("last_decision_timestamp_seconds", "When it last decided.", at.timestamp())
            yield from _fleet(plan)

    def exposition(self) -> str:
        """Return the page of ``GET /metrics``."""
        registry = CollectorRegistry(auto_describe=False)
        with self._lock:
            registry.register(self)
            return generate_latest(registry).decode()

    def illness(self) -> str | None:
        """Say why the process should be restarted; None: it works. A scheduler that is down is not its illness."""
        with self._lock:
            silent = self._clock.now() - self._since
        return f"no round has ended for {silent.total_seconds():.0f} s" if silent > self._silent else None


def _fleet(plan: Plan) -> Iterator[Metric]:
    """Say how the fleet stood at a decision; nodes that are clear and bear no mark of ours are not counted."""
    decisions = plan.nodes.values()
    tiers = _counted((*TIERS[1:], UNKNOWN), (node.tier for node in decisions))
    levels = [level.name.lower() for level in Level if level]
    targets = _counted(levels, (node.target.name.lower() for node in decisions))
    stages = _counted(STAGES, (group.stage for group in plan.stages.values()))
    causes = Counter(key.split(" ", 1)[0] for key in plan.open_causes)
    left: dict[str, int] = {}
    for use in plan.uses:
        kind = use.scope[0]
        left[kind] = min(left.get(kind, use.allowed - use.lost), use.allowed - use.lost)
    yield _gauges("nodes", "Nodes by tier.", "tier", tiers)
    yield _gauges("target_nodes", "Nodes by what they are to be.", "level", targets)
    yield _gauge("budget_deferred_nodes", "Nodes left in service for lack of budget.", len(plan.over_budget))
    yield _gauges("stage_groups", "Groups of nodes by stage.", "stage", stages)
    yield _gauge("breaker_open_causes", "Causes that hold the breaker open.", len(plan.open_causes))
    yield _gauges("breaker_open", "The same by kind.", "cause", causes)
    text = "Nodes that the fullest budget of a kind still lets go; below zero where others took nodes out."
    yield _gauges("budget_remaining_nodes", text, "scope", left)


def _counted(names: Iterable[str], values: Iterable[str]) -> dict[str, int]:
    counts = Counter(values)
    return {name: counts[name] for name in names}


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], float]) -> Metric:
    made = CounterMetricFamily(f"predrain_act_{name}", text, labels=labels)
    for key, count in sorted(counts.items()):
        made.add_metric(key, count)
    return made


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"predrain_act_{name}", text, value=float(value))


def _gauges(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    made = GaugeMetricFamily(f"predrain_act_{name}", text, labels=(label,))
    for key, count in sorted(counts.items()):
        made.add_metric((key,), count)
    return made


@contextlib.contextmanager
def listening(metrics: RoundMetrics, address: str) -> Iterator[int]:
    """Serve the metrics while the context lasts.

    ``address``: ``host:port``; port 0 is any free one.
    Raises ``InputError`` if it is no address, or cannot be listened on.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InputError(
            f"{address!r} is no address to listen on", "--listen", "Write host:port, such as 127.0.0.1:9220."
        )
    try:
        server = _Server(host.strip("[]") or "127.0.0.1", int(port), metrics)
    except OSError as error:
        raise InputError(
            f"cannot listen on {address}: {error.strerror}", "--listen", "Give a free address of this machine."
        ) from None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, metrics: RoundMetrics) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)
        self.set_app(_app(metrics))


class _Handler(WSGIRequestHandler):
    timeout = _ANSWER_WITHIN_S

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: whoever scrapes would fill the log."""


def _app(metrics: RoundMetrics) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        path = environ.get("PATH_INFO", "")
        status, media, body = "404 Not Found", "text/plain; charset=utf-8", "not found\n"
        if path == "/metrics":
            status, media, body = "200 OK", CONTENT_TYPE_PLAIN_0_0_4, metrics.exposition()
        elif path == "/healthz":
            ill = metrics.illness()
            status, body = ("200 OK" if ill is None else "503 Service Unavailable"), f"{ill or 'ok'}\n"
        start_response(status, [("Content-Type", media)])
        return [body.encode()]

    return app
