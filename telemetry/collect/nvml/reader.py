"""Reads every channel of one GPU after the other, and learns what each of them does not have.

Runs in a child process (see :mod:`telemetry.collect.nvml.child`), so it imports nothing heavy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from telemetry.collect.nvml.library import LOST, RELOADED, UNSUPPORTED, Identity, Library, NvmlFault
from telemetry.collect.nvml.questions import CALLS, FIELDS, INSTEAD, LINK_COUNTERS, PROFILE, Call

ASK_AGAIN_S: Final = 3600.0
"""What a device does not support is asked again after this long: a driver's setting may have changed."""

_T = TypeVar("_T")
_CHEAP: Final = next(call for call in CALLS if call.name == "pstate")
_BLANK_32: Final = 4294967295.0
_BLANK_FROM: Final = 2.0**62
_INVALID_ARGUMENT: Final = 2
_PROFILE_NUMBERS: Final = tuple(number for _, number, _ in PROFILE)


@dataclass(slots=True)
class _Device:
    """A GPU and what has been learned about it."""

    handle: Any
    identity: Identity
    unsupported: dict[str, float] = field(default_factory=dict)
    links: list[int] | None = None
    link_values: dict[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """Channel to value, in our units, and counts by name of errors other than that something is not supported."""

    values: dict[str, float]
    errors: dict[str, int]


class Reader:
    """The GPUs of a node through one open library.

    ``monotonic``: seconds of a clock that never jumps.
    """

    def __init__(self, nvml: Library, monotonic: Callable[[], float]) -> None:
        self._nvml = nvml
        self._monotonic = monotonic
        self._devices: dict[int, _Device] = {}

    def find(self, index: int) -> Identity:
        """Look a GPU up in the driver's list.

        Raises ``NvmlFault`` if it is lost, or the driver is gone.
        """
        handle = self._nvml.handle(index)
        identity = self._nvml.identity(index, handle)
        self._devices[index] = _Device(handle, identity)
        return identity

    def known(self, index: int) -> bool:
        """Whether :meth:`find` has found the GPU, and it was not lost since."""
        return index in self._devices

    def check(self, handle: Any) -> None:
        """Raise ``NvmlFault`` if a GPU is lost or the driver is gone."""
        try:
            self._nvml.call(_CHEAP, handle)
        except NvmlFault as fault:
            if fault.code in LOST | RELOADED:
                raise

    def read(self, index: int) -> Reading:
        """Read all channels of a GPU.

        Raises ``NvmlFault`` with a code of ``LOST`` (the GPU has to be found again, its handle is void) or
        ``RELOADED`` (so has everything). Any other failure only leaves its channels out.
        """
        turn = _Turn(self._nvml, self._devices[index], self._monotonic())
        try:
            return turn.all()
        except NvmlFault as fault:
            if fault.code in LOST:
                del self._devices[index]
                self._nvml.forget(index)
            raise


class _Turn:
    """One reading of one GPU."""

    def __init__(self, nvml: Library, device: _Device, now_s: float) -> None:
        self._nvml = nvml
        self._device = device
        self._now_s = now_s
        self._values: dict[str, float] = {}
        self._errors: Counter[str] = Counter()

    def all(self) -> Reading:
        """Ask everything that the GPU may know."""
        self._fields()
        for call in CALLS:
            self._call(call)
        for call in INSTEAD:
            missing = [name for name in call.channels if not self._asked_as_field(name)]
            if missing:
                self._call(call, missing)
        if any(not self._asked_as_field(channel) for channel, _ in LINK_COUNTERS):
            self._links()
        self._profile()
        return Reading(self._values, dict(self._errors))

    def _fields(self) -> None:
        asked = [each for each in FIELDS if self._supported(f"field {each.channel}")]
        if not asked or not self._supported("fields"):
            return
        answers = self._try("fields", lambda: self._nvml.fields(self._device.handle, [each.number for each in asked]))
        for each, (code, value) in zip(asked, answers or [], strict=False):
            if code == 0:
                self._put(each.channel, value, each.scale)
            else:
                self._failed(f"field {each.channel}", NvmlFault(code), field=True)

    def _asked_as_field(self, channel: str) -> bool:
        # A field that failed for a moment is not asked elsewhere: two sources of one counter could differ.
        return self._supported("fields") and self._supported(f"field {channel}")

    def _call(self, call: Call, only: Sequence[str] | None = None) -> None:
        answer = None
        if self._supported(call.name):
            answer = self._try(call.name, lambda: self._nvml.call(call, self._device.handle))
        for channel, value in zip(call.channels, answer or (), strict=False):
            if only is None or channel in only:
                self._put(channel, value, call.scale)
        if call.older is not None and not self._supported(call.name):
            self._call(call.older, only)

    def _links(self) -> None:
        """Sum the error counters over the links.

        A link that goes down keeps the last value it had: left out of the sum, it would look like a counter that was
        reset, and the errors of all other links like new ones.
        """
        device, nvml = self._device, self._nvml
        if not self._supported("links"):
            return
        if device.links is None:
            device.links = [link for link in range(nvml.links()) if self._exists(link)]
        if not device.links:
            self._failed("links", NvmlFault(3))
            device.links = None
            return
        wanted = [(channel, counter) for channel, counter in LINK_COUNTERS if not self._asked_as_field(channel)]
        for link in device.links:
            if not self._try(f"link {link}", partial(nvml.link_active, device.handle, link)):
                continue
            for channel, counter in wanted:
                name = f"link {link} {channel}"
                if self._supported(name):
                    value = self._try(name, partial(nvml.link_counter, device.handle, link, counter))
                    if value is not None and not _is_blank(value):
                        device.link_values[link, counter] = value
        for channel, counter in wanted:
            known = [value for (_, kind), value in device.link_values.items() if kind == counter]
            if known:
                self._values[channel] = sum(known)

    def _exists(self, link: int) -> bool:
        try:
            return self._nvml.link_active(self._device.handle, link)
        except NvmlFault as fault:
            if fault.code in LOST | RELOADED:
                raise
            return False

    def _profile(self) -> None:
        if not self._supported("profile"):
            return
        index, handle = self._device.identity.index, self._device.handle
        answers = self._try("profile", lambda: self._nvml.profile(index, handle, _PROFILE_NUMBERS))
        for (channel, _, scale), (code, value) in zip(PROFILE, answers or [], strict=False):
            if code == 0:
                self._put(channel, value, scale)

    def _supported(self, name: str) -> bool:
        until = self._device.unsupported.get(name)
        if until is None:
            return True
        if self._now_s < until:
            return False
        del self._device.unsupported[name]
        return True

    def _try(self, name: str, ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except NvmlFault as fault:
            self._failed(name, fault)
            return None

    def _failed(self, name: str, fault: NvmlFault, *, field: bool = False) -> None:
        if fault.code in LOST | RELOADED:
            raise fault
        # A field that this driver does not know yet is an invalid argument to it.
        if fault.code in UNSUPPORTED or (field and fault.code == _INVALID_ARGUMENT):
            self._device.unsupported[name] = self._now_s + ASK_AGAIN_S
        else:
            self._errors[fault.name] += 1

    def _put(self, channel: str, value: float, scale: float) -> None:
        if not _is_blank(value):
            self._values[channel] = value * scale


def _is_blank(value: float) -> bool:
    """Whether NVML says "not available": all bits set in 32 or 64 bits (``NVML_VALUE_NOT_AVAILABLE``)."""
    return math.isnan(value) or value == _BLANK_32 or value >= _BLANK_FROM
