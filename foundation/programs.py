"""Subprocesses run for their output, always with a timeout and without a shell."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Final, NamedTuple

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns its output; raises :class:`CommandError` on failure."""

_LASTING: Final = ("unrecognized option", "invalid option", "accounting storage is")
_MAX_ERROR_BYTES: Final = 16_384
_POLL_S: Final = 0.1


class CommandError(Exception):
    """A program failed.

    ``lasting``: a retry will not help, as the program is missing or does not know an option. Otherwise it timed out or
    failed, and may have had an effect.
    """

    def __init__(self, command: Sequence[str], reason: str, *, lasting: bool = False) -> None:
        super().__init__(command, reason)
        self.command = " ".join(command)
        self.reason = reason
        self.lasting = lasting

    def __str__(self) -> str:
        return f"`{self.command[:400]}`: {self.reason}"


class ProgramResult(NamedTuple):
    """Exit status and output of a program; ``errors``: the first 16 KiB of stderr, on one line."""

    status: int
    output: bytes
    errors: str


def run_command(
    command: Sequence[str], *, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
) -> str:
    """Return a program's output; ``environment`` extends this process's environment. Raises ``CommandError``."""
    ended = run_program(command, timeout_s=timeout_s, environment={**os.environ, **(environment or {})})
    if ended.status != 0:
        reason = ended.errors[:300] or f"exit status {ended.status}"
        raise CommandError(command, reason, lasting=any(text in ended.errors.lower() for text in _LASTING))
    return ended.output.decode("utf-8", errors="replace")


def run_program(
    command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], max_bytes: int | None = None,
    content: bytes = b"",
) -> ProgramResult:  # fmt: skip
    """Run a program with exactly this environment; raises ``CommandError`` if it cannot start or exceeds a limit.

    ``content``: its input. ``max_bytes``: limit on its stdout and stderr, each.
    On a limit, its process group is killed. Children that it leaves behind are not waited for.
    """
    # files, not pipes: a child left behind would keep a pipe open
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(content)
        given.seek(0)
        try:
            process = subprocess.Popen(
                list(command), stdin=given, stdout=output, stderr=errors, env=environment, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise CommandError(command, getattr(error, "strerror", None) or str(error), lasting=True) from None
        end = time.monotonic() + timeout_s
        try:
            while process.poll() is None:
                if time.monotonic() >= end:
                    raise CommandError(command, f"no answer within {timeout_s:g} s")
                _check_size(command, max_bytes, output, errors)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, min(end - time.monotonic(), _POLL_S)))
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        _check_size(command, max_bytes, output, errors)
        output.seek(0)
        errors.seek(0)
        message = errors.read(_MAX_ERROR_BYTES).decode("utf-8", errors="replace")
        return ProgramResult(process.returncode, output.read(), " ".join(message.split()))


def _check_size(command: Sequence[str], max_bytes: int | None, *files: IO[bytes]) -> None:
    if max_bytes is not None and max(os.fstat(file.fileno()).st_size for file in files) > max_bytes:
        raise CommandError(command, f"its output exceeds {max_bytes:,} bytes")
