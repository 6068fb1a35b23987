"""Runs a command in a container through the API server: the WebSocket form of ``pods/exec``."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import websocket

from telemetry.collect.kubernetes.answers import NotSent, Refused, Unreachable
from telemetry.collect.kubernetes.deadline import Deadlines

PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Newest first. The fifth adds the end of the standard input, which is not used here; before the fourth, the exit code
of a command was not told."""

STDOUT: Final = 1
STDERR: Final = 2
STATUS: Final = 3

KEPT_BYTES: Final = 65_536
"""Of what a command writes, so much of its end is kept of each stream."""

MOST_BYTES: Final = 64 * 2**20
"""A command that writes more is left."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How a server is known, and how we are known to it.

    ``name``: that the server's certificate has to carry; None: its host.
    """

    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    verify: bool = True
    name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Make a context of it."""
        made = ssl.create_default_context(cafile=self.ca_file)
        if not self.verify:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            made.load_cert_chain(self.certificate, self.key)
        return made


@dataclass(frozen=True, slots=True)
class Executed:
    """What a command came to.

    ``code``: its exit code; None: it was not run to its end, and ``words`` say why.
    ``stdout``, ``stderr``: the end of what it wrote.
    """

    code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    words: str = ""


def execute(
    host: str,
    path: str,
    command: Sequence[str],
    *,
    container: str | None,
    headers: Mapping[str, str],
    tls: Tls,
    connect_s: float,
    total_s: float,
) -> Executed:
    """Run a command in a container, without a shell, a terminal and a standard input.

    ``path``: of the pod's ``exec``.
    ``container``: None: the server chooses, which it does where there is one only.
    ``connect_s``: seconds until the connection stands.
    ``total_s``: seconds altogether. What runs in the container then runs on: no answer ends it.
    Raises ``Refused`` if the server does not begin it.
    Raises ``NotSent`` if nothing of it reached the server.
    Raises ``Unreachable`` if it began, and nobody knows what it came to.
    """
    deadlines = Deadlines()
    with deadlines.within(total_s) as request:
        try:
            with _connected(host, tls, connect_s) as connected:
                connected.settimeout(total_s)
                request.goes_over(connected)
                return _run(connected, host, path, command, container, headers)
        except (Refused, NotSent):
            raise
        except (OSError, websocket.WebSocketException, Unreachable) as error:
            # the socket waits as long at most: on a busy machine it gives up before the deadline's thread says so
            if not request.over and not isinstance(error, TimeoutError | websocket.WebSocketTimeoutException):
                raise Unreachable(f"{path}: the answer was cut: {error}") from error
    raise Unreachable(f"{path}: timed out: the command did not end within {total_s:.3g} s")


def _run(
    connected: socket.socket,
    host: str,
    path: str,
    command: Sequence[str],
    container: str | None,
    headers: Mapping[str, str],
) -> Executed:
    asked = [("command", word) for word in command]
    asked += [("stdin", "false"), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
    if container is not None:
        asked.append(("container", container))
    scheme = "wss" if host.startswith("https://") else "ws"
    url = f"{scheme}://{host.split('://', 1)[-1]}{path}?{urlencode(asked)}"
    link = websocket.WebSocket(skip_utf8_validation=True)
    try:
        link.connect(  # type: ignore[no-untyped-call]
            url, socket=connected, subprotocols=list(PROTOCOLS), suppress_origin=True, redirect_limit=0,
            header=[f"{name}: {value}" for name, value in headers.items()],
        )  # fmt: skip
    except websocket.WebSocketBadStatusException as error:
        raise Refused(error.status_code, _message(error)) from error
    if link.getsubprotocol() not in PROTOCOLS:
        raise NotSent(f"{path}: the server speaks none of {', '.join(PROTOCOLS)}")
    kept = {STDOUT: b"", STDERR: b""}
    read = 0
    while True:
        opcode, data = link.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            raise Unreachable(f"{path}: the connection ended before the command's exit code was told")
        read += len(data)
        if read > MOST_BYTES:
            raise Unreachable(f"{path}: the command wrote more than {MOST_BYTES} bytes")
        if not data:
            continue
        if data[0] == STATUS:
            return _executed(data[1:], kept[STDOUT], kept[STDERR])
        if data[0] in kept:
            kept[data[0]] = (kept[data[0]] + data[1:])[-KEPT_BYTES:]


@contextlib.contextmanager
def _connected(host: str, tls: Tls, connect_s: float) -> Iterator[socket.socket]:
    parts = urlsplit(host)
    secure = parts.scheme == "https"
    name = parts.hostname or ""
    try:
        plain = socket.create_connection((name, parts.port or (443 if secure else 80)), connect_s)
    except OSError as error:
        raise NotSent(f"{parts.netloc} cannot be reached: {error}") from error
    with plain:
        if not secure:
            yield plain
            return
        try:
            wrapped = tls.context().wrap_socket(plain, server_hostname=tls.name or name)
        except (OSError, ValueError) as error:
            raise NotSent(f"{parts.netloc} cannot be reached: {error}") from error
        with wrapped:
            yield wrapped


def _executed(status: bytes, stdout: bytes, stderr: bytes) -> Executed:
    try:
        content = json.loads(status)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return Executed(None, stdout, stderr, f"a status that cannot be read: {status[:200]!r}")
    if content.get("status") == "Success":
        return Executed(0, stdout, stderr)
    words = str(content.get("message") or "it failed")[:500]
    details = content.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes or ():
        if isinstance(cause, dict) and cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
            return Executed(int(cause["message"]), stdout, stderr, words)
    return Executed(None, stdout, stderr, words)


def _message(error: Any) -> str:
    body = getattr(error, "resp_body", None) or b""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
    try:
        return str(json.loads(text)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "no message"
