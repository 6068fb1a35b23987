"""The process that talks to the driver and answers its parent over a pipe. It imports nothing heavy.

NVML runs in a process of its own because a call into a sick GPU can block for ever inside the kernel driver. A thread
that is stuck in such a call cannot be ended, and the library's locks keep others out; a process can be left behind.
It also is the only way to load the library of a driver that was replaced.

A request is the index of a GPU to read, or None to open the library. XIDs come from a second thread, whenever the
driver reports them.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from telemetry.collect.nvml.library import LOST, RELOADED, UNSUPPORTED, Library, NvmlFault
from telemetry.collect.nvml.questions import CALLS, FIELDS, LINK_COUNTERS, PROFILE

WAIT_MS: Final = 1000
"""How long one wait for XIDs lasts; a message says after each that the watch goes on."""

DEAF_PAUSE_S: Final = 10.0
"""Pause after the driver has refused to report XIDs."""

ASK_AGAIN_S: Final = 3600.0
"""What a device does not support is asked again after this long: a driver's setting may have changed."""

_T = TypeVar("_T")
_CHEAP: Final = next(call for call in CALLS if call.name == "pstate")
_BLANK_32: Final = 4294967295.0
_BLANK_FROM: Final = 2.0**62

Message = tuple[str, Any]
"""``answer`` or ``fault`` (a code) to a request; of the second thread ``xid`` (instant, XID, GPU, GPU instance),
``watching`` (how many GPUs), ``deaf`` (the code with which the driver refuses XIDs) and ``alive``."""


class Gpu:
    """One GPU of an open library; raises ``NvmlFault`` if it is lost, or the driver is gone."""

    def __init__(self, nvml: Library, index: int, monotonic: Callable[[], float]) -> None:
        self._nvml = nvml
        self.handle = nvml.handle(index)
        self.identity = nvml.identity(index, self.handle)
        self._monotonic = monotonic
        self._unsupported: dict[str, float] = {}
        self._link_values: dict[tuple[str, int], float] = {}
        self._samples: list[Any] = []

    def answers(self) -> bool:
        """Whether the GPU is not lost; raises ``NvmlFault`` if the driver is gone."""
        try:
            self._nvml.call(_CHEAP, self.handle)
        except NvmlFault as fault:
            if fault.code in RELOADED:
                raise
            return fault.code not in LOST
        return True

    def read(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return values by channel, and counts by name of errors other than that something is not supported.

        Raises ``NvmlFault`` with a code of ``LOST`` (the GPU has to be looked up again, its handle is void) or
        ``RELOADED`` (so has everything). Any other failure only leaves its channels out.
        """
        self._values: dict[str, float] = {}
        self._errors: Counter[str] = Counter()
        # A channel whose source fails for a moment is not asked elsewhere: two sources of one counter could differ.
        supported = self._read_fields()
        for call in CALLS:
            missing = [channel for channel in call.channels if channel not in supported]
            if not missing or not self._is_supported(call.name):
                continue
            answer = self._try(call.name, self._nvml.call, call, self.handle) or ()
            for channel, value in zip(call.channels, answer, strict=False):
                if channel in missing:
                    self._put(channel, value, call.scale)
            if self._is_supported(call.name):
                supported.update(missing)
        self._read_links(supported)
        self._read_profile()
        return self._values, dict(self._errors)

    def _read_fields(self) -> set[str]:
        """Read the fields; return the channels that they support."""
        fields = [field for field in FIELDS if self._is_supported(f"field {field[0]}")]
        if not fields or not self._is_supported("fields"):
            return set()
        answers = self._try("fields", self._nvml.fields, self.handle, [number for _, number, _ in fields])
        for (channel, _, scale), (code, value) in zip(fields, answers or (), strict=False):
            if code == 0:
                self._put(channel, value, scale)
            else:
                self._fail(f"field {channel}", NvmlFault(code))
        if not self._is_supported("fields"):
            return set()
        return {channel for channel, *_ in fields if self._is_supported(f"field {channel}")}

    def _read_links(self, supported: set[str]) -> None:
        """Sum the error counters over the links.

        A link that goes down keeps the last value it had: left out of the sum, it would look like a counter that was
        reset, and the errors of all other links like new ones.
        """
        for channel, counter in LINK_COUNTERS:
            if channel in supported:
                continue
            for link in range(self._nvml.max_links):
                name = f"link {link} {channel}"
                if self._is_supported(name):
                    value = self._try(name, self._nvml.link_counter, self.handle, link, counter)
                    if value is not None and not _is_blank(value):
                        self._link_values[channel, link] = value
            values = [value for (name, _), value in self._link_values.items() if name == channel]
            if values:
                self._values[channel] = sum(values)

    def _read_profile(self) -> None:
        if self._is_supported("profile"):
            numbers = [number for _, number, _ in PROFILE]
            answers = self._try("profile", self._nvml.profile, self.handle, self._samples, numbers)
            for (channel, _, scale), (code, value) in zip(PROFILE, answers or (), strict=False):
                if code == 0:
                    self._put(channel, value, scale)

    def _is_supported(self, name: str) -> bool:
        return self._monotonic() >= self._unsupported.get(name, -math.inf)

    def _try(self, name: str, ask: Callable[..., _T], *arguments: Any) -> _T | None:
        try:
            return ask(*arguments)
        except NvmlFault as fault:
            self._fail(name, fault)
            return None

    def _fail(self, name: str, fault: NvmlFault) -> None:
        if fault.code in LOST | RELOADED:
            raise fault
        if fault.code in UNSUPPORTED:
            self._unsupported[name] = self._monotonic() + ASK_AGAIN_S
        else:
            self._errors[fault.name] += 1

    def _put(self, channel: str, value: float, scale: float) -> None:
        if not _is_blank(value):
            self._values[channel] = value * scale


def _is_blank(value: float) -> bool:
    """Whether NVML says "not available": all bits set in 32 or 64 bits (``NVML_VALUE_NOT_AVAILABLE``)."""
    return math.isnan(value) or value == _BLANK_32 or value >= _BLANK_FROM


class Session:
    """Reads and watches the GPUs of one process."""

    def __init__(
        self,
        nvml: Library,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nvml, self._monotonic, self._clock, self._sleep = nvml, monotonic, clock, sleep
        self._gpus: dict[int, Gpu] = {}

    def answer(self, index: int | None) -> Message:
        """Open the library: driver and number of GPUs; or read a GPU: identity, values and errors."""
        try:
            if index is None:
                self._nvml.open()
                return "answer", (self._nvml.driver(), self._nvml.count())
            gpu = self._gpus.get(index) or Gpu(self._nvml, index, self._monotonic)
            answer = gpu.identity, *gpu.read()
            self._gpus[index] = gpu
        except NvmlFault as fault:
            self._gpus.pop(-1 if index is None else index, None)
            return "fault", fault.code
        return "answer", answer

    def watch(self) -> Iterator[Message]:
        """Report the XIDs of all GPUs that were read, for ever; a lost GPU makes each wait fail, and leaves the set."""
        gpus: list[Gpu] = []
        events, watched = None, 0
        while True:
            event = None
            try:
                # Only this thread touches the set: a GPU that was read first or lost meanwhile makes it new.
                if events is None or list(self._gpus.values()) != gpus:
                    gpus = list(self._gpus.values())
                    if events is not None:
                        self._nvml.unwatch(events)
                        events = None
                    if gpus:  # a lost GPU can still be registered, and spoils the wait
                        events, watched = self._nvml.watch([gpu.handle for gpu in gpus if gpu.answers()])
                        yield "watching", watched
                if events is not None and watched:
                    event = self._nvml.wait(events, WAIT_MS)
                else:
                    self._sleep(WAIT_MS / 1000)
            except NvmlFault as fault:
                events = None
                if fault.code not in LOST:
                    yield "deaf", fault.code
                self._sleep(WAIT_MS / 1000 if fault.code in LOST else DEAF_PAUSE_S)
            if event is None:
                yield "alive", None
                continue
            handle, xid, instance = event
            gpu = next((gpu.identity.gpu for gpu in gpus if self._nvml.same(gpu.handle, handle)), None)
            yield "xid", (self._clock(), xid, gpu, instance)


def main() -> None:
    """Serve the process that started this one, until it closes the pipe or dies."""
    # The other side ends this process by closing the pipe, or by SIGKILL when a call hangs; signals to the whole
    # group (Ctrl-C, a service manager's stop) are its own business.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection, lock = Connection(int(sys.argv[1])), threading.Lock()
    requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    session = Session(Library())

    def send(messages: Iterable[Message]) -> None:
        try:
            for message in messages:
                with lock:
                    connection.send(message)
        except BaseException as error:
            if not isinstance(error, BrokenPipeError):
                traceback.print_exc()
            os._exit(1)

    def answers() -> Iterator[Message]:
        while True:
            yield session.answer(requests.get())

    for messages in (answers(), session.watch()):
        threading.Thread(target=send, args=(messages,), daemon=True).start()
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the other threads may be stuck in a call


if __name__ == "__main__":
    main()
