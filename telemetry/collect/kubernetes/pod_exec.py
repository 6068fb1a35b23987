"""Runs a command in a container through the API server: the WebSocket form of ``pods/exec``.

The ``kubernetes`` package's own form of it connects and shakes hands without a timeout, and hides the server's status.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import websocket

from telemetry.collect.kubernetes.api import Refused, Unreachable, shut_after

PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Newest first. The fifth adds the end of the standard input, which is not used here; before the fourth, there was
no exit code."""

KEPT_BYTES: Final = 65_536
"""Of what a command writes, so much of its end is kept of each stream."""

_MAX_BYTES: Final = 64 * 2**20
_STDOUT, _STDERR, _STATUS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Tls:
    """Files and checks of a TLS connection; ``name`` is what the server's certificate has to carry (None: its host)."""

    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    verify: bool = True
    name: str | None = None

    def options(self) -> dict[str, Any]:
        """Return them as websocket-client takes them."""
        options: dict[str, Any] = {} if self.verify else {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
        given = {"ca_certs": self.ca_file, "certfile": self.certificate, "keyfile": self.key}
        return options | {key: value for key, value in (given | {"server_hostname": self.name}).items() if value}


@dataclass(frozen=True, slots=True)
class Executed:
    """Outcome of a command; ``code`` None: it did not run to its end, and ``message`` says why."""

    code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    message: str = ""


def execute(
    host: str,
    path: str,
    command: Sequence[str],
    *,
    container: str | None,
    headers: Mapping[str, str],
    tls: Tls,
    connect_timeout_s: float,
    timeout_s: float,
) -> Executed:
    """Run a command in a container, without a shell, a terminal and a standard input.

    Without a ``container`` the server chooses, which it does where there is one only. After ``timeout_s`` nothing more
    is heard of the command; it runs on.

    Raises
    ------
    Refused
        If the server does not begin it.
    Unreachable
        If nobody knows its outcome; or, with ``sent`` False, if nothing reached the server.
    """
    end = time.monotonic() + timeout_s
    words = [("command", word) for word in command]
    words += [("stdin", "false"), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
    words += [("container", container)] if container is not None else []
    scheme, _, address = host.partition("://")
    url = f"{'wss' if scheme == 'https' else 'ws'}://{address}{path}?{urlencode(words)}"
    link = websocket.WebSocket(skip_utf8_validation=True, sslopt=tls.options())
    late = f"{path}: timed out: the command did not end within {timeout_s:.3g} s"
    try:
        with shut_after(timeout_s, partial(_shut, link)):
            try:
                link.connect(  # type: ignore[no-untyped-call]
                    url, timeout=connect_timeout_s, subprotocols=list(PROTOCOLS), suppress_origin=True,
                    redirect_limit=0, header=[f"{name}: {value}" for name, value in headers.items()],
                    http_no_proxy=["*"],
                )  # fmt: skip
            except websocket.WebSocketBadStatusException as error:
                raise Refused(error.status_code, _message(error)) from error
            except (OSError, websocket.WebSocketException, ValueError) as error:
                sent = not isinstance(error, ConnectionRefusedError | websocket.WebSocketAddressException)
                what = late if time.monotonic() >= end else f"{address} cannot be reached: {error}"
                raise Unreachable(what, sent=sent) from error
            if link.getsubprotocol() not in PROTOCOLS:
                raise Unreachable(f"{path}: the server speaks none of {', '.join(PROTOCOLS)}", sent=False)
            try:
                return _outcome(link, path, end)
            except (OSError, websocket.WebSocketException) as error:
                timed_out = time.monotonic() >= end
                raise Unreachable(late if timed_out else f"{path}: the answer was cut: {error}") from error
    finally:
        link.shutdown()  # type: ignore[no-untyped-call]  # the socket alone: close() would wait for the server


def _shut(link: websocket.WebSocket) -> None:
    if link.sock is not None:
        link.sock.shutdown(socket.SHUT_RDWR)


def _outcome(link: websocket.WebSocket, path: str, end: float) -> Executed:
    kept = {_STDOUT: b"", _STDERR: b""}
    read = 0
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link.settimeout(left)
        opcode, data = link.recv_data(control_frame=True)  # a ping must not prolong the wait
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            raise Unreachable(f"{path}: the connection ended before the command's exit code was told")
        read += len(data)
        if read > _MAX_BYTES:
            raise Unreachable(f"{path}: the command wrote more than {_MAX_BYTES} bytes")
        if not data or opcode not in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT):
            continue
        channel, text = data[0], data[1:]
        if channel == _STATUS:
            return _executed(text, kept[_STDOUT], kept[_STDERR])
        if channel in kept:
            kept[channel] = (kept[channel] + text)[-KEPT_BYTES:]


def _executed(status: bytes, stdout: bytes, stderr: bytes) -> Executed:
    try:
        content = json.loads(status)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return Executed(None, stdout, stderr, f"a status that cannot be read: {status[:200]!r}")
    if content.get("status") == "Success":
        return Executed(0, stdout, stderr)
    message = str(content.get("message") or "it failed")[:500]
    details = content.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes or ():
        if isinstance(cause, dict) and cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
            return Executed(int(cause["message"]), stdout, stderr, message)
    return Executed(None, stdout, stderr, message)


def _message(error: Any) -> str:
    body = getattr(error, "resp_body", None) or b""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
    try:
        return str(json.loads(text)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "no message"
