"""The client of the push protocol against a server that answers what the test says."""

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.collect.pushing.targets import HttpTarget, Later, Refused
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from tests.telemetry.collect.pushing.test_spool import land


class Server(ThreadingHTTPServer):
    """Answers each request with the next of ``answers``: (status, headers, body) or a word for a misbehaviour."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], bytes] | str] = []
        self.heard: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append(
            {"path": urlsplit(self.path).path, "query": parse_qs(urlsplit(self.path).query), "body": body}
            | {key: self.headers[key] for key in ("Content-Type", "Authorization")}
        )
        answer = self.server.answers.pop(0)
        if answer == "breaks off":
            self.wfile.write(b"HTTP/1.1 20")
        elif answer == "drips":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n")
            for _ in range(40):
                try:
                    self.wfile.write(b".")
                except OSError:
                    return
                time.sleep(0.05)
        elif answer == "is silent":
            time.sleep(1.0)
        elif answer == "says half of its answer":
            self.wfile.write(b"HTTP/1.1 500 No\r\nContent-Length: 9000\r\n\r\nhalf")
        else:
            assert isinstance(answer, tuple)
            status, headers, content = answer
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if status != 204:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return land(Landing(tmp_path / "spool", writer="nvml-n"), "samples", 1)


def test_a_file_is_posted_as_an_arrow_stream_under_its_name(server: Server, path: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    server.answers = [(204, {}, b"")] * 2
    HttpTarget(server.url + "/", token_file=token).send("samples", path, path.stem)
    (heard,) = server.heard
    assert (heard["path"], heard["query"]) == ("/v1/telemetry", {"kind": ["samples"], "name": [path.stem]})
    assert heard["Content-Type"] == "application/vnd.apache.arrow.stream"
    assert heard["Authorization"] == "Bearer s3cret"
    with pa.ipc.open_stream(heard["body"]) as stream:
        assert stream.read_all().equals(pq.read_table(path))
    # A token that was replaced is used at once; an address with the path is taken as it is.
    token.write_text("newer")
    HttpTarget(server.url + "/v1/telemetry", token_file=token).send("samples", path, "n")
    assert server.heard[1]["path"] == "/v1/telemetry"
    assert server.heard[1]["Authorization"] == "Bearer newer"


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_file_that_is_wrong_is_refused_with_the_server_s_reason(server: Server, path: Path, status: int) -> None:
    problem = json.dumps({"title": "Unprocessable", "detail": "unknown column 'x'"}).encode()
    server.answers = [(status, {"Content-Type": "application/problem+json"}, problem)]
    with pytest.raises(Refused, match=f"answered {status}: unknown column 'x'"):
        HttpTarget(server.url).send("samples", path, "n")


@pytest.mark.parametrize(
    ("status", "headers", "after_s"),
    [
        (429, {"Retry-After": "17"}, 17.0),
        (503, {"Retry-After": "Sat, 01 Mar 2025 00:02:00 GMT"}, 0.0),
        (503, {"Retry-After": "soon"}, None),
        (503, {"Retry-After": "999999999"}, 3600.0),
        (500, {}, None),
        (401, {}, None),
        (403, {}, None),
        (404, {}, None),
        (302, {"Location": "http://127.0.0.1:1/elsewhere"}, None),
    ],
)
def test_what_says_nothing_of_the_file_is_tried_again(
    server: Server, path: Path, status: int, headers: dict[str, str], after_s: float | None
) -> None:
    server.answers = [(status, headers, b"not json")]
    with pytest.raises(Later, match=f"answered {status}") as caught:
        HttpTarget(server.url).send("samples", path, "n")
    assert caught.value.after_s == after_s
    assert caught.value.poison is (status == 500)
    assert len(server.heard) == 1


@pytest.mark.parametrize("answer", ["breaks off", "drips", "is silent", "says half of its answer"])
def test_an_answer_that_never_comes_whole_is_tried_again(server: Server, path: Path, answer: str) -> None:
    server.answers = [answer]
    began = time.monotonic()
    with pytest.raises(Later):
        HttpTarget(server.url, timeout_s=0.3).send("samples", path, "n")
    assert time.monotonic() - began < 2


def test_a_server_that_is_not_there_is_tried_again(path: Path) -> None:
    with pytest.raises(Later, match="ConnectError"):
        HttpTarget("http://127.0.0.1:1").send("samples", path, "n")


def test_a_token_that_vanishes_later_is_waited_for(server: Server, path: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    target = HttpTarget(server.url, token_file=token)
    token.unlink()
    with pytest.raises(Later, match="the token cannot be read"):
        target.send("samples", path, "n")
    assert server.heard == []


@pytest.mark.parametrize("url", ["ftp://host", "https://", "https://user@host", "https://host?token=1"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"is no address of a service \(--push\)\. Give http:// or https://, a host"):
        HttpTarget(url)


@pytest.mark.parametrize("content", ["", "two words", "\x07", None])
def test_a_token_that_cannot_be_one_is_refused(tmp_path: Path, content: str | None) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    with pytest.raises(InputError, match=r"the token (is empty or has characters|cannot be read)"):
        HttpTarget("https://host", token_file=token)


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("nothing")
    with pytest.raises(InputError, match=r"the certificates cannot be read.*Give a PEM file"):
        HttpTarget("https://host", ca_file=ca_file)


def test_a_private_authority_is_trusted_when_its_certificates_are_given(
    server: Server, path: Path, tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.answers = [(204, {}, b"")]
    url = f"https://localhost:{server.server_port}"
    HttpTarget(url, ca_file=certificate).send("samples", path, "n")
    assert len(server.heard) == 1
    with pytest.raises(Later, match="the secure connection failed"):
        HttpTarget(url).send("samples", path, "n")
    assert len(server.heard) == 1
