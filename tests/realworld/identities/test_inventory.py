"""Inventories as spreadsheets and asset databases have them."""

from __future__ import annotations

from pathlib import Path

from tests.telemetry.helpers import gpu, inventory_frame, run_import, samples_frame


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
