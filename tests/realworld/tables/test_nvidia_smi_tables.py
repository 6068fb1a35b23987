"""Tables that ``nvidia-smi --query-gpu --format=csv`` and its like append to, imported as they are."""

from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import all_samples, gpu, inventory_frame, run_import

HEADER = (
    "timestamp, uuid, pci.bus_id, name, temperature.gpu, utilization.gpu [%], power.draw [W], memory.used [MiB], "
    "memory.total [MiB], ecc.errors.uncorrected.volatile.total, fan.speed [%], pstate, "
    "clocks_event_reasons.active, clocks_event_reasons.hw_slowdown, clocks.sm [MHz]"
)
UTC_MAPPING = "timezone: UTC\n"


def line(minute: int, number: int) -> str:
    time = (datetime(2026, 3, 1) + timedelta(minutes=minute)).strftime("%Y/%m/%d %H:%M:%S.123")  # noqa: DTZ001 - it writes no zone
    return (
        f"{time}, {gpu(number)}, 00000000:1B:00.0, NVIDIA A100, {50 + number}, 98 %, {300 + minute}.5 W, "
        "1024 MiB, 40960 MiB, 0, [N/A], P0, 0x0000000000000004, Not Active, 1410 MHz"
    )


def without_units(text: str) -> str:
    for unit in (" %,", " W,", " MiB,"):
        text = text.replace(unit, ",")
    return text.replace(" MHz\n", "\n")


@pytest.mark.parametrize("every_run", [False, True])
@pytest.mark.parametrize("nounits", [False, True])
def test_a_table_of_nvidia_smi_needs_a_zone_and_nothing_else(tmp_path: Path, every_run: bool, nounits: bool) -> None:
    runs = ["\n".join(line(minute, number) for number in (0, 1)) for minute in range(0, 60, 10)]
    text = HEADER + "\n" + (f"\n{HEADER}\n" if every_run else "\n").join(runs) + "\n"
    path = tmp_path / "smi.csv"
    path.write_text(without_units(text) if nounits else text)
    with pytest.raises(InputError, match="naive"):
        run_import(tmp_path, samples=[path], inventory=inventory_frame())
    result = run_import(tmp_path, samples=[path], inventory=inventory_frame(), mapping=UTC_MAPPING)
    rows = all_samples(result)
    assert len(rows) == 12
    assert sorted(rows["power_w"].unique()) == [300.5, 310.5, 320.5, 330.5, 340.5, 350.5]
    assert rows["gpu_util_pct"].unique().tolist() == [98]
    assert rows["fb_used_mib"].unique().tolist() == [1024]
    assert rows["clocks_event_reasons"].unique().tolist() == [4]
    assert rows["pstate"].unique().tolist() == [0]
    assert rows["sm_clock_mhz"].unique().tolist() == [1410]
    assert sorted(rows["gpu_temp_c"].unique()) == [50, 51]
    assert "fan_speed_pct" not in rows or rows["fan_speed_pct"].isna().all()
    assert result.quarantined == {}


REASONS = "clocks_event_reasons.hw_slowdown, clocks_event_reasons.sw_power_cap, clocks_event_reasons.sync_boost"


@pytest.mark.parametrize(
    ("header", "cells", "mask", "quarantined"),
    [
        (REASONS, "Active, Not Active, [N/A]", 8, {}),
        (REASONS.replace("event", "throttle").replace(".", "_"), "Active, Active, Not Active", 12, {}),
        (REASONS, "Not Active, Not Active, Not Active", 0, {}),
        (REASONS, "[N/A], [N/A], [N/A]", None, {}),
        (REASONS, "Active, perhaps, Not Active", None, {"not a number": 1}),
        (f"{REASONS}, clocks_event_reasons.active", "Active, Active, Not Active, SW Power Cap", 4, {}),
        ("clocks_throttle_reasons.active", "HW Slowdown; GPU Idle", 9, {}),
    ],
)
def test_reasons_for_reduced_clocks_are_one_mask(
    tmp_path: Path, header: str, cells: str, mask: int | None, quarantined: dict[str, int]
) -> None:
    path = tmp_path / "smi.csv"
    path.write_text(f"timestamp, uuid, temperature.gpu, {header}\n2026-03-01T00:00:00Z, {gpu(0)}, 50, {cells}\n")
    result = run_import(tmp_path, samples=[path], max_loss=1.0)
    (found,) = all_samples(result).reindex(columns=["clocks_event_reasons"])["clocks_event_reasons"].astype(object)
    assert (None if pd.isna(found) else found) == mask
    assert result.quarantined == quarantined


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("memory.used [MiB]", "1024 MiB"),
        ("memory.used [B]", "1073741824"),
        ("memory.used [GiB]", "1"),
        ("memory_used", "1024"),
        ("nvidia_smi_memory_used_bytes", "1073741824"),
        ("DCGM_FI_DEV_FB_USED", "1024"),
        ("fb_used_mib", "1 GiB"),
    ],
)
def test_one_amount_of_memory_under_any_name_and_unit(tmp_path: Path, header: str, text: str) -> None:
    path = tmp_path / "memory.csv"
    path.write_text(f"timestamp,uuid,{header}\n2026-03-01T00:00:00Z,{gpu(0)},{text}\n")
    assert all_samples(run_import(tmp_path, samples=[path]))["fb_used_mib"].tolist() == [1024]


def test_german_numbers_and_dates_in_a_table_with_semicolons(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text(
        f"Timestamp;uuid;power.draw [W]\n01.03.2026 10:00:00;{gpu(0)};1.350,5\n01.03.2026 10:10:00;{gpu(0)};350,125\n"
    )
    rows = all_samples(run_import(tmp_path, samples=[path], mapping="timezone: Europe/Berlin\n"))
    assert rows["power_w"].tolist() == [1350.5, 350.125]
    assert rows["timestamp"].tolist() == [pd.Timestamp("2026-03-01T09:00Z"), pd.Timestamp("2026-03-01T09:10Z")]


SHEET = f"timestamp;uuid;power.draw [W];Temperatur °C\n01.03.2026 10:00:00;{gpu(0)};350,5;41\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sheet.csv", SHEET.encode("utf-8-sig")),
        ("sheet.csv", SHEET.encode("utf-16")),
        ("sheet.csv", SHEET.encode("cp1252")),
        ("sheet.csv", ("sep=;\r\n" + SHEET.replace("\n", "\r\n")).encode()),
        ("sheet.csv", ('\n\n"sep=;"\n' + SHEET).encode()),
        ("sheet.txt", SHEET.replace(";", "\t").encode("utf-16")),
        ("sheet.log", SHEET.encode()),
    ],
)
def test_a_sheet_is_read_however_it_is_saved(
    tmp_path: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(content)
    mapping = "timezone: UTC\nsamples: {columns: {Temperatur °C: gpu_temp_c}}\n"
    result = run_import(tmp_path, samples=[tmp_path / name], mapping=mapping)
    assert all_samples(result)[["power_w", "gpu_temp_c"]].to_numpy().tolist() == [[350.5, 41]]
    assert ("Windows-1252" in caplog.text) == (content == SHEET.encode("cp1252")), "an uncertain reading is reported"
    assert result.accounting.tables["samples"].read == result.accounting.tables["samples"].used == 1


def test_every_default_field_of_dcgm_exporter_is_known(tmp_path: Path) -> None:
    fields = [
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_MEM_CLOCK",
        "DCGM_FI_DEV_MEMORY_TEMP",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM_FI_DEV_ENC_UTIL",
        "DCGM_FI_DEV_DEC_UTIL",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "DCGM_FI_DEV_VGPU_LICENSE_STATUS",
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_PROF_PIPE_FP64_ACTIVE",
        "DCGM_FI_DEV_FB_TOTAL",
        "DCGM_EXP_P2P_STATUS",
    ]
    path = tmp_path / "dcgm.csv"
    path.write_text(f"timestamp,UUID,{','.join(fields)}\n2026-03-01T00:00:00Z,{gpu(0)}{',0' * len(fields)}\n")
    rows = all_samples(run_import(tmp_path, samples=[path]))
    assert rows["xid_last"].tolist() == [0]
    assert not [name for name in rows if "vgpu" in name.lower()]


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        *((row, "no header line") for row in (line(0, 0), f"0, {gpu(0)}, NVIDIA A100, 45", "0, NVIDIA A100, 45, 12 %")),
        ("2026-03-01 00:00:00;node-0;45", "no header line"),
        ("1,03/01/2026,00:10:00,PCI GPU 1 Status,Asserted", "no header line"),
        ("==============NVSMI LOG==============\n\nTimestamp : Sun Mar  1 00:00:00 2026", "not a table but a report"),
        ("Sun Mar  1 00:00:00 2026\n+-----------------+\n| NVIDIA-SMI 550.54.15 |", "not a table but a report"),
        ('<?xml version="1.0" ?>\n<nvidia_smi_log>', "not a table but a report"),
        ("JobId=7 JobName=t\n   JobState=RUNNING", "scontrol"),
        ("nvidia_smi,host=n,name=NVIDIA\\ A100 temperature_gpu=40i 1772323200000000000", "line protocol"),
        ("#Date       Time        gpu         pid   type     sm    mem    command", "dmon"),
        ("#Date       Time        gpu    pwr  gtemp\n#YYYYMMDD   HH:MM:SS    Idx      W      C", "dmon"),
        ("# gpu    pwr  gtemp\n# Idx      W      C", "dmon"),
        ("# gpu, pwr, gtemp\n# Idx, W, C", "dmon"),
        ("2026-03-01 00:00:00 #Entity   TMPTR   POWER\n2026-03-01 00:00:00 ID", "dmon"),
        ("Waiting for the host engine\n#Entity   TMPTR   POWER\nID", "dmon"),
        ("#group,false,true\n#datatype,string,long\n,result,table,_time", "InfluxDB"),
        ("JobID      State      NodeList\n---------- ---------- --------", "fixed width"),
        ("JOBID       USER   ST NODELIST(REASON) TRES_ALLOC", "fixed width"),
    ],
)
def test_a_file_without_a_header_line_is_refused_before_values_become_names(tmp_path: Path, first: str, problem: str):
    path = tmp_path / "smi.csv"
    path.write_text(f"{first}\n{first}\n")
    with pytest.raises(InputError, match=problem):
        run_import(tmp_path, samples=[path], mapping=UTC_MAPPING)
