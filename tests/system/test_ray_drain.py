"""The command that drains Ray's nodes, on a real Ray: a task ends in peace, then its node leaves."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from scheduler.evacuation.hooks import CommandHook
from scheduler.evacuation.settings import CommandSettings
from scheduler.ports.workloads import HookReply
from tests.waiting import free_port, wait

pytestmark = pytest.mark.system
HOOK = Path(__file__).parents[2] / "deploy" / "act" / "ray_drain_node.py"
HEAD, WORKER = "127.0.0.3", "127.0.0.2"
TASK = """
import pathlib, ray, sys, time
ray.init(_node_ip_address="127.0.0.3", log_to_driver=False)
@ray.remote(num_cpus=1, max_retries=0)
def work(path):
    pathlib.Path(path + ".begun").touch()
    while not pathlib.Path(path + ".may_end").exists():
        time.sleep(0.1)
    pathlib.Path(path).touch()
ray.get(work.remote(sys.argv[1]))
"""


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A head without CPUs, and a worker."""
    port, dashboard = free_port(), free_port()
    place = tempfile.mkdtemp(prefix="ray")  # short enough for a socket
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ADDRESS", f"{HEAD}:{port}")
    head = ("--head", f"--node-ip-address={HEAD}", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=0",
            f"--temp-dir={place}")  # fmt: skip
    worker = (f"--address={HEAD}:{port}", f"--node-ip-address={WORKER}", "--num-cpus=1")
    started: list[subprocess.Popen[bytes]] = []
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}

    def alive() -> int:
        command = ["ray", "list", "nodes", "--format=json"]
        return subprocess.run(command, capture_output=True, check=False).stdout.count(b'"state": "ALIVE"')

    try:
        for number, options in enumerate((head, worker), start=1):
            command = ["ray", "start", "--block", "--object-store-memory=100000000", "--disable-usage-stats", *options]
            with (tmp_path / f"ray{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                )
            wait(lambda number=number: alive() == number)
        yield tmp_path
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        shutil.rmtree(place, ignore_errors=True)


def test_a_task_ends_and_its_node_leaves_and_the_head_is_never_drained(ray: Path) -> None:
    command = CommandHook(CommandSettings((str(HOOK),), timedelta(seconds=30)))
    deadline = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()

    def ask(node: str) -> HookReply:
        return command.tell(
            {"kind": "checkpoint", "key": "k1", "node": node, "reason": "x", "deadline": deadline}, "k1"
        )

    ended = ray / "task"
    (ray / "task.py").write_text(TASK)
    with subprocess.Popen([sys.executable, ray / "task.py", ended]) as task:
        wait((ray / "task.begun").exists)
        assert ask(WORKER).kind == "waiting"
        assert not ended.exists()
        (ray / "task.may_end").touch()
        wait(lambda: ask(WORKER).kind == "done")
        assert ended.exists()
        assert task.wait(60) == 0
    assert "head" in ask(HEAD).message
    assert ask("127.0.0.9").message == "no Ray node is on it"
