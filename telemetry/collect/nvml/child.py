"""The process that talks to the driver, and its starter's end of it: lines of JSON on stdin, answered on stdout.

NVML runs in a process of its own because a call into a sick GPU can block for ever inside the kernel driver. A thread
that is stuck in such a call cannot be ended, and the library's locks keep others out; a process can be left behind.
It also is the only way to load the library of a driver that was replaced.

Requests: ``{"do": "open", "skip": [index, …]}``, ``{"do": "read", "skip": […]}``, ``{"do": "watch", "skip": […]}``.
Before each GPU the index is told (``{"at": index}``), so that the other side knows whose call hangs.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from telemetry.collect.nvml.device import LOST, RELOADED, Nvml, NvmlFault
from telemetry.collect.nvml.reader import Reader

ROOT: Final = Path(__file__).resolve().parents[3]
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


WAIT_MS: Final = 1000
"""How long one wait for XIDs lasts; the watcher says that it is alive after each."""

Message = dict[str, Any]


class Session:
    """Answers requests with messages; one to a process.

    ``monotonic``: seconds of a clock that never jumps.
    ``clock_ms``: milliseconds since 1970 UTC: the time of XIDs.
    """

    def __init__(
        self,
        nvml: Nvml,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nvml = nvml
        self._reader = Reader(nvml, monotonic)
        self._clock_ms = clock_ms
        self._sleep = sleep
        self._count = 0

    def answer(self, request: Message) -> Iterator[Message]:
        """Answer a request; the last message is ``done`` or ``failed`` (the library has to be opened anew)."""
        skip = frozenset(request.get("skip", ()))
        try:
            if request["do"] == "open":
                yield from self._open(skip)
            elif request["do"] == "read":
                yield from self._read(skip)
            else:
                yield from self._watch(skip)
        except NvmlFault as fault:
            yield {"failed": fault.code}

    def _open(self, skip: frozenset[int]) -> Iterator[Message]:
        yield {"at": None}
        self._nvml.open()
        self._count = self._nvml.count()
        yield {"driver": self._nvml.driver(), "count": self._count}
        for index in range(self._count):
            if index not in skip:
                yield {"at": index}
                yield self._found(index)
        yield {"done": True}

    def _found(self, index: int) -> Message:
        try:
            return {"device": asdict(self._reader.find(index))}
        except NvmlFault as fault:
            return _unless_reloaded(index, fault)

    def _read(self, skip: frozenset[int]) -> Iterator[Message]:
        for index in range(self._count):
            if index in skip:
                continue
            yield {"at": index}
            if not self._reader.known(index):
                found = self._found(index)
                yield found
                if "device" not in found:
                    continue
            try:
                reading = self._reader.read(index)
                yield {"row": index, "values": reading.values, "errors": reading.errors}
            except NvmlFault as fault:
                yield _unless_reloaded(index, fault)
        yield {"done": True}

    def _watch(self, skip: frozenset[int]) -> Iterator[Message]:
        """Tell every XID until something breaks.

        A lost GPU makes the wait fail for all GPUs of the set, so the set is then made anew without it.
        """
        while True:
            watched: dict[int, Any] = {}
            names: dict[int, str] = {}
            for index in range(self._count):
                if index in skip:
                    continue
                yield {"at": index}
                handle = self._watchable(index, names)
                if handle is not None:
                    watched[index] = handle
            yield {"at": None}
            events, refused = self._nvml.watch(list(watched.values()))
            for fault_or_none in refused:
                if isinstance(fault_or_none, NvmlFault) and fault_or_none.code in RELOADED:
                    raise fault_or_none
            accepted = [each for each, why in zip(watched, refused, strict=True) if why is None]
            yield {"watching": accepted}
            yield from self._wait(events, {index: watched[index] for index in accepted}, names)

    def _watchable(self, index: int, names: dict[int, str]) -> Any:
        """Return the handle of a GPU that is there, else None."""
        try:
            handle = self._nvml.handle(index)
            names[index] = self._nvml.identity(index, handle).gpu
            try:
                self._nvml.call("pstate", handle)  # a lost GPU can still be registered, and spoils the wait
            except NvmlFault as fault:
                if fault.code in LOST | RELOADED:
                    raise
            return handle
        except NvmlFault as fault:
            if fault.code in RELOADED:
                raise
            return None

    def _wait(self, events: Any, watched: dict[int, Any], names: dict[int, str]) -> Iterator[Message]:
        """Tell XIDs until a GPU of the set is lost."""
        while True:
            try:
                if watched:
                    event = self._nvml.wait(events, WAIT_MS)
                else:  # nothing to wait for, but a GPU may come back
                    self._sleep(WAIT_MS / 1000)
                    event = None
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
            at_ms = self._clock_ms()
            owner = next((index for index, each in watched.items() if self._nvml.same(each, handle)), None)
            yield {
                "xid": xid,
                "index": owner,
                "gpu": None if owner is None else names[owner],
                "instance": instance,
                "at_ms": at_ms,
            }


def _unless_reloaded(index: int, fault: NvmlFault) -> Message:
    if fault.code in RELOADED:
        raise fault
    if fault.code in LOST:
        return {"lost": index, "code": fault.code}
    return {"unreadable": index, "code": fault.code}


def main() -> None:
    """Serve requests of the process that started this one, until it closes stdin or dies."""
    from telemetry.collect.nvml.library import Library  # noqa: PLC0415  kept out of what tests of the session import

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
