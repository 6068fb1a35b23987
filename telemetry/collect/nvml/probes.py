"""Which of our channels NVML knows, by which question, and how its unit becomes ours.

A *field* is asked with all others in one ``nvmlDeviceGetFieldValues``; a *call* is a function of its own. Where a field
and a call know the same thing the field comes first, as it costs nothing beside the others, and the call is asked by
devices and drivers that do not have the field. ``xid_last`` is not read here: NVML tells XIDs as events only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
