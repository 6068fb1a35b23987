"""The counter file of dcgm-exporter: what its stock file has, and the line of each channel."""

from __future__ import annotations

from typing import Final

from telemetry.dataset.channel import Channel

LATER_FIELDS: Final = frozenset({"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "DCGM_FI_DEV_FABRIC_HEALTH_SUMMARY"})
"""Names that exporter 4.4.1-4.5.2 did not know and would not start with; those built on DCGM 4.6 know them."""

STOCK_FIELDS: Final = frozenset(
    {
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_MEM_CLOCK",
        "DCGM_FI_DEV_MEMORY_TEMP",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM_FI_DEV_ENC_UTIL",
        "DCGM_FI_DEV_DEC_UTIL",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_FB_RESERVED",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "DCGM_FI_PROF_PCIE_RX_BYTES",
    }
)
"""What dcgm-exporter's default-counters.csv (4.x, 2026) switches on of the catalogue."""


def counter_name(channel: Channel) -> str | None:
    """Return the DCGM name that exporters of every age accept, or None for a channel that DCGM does not have.

    DCGM 4.6 renamed its fields and keeps the old names as aliases, so it is the old one; only the clocks' event reasons
    had their new name since DCGM 4.0 and before.
    """
    if not channel.dcgm_names:
        return None
    return channel.dcgm_names[0] if channel.name == "clocks_event_reasons" else channel.dcgm_names[-1]


def counter_line(channel: Channel) -> str | None:
    """Return the line of the counter file that switches a channel on, or None where DCGM does not have it."""
    name = counter_name(channel)
    if name is None:
        return None
    kind = "counter" if channel.kind == "counter" else "gauge"
    return f"{name}, {kind}, {channel.help.replace(',', ';')}"


def in_stock_file(channel: Channel) -> bool:
    """Whether dcgm-exporter's own default file switches the channel on."""
    return any(name in STOCK_FIELDS for name in channel.dcgm_names)
