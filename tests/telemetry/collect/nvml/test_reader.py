"""What one GPU's reading holds, and what is learned from what it does not have."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.nvml.child import ASK_AGAIN_S, Gpu
from telemetry.collect.nvml.library import NvmlFault
from telemetry.collect.nvml.questions import CALLS, FIELDS, LINK_COUNTERS, PROFILE
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import absent_on
from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu, MemoryNvml

DATA = Path(__file__).parents[3] / "data" / "nvml"


class Bench:
    def __init__(self, **parts: object) -> None:
        self.gpu = MemoryGpu("GPU-0", **parts)
        self.now_s = 0.0
        self.reader = Gpu(MemoryNvml([self.gpu]), 0, lambda: self.now_s)

    def values(self) -> dict[str, float]:
        self.gpu.asked.clear()
        return self.reader.read()[0]


def test_every_channel_of_the_catalogue_with_an_nvml_source_is_read() -> None:
    known = {name for name, channel in CATALOGUE.items() if channel.nvml is not None}
    read = {channel for channel, *_ in (*FIELDS, *LINK_COUNTERS, *PROFILE)}
    read |= {channel for call in CALLS for channel in call.channels}
    # XIDs come as events; a gauge of the last one would report each of them twice.
    assert known - {"xid_last"} == read


@pytest.mark.parametrize("blank", [4294967295.0, 2.0**64 - 1, 2.0**63 - 1, math.nan])
def test_a_blank_is_no_value(blank: float) -> None:
    assert Bench(fields={83: blank}, calls={"fan": (blank,)}).values() == {}


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


def test_what_fails_for_a_moment_is_counted_asked_again_at_once_and_not_elsewhere() -> None:
    failing = {"fan": NvmlFault(999), "power": NvmlFault(999), "pstate": NvmlFault(10), "energy": (7.0,)}
    bench = Bench(fields={83: NvmlFault(999)}, calls=failing)
    assert bench.reader.read() == ({}, {"unknown": 3, "timeout": 1})
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


def test_an_older_driver_is_asked_in_its_own_words() -> None:
    bench = Bench(calls={"clocks_throttle_reasons": (128.0,), "memory": (2.0**20, 2.0**21), "temperature_v1": (40.0,)})
    expected = {"clocks_event_reasons": 128.0, "fb_used_mib": 1.0, "fb_free_mib": 2.0, "gpu_temp_c": 40.0}
    assert bench.values() == expected
    assert bench.values() == expected
    assert "clocks_event_reasons" not in bench.gpu.asked


def test_links_are_summed_where_the_driver_has_no_sum_and_one_that_goes_down_keeps_its_errors() -> None:
    bench = Bench(fields={38: 1.0}, links={(0, 0): 10.0, (1, 0): 5.0, (0, 2): 99.0})
    assert bench.values() == {"nvlink_replay_total": 15.0, "nvlink_crc_flit_total": 1.0}
    del bench.gpu.links[1, 0]
    bench.gpu.links[0, 0] = 11.0
    assert bench.values()["nvlink_replay_total"] == 16.0


@given(
    st.dictionaries(st.sampled_from([call.name for call in CALLS]), st.sampled_from([1, 2, 3, 4, 9, 13, 15, 18, 999]))
)
def test_whatever_fails_the_rest_is_read_or_the_fault_is_one_to_act_on(failures: dict[str, int]) -> None:
    calls: dict[str, tuple[float, ...] | NvmlFault] = {call.name: (1.0,) * len(call.channels) for call in CALLS}
    calls |= {name: NvmlFault(code) for name, code in failures.items()}
    bench = Bench(calls=calls)
    try:
        values = bench.values()
    except NvmlFault as fault:
        assert fault.code in {1, 9, 15, 18} & set(failures.values())  # noqa: PT017 - raised only for some inputs
        return
    sources = {channel: [call.name for call in CALLS if channel in call.channels] for channel in CATALOGUE}
    assert set(values) >= {channel for channel, names in sources.items() if names and not set(names) & set(failures)}
    assert not set(values) & {channel for channel, names in sources.items() if set(names) <= set(failures)}


def test_a_real_h200_gives_every_channel_that_its_board_can_have() -> None:
    """What one H200 answered under load (driver 580.159.04, one GPU of a virtual machine: no NVLink)."""
    recorded = json.loads((DATA / "h200.json").read_text())
    answers = recorded["load"]
    bench = Bench(
        fields={int(number): value for number, value in answers["fields"].items()},
        calls={name: tuple(values) for name, values in answers["calls"].items()},
        profile={int(number): value for number, value in answers["profile"].items()},
    )
    bench.values()  # profiling channels are means since the reading before
    values = bench.values()
    could = {name for name, channel in CATALOGUE.items() if channel.nvml and not absent_on(recorded["model"], name)}
    assert set(values) == {name for name in could if not name.startswith("nvlink_")} - {"xid_last"}
    told = {name: values[name] for name in ("power_w", "energy_mj", "power_violation_ns", "clocks_event_reasons")}
    assert told == {
        "power_w": 691.615,
        "energy_mj": 13694182,
        "power_violation_ns": 14888419000,
        "clocks_event_reasons": 4,
    }
    assert values["tensor_active_ratio"] == pytest.approx(0.6636, abs=1e-4)
    assert values["fb_used_mib"] + values["fb_free_mib"] + values["fb_reserved_mib"] == pytest.approx(143_771, abs=1)
