"""What one GPU's reading holds, and what is learned from what it does not have."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.nvml.library import NvmlFault
from telemetry.collect.nvml.questions import CALLS, FIELDS, INSTEAD, LINK_COUNTERS, PROFILE
from telemetry.collect.nvml.reader import ASK_AGAIN_S, Reader
from telemetry.dataset.channels import CATALOGUE
from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu, MemoryNvml


class Bench:
    def __init__(self, **parts: object) -> None:
        self.gpu = MemoryGpu("GPU-0", **parts)  # type: ignore[arg-type]  # fields of MemoryGpu, as the test gives them
        self.now_s = 0.0
        self.nvml = MemoryNvml([self.gpu])
        self.reader = Reader(self.nvml, lambda: self.now_s)
        self.reader.find(0)

    def values(self) -> dict[str, float]:
        self.gpu.asked.clear()
        return self.reader.read(0).values


def test_every_channel_of_the_catalogue_with_an_nvml_source_is_read() -> None:
    known = {name for name, channel in CATALOGUE.items() if channel.nvml is not None}
    read = {field.channel for field in FIELDS} | {channel for channel, *_ in (*LINK_COUNTERS, *PROFILE)}
    read |= {channel for call in (*CALLS, *INSTEAD) for channel in call.channels}
    # XIDs come as events; a gauge of the last one beside them would tell each of them twice.
    assert known - {"xid_last"} == read


def test_values_come_in_our_units() -> None:
    bench = Bench(fields={186: 130_000}, calls={"power": (123_456.0,), "memory_v2": (2.0**30, 2.0**31, 2.0**20)})
    assert bench.values() == pytest.approx(
        {"power_instant_w": 130.0, "power_w": 123.456, "fb_used_mib": 1024, "fb_free_mib": 2048, "fb_reserved_mib": 1}
    )


@pytest.mark.parametrize("blank", [4294967295.0, 2.0**64 - 1, 2.0**63 - 1, math.nan])
def test_a_blank_is_no_value(blank: float) -> None:
    assert Bench(fields={83: blank}, calls={"fan": (blank,)}).values() == {}


def test_a_blank_read_as_zero_would_be_a_reset_and_a_burst_of_errors_and_is_no_value() -> None:
    bench, blank, seen = Bench(fields={83: 7.0}), 2.0**64 - 1, []
    (channel,) = bench.values()

    def rise(values: list[float]) -> float:
        return sum(new - old if new >= old else new for old, new in pairwise(values))

    for value in (7.0, blank, 7.0):
        bench.gpu.fields[83] = value
        seen.append(bench.values().get(channel))
    assert rise([0.0 if value is None else value for value in seen]) == 7, "errors that never were"
    assert seen == [7, None, 7]
    assert rise([value for value in seen if value is not None]) == 0


def test_what_is_not_supported_is_asked_again_after_an_hour_only() -> None:
    bench = Bench(calls={"temperature": (40.0,)})
    bench.values()
    assert "fan" in bench.gpu.asked
    bench.gpu.calls["fan"] = (30.0,)
    bench.now_s = ASK_AGAIN_S - 1
    assert "fan_speed_pct" not in bench.values()
    assert bench.gpu.asked == ["temperature"]
    bench.now_s = ASK_AGAIN_S + 1
    assert bench.values()["fan_speed_pct"] == 30.0


def test_what_fails_for_a_moment_is_counted_and_asked_again_at_once() -> None:
    bench = Bench(calls={"fan": NvmlFault(999), "power": NvmlFault(999), "pstate": NvmlFault(10)})
    assert bench.reader.read(0).errors == {"unknown": 2, "timeout": 1}
    bench.gpu.calls["fan"] = (30.0,)
    assert bench.values() == {"fan_speed_pct": 30.0}


def test_a_call_is_asked_for_what_the_fields_do_not_have() -> None:
    bench = Bench(fields={142: 1.0, 143: 2.0}, calls={"remapped_rows": (9.0, 9.0, 1.0, 0.0), "energy": (7.0,)})
    assert bench.values() == {
        "row_remap_correctable_total": 1.0,
        "row_remap_uncorrectable_total": 2.0,
        "row_remap_pending": 1.0,
        "row_remap_failure": 0.0,
        "energy_mj": 7.0,
    }


def test_a_field_that_fails_for_a_moment_is_not_asked_elsewhere() -> None:
    bench = Bench(fields={83: NvmlFault(999)}, calls={"energy": (7.0,)})
    assert bench.values() == {}


def test_an_older_driver_is_asked_in_its_own_words() -> None:
    bench = Bench(calls={"clocks_throttle_reasons": (128.0,), "memory": (2.0**20, 2.0**21), "temperature_v1": (40.0,)})
    expected = {"clocks_event_reasons": 128.0, "fb_used_mib": 1.0, "fb_free_mib": 2.0, "gpu_temp_c": 40.0}
    assert bench.values() == expected
    assert bench.values() == expected
    assert "clocks_event_reasons" not in bench.gpu.asked


def test_links_are_summed_and_one_that_goes_down_does_not_take_its_errors_along() -> None:
    bench = Bench(links={(0, 0): 10.0, (1, 0): 5.0, (2, 0): 400.0}, down={2})
    assert bench.values() == {"nvlink_replay_total": 15.0}
    bench.gpu.down.add(1)
    bench.gpu.links[0, 0] = 11.0
    assert bench.values() == {"nvlink_replay_total": 16.0}


def test_the_driver_s_own_sums_come_before_ours() -> None:
    bench = Bench(fields={38: 1.0, 45: 2.0, 52: 3.0, 59: 4.0}, links={(0, 0): 10.0})
    assert bench.values()["nvlink_replay_total"] == 3.0


def test_profiling_ratios_begin_with_the_second_reading() -> None:
    bench = Bench(profile={1: 50.0, 20: 2.0})
    assert bench.values() == {}
    assert bench.values() == {"gr_engine_active_ratio": 0.5, "pcie_tx_bytes_s": 2097152.0}


@pytest.mark.parametrize("code", [15, 28])
def test_a_lost_gpu_has_to_be_found_anew(code: int) -> None:
    bench = Bench(calls={"temperature": (40.0,)})
    bench.gpu.lost = code
    with pytest.raises(NvmlFault):
        bench.reader.read(0)
    assert not bench.reader.known(0)
    bench.gpu.lost = None
    bench.reader.find(0)
    assert bench.values() == {"gpu_temp_c": 40.0}


@given(
    st.dictionaries(st.sampled_from([call.name for call in CALLS]), st.sampled_from([1, 2, 3, 4, 9, 13, 15, 18, 999]))
)
def test_whatever_fails_the_rest_is_read_or_the_fault_is_one_to_act_on(failures: dict[str, int]) -> None:
    calls: dict[str, tuple[float, ...] | NvmlFault] = {call.name: (1.0,) * len(call.channels) for call in CALLS}
    calls |= {name: NvmlFault(code) for name, code in failures.items()}
    bench = Bench(calls=calls)
    if {1, 9, 15, 18} & set(failures.values()):
        with pytest.raises(NvmlFault):
            bench.values()
    else:
        assert set(bench.values()) == {
            channel for call in CALLS if call.name not in failures for channel in call.channels
        }
