"""A server that speaks S3, in a process of its own, and a proxy before it that lets requests fail."""

import contextlib
import http.client
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyarrow.fs import S3FileSystem

from tests.http_server import Handler, serving
from tests.waiting import free_port, listens, wait

OF_THE_TRANSFER = ("connection", "transfer-encoding", "content-length", "expect", "server", "date")
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@dataclass(frozen=True)
class Storage:
    """A running server, what the environment must say to reach it, and a connection that is not ours."""

    address: str
    environment: dict[str, str]
    direct: S3FileSystem


@contextlib.contextmanager
def object_storage(log: Path, *, certificate: Path | None = None, **settings: str) -> Iterator[Storage]:
    """Run a server until the block ends; with a certificate, a PEM file with its key, it speaks TLS."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto, which speaks S3, is not installed: pip install 'moto[s3]'")
    port = free_port()
    secure = [] if certificate is None else ["-s", "-c", str(certificate), "-k", str(certificate)]
    scheme = "http" if certificate is None else "https"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), *secure],
            stdout=output,
            stderr=output,
            env=os.environ | settings,
        )
        try:
            wait(lambda: process.poll() is not None or listens(port))
            assert process.poll() is None, log.read_text()
            address = f"127.0.0.1:{port}"
            direct = S3FileSystem(
                access_key="key",
                secret_key="secret",
                region="us-east-1",
                endpoint_override=address,
                scheme=scheme,
                allow_bucket_creation=True,
            )
            yield Storage(address, {"AWS_ENDPOINT_URL": f"{scheme}://{address}", **KEYS}, direct)
        finally:
            process.terminate()
            process.wait(10)


def upload(storage: Storage, folder: Path, root: str) -> None:
    """Bring a folder to BUCKET/PREFIX as any S3 client does, in place of what is there, dataset.json last."""
    storage.direct.delete_dir_contents(root, missing_dir_ok=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda file: file.name == "dataset.json"):
        with storage.direct.open_output_stream(f"{root}/{path.relative_to(folder).as_posix()}") as stream:
            stream.write(path.read_bytes())


@dataclass
class Requests:
    """What came by a proxy, and what it does to a request: None, or the name of a fault."""

    fault: Callable[[int, str, str], str | None] = lambda _number, _method, _path: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)


@contextlib.contextmanager
def proxy(storage: Storage) -> Iterator[tuple[dict[str, str], Requests]]:
    """Stand before a server; gives the environment that leads here, and the requests.

    Faults: ``busy`` answers 503, ``lost`` closes the connection unanswered, ``cut`` closes it amid the answer.
    """
    requests = Requests()

    class Forwarding(Handler):
        def forward(self) -> None:
            number = next(requests.numbers)
            requests.seen.append((self.command, self.path))
            body = self.body()
            fault = requests.fault(number, self.command, self.path)
            self.close_connection = fault in ("lost", "cut")
            if fault == "lost":
                return
            if fault == "busy":
                self.reply(503)
                return
            upstream = http.client.HTTPConnection(storage.address, timeout=30)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_THE_TRANSFER}
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in OF_THE_TRANSFER}
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            content = content[: len(content) // 2] if fault == "cut" else content
            self.reply(answer.status, content, headers | {"Content-Length": length or "0"})
            upstream.close()

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return super().body()
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    with serving(Forwarding) as address:
        yield storage.environment | {"AWS_ENDPOINT_URL": address}, requests
