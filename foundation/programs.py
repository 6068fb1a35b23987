"""Subprocesses run for their output, always with a timeout and without a shell."""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns its output; raises :class:`CommandError` on failure."""

_LASTING: Final = ("unrecognized option", "invalid option", "accounting storage is")
_MAX_ERROR_BYTES: Final = 16_384
_CHUNK: Final = 1 << 18


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
    command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], max_bytes: int | None = None
) -> ProgramResult:
    """Run a program with exactly this environment; raises ``CommandError`` if it cannot start or exceeds a limit."""
    output, expired = bytearray(), threading.Event()

    def end() -> None:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too: they may hold its output open

    def expire() -> None:
        expired.set()
        end()

    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise CommandError(command, getattr(error, "strerror", None) or str(error), lasting=True) from None
        timer = threading.Timer(timeout_s, expire)
        timer.start()
        assert process.stdout is not None
        try:
            with process.stdout as stream:
                while chunk := stream.read(_CHUNK):
                    output += chunk
                    if max_bytes is not None and len(output) > max_bytes:
                        raise CommandError(command, f"its output exceeds {max_bytes:,} bytes")
            process.wait()
        finally:
            timer.cancel()
            end()
            process.wait()
        if expired.is_set():
            raise CommandError(command, f"no answer within {timeout_s:g} s")
        errors.seek(0)
        message = errors.read(_MAX_ERROR_BYTES).decode("utf-8", errors="replace")
    return ProgramResult(process.returncode, bytes(output), " ".join(message.split()))
