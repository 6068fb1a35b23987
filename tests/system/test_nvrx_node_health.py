"""The daemon that NVIDIA's resiliency extension asks before a rendezvous, asked by that extension's own client."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.serving.http.world import record, running
from tests.serving.score_folder import write_scores
from tests.waiting import free_port, wait

pytestmark = pytest.mark.system
DAEMON = Path(__file__).parents[2] / "deploy" / "act" / "nvrx_node_health.py"
EXTENSION = "nvidia-resiliency-ext==0.6.0"
ASK = """
import sys
from nvidia_resiliency_ext.shared_utils.health_check import NodeHealthCheck
print(NodeHealthCheck(endpoint=sys.argv[1])())
"""
DECIDED = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension without what it needs for anything else; its wheel is for Python 3.12, its client for any."""
    target = tmp_path_factory.mktemp("extension")
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_39_x86_64"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), *options, EXTENSION]
    got = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=300)
    if got.returncode:
        pytest.skip(f"{EXTENSION} cannot be installed: {got.stderr.splitlines()[-1]}")
    return target


@pytest.fixture
def asks(extension: Path) -> Callable[[Path], bool]:
    """Give what the extension makes of a daemon's answer."""

    def ask(socket: Path) -> bool:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(extension), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", ASK, str(socket)]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
        return {"True": True, "False": False}[result.stdout.strip()]

    return ask


@contextmanager
def daemon(node: str, port: int) -> Iterator[Path]:
    """Run the daemon of a node; on leaving, its socket has gone."""
    with tempfile.TemporaryDirectory() as place:  # short enough for a socket
        socket = Path(place) / "nvhcd.sock"
        environment = os.environ | {"NODE": node, "PREDRAIN_URL": f"http://127.0.0.1:{port}"}
        process = subprocess.Popen([sys.executable, str(DAEMON), str(socket)], env=environment)
        try:
            wait(lambda: socket.is_socket() and socket.stat().st_mode & 0o777 == 0o666)
            yield socket
        finally:
            process.terminate()
            assert process.wait(30) == 0
            assert not socket.exists()


def scores(folder: Path, *, expires: timedelta) -> Path:
    risks = {"n1": (0.9, "high"), "n2": (0.3, "elevated")}
    records = [record(f"GPU-{node}", node, *risk, decided=DECIDED, expires=expires) for node, risk in risks.items()]
    write_scores(folder, records, DECIDED)
    return folder


def test_a_node_of_tier_high_is_left_out_and_no_other(tmp_path, asks):
    with running(scores(tmp_path, expires=timedelta(hours=12)), clock=lambda: datetime.now(UTC)) as service:
        for node, passes in (("n1", False), ("n2", True), ("a-node-without-scores", True)):
            with daemon(node, service.port) as socket:
                assert asks(socket) is passes


def test_a_score_stands_without_the_service_until_it_expires(tmp_path, asks):
    expires = datetime.now(UTC) + timedelta(seconds=45)
    with ExitStack() as stack:
        serving = running(scores(tmp_path, expires=expires - DECIDED), clock=lambda: datetime.now(UTC))
        with daemon("n1", stack.enter_context(serving).port) as socket:
            assert asks(socket) is False
            stack.close()
            assert asks(socket) is False
            wait(lambda: datetime.now(UTC) > expires)
            assert asks(socket) is True


def test_a_node_of_which_nothing_was_ever_heard_passes(asks):
    with daemon("n1", free_port()) as socket:
        assert asks(socket) is True
