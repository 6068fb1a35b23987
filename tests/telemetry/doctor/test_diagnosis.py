"""What is missing and what to do: groups of channels, and the channels of a model."""

import json
from pathlib import Path

import pytest

from features.config import FAILURE_CLASSES
from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE, Channel
from telemetry.doctor.diagnosis import (
    ChannelSeen,
    ChannelState,
    Diagnosis,
    TelemetryFinding,
    absent_on,
    as_dict,
    as_text,
    diagnose,
)
from telemetry.doctor.groups import GROUPS, LATER_FIELDS, OTHER, channels_page, counter_line, counter_name, grouped
from telemetry.doctor.model_channels import read_used_channels
from tests.telemetry.doctor.looks import H100, USED, observation, without


def state_of(diagnosis: Diagnosis, channel: str) -> ChannelState:
    return next(state for state in diagnosis.states if state.channel.name == channel)


def test_what_is_missing_is_to_do_most_important_first() -> None:
    look = observation(
        channels=without("pcie_replay_total", "ecc_sbe_volatile_total", "enc_util_pct", "row_remap_pending")
    )
    diagnosis = diagnose(look, USED, "said", CATALOGUE)
    assert [(todo.title.split(":")[0], todo.used) for todo in diagnosis.todos] == [
        ("ECC", True),
        ("PCIe", True),
        ("row remapping", False),
        ("load", False),
    ]
    assert diagnosis.lacking == ("ecc_sbe_volatile_total", "pcie_replay_total")
    assert not diagnosis.healthy
    steps = diagnosis.todos[0].steps
    assert "    DCGM_FI_DEV_ECC_SBE_VOL_TOTAL, counter, corrected memory errors since driver load" in steps
    assert any("ECC is enabled" in step for step in steps)


def test_without_a_model_the_groups_with_precursors_count() -> None:
    diagnosis = diagnose(
        observation(channels=without("row_remap_pending", "enc_util_pct")), None, "no model", CATALOGUE
    )
    assert diagnosis.lacking == ("row_remap_pending",)
    assert "missing channels known to precede failures: row_remap_pending" in as_text(diagnosis)
    assert "no model" in as_text(diagnosis)


def test_names_that_stop_older_exporters_are_distinguished() -> None:
    diagnosis = diagnose(observation(channels=without("recovery_action")), USED, "said", CATALOGUE)
    steps = diagnosis.todos[0].steps
    assert steps[0] == "With an exporter built on DCGM 4.6 or later, also add:"
    assert steps[1].startswith("    DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION, gauge, ")


def test_what_a_board_does_not_have_is_nothing_to_do() -> None:
    look = observation(
        models={"NVIDIA L4": 8}, channels=without("nvlink_replay_total", "fabric_health", "fan_speed_pct")
    )
    diagnosis = diagnose(look, USED, "said", CATALOGUE)
    assert state_of(diagnosis, "nvlink_replay_total").status == "not on this board"
    assert diagnosis.todos == ()


def test_boards_that_cannot_report_a_channel_are_no_lack_in_a_mixed_fleet() -> None:
    seen = dict(observation().channels) | {
        "nvlink_replay_total": ChannelSeen("nvlink_replay_total", 6, null_share=0.25),
        "gpu_temp_c": ChannelSeen("gpu_temp_c", 6, null_share=0.25),
        "ecc_sbe_volatile_total": ChannelSeen("ecc_sbe_volatile_total", 0, sentinels=8),
        "pcie_replay_total": ChannelSeen("pcie_replay_total", 8, null_share=0.5),
    }
    look = observation(kind="dataset", models={H100: 6, "NVIDIA L40S": 2}, channels=seen)
    diagnosis = diagnose(look, USED, "said", CATALOGUE)
    states = {name: state_of(diagnosis, name) for name in seen}
    assert states["nvlink_replay_total"].status == "ok"
    assert (states["gpu_temp_c"].status, states["gpu_temp_c"].remark) == ("partial", "6 of 8 GPUs")
    assert states["ecc_sbe_volatile_total"].remark == "8 values mean 'not supported'"
    assert states["pcie_replay_total"].remark == "50% of the rows without a value"
    assert set(diagnosis.lacking) == {"gpu_temp_c", "ecc_sbe_volatile_total", "pcie_replay_total"}


def test_an_unseen_xid_gauge_is_unsure_because_exporters_leave_it_out_until_there_is_one() -> None:
    blind = diagnose(observation(channels=without("xid_last"), xid_events=False), USED, "said", CATALOGUE)
    assert state_of(blind, "xid_last").status == "unsure"
    assert blind.lacking == ()
    assert blind.todos[0].title == "XIDs: xid_last not seen"
    assert "collect kernel-log" in blind.todos[0].steps[0]
    diagnosis = diagnose(observation(channels=without("xid_last")), USED, "said", CATALOGUE)
    assert diagnosis.todos == ()
    stored = observation(kind="dataset", channels=without("xid_last"), xid_events=False)
    assert diagnose(stored, USED, "said", CATALOGUE).lacking == ("xid_last",)


def test_a_dataset_whose_events_carry_xids_lacks_their_gauge_only_where_a_model_uses_it() -> None:
    stored = observation(kind="dataset", channels=without("xid_last"))
    diagnosis = diagnose(stored, None, "no model", CATALOGUE)
    assert state_of(diagnosis, "xid_last").status == "not from here"
    assert diagnosis.lacking == diagnosis.todos == ()
    assert diagnose(stored, USED, "said", CATALOGUE).lacking == ("xid_last",)


def test_scrape_channels_come_from_our_own_collector() -> None:
    scraping = ("scrape_duration_s", "scrape_failures_total", "page_age_s", "clock_skew_s", "channels_reported")
    look = observation(channels=without(*scraping))
    assert {state_of(diagnose(look, None, "", CATALOGUE), name).status for name in scraping} == {"not from here"}
    stored = observation(kind="dataset", channels=without(*scraping))
    assert diagnose(stored, None, "", CATALOGUE).todos[0].steps == (
        "Scrape the exporters with `predrain collect exporters`, which measures it.",
    )


def test_findings_that_spoil_telemetry_make_a_source_ill_and_others_do_not() -> None:
    problem, note = TelemetryFinding("the clock is off", "Set it."), TelemetryFinding("it is Sunday", problem=False)
    assert diagnose(observation(findings=(note,)), USED, "said", CATALOGUE).healthy
    ill = diagnose(observation(findings=(note, problem)), USED, "said", CATALOGUE)
    assert not ill.healthy
    assert ill.todos[0].steps == ("Set it.",)
    text = as_text(ill)
    assert "  ! the clock is off\n  - it is Sunday\n" in text
    assert text.endswith("Not OK: 1 other problem found.\n")


def test_the_json_form_holds_all_of_it() -> None:
    look = observation(channels=without("pcie_replay_total"), unknown=("DCGM_FI_DEV_NEW",))
    report = json.loads(json.dumps(as_dict(diagnose(look, USED, "said", CATALOGUE))))
    assert report["healthy"] is False
    assert report["lacking"] == ["pcie_replay_total"]
    assert report["channels"]["pcie_replay_total"] == {
        "group": "PCIe", "status": "missing", "remark": "", "used": True, "gpus": 0, "name": None,
        "channel": "pcie_replay_total", "null_share": None, "sentinels": 0,
    }  # fmt: skip
    assert report["source"]["unknown"] == ["DCGM_FI_DEV_NEW"]
    assert report["todo"][0]["channels"] == ["pcie_replay_total"]


def test_the_text_shows_channels_by_group_and_marks_those_of_the_model() -> None:
    lines = as_text(diagnose(observation(channels=without("pcie_replay_total")), USED, "said", CATALOGUE)).splitlines()
    at = lines.index("PCIe")
    assert lines[at + 1].split() == ["pcie_replay_total*", "missing"]
    assert lines[at + 2].split() == ["pcie_link_gen", "ok", "8"]
    assert "said" in lines
    assert lines[lines.index("Recommendations, required channels first") + 1] == "  1. PCIe: pcie_replay_total missing"


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


def test_a_bundle_tells_what_it_uses(tmp_path: Path) -> None:
    features = [("telemetry", "power_w_max"), ("peers", "gpu_temp_c"), ("history", "xid_memory"), ("static", "age")]
    features.append(("onset", "clocks_event_reasons_power_brake"))
    manifest = {"features": [{"group": group, "channel": channel} for group, channel in features]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    used, source = read_used_channels(tmp_path, CATALOGUE)
    assert used == {"power_w", "gpu_temp_c", "clocks_event_reasons"}
    assert str(tmp_path) in source


def test_without_a_bundle_it_says_what_to_run(tmp_path: Path) -> None:
    used, source = read_used_channels(tmp_path, CATALOGUE)
    assert used is None
    assert "predrain train" in source


@pytest.mark.parametrize("manifest", ["{}", "[]", '{"features": [1]}', "not JSON"])
def test_a_damaged_bundle_is_named(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(InputError, match="the manifest is unusable"):
        read_used_channels(tmp_path, CATALOGUE)
