"""Inventories as spreadsheets and asset databases have them."""

from datetime import date
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import all_samples, gpu, inventory_frame, run_import, samples_frame, without_inventory


def imported(tmp_path: Path, **columns: list[str | None]):
    samples = samples_frame(gpus=1).drop(columns="node")
    return run_import(tmp_path, inventory=inventory_frame().assign(**columns), samples=samples).dataset.inventory()


def test_a_node_in_two_letter_cases_is_one(tmp_path: Path):
    assert imported(tmp_path, node=["node-0", "NODE-0", "node-1", "Node-1"])["node"].unique().tolist() == [
        "node-0",
        "node-1",
    ]


def test_nodes_with_gpus_in_one_slot_are_two_whatever_their_letter_case(tmp_path: Path):
    inventory = imported(tmp_path, node=["node-0", "node-0", "NODE-0", "NODE-0"])
    assert set(inventory["node"]) == {"node-0", "NODE-0"}
    assert inventory["removed_at"].isna().all()


def test_placeholders_become_serial_numbers_or_places(tmp_path: Path):
    inventory = imported(
        tmp_path,
        gpu=[gpu(0), "unknown", "GPU-00000000-0000-0000-0000-000000000000", "To be filled by O.E.M."],
        serial=["165", "1652", "0000000000000", None],
    )
    assert set(inventory["gpu"]) == {gpu(0), "1652", "node-1@00000000:10:00", "node-1@00000000:11:00"}


@pytest.mark.parametrize("name", ["pci", "PCI Address", "PCI Bus", "Bus-Id", "BDF", "bus_id", "location in the host"])
def test_events_that_name_an_address_find_their_gpu_whatever_the_inventory_calls_it(tmp_path: Path, name: str):
    inventory = inventory_frame().rename(columns={"pci_bus_id": name})
    addresses = inventory[name].tolist()
    log = tmp_path / "kern.log"
    log.write_text(
        f"2026-03-01T12:00:00+00:00 node-0 kernel: NVRM: Xid (PCI:{addresses[1].removesuffix('.0')}): 79, gone\n"
    )
    events = run_import(tmp_path, inventory=inventory, events=[log]).dataset.events()
    assert events["gpu"].tolist() == [inventory["gpu"][1]]


def test_columns_of_asset_databases_are_the_standard_ones_and_others_stay(tmp_path: Path):
    inventory = pd.DataFrame(
        {
            "Hostname": ["node-0"],
            "UUID": [gpu(0)],
            "Serial Number": ["1652921042"],
            "GPU Type": ["NVIDIA H100"],
            "Installation Date": ["2026-01-01"],
            "Decommissioned": ["2026-05-01"],
            "owner": ["ml-platform"],
        }
    )
    events = pd.DataFrame(
        {"timestamp": ["2026-03-01T00:00:00Z"], "node": "node-0", "type": "failure", "serial": "1652921042"}
    )
    dataset = run_import(tmp_path, inventory=inventory, events=events, mapping="timezone: UTC\n").dataset
    (row,) = dataset.inventory().to_dict("records")
    assert (row["serial"], row["model"], row["owner"]) == ("1652921042", "NVIDIA H100", "ml-platform")
    assert [row["installed_at"].date(), row["removed_at"].date()] == [date(2026, 1, 1), date(2026, 5, 1)]
    assert dataset.events()["gpu"].tolist() == [gpu(0)]


def test_a_standard_column_stays_what_it_is_beside_another_name_of_it(tmp_path: Path):
    inventory = run_import(
        tmp_path, inventory=inventory_frame().assign(product="DGX"), samples=samples_frame(gpus=1)
    ).dataset.inventory()
    assert set(inventory["product"]) == {"DGX"}
    assert "DGX" not in set(inventory["model"])


def test_a_column_is_decided_on_once_for_all_files_of_an_inventory(tmp_path: Path):
    """The first file that has values decides what a column is; numbers in one file are text where another has words."""
    folder = tmp_path / "inventory"
    folder.mkdir()
    whole = inventory_frame(6).drop(columns="pci_bus_id")
    places = ["0000:10:00.0", "00000000:11:00.0", "unplugged", None, "spare 4", "0000:11:00"]
    whole = whole.assign(
        place=places, asset=["1001", "1002", "A-3", "1004", None, "7"], size=["1", "2", "3", "4", "5", "6"]
    )
    for number in range(3):
        whole[2 * number : 2 * number + 2].to_csv(folder / f"{number}.csv", index=False)
    inventory = run_import(tmp_path, inventory=folder, samples=samples_frame(gpus=1)).dataset.inventory()
    assert "place" not in inventory
    assert inventory["pci_bus_id"].fillna("").tolist() == [
        *("00000000:10:00", "00000000:11:00", "unplugged", "", "spare 4", "00000000:11:00")
    ]
    assert inventory["asset"].fillna("").tolist() == ["1001", "1002", "A-3", "1004", "", "7"]
    assert inventory["size"].tolist() == [1, 2, 3, 4, 5, 6]


def test_an_inventory_of_nodes_does_not_make_one_series_of_the_gpus_of_a_node(tmp_path: Path) -> None:
    nodes = pd.DataFrame({"node": ["node-0", "node-1"], "rack": ["r1", "r2"]})
    with pytest.raises(InputError, match="name GPUs"):
        run_import(tmp_path, samples=samples_frame(), inventory=nodes)
    one_each = samples_frame(gpus=2, per_node=1)
    mapping = "samples: {columns: {gpu: null}}\n"
    result = run_import(tmp_path, samples=one_each, inventory=nodes, mapping=mapping)
    assert (result.dataset.meta.unit, len(all_samples(result)), result.quarantined) == ("node", 12, {})


@pytest.mark.parametrize("column", ["serial", "gpu_serial", "SerialNumber"])
def test_samples_of_gpus_that_only_serial_numbers_tell_apart_are_not_one_series(tmp_path: Path, column: str) -> None:
    samples = samples_frame().rename(columns={"gpu": column})
    with pytest.raises(InputError, match="serial number"):
        without_inventory(tmp_path, samples)
    (tmp_path / "mapping.yaml").write_text(f"samples: {{columns: {{{column}: gpu}}}}\n")
    result = without_inventory(tmp_path, samples, mapping=tmp_path / "mapping.yaml")
    assert sorted(result.dataset.inventory()["gpu"]) == sorted(samples[column].unique())
