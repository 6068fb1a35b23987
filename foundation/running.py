"""Utilities of long-running processes: signals, intervals, polling, backoff, failure logs, garbage collection."""

import asyncio
import functools
import gc
import logging
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

Wait = Callable[[float], bool]
"""Waits up to this many seconds; returns True to stop, like ``wait`` of a :class:`threading.Event`."""

Progress = Callable[[int, int], None]
"""Callback for progress: units done, total units."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; no handlers are installed outside the main thread."""
    stop = threading.Event()

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous_handlers = {number: signal.signal(number, set_stop) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def stop_loop_on_signals() -> asyncio.Event:
    """Return an event of the running loop that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def every(interval_s: float, wait: Wait) -> Iterator[int]:
    """Yield 0, 1, 2, … at a fixed rate until ``wait`` returns True; a late iteration starts immediately."""
    rounds = 0
    while True:
        began_s = time.monotonic()
        yield rounds
        rounds += 1
        if wait(max(0.0, interval_s - (time.monotonic() - began_s))):
            return


def backoff_s(failures: int, *, first_s: float = 1.0, max_s: float = 60.0) -> float:
    """Return the exponential backoff after this many consecutive failures (from 1), capped, with 25 % jitter."""
    bounded = min(first_s * 2.0 ** min(failures - 1, 30), max_s)
    return bounded * random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries of many nodes, no secret


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector; reference counting still frees objects without cycles.

    A full collection runs whenever the number of objects has grown by a quarter. That doubles the CPU time of a
    controller round over 300 nodes, and takes a third of the CPU time of parsing a log of a million lines.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Failing:
    """Consecutive failures by operation; logs the first failure of a kind and the recovery."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, object] = {}
        self.counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self.counts)

    def failed(self, operation: str, reason: object, *, kind: object = None, level: int = logging.WARNING) -> int:
        """Record a failure and return the number in a row; a change of ``kind`` is logged again."""
        self.counts[operation] += 1
        if self.counts[operation] == 1 or self._kinds[operation] != kind:
            self._log.log(level, "%s: %s; retrying (repeats are not logged)", operation, reason)
        self._kinds[operation] = kind
        return self.counts[operation]

    def recovered(self, operation: str) -> None:
        """Record a success; log it after failures."""
        failures = self.counts.pop(operation, 0)
        if failures:
            self._log.warning("%s: recovered after %d failures", operation, failures)


class Patience:
    """Bounds calls that may never return, e.g. on a disk that hangs; each runs in a thread, one per name at a time."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._given_up: dict[str, threading.Thread] = {}

    def call(self, name: str, call: Callable[[], T]) -> T:
        """Return the result or raise its exception; ``TimeoutError`` if it, or an earlier call, is still running.

        A call within a call of the same name shares its thread and its limit; one from another thread waits for its
        turn. A result that comes too late is dropped in the thread, which closes what it holds, such as a lock.
        """
        if threading.current_thread().name == name:
            return call()
        thread_lock = self._turns[name]
        if not thread_lock.acquire(timeout=self._longest_s):
            raise TimeoutError("an earlier call has not ended yet")
        try:
            return self._call(name, call)
        finally:
            thread_lock.release()

    def _call(self, name: str, call: Callable[[], T]) -> T:
        if name in self._given_up and self._given_up[name].is_alive():
            raise TimeoutError("an earlier call has not ended yet")
        answer: Future[T] = Future()

        def run() -> None:
            with suppress(InvalidStateError):  # too late
                try:
                    answer.set_result(call())
                except BaseException as error:
                    answer.set_exception(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        try:
            answer.exception(self._longest_s)
        except TimeoutError:
            if answer.cancel():
                self._given_up[name] = thread
                raise TimeoutError(f"timed out after {self._longest_s:g} s") from None
        return answer.result()


_Method = Callable[Concatenate[Any, P], T]


def bounded(name: str, error: type[Exception]) -> Callable[[_Method[P, T]], _Method[P, T]]:
    """Return a decorator that bounds methods by their object's ``patience`` (None: unbounded); they raise ``error``."""

    def decorate(method: _Method[P, T]) -> _Method[P, T]:
        @functools.wraps(method)
        def call_bounded(self: Any, /, *args: P.args, **others: P.kwargs) -> T:
            if self.patience is None:
                return method(self, *args, **others)
            try:
                patience: Patience = self.patience
                return patience.call(name, lambda: method(self, *args, **others))
            except TimeoutError as late:
                raise error(f"{name} does not respond: {late}") from late

        return call_bounded

    return decorate


class Poller:
    """Thread that calls ``poll`` immediately and after each pause until stopped; exceptions are logged."""

    def __init__(self, name: str, poll: Callable[[], object], pause_s: float) -> None:
        self._poll, self._pause_s = poll, pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, wait_s: float = 5.0) -> None:
        """Stop the thread; wait at most ``wait_s`` for a call in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._poll()
            except Exception:
                _LOG.exception("%s: polling failed", self._thread.name)
            self._stopped.wait(self._pause_s)
