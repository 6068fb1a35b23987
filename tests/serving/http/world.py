"""A folder of scores made by hand, and the service running on it."""

import contextlib
import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from policy.risk_record import ModelName, RiskReason, RiskRecord
from serving.logs import AccessLog
from serving.server import Tls, serve
from serving.service import Service
from tests.waiting import wait

NOW = datetime(2026, 1, 1, 7, tzinfo=UTC)
DECIDED = datetime(2026, 1, 1, 6, tzinfo=UTC)
MODEL = ModelName("ab" * 32, "mean_log_odds", 3)
REASON = RiskReason("correctable ECC errors rose by 17,700; fleet 99th percentile 0", "telemetry", 0.6, "gpu_temp_c")


def record(
    unit: str,
    node: str,
    risk: float | None,
    tier: str = "clear",
    *,
    decided: datetime = DECIDED,
    expires: timedelta = timedelta(hours=12),
    slot: str | None = None,
) -> RiskRecord:
    known = risk is not None
    return RiskRecord(
        unit=unit,
        gpu=unit,
        node=node,
        slot=slot,
        status="ok" if known else "unknown",
        unknown_reason=None if known else "its newest sample is 3 h old",
        risk=risk,
        risks={"6h": risk / 4} if risk is not None else {},
        score=risk * 10 if risk is not None else None,
        rank=1 if known else None,
        alert=known and tier == "high",
        tier=tier if known else "unknown",
        decision_time=decided,
        issued_at=decided + timedelta(minutes=11),
        expires_at=decided + expires,
        horizon=timedelta(hours=24),
        model=MODEL,
        sample_age_seconds=600.0,
        completeness=1.0,
        reasons=(REASON,) if tier in ("elevated", "high") and known else (),
    )


def small_fleet(decided: datetime = DECIDED) -> list[RiskRecord]:
    """Five nodes, one of each tier and one of which nothing is known."""
    rows = [("n1", 0.9, "high"), ("n2", 0.3, "elevated"), ("n3", 0.05, "watch"), ("n4", 0.001, "clear")]
    fleet = [record(f"GPU-{node}-0", node, risk, tier, decided=decided, slot="0") for node, risk, tier in rows]
    fleet += [record(f"GPU-{node}-1", node, 0.0005, decided=decided, slot="1") for node, _, _ in rows]
    return [*fleet, record("GPU-n5-0", "n5", None, decided=decided)]


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def send(
        self, method: str, path: str, body: Any = None, media: str | None = "application/json", **headers: str
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Send; a body that is no bytes is sent as JSON. Returns status, content (JSON where it is) and headers."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None and media is not None:
            sent["Content-Type"] = media
        try:
            self.connection.request(method, path, body=data, headers=sent)
            response = self.connection.getresponse()
            content: Any = response.read()
        except (http.client.HTTPException, OSError):
            self.connection.close()
            raise
        if "json" in response.headers.get("Content-Type", "") and content.strip():
            content = json.loads(content, parse_constant=_no_constant)
        return response.status, content, response.headers

    def get(self, path: str) -> Any:
        status, content, _ = self.send("GET", path)
        assert status == 200, content
        return content

    def post(self, path: str, body: Any) -> Any:
        status, content, _ = self.send("POST", path, body)
        assert status == 200, content
        return content


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} in an answer")


class Running:
    """A service in a thread of this process."""

    def __init__(self, service: Service, port: int, extender_port: int) -> None:
        self.service = service
        self.port = port
        self.extender_port = extender_port
        self.clients: list[Client] = []

    def metric(self, name: str) -> float:
        value = self.service.metrics.registry.get_sample_value(name)
        assert value is not None, name
        return value

    @property
    def active(self) -> float:
        return self.metric("predrain_http_active_requests")

    def client(self, token: str | None = None) -> Client:
        self.clients.append(Client(self.port, token))
        return self.clients[-1]

    def extender(self) -> Client:
        self.clients.append(Client(self.extender_port))
        return self.clients[-1]


@contextlib.contextmanager
def running(scores: Path, *, wait_for_scores: bool = True, tls: Tls | None = None, **more: Any) -> Iterator[Running]:
    """Serve until the block ends."""
    more.setdefault("clock", lambda: NOW)
    more.setdefault("log", AccessLog(None))
    service = Service(scores, **more)
    ports: list[int] = []
    listening = threading.Event()

    def started(port: int, extender: int | None) -> None:
        assert extender is not None
        ports.extend((port, extender))
        listening.set()

    stop = threading.Event()
    options = {"extender_port": 0, "started": started, "stop": stop, "tls": tls}
    thread = threading.Thread(target=serve, args=(service, "127.0.0.1", 0), kwargs=options)
    thread.start()
    try:
        assert listening.wait(60)
        if wait_for_scores:
            wait(lambda: service.score_cache.served.fleet is not None)
        handle = Running(service, *ports)
        yield handle
        for client in handle.clients:
            client.connection.close()
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def token_line(scopes: str, token: str, name: str = "") -> str:
    return f"{scopes} sha256:{hashlib.sha256(token.encode()).hexdigest()} {name}\n"


def routes_of(app: FastAPI) -> list[APIRoute]:
    return [route for route in app.routes if isinstance(route, APIRoute)]
