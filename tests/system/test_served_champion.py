"""`predrain serve --model champion` and a real MLflow store: followed, kept when the store is gone, ended in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from models.bundle.store import Bundle, save_bundle
from models.registry.champion import crown
from models.registry.runs import log_run
from models.registry.store import register_bundle
from tests.models.small_models import fitted_models
from tests.serving.http.test_process import lives
from tests.serving.http.world import Client
from tests.waiting import free_port, wait

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from predrain.command import main; main()", "serve"]
FACTS = {"params": {"labels": {"horizon": "24h"}}}


@contextmanager
def served(folder: Path, uri: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    port = free_port()
    command = [*COMMAND, "--scores", str(folder / "scores"), "--listen", f"127.0.0.1:{port}", "--no-extender"]
    command += ["--model", "champion", "--registry", uri, "--champion-interval", "1s", *more]
    with (folder / "log").open("a") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, text=True, cwd=ROOT)
    client = Client(port)
    try:
        wait(lambda: process.poll() is not None or lives(port))
        assert process.poll() is None, (folder / "log").read_text()
        yield process, client
    finally:
        client.connection.close()
        if process.poll() is None:
            process.kill()
        process.wait(120)


def ready(client: Client) -> Any:
    return client.send("GET", "/readyz")[1]


def bundle(folder: Path, profile: str) -> Bundle:
    return save_bundle(folder / profile, fitted_models(), {"profile": profile, **FACTS})


def test_the_champion_is_served_followed_and_kept(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = log_run(uri, "e", name="r", params={}, metrics={}, tags={})
    bundles = [bundle(tmp_path, profile) for profile in ("lightgbm", "logistic")]
    versions = [register_bundle(uri, "predrain", each.path, run_id=run) for each in bundles]
    with served(tmp_path, uri) as (process, client):
        wait(lambda: any("there is no champion" in each for each in ready(client).get("reasons", [])))
        crown(uri, "predrain", versions[0], expected=None, tags={})
        told = wait(lambda: ready(client).get("model"))
        assert told == {"digest": bundles[0].digest, "profile": "lightgbm", "version": str(versions[0])}
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
        imported = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/sqlalchemy/" not in imported  # MLflow's, which the process that asks imports alone
        crown(uri, "predrain", versions[1], expected=versions[0], tags={})
        wait(lambda: ready(client)["model"]["version"] == str(versions[1]))
        (tmp_path / "mlflow.db").rename(tmp_path / "away.db")
        wait(lambda: any("cannot be known: no store here" in each for each in ready(client)["warnings"]))
        assert ready(client)["model"]["version"] == str(versions[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert children
        wait(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {"version 1 is champion", "version 2 is champion"} <= {line.get("message") for line in lines}
