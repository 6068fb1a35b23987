"""Metrics that exporters are known to give and that predrain leaves out, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_BUSY: Final = "activity that other channels tell already"
_STATIC: Final = "a setting or a limit of the board, which the inventory's model tells"
_SOFTWARE: Final = "licence or virtualisation software, not the device"

UNUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DCGM_FI_DEV_VGPU_LICENSE_STATUS": _SOFTWARE,
        "DCGM_FI_DEV_VGPU_MEMORY_USAGE": _SOFTWARE,
        "DCGM_FI_DEV_COUNT": "the inventory counts the GPUs of a node",
        "DCGM_FI_DEV_COMPUTE_PIDS": "what ran on the GPU comes from jobs",
        "DCGM_FI_DEV_FB_TOTAL": _STATIC,
        "DCGM_FI_DEV_FB_USED_PERCENT": "fb_used_mib and fb_free_mib tell it",
        "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF": _STATIC,
        "DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN": _STATIC,
        "DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX": _STATIC,
        "DCGM_FI_DEV_SHUTDOWN_TEMP": _STATIC,
        "DCGM_FI_DEV_GPU_MAX_OP_TEMP": _STATIC,
        "DCGM_FI_DEV_MEM_MAX_OP_TEMP": _STATIC,
        "DCGM_FI_DEV_VIDEO_CLOCK": _BUSY,
        "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": "counted by power_violation_ns and clocks_event_reasons",
        "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": "the clocks of a group of boards, not this device",
        "DCGM_FI_DEV_LOW_UTIL_VIOLATION": _BUSY,
        "DCGM_FI_PROF_PIPE_FP64_ACTIVE": _BUSY,
        "DCGM_FI_PROF_PIPE_FP32_ACTIVE": _BUSY,
        "DCGM_FI_PROF_PIPE_FP16_ACTIVE": _BUSY,
        "DCGM_FI_PROF_PIPE_INT_ACTIVE": _BUSY,
        "DCGM_FI_PROF_NVLINK_TX_BYTES": _BUSY,
        "DCGM_FI_PROF_NVLINK_RX_BYTES": _BUSY,
        "DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES": _BUSY,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES": _BUSY,
        "DCGM_EXP_CLOCK_EVENTS_COUNT": "a count over the exporter's own window; clocks_event_reasons tells the reasons",
        "DCGM_EXP_GPU_HEALTH_STATUS": "the health watches of DCGM, made of the fields that are read here",
        "DCGM_EXP_P2P_STATUS": "a matrix of pairs of GPUs, not a value of one",
        "up": "of the scrape, not of a device",
        "ALERTS": "alerts of the monitoring system",
        "ALERTS_FOR_STATE": "alerts of the monitoring system",
        "gpu_nodes_total": "the inventory counts the GPUs of a node",
        "gpu_total_vram": _STATIC,
        "gpu_visible_vram": _STATIC,
        "gpu_total_visible_vram": _STATIC,
        "gpu_total_gtt": _STATIC,
        "gpu_health": "made by the exporter of the fields that are read here",
    }
)
"""Metric name to the reason why it is not read."""

_FAMILIES: Final = (
    (re.compile(r"(?:go|process|promhttp|python|prometheus|net_conntrack)_"), "of the exporter's own process"),
    (
        re.compile(r"scrape_(?:duration_seconds|samples_|series_|timeout_|sample_limit|body_)"),
        "of the scrape, not of a device",
    ),
    (
        re.compile(r"DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_"),
        "spare rows by bank: row_remap_failure tells when they run out",
    ),
    (re.compile(r"DCGM_FI_DEV_VGPU_"), _SOFTWARE),
    (re.compile(r"DCGM_FI_DEV_(?:MAX|SUPPORTED)_"), _STATIC),
    (re.compile(r"DCGM_FI_DEV_NVSWITCH_"), "of a switch, not of a GPU"),
    (re.compile(r"DCGM_FI_DEV_CPU_"), "of a CPU, not of a GPU"),
)


def unused_reason(metric: str) -> str | None:
    """Return why a known metric is not read, or None if it is not among the known ones.

    Examples
    --------
    >>> unused_reason("go_goroutines")
    "of the exporter's own process"
    """
    if metric in UNUSED:
        return UNUSED[metric]
    return next((reason for pattern, reason in _FAMILIES if pattern.match(metric)), None)
