"""Labels of series as clusters have them: the right nodes in the dataset."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from telemetry.accounting import Accounting
from telemetry.collect.openmetrics import stage_dump
from telemetry.collect.series.identity import NODE_LABEL_STATE, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.config import TelemetrySection
from telemetry.dataset.channels import CATALOGUE
from telemetry.staging.compaction import CompactSettings, compact
from telemetry.staging.folder import StagingFolder, staging_of

START_S = 1_793_491_200  # 2026-11-01
NOW = datetime(2026, 11, 2, tzinfo=UTC)
HOURS = 6


def uuid(node: int, gpu: int) -> str:
    return f"GPU-0000000{node}-0000-4000-8000-00000000000{gpu}"


def dump(path: Path, label_sets: dict[int, list[dict[str, str]]], gpus: int = 2) -> Path:
    """Write a dump of nodes; each node's label sets follow each other in equal parts of the time."""
    lines = []
    for node, sets in label_sets.items():
        for part, labels in enumerate(sets):
            for gpu in range(gpus):
                device = {"gpu": str(gpu), "UUID": uuid(node, gpu), "pci_bus_id": f"00000000:{0x10 + gpu:02X}:00.0"}
                text = ",".join(f'{name}="{value}"' for name, value in {**device, **labels}.items())
                first, last = (HOURS * 3600 * part // len(sets), HOURS * 3600 * (part + 1) // len(sets))
                lines += [
                    f"DCGM_FI_DEV_GPU_TEMP{{{text}}} {50 + gpu} {START_S + second}"
                    for second in range(first, last, 300)
                ]
    path.write_text("\n".join([*lines, "# EOF", ""]))
    return path


def collect(tmp_path: Path, *files: Path, mapping: SourceMapping | None = None) -> pd.DataFrame:
    """Stage dumps, each in a run of its own, compact them and return the inventory."""
    dataset = tmp_path / "fleet"
    for file in files:
        staging = StagingFolder(staging_of(dataset), writer="openmetrics", channels=CATALOGUE)
        catalogue = SeriesCatalogue(CATALOGUE, mapping)
        catalogue.remember(staging.state(NODE_LABEL_STATE))
        stage_dump(file, staging, catalogue, accounting=Accounting())
    settings = CompactSettings(TelemetrySection(), CATALOGUE, timedelta(minutes=10), timedelta(minutes=10))
    compact(dataset, settings=settings, now=NOW)
    return pq.read_table(dataset / "inventory.parquet").to_pandas()


def places(inventory: pd.DataFrame) -> set[tuple[str, str]]:
    return set(zip(inventory["node"], inventory["gpu"], strict=True))


POD = "nvidia-dcgm-exporter-{}"
RIGHT = {(f"gpu-{node}", uuid(node, gpu)) for node in (1, 2) for gpu in range(2)}


def rollout(**node_label: str) -> dict[int, list[dict[str, str]]]:
    pods = {1: ("7x2kd", "q9z8w"), 2: ("h4m5t", "b6c7d")}
    return {
        node: [
            {"Hostname": POD.format(pod), "pod": POD.format(pod), "instance": f"10.0.{node}.{part}:9400"}
            | {name: value.format(node) for name, value in node_label.items()}
            for part, pod in enumerate(names)
        ]
        for node, names in pods.items()
    }


@pytest.mark.parametrize(
    "label_sets",
    [
        pytest.param(rollout(node="gpu-{}"), id="node by relabelling, DaemonSet rolled out"),
        pytest.param(rollout(exported_node="gpu-{}", node="monitoring"), id="exported_node without honor_labels"),
        pytest.param(
            {n: [{"Hostname": c * 12, "instance": f"gpu-{n}:9400"} for c in ("a1", "3f")] for n in (1, 2)},
            id="docker: one container after the other",
        ),
        pytest.param(rollout(kubernetes_node="gpu-{}"), id="kubernetes_node beside pods"),
        pytest.param(rollout(label_kubernetes_io_hostname="gpu-{}"), id="a label of the node"),
        pytest.param(
            {n: [{"Hostname": f"dcgm-{2 - n}", "node": f"gpu-{n}", "instance": f"10.42.{n}.7:9400"}] for n in (1, 2)},
            id="pods of a StatefulSet, numbered otherwise than the nodes",
        ),
        pytest.param(
            {n: [{"instance": "pushgateway:9091", "exported_instance": f"gpu-{n}:9400"}] for n in (1, 2)},
            id="exported_instance behind a gateway",
        ),
        pytest.param(
            {
                n: [
                    {"host_ip": f"10.0.0.{n}", "host_name": f"gpu-{n}", "instance": f"10.42.{n}.{p}:9400"}
                    for p in (7, 9)
                ]
                for n in (1, 2)
            },
            id="addresses of pods beside the host",
        ),
        pytest.param({n: [{"host": f"GPU-{n}"}, {"host": f"gpu-{n}"}][::-1] for n in (1, 2)}, id="letter case changes"),
        pytest.param({n: [{"nodeName": f"gpu-{n}", "instance": f"10.0.0.{n}:9400"}] for n in (1, 2)}, id="camel case"),
        *(
            pytest.param({n: [{name: f"gpu-{n}", "Hostname": POD.format(f"x{n}k2d")}] for n in (1, 2)}, id=name)
            for name in ("NodeName", "instance_name", "oci_name", "server_name")
        ),
        pytest.param({n: [{"vm_name": f"gpu-{n}", "instance": "localhost:9400"}] for n in (1, 2)}, id="name of a VM"),
        pytest.param(
            {n: [{"nodename": f"gpu-{n}"}, {"nodename": f"gpu-{n}.hpc.example.com"}] for n in (1, 2)},
            id="short name, then fully qualified",
        ),
    ],
)
def test_gpus_stay_on_their_nodes(tmp_path: Path, label_sets: dict[int, list[dict[str, str]]]):
    inventory = collect(tmp_path, dump(tmp_path / "a.om", label_sets))
    assert places(inventory) == RIGHT
    assert len(inventory) == len(RIGHT)
    assert inventory["removed_at"].isna().all()


def test_a_second_run_of_the_dataset_decides_alike(tmp_path: Path):
    first = dump(tmp_path / "a.om", {n: [{"host": f"gpu-{n}"}] for n in (1, 2)})
    later = {n: [{"host": f"gpu-{n}", "node": f"k8s-{n}"}] for n in (1, 2)}
    assert places(collect(tmp_path, first, dump(tmp_path / "b.om", later))) == RIGHT


def test_two_exporters_of_one_gpu_are_one_installation(tmp_path: Path):
    by_pod = {n: [{"Hostname": POD.format(f"zz9z{n}"), "instance": f"10.0.0.{n}:9400"}] for n in (1, 2)}
    lines = dump(tmp_path / "a.om", rollout(node="gpu-{}")).read_text().replace("# EOF\n", "")
    both = tmp_path / "both.om"
    both.write_text(dump(tmp_path / "b.om", by_pod).read_text().replace("# EOF\n", "") + lines + "# EOF\n")
    assert places(collect(tmp_path, both)) == RIGHT


@pytest.mark.parametrize("together", [True, False], ids=["in one compaction", "the later of two"])
def test_two_exporters_that_spell_a_uuid_differently_report_one_gpu(tmp_path: Path, together: bool):
    label_sets = {n: [{"Hostname": f"gpu-{n}"}] for n in (1, 2)}
    lines = dump(tmp_path / "dcgm.om", label_sets).read_text()
    bare = lines.replace("GPU-0", "0").replace("DCGM_FI_DEV_GPU_TEMP", "nvidia_smi_temperature_gpu")
    assert bare != lines
    (tmp_path / "smi.om").write_text(bare.replace("# EOF\n", "") + lines if together else bare)
    files = [tmp_path / "smi.om"] if together else [tmp_path / "dcgm.om", tmp_path / "smi.om"]
    for file in files:
        inventory = collect(tmp_path, file)
    assert places(inventory) == RIGHT


def test_a_placeholder_is_replaced_by_node_and_address(tmp_path: Path):
    zeros = "GPU-00000000-0000-0000-0000-000000000000"
    label_sets = {n: [{"Hostname": f"gpu-{n}", "UUID": zeros}] for n in (1, 2)}
    inventory = collect(tmp_path, dump(tmp_path / "a.om", label_sets))
    assert set(inventory["gpu"]) == {f"gpu-{n}@00000000:{0x10 + gpu:02x}:00" for n in (1, 2) for gpu in range(2)}


def test_the_mapping_decides_for_the_operator(tmp_path: Path):
    mapping = SourceMapping.model_validate({"labels": {"node": "site_name"}})
    label_sets = {n: [{"Hostname": f"n{n}", "site_name": f"gpu-{n}"}] for n in (1, 2)}
    assert places(collect(tmp_path, dump(tmp_path / "a.om", label_sets), mapping=mapping)) == RIGHT
