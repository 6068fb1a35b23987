"""Child process that calls NVML and answers its parent over a pipe. It imports nothing heavy.

NVML runs in its own process because a call to a faulty GPU can block forever inside the kernel driver. A thread stuck
in such a call cannot be stopped and holds the library's locks, whereas a process can be abandoned. A new process is
also the only way to load the library after a driver upgrade.

A request is the index of a GPU to read, or None to open the library. A second thread sends XIDs as the driver reports
them.
"""

import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from telemetry.collect.nvml.library import (
    CALLS,
    FIELDS,
    LINK_COUNTERS,
    LOST,
    PROFILE,
    RELOADED,
    UNSUPPORTED,
    Library,
    NvmlFault,
    NvmlQuery,
)

WAIT_MS: Final = 1000
"""Timeout of one wait for XIDs; a heartbeat message follows each."""

DEAF_PAUSE_S: Final = 10.0
"""Pause after the driver refused to report XIDs."""

ASK_AGAIN_S: Final = 3600.0
"""Unsupported queries are retried after this long, since driver settings may change."""

_LIVENESS_QUERY: Final = next(call for call in CALLS if call.name == "pstate")
_BLANK_32: Final = 4294967295.0
_BLANK_FROM: Final = 2.0**62

_Answer = float | NvmlFault
_Query = tuple[str, Mapping[str, float], Callable[[list[str]], list[_Answer]]]
# Name of the query, scale by channel, and the function that runs it.

Message = tuple[str, Any]
"""Kind and content: ``answer`` or ``fault`` (code) to a request; from the second thread ``xid`` (time, XID, GPU, GPU
instance), ``watching`` (number of GPUs), ``deaf`` (code with which the driver refuses XIDs) and ``alive``."""


class Gpu:
    """One GPU of an open library; raises ``NvmlFault`` if the GPU is lost or the driver is gone."""

    def __init__(self, nvml: Library, index: int, monotonic: Callable[[], float]) -> None:
        self._nvml = nvml
        self.handle = nvml.handle(index)
        self.identity = nvml.identity(index, self.handle)
        self._monotonic = monotonic
        self._ask_again_s: dict[tuple[str, str], float] = {}
        self._link_counts: dict[int, dict[int, float]] = {}
        self._samples: list[Any] = []
        # Fields come first, and a newer function before an older one.
        self._queries: list[_Query] = [
            ("fields", {channel: scale for channel, _, scale in FIELDS}, self._fields),
            *((call.name, dict.fromkeys(call.channels, call.scale), partial(self._call, call)) for call in CALLS),
            *((f"link {channel}", {channel: 1.0}, partial(self._links, number)) for channel, number in LINK_COUNTERS),
            ("profile", {channel: scale for channel, _, scale in PROFILE}, self._profile),
        ]

    def responds(self) -> bool:
        """Return whether the GPU is not lost; raises ``NvmlFault`` if the driver is gone."""
        try:
            self._nvml.call(_LIVENESS_QUERY, self.handle)
        except NvmlFault as fault:
            if fault.code in RELOADED:
                raise
            return fault.code not in LOST
        return True

    def read(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return values by channel, and counts by name of errors other than unsupported queries.

        Raises ``NvmlFault`` with a code of ``LOST`` (the handle is invalid) or ``RELOADED`` (the library must be opened
        again). Other errors only leave their channels out.
        """
        values: dict[str, float] = {}
        errors: Counter[str] = Counter()
        answered: set[str] = set()
        for name, scales, ask in self._queries:
            now_s = self._monotonic()
            missing = [channel for channel in scales if channel not in answered]
            channels = [channel for channel in missing if now_s >= self._ask_again_s.get((name, channel), now_s)]
            for channel, answer in zip(channels, _answers(ask, channels), strict=True):
                if isinstance(answer, NvmlFault):
                    if answer.code in LOST | RELOADED:
                        raise answer
                    if answer.code in UNSUPPORTED:
                        self._ask_again_s[name, channel] = now_s + ASK_AGAIN_S
                        continue
                    errors[answer.name] += 1
                elif not _is_blank(answer):
                    values[channel] = answer * scales[channel]
                # No fallback after a transient error: two sources of one counter could differ.
                answered.add(channel)
        return values, dict(errors)

    def _fields(self, channels: Sequence[str]) -> list[_Answer]:
        numbers = [number for channel, number, _ in FIELDS if channel in channels]
        return [NvmlFault(code) if code else value for code, value in self._nvml.fields(self.handle, numbers)]

    def _call(self, query: NvmlQuery, channels: Sequence[str]) -> list[_Answer]:
        answers = dict(zip(query.channels, self._nvml.call(query, self.handle), strict=False))
        return [answers.get(channel, math.nan) for channel in channels]

    def _links(self, counter: int, _channels: Sequence[str]) -> list[_Answer]:
        """Sum an error counter over the links.

        A link that goes down keeps its last count: without it the sum would drop, which looks like a counter reset and
        makes the errors of all other links count as new.
        """
        counts = self._link_counts.setdefault(counter, {})
        fault = NvmlFault(min(UNSUPPORTED))
        for link in range(self._nvml.max_links):
            try:
                count = self._nvml.link_counter(self.handle, link, counter)
            except NvmlFault as error:
                if error.code in LOST | RELOADED:
                    raise
                fault = fault if error.code in UNSUPPORTED else error
            else:
                counts |= {} if _is_blank(count) else {link: count}
        return [sum(counts.values()) if counts else fault]

    def _profile(self, channels: Sequence[str]) -> list[_Answer]:
        numbers = [number for channel, number, _ in PROFILE if channel in channels]
        answers = self._nvml.profile(self.handle, self._samples, numbers) or [(0, math.nan)] * len(numbers)
        return [NvmlFault(code) if code else value for code, value in answers]


def _answers(ask: Callable[[list[str]], list[_Answer]], channels: list[str]) -> list[_Answer]:
    try:
        return ask(channels) if channels else []
    except NvmlFault as fault:
        return [fault] * len(channels)


def _is_blank(value: float) -> bool:
    """Return whether a value means "not available": all of 32 or 64 bits set (``NVML_VALUE_NOT_AVAILABLE``)."""
    return math.isnan(value) or value == _BLANK_32 or value >= _BLANK_FROM


class Session:
    """Handles requests, and watches the GPUs for XIDs."""

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
        """Open the library (answer: driver, number of GPUs) or read a GPU (answer: identity, values, errors)."""
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
        """Yield XIDs of all GPUs read so far, forever; lost GPUs leave the event set, as they fail every wait."""
        gpus: list[Gpu] = []
        events, watched = None, 0
        while True:
            event = None
            try:
                # Only this thread uses the set; it is rebuilt when a GPU is added or lost.
                if events is None or list(self._gpus.values()) != gpus:
                    gpus = list(self._gpus.values())
                    if events is not None:
                        self._nvml.unwatch(events)
                        events = None
                    if gpus:  # a lost GPU could be registered and would fail the wait
                        events, watched = self._nvml.watch([gpu.handle for gpu in gpus if gpu.responds()])
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
    """Serve the parent process until it closes the pipe or exits."""
    # The parent stops this process by closing the pipe, or by SIGKILL if a call hangs; signals to the process group
    # (Ctrl-C, a service manager's stop) are for the parent.
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
        os._exit(0)  # other threads may be stuck in a driver call


if __name__ == "__main__":
    main()
