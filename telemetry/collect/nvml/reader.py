"""Reads every channel of one GPU, and learns what it does not have.

Runs in a child process (see :mod:`telemetry.collect.nvml.child`), so it imports nothing heavy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from telemetry.collect.nvml.library import LOST, RELOADED, UNSUPPORTED, Library, NvmlFault
from telemetry.collect.nvml.questions import CALLS, FIELDS, LINK_COUNTERS, PROFILE

ASK_AGAIN_S: Final = 3600.0
"""What a device does not support is asked again after this long: a driver's setting may have changed."""

_T = TypeVar("_T")
_CHEAP: Final = next(call for call in CALLS if call.name == "pstate")
_BLANK_32: Final = 4294967295.0
_BLANK_FROM: Final = 2.0**62


class Gpu:
    """One GPU of an open library.

    ``monotonic``: seconds of a clock that never jumps.
    Raises ``NvmlFault`` if the GPU is lost, or the driver is gone.
    """

    def __init__(self, nvml: Library, index: int, monotonic: Callable[[], float]) -> None:
        self._nvml = nvml
        self.handle = nvml.handle(index)
        self.identity = nvml.identity(index, self.handle)
        self._monotonic = monotonic
        self._unsupported: dict[str, float] = {}
        self._link_values: dict[tuple[str, int], float] = {}
        self._samples: list[Any] = []
        self._values: dict[str, float] = {}
        self._errors: Counter[str] = Counter()

    def check(self) -> None:
        """Raise ``NvmlFault`` if the GPU is lost or the driver is gone."""
        try:
            self._nvml.call(_CHEAP, self.handle)
        except NvmlFault as fault:
            if fault.code in LOST | RELOADED:
                raise

    def read(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return values by channel, and counts by name of errors other than that something is not supported.

        Raises ``NvmlFault`` with a code of ``LOST`` (the GPU has to be found again, its handle is void) or
        ``RELOADED`` (so has everything). Any other failure only leaves its channels out.
        """
        self._values, self._errors = {}, Counter()
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
