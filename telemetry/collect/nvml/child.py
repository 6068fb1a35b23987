"""The process that talks to the driver, and its starter's end of it: lines of JSON on stdin, answered on stdout.

NVML runs in a process of its own because a call into a sick GPU can block for ever inside the kernel driver. A thread
that is stuck in such a call cannot be ended, and the library's locks keep others out; a process can be left behind.
It also is the only way to load the library of a driver that was replaced.

A request ``{"skip": [index, …]}`` asks for a reading of all other GPUs; the first opens the library. Before each GPU
comes its index (``{"at": index}``), so that the other side knows whose call hangs. XIDs come from a second thread,
whenever the driver reports them.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from telemetry.collect.nvml.library import LOST, RELOADED, Library, NvmlFault
from telemetry.collect.nvml.reader import Gpu

ROOT: Final = Path(__file__).resolve().parents[3]
WAIT_MS: Final = 1000
"""How long one wait for XIDs lasts; a message says after each that the watch goes on."""

DEAF_PAUSE_S: Final = 10.0
"""Pause after the driver has refused to report XIDs."""

_READ_BYTES: Final = 65536
_REAP_S: Final = 2.0

Message = dict[str, Any]


class Silent(Exception):
    """A child did not answer in time: the driver holds it in a call."""


class Ended(Exception):
    """A child is gone: it crashed inside the library, or was killed."""


class Process:
    """A child in a process of its own."""

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

    def ask(self, skip: Iterable[int]) -> None:
        """Ask for a reading of all GPUs but some; raises :class:`Ended` where nobody listens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"skip": sorted(skip)}).encode() + b"\n")
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
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Silent
            got = os.read(descriptor, _READ_BYTES)
            if not got:
                raise Ended(f"exit status {self._process.poll()}")
            self._buffer += got
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was left to send to a process that is gone
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def is_gone(self) -> bool:
        """Whether the process has ended; the kernel may hold a killed one in a driver call."""
        return self._process.poll() is not None


class Session:
    """Reads and watches the GPUs of one process."""

    def __init__(
        self,
        nvml: Library,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nvml = nvml
        self._monotonic = monotonic
        self._clock_ms = clock_ms
        self._sleep = sleep
        self._count: int | None = None
        self._gpus: dict[int, Gpu] = {}

    def read(self, skip: Iterable[int]) -> Iterator[Message]:
        """Read all GPUs but some; the last message is ``done`` or ``failed`` (the library has to be opened again)."""
        try:
            if self._count is None:
                yield {"at": None}
                self._nvml.open()
                self._count = self._nvml.count()
                yield {"driver": self._nvml.driver(), "count": self._count}
            for index in sorted(set(range(self._count)).difference(skip)):
                yield {"at": index}
                yield from self._read(index)
            yield {"done": True}
        except NvmlFault as fault:
            yield {"failed": fault.code}

    def _read(self, index: int) -> Iterator[Message]:
        try:
            gpu = self._gpus.get(index)
            if gpu is None:
                gpu = Gpu(self._nvml, index, self._monotonic)
                yield {"device": asdict(gpu.identity)}
            values, errors = gpu.read()
            self._gpus[index] = gpu
            yield {"row": index, "values": values, "errors": errors}
        except NvmlFault as fault:
            if fault.code in RELOADED:
                raise
            self._gpus.pop(index, None)
            yield {"fault": index, "code": fault.code}

    def watch(self) -> Iterator[Message]:
        """Report the XIDs of all GPUs that were read, for ever.

        A lost GPU makes the wait fail for all GPUs of the set, so the set is then made again without it.
        """
        gpus: list[Gpu] = []
        events, watched = None, 0
        while True:
            event = None
            try:
                # Only this thread touches the set: a GPU that was found or lost meanwhile makes it new.
                if events is None or list(self._gpus.values()) != gpus:
                    gpus = list(self._gpus.values())
                    if events is not None:
                        self._nvml.unwatch(events)
                        events = None
                    if gpus:
                        events, watched = self._nvml.watch([gpu.handle for gpu in gpus if _answers(gpu)])
                        yield {"watching": watched}
                if events is not None and watched:
                    event = self._nvml.wait(events, WAIT_MS)
                else:
                    self._sleep(WAIT_MS / 1000)
            except NvmlFault as fault:
                events = None
                if fault.code not in LOST:
                    yield {"deaf": fault.code}
                self._sleep(WAIT_MS / 1000 if fault.code in LOST else DEAF_PAUSE_S)
            if event is None:
                yield {"alive": True}
                continue
            handle, xid, instance = event
            gpu = next((gpu.identity.gpu for gpu in gpus if self._nvml.same(gpu.handle, handle)), None)
            yield {"xid": xid, "gpu": gpu, "instance": instance, "at_ms": self._clock_ms()}


def _answers(gpu: Gpu) -> bool:
    try:
        gpu.check()  # a lost GPU can still be registered, and spoils the wait
    except NvmlFault as fault:
        if fault.code in RELOADED:
            raise
        return False
    return True


def main() -> None:
    """Serve the process that started this one, until it closes stdin or dies."""
    # The other side ends this process by closing the pipe, or by SIGKILL when a call hangs; signals to the whole
    # group (Ctrl-C, a service manager's stop) are its own business.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # A library that prints must not write between our lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()
    requests: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    session = Session(Library())

    def send(messages: Iterable[Message]) -> None:
        try:
            for message in messages:
                with lock:
                    answers.write(json.dumps(message) + "\n")
                    answers.flush()
        except BaseException as error:
            if not isinstance(error, BrokenPipeError):
                traceback.print_exc()
            os._exit(1)

    def read() -> None:
        while True:
            send(session.read(requests.get()))

    threading.Thread(target=read, daemon=True).start()
    threading.Thread(target=lambda: send(session.watch()), daemon=True).start()
    for line in sys.stdin:
        requests.put(json.loads(line)["skip"])
    os._exit(0)  # the other threads may be stuck in a call


if __name__ == "__main__":
    main()
