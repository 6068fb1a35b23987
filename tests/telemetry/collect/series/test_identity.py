"""What a series is, by its metric name and labels, and by the mapping file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from telemetry.collect.series.identity import Series, SeriesCatalogue
from telemetry.collect.series.mapping import DEFAULT_LABELS, SourceMapping, load_source_mapping
from telemetry.config import ChannelDeclaration
from telemetry.dataset.channels import CATALOGUE, resolve_channels

OLD = {
    "gpu": "3",
    "UUID": "GPU-a",
    "pci_bus_id": "00000000:31:00.0",
    "modelName": "NVIDIA L4",
    "Hostname": "n1",
    "DCGM_FI_DRIVER_VERSION": "580.1",
    "pod": "train-0",
}


def series(name: str, labels: dict[str, str], mapping: Mapping[str, object] | None = None, **more: str) -> Any:
    catalogue = SeriesCatalogue(CATALOGUE, SourceMapping.model_validate(mapping or {}), **more)
    catalogue.observe((labels,))
    return catalogue.identify(name, labels)


def test_a_series_of_the_old_exporter_tells_channel_device_and_inventory() -> None:
    identified = series("DCGM_FI_DEV_GPU_TEMP", OLD)
    assert (identified.channel, identified.kind, identified.gpu, identified.node) == (
        "gpu_temp_c",
        "gauge",
        "GPU-a",
        "n1",
    )
    assert dict(identified.inventory) == {
        "slot": "3",
        "pci_bus_id": "00000000:31:00",
        "model": "NVIDIA L4",
        "driver": "580.1",
    }


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"exported_hostname": "n1", "hostname": "monitor"}, "n1"),
        ({"instance": "n1.example.org:9400"}, "n1.example.org"),
        ({"exported_instance": "n1:9400", "instance": "gateway:9091"}, "n1"),
        ({"instance": "[fe80::1]:9400"}, "fe80::1"),
        ({"instance": "10.0.0.7:9400"}, "10.0.0.7"),
        ({"Hostname": "n1", "instance": "10.0.0.7:9400"}, "n1"),
        ({"Hostname": "", "instance": "n2:1"}, "n2"),
    ],
)
def test_the_node_is_the_exporters_own_label_before_the_scrapes(labels: dict[str, str], node: str) -> None:
    assert series("DCGM_FI_DEV_GPU_TEMP", {"UUID": "GPU-a", **labels}).node == node


NVITOP = {"hostname": "10.0.0.5", "index": "3", "devicename": "H100", "uuid": "GPU-a"}
ALL_SMI = {"gpu": "NVIDIA H200 141GB HBM3", "instance": "n1", "uuid": "GPU-a", "index": "3"}


def test_links_and_mig_instances_are_parts_and_rows_of_their_own() -> None:
    link = {"nvlink": "2", "gpu_uuid": "GPU-a", "model_name": "H100", "hostname": "n1", "gpu": "0"}
    identified = series("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", link)
    assert (identified.channel, identified.part, identified.mig_instance) == ("nvlink_replay_total", "2", None)
    field = series("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L5", OLD)
    assert (field.channel, field.part) == ("nvlink_crc_flit_total", "5")
    mig = OLD | {"GPU_I_ID": "0", "GPU_I_PROFILE": "1g.10gb"}
    assert series("DCGM_FI_DEV_GPU_TEMP", mig).mig_instance == "0"


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("gpu_temperature_C", NVITOP, ("gpu_temp_c", 1.0, "10.0.0.5")),
        ("gpu_utilization_Percentage", NVITOP, ("gpu_util_pct", 1.0, "10.0.0.5")),
        ("gpu_pcie_rx_throughput_MiBps", NVITOP, ("pcie_rx_bytes_s", 2.0**20, "10.0.0.5")),
        ("all_smi_gpu_temperature_celsius", ALL_SMI, ("gpu_temp_c", 1.0, "n1")),
        ("all_smi_gpu_memory_used_bytes", ALL_SMI, ("fb_used_mib", 2.0**-20, "n1")),
    ],
)
def test_series_of_other_exporters_have_unit_and_slot(name: str, labels: dict, expected: tuple) -> None:
    identified = series(name, labels)
    assert (identified.channel, identified.scale, identified.node) == expected
    assert (identified.gpu, dict(identified.inventory)["slot"]) == ("GPU-a", "3")


def test_amd_series_are_known_by_uuid_or_serial_and_their_clocks_are_distinguished() -> None:
    amd = {"hostname": "m1", "gpu_id": "1", "gpu_partition_id": "0", "serial_number": "PCB1", "card_series": "MI300X"}
    identified = series("gpu_edge_temperature", amd)
    assert (identified.channel, identified.gpu, identified.mig_instance) == ("gpu_temp_c", "PCB1", None)
    assert dict(identified.inventory) == {"slot": "1", "serial": "PCB1", "model": "MI300X"}
    assert series("gpu_edge_temperature", amd | {"gpu_uuid": "u"}).gpu == "u"
    assert series("gpu_edge_temperature", amd | {"gpu_partition_id": "3"}).mig_instance == "3"
    assert series("gpu_junction_temperature", amd).rank < identified.rank
    system, memory, video = (
        series("gpu_clock", amd | {"clock_type": f"GPU_CLOCK_TYPE_{kind}", "clock_index": "1"})
        for kind in ("SYSTEM", "MEMORY", "VIDEO")
    )
    assert (system.channel, memory.channel, video) == ("sm_clock_mhz", "mem_clock_mhz", None)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("node_load1", OLD),
        ("DCGM_FI_DEV_GPU_TEMP", {"Hostname": "n1"}),
        ("DCGM_FI_DEV_GPU_TEMP", {"UUID": "GPU-a"}),
        ("DCGM_FI_DEV_GPU_TEMP", {"UUID": "N/A", "Hostname": "n1"}),
        ("DCGM_EXP_XID_ERRORS_COUNT", OLD),
        ("DCGM_EXP_XID_ERRORS_COUNT", OLD | {"xid": "none"}),
    ],
)
def test_what_is_no_channel_is_none(name: str, labels: dict[str, str]) -> None:
    assert series(name, labels) is None


def test_mapped_metrics_labels_and_factors() -> None:
    mapping = {
        "metrics": {"job:temp": "150", "acme_mw": "DCGM_FI_DEV_POWER_USAGE"},
        "scale": {"power_w": 0.001},
        "labels": {"node": "box", "gpu": ["card"]},
    }
    labels = {"box": "b", "card": "c", "Hostname": "not asked"}
    assert series("job:temp", labels, mapping).channel == "gpu_temp_c"
    identified = series("acme_mw", labels, mapping)
    assert (identified.channel, identified.scale, identified.node, identified.gpu) == ("power_w", 0.001, "b", "c")


def test_a_declared_channel_is_known_by_its_own_name_and_a_counter_also_with_total() -> None:
    channels = resolve_channels({"flaps": ChannelDeclaration(kind="counter")})
    catalogue = SeriesCatalogue(channels)
    catalogue.observe((OLD,))
    for name in ("flaps", "flaps_total", "exported_flaps"):
        identified = catalogue.identify(name, OLD)
        assert (identified.channel if isinstance(identified, Series) else None) == (None if "exp" in name else "flaps")
    names = catalogue.metric_names()
    assert names["DCGM_FI_DEV_XID_ERROR"] == names["DCGM_FI_DEV_XID_ERRORS"] == "xid_last"
    assert names["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total"] == "energy_mj"
    assert names["power_w_max"] == "power_w_max"
    assert not any(name.isdigit() for name in names)


def test_a_channel_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'gpu_tmp_c' .*metrics\.m\)\. Did you mean 'gpu_temp_c'\?.*`channels:`"):
        SeriesCatalogue(CATALOGUE, SourceMapping(metrics={"m": "gpu_tmp_c"}))


def test_a_gpu_that_is_known_follows_a_new_choice_of_the_nodes_label() -> None:
    catalogue = SeriesCatalogue(CATALOGUE)
    looks = [{"UUID": "GPU-a", "Hostname": f"n{number}", "instance": "10.0.0.1:9400"} for number in range(5)]
    nodes = []
    for labels in looks:
        catalogue.observe((labels,))
        identified = catalogue.identify("DCGM_FI_DEV_GPU_TEMP", looks[0])
        nodes.append(identified.node)
    assert (nodes[0], nodes[-1]) == ("n0", "10.0.0.1"), "a host name that changes while the GPU stays is none"


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_source_mapping(path)
    return str(error.value).replace(str(tmp_path), "")


def test_given_labels_replace_and_others_keep_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("labels: {gpu: [card, board], rack: location}\n")
    mapping = load_source_mapping(tmp_path / "m.yaml")
    assert mapping.label_names("gpu") == ("card", "board")
    assert mapping.label_names("rack") == ("location",)
    assert mapping.label_names("node") == DEFAULT_LABELS["node"]


def test_refusals_say_what_where_and_what_to_do(tmp_path: Path) -> None:
    assert refusal(tmp_path, "metric: {}").endswith("(/m.yaml, metric). Did you mean 'metrics'?")
    assert "labels cannot hold 'gpus'. Did you mean 'gpu'?" in refusal(tmp_path, "labels: {gpus: [a]}")
    assert "the factor of 'power_w' is 0.0: write a number other than 0" in refusal(tmp_path, "scale: {power_w: 0}")
    assert "is not valid YAML" in refusal(tmp_path, "metrics: {")
    with pytest.raises(InputError, match="the mapping file does not exist"):
        load_source_mapping(tmp_path / "none.yaml")
