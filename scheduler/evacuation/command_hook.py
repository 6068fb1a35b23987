"""A command of the operator's on the controller's machine: no shell, bounded in time, at least once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from scheduler.evacuation.hook import HookReply, reply_of
from scheduler.evacuation.settings import CommandSettings

TRY_LATER = 75
"""Exit code of a command that has begun and is not done (``EX_TEMPFAIL`` of sysexits.h)."""

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
        """Run it; see :class:`scheduler.evacuation.hook.Hook`. A workload's own address is passed over."""
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
