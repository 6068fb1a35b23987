"""Tickets that name a GPU by slot or index: it is the GPU that samples showed there at that time, or none."""

from pathlib import Path

import pandas as pd
import pytest

from telemetry.importing.slots import ObservedSlots
from telemetry.importing.tickets import UNKNOWN_GPU
from tests.telemetry.helpers import (
    DAY,
    STEP,
    all_samples,
    gpu,
    inventory_frame,
    run_import,
    samples_frame,
    without_inventory,
)

LOST, AFTER = 12, 40
"""Step at which GPU 1 is lost, and steps of the samples."""


def renumbered() -> pd.DataFrame:
    """Four GPUs of one node; GPU 1 is lost, and GPUs 2 and 3 have the indices 1 and 2 from the next step on."""
    frame = samples_frame(4, times=AFTER, per_node=4)
    turn = (pd.to_datetime(frame["timestamp"]) - DAY) // STEP
    number = frame["gpu"].map({gpu(place): place for place in range(4)})
    frame["index"] = number - ((turn >= LOST) & (number > 1))
    return frame[(turn < LOST) | (number != 1)]


def placed(tmp_path: Path, *rows: tuple[float, str], samples: pd.DataFrame | None = None, inventory=None, **more):
    """Import tickets at steps of the samples that name an index; return the GPUs of the events, and the result."""
    tickets = pd.DataFrame(rows, columns=["turn", "slot"]).assign(node="node-0", type="failure")
    tickets["timestamp"] = [(DAY + turn * STEP).isoformat() for turn in tickets.pop("turn")]
    samples = renumbered() if samples is None else samples
    result = run_import(tmp_path, samples=samples, events=tickets, inventory=inventory, **more)
    gpus = result.dataset.events().sort_values("timestamp")["gpu"]
    return gpus.astype(object).where(gpus.notna(), None).tolist(), result


@pytest.fixture
def without_slots() -> pd.DataFrame:
    return inventory_frame(4, per_node=4).drop(columns=["slot", "pci_bus_id"])


def test_an_index_is_the_gpu_that_had_it_at_the_time_of_the_ticket(tmp_path: Path, without_slots: pd.DataFrame):
    before, after = LOST - 2, LOST + 2
    rows = [(before, "1"), (before + 0.1, "GPU 2"), (after, "1"), (after + 0.1, "slot 2"), (after + 0.2, "3")]
    gpus, result = placed(tmp_path, *rows, inventory=without_slots)
    assert gpus == [gpu(1), gpu(2), gpu(2), gpu(3), None]
    assert result.counts[UNKNOWN_GPU] == 1


def test_between_two_numberings_and_long_after_the_last_sample_an_index_is_of_the_node(tmp_path, without_slots):
    gap = LOST - 0.5
    gpus, result = placed(tmp_path, (gap, "0"), (gap + 0.1, "1"), (AFTER + 3 * 144, "0"), inventory=without_slots)
    assert gpus == [gpu(0), None, None]
    assert result.counts[UNKNOWN_GPU] == 2


def test_where_inventory_and_samples_number_otherwise_an_index_is_of_the_node(tmp_path: Path):
    inventory = inventory_frame(4, per_node=4)
    rows = [(LOST - 2, "2"), (LOST - 0.5, "1"), (LOST + 2, "2"), (LOST + 2.1, "0")]
    gpus, _ = placed(tmp_path, *rows, inventory=inventory)
    assert gpus == [gpu(2), None, None, gpu(0)]


@pytest.mark.parametrize("is_renumbered", [True, False])
def test_addresses_and_constant_slots_of_samples_complete_the_inventory(tmp_path, without_slots, is_renumbered):
    samples = renumbered() if is_renumbered else samples_frame(4, per_node=4)
    if not is_renumbered:
        samples["index"] = samples["gpu"].map({gpu(place): place for place in range(4)})
    samples["pci_bus_id"] = samples["gpu"].map({gpu(place): f"00000000:{0x10 + place:02X}:00.0" for place in range(4)})
    _, result = placed(tmp_path, (1, "0"), samples=samples, inventory=without_slots)
    inventory = result.dataset.inventory().set_index("gpu")
    assert inventory["pci_bus_id"].tolist() == [f"00000000:{0x10 + place:02x}:00" for place in range(4)]
    assert inventory["slot"].fillna("").tolist() == ([""] * 4 if is_renumbered else ["0", "1", "2", "3"])


@pytest.mark.parametrize("form", ["{}", "cuda:{}", "/dev/nvidia{}", "GPU{}", "{}.0"])
def test_an_index_in_the_column_of_the_gpu_is_no_identity(tmp_path: Path, form: str):
    frame = samples_frame(4)
    frame["gpu"] = frame["gpu"].map({gpu(place): form.format(place % 2) for place in range(4)})
    rows = all_samples(run_import(tmp_path, samples=frame))
    assert rows.groupby("gpu")["gpu_temp_c"].min().to_dict() == {gpu(place): 40 + place for place in range(4)}


@pytest.mark.parametrize("column", ["index", "gpu", "slot", "pci.bus_id"])
@pytest.mark.parametrize("has_inventory", [True, False])
def test_samples_without_an_identity_are_of_the_gpu_in_their_place(tmp_path: Path, column: str, has_inventory: bool):
    frame = samples_frame(4)
    number = frame["gpu"].map({gpu(place): place % 2 for place in range(4)})
    places = number.astype(str) if column != "pci.bus_id" else number.map({0: "0000:10:00.0", 1: "0000:11:00.0"})
    frame = frame.drop(columns="gpu").assign(**{column: places})
    result = run_import(tmp_path, samples=frame) if has_inventory else without_inventory(tmp_path, frame)
    form = "node-{}@00000000:1{}:00" if column == "pci.bus_id" else "node-{}@slot-{}"
    names = [gpu(place) if has_inventory else form.format(place // 2, place % 2) for place in range(4)]
    rows = all_samples(result)
    assert rows.groupby("gpu")["gpu_temp_c"].min().to_dict() == {name: 40 + n for n, name in enumerate(names)}
    assert rows.groupby("gpu").size().tolist() == [6] * 4
    assert rows["node"].tolist() == ["node-0"] * 12 + ["node-1"] * 12


@pytest.mark.parametrize(
    ("named", "expected"),
    [(["1", "4"], [None, None]), (["GPU 2", "GPU 4"], [None, None]), (["0", "4"], [0, None]), (["1", "3"], [1, 3])],
)
def test_slots_of_a_table_that_counts_from_one_are_of_the_node(tmp_path: Path, named: list[str], expected: list):
    rows = [(turn, name) for turn, name in enumerate(named, 1)]
    gpus, result = placed(tmp_path, *rows, samples=samples_frame(4, per_node=4), inventory=inventory_frame(4, 4))
    assert gpus == [None if number is None else gpu(number) for number in expected]
    assert result.counts.get(UNKNOWN_GPU, 0) == expected.count(None)


def test_a_gpu_that_was_in_another_slot_in_between_is_not_guessed():
    runs = [("a", "2", 0, 10), ("a", "1", 20, 30), ("a", "2", 40, 50), ("b", "3", 0, 10), ("b", "3", 40, 50)]
    frame = pd.DataFrame(runs, columns=["gpu", "slot", "first_ms", "last_ms"]).assign(node="n")
    slots = ObservedSlots(frame)
    assert [slots.find("n", "2", ms) for ms in (5, 15, 25, 45)] == ["a", None, None, "a"]
    assert slots.find("n", "3", 25) == "b"
