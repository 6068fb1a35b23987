"""Metrics that exporters are known to give and that predrain leaves out."""

from __future__ import annotations

import re
from typing import Final

_UNUSED: Final = re.compile(
    "|".join(
        (
            # of the exporter's own process, of the scrape, of the monitoring system
            r"(?:go|process|promhttp|python|prometheus|net_conntrack)_.*",
            r"scrape_(?:duration_seconds|samples_|series_|timeout_|sample_limit|body_).*",
            r"up|ALERTS(?:_FOR_STATE)?",
            # licence and virtualisation software; what ran on the GPU comes from jobs
            r"DCGM_FI_DEV_VGPU_.*|DCGM_FI_DEV_COMPUTE_PIDS",
            # of a switch or a CPU, pairs of GPUs, spare rows by bank: row_remap_failure shows when they run out
            r"DCGM_FI_DEV_(?:NVSWITCH|CPU)_.*|DCGM_EXP_P2P_STATUS|DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_.*",
            # settings and limits of the board, which the inventory's model implies, and counts of GPUs
            r"DCGM_FI_DEV_(?:MAX|SUPPORTED)_.*|DCGM_FI_DEV_POWER_MGMT_LIMIT_(?:DEF|MIN|MAX)",
            r"DCGM_FI_DEV_(?:COUNT|FB_TOTAL|FB_USED_PERCENT|SHUTDOWN_TEMP|GPU_MAX_OP_TEMP|MEM_MAX_OP_TEMP)",
            r"gpu_(?:nodes_total|total_vram|visible_vram|total_visible_vram|total_gtt)",
            # activity and reasons that other channels hold already
            r"DCGM_FI_DEV_(?:VIDEO_CLOCK|BOARD_LIMIT_VIOLATION|SYNC_BOOST_VIOLATION|LOW_UTIL_VIOLATION)",
            r"DCGM_FI_PROF_(?:PIPE_(?:FP64|FP32|FP16|INT)_ACTIVE|NVLINK_[TR]X_BYTES)|DCGM_FI_DEV_NVLINK_COUNT_[TR]X_BYTES",
            r"DCGM_EXP_CLOCK_EVENTS_COUNT|DCGM_EXP_GPU_HEALTH_STATUS|gpu_health",
        )
    )
)


def is_unused(metric: str) -> bool:
    """Whether a metric is known, and not read."""
    return _UNUSED.fullmatch(metric) is not None
