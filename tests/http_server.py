"""A small real HTTP server in a thread of this process: what the tests put in the place of a server."""

import contextlib
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Keeps connections, writes no log, and bears clients that go away."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**16

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Answer; a ``Content-Length`` among the headers may claim what it likes."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().handle()

    def finish(self) -> None:
        """Close the connection, whoever did so before."""
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], *, tls: ssl.SSLContext | None = None, socket: Path | None = None
) -> Iterator[str]:
    """Serve until the block ends, on a port or a unix socket; gives the address."""
    server: socketserver.BaseServer
    if socket is None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        address = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    else:
        server = socketserver.ThreadingUnixStreamServer(str(socket), handler)
        address = f"unix:{socket}"
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def certify(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """Make a certificate of its own for 127.0.0.1."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(certificate), *(more or ["-nodes"])], check=True, capture_output=True)
    return certificate, key
