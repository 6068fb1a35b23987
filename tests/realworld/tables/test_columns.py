"""Columns and states of exported tables: none is lost or misread unseen."""

import json
from pathlib import Path

import pytest

from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.mapping import load_mapping
from telemetry.importing.suggestion.questions import Inquiry, find_questions
from tests.telemetry.helpers import all_samples, gpu, run_import, samples_frame, without_inventory

ROWS = 6


def table(folder: Path, columns: dict[str, list[object]]) -> Path:
    frame = samples_frame(gpus=1, times=ROWS)[["timestamp", "node", "gpu", "gpu_temp_c"]]
    path = folder / "samples.csv"
    frame.assign(**columns).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "temperature.hbm",
        "power.total",
        "utilization.sm",
        "memory.temp",
        "clocks.current.gfx",
        "temperature.gpu1",
        "gpu_total_power",
        "gpu_sm_activity",
        "retired_pages.total",
        "remapped_rows.total",
    ],
)
def test_a_column_that_only_looks_like_a_field_of_nvidia_smi_is_asked_about(tmp_path: Path, name: str) -> None:
    path = table(tmp_path, {name: [1] * ROWS})
    questions = find_questions({"samples": [path]}, load_mapping(None), CATALOGUE)
    assert name in str(questions)
    with pytest.raises(InputError, match=name):
        run_import(tmp_path, samples=[path])


@pytest.mark.parametrize(
    ("name", "mapping", "reason"),
    [
        ("power.max_limit", None, "known, and not used"),
        ("node_load1", None, "known, and not used"),
        ("odd", "samples: {ignore_others: true}", "left out by the mapping"),
        ("odd", "samples: {columns: {odd: null}}", "left out by the mapping"),
        ("temperature.gpu", None, "another column has the channel"),
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0", None, None),
        ("clocks_event_reasons.sw_power_cap", None, None),
    ],
)
def test_values_of_a_column_that_is_not_read_are_counted(tmp_path, name, mapping, reason):
    path = table(tmp_path, {name: [1, None, 3, 4, 5, 6]})
    account = run_import(tmp_path, samples=[path], mapping=mapping).accounting.tables["sample values"]
    assert account.left_out == ({f"column {name!r}: {reason}": 5} if reason else {})
    assert account.unaccounted == 0


def test_no_action_is_an_action_and_no_missing_value(tmp_path: Path) -> None:
    path = table(tmp_path, {"gpu_recovery_action": ["None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "None"]})
    assert all_samples(run_import(tmp_path, samples=[path]))["recovery_action"].tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("channel", "word"),
    [
        ("power_w", "on"),
        ("fan_speed_pct", "Enabled"),
        ("pstate", "Active"),
        ("mem_temp_c", "no"),
        ("power_w", "P0"),
        ("gpu_temp_c", "x16"),
    ],
)
def test_a_state_is_no_number_of_another_unit(tmp_path: Path, channel: str, word: str) -> None:
    result = run_import(tmp_path, samples=[table(tmp_path, {channel: [7, word, 7, 7, 7, 7]})])
    assert all_samples(result)[channel].isna().tolist() == [False, True, False, False, False, False]
    assert result.quarantined == {"not a number": 1}


def test_a_number_behind_the_name_of_its_channel_is_that_number(tmp_path: Path) -> None:
    path = table(tmp_path, {"xid_last": ["none", "XID 79", "Xid: 79", "xid=119", "48", "XID 43"], "pstate": ["P0"] * 6})
    rows = all_samples(run_import(tmp_path, samples=[path]))
    assert rows["xid_last"].fillna(0).tolist() == [0, 79, 79, 119, 48, 43]
    assert rows["pstate"].tolist() == [0] * 6


@pytest.mark.parametrize(
    ("name", "channel", "scale"),
    [
        ("nvlink_bandwidth_gb_s", "nvlink_bandwidth_mib_s", 953.674),
        ("nvlink bandwidth (MB/s)", "nvlink_bandwidth_mib_s", 0.953674),
        ("nvlink_bandwidth_mib_s", "nvlink_bandwidth_mib_s", 1.0),
    ],
)
def test_a_rate_in_the_name_of_a_column_is_its_unit(tmp_path: Path, name: str, channel: str, scale: float) -> None:
    given = {"samples": [table(tmp_path, {name: [20] * ROWS})]}
    text = Inquiry(given, None, *find_questions(given, load_mapping(None), CATALOGUE)).mapping_text()
    rows = all_samples(run_import(tmp_path, samples=given["samples"], mapping=text))
    assert rows[channel].tolist() == pytest.approx([20 * scale] * ROWS, rel=1e-5)


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "Tesla V100", "H100 80GB HBM3", "AMD Instinct MI300X"])
def test_the_name_of_a_product_identifies_no_gpu(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="missing gpu"):
        without_inventory(tmp_path, samples_frame(gpus=1).assign(gpu=name))


@pytest.mark.parametrize("name", ["h100-sxm-001", "gpu01-sxm5-03", "a100-80gb-07"])
def test_a_name_that_begins_like_a_product_identifies_a_gpu(tmp_path: Path, name: str) -> None:
    assert set(all_samples(without_inventory(tmp_path, samples_frame(gpus=1).assign(gpu=name)))["gpu"]) == {name}


def test_a_mig_instance_does_not_contradict_its_gpu_without_an_inventory(tmp_path: Path) -> None:
    frame = samples_frame(gpus=1, times=1)[["timestamp", "node", "gpu"]]
    frame = frame.loc[[0, 0]].assign(gpu=[gpu(0), f"MIG-{gpu(0)}/1/0"], fb_used_mib=[100, 40])
    result = without_inventory(tmp_path, frame)
    assert all_samples(result)["fb_used_mib"].tolist() == [100]
    assert not result.quarantined


@pytest.mark.parametrize(
    "devices",
    [
        '[{"type": "GPU", "uuid": "UUID"}, {"type": "NIC", "serial": "7", "pci_bus_id": "0000:20:00.0"}]',
        '[{"model": "NVIDIA H100", "uuid": "UUID"}, {"model": "ConnectX-7", "pci_bus_id": "0000:20:00.0"}]',
        '[{"description": "3D controller", "uuid": "UUID"}, {"description": "Ethernet interface", "serial": "8"}]',
        '{"0": {"uuid": "UUID"}, "1": {"name": "nvme0n1", "serial": "9"}}',
        '[{"name": "HBM3 memory, Grace CPU", "uuid": "UUID"}, {"name": "CPU 0", "serial": "10"}]',
    ],
)
def test_an_inventory_of_all_devices_has_its_gpus(tmp_path: Path, devices: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(f'[{{"hostname": "node-0", "devices": {devices.replace("UUID", gpu(0))}}}]')
    result = run_import(tmp_path, samples=samples_frame(gpus=1), inventory=path)
    assert result.dataset.inventory()["gpu"].tolist() == [gpu(0)]
    assert result.accounting.tables["inventory"].left_out == {"a device that is no GPU": 1}


def test_an_object_beside_the_cards_hides_none(tmp_path: Path) -> None:
    path = tmp_path / "smi.json"
    record = {"timestamp": "2026-03-01T00:00:00Z", "card0": {"uuid": gpu(0), "power_w": 50}, "v2": {"driver": "6"}}
    path.write_text(json.dumps(record))
    result = run_import(tmp_path, samples=[path], mapping="samples: {ignore_others: true}")
    assert all_samples(result)["gpu"].tolist() == [gpu(0)]
