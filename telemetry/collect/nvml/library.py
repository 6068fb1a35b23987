"""NVML through its Python binding; the only module that imports ``pynvml``, lazily.

*Fields* are read together by one ``nvmlDeviceGetFieldValues``. A *call* is a separate function, a fallback for channels
that no earlier query supports: fields come first, and a newer function before an older one. ``xid_last`` is not read
here: NVML reports XIDs only as events.

Error codes are those of ``nvmlReturn_t`` in ``nvml.h``, which are stable.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from csv import DictReader
from ctypes import byref, c_void_p, cast
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from telemetry.identity.devices import normalise_pci_bus_id

_MIB: Final = 1.0 / 1048576.0
_CORRECTED, _UNCORRECTED = 0, 1


@dataclass(frozen=True, slots=True)
class NvmlQuery:
    """An NVML function; ``ask`` takes the binding and a handle, and returns a number for each of ``channels``."""

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
    counter = nvml.NVML_VOLATILE_ECC, getattr(nvml, location)
    return tuple(nvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, *counter) for kind in (_CORRECTED, _UNCORRECTED))


def _sram_status(nvml: Any, handle: Any) -> tuple[int, ...]:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return status.volatileCor, status.volatileUncParity + status.volatileUncSecDed, status.bThresholdExceeded


def fabric_of(nvml: Any, handle: Any) -> Any:
    """Return a GPU's NVSwitch fabric info."""
    fabric = nvml.c_nvmlGpuFabricInfo_v3_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(fabric))
    return fabric


def _ecc_pair(counter: str) -> tuple[str, str]:
    """Return the channels of corrected and uncorrected errors of a counter."""
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
"""Channel, ``NVML_FI_*`` and scale. 38, 45, 52 and 59 are sums over all links, as DCGM exports them."""

PROFILE: Final = tuple((channel, number, scale) for kind, channel, number, scale in _ROWS if kind == "profile")
"""Channel, ``NVML_GPM_METRIC_*`` and scale: means between two readings, on Hopper and later."""

LINK_COUNTERS: Final = tuple((channel, number) for kind, channel, number, _ in _ROWS if kind == "link")
"""Channel and ``nvmlNvLinkErrorCounter_t``: summed over the links if the device has no totals."""

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
    # Version 2 reports memory reserved by the driver separately; version 1 includes it in used memory.
    NvmlQuery("memory_v2", _MEMORY, lambda n, h: _RESERVED(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)), _MIB),
    NvmlQuery("memory", _MEMORY[:2], lambda n, h: _USED(n.nvmlDeviceGetMemoryInfo(h)), _MIB),
    NvmlQuery("sram", (*_ecc_pair("sram_volatile"), "sram_threshold_exceeded"), _sram_status),
    NvmlQuery("sram_counters", _ecc_pair("sram_volatile"), partial(_memory_errors, "NVML_MEMORY_LOCATION_SRAM")),
    NvmlQuery("pcie_generation", ("pcie_link_gen",), lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    NvmlQuery("pcie_width", ("pcie_link_width",), lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h)),
    NvmlQuery("clocks_event_reasons", _REASONS, lambda n, h: n.nvmlDeviceGetCurrentClocksEventReasons(h)),
    NvmlQuery("clocks_throttle_reasons", _REASONS, lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    NvmlQuery("pstate", ("pstate",), lambda n, h: n.nvmlDeviceGetPerformanceState(h)),
    NvmlQuery("fabric_health", ("fabric_health",), lambda n, h: fabric_of(n, h).healthSummary),
    # Fallbacks for fields that some devices or drivers lack.
    NvmlQuery("energy", ("energy_mj",), lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h)),
    NvmlQuery("ecc_volatile", _ecc_pair("volatile"), partial(_ecc_errors, "NVML_VOLATILE_ECC")),
    NvmlQuery("ecc_aggregate", _ecc_pair("aggregate"), partial(_ecc_errors, "NVML_AGGREGATE_ECC")),
    NvmlQuery("ecc_dram", _ecc_pair("dram_volatile"), partial(_memory_errors, "NVML_MEMORY_LOCATION_DRAM")),
    # Not _v2: the binding omits its last argument, so the driver would write through a wild pointer.
    NvmlQuery(
        "retired_pages", _RETIRED, lambda n, h: tuple(len(n.nvmlDeviceGetRetiredPages(h, cause)) for cause in (0, 1))
    ),
    NvmlQuery("retired_pending", ("retired_pages_pending",), lambda n, h: n.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    NvmlQuery("remapped_rows", _REMAPPED, lambda n, h: tuple(n.nvmlDeviceGetRemappedRows(h))),
    NvmlQuery("pcie_replay", ("pcie_replay_total",), lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h)),
)

LOST: Final = frozenset({15, 28})
"""The GPU has fallen off the bus, or the driver has dropped it."""

UNSUPPORTED: Final = frozenset({2, 3, 13, 22, 25, 26})
"""The device, driver or struct version does not support the query."""

RELOADED: Final = frozenset({1, 9, 18})
"""The driver was unloaded or replaced: reopen everything."""

LIBRARY_NOT_FOUND: Final = 12
ABSENT: Final = {
    9: "the NVIDIA driver is not loaded",
    LIBRARY_NOT_FOUND: "there is no NVIDIA driver: its library libnvidia-ml.so.1 was not found",
}
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_TIMEOUT: Final = 10
_UUID_ZERO: Final = bytes(16)
_FABRIC_COMPLETED: Final = 3


class NvmlFault(Exception):
    """An NVML error; ``code``: ``nvmlReturn_t``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def name(self) -> str:
        """Name of the code, ``error_N`` if the binding has none."""
        with suppress(ImportError):
            import pynvml

            for name, code in vars(pynvml).items():
                if name.startswith("NVML_ERROR_") and code == self.code:
                    return name.removeprefix("NVML_ERROR_").lower()
        return f"error_{self.code}"

    def __str__(self) -> str:
        return f"NVML answered {self.name} ({self.code})"


@dataclass(frozen=True, slots=True)
class Identity:
    """Static attributes of a GPU; ``nvlink_domain`` is ``CLUSTER.CLIQUE`` of the fabric."""

    index: int
    gpu: str
    serial: str | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    nvlink_domain: str | None = None

    @property
    def address(self) -> str | None:
        """Normalized PCI address."""
        return None if self.pci_bus_id is None else normalise_pci_bus_id(self.pci_bus_id)


class Library:
    """The NVML library of this process. Every method may raise :class:`NvmlFault` or hang.

    A loaded library cannot be unloaded: after a driver upgrade it reports a version mismatch until the process ends,
    which is one reason to run it in a child process.
    """

    max_links: int

    def open(self) -> None:
        """Load and initialise the library."""
        try:
            import pynvml
        except ImportError:
            raise NvmlFault(LIBRARY_NOT_FOUND) from None
        self._nvml: Any = pynvml
        self.max_links = pynvml.NVML_NVLINK_MAX_LINKS
        self._ask(pynvml.nvmlInit)

    def driver(self) -> str:
        """Return the driver's version."""
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def count(self) -> int:
        """Return the number of GPUs that the driver lists."""
        return int(self._ask(self._nvml.nvmlDeviceGetCount))

    def handle(self, index: int) -> Any:
        """Return the handle of a GPU by its driver index."""
        return self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)

    def identity(self, index: int, handle: Any) -> Identity:
        """Return a GPU's static attributes."""
        nvml = self._nvml
        return Identity(
            index=index,
            gpu=_text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            serial=self._optional(nvml.nvmlDeviceGetSerial, handle),
            model=self._optional(nvml.nvmlDeviceGetName, handle),
            pci_bus_id=self._optional(lambda h: nvml.nvmlDeviceGetPciInfo(h).busId, handle),
            nvlink_domain=self._optional(self._domain, handle),
        )

    def fields(self, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Read many fields in one call; return code and value of each (0.0 where the code is not 0)."""
        answers = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, list(numbers))
        return [(int(answer.nvmlReturn), _value(answer) if answer.nvmlReturn == 0 else 0.0) for answer in answers]

    def call(self, call: NvmlQuery, handle: Any) -> tuple[float, ...]:
        """Run one query; return a number for each of its channels."""
        answer = self._ask(call.ask, self._nvml, handle)
        return tuple(float(number) for number in (answer if isinstance(answer, tuple) else (answer,)))

    def link_counter(self, handle: Any, link: int, counter: int) -> float:
        """Return one error counter of one link."""
        return float(self._ask(self._nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter))

    def profile(self, handle: Any, samples: list[Any], numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return code and value of profiling metrics since the previous call, whose state is in ``samples``."""
        nvml = self._nvml
        if not samples:
            if not self._ask(nvml.nvmlGpmQueryDeviceSupport, handle).isSupportedDevice:
                raise NvmlFault(_NOT_SUPPORTED)
            new = [self._ask(nvml.nvmlGpmSampleAlloc) for _ in range(2)]
            self._ask(nvml.nvmlGpmSampleGet, handle, new[1])
            samples.extend(new)
            return []
        self._ask(nvml.nvmlGpmSampleGet, handle, samples[0])
        samples.reverse()
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(numbers)
        request.sample1, request.sample2 = samples
        for place, number in enumerate(numbers):
            request.metrics[place].metricId = number
        self._ask(nvml.nvmlGpmMetricsGet, request)
        answers = [request.metrics[place] for place in range(len(numbers))]
        # An infinite value comes from an empty time span.
        return [(int(gpm.nvmlReturn), gpm.value if math.isfinite(gpm.value) else math.nan) for gpm in answers]

    def watch(self, handles: Sequence[Any]) -> tuple[Any, int]:
        """Create an event set for XIDs; return it and the number of registered GPUs: some do not support events."""
        events = self._ask(self._nvml.nvmlEventSetCreate)
        registered = 0
        for handle in handles:
            with suppress(NvmlFault):
                self._ask(self._nvml.nvmlDeviceRegisterEvents, handle, self._nvml.nvmlEventTypeXidCriticalError, events)
                registered += 1
        return events, registered

    def unwatch(self, events: Any) -> None:
        """Free an event set."""
        self._ask(self._nvml.nvmlEventSetFree, events)

    def wait(self, events: Any, timeout_ms: int) -> tuple[Any, int, int | None] | None:
        """Return the GPU's handle, the XID and the GPU instance; None on timeout."""
        try:
            data = self._ask(self._nvml.nvmlEventSetWait_v2, events, timeout_ms)
        except NvmlFault as fault:
            if fault.code == _TIMEOUT:
                return None
            raise
        if not data.eventType & self._nvml.nvmlEventTypeXidCriticalError:
            return None
        # 0xffffffff: the event concerns the whole GPU (nvml.h, nvmlEventData_t).
        instance = None if data.gpuInstanceId == 0xFFFFFFFF else int(data.gpuInstanceId)
        return data.device, int(data.eventData), instance

    def same(self, handle: Any, other: Any) -> bool:
        """Return whether two handles refer to one GPU, whose address is stable while the library is open."""
        return cast(handle, c_void_p).value == cast(other, c_void_p).value

    def _domain(self, handle: Any) -> str:
        fabric = fabric_of(self._nvml, handle)
        if fabric.state != _FABRIC_COMPLETED or bytes(fabric.clusterUuid) == _UUID_ZERO:
            return ""
        return f"{bytes(fabric.clusterUuid).hex()}.{fabric.cliqueId}"

    def _optional(self, function: Callable[..., Any], handle: Any) -> str | None:
        try:
            return _text(self._ask(function, handle)) or None
        except NvmlFault as fault:
            if fault.code in UNSUPPORTED or fault.code == _NO_PERMISSION:
                return None
            raise

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlFault(int(error.value)) from None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _value(answer: Any) -> float:
    """Return the member of a field's value union that NVML's ``valueType`` selects."""
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= answer.valueType < len(member):
        return math.nan
    return float(getattr(answer.value, member[answer.valueType]))
