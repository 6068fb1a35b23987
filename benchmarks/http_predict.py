"""What a prediction over HTTP costs, beside ``mlflow models serve`` with the same champion.

Run it alone: ``python benchmarks/http_predict.py [--quick]``. A single LightGBM model is trained on a simulated fleet,
logged to MLflow and served twice: by ``mlflow models serve`` and by ``predrain serve``. Both get the same rows in the
same JSON, and their risks are compared before anything is timed. What is measured is seconds of the processor a
request, of the server's processes, because the wall's clock favours nobody on a busy machine; what the evaluation of
the trees alone takes, measured apart in this process, is taken off. Whole requests of
the champion and of an ensemble, with reasons and without, and node look-ups at 500 a second are printed besides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.local_ports import asked_once, free_port
from features.matrix.matrix import FeatureMatrix
from models.bundle.store import load_bundle
from policy.risk_record import ModelName, RiskRecord
from serving.scores.writing import ScoresFolder, write_decision

BIN: Final = Path(sys.executable).parent
LEARNER: Final = "lightgbm"
SIZES: Final = (1, 512)
REQUIRED: Final = {"1 row, JSON": 10.0, "512 rows, JSON": 4.0, "512 rows, Arrow": 10.0}
"""How many times less of the processor than MLflow's server, outside the model's own evaluation."""

AIM: Final = "; ".join(f"{name}: {times:g} times" for name, times in REQUIRED.items())

TOLERANCE: Final = 2e-6
ARROW: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"
_SEED: Final = 131
_TICK: Final = os.sysconf("SC_CLK_TCK")
SINGLE: Final = f"models: {{profile: {LEARNER}, learners: [{LEARNER}], parallel: {{members: [{LEARNER}]}}, "
ENSEMBLE: Final = "models: {profile: mean_log_odds, learners: [lightgbm, xgboost, random_forest], "
PARAMS: Final = {
    "single": SINGLE + f"cascade: {{stages: [{LEARNER}]}}}}\n",
    "ensemble": ENSEMBLE + "parallel: {members: [lightgbm, xgboost, random_forest]}, cascade: {stages: [lightgbm]}}\n",
}


@dataclass
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    columns: list[str] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Give the seconds of the processor that its processes have taken."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid:  # its process group
                    total += sum(map(int, fields[11:15]))
        return total / _TICK

    def ask(self, connection: http.client.HTTPConnection, path: str, body: bytes, media: str) -> bytes:
        """Send a body, and read the answer whole."""
        connection.request("POST", path, body, {"Content-Type": media})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            sys.exit(f"{path} answers {answer.status}: {content[:500]!r}")
        return content


def main() -> None:
    """Measure, print a table and a line of JSON, and fail where less is reached than was promised."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="http-predict-") as made:
        folder = Path(made)
        matrix = prepare(folder, quick)
        rows = rows_of(matrix)
        with mlflow_server(folder) as theirs, predrain_server(folder, "single") as ours:
            line = compare(folder, rows, ours, theirs, quick)
            measure_look_ups(ours, 2 if quick else 10)
        with predrain_server(folder, "ensemble") as ours:
            print_whole("ensemble", ours, rows, quick)
    missed = [name for name, least in REQUIRED.items() if line["others"][name] < least]
    print(json.dumps({**line, "aim": AIM, "met": not missed}))
    if missed and not quick:
        sys.exit(f"not reached: {', '.join(f'{name} must be {REQUIRED[name]:g} times' for name in missed)}")


def prepare(folder: Path, quick: bool) -> FeatureMatrix:
    """Simulate a fleet, train the single champion and the ensemble, and log the first to MLflow."""
    size = ["--gpus", "32" if quick else "128", "--days", "45", "--acceleration", "60", "--seed", str(_SEED)]
    run(folder, "simulate", *size, "--out", "fleet")
    run(folder, "features", "--dataset", "fleet", "--out", "matrix")
    for name, params in PARAMS.items():
        (folder / f"{name}.yaml").write_text(params)
        track = ["--track", f"sqlite:///{folder / 'mlflow.db'}"] if name == "single" else []
        run(folder, "train", "--matrix", "matrix", "--out", name, "--params", f"{name}.yaml", *track)
    return FeatureMatrix.open(folder / "matrix")


def run(folder: Path, *words: str) -> None:
    """Run a verb of predrain."""
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(  # noqa: S603 - our own command
        [BIN / "predrain", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"predrain {' '.join(words)} failed:\n{done.stderr}")


def rows_of(matrix: FeatureMatrix) -> np.ndarray:
    """Give 512 rows of the matrix, the newest, repeated where there are fewer."""
    at = matrix.rows.index[~matrix.rows["augmented"]].to_numpy()[-max(SIZES) :]
    return matrix.values(np.resize(at, max(SIZES)))


def frames(names: list[str], values: np.ndarray) -> tuple[bytes, bytes]:
    """Write rows as MLflow's JSON and as an Arrow stream."""
    units = [f"gpu-{number}" for number in range(len(values))]
    plain = [[None if math.isnan(each) else each for each in row] for row in values.astype(float).tolist()]
    data = [[unit, *row] for unit, row in zip(units, plain, strict=True)]
    text = json.dumps({"dataframe_split": {"columns": ["unit", *names], "data": data}}).encode()
    table = pa.table({"unit": units, **{name: values[:, at] for at, name in enumerate(names)}})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return text, sink.getvalue()


def compare(folder: Path, rows: np.ndarray, ours: Server, theirs: Server, quick: bool) -> dict[str, Any]:
    """Measure both servers with the single champion; return the line of JSON."""
    bundle = load_bundle(folder / "single")
    names = [column.name for column in bundle.fitted.columns]
    learner = bundle.fitted.learners[LEARNER]
    print(f"{len(names)} features; CPU ms a request; own: the trees alone\n")
    print(f"{'':<18}{'ours':>9}{'own':>8}{'rest':>9}{'MLflow':>10}{'own':>8}{'rest':>9}{'ratio':>8}")
    others: dict[str, float] = {}
    rest: dict[str, float] = {}
    for size in SIZES:
        text, stream = frames(names, rows[:size])
        check(ours, theirs, text, stream)
        counts = {1: (300, 100), 512: (20, 8)}[size] if not quick else {1: (100, 30), 512: (6, 3)}[size]
        own = cpu_of(lambda n=size: learner.predict_proba(rows[:n]))  # type: ignore[misc]
        sent = {
            "theirs": (theirs, "/invocations", text, JSON, counts[1]),
            "JSON": (ours, "/invocations", text, JSON, counts[0]),
            "Arrow": (ours, "/v1/predict", stream, ARROW, counts[0]),
        }
        whole = measure(sent, 2 if quick else 4)
        for form in ("JSON", "Arrow"):
            key = f"{size} row{'s' if size > 1 else ''}, {form}"
            rest[key] = max(whole[form] - own, 1e-6)
            left = whole["theirs"] - own
            others[key] = round(left / rest[key], 1)
            print(
                f"{key:<18}{whole[form] * 1e3:>9.3f}{own * 1e3:>8.3f}{rest[key] * 1e3:>9.3f}"
                f"{whole['theirs'] * 1e3:>10.3f}{own * 1e3:>8.3f}{left * 1e3:>9.3f}{others[key]:>8.1f}"
            )
    print()
    print_whole("single champion", ours, rows, quick)
    return {
        "name": "http_predict",
        "value": round(rest["512 rows, JSON"] * 1e3, 3),
        "unit": "CPU ms a request of 512 rows of JSON, without the trees",
        "peer": "mlflow models serve",
        "ratio": others["512 rows, JSON"],
        "limit_share": None,
        "checked": True,
        "others": others,
    }


def check(ours: Server, theirs: Server, text: bytes, stream: bytes) -> None:
    """End the run where the two servers' risks differ."""
    answers = [
        json.loads(server.ask(connection_to(server), path, body, media))["predictions"]
        for server, path, body, media in (
            (theirs, "/invocations", text, JSON),
            (ours, "/invocations", text, JSON),
            (ours, "/v1/predict", stream, ARROW),
        )
    ]
    first, *more = [np.array([each["risk"] for each in answer]) for answer in answers]
    for risks in more:
        if not np.allclose(first, risks, rtol=TOLERANCE):
            sys.exit(f"risks differ by {np.abs(first - risks).max():.3g}: nothing is measured")


def measure(sent: dict[str, tuple[Server, str, bytes, str, int]], rounds: int) -> dict[str, float]:
    """Give the least mean CPU seconds a request, each in its turn so that a slow moment meets all."""
    best = dict.fromkeys(sent, math.inf)
    for name, (server, path, body, media, _) in sent.items():
        connection = connection_to(server)
        for _ in range(5):
            server.ask(connection, path, body, media)
        connection.close()
        assert name in best
    for _ in range(rounds):
        for name, (server, path, body, media, count) in sent.items():
            connection = connection_to(server)
            before = server.cpu_s()
            for _ in range(count):
                server.ask(connection, path, body, media)
            best[name] = min(best[name], (server.cpu_s() - before) / count)
            connection.close()
    return best


def cpu_of(call: Callable[[], Any]) -> float:
    """Give the least mean CPU seconds of a call in this process."""
    call()
    best = math.inf
    for _ in range(5):
        began, count = time.process_time(), 0
        while time.process_time() - began < 0.1:
            call()
            count += 1
        best = min(best, (time.process_time() - began) / count)
    return best


def print_whole(what: str, server: Server, rows: np.ndarray, quick: bool) -> None:
    """Print whole requests to our server, with reasons and without."""
    for size in SIZES:
        text, stream = frames(server.columns, rows[:size])
        body = json.loads(text)["dataframe_split"]
        records = json.dumps({"rows": [dict(zip(body["columns"], row, strict=True)) for row in body["data"]]}).encode()
        count = (100 if size == 1 else 8) // (3 if quick else 1)
        sent = {
            f"{form}{told}": (server, f"/v1/predict{query}", data, media, count)
            for form, data, media in (("JSON", records, JSON), ("Arrow", stream, ARROW))
            for told, query in (("", ""), (", reasons", "?reasons=3"))
        }
        told = measure(sent, 1 if quick else 2)
        words = ", ".join(f"{name} {each * 1e3:.2f}" for name, each in told.items())
        print(f"{what}, {size} row{'s' if size > 1 else ''}, CPU ms a whole request: {words}")


def measure_look_ups(server: Server, seconds: float, per_s: int = 500) -> None:
    """Print the latency of node look-ups sent at a steady rate, from the instant at which each was due."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /v1/nodes/n7 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            sys.exit(f"a look-up failed: {head[:100]!r}")
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: "))
        await reader.readexactly(length)

    async def caller(first: int, callers: int, began: float, took: list[float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for number in range(first, int(seconds * per_s), callers):
            due = began + number / per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await one(reader, writer)
            took.append(time.perf_counter() - due)
        writer.close()

    async def all_of_them() -> list[float]:
        took: list[float] = []
        began = time.perf_counter() + 0.2
        await asyncio.gather(*(caller(first, 16, began, took) for first in range(16)))
        return took

    before = server.cpu_s()
    took = np.sort(asyncio.run(all_of_them())) * 1e3
    cpu_ms = (server.cpu_s() - before) / len(took) * 1e3
    print(
        f"node look-ups, {per_s} a second for {seconds:g} s: median {np.median(took):.2f} ms, p99 "
        f"{np.quantile(took, 0.99):.2f} ms, CPU {cpu_ms:.2f} ms each (load average {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores)\n"
    )


def connection_to(server: Server) -> http.client.HTTPConnection:
    """Open a connection that stays open."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    assert connection.sock is not None
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@contextlib.contextmanager
def predrain_server(folder: Path, bundle: str) -> Iterator[Server]:
    """Serve a bundle and the scores of a hundred nodes by ``predrain serve``."""
    write_scores(folder / "scores")
    port = free_port()
    words = ["serve", "--scores", "scores", "--model", bundle, "--port", str(port), "--no-extender"]
    with started([BIN / "predrain", *words], folder, port, "/ping") as server:
        server.columns = [column.name for column in load_bundle(folder / bundle).columns]
        yield server


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[Server]:
    """Serve the registered champion by MLflow."""
    port = free_port()
    words = ["models", "serve", "-m", "models:/predrain@challenger", "--env-manager", "local"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    with started([BIN / "mlflow", *words], folder, port, "/ping") as server:
        yield server


@contextlib.contextmanager
def started(command: list[Any], folder: Path, port: int, path: str) -> Iterator[Server]:
    """Start a server in a process group of its own, wait until it answers, and end the group."""
    env = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",  # MLflow starts its web server by name
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with (folder / f"{port}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own commands
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while asked_once(port, path)[0] != 200:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} does not answer:\n{(folder / f'{port}.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield Server(port, process)
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kind)
                process.wait(10)


def write_scores(folder: Path) -> None:
    """Write a decision about a hundred nodes of eight GPUs."""
    scores, now = ScoresFolder(folder), datetime.now(UTC).replace(microsecond=0)
    records = [
        RiskRecord(
            unit=f"GPU-{node}-{slot}", gpu=f"GPU-{node}-{slot}", node=f"n{node}", slot=str(slot), status="ok",
            why_unknown=None, risk=0.001, risks={}, score=-7.0, rank=node * 8 + slot + 1, alert=False, tier="clear",
            decision_time=now, issued_at=now, expires_at=now + timedelta(hours=12), horizon=timedelta(hours=24),
            model=ModelName("0" * 64, LEARNER), sample_age_s=60.0, completeness=1.0,
        )
        for node in range(100) for slot in range(8)
    ]  # fmt: skip
    with scores.building(now) as swap:
        write_decision(swap.path, records, {"format": 1, "units": len(records)})
        swap.commit()
    scores.point_to_newest()


if __name__ == "__main__":
    main()
