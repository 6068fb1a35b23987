"""NVML through its Python binding: the only module that imports ``pynvml``, and only when it is opened.

The numbers of errors are those of ``nvmlReturn_t`` in ``nvml.h``; they have never changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from ctypes import c_void_p, cast
from dataclasses import dataclass
from typing import Any, Final

from telemetry.collect.nvml.questions import Call, fabric_of

NAMES: Final = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_is_lost",
    16: "reset_required",
    17: "operating_system",
    18: "lib_rm_version_mismatch",
    19: "in_use",
    20: "memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    25: "argument_version_mismatch",
    27: "not_ready",
    28: "gpu_not_found",
    999: "unknown",
}

LOST: Final = frozenset({15, 28})
"""The GPU no longer answers (it fell off the bus), or the driver has dropped it."""

UNSUPPORTED: Final = frozenset({3, 13, 22, 25, 26})
"""This device, driver or version of a structure does not have the value: not worth asking again soon."""

RELOADED: Final = frozenset({1, 9, 18})
"""The driver under the library went away or was replaced: everything has to be opened again."""

LIBRARY_NOT_FOUND: Final = 12
ABSENT: Final = frozenset({9, LIBRARY_NOT_FOUND})
"""There is no driver (nothing installed, or its module is not loaded)."""

_NOT_SUPPORTED: Final = 3
_UUID_ZERO: Final = bytes(16)
_FABRIC_COMPLETED: Final = 3


class NvmlFault(Exception):
    """A call into NVML that gave no value; ``code``: ``nvmlReturn_t``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def name(self) -> str:
        """Name of the code, ``error_N`` where the table has none."""
        return NAMES.get(self.code, f"error_{self.code}")

    def __str__(self) -> str:
        return f"NVML answered {self.name} ({self.code})"


@dataclass(frozen=True, slots=True)
class Identity:
    """What is fixed about a GPU while the driver lists it.

    ``gpu``: UUID, of the parent where the GPU is split into MIG instances.
    ``nvlink_domain``: ``CLUSTER.CLIQUE`` of the fabric.
    """

    index: int
    gpu: str
    serial: str | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    nvlink_domain: str | None = None


class Library:
    """The driver's library of this process. Every method may raise :class:`NvmlFault`, and any may hang.

    A library that is loaded stays loaded: after the driver was replaced it answers a version mismatch until the
    process ends, which is one reason why it only ever runs in a child process.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._profiles: dict[int, _Profile] = {}

    def open(self) -> None:
        """Load the library and initialise it."""
        try:
            import pynvml  # noqa: PLC0415  the one lazy import
        except ImportError:
            raise NvmlFault(LIBRARY_NOT_FOUND) from None
        self._nvml = pynvml
        self._ask(pynvml.nvmlInit)

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

    def call(self, call: Call, handle: Any) -> tuple[float, ...]:
        """Ask one question; return a number for each of its channels."""
        answer = self._ask(call.ask, self._nvml, handle)
        return tuple(float(number) for number in (answer if isinstance(answer, tuple) else (answer,)))

    def links(self) -> int:
        """Return how many NVLink links a GPU can have at most."""
        return int(self._nvml.NVML_NVLINK_MAX_LINKS)

    def link_active(self, handle: Any, link: int) -> bool:
        """Whether a link is up; a fault where there is no such link."""
        return bool(self._ask(self._nvml.nvmlDeviceGetNvLinkState, handle, link))

    def link_counter(self, handle: Any, link: int, counter: int) -> float:
        """Return one error counter of one link."""
        return float(self._ask(self._nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter))

    def profile(self, index: int, handle: Any, numbers: Sequence[int]) -> list[tuple[int, float]]:
        """Return code and value of profiling metrics since the previous call for this GPU; none at the first one."""
        profile = self._profiles.get(index)
        if profile is None:
            support = self._ask(self._nvml.nvmlGpmQueryDeviceSupport, handle)
            if not support.isSupportedDevice:
                raise NvmlFault(_NOT_SUPPORTED)
            profile = self._profiles[index] = self._ask(_Profile, self._nvml)
        return self._ask(profile.since_last, handle, numbers)

    def forget(self, index: int) -> None:
        """Drop what is remembered of a GPU whose handle has become void."""
        profile = self._profiles.pop(index, None)
        if profile is not None:
            profile.free()

    def watch(self, handles: Sequence[Any]) -> tuple[Any, list[NvmlFault | None]]:
        """Make an event set for XIDs; return it, and for each handle why it could not be registered."""
        events = self._ask(self._nvml.nvmlEventSetCreate)
        refused: list[NvmlFault | None] = []
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
        fabric = fabric_of(self._nvml, handle)
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
