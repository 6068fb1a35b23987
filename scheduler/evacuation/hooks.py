"""Hooks of the operator: webhooks (POST) and commands, with an idempotency key and a timeout."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from foundation.errors import InputError
from foundation.http import BodyTooLarge, Connection, HttpError, ask
from scheduler.evacuation.settings import CommandSettings, WebhookSettings
from scheduler.ports.codec import json_object
from scheduler.ports.workloads import HookKind, HookReply

_MAX_ANSWER = 65_536
_MAX_ANSWER_OUTPUT = 65_536
_MAX_OUTPUT = 64 * 2**20
_POLL_S = 0.1
_STATES: Mapping[str, HookKind] = {"done": "done", "acknowledged": "done", "waiting": "waiting", "failed": "failed"}
# Values of ``state`` in a reply to a checkpoint request.


class Webhook:
    """Calls a server once; a call without a response is repeated in the next round with the same key.

    200 and 204 mean done, 202 in progress (the call is repeated with the same key); a ``state`` in a JSON body takes
    precedence. 429, 5xx and web pages count as no response. All other statuses are rejections, including redirects, so
    that the token is not sent to another host. Certificates are verified.
    """

    def __init__(self, settings: WebhookSettings, agent: str) -> None:
        self._settings = settings
        self._agent = agent

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Post the payload; see :class:`scheduler.ports.workloads.Hook`."""
        settings = self._settings
        headers = {
            "Content-Type": "application/json", "Accept": "application/json", "Idempotency-Key": key,
            "User-Agent": self._agent,
        }  # fmt: skip
        try:
            if settings.token_file is not None:
                token = Path(settings.token_file).read_text(encoding="ascii").strip()
                headers["Authorization"] = f"Bearer {token}"
        except (OSError, UnicodeDecodeError) as error:
            return HookReply("refused", f"the token cannot be read: {error}")
        try:
            answer = ask(
                Connection(settings.url), "POST", timeout_s=settings.timeout.total_seconds(), max_bytes=_MAX_ANSWER,
                use_proxies=False, headers=headers,
                content=json.dumps(payload, ensure_ascii=False, allow_nan=False).encode(),
            )  # fmt: skip
        except BodyTooLarge as error:
            answer = error.answer  # the status alone counts
        except (HttpError, InputError, ValueError) as error:
            return HookReply("timeout", f"{urlsplit(settings.url).netloc}: {error}")
        status = answer.status
        if status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.ACCEPTED):
            if answer.body.lstrip()[:1] == b"<":
                return HookReply("timeout", f"status {status} with an HTML or XML page: probably a proxy or login page")
            kind: HookKind = "waiting" if status == HTTPStatus.ACCEPTED else "done"
            return _reply(kind, f"status {status}", json_object(answer.body))
        is_transient = status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return HookReply("timeout" if is_transient else "refused", f"status {status}")


def _reply(kind: HookKind, text: str, content: Mapping[str, Any]) -> HookReply:
    """Return a reply; a ``state`` in the content overrides a successful status or exit code."""
    state, message = content.get("state"), content.get("message")
    if kind in ("done", "waiting") and isinstance(state, str):
        kind = _STATES.get(state, kind)
    return HookReply(kind, message[:500] if isinstance(message, str) and message else text, content)


class CommandHook:
    """Runs a command.

    Arguments are those of the settings, the payload's ``kind`` and the key; the payload is JSON on stdin. Exit code 0
    means done, 75 (EX_TEMPFAIL) in progress (it is run again with the same key), any other failed; a JSON object with a
    ``state`` in the last line of stdout takes precedence over 0 and 75. On timeout, or after
    64 MiB of output, its process group is killed.
    At-least-once: a restarted controller runs the command again with the same key.
    """

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Run the command; see :class:`scheduler.ports.workloads.Hook`."""
        argv = [*self._settings.argv, str(payload.get("kind", "")), key]
        with tempfile.TemporaryFile() as request_body, tempfile.TemporaryFile() as answer_body:
            request_body.write(json.dumps(payload, ensure_ascii=False, allow_nan=False).encode())
            request_body.seek(0)
            try:
                # files, not pipes: a background child that keeps them open must not block us
                process = subprocess.Popen(
                    argv, stdin=request_body, stdout=answer_body, stderr=subprocess.DEVNULL, start_new_session=True,
                    close_fds=True,
                )  # fmt: skip
            except OSError as error:
                return HookReply("refused", f"{argv[0]} cannot be run: {error.strerror or error}")
            try:
                code = self._ended(process, answer_body)
            except subprocess.TimeoutExpired:
                _kill(process)
                limit = "timeout" if os.fstat(answer_body.fileno()).st_size <= _MAX_OUTPUT else "output limit"
                return HookReply("timeout", f"{argv[0]} exceeded its {limit} and was killed")
            except BaseException:
                _kill(process)
                raise
            content = _last_object(answer_body)
        kinds: dict[int, HookKind] = {0: "done", os.EX_TEMPFAIL: "waiting"}
        return _reply(kinds.get(code, "failed"), f"exit code {code}", content)

    def _ended(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> int:
        """Return the exit code; raises ``TimeoutExpired`` if it runs too long or writes too much."""
        end = time.monotonic() + self._settings.timeout.total_seconds()
        while True:
            left_s = end - time.monotonic()
            try:
                return process.wait(max(0.0, min(left_s, _POLL_S)))
            except subprocess.TimeoutExpired:
                if left_s <= _POLL_S or os.fstat(output.fileno()).st_size > _MAX_OUTPUT:
                    raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_object(file: Any) -> Mapping[str, Any]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_ANSWER_OUTPUT))
    lines = [line for line in file.read().splitlines() if line.strip()]
    return json_object(lines[-1]) if lines else {}
