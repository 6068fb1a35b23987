"""Groups of channels, what boards cannot report, and deploy/dcgm-exporter/predrain-counters.csv."""

from pathlib import Path

import pytest

from features.config import FAILURE_CLASSES
from telemetry.dataset.channels import CATALOGUE, Channel
from telemetry.doctor.diagnosis import absent_on
from telemetry.doctor.groups import (
    GROUPS,
    LATER_FIELDS,
    OTHER,
    channels_page,
    counter_line,
    counter_name,
    grouped,
)

FILE = Path(__file__).resolve().parents[3] / "deploy" / "dcgm-exporter" / "predrain-counters.csv"
DCGM = [channel for channel in CATALOGUE.values() if channel.dcgm_names]


def later_lines() -> str:
    marked = [line.removeprefix("#later ") for line in FILE.read_text().splitlines() if line.startswith("#later ")]
    return "\n".join(marked)


def types_of(text: str) -> dict[str, str]:
    """Read a counter file by the exporter's rules: it does not start with one that breaks them."""
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            assert '"' not in line
            field, kind, what = (cell.strip(" ") for cell in line.split(","))
            assert field not in types  # it would give a page with repeated lines
            assert kind in ("gauge", "counter", "label")
            assert what
            types[field] = kind
    return types


def all_lines() -> dict[str, str]:
    return types_of(FILE.read_text() + later_lines() + "\n")


def test_every_channel_that_dcgm_has_is_in_it_under_the_name_that_all_exporters_accept() -> None:
    lines = all_lines()
    assert len(lines) < 100  # DCGM takes 128 fields a group at most
    for channel in DCGM:
        name = counter_name(channel)
        assert name in lines, channel.name
        assert lines[name] == ("counter" if channel.kind == "counter" else "gauge"), channel.name
        assert (counter_line(channel) or "").startswith(f"{name}, {lines[name]}, ")


def test_nothing_is_in_it_that_predrain_does_not_read() -> None:
    ours = {name for channel in DCGM for name in channel.dcgm_names}
    ours |= {"DCGM_EXP_XID_ERRORS_COUNT", "DCGM_FI_DRIVER_VERSION", "DCGM_FI_DEV_SERIAL"}
    assert set(all_lines()) <= ours


def test_names_that_stop_older_exporters_are_switched_off() -> None:
    assert not types_of(FILE.read_text()).keys() & LATER_FIELDS
    assert types_of(later_lines()).keys() == LATER_FIELDS


def test_every_channel_of_the_catalogue_is_in_one_group_and_every_group_holds_only_such() -> None:
    names = [name for group in GROUPS for name in group.channels]
    assert sorted(names) == sorted(CATALOGUE)


def test_a_declared_channel_stands_in_a_group_of_its_own() -> None:
    mine = Channel("bus_errors_total", "counter", "errors", 0.0, None, "declared | in params")
    channels = {**CATALOGUE, mine.name: mine}
    assert grouped(channels)[-1] == (OTHER, [mine])
    page = channels_page(channels)
    assert "| `bus_errors_total` | declared \\| in params | counter | errors | from 0 |" in page


@pytest.mark.parametrize(
    ("model", "channel", "absent"),
    [
        ("NVIDIA L4", "nvlink_replay_total", True),
        ("NVIDIA H100 80GB HBM3", "nvlink_replay_total", False),
        ("NVIDIA A100-SXM4-80GB", "retired_pages_sbe_total", True),
        ("Tesla V100-SXM2-32GB", "row_remap_pending", True),
        ("Tesla V100-SXM2-32GB", "retired_pages_sbe_total", False),
        ("NVIDIA H100 80GB HBM3", "fabric_health", False),
        ("NVIDIA A100-SXM4-80GB", "fabric_health", True),
        ("NVIDIA H100 80GB HBM3", "fan_speed_pct", True),
        ("NVIDIA GeForce RTX 4090", "ecc_sbe_volatile_total", True),
        ("NVIDIA GeForce RTX 4090", "dram_active_ratio", True),
        ("NVIDIA L40S", "mem_temp_c", True),
        ("AMD Instinct MI300X", "retired_pages_sbe_total", False),
        ("Some Accelerator 9000", "ecc_sbe_volatile_total", False),
    ],
)
def test_what_boards_cannot_report(model: str, channel: str, absent: bool) -> None:
    assert channel in CATALOGUE
    assert (absent_on(model, channel) is not None) is absent


def test_the_failure_classes_of_groups_are_those_of_labels():
    assert {name for group in GROUPS for name in group.classes} <= set(FAILURE_CLASSES)
    assert all(group.classes for group in GROUPS if group.precursor)
