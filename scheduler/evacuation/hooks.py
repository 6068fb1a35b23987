"""A server of the operator's, told by POST: with an idempotency key, bounded in time and tries, without redirects."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from scheduler.evacuation.settings import CommandSettings, WebhookSettings, usable
from scheduler.ports.protocols import Clock
from scheduler.ports.workloads import TRY_LATER, HookKind, HookReply, reply_of

_LONGEST_ANSWER = 65_536
_LONGEST_PAUSE_S = 2.0
# Between two tries; a server that asks for more is asked again in the next round.
_TOO_MANY, _SERVER = 429, 500


class Webhook:
    """Tells a server.

    200 and 204 mean done, 202 on its way (it is asked again with the same key), unless a JSON body with a ``state``
    says more. 429 and 5xx are tried again, then left to the next round; any other status, redirects among them, is a
    refusal: a token must not follow to another host. Certificates are checked.
    """

    def __init__(
        self, settings: WebhookSettings, clock: Clock, agent: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._agent = agent
        self._sleep = sleep

    def tell(self, payload: Mapping[str, Any], key: str, url: str | None = None) -> HookReply:
        """Post it; see :class:`scheduler.ports.workloads.Hook`."""
        where = url or self._settings.url
        if where is None:
            return HookReply("refused", "no address is set, and the workload names none")
        if not usable(where):
            return HookReply("refused", f"{where!r} is no address that can be used")
        parts = urlsplit(where)
        if not self._allowed(parts):
            return HookReply("refused", f"{parts.netloc} is not among the hosts that the settings allow")
        try:
            headers = self._headers(parts, key)
        except OSError as error:
            return HookReply("refused", f"the token cannot be read: {error}")
        body = json.dumps(payload, ensure_ascii=False, allow_nan=False).encode()
        reply = HookReply("timeout", "not tried")
        for attempt in range(self._settings.attempts):
            if attempt:
                self._sleep(min(_LONGEST_PAUSE_S, 0.2 * 4.0**attempt))
            reply, final = self._once(parts, headers, body)
            if final:
                return reply
        return reply

    def _allowed(self, parts: SplitResult) -> bool:
        own = self._settings.url
        hosts = {each.lower() for each in self._settings.hosts}
        if own is not None and (parts.scheme, parts.netloc.lower()) == _origin(own):
            return True
        return parts.netloc.lower() in hosts or (parts.hostname or "").lower() in hosts

    def _headers(self, parts: SplitResult, key: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json", "Accept": "application/json", "Idempotency-Key": key,
            "User-Agent": self._agent, "Connection": "close",
        }  # fmt: skip
        own, token = self._settings.url, self._settings.token_file
        if token is not None and own is not None and (parts.scheme, parts.netloc.lower()) == _origin(own):
            headers["Authorization"] = f"Bearer {Path(token).read_text(encoding='ascii').strip()}"
        return headers

    def _once(self, parts: SplitResult, headers: dict[str, str], body: bytes) -> tuple[HookReply, bool]:
        seconds = self._settings.timeout.total_seconds()
        link = _link(parts, seconds)
        ended = threading.Event()
        sockets: list[socket.socket] = []  # the link itself lets go of it as soon as the headers are there

        def end() -> None:
            ended.set()
            for each in sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        # the socket's own timeout is of each read: a server that sends a byte now and then would hold us for ever
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            link.connect()
            assert link.sock is not None
            sockets.append(link.sock)
            link.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
            answer = link.getresponse()
            said = answer.read(_LONGEST_ANSWER)
            if ended.is_set() or (answer.length and len(said) < _LONGEST_ANSWER):
                raise http.client.IncompleteRead(said, answer.length)  # half an answer says nothing
            return self._answered(answer.status, answer.getheader("Retry-After"), _object(said))
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = "no answer in time" if ended.is_set() else f"{type(error).__name__}: {error}"
            return HookReply("timeout", f"{parts.netloc}: {why}"), False
        finally:
            timer.cancel()
            link.close()

    def _answered(self, status: int, after: str | None, content: Mapping[str, Any]) -> tuple[HookReply, bool]:
        if status in (http.HTTPStatus.OK, http.HTTPStatus.NO_CONTENT, http.HTTPStatus.ACCEPTED):
            kind: HookKind = "waiting" if status == http.HTTPStatus.ACCEPTED else "done"
            return reply_of(kind, f"status {status}", content), True
        if status == _TOO_MANY or status >= _SERVER:
            seconds = int(after) if after is not None and after.isdigit() else 0
            again = self._clock.now() + timedelta(seconds=min(seconds, 3600)) if seconds else None
            return HookReply("timeout", f"status {status}", {}, again), seconds > _LONGEST_PAUSE_S
        return HookReply("refused", f"status {status}", content), True


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _link(parts: SplitResult, seconds: float) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


_LONGEST_OUTPUT = 65_536


class CommandHook:
    """Runs a command.

    Its arguments are those of the settings, then the payload's ``kind`` and the key; the payload itself comes on its
    standard input, as JSON. Exit code 0 means done, 75 on its way (it is run again with the same key), any other one
    that it failed; the last line on its standard output may be a JSON object with a ``state`` that says more. At the
    timeout it is killed, with its whole process group. It is run at least once: a controller that dies in between runs
    it again with the same key.
    """

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings

    def tell(self, payload: Mapping[str, Any], key: str, url: str | None = None) -> HookReply:  # noqa: ARG002
        """Run it; see :class:`scheduler.ports.workloads.Hook`. A workload's own address is passed over."""
        argv = [*self._settings.argv, str(payload.get("kind", "")), key]
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(json.dumps(payload, ensure_ascii=False, allow_nan=False).encode())
            given.seek(0)
            try:
                # files, not pipes: a child of its own that goes on must not hold us
                process = subprocess.Popen(  # noqa: S603 - the operator's own argument list, no shell
                    argv, stdin=given, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True, close_fds=True
                )
            except OSError as error:
                return HookReply("refused", f"{argv[0]} cannot be run: {error.strerror or error}")
            try:
                code = process.wait(self._settings.timeout.total_seconds())
            except subprocess.TimeoutExpired:
                _kill(process)
                return HookReply("timeout", f"{argv[0]} did not end in time and was killed")
            except BaseException:
                _kill(process)
                raise
            content = _last_object(said)
        if code == 0:
            return reply_of("done", "exit code 0", content)
        if code == TRY_LATER:
            return reply_of("waiting", f"exit code {code}", content)
        return reply_of("failed", f"{argv[0]} ended with exit code {code}", content)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_object(file: Any) -> Mapping[str, Any]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LONGEST_OUTPUT))
    lines = [line for line in file.read().splitlines() if line.strip()]
    try:
        content = json.loads(lines[-1]) if lines else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
