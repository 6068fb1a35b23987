"""The collector's end of a child process that talks to the driver."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Protocol

from telemetry.collect.nvml.child import Message

_ROOT: Final = Path(__file__).resolve().parents[2]
_READ_BYTES: Final = 65536
_REAP_S: Final = 2.0


class Silent(Exception):
    """A child did not answer in time: the driver holds it in a call."""


class Ended(Exception):
    """A child is gone: it crashed inside the library, or was killed."""


class Child(Protocol):
    """A process that answers requests with messages."""

    def ask(self, request: Message) -> None:
        """Send a request; :class:`Ended` where nobody listens."""

    def hear(self, timeout_s: float) -> Message:
        """Return the next message; :class:`Silent` or :class:`Ended` where there is none."""

    def end(self) -> None:
        """End the process, whatever it is doing. Harmless twice."""


class Process:
    """A child in a process of its own; implements :class:`Child`."""

    def __init__(self, graveyard: Graveyard) -> None:
        self._graveyard = graveyard
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: a folder named telemetry in the working directory is not ours.
            [sys.executable, "-P", "-m", "telemetry.collect.nvml.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        self._buffer = b""
        self._ended = False

    def ask(self, request: Message) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Ended(str(error)) from error

    def hear(self, timeout_s: float) -> Message:
        """Return the next message."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise Silent
            got = os.read(descriptor, _READ_BYTES)
            if not got:
                raise Ended(f"exit status {self._process.poll()}")
            self._buffer += got
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def end(self) -> None:
        """Kill the process; one that the kernel holds is left to the graveyard."""
        if self._ended:
            return
        self._ended = True
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was left to send to a process that is gone
                    continue
        self._graveyard.bury(self._process)


class Graveyard:
    """Processes that were killed, but that the kernel does not let go of while a driver call blocks."""

    def __init__(self) -> None:
        self._stuck: list[subprocess.Popen[bytes]] = []

    def bury(self, process: subprocess.Popen[bytes]) -> None:
        """Reap a killed process, or keep it where it does not die."""
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._stuck.append(process)

    def stuck(self) -> int:
        """Return how many killed processes the kernel still holds."""
        self._stuck = [each for each in self._stuck if each.poll() is None]
        return len(self._stuck)
