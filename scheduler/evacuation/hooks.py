"""The operator's own servers (called by POST) and commands: an idempotency key, bounded in time and tries."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foundation.errors import InputError
from foundation.http import BodyTooLarge, Connection, HttpError, ask
from scheduler.evacuation.settings import CommandSettings, WebhookSettings
from scheduler.ports.codec import json_object
from scheduler.ports.workloads import HookKind, HookReply

_LONGEST_ANSWER = 65_536
_LONGEST_OUTPUT = 65_536
_STATES: Mapping[str, HookKind] = {"done": "done", "acknowledged": "done", "waiting": "waiting", "failed": "failed"}
# What ``state`` in an answer may be for a request, in addition to those of a diagnostic.


class Webhook:
    """Calls a server, once: one that gave no answer is called again in the next round, with the same key.

    200 and 204 mean done, 202 on its way (it is asked again with the same key), unless a JSON body with a ``state``
    says more. 429, 5xx and a web page are no answer; any other status, redirects among them, is a refusal: a token must
    not follow to another host. Certificates are checked.
    """

    def __init__(self, settings: WebhookSettings, agent: str) -> None:
        self._settings = settings
        self._agent = agent

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Post it; see :class:`scheduler.ports.workloads.Hook`."""
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
                Connection(settings.url), "POST", timeout_s=settings.timeout.total_seconds(), max_bytes=_LONGEST_ANSWER,
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
        later = status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return HookReply("timeout" if later else "refused", f"status {status}")


def _reply(kind: HookKind, text: str, content: Mapping[str, Any]) -> HookReply:
    """Make a reply; a ``state`` in the content says more than a status or an exit code that is no failure."""
    state, message = content.get("state"), content.get("message")
    if kind in ("done", "waiting") and isinstance(state, str):
        kind = _STATES.get(state, kind)
    return HookReply(kind, message[:500] if isinstance(message, str) and message else text, content)


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
                # files, not pipes: a child of its own that continues must not hold us
                process = subprocess.Popen(
                    argv, stdin=given, stdout=answer_body, stderr=subprocess.DEVNULL, start_new_session=True,
                    close_fds=True,
                )  # fmt: skip
            except OSError as error:
                return HookReply("refused", f"{argv[0]} cannot be run: {error.strerror or error}")
            try:
                code = process.wait(self._settings.timeout.total_seconds())
            except subprocess.TimeoutExpired:
                _kill(process)
                return HookReply("timeout", f"{argv[0]} exceeded its timeout and was killed")
            except BaseException:
                _kill(process)
                raise
            content = _last_object(answer_body)
        kinds: dict[int, HookKind] = {0: "done", os.EX_TEMPFAIL: "waiting"}
        return _reply(kinds.get(code, "failed"), f"exit code {code}", content)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_object(file: Any) -> Mapping[str, Any]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LONGEST_OUTPUT))
    lines = [line for line in file.read().splitlines() if line.strip()]
    return json_object(lines[-1]) if lines else {}
