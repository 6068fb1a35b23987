"""Reads every channel of one GPU after the other, and learns what each of them does not have.

Runs in a child process (see :mod:`telemetry.collect.nvml.child`), so it imports nothing heavy.

A *field* is asked with all others in one ``nvmlDeviceGetFieldValues``; a *call* is a function of its own. Where a field
and a call know the same thing the field comes first, as it costs nothing beside the others, and the call is asked by
devices and drivers that do not have the field. ``xid_last`` is not read here: NVML tells XIDs as events only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from telemetry.collect.nvml.device import (
    LOST,
    RELOADED,
    UNSUPPORTED,
    Identity,
    Nvml,
    NvmlFault,
)

_MIB: Final = 1.0 / 1048576.0


@dataclass(frozen=True, slots=True)
class Field:
    """One id of ``nvmlDeviceGetFieldValues``.

    ``number``: ``NVML_FI_*``.
    """

    channel: str
    number: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """One function of NVML.

    ``name``: the question, see :data:`telemetry.collect.nvml.library.CALLS`; it answers a number a channel.
    ``channels``: our channels, in the order of the answer.
    """

    name: str
    channels: tuple[str, ...]
    scale: float = 1.0
    older: Call | None = None


FIELDS: Final = (
    Field("mem_temp_c", 82),
    Field("energy_mj", 83),
    Field("power_instant_w", 186, 1e-3),
    Field("ecc_sbe_volatile_total", 3),
    Field("ecc_dbe_volatile_total", 4),
    Field("ecc_sbe_aggregate_total", 5),
    Field("ecc_dbe_aggregate_total", 6),
    Field("ecc_sbe_dram_volatile_total", 11),
    Field("ecc_dbe_dram_volatile_total", 12),
    Field("retired_pages_sbe_total", 29),
    Field("retired_pages_dbe_total", 30),
    Field("retired_pages_pending", 31),
    Field("row_remap_correctable_total", 142),
    Field("row_remap_uncorrectable_total", 143),
    Field("row_remap_pending", 144),
    Field("row_remap_failure", 145),
    Field("pcie_replay_total", 94),
    Field("nvlink_crc_flit_total", 38),
    Field("nvlink_crc_data_total", 45),
    Field("nvlink_replay_total", 52),
    Field("nvlink_recovery_total", 59),
    Field("recovery_action", 230),
)
"""Asked together. 38, 45, 52 and 59 are sums over all links, and what DCGM exports as well."""

CALLS: Final = (
    Call("temperature", ("gpu_temp_c",), older=Call("temperature_v1", ("gpu_temp_c",))),
    Call("margin_temperature", ("gpu_margin_c",)),
    Call("slowdown_threshold", ("slowdown_temp_c",)),
    Call("power", ("power_w",), 1e-3),
    Call("power_limit", ("power_limit_w",), 1e-3),
    Call("fan", ("fan_speed_pct",)),
    Call("violation_power", ("power_violation_ns",)),
    Call("violation_thermal", ("thermal_violation_ns",)),
    Call("violation_reliability", ("reliability_violation_ns",)),
    Call("clock_sm", ("sm_clock_mhz",)),
    Call("clock_memory", ("mem_clock_mhz",)),
    Call("utilisation", ("gpu_util_pct", "mem_util_pct")),
    Call("encoder", ("enc_util_pct",)),
    Call("decoder", ("dec_util_pct",)),
    # The second version counts what the driver holds back apart; in the first it is part of what is used.
    Call(
        "memory_v2",
        ("fb_used_mib", "fb_free_mib", "fb_reserved_mib"),
        _MIB,
        Call("memory", ("fb_used_mib", "fb_free_mib"), _MIB),
    ),
    Call(
        "sram",
        ("ecc_sbe_sram_volatile_total", "ecc_dbe_sram_volatile_total", "sram_threshold_exceeded"),
        older=Call("sram_counters", ("ecc_sbe_sram_volatile_total", "ecc_dbe_sram_volatile_total")),
    ),
    Call("pcie_generation", ("pcie_link_gen",)),
    Call("pcie_width", ("pcie_link_width",)),
    Call(
        "clocks_event_reasons",
        ("clocks_event_reasons",),
        older=Call("clocks_throttle_reasons", ("clocks_event_reasons",)),
    ),
    Call("pstate", ("pstate",)),
    Call("fabric_health", ("fabric_health",)),
)
"""Asked one by one."""

INSTEAD: Final = (
    Call("energy", ("energy_mj",)),
    Call("ecc_volatile", ("ecc_sbe_volatile_total", "ecc_dbe_volatile_total")),
    Call("ecc_aggregate", ("ecc_sbe_aggregate_total", "ecc_dbe_aggregate_total")),
    Call("ecc_dram", ("ecc_sbe_dram_volatile_total", "ecc_dbe_dram_volatile_total")),
    Call("retired_pages", ("retired_pages_sbe_total", "retired_pages_dbe_total")),
    Call("retired_pending", ("retired_pages_pending",)),
    Call(
        "remapped_rows",
        (
            "row_remap_correctable_total",
            "row_remap_uncorrectable_total",
            "row_remap_pending",
            "row_remap_failure",
        ),
    ),
    Call("pcie_replay", ("pcie_replay_total",)),
)
"""Asked only of what the fields do not have."""

LINK_COUNTERS: Final = (
    ("nvlink_replay_total", 0),
    ("nvlink_recovery_total", 1),
    ("nvlink_crc_flit_total", 2),
    ("nvlink_crc_data_total", 3),
)
"""Channel and ``nvmlNvLinkErrorCounter_t``: summed link by link where the device has no sums."""

PROFILE: Final = (
    ("gr_engine_active_ratio", 1, 0.01),
    ("sm_active_ratio", 2, 0.01),
    ("sm_occupancy_ratio", 3, 0.01),
    ("tensor_active_ratio", 5, 0.01),
    ("dram_active_ratio", 10, 0.01),
    ("pcie_tx_bytes_s", 20, 1048576.0),
    ("pcie_rx_bytes_s", 21, 1048576.0),
)
"""Channel, ``NVML_GPM_METRIC_*`` and scale: means over the time between two readings; Hopper and later have them."""


def readable_channels() -> frozenset[str]:
    """Return every channel that NVML may give."""
    calls = [call for each in (*CALLS, *INSTEAD) for call in (each, each.older) if call is not None]
    return frozenset(
        [field.channel for field in FIELDS]
        + [channel for call in calls for channel in call.channels]
        + [channel for channel, _ in LINK_COUNTERS]
        + [channel for channel, _, _ in PROFILE]
    )


ASK_AGAIN_S: Final = 3600.0
"""What a device does not support is asked again after this long: a driver's setting may have changed."""

_T = TypeVar("_T")
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
    """What one GPU told.

    ``values``: channel to value, in our units; absent: not reported.
    ``errors``: questions that failed otherwise than by not being supported: name of the error to count.
    """

    values: dict[str, float]
    errors: dict[str, int]


class Reader:
    """The GPUs of a node through one open library.

    ``monotonic``: seconds of a clock that never jumps.
    """

    def __init__(self, nvml: Nvml, monotonic: Callable[[], float]) -> None:
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

    def read(self, index: int) -> Reading:
        """Read all channels of a GPU.

        Raises ``NvmlFault`` with a code of ``faults.LOST`` (the GPU has to be found anew, its handle
        is void) or ``RELOADED`` (so has everything). Any other failure only leaves its channels out.
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

    def __init__(self, nvml: Nvml, device: _Device, now_s: float) -> None:
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
            answer = self._try(call.name, lambda: self._nvml.call(call.name, self._device.handle))
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
