"""NVML through its Python binding: the only module that imports ``pynvml``, and only when it is opened."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p, cast
from typing import Any, Final

from telemetry.collect.nvml.device import LIBRARY_NOT_FOUND, Identity, NvmlFault

_UUID_ZERO: Final = bytes(16)
_FABRIC_COMPLETED: Final = 3

CALLS: Final[dict[str, Callable[[Any, Any], tuple[float, ...]]]] = {
    "temperature": lambda n, h: (n.nvmlDeviceGetTemperatureV(h, n.NVML_TEMPERATURE_GPU),),
    "temperature_v1": lambda n, h: (n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),),
    "margin_temperature": lambda n, h: (n.nvmlDeviceGetMarginTemperature(h),),
    "slowdown_threshold": lambda n, h: (n.nvmlDeviceGetTemperatureThreshold(h, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),),
    "power": lambda n, h: (n.nvmlDeviceGetPowerUsage(h),),
    "power_limit": lambda n, h: (n.nvmlDeviceGetPowerManagementLimit(h),),
    "energy": lambda n, h: (n.nvmlDeviceGetTotalEnergyConsumption(h),),
    "fan": lambda n, h: (n.nvmlDeviceGetFanSpeed(h),),
    "violation_power": lambda n, h: (_violation(n, h, n.NVML_PERF_POLICY_POWER),),
    "violation_thermal": lambda n, h: (_violation(n, h, n.NVML_PERF_POLICY_THERMAL),),
    "violation_reliability": lambda n, h: (_violation(n, h, n.NVML_PERF_POLICY_RELIABILITY),),
    "clock_sm": lambda n, h: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),),
    "clock_memory": lambda n, h: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),),
    "utilisation": lambda n, h: _members(n.nvmlDeviceGetUtilizationRates(h), "gpu", "memory"),
    "encoder": lambda n, h: (n.nvmlDeviceGetEncoderUtilization(h)[0],),
    "decoder": lambda n, h: (n.nvmlDeviceGetDecoderUtilization(h)[0],),
    "memory_v2": lambda n, h: _members(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2), "used", "free", "reserved"),
    "memory": lambda n, h: _members(n.nvmlDeviceGetMemoryInfo(h), "used", "free"),
    "ecc_volatile": lambda n, h: tuple(n.nvmlDeviceGetTotalEccErrors(h, kind, n.NVML_VOLATILE_ECC) for kind in (0, 1)),
    "ecc_aggregate": lambda n, h: tuple(
        n.nvmlDeviceGetTotalEccErrors(h, kind, n.NVML_AGGREGATE_ECC) for kind in (0, 1)
    ),
    "ecc_dram": lambda n, h: _located(n, h, n.NVML_MEMORY_LOCATION_DRAM),
    "sram_counters": lambda n, h: _located(n, h, n.NVML_MEMORY_LOCATION_SRAM),
    "sram": lambda n, h: _sram_status(n, n.c_nvmlEccSramErrorStatus_v1_t(), h),
    # Not _v2 of it: the binding leaves its last argument out, and the driver would write through a wild pointer.
    "retired_pages": lambda n, h: tuple(float(len(n.nvmlDeviceGetRetiredPages(h, cause))) for cause in (0, 1)),
    "retired_pending": lambda n, h: (n.nvmlDeviceGetRetiredPagesPendingStatus(h),),
    "remapped_rows": lambda n, h: tuple(n.nvmlDeviceGetRemappedRows(h)),
    "pcie_replay": lambda n, h: (n.nvmlDeviceGetPcieReplayCounter(h),),
    "pcie_generation": lambda n, h: (n.nvmlDeviceGetCurrPcieLinkGeneration(h),),
    "pcie_width": lambda n, h: (n.nvmlDeviceGetCurrPcieLinkWidth(h),),
    "clocks_event_reasons": lambda n, h: (n.nvmlDeviceGetCurrentClocksEventReasons(h),),
    "clocks_throttle_reasons": lambda n, h: (n.nvmlDeviceGetCurrentClocksThrottleReasons(h),),
    "pstate": lambda n, h: (n.nvmlDeviceGetPerformanceState(h),),
    "fabric_health": lambda n, h: (_fabric(n, h).healthSummary,),
}
"""Each question by its name: takes the binding and a handle, answers NVML's own numbers."""


class Library:
    """The driver's library of this process; implements :class:`telemetry.collect.nvml.device.Nvml`.

    A library that is loaded stays loaded: after the driver was replaced it answers a version mismatch until the
    process ends, which is one reason why it only ever runs in a child process.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._profiles: dict[int, _Profile] = {}

    def open(self) -> None:
        """Load the library and initialise it; :class:`NvmlFault` where that fails."""
        try:
            import pynvml  # noqa: PLC0415  the one lazy import
        except ImportError:
            raise NvmlFault(LIBRARY_NOT_FOUND) from None
        self._nvml = pynvml
        self._ask(pynvml.nvmlInit)

    def close(self) -> None:
        """Let go of the driver."""
        for index in list(self._profiles):
            self.forget(index)
        self._ask(self._nvml.nvmlShutdown)

    def driver(self) -> str:
        """Return the driver's version."""
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def count(self) -> int:
        """Return how many GPUs the driver lists."""
        return int(self._ask(self._nvml.nvmlDeviceGetCount))

    def handle(self, index: int) -> Any:
        """Return the handle of a GPU by its place in the driver's list."""
        return self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)

    def identity(self, index: int, handle: Any) -> Identity:
        """Return what is fixed about a GPU."""
        nvml = self._nvml
        return Identity(
            index=index,
            gpu=_text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            serial=self._maybe(nvml.nvmlDeviceGetSerial, handle),
            model=self._maybe(nvml.nvmlDeviceGetName, handle),
            pci_bus_id=self._maybe(lambda h: nvml.nvmlDeviceGetPciInfo(h).busId, handle),
            nvlink_domain=self._maybe(self._domain, handle),
        )

    def fields(self, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Ask many fields at once; return each one's code and value (0.0 where the code is not 0)."""
        answers = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, list(numbers))
        return [(int(answer.nvmlReturn), _value(answer) if answer.nvmlReturn == 0 else 0.0) for answer in answers]

    def call(self, name: str, handle: Any) -> tuple[float, ...]:
        """Ask one question of :data:`CALLS`."""
        return tuple(float(number) for number in self._ask(CALLS[name], self._nvml, handle))

    def links(self) -> int:
        """Return how many NVLink links a GPU can have at most."""
        return int(self._nvml.NVML_NVLINK_MAX_LINKS)

    def link_active(self, handle: Any, link: int) -> bool:
        """Whether a link is up; :class:`NvmlFault` where there is no such link."""
        return bool(self._ask(self._nvml.nvmlDeviceGetNvLinkState, handle, link))

    def link_counter(self, handle: Any, link: int, counter: int) -> float:
        """Return one error counter of one link."""
        return float(self._ask(self._nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter))

    def profile(self, index: int, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return the profiling metrics since the previous call for this GPU; none at the first one."""
        profile = self._profiles.get(index)
        if profile is None:
            support = self._ask(self._nvml.nvmlGpmQueryDeviceSupport, handle)
            if not support.isSupportedDevice:
                raise NvmlFault(3)
            profile = self._profiles[index] = self._ask(_Profile, self._nvml)
        return self._ask(profile.since_last, handle, numbers)

    def forget(self, index: int) -> None:
        """Drop what is remembered of a GPU whose handle has become void."""
        profile = self._profiles.pop(index, None)
        if profile is not None:
            profile.free()

    def watch(self, handles: Sequence[Any]) -> tuple[Any, list[Exception | None]]:
        """Make an event set for XIDs; return it, and for each handle why it could not be registered."""
        events = self._ask(self._nvml.nvmlEventSetCreate)
        refused: list[Exception | None] = []
        for handle in handles:
            try:
                self._ask(self._nvml.nvmlDeviceRegisterEvents, handle, self._nvml.nvmlEventTypeXidCriticalError, events)
                refused.append(None)
            except NvmlFault as fault:
                refused.append(fault)
        return events, refused

    def unwatch(self, events: Any) -> None:
        """Free an event set."""
        self._ask(self._nvml.nvmlEventSetFree, events)

    def wait(self, events: Any, timeout_ms: int) -> tuple[Any, int, int | None] | None:
        """Wait for an XID: the GPU's handle, the XID and the GPU instance; None when the time is over."""
        try:
            data = self._ask(self._nvml.nvmlEventSetWait_v2, events, timeout_ms)
        except NvmlFault as fault:
            if fault.code == self._nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        if not data.eventType & self._nvml.nvmlEventTypeXidCriticalError:
            return None
        # 0xffffffff: the event is of the whole GPU (nvml.h, nvmlEventData_t).
        instance = None if data.gpuInstanceId == 0xFFFFFFFF else int(data.gpuInstanceId)
        return data.device, int(data.eventData), instance

    def same(self, one: Any, other: Any) -> bool:
        """Whether two handles are of one GPU: the library gives a GPU one address as long as it is open."""
        return cast(one, c_void_p).value == cast(other, c_void_p).value

    def _domain(self, handle: Any) -> str:
        fabric = _fabric(self._nvml, handle)
        if fabric.state != _FABRIC_COMPLETED or bytes(fabric.clusterUuid) == _UUID_ZERO:
            return ""
        return f"{bytes(fabric.clusterUuid).hex()}.{fabric.cliqueId}"

    def _maybe(self, function: Callable[..., Any], handle: Any) -> str | None:
        try:
            return _text(self._ask(function, handle)) or None
        except NvmlFault as fault:
            if fault.name in ("not_supported", "function_not_found", "no_permission", "argument_version_mismatch"):
                return None
            raise

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlFault(int(error.value)) from None


class _Profile:
    """Two samples of one GPU's profiling counters, the older of which is written over in turn."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._taken = 0

    def since_last(self, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        nvml = self._nvml
        old, new = self._samples
        nvml.nvmlGpmSampleGet(handle, new)
        self._samples = [new, old]
        self._taken += 1
        if self._taken == 1:
            return []
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(numbers)
        request.sample1, request.sample2 = old, new
        for place, number in enumerate(numbers):
            request.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(request)
        answers = []
        for place in range(len(numbers)):
            value = float(request.metrics[place].value)
            answers.append((int(request.metrics[place].nvmlReturn), value if math.isfinite(value) else math.nan))
        return answers

    def free(self) -> None:
        # A driver that went away took its samples with it.
        with contextlib.suppress(self._nvml.NVMLError):
            for sample in self._samples:
                self._nvml.nvmlGpmSampleFree(sample)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _value(answer: Any) -> float:
    """Read the union of a field's value by the type that NVML names."""
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= answer.valueType < len(member):
        return math.nan
    return float(getattr(answer.value, member[answer.valueType]))


def _violation(nvml: Any, handle: Any, policy: int) -> float:
    return float(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime)


def _located(nvml: Any, handle: Any, location: int) -> tuple[float, ...]:
    return tuple(
        float(nvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, nvml.NVML_VOLATILE_ECC, location)) for kind in (0, 1)
    )


def _members(answer: Any, *names: str) -> tuple[float, ...]:
    return tuple(float(getattr(answer, name)) for name in names)


def _sram_status(nvml: Any, status: Any, handle: Any) -> tuple[float, ...]:
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    uncorrected = status.volatileUncParity + status.volatileUncSecDed
    return float(status.volatileCor), float(uncorrected), float(status.bThresholdExceeded)


def _fabric(nvml: Any, handle: Any) -> Any:
    fabric = nvml.c_nvmlGpuFabricInfo_v3_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(fabric))
    return fabric
