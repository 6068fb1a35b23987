"""The operator's own servers (told by POST) and commands: an idempotency key, bounded in time and tries."""

from __future__ import annotations

import contextlib
import http
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scheduler.evacuation.settings import CommandSettings, WebhookSettings
from scheduler.ports.protocols import Clock
from scheduler.ports.workloads import TRY_LATER, HookKind, HookReply, reply_of
from telemetry.errors import InputError
from telemetry.http import BodyTooLarge, Connection, HttpError, ask, retry_after_s, retry_policy

_LONGEST_ANSWER = 65_536
_LONGEST_PAUSE_S = 2.0
# Between two tries; a server that asks for more is asked again in the next round.
_LONGEST_RETRY_AFTER_S = 3600.0
_TOO_MANY, _SERVER = 429, 500


class Webhook:
    """Tells a server.

    200 and 204 mean done, 202 on its way (it is asked again with the same key), unless a JSON body with a ``state``
    says more. 429 and 5xx are tried again, then left to the next round; any other status, redirects among them, is a
    refusal: a token must not follow to another host. Certificates are checked.
    """

    def __init__(self, settings: WebhookSettings, clock: Clock, agent: str) -> None:
        self._settings = settings
        self._clock = clock
        self._agent = agent

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Post it; see :class:`scheduler.ports.workloads.Hook`."""
        try:
            headers = self._headers(key)
        except OSError as error:
            return HookReply("refused", f"the token cannot be read: {error}")
        body = json.dumps(payload, ensure_ascii=False, allow_nan=False).encode()
        tries = retry_policy(
            attempts=self._settings.attempts,
            wait_max_s=_LONGEST_PAUSE_S,
            on=lambda error: isinstance(error, _AgainError),
        )
        try:
            for attempt in tries:
                with attempt:
                    return self._once(headers, body)
        except _AgainError as error:
            return error.reply
        raise AssertionError("unreachable")

    def _headers(self, key: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json", "Accept": "application/json", "Idempotency-Key": key,
            "User-Agent": self._agent,
        }  # fmt: skip
        if self._settings.token_file is not None:
            token = Path(self._settings.token_file).read_text(encoding="ascii").strip()
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _once(self, headers: dict[str, str], body: bytes) -> HookReply:
        """Post it once; raises ``_AgainError`` where another try may help."""
        place = urlsplit(self._settings.url).netloc
        try:
            answer = ask(
                Connection(self._settings.url),
                "POST",
                timeout_s=self._settings.timeout.total_seconds(),
                max_bytes=_LONGEST_ANSWER,
                use_proxies=False,
                headers=headers,
                content=body,
            )
        except BodyTooLarge as error:
            answer = error.answer  # the status alone counts
        except (HttpError, InputError, ValueError) as error:
            raise _AgainError(HookReply("timeout", f"{place}: {error}")) from None
        return self._answered(answer.status, answer.headers.get("retry-after"), _object(answer.body))

    def _answered(self, status: int, after: str | None, content: Mapping[str, Any]) -> HookReply:
        if status in (http.HTTPStatus.OK, http.HTTPStatus.NO_CONTENT, http.HTTPStatus.ACCEPTED):
            kind: HookKind = "waiting" if status == http.HTTPStatus.ACCEPTED else "done"
            return reply_of(kind, f"status {status}", content)
        if status == _TOO_MANY or status >= _SERVER:
            seconds = retry_after_s(after, self._clock.now(), longest_s=_LONGEST_RETRY_AFTER_S) or 0.0
            again = self._clock.now() + timedelta(seconds=seconds) if seconds else None
            reply = HookReply("timeout", f"status {status}", {}, again)
            if seconds > _LONGEST_PAUSE_S:
                return reply
            raise _AgainError(reply)
        return HookReply("refused", f"status {status}", content)


class _AgainError(Exception):
    """No answer that settles it: another try may."""

    def __init__(self, reply: HookReply) -> None:
        super().__init__(reply.words)
        self.reply = reply


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

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Run it; see :class:`scheduler.ports.workloads.Hook`."""
        argv = [*self._settings.argv, str(payload.get("kind", "")), key]
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answer_body:
            given.write(json.dumps(payload, ensure_ascii=False, allow_nan=False).encode())
            given.seek(0)
            try:
                # files, not pipes: a child of its own that goes on must not hold us
                process = subprocess.Popen(  # noqa: S603 - the operator's own argument list, no shell
                    argv,
                    stdin=given,
                    stdout=answer_body,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    close_fds=True,
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
            content = _last_object(answer_body)
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
    return _object(lines[-1]) if lines else {}
