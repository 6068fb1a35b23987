"""Endpoints ``/metrics`` and ``/healthz`` of the controller."""

import contextlib
import socket
import threading
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from datetime import timedelta
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from foundation.errors import InputError
from foundation.http import parse_listen
from policy.fleet import Level
from policy.plan import Plan
from policy.stages import STAGES
from policy.tiers import TIERS, UNKNOWN
from scheduler.ports.protocols import Clock
from scheduler.ports.report import RoundReport

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_ANSWER_WITHIN_S = 5.0
_ROUNDS = 3
Metric = TypeVar("Metric", Counter, Gauge)


class RoundMetrics:
    """Metrics of the rounds of this process, and of the fleet in the last round; thread-safe.

    Label cardinality is bounded: no label has nodes, groups or racks, which are in the ledger. Nodes that are clear and
    have no marker are not counted.
    """

    def __init__(self, clock: Clock, interval: timedelta, max_round_duration: timedelta) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._max_silence = _ROUNDS * (interval + max_round_duration)
        self._since = clock.now()
        disable_created_metrics()
        self._registry = CollectorRegistry(auto_describe=False)
        self._rounds = self._metric(Counter, "rounds", "Rounds by result.", "result")
        for result in ("decided", "standby", "failed"):
            self._rounds.labels(result)
        self._actions = self._metric(Counter, "actions", "Actions by outcome.", "verb", "outcome")
        self._work = self._metric(Counter, "evacuation_steps", "Steps of evacuations by outcome.", "verb", "outcome")
        self._last: Gauge | None = None  # no series before the first round: 0 would fire the staleness alert
        self._seconds = self._metric(Gauge, "last_round_duration_seconds", "Duration of the last round.")
        self._leader = self._metric(Gauge, "leader", "1 if this process holds the lease, else 0.")
        self._deferred = self._metric(
            Gauge, "budget_deferred_nodes", "Nodes left in service because a budget is exhausted."
        )
        self._causes = self._metric(Gauge, "breaker_open_causes", "Causes of the open breaker.")
        text = "Nodes that the fullest disruption budget of each scope still allows; negative if others took out more."
        self._remaining = self._metric(Gauge, "budget_remaining_nodes", text, "scope")
        self._tiers = self._metric(Gauge, "nodes", "Nodes by tier.", "tier")
        self._targets = self._metric(Gauge, "target_nodes", "Nodes by decided action level.", "level")
        self._stages = self._metric(Gauge, "stage_groups", "Groups of nodes by stage.", "stage")
        self._passes = self._metric(Gauge, "probe_passes", "Recently passed probes by outcome.", "followed_by")
        self._open = self._metric(Gauge, "breaker_open", "Open causes by kind.", "cause")

    def _metric(self, kind: type[Metric], name: str, text: str, *labels: str) -> Metric:
        return kind(f"predrain_act_{name}", text, labels, registry=self._registry)

    def note(self, report: RoundReport, seconds: float) -> None:
        """Record a completed round."""
        with self._lock:
            self._since = self._clock.now()
            self._rounds.labels("failed" if report.failed else "decided" if report.active else "standby").inc()
            for step in report.steps:
                self._actions.labels(step.action.verb, step.outcome).inc()
            for work in report.work:
                self._work.labels(work.verb, work.outcome).inc()
            if self._last is None:
                self._last = self._metric(Gauge, "last_round_timestamp_seconds", "Start of the last round.")
            self._last.set(report.at.timestamp())
            self._seconds.set(seconds)
            self._leader.set(report.active)
            for verdict, outcome in (("right", "failure"), ("wrong", "nothing"), ("open", "open")):
                self._passes.labels(outcome).set(report.probe_passes.get(verdict, 0))
            if report.plan is not None or not report.active:  # a former leader's decision is outdated
                self._fleet(report.plan)

    def _fleet(self, plan: Plan | None) -> None:
        self._deferred.set(0 if plan is None else len(plan.over_budget))
        self._causes.set(0 if plan is None else len(plan.open_causes))
        for gauge in (self._remaining, self._tiers, self._targets, self._stages, self._open):
            gauge.clear()
        if plan is None:
            return
        decisions = plan.nodes.values()
        levels = [level.name.lower() for level in Level if level]
        _count(self._tiers, (*TIERS[1:], UNKNOWN), (node.tier for node in decisions))
        _count(self._targets, levels, (node.target.name.lower() for node in decisions))
        _count(self._stages, STAGES, (group.stage for group in plan.stages.values()))
        kinds = [key.split(" ", 1)[0] for key in plan.open_causes]
        _count(self._open, kinds, kinds)
        for use in sorted(plan.uses, key=lambda use: use.lost - use.allowed):  # the fullest budget wins
            self._remaining.labels(use.scope[0]).set(use.allowed - use.lost)

    def exposition(self) -> str:
        """Return the response body of ``GET /metrics``."""
        with self._lock:
            return generate_latest(self._registry).decode()

    def illness(self) -> str | None:
        """Return why the process is unhealthy; None if it is healthy. A scheduler outage does not count."""
        with self._lock:
            silence = self._clock.now() - self._since
        return f"no round has ended for {silence.total_seconds():.0f} s" if silence > self._max_silence else None


def _count(gauge: Gauge, names: Iterable[str], values: Iterable[str]) -> None:
    """Set a gauge to the count of each of ``names`` in ``values``, including zero."""
    counts = Counts(values)
    for name in names:
        gauge.labels(name).set(counts[name])


@contextlib.contextmanager
def listening(metrics: RoundMetrics, address: str) -> Iterator[int]:
    """Serve the metrics within the context; yields the port.

    ``address``: ``host:port``; port 0 picks a free one.
    Raises ``InputError`` if the address is invalid or unavailable.
    """
    host, port = parse_listen(address if not address.startswith(":") else f"127.0.0.1{address}")
    try:
        server = _Server(host, port, metrics)
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
        """Do not log requests: each scrape would add a line."""


def _app(metrics: RoundMetrics) -> "WSGIApplication":
    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
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
