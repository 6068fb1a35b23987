"""Files as somebody has them who never heard of predrain: at most one round of questions, all asked at once."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

from foundation.errors import InputError
from foundation.yaml import overlaid, read_yaml
from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.mapping import load_mapping
from telemetry.importing.suggestion.questions import Inquiry, find_questions, refuse_open
from tests.telemetry.helpers import all_samples, gpu, run_import

GWDG = Path(__file__).parents[3].parent / "shared/data/gwdg"


def suggested(folder: Path, given: dict[str, list[Path]]) -> str:
    """Return the mapping file that is suggested, unchanged."""
    text = Inquiry(given, None, *find_questions(given, load_mapping(None), CATALOGUE)).mapping_text()
    (folder / "suggested.yaml").write_text(text)
    return text


def test_zones_orders_and_columns_of_all_tables_are_asked_at_once(tmp_path: Path) -> None:
    (tmp_path / "smi.csv").write_text(f"timestamp,uuid,power.draw [W],odd\n2026/03/01 00:00:00,{gpu(0)},300 W,1\n")
    (tmp_path / "tickets.csv").write_text("Opened,Host,Work\n03/04/2026 10:00,node-0,repair\n")
    given = {"samples": [tmp_path / "smi.csv"], "events": [tmp_path / "tickets.csv"]}
    with pytest.raises(InputError) as caught:
        refuse_open(given, load_mapping(None), CATALOGUE)
    for text in ("'odd'", "smi.csv", "2026/03/01 00:00:00", "03/04/2026 10:00", "timezone:", "order: dmy"):
        assert text in str(caught.value)


TURNS = [(f"2026-03-01T00:{turn}0:00Z", index, 50 + turn + 10 * index) for turn in range(6) for index in (0, 1)]


def lines(header: str, row: str) -> str:
    rows = [
        row.format(time=time, date=time[:10], clock=time[11:19], index=index, gpu=gpu(index), temp=temp)
        for time, index, temp in TURNS
    ]
    return "\n".join([header, *rows] if header else rows) + "\n"


EXPORTS = {
    "amd-smi.csv": lines(
        "timestamp,gpu,gfx_activity,umc_activity,socket_power,gfx_voltage,throttle_status,gfx_0_clk,edge,hotspot",
        "{time},{index},90,5,300,N/A,UNTHROTTLED,1300,N/A,{temp}",
    ),
    "amd-smi.jsonl": lines(
        "",
        '{{"timestamp": "{time}", "gpu": {index}, "power": {{"socket_power": {{"value": 300, "unit": "W"}}}}, '
        '"temperature": {{"edge": "N/A", "hotspot": {{"value": {temp}, "unit": "C"}}}}}}',
    ),
    "rocm-smi.csv": lines(
        "device,Temperature (Sensor edge) (C),Temperature (Sensor junction) (C),Average Graphics Package Power (W),"
        "Unique ID,time",
        "card{index},30,{temp},300.0,{gpu},{time}",
    ),
    # https://docs.habana.ai/en/latest/Management_and_Monitoring/Embedded_System_Tools_Guide/System_Management_Interface_Tool.html
    # https://intel.github.io/xpumanager/smi_user_guide.html
    "xpu-smi.csv": lines(
        "Timestamp, DeviceId, GPU Utilization (%), GPU Power (W), GPU Core Temperature (Celsius Degree), "
        "GPU Memory Temperature (Celsius Degree), GPU Frequency (MHz)",
        "{time}, {index}, 90.00, 300.00, {temp}.00, 40.00, 1550",
    ),
    "rocm-smi.jsonl": lines(
        "",
        '{{"time": "{time}", "card{index}": {{"Temperature (Sensor junction) (C)": "{temp}.0", "Unique ID": "{gpu}", '
        '"Average Graphics Package Power (W)": "300.0"}}}}',
    ),
    "devices.jsonl": lines(
        "",
        '{{"ts": "{time}", "hostname": "node-0", '
        '"devices": [{{"uuid": "{gpu}", "temperature": {temp}, "power_mw": 300000}}]}}',
    ),
    "mixed-devices.jsonl": lines(  # NetBox, Redfish and scripts list network cards, disks and processors as well
        "",
        '{{"time": "{time}", "hostname": "node-0", "devices": ['
        '{{"type": "NIC", "name": "mlx5_0", "temperature_c": 99}}, {{"name": "nvme0n1", "temperature_c": 40}}, '
        '{{"model": "ConnectX-7", "pci_bus_id": "0000:20:00.0"}}, {{"type": "CPU", "serial": "1", "power_w": 9}}, '
        '{{"type": "gpu", "uuid": "{gpu}", "temperature_c": {temp}, "power_w": 300}}]}}',
    ),
    "other-devices.jsonl": lines(
        "",
        '{{"time": "{time}", "hostname": "node-0", "uuid": "{gpu}", "temperature_c": {temp}, "power_w": 300, '
        '"devices": [{{"name": "mlx5_0", "temperature_c": 99}}, {{"class": "storage", "power_w": 9}}]}}',
    ),
    "nested-gpus.jsonl": lines(
        "",
        '{{"time": "{time}", "host": {{"name": "node-0", "gpus": [{{"uuid": "{gpu}", "temperature_c": {temp}, '
        '"power_w": 300}}]}}}}',
    ),
    "nodes.jsonl": lines(
        "",
        '{{"time": "{time}", "nodes": [{{"hostname": "node-0", "gpus": [{{"uuid": "{gpu}", "temperature_c": {temp}, '
        '"power_w": 300}}]}}]}}',
    ),
    "gpus-by-index.jsonl": lines(
        "",
        '{{"time": "{time}", "hostname": "node-0", "gpus": {{"{index}": {{"uuid": "{gpu}", "temperature_c": {temp}, '
        '"power_w": 300}}}}}}',
    ),
    "german.csv": lines(
        "time;Host;uuid;Temperatur [°C];Leistung [W]", "{time};node-0;{gpu};{temp},0;300,0"
    ),
    "limits.csv": lines(  # the most that the device can do, before what it does
        "time,host,uuid,max_power_w,max_temperature_c,temperature_c,power_w", "{time},node-0,{gpu},700,90,{temp},300"
    ),
    "titled.csv": lines(
        "GPU report\nGenerated by hand\n\nTime;Host;uuid;Temperatur [°C];Power [W]", "{time};node-0;{gpu};{temp};300"
    ),
    "telegraf.jsonl": lines(
        "",
        '{{"name": "nvidia_smi", "tags": {{"host": "node-0", "uuid": "{gpu}", "pstate": "P0"}}, '
        '"fields": {{"temperature_gpu": {temp}, "power_draw": 300}}, "timestamp": "{time}"}}',
    ),
    "cron.csv": lines(
        "timestamp, host, index, temperature.gpu, power.draw [W]", "{time}, node-0, {index}, {temp}, 300 W"
    ),
    "sheet.csv": lines("Date,Time,Host,uuid,temp,power", "{date},{clock},node-0,{gpu},{temp},300.0"),
    "long.csv": lines("time,host,gpu_uuid,metric,value", "{time},node-0,{gpu},gpu.temperature,{temp}\n"
                      "{time},node-0,{gpu},gpu.power.usage,300"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_of_other_tools_import_by_what_is_suggested(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(EXPORTS[name])
    text = suggested(tmp_path, {"samples": [tmp_path / name]})
    if "node-0" not in EXPORTS[name]:  # a table of one node does not name it
        text = yaml.safe_dump(overlaid(read_yaml(text) or {}, {"samples": {"constants": {"node": "node-0"}}}))
    result = run_import(tmp_path, samples=[tmp_path / name], mapping=text)
    rows = all_samples(result)
    assert rows["timestamp"].dt.strftime("%FT%TZ").tolist() == [time for time, *_ in TURNS[::2]] * 2
    assert rows["gpu"].tolist() == [gpu(0)] * 6 + [gpu(1)] * 6
    assert rows["gpu_temp_c"].tolist() == [*range(50, 56), *range(60, 66)]
    assert rows["power_w"].tolist() == [300] * 12
    assert not result.quarantined


@pytest.mark.skipif(not GWDG.is_dir(), reason="the published telemetry of GWDG is absent")
def test_published_telemetry_and_tickets_import_by_what_is_suggested(tmp_path: Path) -> None:
    frame = pd.read_parquet(GWDG / "dcgm_wide.parquet")
    keys = ("t", "node", "uuid", "gpu", "driverVersion")
    renamed = frame.rename(columns={name: f"DCGM_FI_DEV_{name}" for name in frame if name not in keys})
    renamed.to_parquet(tmp_path / "dcgm.parquet")
    tickets = GWDG / "incident_events.csv"
    installations = frame.groupby(["uuid", "node"], as_index=False)["t"].min()
    others = sorted(set(pd.read_csv(tickets)["node"]) - set(installations["node"]))
    inventory = pd.DataFrame(
        {
            "gpu": [*installations["uuid"], *(f"other-{number}" for number in range(len(others)))],
            "node": [*installations["node"], *others],
            "installed_at": "2025-01-01T00:00:00Z",
        }
    )
    text = suggested(tmp_path, {"samples": [tmp_path / "dcgm.parquet"], "events": [tickets]})
    assert text.splitlines().count("timezone: UTC") == 1
    result = run_import(
        tmp_path, samples=[tmp_path / "dcgm.parquet"], events=[tickets], inventory=inventory, mapping=text
    )
    events = result.dataset.events()
    lost = events[(events["type"] == "xid") & (events["code"] == "79")]
    assert len(lost) == 44
    assert len(lost.drop_duplicates(["node", "timestamp"])) == 14
    assert (events["source"] == "incident_events.csv").sum() == 69
    assert result.dataset.meta.counts["samples"] == len(frame)
