"""Reads all GPUs of a node through a child process, and goes on where one of them is lost or blocks the driver."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from telemetry.collect.nvml.child import Child, Ended, Message, Silent
from telemetry.collect.nvml.device import ABSENT, LIBRARY_NOT_FOUND, Identity, NvmlFault
from telemetry.collect.running import Backoff
from telemetry.errors import InputError

_LOG = logging.getLogger(__name__)

GPU_DEADLINE_S: Final = 10.0
"""A GPU that takes longer than this for its reading (a few ms when well) blocks the driver."""

OPEN_DEADLINE_S: Final = 60.0
"""Opening wakes sleeping boards, seconds each where persistence mode is off."""

MOST_STUCK: Final = 4
"""A GPU that hangs is left alone while this many killed children still hang in the kernel."""

_MOST_CRASHES: Final = 2
# The first may have been an accident of the process (out of memory, say); the second is the GPU's.


@dataclass(frozen=True, slots=True)
class Row:
    """One reading of one GPU.

    ``at``: our clock when the reading began; aware, UTC.
    ``values``: channel to value; absent: not reported.
    """

    at: datetime
    identity: Identity
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A GPU that stopped answering; told once each time that it happens.

    ``key``: the UUID where it is known, else a word for the place.
    ``identity``: none where it was never known, and for the driver as a whole.
    """

    code: Literal["gpu_lost", "nvml_hang"]
    at: datetime
    key: str
    identity: Identity | None
    detail: str


@dataclass(slots=True)
class Turn:
    """What one turn over the node gave."""

    rows: list[Row] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    """Keys of GPUs that were in trouble and answer again."""


@dataclass(slots=True)
class _Hang:
    backoff: Backoff
    until_s: float


class NodeReader:
    """All GPUs of a node.

    ``clock``: Now, aware UTC.
    ``monotonic``: seconds of a clock that never jumps.
    """

    def __init__(
        self,
        spawn: Callable[[], Child],
        stuck: Callable[[], int],
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        known: dict[int, Identity] | None = None,
        lost: set[str] | None = None,
        hung: set[str] | None = None,
    ) -> None:
        self._spawn = spawn
        self._stuck = stuck
        self._clock = clock
        self._monotonic = monotonic
        self.lost = set() if lost is None else lost
        self.hung = set() if hung is None else hung
        self.driver: str | None = None
        self.errors: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._began_s = 0.0
        self._child: Child | None = None
        self._present: dict[int, Identity] = {}
        self._known: dict[int, Identity] = dict(known or {})
        self._hangs: dict[int, _Hang] = {}
        self._reopening = Backoff(1.0, 60.0)
        self._reopen_at_s = float("-inf")
        self._silent: int | None = None
        self._crashes: Counter[int] = Counter()

    @property
    def present(self) -> list[Identity]:
        """The GPUs that answer, in the driver's order."""
        return [self._present[index] for index in sorted(self._present)]

    @property
    def known(self) -> dict[int, Identity]:
        """Every GPU that was seen, by its place; also those that are in trouble now."""
        return dict(self._known)

    def turn(self) -> Turn:
        """Read every GPU once.

        Raises ``InputError`` if this node has no driver; only before it was first opened: later on, one that is gone is
        waited for.
        """
        turn = Turn()
        left_alone = set(self._hangs)
        self._read(turn, skip=left_alone)
        for index in sorted(left_alone):
            # After all others, so that a GPU that still hangs delays nobody.
            if self._monotonic() >= self._hangs[index].until_s and self._stuck() < MOST_STUCK and self._child:
                self._read(turn, skip=(set(self._known) | set(self._present) | left_alone) - {index})
        answered = {row.identity.gpu for row in turn.rows}
        self._failures.update(each.gpu for each in self._known.values() if each.gpu not in answered)
        return turn

    def close(self) -> None:
        """Let go of the driver."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _read(self, turn: Turn, skip: set[int]) -> None:
        """Read all GPUs but those of ``skip``, with a new child for the rest after each one that hangs."""
        skip, before = set(skip), set(self._hangs)
        while self._child is not None or self._open(turn):
            assert self._child is not None
            skip |= set(self._hangs) - before  # those that hung while the others were opened
            began: dict[int, datetime] = {}
            try:
                self._child.ask({"do": "read", "skip": sorted(skip)})
                for message in self._messages(GPU_DEADLINE_S):
                    if "at" in message:
                        began[message["at"]] = self._clock()
                        self._began_s = self._monotonic()
                    else:
                        skip.update(self._take(message, turn, began))
                return
            except Silent:
                if self._silent is None:
                    self._tell_hang(turn, None)
                    self._later("the driver does not answer")
                    return
                skip.add(self._silent)
                self._hangs_now(self._silent, turn)
            except NvmlFault as fault:
                self._later(str(fault))
                return
            except Ended as error:
                if not self._crash(error):
                    return
                if self._silent in self._hangs:
                    skip.add(self._silent)

    def _open(self, turn: Turn) -> bool:
        """Start a child and let it find the GPUs; False where that has to wait."""
        while self._monotonic() >= self._reopen_at_s:
            self._child = self._spawn()
            found: dict[int, Identity] = {}
            lost: list[tuple[int, int]] = []
            driver, count = "", 0
            try:
                self._child.ask({"do": "open", "skip": sorted(self._hangs)})
                for message in self._messages(OPEN_DEADLINE_S):
                    if "driver" in message:
                        driver, count = message["driver"], message["count"]
                    elif "device" in message:
                        found[message["device"]["index"]] = Identity(**message["device"])
                    elif "lost" in message:
                        lost.append((message["lost"], message["code"]))
                    elif "unreadable" in message:
                        self._count(NvmlFault(message["code"]).name)
            except NvmlFault as fault:
                if self.driver is None and fault.code in ABSENT:
                    self.close()
                    raise no_driver(fault.code) from None
                self._later(str(fault))
                return False
            except Silent:
                if self._silent is None:
                    self._tell_hang(turn, None)
                    self._later("the driver does not answer")
                    return False
                self._hangs_now(self._silent, turn)
                continue
            except Ended as error:
                if not self._crash(error):
                    return False
                continue
            self._opened(turn, driver, count, found, lost)
            return True
        return False

    def _opened(
        self, turn: Turn, driver: str, count: int, found: dict[int, Identity], lost: list[tuple[int, int]]
    ) -> None:
        if self._reopening.failures or driver != self.driver:
            _LOG.info("driver %s opened, %d GPUs listed", driver, count)
        self._reopening.succeeded()
        if "driver" in self.hung:
            self._back("driver", turn)
        self.driver = driver
        before, self._present = self._known, found
        listed = {identity.gpu for identity in found.values()}
        self._known = {index: each for index, each in before.items() if each.gpu not in listed} | found
        for index, code in lost:
            self._lose(index, NvmlFault(code).name, turn)
        silent = {index for index, _ in lost} | set(self._hangs)
        for index, identity in before.items():
            if identity.gpu not in listed and index not in silent:
                self._lose(index, "no longer listed by the driver", turn, identity)

    def _messages(self, deadline_s: float) -> Iterator[Message]:
        """Yield the messages of one request, and note which GPU the child is at."""
        self._silent = None
        assert self._child is not None
        while True:
            message = self._child.hear(deadline_s)
            if "failed" in message:
                raise NvmlFault(message["failed"])
            if "done" in message:
                return
            if "at" in message:
                self._silent = message["at"]
            yield message

    def _take(self, message: Message, turn: Turn, began: dict[int, datetime]) -> set[int]:
        """Take a message of a reading; return the places that are done with."""
        if "device" in message:
            identity = Identity(**message["device"])
            self._present[identity.index] = self._known[identity.index] = identity
            return set()
        if "row" in message:
            index = message["row"]
            identity = self._present[index]
            for key in (identity.gpu, _place(index)):
                if key in self.lost or key in self.hung:
                    self._back(key, turn)
            self._hangs.pop(index, None)
            self._crashes.pop(index, None)
            for name, times in message["errors"].items():
                self._count(name, times)
            values = message["values"] | {
                "scrape_duration_s": self._monotonic() - self._began_s,
                "scrape_failures_total": float(self._failures[identity.gpu]),
                "channels_reported": float(len(message["values"])),
            }
            turn.rows.append(Row(began[index], identity, values))
            return {index}
        if "lost" in message:
            self._lose(message["lost"], NvmlFault(message["code"]).name, turn)
            return {message["lost"]}
        self._count(NvmlFault(message["code"]).name)
        return {message["unreadable"]}

    def _lose(self, index: int, why: str, turn: Turn, identity: Identity | None = None) -> None:
        identity = identity or self._known.get(index)
        if self._present.get(index) == identity:
            self._present.pop(index, None)
        key = _place(index) if identity is None else identity.gpu
        if key in self.lost:
            return
        self.lost.add(key)
        detail = f"GPU {index} of this node: {why}"
        _LOG.warning("%s (%s) is lost: %s", key, _place(index), why)
        turn.troubles.append(Trouble("gpu_lost", self._clock(), key, identity, detail))

    def _hangs_now(self, index: int, turn: Turn) -> None:
        self.close()
        self._leave_alone(index)
        self._tell_hang(turn, index)

    def _crash(self, error: Ended) -> bool:
        """Take the end of a child; False where it had nothing to do with a GPU, so that trying on is no use."""
        if self._silent is None:
            self._later(f"the process that reads the driver ended ({error})")
            return False
        self.close()
        self._count("crash of the library")
        self._crashes[self._silent] += 1
        if self._crashes[self._silent] >= _MOST_CRASHES:
            self._leave_alone(self._silent)
        return True

    def _leave_alone(self, index: int) -> None:
        """Do not read a GPU for a while, longer each time."""
        hang = self._hangs.setdefault(index, _Hang(Backoff(60.0, 3600.0), 0.0))
        hang.until_s = self._monotonic() + hang.backoff.pause_s()
        self._present.pop(index, None)

    def _tell_hang(self, turn: Turn, index: int | None) -> None:
        identity = None if index is None else self._known.get(index)
        key = "driver" if index is None else _place(index) if identity is None else identity.gpu
        if key in self.hung:
            return
        self.hung.add(key)
        what = "the driver" if index is None else f"GPU {index} of this node"
        detail = f"{what} did not answer in {GPU_DEADLINE_S if index is not None else OPEN_DEADLINE_S:g} s"
        _LOG.warning("%s: %s", key, detail)
        turn.troubles.append(Trouble("nvml_hang", self._clock(), key, identity, detail))

    def _back(self, key: str, turn: Turn) -> None:
        self.lost.discard(key)
        self.hung.discard(key)
        turn.returned.append(key)
        _LOG.info("%s answers again", key)

    def _later(self, why: str) -> None:
        """Give the child up, and open anew after a pause."""
        self.close()
        self._present = {}
        pause_s = self._reopening.pause_s()
        self._reopen_at_s = self._monotonic() + pause_s
        if self._reopening.failures == 1:
            _LOG.warning("%s; opening it anew, with pauses up to a minute", why)

    def _count(self, name: str, times: int = 1) -> None:
        if name not in self.errors:
            _LOG.warning("readings of single channels fail: %s (said once, counted from now on)", name)
        self.errors[name] += times


def no_driver(code: int) -> InputError:
    """Return the error for a node without a driver."""
    what = (
        "there is no NVIDIA driver: its library libnvidia-ml.so.1 was not found"
        if code == LIBRARY_NOT_FOUND
        else "the NVIDIA driver is not loaded"
    )
    return InputError(
        what,
        "this node",
        "Install or load the driver (`nvidia-smi` must work for this user), or collect from elsewhere: "
        "`predrain collect exporters` scrapes nodes that run an exporter.",
    )


def _place(index: int) -> str:
    return f"index {index}"
