"""Tables that ``nvidia-smi --query-gpu --format=csv`` and its like append to, imported as they are."""

import json
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
def test_reasons_for_reduced_clocks_are_one_mask(tmp_path, header, cells, mask, quarantined):
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
def test_a_sheet_is_read_however_it_is_saved(tmp_path, name, content, caplog):
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
        ("#Date       Time        gpu         pid   type     sm    mem    command", "a table of processes"),
        ("#group,false,true\n#datatype,string,long\n,result,table,_time", "InfluxDB"),
    ],
)
def test_a_file_without_a_header_line_is_refused_before_values_become_names(tmp_path: Path, first: str, problem: str):
    path = tmp_path / "smi.csv"
    path.write_text(f"{first}\n{first}\n")
    with pytest.raises(InputError, match=problem):
        run_import(tmp_path, samples=[path], mapping=UTC_MAPPING)


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("ends", [("", "\n", "\n"), ("[", ",\n", "]")])
def test_what_gpustat_prints_has_a_row_for_each_gpu_and_time(tmp_path, indent, ends):
    reports = [
        {
            "hostname": "node-0",
            "query_time": f"2026-03-01T00:{turn}0:00.123456",
            "driver_version": "550.54",
            "gpus": [
                {"index": index, "uuid": gpu(index), "name": "A100", "temperature.gpu": 40 + index, "fan.speed": None}
                | {"power.draw": 300 + turn, "memory.used": 4000, "enforced.power.limit": 400, "processes": []}
                for index in (0, 1)
            ],
        }
        for turn in range(3)
    ]
    path = tmp_path / "gpustat.json"
    before, between, after = ends
    path.write_text(before + between.join(json.dumps(report, indent=indent) for report in reports) + after)
    made = run_import(tmp_path, samples=[path], mapping=UTC_MAPPING)
    rows = all_samples(made)
    assert rows[["node", "gpu", "gpu_temp_c", "power_w", "fb_used_mib"]].values.tolist() == [
        ["node-0", gpu(index), 40 + index, 300 + turn, 4000] for index in (0, 1) for turn in range(3)
    ]
    assert made.quarantined == {}


SMI = "#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk     fb  sbecc    pci  rxpci  bar1\n"
UNITS = (
    "#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %    MHz    MHz     MB   errs   errs   MB/s    MB\n"
)
ROW = " {}    {}      {}    {}     {}      -     98      5   1593   1410   1024      0      3     12     2\n"
DCGM = "#Entity   TMPTR   POWER   GPUTL   SMACT   FBUSD   XIDER   FP64A\n"
DMON_RULES = "timezone: UTC\nsamples: {constants: {node: node-0}}\n"
TURNS = [(f"2026-03-01 00:{turn}0:00", index, 300 + turn, 50 + index) for turn in range(6) for index in (0, 1)]


def smi_table() -> str:
    rows = [ROW.format("20260301", time[11:], index, power, temp) for time, index, power, temp in TURNS]
    return "".join(SMI + UNITS + "".join(rows[start : start + 4]) for start in range(0, len(rows), 4))


def dcgmi_table(stamp: str = "{} ") -> str:
    lines = [stamp.format(TURNS[0][0]) + DCGM, stamp.format(TURNS[0][0]) + "ID\n"]
    for number, (time, index, power, temp) in enumerate(TURNS):
        lines += [stamp.format(time) + DCGM] if number == 6 else []
        lines.append(f"{stamp.format(time)}GPU {index}     {temp}   {power}.000   98   0.875   1024   0   N/A\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dmon.log", smi_table()),
        ("dmon.csv", "\n".join(", ".join(line.split()) for line in smi_table().splitlines())),
        ("dmon", dcgmi_table()),
        ("dmon.txt", dcgmi_table("[{}Z] ")),
        ("dmon.txt", "Waiting for the host engine\n" + dcgmi_table("{}+00:00 ") + "GPU-I 0  1  2  3  4  5  6  7\n"),
    ],
)
def test_a_table_of_dmon_is_of_the_gpus_that_the_inventory_has_there(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match="missing column 'node'"):
        run_import(tmp_path, samples=[path], mapping="timezone: UTC\n")
    result = run_import(tmp_path, samples=[path], inventory=inventory_frame(), mapping=DMON_RULES)
    rows = all_samples(result).sort_values(["gpu", "timestamp"])
    assert rows["gpu"].tolist() == [gpu(0)] * 6 + [gpu(1)] * 6
    assert rows["timestamp"].dt.strftime("%F %T").tolist() == [time for time, *_ in TURNS[::2]] * 2
    assert rows["gpu_temp_c"].tolist() == [50] * 6 + [51] * 6
    assert rows["power_w"].tolist() == [*range(300, 306)] * 2
    assert (rows["gpu_util_pct"].unique().tolist(), rows["fb_used_mib"].unique().tolist()) == ([98], [1024])
    if "sm_clock_mhz" in rows:
        assert rows[["sm_clock_mhz", "mem_clock_mhz"]].drop_duplicates().to_numpy().tolist() == [[1410, 1593]]
        assert rows[["pcie_rx_bytes_s", "pcie_replay_total"]].drop_duplicates().to_numpy().tolist() == [[12e6, 3]]
    else:
        assert rows[["sm_active_ratio", "xid_last"]].drop_duplicates().to_numpy().tolist() == [[0.875, 0]]
    account = result.accounting.tables["samples"]
    assert (result.quarantined, account.unaccounted, account.used) == ({}, 0, 12)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (smi_table().replace("#Date       Time  ", "#").replace("20260301   ", ""), "no date"),
        ("# gpu    pwr  gtemp\n# Idx      W      C\n    0     70     48\n", "no date and time"),
        ("#Time        gpu    pwr\n#HH:MM:SS    Idx      W\n 14:05:00      0     70\n", "no date"),
        (dcgmi_table(""), "no date and time"),
        (dcgmi_table() + "2026-03-01 01:00:00 #Entity   TMPTR\n", "columns change"),
        (dcgmi_table().replace("SMACT", "NEWXX"), "NEWXX"),
    ],
)
def test_a_table_of_dmon_that_cannot_be_placed_says_why(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "dmon.log"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        run_import(tmp_path, samples=[path], mapping=DMON_RULES)
    assert problem in str(error.value)


def test_what_is_no_row_of_a_table_of_dmon_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "dmon.log"
    path.write_text(
        dcgmi_table()
        + "2026-03-01 01:00:00 CPU 0 1 2 3 4 5 6 7\n2026-03-01 01:00:00 GPU 0 1 2\nError setting watches\n"
    )
    result = run_import(tmp_path, samples=[path], mapping=DMON_RULES, max_loss=1.0)
    account = result.accounting.tables["samples"]
    assert (account.read, account.used, account.unaccounted) == (16, 12, 0)
    assert result.quarantined == {"malformed row": 1}
