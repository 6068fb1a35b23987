"""Running one of Slurm's programs: no shell, a time limit, and no more output than we can hold."""

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

MOST_ERROR_BYTES: Final = 16_384
_CHUNK: Final = 1 << 18
_FOREIGN_FILTERS: Final = ("SQUEUE_", "SINFO_", "SCANCEL_", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
# With them set a user's own defaults would filter the lists that decisions rest on (squeue(1), ENVIRONMENT VARIABLES).


class ProgramError(Exception):
    """A program that gave no answer that can be used.

    ``silent``: nobody knows whether it had an effect: it was cut off, or could not reach the controller.
    """

    def __init__(self, command: Sequence[str], why: str, *, silent: bool) -> None:
        super().__init__(command, why)
        self.command = " ".join(command)
        self.why = why
        self.silent = silent

    def __str__(self) -> str:
        return f"`{self.command[:200]}`: {self.why}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    ``said``: what it wrote to stderr, on one line, shortened.
    """

    status: int
    said: str


def run_program(
    command: Sequence[str],
    sink: Callable[[bytes], None],
    *,
    timeout_s: float,
    most_bytes: int,
    environment: Mapping[str, str],
) -> Ended:
    """Run a program and give what it prints to ``sink``, piece by piece.

    ``command``: the program and its arguments, as they are; no shell is between.
    ``environment``: added to this process's own, without the variables by which a user filters Slurm's lists.
    Raises ``ProgramError`` if it cannot be started, takes too long or prints too much.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN_FILTERS)}
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell; the programs are ours or the operator's
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**kept, "LC_ALL": "C", **environment},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise ProgramError(command, getattr(error, "strerror", None) or str(error), silent=False) from None
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
    return Ended(process.returncode, " ".join(said.decode("utf-8", errors="replace").split())[:400])


def _read(
    command: Sequence[str],
    process: subprocess.Popen[bytes],
    sink: Callable[[bytes], None],
    deadline: float,
    timeout_s: float,
    most_bytes: int,
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
                raise ProgramError(command, f"no answer within {timeout_s:g} s", silent=True)
            for key, _ in ready:
                stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
                chunk = os.read(stream.fileno(), _CHUNK)
                if not chunk:
                    waiting.unregister(stream)
                elif stream is process.stderr:
                    said = (said + chunk)[:MOST_ERROR_BYTES]
                else:
                    size += len(chunk)
                    if size > most_bytes:
                        raise ProgramError(command, f"it prints over {most_bytes:,} bytes", silent=True)
                    sink(chunk)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ProgramError(command, f"it does not end within {timeout_s:g} s", silent=True) from None
    return said
