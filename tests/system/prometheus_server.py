"""A real Prometheus for tests: its own port and data, loaded from OpenMetrics text by promtool."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import free_port

CONFIG = "global:\n  scrape_interval: 1h\n"
READY_WITHIN_S = 240.0


@dataclass(frozen=True)
class PrometheusServer:
    """A running server: its address and process."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def need_prometheus() -> None:
    """Skip the test where Prometheus is not installed."""
    for tool in ("prometheus", "promtool"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: apt-get install prometheus")


def load_blocks(openmetrics: Path, data: Path) -> None:
    """Make a data folder from an OpenMetrics file with time stamps."""
    made = subprocess.run(
        [
            "promtool",
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--max-block-duration=768h",  # not listed by --help; without it the text is read once for every two hours
            "--quiet",
            openmetrics,
            data,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr


@contextmanager
def prometheus(
    data: Path, *, port: int | None = None, arguments: Sequence[str] = (), config: str = CONFIG
) -> Iterator[PrometheusServer]:
    """Run a server on a data folder until the block ends; stopped gently, killed if that takes too long."""
    port = free_port() if port is None else port
    data.mkdir(parents=True, exist_ok=True)
    file, log = data.with_name(f"{data.name}.yml"), data.with_name(f"{data.name}.log")
    file.write_text(config)
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={data}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *arguments,
            ],
            stdout=stream,
            stderr=stream,
        )
        server = PrometheusServer(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_ready(server)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(120)


def _wait_ready(server: PrometheusServer) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"Prometheus did not become ready: {server.log.read_text()[-2000:]}")
