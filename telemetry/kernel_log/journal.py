"""Kernel messages of the systemd journal, read with ``journalctl`` from a stored cursor."""

import json
import logging
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from foundation.errors import InputError
from foundation.http import retry_policy
from foundation.instants import to_ms
from telemetry.kernel_log.catalogue import MessageCatalogue, shipped
from telemetry.kernel_log.entries import Entry, json_entries
from telemetry.kernel_log.reader import Lines, LogLine, log_lines
from telemetry.kernel_log.stamps import LogContext

_log = logging.getLogger(__name__)
_FIELDS: Final = "MESSAGE,_HOSTNAME,_BOOT_ID"
_CHUNK: Final = 1 << 18
RESTARTS: Final = 8
"""Attempts to restart a journalctl that exited after it had worked, over about 20 s."""

MAX_ENTRY_BYTES: Final = 1 << 20
"""Longer entries are skipped."""


class Journal:
    """Reads or follows the kernel messages of the journal; implements :class:`LogSource`.

    ``since``: start time without a position (default: current boot).
    With ``follow``, a journalctl that exits is restarted at the cursor. :meth:`read` raises ``InputError`` if
    journalctl is not installed, exits with an error, or fails again in :data:`RESTARTS` attempts.
    """

    name = "journal"

    def __init__(
        self,
        position: Mapping[str, Any],
        *,
        follow: bool,
        since: datetime | None = None,
        command: Sequence[str] = ("journalctl",),
        catalogue: MessageCatalogue | None = None,
    ) -> None:
        self._catalogue = catalogue or shipped()
        self._cursor: str | None = position.get("cursor")
        self._last_us: int | None = position.get("realtime_us")
        self._history = not position
        self._follow, self._since, self._command = follow, since, tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._incomplete = b""
        self._by_time = False
        self._ended = False
        self._has_worked = False

    def read(self, wait_s: float) -> Lines:
        """Return the available lines; see :class:`LogSource`. Without ``follow``, stop at the end of the journal."""
        for attempt in retry_policy(attempts=RESTARTS, wait_max_s=5.0, on=self._starts_again):
            with attempt:
                return self._read(wait_s)
        raise AssertionError("unreachable")

    def _starts_again(self, error: Exception) -> bool:
        if not (self._follow and self._has_worked and isinstance(error, InputError)):
            return False
        _log.warning("%s; restarting it", error.problem)
        return True

    def _read(self, wait_s: float) -> Lines:
        lines: list[LogLine] = []
        n_lines = 0
        if not self._ended:
            process = self._process or self._start()
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], wait_s)[0]:
                self._has_worked = True
                self._history &= not self._follow
                return Lines([], self._position(), self._follow)
            chunk = os.read(process.stdout.fileno(), _CHUNK)
            if not chunk:
                self._end(process)
            self._has_worked = True
            *complete, self._incomplete = (self._incomplete + chunk).split(b"\n")
            if len(self._incomplete) > MAX_ENTRY_BYTES:
                self._incomplete = b"cut"
            entries = [entry for raw in complete if (entry := self._entry(raw)) is not None]
            n_lines = len(entries)
            lines = log_lines(entries, self._catalogue, LogContext(UTC), history=self._history)
        return Lines(lines, self._position(), self._ended, n_lines)

    def close(self) -> None:
        """Terminate journalctl."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def _position(self) -> dict[str, Any]:
        return {} if self._cursor is None else {"cursor": self._cursor, "realtime_us": self._last_us}

    def _arguments(self) -> list[str]:
        # `-k` is limited to the current boot: messages just before a crash would be lost.
        arguments = [*self._command, "--quiet", "--no-pager", "--all", "--output=json", f"--output-fields={_FIELDS}"]
        if self._cursor is not None and not self._by_time:
            arguments.append(f"--after-cursor={self._cursor}")
        elif self._last_us is not None:
            arguments.append(f"--since=@{self._last_us // 1_000_000}")
        elif self._since is not None:
            arguments.append(f"--since=@{to_ms(self._since) // 1000}")
        else:
            arguments.append("--boot")
        if self._follow:
            arguments += ["--follow", "--no-tail"]
        return [*arguments, "_TRANSPORT=kernel"]

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                self._arguments(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            raise InputError(
                f"journalctl cannot be started: {error.strerror}",
                self._command[0],
                "Install systemd's journalctl, or give `--source` a log file.",
            ) from None
        self._incomplete = b""
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        stderr = b"" if process.stderr is None else process.stderr.read(4096)
        code = process.wait()
        self.close()
        if code == 0 and not self._follow:
            self._ended = True
            return
        reason = (stderr.decode("utf-8", errors="replace").strip() or f"exit status {code}").splitlines()[-1][:300]
        if "cursor" in reason.lower() and not self._by_time and self._cursor is not None:
            _log.warning("the cursor (%s) is no longer in the journal: continuing by time", reason)
            self._by_time = True
            return
        raise InputError(
            f"journalctl ended: {reason}",
            " ".join(self._arguments()),
            "Run the command manually; this user needs the group systemd-journal or adm.",
        )

    def _entry(self, raw: bytes) -> Entry | None:
        text = raw.decode("utf-8", errors="replace")
        try:
            fields = json.loads(text)
            cursor, realtime_us = str(fields["__CURSOR"]), int(fields["__REALTIME_TIMESTAMP"])
        except (ValueError, KeyError, TypeError, RecursionError):
            if raw.strip():
                _log.warning("a journal entry cannot be read: %r", text[:120])
            return None
        if self._by_time and self._last_us is not None and realtime_us <= self._last_us:
            return None  # `--since` has a resolution of seconds
        self._cursor, self._last_us, self._by_time = cursor, realtime_us, False
        return next(iter(json_entries(text, 0)), None)
