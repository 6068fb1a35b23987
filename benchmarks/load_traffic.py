"""The callers of :mod:`benchmarks.serve_load`: each asks, retries as documented, and checks every answer it gets."""

from __future__ import annotations

import http.client
import io
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

ARROW: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"
_RESEND_S: Final = 0.2


@dataclass
class Ledger:
    """What came of all requests; filled by several threads.

    ``wrong``: answers that are none of those expected; at most a hundred are kept.
    ``dropped``: times (monotonic) at which a request under way came to nothing.
    """

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note_wrong(self, what: Any) -> None:
        """Keep a wrong answer."""
        with self.lock:
            if len(self.wrong) < 100:
                self.wrong.append(what)


@dataclass(frozen=True)
class Asked:
    """A request, and what its answer must be.

    ``check``: from status and content to whether it is right.
    """

    kind: str
    method: str
    path: str
    body: bytes | None
    media: str
    check: Callable[[int, Any], bool]


class Caller(threading.Thread):
    """One connection that sends requests at a pace until it is told to stop.

    ``per_s``: requests a second.

    The documented way of a client: a connection that cannot be made, and 503 and 429, are tried again, after
    ``Retry-After`` where it is said; an answer that never came is asked for again too, and counted.
    """

    def __init__(
        self, port: int, make: Callable[[], Asked], per_s: float, ledger: Ledger, stop: threading.Event
    ) -> None:
        super().__init__(name="caller", daemon=True)
        self._port, self._make, self._per_s, self._ledger, self._stop_asking = port, make, per_s, ledger, stop
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """Send."""
        due = time.monotonic()
        while not self._stop_asking.is_set():
            try:
                self._ask(self._make())
            except Exception as error:  # a fault of the harness must be seen, too
                self._ledger.note_wrong(("harness", repr(error)))
            due = max(due + 1 / self._per_s, time.monotonic() - 1)
            self._stop_asking.wait(max(0.0, due - time.monotonic()))
        if self._connection is not None:
            self._connection.close()

    def _ask(self, asked: Asked) -> None:
        began = time.perf_counter()
        while True:
            status, content, wait_s = self._once(asked)
            if status not in (0, 429, 503):
                break
            if self._stop_asking.wait(wait_s):
                return
            began = time.perf_counter()
        if asked.kind == "node":
            self._ledger.took_s.append(time.perf_counter() - began)
        if not asked.check(status, content):
            self._ledger.note_wrong((asked.kind, asked.path, status, str(content)[:500]))

    def _once(self, asked: Asked) -> tuple[int, Any, float]:
        """Send once; status 0: no answer came."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=40)
                self._connection.connect()
        except OSError:  # nobody is there: nothing was accepted
            self._drop()
            return 0, None, _RESEND_S
        try:
            self._connection.request(asked.method, asked.path, asked.body, {"Content-Type": asked.media})
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self._drop()
            with self._ledger.lock:
                self._ledger.dropped.append(time.monotonic())
            return 0, None, _RESEND_S
        with self._ledger.lock:
            self._ledger.answers[asked.kind, answer.status] += 1
        content = json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body
        return answer.status, content, float(answer.headers.get("Retry-After", _RESEND_S))

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
        self._connection = None


class Rows:
    """Feature rows with the answers of each bundle, as the bundle itself gives them.

    ``score``: by digest: from float32 rows and units to the predictions.
    """

    def __init__(
        self, columns: Sequence[str], score: Mapping[str, Callable[[np.ndarray, list[str]], list[dict[str, Any]]]]
    ) -> None:
        rng = np.random.default_rng(7)
        self._bodies: list[tuple[str, bytes, str, dict[str, list[dict[str, Any]]]]] = []
        for count, media in ((1, JSON), (8, JSON), (64, ARROW), (64, JSON)):
            values = rng.normal(size=(count, len(columns))).astype(np.float32)
            values[rng.random(values.shape) < 0.1] = np.nan
            units = [f"unit-{number}" for number in range(count)]
            body = _arrow(columns, values, units) if media == ARROW else _json(columns, values, units)
            self._bodies.append(
                (f"{count} rows {media[-6:]}", body, media, {name: each(values, units) for name, each in score.items()})
            )

    def ask(self) -> Asked:
        """Give a request to score rows."""
        kind, body, media, expected = random.choice(self._bodies)  # noqa: S311 - no secret

        def check(status: int, content: Any) -> bool:
            digest = content.get("model", {}).get("digest") if isinstance(content, dict) else None
            return status == 200 and digest in expected and content["predictions"] == expected[digest]

        return Asked(kind, "POST", "/v1/predict", body, media, check)


class Nodes:
    """Look-ups against decisions of which each has its own risk: an answer that mixes two shows."""

    def __init__(self, nodes: int, risks: Mapping[str, float]) -> None:
        self._nodes, self._risks = nodes, risks

    def ask(self) -> Asked:
        """Give a look-up of one node, of some, or of all."""
        choice, node = random.random(), f"n{random.randrange(self._nodes)}"  # noqa: S311 - no secret
        if choice < 0.8:
            return Asked("node", "GET", f"/v1/nodes/{node}", None, JSON, lambda s, c: self._right(s, c, [c]))
        if choice < 0.95:
            body = json.dumps({"nodes": [node, "n0", "n1"]}).encode()
            return Asked("nodes", "POST", "/v1/predict", body, JSON, lambda s, c: self._right(s, c, c["nodes"], 3))
        path = "/v1/nodes?limit=1000"
        return Asked("fleet", "GET", path, None, JSON, lambda s, c: self._right(s, c, c["nodes"], self._nodes))

    def _right(self, status: int, content: Any, nodes: list[Any], count: int = 1) -> bool:
        risk = self._risks.get(content.get("decision", "")) if status == 200 else None
        return (
            risk is not None
            and len(nodes) == count
            and all(math.isclose(each["risk"], risk, rel_tol=1e-12) for each in nodes)
        )


def watch() -> Asked:
    """Give a request of what operators watch with."""
    path = random.choice(["/healthz", "/metrics", "/readyz", "/openapi.json", "/"])  # noqa: S311 - no secret
    return Asked("watch", "GET", path, None, JSON, lambda status, _: status == 200)


def _json(columns: Sequence[str], values: np.ndarray, units: list[str]) -> bytes:
    rows = [
        {"unit": unit} | {name: None if math.isnan(each) else each for name, each in zip(columns, row, strict=True)}
        for unit, row in zip(units, values.astype(float).tolist(), strict=True)
    ]
    return json.dumps({"rows": rows}).encode()


def _arrow(columns: Sequence[str], values: np.ndarray, units: list[str]) -> bytes:
    table = pa.table({"unit": units} | {name: values[:, at] for at, name in enumerate(columns)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
