"""The process that talks to the driver, and its starter's end of it: lines of JSON on stdin, answered on stdout.

NVML runs in a process of its own because a call into a sick GPU can block for ever inside the kernel driver. A thread
that is stuck in such a call cannot be ended, and the library's locks keep others out; a process can be left behind.
It also is the only way to load the library of a driver that was replaced.

Requests: ``{"do": "read", "skip": [index, …]}`` and ``{"do": "watch", "skip": […]}``; the first opens the library.
Before each GPU comes its index (``{"at": index}``), so that the other side knows whose call hangs.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final

from telemetry.collect.nvml.library import LOST, RELOADED, Library, NvmlFault
from telemetry.collect.nvml.reader import Reader

ROOT: Final = Path(__file__).resolve().parents[3]
WAIT_MS: Final = 1000
"""How long one wait for XIDs lasts; a message says after each that the watch goes on."""

_READ_BYTES: Final = 65536
_REAP_S: Final = 2.0

Message = dict[str, Any]


class Silent(Exception):
    """A child did not answer in time: the driver holds it in a call."""


class Ended(Exception):
    """A child is gone: it crashed inside the library, or was killed."""


class Process:
    """A child in a process of its own."""

    _unreaped: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self) -> None:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
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
        """Send a request; raises :class:`Ended` where nobody listens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Ended(str(error)) from error

    def hear(self, timeout_s: float) -> Message:
        """Return the next message; raises :class:`Silent` or :class:`Ended` where there is none."""
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
        """Kill the process, whatever it is doing; harmless twice."""
        if self._ended:
            return
        self._ended = True
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was left to send to a process that is gone
                    pipe.close()
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._unreaped.append(self._process)

    @classmethod
    def stuck(cls) -> int:
        """Return how many killed processes the kernel still holds in a driver call."""
        cls._unreaped = [process for process in cls._unreaped if process.poll() is None]
        return len(cls._unreaped)


class Session:
    """Answers requests with messages; one to a process."""

    def __init__(
        self,
        nvml: Library,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nvml = nvml
        self._reader = Reader(nvml, monotonic)
        self._clock_ms = clock_ms
        self._sleep = sleep
        self._count: int | None = None

    def answer(self, request: Message) -> Iterator[Message]:
        """Answer a request; the last message is ``done`` or ``failed`` (the library has to be opened again)."""
        skip = frozenset(request["skip"])
        try:
            if self._count is None:
                yield {"at": None}
                self._nvml.open()
                self._count = self._nvml.count()
                yield {"driver": self._nvml.driver(), "count": self._count}
            indices = [index for index in range(self._count) if index not in skip]
            if request["do"] == "watch":
                yield from self._watch(indices)
            for index in indices:
                yield {"at": index}
                yield from self._read(index)
            yield {"done": True}
        except NvmlFault as fault:
            yield {"failed": fault.code}

    def _read(self, index: int) -> Iterator[Message]:
        try:
            if not self._reader.known(index):
                yield {"device": asdict(self._reader.find(index))}
            reading = self._reader.read(index)
            yield {"row": index, "values": reading.values, "errors": reading.errors}
        except NvmlFault as fault:
            if fault.code in RELOADED:
                raise
            yield {"lost" if fault.code in LOST else "unreadable": index, "code": fault.code}

    def _watch(self, indices: list[int]) -> Iterator[Message]:
        """Report every XID until something breaks.

        A lost GPU makes the wait fail for all GPUs of the set, so the set is then made again without it.
        """
        while True:
            watched: dict[int, tuple[Any, str]] = {}
            for index in indices:
                yield {"at": index}
                try:
                    handle = self._nvml.handle(index)
                    self._reader.check(handle)  # a lost GPU can still be registered, and spoils the wait
                    watched[index] = (handle, self._nvml.identity(index, handle).gpu)
                except NvmlFault as fault:
                    if fault.code in RELOADED:
                        raise
            yield {"at": None}
            events, refused = self._nvml.watch([handle for handle, _ in watched.values()])
            for fault_or_none in refused:
                if fault_or_none is not None and fault_or_none.code in RELOADED:
                    raise fault_or_none
            watched = {index: watched[index] for index, fault in zip(watched, refused, strict=True) if fault is None}
            yield {"watching": list(watched)}
            yield from self._wait(events, watched)

    def _wait(self, events: Any, watched: dict[int, tuple[Any, str]]) -> Iterator[Message]:
        """Report XIDs until a GPU of the set is lost."""
        while True:
            event = None
            try:
                if watched:
                    event = self._nvml.wait(events, WAIT_MS)
                else:  # nothing to wait for, but a GPU may come back
                    self._sleep(WAIT_MS / 1000)
            except NvmlFault as fault:
                if fault.code not in LOST:
                    raise
                self._nvml.unwatch(events)
                yield {"alive": True}
                self._sleep(WAIT_MS / 1000)
                return
            if event is None:
                yield {"alive": True}
                continue
            handle, xid, instance = event
            gpu = next((gpu for known, gpu in watched.values() if self._nvml.same(known, handle)), None)
            yield {"xid": xid, "gpu": gpu, "instance": instance, "at_ms": self._clock_ms()}


def main() -> None:
    """Serve requests of the process that started this one, until it closes stdin or dies."""
    # The other side ends this process by closing the pipe, or by SIGKILL when a call hangs; signals to the whole
    # group (Ctrl-C, a service manager's stop) are its own business.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # A library that prints must not write between our lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: list[str] = []
    arrived = threading.Condition()

    def listen() -> None:
        for line in sys.stdin:
            with arrived:
                requests.append(line)
                arrived.notify()
        os._exit(0)  # the main thread may be stuck in a call

    threading.Thread(target=listen, daemon=True).start()
    session = Session(Library())
    while True:
        with arrived:
            arrived.wait_for(lambda: bool(requests))
            line = requests.pop(0)
        for message in session.answer(json.loads(line)):
            try:
                answers.write(json.dumps(message) + "\n")
                answers.flush()
            except BrokenPipeError:
                os._exit(0)


if __name__ == "__main__":
    main()
