"""What is read of a GPU: NVML's questions, and the channels that their answers are.

A *field* is asked with all others in one ``nvmlDeviceGetFieldValues``. A *call* is a function of its own, asked only
for channels that nothing before it supports: fields come first, and a newer function before an older one. ``xid_last``
is not read here: NVML reports XIDs as events only.
"""

from collections.abc import Callable
from csv import DictReader
from ctypes import byref
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

_MIB: Final = 1.0 / 1048576.0
_CORRECTED, _UNCORRECTED = 0, 1


@dataclass(frozen=True, slots=True)
class NvmlQuery:
    """One function of NVML; ``ask`` takes the binding and a handle, and returns a number for each of ``channels``."""

    name: str
    channels: tuple[str, ...]
    ask: Callable[[Any, Any], Any]
    scale: float = 1.0


def _violation(policy: str, nvml: Any, handle: Any) -> Any:
    return nvml.nvmlDeviceGetViolationStatus(handle, getattr(nvml, policy)).violationTime


def _ecc_errors(counter: str, nvml: Any, handle: Any) -> tuple[int, ...]:
    kinds = (_CORRECTED, _UNCORRECTED)
    return tuple(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, getattr(nvml, counter)) for kind in kinds)


def _memory_errors(location: str, nvml: Any, handle: Any) -> tuple[int, ...]:
    where = nvml.NVML_VOLATILE_ECC, getattr(nvml, location)
    return tuple(nvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, *where) for kind in (_CORRECTED, _UNCORRECTED))


def _sram_status(nvml: Any, handle: Any) -> tuple[int, ...]:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return status.volatileCor, status.volatileUncParity + status.volatileUncSecDed, status.bThresholdExceeded


def fabric_of(nvml: Any, handle: Any) -> Any:
    """Return what NVML knows of a GPU's place on an NVSwitch fabric."""
    fabric = nvml.c_nvmlGpuFabricInfo_v3_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(fabric))
    return fabric


def _both(counter: str) -> tuple[str, str]:
    """Return the channels of one counter, of corrected and of uncorrected errors."""
    return f"ecc_sbe_{counter}_total", f"ecc_dbe_{counter}_total"


_REASONS: Final = ("clocks_event_reasons",)
_BUSY: Final = ("gpu_util_pct", "mem_util_pct")
_UTILISATION: Final = attrgetter("gpu", "memory")
_MEMORY: Final = ("fb_used_mib", "fb_free_mib", "fb_reserved_mib")
_USED: Final = attrgetter("used", "free")
_RESERVED: Final = attrgetter("used", "free", "reserved")
_RETIRED: Final = ("retired_pages_sbe_total", "retired_pages_dbe_total")
_REMAPPED: Final = tuple(
    f"row_remap_{what}" for what in ("correctable_total", "uncorrectable_total", "pending", "failure")
)

with Path(__file__).with_name("fields.csv").open(encoding="utf-8") as _table:
    _ROWS: Final = [
        (row["kind"], row["channel"], int(row["number"]), float(row["scale"])) for row in DictReader(_table)
    ]

FIELDS: Final = tuple((channel, number, scale) for kind, channel, number, scale in _ROWS if kind == "field")
"""Channel, ``NVML_FI_*`` and scale. 38, 45, 52 and 59 are sums over all links, and what DCGM exports as well."""

PROFILE: Final = tuple((channel, number, scale) for kind, channel, number, scale in _ROWS if kind == "profile")
"""Channel, ``NVML_GPM_METRIC_*`` and scale: means over the time between two readings; Hopper and later have them."""

LINK_COUNTERS: Final = tuple((channel, number) for kind, channel, number, _ in _ROWS if kind == "link")
"""Channel and ``nvmlNvLinkErrorCounter_t``: summed link by link where the device has no sums."""

CALLS: Final = (
    NvmlQuery("temperature", ("gpu_temp_c",), lambda n, h: n.nvmlDeviceGetTemperatureV(h, n.NVML_TEMPERATURE_GPU)),
    NvmlQuery("temperature_v1", ("gpu_temp_c",), lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
    NvmlQuery("margin_temperature", ("gpu_margin_c",), lambda n, h: n.nvmlDeviceGetMarginTemperature(h)),
    NvmlQuery(
        "slowdown_threshold",
        ("slowdown_temp_c",),
        lambda n, h: n.nvmlDeviceGetTemperatureThreshold(h, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    ),
    NvmlQuery("power", ("power_w",), lambda n, h: n.nvmlDeviceGetPowerUsage(h), 1e-3),
    NvmlQuery("power_limit", ("power_limit_w",), lambda n, h: n.nvmlDeviceGetPowerManagementLimit(h), 1e-3),
    NvmlQuery("fan", ("fan_speed_pct",), lambda n, h: n.nvmlDeviceGetFanSpeed(h)),
    NvmlQuery("violation_power", ("power_violation_ns",), partial(_violation, "NVML_PERF_POLICY_POWER")),
    NvmlQuery("violation_thermal", ("thermal_violation_ns",), partial(_violation, "NVML_PERF_POLICY_THERMAL")),
    NvmlQuery(
        "violation_reliability", ("reliability_violation_ns",), partial(_violation, "NVML_PERF_POLICY_RELIABILITY")
    ),
    NvmlQuery("clock_sm", ("sm_clock_mhz",), lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
    NvmlQuery("clock_memory", ("mem_clock_mhz",), lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)),
    NvmlQuery("utilisation", _BUSY, lambda n, h: _UTILISATION(n.nvmlDeviceGetUtilizationRates(h))),
    NvmlQuery("encoder", ("enc_util_pct",), lambda n, h: n.nvmlDeviceGetEncoderUtilization(h)[0]),
    NvmlQuery("decoder", ("dec_util_pct",), lambda n, h: n.nvmlDeviceGetDecoderUtilization(h)[0]),
    # The second version counts what the driver holds back apart; in the first it is part of what is used.
    NvmlQuery("memory_v2", _MEMORY, lambda n, h: _RESERVED(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)), _MIB),
    NvmlQuery("memory", _MEMORY[:2], lambda n, h: _USED(n.nvmlDeviceGetMemoryInfo(h)), _MIB),
    NvmlQuery("sram", (*_both("sram_volatile"), "sram_threshold_exceeded"), _sram_status),
    NvmlQuery("sram_counters", _both("sram_volatile"), partial(_memory_errors, "NVML_MEMORY_LOCATION_SRAM")),
    NvmlQuery("pcie_generation", ("pcie_link_gen",), lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    NvmlQuery("pcie_width", ("pcie_link_width",), lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h)),
    NvmlQuery("clocks_event_reasons", _REASONS, lambda n, h: n.nvmlDeviceGetCurrentClocksEventReasons(h)),
    NvmlQuery("clocks_throttle_reasons", _REASONS, lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    NvmlQuery("pstate", ("pstate",), lambda n, h: n.nvmlDeviceGetPerformanceState(h)),
    NvmlQuery("fabric_health", ("fabric_health",), lambda n, h: fabric_of(n, h).healthSummary),
    # What the fields of some devices and drivers do not have.
    NvmlQuery("energy", ("energy_mj",), lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h)),
    NvmlQuery("ecc_volatile", _both("volatile"), partial(_ecc_errors, "NVML_VOLATILE_ECC")),
    NvmlQuery("ecc_aggregate", _both("aggregate"), partial(_ecc_errors, "NVML_AGGREGATE_ECC")),
    NvmlQuery("ecc_dram", _both("dram_volatile"), partial(_memory_errors, "NVML_MEMORY_LOCATION_DRAM")),
    # Not _v2 of it: the binding leaves its last argument out, and the driver would write through a wild pointer.
    NvmlQuery(
        "retired_pages", _RETIRED, lambda n, h: tuple(len(n.nvmlDeviceGetRetiredPages(h, cause)) for cause in (0, 1))
    ),
    NvmlQuery("retired_pending", ("retired_pages_pending",), lambda n, h: n.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    NvmlQuery("remapped_rows", _REMAPPED, lambda n, h: tuple(n.nvmlDeviceGetRemappedRows(h))),
    NvmlQuery("pcie_replay", ("pcie_replay_total",), lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h)),
)
"""Asked one by one, in this order."""
