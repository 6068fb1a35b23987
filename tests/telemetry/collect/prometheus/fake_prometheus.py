"""A small Prometheus in this process: answers range selectors from lists, and fails on command."""

import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pandas as pd

from foundation.http import connect_to
from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
from telemetry.collect.prometheus.client import Bounds
from telemetry.dataset.channels import CATALOGUE
from tests import http_server
from tests.http_server import Handler
from tests.staged import staged_table

Labels = dict[str, str]
START = datetime(2026, 1, 1, tzinfo=UTC)
START_MS = int(START.timestamp()) * 1000
HOUR_MS = 3_600_000
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)("(?:[^"\\]|\\.)*")')


@dataclass
class Asked:
    """One request as the server saw it."""

    method: str
    path: str
    parameters: dict[str, str]
    headers: dict[str, str]


@dataclass
class Reply:
    """What the server says instead of an answer."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # what Content-Length claims
    pause_s: float = 0.0  # between two halves of the body


Fault = Callable[[Asked], Reply | None]


def error(status: int, text: str, **headers: str) -> Reply:
    body = json.dumps({"status": "error", "errorType": "execution", "error": text}).encode()
    return Reply(status, body, {"Content-Type": "application/json", **headers})


class FakePrometheus:
    """The server's data and rules; ``asked`` keeps what it was asked."""

    def __init__(self) -> None:
        self.series: list[tuple[Labels, list[tuple[int, float]]]] = []
        self.left_open = False
        self.right_open = False
        self.max_samples: int | None = None
        self.targets_down = 0
        self.warnings: list[str] = []
        self.warns_in = "warnings"
        self.fault: Fault | None = None
        self.asked: list[Asked] = []
        self.url = ""
        self._guard = threading.Lock()

    def add(self, name: str, labels: Labels, samples: list[tuple[int, float]]) -> None:
        self.series.append(({"__name__": name, **labels}, sorted(samples)))

    def queries(self) -> list[str]:
        return [asked.parameters["query"] for asked in self.asked if "query" in asked.parameters]

    def answer(self, asked: Asked) -> Reply:
        with self._guard:
            self.asked.append(asked)
            made = self.fault(asked) if self.fault is not None else None
        return self.whole(asked) if made is None else made

    def whole(self, asked: Asked) -> Reply:
        """Answer a request without a fault."""
        if asked.path.endswith("/api/v1/label/__name__/values"):
            match = asked.parameters.get("match[]", "{}")
            return self._good(sorted({labels["__name__"] for labels, _ in self.series if matches(labels, match)}))
        if asked.path.endswith("/api/v1/query"):
            return self._range(asked)
        return Reply(404, b"404 page not found")

    def _range(self, asked: Asked) -> Reply:
        asked_for = re.fullmatch(r"(\{.*\})\[(\d+)ms\]", asked.parameters["query"])
        if asked_for is None:  # how many targets are down
            down = [{"metric": {}, "value": [0, str(self.targets_down)]}] * bool(self.targets_down)
            return self._good({"resultType": "vector", "result": down})
        selector, length = asked_for.groups()
        until = round(float(asked.parameters["time"]) * 1000)
        after = until - int(length)
        result = []
        for labels, samples in self.series:
            if not matches(labels, selector):
                continue
            inside = [
                (ms, v)
                for ms, v in samples
                if (after < ms < until) or (ms == after and not self.left_open) or (ms == until and not self.right_open)
            ]
            if inside:
                values = [[ms // 1000 if ms % 1000 == 0 else ms / 1000, str(value)] for ms, value in inside]
                result.append({"metric": labels, "values": values})
        held = sum(len(entry["values"]) for entry in result)
        if self.max_samples is not None and held > self.max_samples:
            return error(422, "query processing would load too many samples into memory in query execution")
        return self._good({"resultType": "matrix", "result": result})

    def _good(self, data: Any) -> Reply:
        document: dict[str, Any] = {"status": "success", "data": data}
        if self.warnings:
            document[self.warns_in] = self.warnings
        text = json.dumps(document, separators=(",", ":"))
        return Reply(200, text.encode(), {"Content-Type": "application/json"})


def matches(labels: Labels, selector: str) -> bool:
    for name, operator, quoted in _MATCHER.findall(selector):
        value, wanted = labels.get(name, ""), json.loads(quoted)
        equal = bool(re.fullmatch(wanted, value)) if "~" in operator else value == wanted
        if equal == operator.startswith("!"):
            return False
    return True


@contextmanager
def serving(fake: FakePrometheus, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    class Answering(Handler):
        def handle_request(self) -> None:
            parts = urlsplit(self.path)
            form = self.body().decode()
            held = parse_qs(parts.query, keep_blank_values=True) | parse_qs(form, keep_blank_values=True)
            parameters = {name: values[-1] for name, values in held.items()}
            made = fake.answer(Asked(self.command, parts.path, parameters, dict(self.headers)))
            length = len(made.body) if made.length is None else made.length
            half = len(made.body) // 2
            self.reply(made.status, made.body[:half], {**made.headers, "Content-Length": str(length)})
            if made.pause_s:
                self.wfile.flush()
                time.sleep(made.pause_s)
            self.wfile.write(made.body[half:])
            self.close_connection = length != len(made.body)

        do_GET = do_POST = handle_request

    with http_server.serving(Answering, tls=tls) as fake.url:
        yield fake.url


def gpu_labels(number: int, **others: str) -> Labels:
    return {
        "gpu": str(number % 8),
        "UUID": f"GPU-{number:08x}-0000-4000-8000-000000000000",
        "Hostname": f"node{number // 8:02d}",
        "modelName": "H100",
        "DCGM_FI_DRIVER_VERSION": "570.1",
        **others,
    }


TEMPERATURE, REPLAYS, XIDS = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_EXP_XID_ERRORS_COUNT"


def staged(folder: Path, kind: str = "samples") -> pd.DataFrame:
    return staged_table(folder / "fleet.live", kind).to_pandas()


def values_of(frame: pd.DataFrame, channel: str) -> dict[tuple[str, int], float]:
    """Return channel values by (gpu, ms); fails if one is there twice."""
    frame = frame[frame[channel].notna()]
    ms = frame["timestamp"].dt.tz_localize(None).to_numpy().astype("datetime64[ms]").astype(int)
    keys = list(zip(frame["gpu"], ms.tolist(), strict=True))
    assert len(set(keys)) == len(keys), "a sample was staged twice"
    return dict(zip(keys, frame[channel].tolist(), strict=True))


def fill(fake: FakePrometheus, gpus: int = 3, step_ms: int = 600_000, hours: int = 6) -> dict[tuple[str, int], float]:
    """Give the server samples on and off the chunks' bounds, with a gap of two hours; return the temperatures."""
    expected = {}
    for number in range(gpus):
        labels = gpu_labels(number)
        instants = [START_MS + place * step_ms + number for place in range(hours * HOUR_MS // step_ms + 1)]
        instants = [ms for ms in instants if not START_MS + HOUR_MS < ms <= START_MS + 3 * HOUR_MS]
        samples = [(ms, 40.0 + number + place % 7) for place, ms in enumerate(instants)]
        fake.add(TEMPERATURE, labels, samples)
        fake.add(REPLAYS, labels, [(ms, 2.0**40 + place) for place, (ms, _) in enumerate(samples)])
        inside = [(ms, value) for ms, value in samples if ms <= START_MS + hours * HOUR_MS]
        expected |= {(labels["UUID"], ms): value for ms, value in inside}
    return expected


PATIENT = Bounds(request_s=60.0, first_retry_for_s=60.0)
"""No test depends on the speed of the machine; tests of silence bring bounds of their own."""


class Site:
    """A fake server, and a folder with what is fetched from it."""

    def __init__(self, fake: FakePrometheus, folder: Path) -> None:
        self.fake, self.folder = fake, folder

    def fetch(self, **changes: Any) -> dict[str, Any]:
        """Backfill six hours; keywords change the plan."""
        connection = changes.pop("connection", None) or connect_to(self.fake.url)
        now = changes.pop("now", START + timedelta(days=300))
        given = {name: changes.pop(name, None) for name in ("mapping", "accounting")}
        bounds = changes.pop("bounds", PATIENT)
        plan = replace(BackfillPlan(START, START + timedelta(hours=6), chunk=timedelta(hours=1)), **changes)
        live = self.folder / "fleet.live"
        return backfill(connection, plan, live, channels=CATALOGUE, clock=lambda: now, bounds=bounds, **given)

    def staged(self, kind: str = "samples") -> pd.DataFrame:
        return staged(self.folder, kind)

    def values(self, channel: str = "gpu_temp_c") -> dict[tuple[str, int], float]:
        return values_of(self.staged(), channel)
