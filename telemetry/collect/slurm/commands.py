"""Running another program for what it prints: never without a time limit, and with no shell between."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns what it prints; :class:`CommandError` where it fails."""

_LASTING: Final = ("unrecognized option", "invalid option", "accounting storage is")
_MOST_ERROR_BYTES: Final = 16_384
_CHUNK: Final = 1 << 18


class CommandError(Exception):
    """A program that gave no answer that can be used.

    ``lasting``: trying again will not help: the program is not there, or does not know an option. Otherwise it was cut
    off, or could not reach what it asks, and nobody knows whether it had an effect.
    """

    def __init__(self, command: Sequence[str], why: str, *, lasting: bool = False) -> None:
        super().__init__(command, why)
        self.command = " ".join(command)
        self.why = why
        self.lasting = lasting

    def __str__(self) -> str:
        return f"`{self.command[:400]}`: {self.why}"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended; ``said``: the first 16 KiB of what it wrote to stderr, on one line."""

    status: int
    said: str


def run_command(
    command: Sequence[str], *, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
) -> str:
    """Return what a program prints on stdout.

    ``environment``: added to this process's own.
    Raises ``CommandError`` if it cannot be started, takes too long, or ends with another status than 0.
    """
    printed: list[bytes] = []
    ended = run_program(command, printed.append, timeout_s=timeout_s, environment={**os.environ, **(environment or {})})
    if ended.status != 0:
        why = ended.said[:300] or f"exit status {ended.status}"
        raise CommandError(command, why, lasting=any(word in ended.said.lower() for word in _LASTING))
    return b"".join(printed).decode("utf-8", errors="replace")


def run_program(
    command: Sequence[str],
    sink: Callable[[bytes], None],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    most_bytes: int | None = None,
) -> ProgramResult:
    """Run a program and give what it prints to ``sink``, piece by piece.

    ``command``: the program and its arguments, as they are.
    ``environment``: all of it.
    Raises ``CommandError`` if it cannot be started, takes too long or prints too much.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell; the programs are ours or the operator's
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise CommandError(command, getattr(error, "strerror", None) or str(error), lasting=True) from None
    try:
        said = _read(command, process, sink, time.monotonic() + timeout_s, timeout_s, most_bytes)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    return ProgramResult(process.returncode, " ".join(said.decode("utf-8", errors="replace").split()))


def _read(
    command: Sequence[str],
    process: subprocess.Popen[bytes],
    sink: Callable[[bytes], None],
    deadline: float,
    timeout_s: float,
    most_bytes: int | None,
) -> bytes:
    assert process.stdout is not None
    assert process.stderr is not None
    said, size = b"", 0
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        waiting.register(process.stderr, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise CommandError(command, f"no answer within {timeout_s:g} s")
            for key, _ in ready:
                stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
                chunk = os.read(stream.fileno(), _CHUNK)
                if not chunk:
                    waiting.unregister(stream)
                elif stream is process.stderr:
                    said = (said + chunk)[:_MOST_ERROR_BYTES]
                else:
                    size += len(chunk)
                    if most_bytes is not None and size > most_bytes:
                        raise CommandError(command, f"it prints over {most_bytes:,} bytes")
                    sink(chunk)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise CommandError(command, f"it does not end within {timeout_s:g} s") from None
    return said
