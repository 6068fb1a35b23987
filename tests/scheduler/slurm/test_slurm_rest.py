"""Slurm through slurmrestd: the version that both sides know, tokens, answers of every kind."""

import contextlib
import re
import socketserver
import ssl
import tempfile
import threading
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from foundation.errors import InputError
from scheduler.ports.clock import SystemClock
from scheduler.ports.errors import SchedulerError
from scheduler.slurm.job import CheckpointSignal
from scheduler.slurm.node import NodeChange
from scheduler.slurm.rest import SlurmRest
from scheduler.slurm.scheduler import open_slurm
from scheduler.slurm.settings import SlurmSettings
from tests import http_server
from tests.http_server import certify
from tests.scheduler.slurm.rest_server import Rest, serving


@pytest.fixture
def token(tmp_path) -> str:
    file = tmp_path / "token"
    file.write_text("secret\n")
    return str(file)


def opened(where: str, token: str, **settings: object) -> SlurmRest:
    return SlurmRest(SlurmSettings("/nowhere", rest_url=where, rest_user="slurm", rest_token_file=token, **settings))


@pytest.mark.parametrize("version", [39, 40, 45])
def test_nodes_are_read_and_written(token, version):
    rest = Rest(version)
    with serving(rest) as where:
        port = opened(where, token)
        assert port.update("n0", NodeChange("DRAIN", "r")).kind == "refused"  # not before it was read
        assert [item.name for item in port.nodes()] == ["n0", "n1"]
        assert port.read_only() is None
        assert port.server_time() == datetime(2026, 11, 30, 14, 1, 32, tzinfo=UTC)
        assert port.update("n0", NodeChange("DRAIN", "r", '{"a": 1}', 9)).kind == "done"
        node = port.node("n0")
        assert (node.out, node.reason, node.extra, node.weight) == ({"DRAIN"}, "r", '{"a": 1}', 9)
        weight = rest.asked[-2][2]["weight"]
        assert weight == (9 if version == 39 else {"set": True, "infinite": False, "number": 9})
        assert port.update("n0", NodeChange("UNDRAIN")).kind == "done"
        released = port.node("n0")
        assert (released.out, released.reason) == (frozenset(), None)
        assert port.node("zz") is None
        assert port.update("zz", NodeChange(weight=1)).kind == "gone"
        assert port.update("n0", NodeChange("DRAIN")).kind == "refused"
        (job,) = port.jobs("n0")
        assert port.signal(job, CheckpointSignal("USR1", True, None)).kind == "done"
        assert rest.asked[-1][:2] == ("DELETE", f"/slurm/v0.0.{version}/job/5?signal=USR1&flags=BATCH_JOB")
        assert port.requeue(job).kind == "refused"
        rest.jobs = []
        assert port.signal(job, CheckpointSignal("USR1", False, None)).kind == "gone"


def test_an_answer_of_200_with_errors_is_no_list_of_nodes_and_no_write(token):
    rest = Rest()
    with serving(rest) as where:
        port = opened(where, token)
        port.nodes()
        rest.fault = "errors"
        for read in (port.nodes, port.jobs, lambda: port.node("n0")):
            with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
                read()
        assert port.update("n0", NodeChange(weight=2)).kind == "timeout"


def test_a_unix_socket_serves_as_well(token):
    with tempfile.TemporaryDirectory(prefix="sr") as folder, serving(Rest(), Path(folder) / "s") as where:
        assert len(opened(where, token).nodes()) == 2


def test_an_old_slurmrestd_is_read_and_not_written_to(token):
    rest = Rest(38)
    with serving(rest) as where:
        port = opened(where, token)
        assert len(port.nodes()) == 2
        assert port.read_only() == "slurmrestd's v0.0.38 cannot write nodes: Slurm is read-only"
        assert port.update("n0", NodeChange(weight=2)).kind == "refused"
    assert {method for method, _, _ in rest.asked} == {"GET"}


def test_one_that_knows_no_version_of_ours_is_not_read(token):
    with (
        serving(Rest(99)) as where,
        pytest.raises(SchedulerError, match=re.escape("no version from v0.0.38 to v0.0.45")),
    ):
        opened(where, token).nodes()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cut", "RemoteProtocolError|ReadError"),
        ("truncated", "RemoteProtocolError|cut off"),
        ("garbage", "not JSON"),
        ("redirect", "HTTP 302"),
        ("slow", "complete response"),
    ],
)
def test_what_is_not_answered_wholly_is_not_read_and_not_taken_for_written(token, fault, message):
    rest = Rest()
    with serving(rest) as where:
        port = opened(where, token)
        port.nodes()
        rest.fault = fault
        if fault == "slow":
            port._settings = replace(port._settings, timeout=timedelta(seconds=0.3))
        with pytest.raises(SchedulerError, match=message):
            port.nodes()
        answer = port.update("n0", NodeChange(weight=2))
        assert answer.kind == ("refused" if fault == "redirect" else "timeout")


def test_a_certificate_that_is_not_trusted_is_named_without_options_of_other_commands(token, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certify(tmp_path, "another"))
    with (
        http_server.serving(http_server.Handler, tls=context) as where,
        pytest.raises(SchedulerError, match="CERTIFICATE_VERIFY_FAILED") as error,
    ):
        opened(where, token).nodes()
    assert "--ca-file" not in str(error.value)


def test_headers_that_drip_end_at_the_deadline(token):
    stop = threading.Event()

    class Dripping(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while not stop.wait(0.05):
                    self.wfile.write(b"x")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        without_deadline = threading.Timer(60, stop.set)
        without_deadline.start()
        try:
            with pytest.raises(SchedulerError, match="no complete response within 1 s"):
                opened(f"http://127.0.0.1:{server.server_address[1]}", token, timeout=timedelta(seconds=1)).nodes()
            assert not stop.is_set()
        finally:
            without_deadline.cancel()
            stop.set()
            server.shutdown()


def test_a_token_is_read_anew_for_each_request(token):
    rest = Rest()
    with serving(rest) as where:
        port = opened(where, token)
        port.nodes()
        rest.token = "renewed"
        with pytest.raises(SchedulerError, match="rejects the token"):
            port.nodes()
        Path(token).write_text("renewed")
        assert len(port.nodes()) == 2
        Path(token).unlink()
        with pytest.raises(SchedulerError, match="token cannot be read"):
            port.nodes()
    with pytest.raises(InputError, match="slurmrestd's token cannot be read"):
        opened("http://127.0.0.1:1", token)


def test_the_settings_choose_the_way(token, tmp_path):
    rest = SlurmSettings(str(tmp_path), rest_url="unix:/run/slurmrestd.sock")
    assert isinstance(open_slurm(rest, SystemClock()).port, SlurmRest)
    assert not isinstance(open_slurm(SlurmSettings(str(tmp_path)), SystemClock()).port, SlurmRest)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"soft_weight": 0}, "soft_weight"),
        ({"cluster": "a b"}, "cluster"),
        ({"rest_url": "ftp://x"}, "rest_url is 'ftp://x'"),
        ({"rest_user": "x"}, "give rest_url too"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SlurmSettings(**{"folder": "/shared", **settings})


def test_the_page_names_every_setting_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "settings.md").read_text().partition("## slurm")[2]
    for setting in fields(SlurmSettings):
        line = next((line for line in page.splitlines() if re.match(rf"\|.*`{setting.name}`.*\|", line)), None)
        assert line is not None, setting.name
        default = line.split("|")[2].strip()
        if setting.default in (MISSING, ()):
            continue
        shown = {None: "`null`", timedelta(seconds=20): "`20s`"}.get(setting.default, f"`{setting.default}`")
        assert default == shown, setting.name
