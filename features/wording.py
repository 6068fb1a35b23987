"""Phrases for channels, events and quantities in alert reasons."""

import math
from datetime import timedelta

CHANNEL_WORDS: dict[str, str] = {
    "gpu_temp_c": "GPU temperature",
    "mem_temp_c": "memory temperature",
    "gpu_margin_c": "margin to the slowdown temperature",
    "memory_margin_c": "margin to the maximum memory temperature",
    "slowdown_temp_c": "slowdown temperature",
    "power_w": "power",
    "power_instant_w": "instantaneous power",
    "power_limit_w": "power limit",
    "energy_mj": "energy used",
    "fan_speed_pct": "fan speed",
    "power_violation_ns": "time with clocks limited by power",
    "thermal_violation_ns": "time with clocks limited by temperature",
    "reliability_violation_ns": "time with clocks limited by voltage",
    "sm_clock_mhz": "SM clock",
    "mem_clock_mhz": "memory clock",
    "gpu_util_pct": "GPU utilization",
    "mem_util_pct": "memory utilization",
    "enc_util_pct": "encoder utilization",
    "dec_util_pct": "decoder utilization",
    "fb_used_mib": "used memory",
    "fb_free_mib": "free memory",
    "fb_reserved_mib": "reserved memory",
    "gr_engine_active_ratio": "engine activity",
    "sm_active_ratio": "SM activity",
    "sm_occupancy_ratio": "SM occupancy",
    "tensor_active_ratio": "tensor core activity",
    "dram_active_ratio": "memory interface activity",
    "pcie_tx_bytes_s": "PCIe traffic sent",
    "pcie_rx_bytes_s": "PCIe traffic received",
    "ecc_sbe_volatile_total": "correctable ECC errors (volatile)",
    "ecc_dbe_volatile_total": "uncorrectable ECC errors (volatile)",
    "ecc_sbe_aggregate_total": "correctable ECC errors (lifetime)",
    "ecc_dbe_aggregate_total": "uncorrectable ECC errors (lifetime)",
    "ecc_sbe_dram_volatile_total": "correctable ECC errors in device memory",
    "ecc_dbe_dram_volatile_total": "uncorrectable ECC errors in device memory",
    "ecc_sbe_sram_volatile_total": "correctable ECC errors in on-chip memory",
    "ecc_dbe_sram_volatile_total": "uncorrectable ECC errors in on-chip memory",
    "sram_threshold_exceeded": "on-chip memory error threshold exceeded",
    "retired_pages_sbe_total": "memory pages retired for correctable errors",
    "retired_pages_dbe_total": "memory pages retired for uncorrectable errors",
    "retired_pages_pending": "pending page retirements",
    "row_remap_uncorrectable_total": "memory rows remapped for uncorrectable errors",
    "row_remap_correctable_total": "memory rows remapped for correctable errors",
    "row_remap_failure": "memory row remap failure",
    "row_remap_pending": "memory row remap pending",
    "pcie_replay_total": "PCIe replays",
    "pcie_link_gen": "PCIe generation",
    "pcie_link_width": "PCIe lanes",
    "nvlink_crc_flit_total": "NVLink flow-control checksum errors",
    "nvlink_crc_data_total": "NVLink data checksum errors",
    "nvlink_replay_total": "NVLink replays",
    "nvlink_recovery_total": "NVLink recoveries",
    "nvlink_bandwidth_mib_s": "NVLink traffic",
    "clocks_event_reasons": "throttle reasons",
    "clocks_event_reasons_hw_slowdown": "hardware slowdown",
    "clocks_event_reasons_sw_thermal": "software thermal slowdown",
    "clocks_event_reasons_hw_thermal": "hardware thermal slowdown",
    "clocks_event_reasons_power_brake": "power brake slowdown",
    "xid_last": "last XID",
    "pstate": "performance state",
    "recovery_action": "recovery action requested by the driver",
    "fabric_health": "NVLink fabric health",
}
"""Readable names of the built-in channels and of the bits of bitmasks."""

COUNTED_WORDS: dict[str, tuple[str, str]] = {
    "xid_memory": ("memory XID", "memory XIDs"),
    "xid_bus": ("bus XID", "bus XIDs"),
    "xid_firmware": ("firmware XID", "firmware XIDs"),
    "xid_interconnect": ("interconnect XID", "interconnect XIDs"),
    "xid_precursor": ("precursor XID", "precursor XIDs"),
    "xid_watch": ("other XID", "other XIDs"),
    "xid_app": ("application XID", "application XIDs"),
    "xid_hardware": ("hardware XID", "hardware XIDs"),
    "xid": ("XID", "XIDs"),
    "incident": ("incident", "incidents"),
    "failure": ("failure", "failures"),
    "repair": ("repair", "repairs"),
    "driver": ("driver change", "driver changes"),
    "diagnostic_failed": ("failed diagnostic", "failed diagnostics"),
}
"""Singular and plural of the events that the group ``history`` counts."""

STATIC_WORDS: dict[str, str] = {"slot": "slot", "driver": "driver version", "moves": "moves"}
"""Readable names of inventory columns, where they differ from the column name."""

STAY_WORDS: dict[str, str] = {"age": "in service", "in_place": "in this position"}
"""Phrases for durations in days that are not inventory columns."""

SCOPE_WORDS: dict[str, str] = {
    "gpu": "on this GPU",
    "slot": "in this slot",
    "node": "on this node",
    "fleet": "in the fleet",
    "age": "among units of this age",
}
"""Phrases for the scopes of a history; other failure domains read ``in this ...``."""

_UNIT_WORDS = {"C": "°C", "%": "%", "bitmask": "", "bool": "", "ratio": "", "generation": "", "count": ""}
_SUFFIXES = ("_total", "_ratio", "_count", "_pct", "_mhz", "_mib", "_c", "_w")


def channel_words(channel: str) -> str:
    """Return the readable name of a channel; of a custom one, its name without unit suffix and underscores.

    >>> channel_words("power_w"), channel_words("bus_errors_total")
    ('power', 'bus errors')
    """
    if channel in CHANNEL_WORDS:
        return CHANNEL_WORDS[channel]
    for suffix in _SUFFIXES:
        if channel.endswith(suffix) and len(channel) > len(suffix):
            channel = channel.removesuffix(suffix)
            break
    return channel.replace("_", " ")


def with_unit(number: str, unit: str) -> str:
    """Append a unit to a number."""
    word = _UNIT_WORDS.get(unit, unit)
    if word == "%":
        return f"{number}%"
    measured = word and (len(word) <= 2 or "/" in word or word in ("MHz", "MiB"))
    return f"{number} {word}" if measured else number


def decimal(value: float) -> str:
    """Format a number: one decimal, none from 1,000 on, up to three significant digits below 1.

    >>> decimal(42), decimal(17700.4), decimal(0.5), decimal(0.04321), decimal(0.0)
    ('42.0', '17,700', '0.5', '0.0432', '0.0')
    """
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1 or size == 0:
        return f"{value:.1f}"
    digits = min(2 - math.floor(math.log10(size)), 8)
    text = f"{value:.{digits}f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def count_of(value: float) -> str:
    """Format a count, with decimals only if it is not an integer."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{value * 100:.0f}%" if value == 0 or abs(value) >= 0.01 else f"{value * 100:.1f}%"


def duration(value: timedelta) -> str:
    """Format a window."""
    seconds = value.total_seconds()
    if seconds > 2 * 86400 and seconds % 86400 == 0:
        return f"{seconds / 86400:.0f} d"
    if seconds >= 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min"
