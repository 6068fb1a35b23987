"""Hooks of the operator: webhooks (POST) and commands, with an idempotency key and a timeout."""

import json
import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foundation.errors import InputError
from foundation.files import read_small
from foundation.http import BodyTooLarge, Connection, HttpError, ask
from foundation.programs import CommandError, run_program
from scheduler.evacuation.settings import CommandSettings, WebhookSettings
from scheduler.ports.codec import json_object
from scheduler.ports.workloads import HookKind, HookReply

_MAX_ANSWER = 65_536
_MAX_OUTPUT = 64 * 2**20
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
                token = read_small(Path(settings.token_file)).decode("ascii").strip()
                headers["Authorization"] = f"Bearer {token}"
        except (OSError, UnicodeDecodeError, InputError) as error:
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
        try:
            ended = run_program(
                argv, timeout_s=self._settings.timeout.total_seconds(), environment=os.environ, max_bytes=_MAX_OUTPUT,
                content=json.dumps(payload, ensure_ascii=False, allow_nan=False).encode(),
            )  # fmt: skip
        except CommandError as error:
            return HookReply("refused" if error.lasting else "timeout", f"{argv[0]}: {error.reason}")
        kinds: dict[int, HookKind] = {0: "done", os.EX_TEMPFAIL: "waiting"}
        lines = [line for line in ended.output[-_MAX_ANSWER:].splitlines() if line.strip()]
        return _reply(kinds.get(ended.status, "failed"), f"exit code {ended.status}", json_object((lines or [b""])[-1]))
