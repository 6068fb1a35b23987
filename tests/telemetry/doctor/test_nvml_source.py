"""Looking at a node's own GPUs, with the driver in memory."""

from collections.abc import Iterator

import pytest

from telemetry.collect.nvml.child import Ended, Message, Session, Silent
from telemetry.collect.nvml.device import NvmlFault
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import diagnose
from telemetry.doctor.nvml_source import observe_nvml
from telemetry.errors import InputError
from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu, MemoryNvml
from tests.telemetry.doctor.looks import NOW


class InMemory:
    """A child that answers in this process, and hangs before a GPU's row if told to."""

    def __init__(self, nvml: MemoryNvml, *, hang_at: int | None = None) -> None:
        self._session = Session(nvml)
        self._hang_at = hang_at
        self._messages: Iterator[Message] = iter(())
        self._doing = ""
        self.ended = False

    def ask(self, request: Message) -> None:
        self._doing = request["do"]
        self._messages = self._session.answer(request)

    def hear(self, timeout_s: float) -> Message:
        message = next(self._messages, None)
        if message is None:
            raise Ended("exit status 0")
        if self._doing == "read" and message.get("row") == self._hang_at is not None:
            raise Silent
        return message

    def end(self) -> None:
        self.ended = True


def gpu(name: str) -> MemoryGpu:
    return MemoryGpu(name, fields={82: 60.0, 3: 0.0}, calls={"power": (250_000.0,), "temperature": (50.0,)})


def test_what_gpus_answer_is_there_and_the_rest_is_missing() -> None:
    child = InMemory(MemoryNvml([gpu("GPU-a"), gpu("GPU-b")]))
    seen = observe_nvml(channels=CATALOGUE, now=NOW, start=lambda: child, sleep=lambda _seconds: None)
    assert child.ended
    assert seen.units == 2
    assert {name for name, each in seen.channels.items() if each.gpus == 2} == {
        "mem_temp_c", "ecc_sbe_volatile_total", "power_w", "gpu_temp_c"
    }  # fmt: skip
    assert seen.channels["power_w"].constant is True
    diagnosis = diagnose(seen, None, "", CATALOGUE)
    states = {each.channel.name: each.status for each in diagnosis.states}
    assert states["nvlink_bandwidth_mib_s"] == "not from here"
    assert states["xid_last"] == "not from here"
    assert states["pcie_replay_total"] == "missing"


def test_a_lost_gpu_and_one_that_hangs_are_findings() -> None:
    nvml = MemoryNvml([gpu("GPU-a"), gpu("GPU-b")])
    nvml.gpus[0].lost = 15
    seen = observe_nvml(channels=CATALOGUE, now=NOW, start=lambda: InMemory(nvml), sleep=lambda _seconds: None)
    assert [each.what for each in seen.findings] == ["GPU number 0 does not answer: gpu_is_lost"]
    child = InMemory(MemoryNvml([gpu("GPU-a"), gpu("GPU-b")]), hang_at=1)
    seen = observe_nvml(channels=CATALOGUE, now=NOW, start=lambda: child, sleep=lambda _seconds: None)
    assert [each.what for each in seen.findings] == ["a call into GPU GPU-b hangs: those after it were not read"]
    assert seen.channels["power_w"].gpus == 1


def test_questions_that_fail_for_the_moment_are_told() -> None:
    sick = gpu("GPU-a")
    sick.calls["fan"] = NvmlFault(999)
    seen = observe_nvml(
        channels=CATALOGUE, now=NOW, start=lambda: InMemory(MemoryNvml([sick])), sleep=lambda _seconds: None
    )
    assert [(each.what, each.problem) for each in seen.findings] == [
        ("some questions failed for the moment: unknown 2", False)
    ]


@pytest.mark.parametrize(("code", "message"), [(12, "this node has no NVIDIA driver"), (17, "the driver refuses")])
def test_no_driver(code: int, message: str) -> None:
    nvml = MemoryNvml([gpu("GPU-a")])
    nvml.broken = code
    with pytest.raises(InputError, match=message):
        observe_nvml(channels=CATALOGUE, now=NOW, start=lambda: InMemory(nvml))
