"""The controller's own numbers, in Prometheus' text format."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from policy.fleet import Level
from policy.plan import Plan
from policy.stages import STAGES
from policy.tiers import TIERS, UNKNOWN
from scheduler.ports.protocols import Clock
from scheduler.ports.report import RoundReport
from telemetry.errors import InputError
from telemetry.exposition.writer import MEDIA, family, labels

_RESULTS = ("decided", "standby", "failed")


class RoundMetrics:
    """What the rounds of this process did, and how the fleet stood at the last one.

    Labels are bounded: verbs, answers, tiers, levels, stages, kinds of causes and kinds of budgets; never nodes, groups
    or racks, which the ledger has.
    """

    def __init__(self) -> None:
        self._rounds: Counter[str] = Counter(dict.fromkeys(_RESULTS, 0))
        self._steps: Counter[tuple[str, str]] = Counter()
        self._work: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0
        self._last: RoundReport | None = None
        self._last_s = 0.0
        self._decided: Plan | None = None
        self._decided_at: datetime | None = None

    def note(self, report: RoundReport, seconds: float) -> None:
        """Count a round."""
        self._rounds["failed" if report.failed else "decided" if report.active else "standby"] += 1
        self._steps.update((step.action.verb, step.came_to) for step in report.steps)
        self._work.update((step.verb, step.came_to) for step in report.work)
        self._seconds += seconds
        self._last, self._last_s = report, seconds
        if report.plan is not None:
            self._decided, self._decided_at = report.plan, report.at
        elif not report.active:
            self._decided = None  # what this process decided before it lost the lease is not how things stand

    def exposition(self) -> str:
        """Return the page of ``GET /metrics``."""
        page = family("act_rounds_total", "counter", "Rounds, by what they came to.", _by("result", self._rounds))
        page += family("act_round_seconds_total", "counter", "Time that rounds took.", {"": self._seconds})
        page += family("act_actions_total", "counter", "Actions, by what became of them.", _by_two(self._steps))
        page += family("act_work_total", "counter", "What was done to empty nodes, likewise.", _by_two(self._work))
        last = self._last
        if last is not None:
            at = {"": last.at.timestamp()}
            page += family("act_last_round_timestamp_seconds", "gauge", "When the last round began.", at)
            page += family("act_last_round_seconds", "gauge", "What it took.", {"": self._last_s})
            refused = {"": last.refused_scores}
            page += family("act_refused_scores", "gauge", "Records of the newest scores that are refused.", refused)
            page += family("act_active", "gauge", "Whether this process holds the lease.", {"": last.active})
        if self._decided is not None and self._decided_at is not None:
            at = {"": self._decided_at.timestamp()}
            page += family("act_last_decision_timestamp_seconds", "gauge", "When it last decided.", at)
            page += _stand(self._decided)
        return page


def _stand(plan: Plan) -> str:
    """Say how the fleet stood at a decision; nodes that are clear and bear no mark of ours are not counted."""
    tiers: Counter[str] = Counter(dict.fromkeys((*TIERS, UNKNOWN), 0))
    tiers.update(node.tier for node in plan.nodes.values())
    targets: Counter[str] = Counter(dict.fromkeys((level.name.lower() for level in Level), 0))
    targets.update(node.target.name.lower() for node in plan.nodes.values())
    del tiers["clear"], targets["none"]
    stages: Counter[str] = Counter(dict.fromkeys(STAGES, 0))
    stages.update(each.stage for each in plan.stages.values())
    causes = Counter(key.split(" ", 1)[0] for key in plan.open_causes)
    page = family("act_nodes", "gauge", "Nodes by tier.", _by("tier", tiers))
    page += family("act_target_nodes", "gauge", "Nodes by what they are to be.", _by("level", targets))
    page += family(
        "act_over_budget_nodes", "gauge", "Nodes left in service for lack of budget.", {"": len(plan.over_budget)}
    )
    page += family("act_stage_groups", "gauge", "Groups of nodes by stage.", _by("stage", stages))
    page += family("act_breaker_causes", "gauge", "Causes that hold the breaker open.", {"": len(plan.open_causes)})
    page += family("act_breaker_open", "gauge", "The same by kind.", _by("cause", causes))
    left: dict[str, int] = {}
    for use in plan.uses:
        kind = use.scope[0]
        left[kind] = min(left.get(kind, use.allowed - use.lost), use.allowed - use.lost)
    text = "Nodes that the fullest budget of a kind still lets go; below zero where others took nodes out."
    return page + family("act_budget_left_nodes", "gauge", text, _by("scope", left))


def _by(name: str, counts: Counter[str] | dict[str, int]) -> dict[str, float]:
    return {labels(**{name: key}): float(count) for key, count in sorted(counts.items())}


def _by_two(counts: Counter[tuple[str, str]]) -> dict[str, float]:
    return {labels(verb=verb, came_to=came_to): float(count) for (verb, came_to), count in sorted(counts.items())}


_ANSWER_WITHIN_S = 5.0
_ROUNDS = 3


class MetricsPage:
    """What the page shows; rounds are noted by one thread, pages written by others.

    ``most_time``: what a round may take.
    """

    def __init__(self, clock: Clock, every: timedelta, most_time: timedelta) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._metrics = RoundMetrics()
        self._silent = _ROUNDS * (every + most_time)
        self._since: datetime = clock.now()

    def note(self, report: RoundReport, seconds: float) -> None:
        """Count a round that has ended."""
        with self._lock:
            self._metrics.note(report, seconds)
            self._since = self._clock.now()

    def text(self) -> str:
        """Write the numbers."""
        with self._lock:
            return self._metrics.exposition()

    def illness(self) -> str | None:
        """Say why the process should be started anew; None: it works. A scheduler that is down is not its illness."""
        with self._lock:
            silent = self._clock.now() - self._since
        return f"no round has ended for {silent.total_seconds():.0f} s" if silent > self._silent else None


@contextlib.contextmanager
def listening(page: MetricsPage, address: str) -> Iterator[int]:
    """Serve a page while the context lasts.

    ``address``: ``host:port``; port 0 is any free one.
    Raises ``InputError`` if it is no address, or cannot be listened on.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InputError(
            f"{address!r} is no address to listen on", "--listen", "Write host:port, such as 127.0.0.1:9220."
        )
    try:
        server = _Server(host.strip("[]") or "127.0.0.1", int(port), _handler(page))
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)


def _handler(page: MetricsPage) -> type[BaseHTTPRequestHandler]:
    routes: dict[str, Callable[[], tuple[int, str, str]]] = {
        "/metrics": lambda: (200, page.text(), MEDIA),
        "/healthz": lambda: _health(page),
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = _ANSWER_WITHIN_S
        server_version = "predrain"
        sys_version = ""

        def do_GET(self) -> None:
            route = routes.get(self.path.split("?", 1)[0])
            status, text, media = route() if route else (404, "not found\n", "text/plain; charset=utf-8")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: whoever scrapes would fill the log."""

    return Handler


def _health(page: MetricsPage) -> tuple[int, str, str]:
    ill = page.illness()
    return (200 if ill is None else 503), f"{ill or 'ok'}\n", "text/plain; charset=utf-8"
