"""The entries of the channel catalogue; :mod:`telemetry.dataset.channels` explains the fields and makes the mapping.

Names marked by ``D`` lose their prefix ``DCGM_FI_DEV_`` here, those marked by ``P`` the prefix ``DCGM_FI_PROF_``.
"""

from __future__ import annotations

from telemetry.dataset.channel import Channel, Kind

_D = "DCGM_FI_DEV_"
_P = "DCGM_FI_PROF_"

# A temperature of a working device in Celsius: Kelvin begins at 263, and a board shuts itself down well below 130.
_CELSIUS = (-10.0, 130.0)
# Boards draw up to 1.4 kW (GB300); idle boards draw 10 W or more, which is above 3000 in milliwatts.
_WATTS = (0.0, 3000.0)
# Profiling ratios exceed 1 by rounding only; percent values above 1.05 fall out.
_RATIO = (0.0, 1.05)
_PERCENT = (0.0, 100.0)
# PCIe 6.0 x16 carries 1.3e11 bytes a second each way.
_PCIE = (0.0, 3e11)
# 1 TiB of device memory in MiB; the same in bytes or KiB of a busy GPU is far above.
_MEMORY = (0.0, 1048576.0)
_COUNT = (0.0, None)
_BOOL = (0.0, 1.0)
# NVML gives a bank histogram of at most a few thousand banks, and at most 512 remaps; six figures are nonsense.
_FEW = (0.0, 100000.0)


def _make(
    name: str,
    kind: Kind,
    unit: str,
    bounds: tuple[float | None, float | None],
    text: str,
    dcgm: tuple[int, str, str] | None = None,
    nvml: str | None = None,
    amd: tuple[str, ...] = (),
) -> Channel:
    """Make one entry; ``dcgm`` is the field id, the prefix and the names (newest first, separated by blanks)."""
    field = None if dcgm is None else dcgm[0]
    names = () if dcgm is None else tuple(dcgm[1] + each for each in dcgm[2].split())
    return Channel(name, kind, unit, *bounds, text, field, names, nvml, amd)


def entries() -> tuple[Channel, ...]:
    """Return the catalogue's channels in their order of presentation."""
    return (*_thermal_and_power(), *_activity(), *_memory_health(), *_links(), *_state(), *_scraping())


# The entries are a table: one wrapped line a property would make it ten screens long.
# fmt: off
def _thermal_and_power() -> tuple[Channel, ...]:
    celsius, watts = _CELSIUS, _WATTS
    threshold = "nvmlDeviceGetTemperatureThreshold"
    return (
        _make(
            "gpu_temp_c", "gauge", "C", celsius, "temperature of the GPU die",
            (150, _D, "GPU_TEMP_CELSIUS GPU_TEMP"), "nvmlDeviceGetTemperature",
            ("GPU_JUNCTION_TEMPERATURE", "GPU_EDGE_TEMPERATURE"),
        ),
        _make(
            "mem_temp_c", "gauge", "C", celsius, "temperature of the device memory; 0 where a board has no sensor",
            (140, _D, "MEMORY_TEMP_CELSIUS MEMORY_TEMP"), "nvmlDeviceGetFieldValues field 82",
            ("GPU_MEMORY_TEMPERATURE",),
        ),
        _make(
            "gpu_margin_c", "gauge", "C", (-60.0, 130.0), "distance of the GPU from its nearest slowdown threshold",
            (153, _D, "GPU_TEMP_MARGIN_CELSIUS GPU_TEMP_LIMIT"), "nvmlDeviceGetMarginTemperature",
        ),
        _make(
            "memory_margin_c", "gauge", "C", (-60.0, 130.0),
            "distance of the memory from its highest operating temperature (DCGM fields 151 minus 140)",
        ),
        _make(
            "slowdown_temp_c", "gauge", "C", (0.0, 150.0), "temperature at which the board slows down",
            (158, _D, "GPU_TEMP_SLOWDOWN_CELSIUS SLOWDOWN_TEMP"), threshold,
        ),
        _make(
            "power_w", "gauge", "W", watts, "power drawn by the board, averaged by the driver",
            (155, _D, "BOARD_POWER_WATTS POWER_USAGE"), "nvmlDeviceGetPowerUsage (mW)",
            ("GPU_PACKAGE_POWER", "GPU_AVERAGE_PACKAGE_POWER", "GPU_POWER_USAGE"),
        ),
        _make(
            "power_instant_w", "gauge", "W", watts, "power drawn by the board at the instant",
            (157, _D, "BOARD_POWER_RAW_WATTS POWER_USAGE_INSTANT"), "nvmlDeviceGetFieldValues field 186 (mW)",
        ),
        _make(
            "power_limit_w", "gauge", "W", watts, "requested power limit of the board",
            (160, _D, "BOARD_POWER_LIMIT_REQUESTED_WATTS POWER_MGMT_LIMIT"), "nvmlDeviceGetPowerManagementLimit (mW)",
        ),
        _make(
            "energy_mj", "counter", "mJ", _COUNT, "energy used since the driver was loaded",
            (156, _D, "TOTAL_ENERGY_CONSUMPTION"), "nvmlDeviceGetTotalEnergyConsumption",
        ),
        _make(
            "fan_speed_pct", "gauge", "%", (0.0, 150.0), "fan speed; a driver may ask for more than nominal",
            (191, _D, "FAN_SPEED"), "nvmlDeviceGetFanSpeed",
        ),
        _make(
            "power_violation_ns", "counter", "ns", _COUNT,
            "time the clocks were held down by power (NVML counts ns; some DCGM comments say us)",
            (240, _D, "POWER_VIOLATION"), "nvmlDeviceGetViolationStatus(NVML_PERF_POLICY_POWER)",
        ),
        _make(
            "thermal_violation_ns", "counter", "ns", _COUNT, "time the clocks were held down by temperature",
            (241, _D, "THERMAL_VIOLATION"), "nvmlDeviceGetViolationStatus(NVML_PERF_POLICY_THERMAL)",
        ),
        _make(
            "reliability_violation_ns", "counter", "ns", _COUNT, "time the clocks were held down by voltage",
            (245, _D, "RELIABILITY_VIOLATION"), "nvmlDeviceGetViolationStatus(NVML_PERF_POLICY_RELIABILITY)",
        ),
    )


def _activity() -> tuple[Channel, ...]:
    utilisation = "nvmlDeviceGetUtilizationRates"
    return (
        _make(
            "sm_clock_mhz", "gauge", "MHz", (0.0, 5000.0), "clock of the streaming multiprocessors",
            (100, _D, "SM_CLOCK"), "nvmlDeviceGetClockInfo(NVML_CLOCK_SM)", ("GPU_CLOCK",),
        ),
        _make(
            "mem_clock_mhz", "gauge", "MHz", (0.0, 20000.0), "clock of the device memory",
            (101, _D, "MEM_CLOCK"), "nvmlDeviceGetClockInfo(NVML_CLOCK_MEM)",
        ),
        _make(
            "gpu_util_pct", "gauge", "%", _PERCENT, "share of time in which a kernel ran",
            (203, _D, "GPU_UTIL_RATIO GPU_UTIL"), utilisation, ("GPU_GFX_ACTIVITY",),
        ),
        _make(
            "mem_util_pct", "gauge", "%", _PERCENT, "share of time in which device memory was read or written",
            (204, _D, "MEM_COPY_UTIL"), utilisation, ("GPU_UMC_ACTIVITY",),
        ),
        _make(
            "enc_util_pct", "gauge", "%", _PERCENT, "utilisation of the video encoder",
            (206, _D, "ENC_UTIL"), "nvmlDeviceGetEncoderUtilization",
        ),
        _make(
            "dec_util_pct", "gauge", "%", _PERCENT, "utilisation of the video decoder",
            (207, _D, "DEC_UTIL"), "nvmlDeviceGetDecoderUtilization",
        ),
        _make(
            "fb_used_mib", "gauge", "MiB", _MEMORY, "device memory in use",
            (252, _D, "FB_USED"), "nvmlDeviceGetMemoryInfo (bytes)", ("GPU_USED_VRAM",),
        ),
        _make(
            "fb_free_mib", "gauge", "MiB", _MEMORY, "device memory free",
            (251, _D, "FB_FREE"), "nvmlDeviceGetMemoryInfo (bytes)", ("GPU_FREE_VRAM",),
        ),
        _make(
            "fb_reserved_mib", "gauge", "MiB", _MEMORY, "device memory held back by the driver and for retired pages",
            (253, _D, "FB_RESERVED"), "nvmlDeviceGetMemoryInfo_v2 (bytes)",
        ),
        _make(
            "gr_engine_active_ratio", "gauge", "ratio", _RATIO, "share of time the graphics or engine was busy",
            (1001, _P, "GR_ENGINE_UTIL_RATIO GR_ENGINE_ACTIVE"), "GPM",
        ),
        _make(
            "sm_active_ratio", "gauge", "ratio", _RATIO, "share of cycles in which an SM had a warp assigned",
            (1002, _P, "SM_UTIL_RATIO SM_ACTIVE"), "GPM",
        ),
        _make(
            "sm_occupancy_ratio", "gauge", "ratio", _RATIO, "resident warps as a share of the most possible",
            (1003, _P, "SM_OCCUPANCY_RATIO SM_OCCUPANCY"), "GPM",
        ),
        _make(
            "tensor_active_ratio", "gauge", "ratio", _RATIO, "share of cycles in which a tensor pipe was active",
            (1004, _P, "TENSOR_UTIL_RATIO PIPE_TENSOR_ACTIVE"), "GPM",
        ),
        _make(
            "dram_active_ratio", "gauge", "ratio", _RATIO, "share of cycles in which the memory interface moved data",
            (1005, _P, "DRAM_UTIL_RATIO DRAM_ACTIVE"), "GPM",
        ),
        _make(
            "pcie_tx_bytes_s", "gauge", "B/s", _PCIE, "bytes a second sent over PCIe",
            (1009, _P, "PCIE_TX_BYTES_PER_SECOND PCIE_TX_BYTES"), "GPM",
        ),
        _make(
            "pcie_rx_bytes_s", "gauge", "B/s", _PCIE, "bytes a second received over PCIe",
            (1010, _P, "PCIE_RX_BYTES_PER_SECOND PCIE_RX_BYTES"), "GPM",
        ),
    )


def _memory_health() -> tuple[Channel, ...]:
    ecc = "nvmlDeviceGetTotalEccErrors"
    sram = "nvmlDeviceGetSramEccErrorStatus"
    remap, retired = "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPages_v2"
    return (
        _make(
            "ecc_sbe_volatile_total", "counter", "errors", _COUNT, "corrected memory errors since driver load",
            (310, _D, "ECC_SBE_VOL_TOTAL"), ecc, ("GPU_ECC_CORRECT_TOTAL",),
        ),
        _make(
            "ecc_dbe_volatile_total", "counter", "errors", _COUNT,
            "uncorrected memory errors since driver load",
            (311, _D, "ECC_DBE_VOL_TOTAL"), ecc, ("GPU_ECC_UNCORRECT_TOTAL",),
        ),
        _make(
            "ecc_sbe_aggregate_total", "counter", "errors", _COUNT, "corrected memory errors of the board's life",
            (312, _D, "ECC_SBE_AGG_TOTAL"), ecc,
        ),
        _make(
            "ecc_dbe_aggregate_total", "counter", "errors", _COUNT, "uncorrected memory errors of the board's life",
            (313, _D, "ECC_DBE_AGG_TOTAL"), ecc,
        ),
        _make(
            "ecc_sbe_dram_volatile_total", "counter", "errors", _COUNT, "corrected errors in device memory since load",
            (318, _D, "ECC_SBE_VOL_DEV"), "nvmlDeviceGetMemoryErrorCounter", ("GPU_ECC_CORRECT_UMC",),
        ),
        _make(
            "ecc_dbe_dram_volatile_total", "counter", "errors", _COUNT, "uncorrected device-memory errors since load",
            (319, _D, "ECC_DBE_VOL_DEV"), "nvmlDeviceGetMemoryErrorCounter", ("GPU_ECC_UNCORRECT_UMC",),
        ),
        _make(
            "ecc_sbe_sram_volatile_total", "counter", "errors", _COUNT, "corrected errors in on-chip memory since load",
            (342, _D, "ECC_SBE_VOL_SRM"), sram, ("GPU_ECC_CORRECT_GFX",),
        ),
        _make(
            "ecc_dbe_sram_volatile_total", "counter", "errors", _COUNT, "uncorrected on-chip memory errors since load",
            (343, _D, "ECC_DBE_VOL_SRM"), sram, ("GPU_ECC_UNCORRECT_GFX",),
        ),
        _make(
            "sram_threshold_exceeded", "gauge", "bool", _BOOL, "on-chip memory has passed the vendor's error threshold",
            (346, _D, "SRAM_EXCEEDED THRESHOLD_SRM"), sram,
        ),
        _make(
            "retired_pages_sbe_total", "counter", "pages", _FEW, "pages retired for corrected errors (before Ampere)",
            (390, _D, "PAGE_RETIRED_SBE_TOTAL RETIRED_SBE"), retired,
        ),
        _make(
            "retired_pages_dbe_total", "counter", "pages", _FEW, "pages retired for uncorrected errors (before Ampere)",
            (391, _D, "PAGE_RETIRED_DBE_TOTAL RETIRED_DBE"), retired,
        ),
        _make(
            "retired_pages_pending", "gauge", "pages", _FEW, "pages that wait for a reset to be retired",
            (392, _D, "PAGE_RETIRED_PENDING RETIRED_PENDING"), "nvmlDeviceGetRetiredPagesPendingStatus",
        ),
        _make(
            "row_remap_uncorrectable_total", "counter", "rows", _FEW, "memory rows remapped for uncorrected errors",
            (393, _D, "ROW_REMAP_UNCORRECTABLE_TOTAL UNCORRECTABLE_REMAPPED_ROWS"), remap,
        ),
        _make(
            "row_remap_correctable_total", "counter", "rows", _FEW, "memory rows remapped for corrected errors",
            (394, _D, "ROW_REMAP_CORRECTABLE_TOTAL CORRECTABLE_REMAPPED_ROWS"), remap,
        ),
        _make(
            "row_remap_failure", "gauge", "bool", _BOOL, "a row could not be remapped: the vendor's return criterion",
            (395, _D, "ROW_REMAP_FAILED ROW_REMAP_FAILURE"), remap,
        ),
        _make(
            "row_remap_pending", "gauge", "bool", _BOOL, "a remap waits for the next reset",
            (396, _D, "ROW_REMAP_PENDING"), remap,
        ),
    )


def _links() -> tuple[Channel, ...]:
    nvlink = "nvmlDeviceGetNvLinkErrorCounter"
    return (
        _make(
            "pcie_replay_total", "counter", "replays", _COUNT, "PCIe packets that had to be sent again",
            (202, _D, "PCIE_REPLAY_TOTAL PCIE_REPLAY_COUNTER"), "nvmlDeviceGetPcieReplayCounter",
            ("PCIE_REPLAY_COUNT",),
        ),
        _make(
            "pcie_link_gen", "gauge", "generation", (0.0, 8.0), "current PCIe generation; idle boards step down",
            (237, _D, "PCIE_LINK_GEN"), "nvmlDeviceGetCurrPcieLinkGeneration",
        ),
        _make(
            "pcie_link_width", "gauge", "lanes", (0.0, 32.0), "current PCIe lanes; fewer than fitted is a fault",
            (238, _D, "PCIE_LINK_WIDTH"), "nvmlDeviceGetCurrPcieLinkWidth",
        ),
        _make(
            "nvlink_crc_flit_total", "counter", "errors", _COUNT, "NVLink flow-control checksum errors, all links",
            (409, _D, "NVLINK_CRC_FLIT_ERROR_TOTAL NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"), nvlink,
        ),
        _make(
            "nvlink_crc_data_total", "counter", "errors", _COUNT, "NVLink data checksum errors, all links",
            (419, _D, "NVLINK_CRC_DATA_ERROR_TOTAL NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"), nvlink,
            ("GPU_ECC_CORRECT_XGMI_WAFL",),
        ),
        _make(
            "nvlink_replay_total", "counter", "errors", _COUNT, "NVLink packets sent again, all links",
            (429, _D, "NVLINK_REPLAY_ERROR_TOTAL NVLINK_REPLAY_ERROR_COUNT_TOTAL"), nvlink,
        ),
        _make(
            "nvlink_recovery_total", "counter", "errors", _COUNT, "NVLink retrainings after an error, all links",
            (439, _D, "NVLINK_RECOVERY_ERROR_TOTAL NVLINK_RECOVERY_ERROR_COUNT_TOTAL"), nvlink,
        ),
        _make(
            # NVLink 5 carries 1.8e6 MB/s both ways; the same in bytes a second is far above the range.
            "nvlink_bandwidth_mib_s", "gauge", "MiB/s", (0.0, 5e6), "NVLink traffic, all links both ways",
            (449, _D, "NVLINK_THROUGHPUT_TOTAL NVLINK_BANDWIDTH_TOTAL"),
        ),
    )


def _state() -> tuple[Channel, ...]:
    return (
        _make(
            "clocks_event_reasons", "flags", "bitmask", (0.0, 65535.0),
            "why the clocks are down: 0x4 power cap, 0x8 hardware, 0x20 and 0x40 thermal, 0x80 power brake",
            (112, _D, "CLOCKS_EVENT_REASONS CLOCK_THROTTLE_REASONS"), "nvmlDeviceGetCurrentClocksEventReasons",
        ),
        _make(
            "xid_last", "enum", "XID", (0.0, 9999.0), "the last XID, latched until the driver is loaded again",
            (230, _D, "XID_ERROR XID_ERRORS"), "nvmlEventTypeXidCriticalError",
        ),
        _make(
            "pstate", "enum", "P-state", (0.0, 32.0), "performance state, 0 is the highest, 32 unknown",
            (190, _D, "GPU_PSTATE PSTATE"), "nvmlDeviceGetPerformanceState",
        ),
        _make(
            "recovery_action", "enum", "action", (0.0, 15.0),
            "what the driver asks for: 0 none, 1 reset, 2 reboot, 3 drain peers, 4 drain and reset",
            (1523, _D, "GPU_RECOVERY_ACTION GET_GPU_RECOVERY_ACTION"), "nvmlDeviceGetFieldValues field 230",
        ),
        _make(
            "fabric_health", "enum", "summary", (0.0, 15.0), "summary of the NVLink fabric's health, 0 not supported",
            (175, _D, "FABRIC_HEALTH_SUMMARY"), "nvmlDeviceGetGpuFabricInfo",
        ),
    )


def _scraping() -> tuple[Channel, ...]:
    # Of the collector, not of the device: what precedes a GPU that falls off the bus is often an exporter in trouble.
    seconds = (0.0, 86400.0)
    return (
        _make("scrape_duration_s", "gauge", "s", seconds, "how long the node's exporter took to answer"),
        _make(
            "scrape_failures_total", "counter", "scrapes", _COUNT,
            "scrapes of the node that failed since its collector started",
        ),
        _make("page_age_s", "gauge", "s", (0.0, None), "time since the exporter's values last changed"),
        _make(
            "clock_skew_s", "gauge", "s", (None, None), "the node's clock minus the collector's, by the answer's Date"
        ),
        _make("channels_reported", "gauge", "channels", (0.0, 1000.0), "channels that had a value for the GPU"),
    )
