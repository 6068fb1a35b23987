"""What is missing, what that costs, what to do, in which order."""

import json

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import ChannelState, Diagnosis, as_dict, as_text, diagnose
from telemetry.doctor.observation import ChannelSeen, TelemetryFinding
from tests.telemetry.doctor.looks import H100, IMPORTANCE, observation, without


def state_of(diagnosis: Diagnosis, channel: str) -> ChannelState:
    return next(state for state in diagnosis.states if state.channel.name == channel)


def test_what_is_missing_is_to_do_most_important_first() -> None:
    look = observation(
        channels=without("pcie_replay_total", "ecc_sbe_volatile_total", "enc_util_pct", "row_remap_pending")
    )
    diagnosis = diagnose(look, IMPORTANCE, "said", CATALOGUE)
    assert [(todo.title.split(":")[0], todo.importance, todo.used) for todo in diagnosis.todos] == [
        ("ECC", 0.3, True),
        ("PCIe", 0.2, True),
        ("row remapping", None, False),
        ("load", None, False),
    ]
    assert diagnosis.lacking == ("ecc_sbe_volatile_total", "pcie_replay_total")
    assert not diagnosis.healthy
    assert "the model never saw it: its importance is not known" in as_text(diagnosis)
    steps = diagnosis.todos[0].steps
    assert "    DCGM_FI_DEV_ECC_SBE_VOL_TOTAL, counter, corrected memory errors since driver load" in steps
    assert any("ECC is enabled" in step for step in steps)


def test_without_a_model_the_groups_with_precursors_count() -> None:
    diagnosis = diagnose(
        observation(channels=without("row_remap_pending", "enc_util_pct")), None, "no model", CATALOGUE
    )
    assert diagnosis.lacking == ("row_remap_pending",)
    assert "failures are known to announce themselves by: row_remap_pending" in as_text(diagnosis)
    assert "no model" in as_text(diagnosis)


def test_names_that_stop_older_exporters_are_distinguished() -> None:
    diagnosis = diagnose(observation(channels=without("recovery_action")), IMPORTANCE, "said", CATALOGUE)
    steps = diagnosis.todos[0].steps
    assert steps[0] == "With an exporter built on DCGM 4.6 or later add as well:"
    assert steps[1].startswith("    DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION, gauge, ")


def test_what_a_board_does_not_have_is_nothing_to_do() -> None:
    look = observation(
        models={"NVIDIA L4": 8}, channels=without("nvlink_replay_total", "fabric_health", "fan_speed_pct")
    )
    diagnosis = diagnose(look, IMPORTANCE, "said", CATALOGUE)
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
    diagnosis = diagnose(look, IMPORTANCE, "said", CATALOGUE)
    states = {name: state_of(diagnosis, name) for name in seen}
    assert states["nvlink_replay_total"].status == "ok"
    assert (states["gpu_temp_c"].status, states["gpu_temp_c"].remark) == ("partly", "6 of 8 GPUs")
    assert states["ecc_sbe_volatile_total"].remark == "8 values say not supported"
    assert states["pcie_replay_total"].remark == "50% of the rows without a value"
    assert set(diagnosis.lacking) == {"gpu_temp_c", "ecc_sbe_volatile_total", "pcie_replay_total"}


def test_an_unseen_xid_gauge_is_unsure_because_exporters_leave_it_out_until_there_is_one() -> None:
    blind = diagnose(observation(channels=without("xid_last"), xid_events=False), IMPORTANCE, "said", CATALOGUE)
    assert state_of(blind, "xid_last").status == "unsure"
    assert blind.lacking == ()
    assert blind.todos[0].title == "XIDs: xid_last not seen"
    assert blind.todos[0].importance == 0.35
    assert "collect kernel-log" in blind.todos[0].steps[0]
    diagnosis = diagnose(observation(channels=without("xid_last")), IMPORTANCE, "said", CATALOGUE)
    assert diagnosis.todos == ()
    stored = observation(kind="dataset", channels=without("xid_last"), xid_events=False)
    assert diagnose(stored, IMPORTANCE, "said", CATALOGUE).lacking == ("xid_last",)


def test_a_dataset_whose_events_carry_xids_lacks_their_gauge_only_where_a_model_uses_it() -> None:
    stored = observation(kind="dataset", channels=without("xid_last"))
    diagnosis = diagnose(stored, None, "no model", CATALOGUE)
    assert state_of(diagnosis, "xid_last").status == "not from here"
    assert diagnosis.lacking == diagnosis.todos == ()
    assert diagnose(stored, IMPORTANCE, "said", CATALOGUE).lacking == ("xid_last",)


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
    assert diagnose(observation(findings=(note,)), IMPORTANCE, "said", CATALOGUE).healthy
    ill = diagnose(observation(findings=(note, problem)), IMPORTANCE, "said", CATALOGUE)
    assert not ill.healthy
    assert ill.todos[0].steps == ("Set it.",)
    text = as_text(ill)
    assert "  ! the clock is off\n  - it is Sunday\n" in text
    assert text.endswith("Not OK: 1 other problem found.\n")


def test_the_json_form_holds_all_of_it() -> None:
    look = observation(channels=without("pcie_replay_total"), unknown=("DCGM_FI_DEV_NEW",))
    report = json.loads(json.dumps(as_dict(diagnose(look, IMPORTANCE, "said", CATALOGUE))))
    assert report["healthy"] is False
    assert report["lacking"] == ["pcie_replay_total"]
    assert report["channels"]["pcie_replay_total"] == {
        "group": "PCIe", "status": "missing", "remark": "", "used": True, "importance": 0.2, "gpus": 0, "name": None,
        "channel": "pcie_replay_total", "null_share": None, "sentinels": 0,
    }  # fmt: skip
    assert report["importance"]["model"] == "mean_rank"
    assert report["source"]["unknown"] == ["DCGM_FI_DEV_NEW"]
    assert report["todo"][0]["channels"] == ["pcie_replay_total"]


def test_the_text_shows_channels_by_group_with_their_importance() -> None:
    lines = as_text(
        diagnose(observation(channels=without("pcie_replay_total")), IMPORTANCE, "said", CATALOGUE)
    ).splitlines()
    at = lines.index("PCIe [20.0%]")
    assert lines[at + 1].split() == ["pcie_replay_total*", "missing", "20.0%"]
    assert lines[at + 2].split() == ["pcie_link_gen", "ok", "8", "-"]
    assert "said" in lines
    assert lines[lines.index("What to do, most important first") + 1] == "  1. PCIe: pcie_replay_total missing [20.0%]"
