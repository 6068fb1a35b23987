"""Inventories that lag behind the telemetry, lack nodes, or are not there: samples that name GPU and node decide."""

from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.importing.ingest import ImportResult
from tests.telemetry import helpers
from tests.telemetry.helpers import DAY, STEP, all_samples, events_frame, run_import, without_inventory, write_csv


def gpu(number: int) -> str:
    """Name a GPU; number 0 of the helpers has the UUID of zeros, which names nothing without an inventory."""
    return helpers.gpu(number + 1)


def renamed(frame: pd.DataFrame) -> pd.DataFrame:
    names = {helpers.gpu(number): gpu(number) for number in range(9)}
    return frame.assign(gpu=frame["gpu"].map(names))


def samples_frame(gpus: int = 4, times: int = 6) -> pd.DataFrame:
    return renamed(helpers.samples_frame(gpus, times))


def inventory_frame(gpus: int = 4) -> pd.DataFrame:
    return renamed(helpers.inventory_frame(gpus))


def swapped() -> pd.DataFrame:
    """GPU 0 is on node-0 for 100 samples and on node-1 for 44."""
    frame = samples_frame(gpus=4, times=144)
    of_first = frame["gpu"] == gpu(0)
    rows = frame.index[of_first]
    frame.loc[rows[100:], "node"] = "node-1"
    return frame


def test_a_swap_that_the_inventory_dates_a_day_early_is_where_the_samples_show_it(tmp_path: Path) -> None:
    moves = pd.concat([inventory_frame(), inventory_frame(1).assign(node="node-1", slot="7")], ignore_index=True)
    dated = (DAY - pd.Timedelta(days=1)).isoformat()
    moves["removed_at"] = [dated, None, None, None, None]
    moves.loc[4, "installed_at"] = dated
    result = run_import(tmp_path, samples=swapped(), inventory=moves)
    samples = all_samples(result)
    assert result.quarantined == {}
    assert samples.loc[samples["gpu"] == gpu(0), "node"].value_counts().to_dict() == {"node-0": 100, "node-1": 44}
    installations = result.dataset.inventory().query(f"gpu == '{gpu(0)}'").sort_values("installed_at")
    assert installations["node"].tolist() == ["node-0", "node-1"]
    assert (
        installations["removed_at"].iloc[0] == installations["installed_at"].iloc[1] == DAY + 100 * pd.Timedelta(STEP)
    )
    assert installations["installed_at"].iloc[0] == pd.Timestamp("2026-01-01", tz="UTC")
    assert pd.isna(installations["removed_at"].iloc[1])
    assert installations["slot"].tolist() == ["0", "7"]
    assert any(gpu(0) in line and "node-0" in line for line in result.contradictions)


def test_a_move_that_the_inventory_does_not_know_becomes_one(tmp_path: Path) -> None:
    result = run_import(tmp_path, samples=swapped(), inventory=inventory_frame())
    installations = result.dataset.inventory().query(f"gpu == '{gpu(0)}'").sort_values("installed_at")
    assert installations["node"].tolist() == ["node-0", "node-1"]
    assert installations["model"].tolist() == ["H100", "H100"]
    assert result.accounting.tables["samples"].used == 4 * 144


def test_a_move_between_two_imports_ends_the_installation_of_the_stored_samples(tmp_path: Path) -> None:
    whole = swapped()
    first = whole["node"].eq("node-0") | whole["gpu"].ne(gpu(0))
    run_import(tmp_path, samples=whole[first], inventory=inventory_frame())
    second = write_csv(tmp_path / "second.csv", whole[~first])
    result = run_import(tmp_path, samples=[second], inventory=tmp_path / "inventory.csv")
    installations = result.dataset.inventory().query(f"gpu == '{gpu(0)}'").sort_values("installed_at")
    assert installations["node"].tolist() == ["node-0", "node-1"]
    assert (
        installations["removed_at"].iloc[0] == installations["installed_at"].iloc[1] == DAY + 100 * pd.Timedelta(STEP)
    )


def test_an_event_after_the_move_is_on_the_node_of_the_samples(tmp_path: Path) -> None:
    events = events_frame([("01:00", gpu(0), "xid", "79"), ("23:00", gpu(0), "xid", "48")])
    result = run_import(tmp_path, samples=swapped(), events=events, inventory=inventory_frame())
    assert dict(zip(result.dataset.events()["code"], result.dataset.events()["node"], strict=True)) == {
        "79": "node-0",
        "48": "node-1",
    }


def test_a_gpu_and_a_node_that_the_inventory_lacks_are_taken_from_the_samples(tmp_path: Path) -> None:
    result = run_import(tmp_path, samples=samples_frame(gpus=6), inventory=inventory_frame(4))
    installations = result.dataset.inventory().set_index("gpu")
    assert installations.loc[gpu(5), "node"] == "node-2"
    assert result.accounting.tables["samples"].used == 36
    assert "node node-2: not in the inventory" in result.contradictions


def test_a_node_of_the_inventory_without_samples_is_reported(tmp_path: Path) -> None:
    result = run_import(tmp_path, samples=samples_frame(gpus=2), inventory=inventory_frame(4))
    assert "node node-1: without a sample" in result.contradictions
    assert len(result.dataset.inventory()) == 4


def test_samples_that_name_pods_instead_of_nodes_are_refused(tmp_path: Path) -> None:
    frame = samples_frame(gpus=4)
    frame["node"] = "exporter-" + frame["node"]
    with pytest.raises(InputError, match="nodes that the inventory does not name"):
        run_import(tmp_path, samples=frame, inventory=inventory_frame())


def test_without_an_inventory_the_samples_make_it(tmp_path: Path) -> None:
    result = without_inventory(tmp_path, swapped())
    installations = result.dataset.inventory().sort_values(["gpu", "installed_at"])
    assert installations["gpu"].tolist() == [gpu(0), gpu(0), gpu(1), gpu(2), gpu(3)]
    assert installations["node"].tolist() == ["node-0", "node-1", "node-0", "node-1", "node-1"]
    assert (installations["installed_at"].iloc[[0, 2, 3, 4]] == DAY).all()
    assert installations["removed_at"].notna().tolist() == [True, False, False, False, False]
    assert len(all_samples(result)) == 4 * 144


def test_without_an_inventory_a_gpu_that_came_later_was_installed_then(tmp_path: Path) -> None:
    frame = samples_frame(gpus=3, times=60)
    late = (frame["gpu"] == gpu(2)) & (frame["timestamp"] < (DAY + pd.Timedelta("5h")).isoformat())
    installations = without_inventory(tmp_path, frame[~late]).dataset.inventory().set_index("gpu")
    assert installations.loc[gpu(0), "installed_at"] == DAY
    assert installations.loc[gpu(2), "installed_at"] == DAY + pd.Timedelta("5h")


def test_without_an_inventory_a_fleet_of_nodes_is_one_of_nodes(tmp_path: Path) -> None:
    frame = samples_frame(gpus=4).drop_duplicates(["timestamp", "node"]).drop(columns=["gpu", "xid_last"])
    result = without_inventory(tmp_path, frame)
    assert result.dataset.meta.unit == "node"
    assert sorted(result.dataset.inventory()["node"]) == ["node-0", "node-1"]


A, B, NEIGHBOR = (gpu(number) for number in range(3))
FIRST, SECOND = "0000:10:00.0", "0000:11:00.0"
HOURS = 48


def stays_frame(stays: list[tuple[str, str, int, int]], column: str = "pci_bus_id") -> pd.DataFrame:
    """Hourly samples of GPUs of node-0: GPU, address or index, first hour and the hour after the last."""
    rows = [
        {"timestamp": (DAY + pd.Timedelta(hours=hour)).isoformat(), "node": "node-0", "gpu": name, column: place}
        for name, place, first, end in stays
        for hour in range(first, end)
    ]
    return pd.DataFrame(rows).assign(gpu_temp_c=40.0)


def xids_frame(hours: list[int]) -> pd.DataFrame:
    when = [(DAY + pd.Timedelta(hours=hour, minutes=30)).isoformat() for hour in hours]
    return pd.DataFrame({"timestamp": when, "node": "node-0", "pci_bus_id": FIRST, "type": "xid", "code": "79"})


NONE = (None, None)
SWAPS = {
    "replaced": ([(A, FIRST, 0, 24), (B, FIRST, 24, 48)], {A: (None, 24), B: (24, None)}, {10: A, 40: B}),
    "after a gap": ([(A, FIRST, 0, 10), (B, FIRST, 30, 48)], {A: (None, 30), B: (30, None)}, {5: A, 40: B}),
    "back in another slot": (
        [(A, FIRST, 0, 10), (B, FIRST, 20, 48), (A, SECOND, 40, 48)],
        {A: (None, 20, 40, None), B: (20, None)},
        {5: A, 42: B},
    ),
    "exchanged": (
        [(A, FIRST, 0, 24), (A, SECOND, 24, 48), (B, SECOND, 0, 24), (B, FIRST, 24, 48)],
        {A: (None, 24, 24, None), B: (None, 24, 24, None)},
        {10: A, 40: B},
    ),
    "silent": ([(A, FIRST, 0, 24), (B, SECOND, 0, 48)], {A: NONE, B: NONE}, {10: A, 40: A}),
    "silent, and its address a neighbor's": (
        [(A, FIRST, 0, 24), (B, SECOND, 0, 24), (B, FIRST, 26, 48)],
        {A: NONE, B: (None, 26, 26, None)},
        {10: A},
    ),
}


def limits_of(result: ImportResult) -> dict[str, tuple[int | None, ...]]:
    """Return the hours at which a GPU's installations begin and end; None for the begin of the data, and for open."""
    limits: dict[str, tuple[int | None, ...]] = {}
    for row in result.dataset.inventory().sort_values("installed_at").itertuples():
        times = [None if pd.isna(when) or when <= DAY else when - DAY for when in (row.installed_at, row.removed_at)]
        hours = tuple(None if time is None else time // pd.Timedelta("1h") for time in times)
        limits[row.gpu] = limits.get(row.gpu, ()) + hours
    return limits


@pytest.mark.parametrize("swap", SWAPS)
def test_a_gpu_in_the_place_of_another_ends_its_installation(tmp_path: Path, swap: str) -> None:
    stays, limits, gpus_by_hour = SWAPS[swap]
    steady = (NEIGHBOR, "0000:12:00.0", 0, HOURS)
    result = without_inventory(
        tmp_path,
        stays_frame([*stays, steady]),
        events=[write_csv(tmp_path / "xids.csv", xids_frame(list(gpus_by_hour)))],
    )
    assert limits_of(result) == limits | {NEIGHBOR: NONE}
    assert result.dataset.events()["gpu"].tolist() == list(gpus_by_hour.values())


@pytest.mark.parametrize(
    ("stays", "limits"),
    [
        ([(A, "0", 0, 24), (B, "0", 24, 48), (NEIGHBOR, "1", 0, 48)], {A: (None, 24), B: (24, None), NEIGHBOR: NONE}),
        ([(A, "0", 0, 24), (NEIGHBOR, "1", 0, 24), (NEIGHBOR, "0", 24, 48)], {A: NONE, NEIGHBOR: NONE}),
    ],
    ids=["stable", "renumbered"],
)
def test_an_index_is_a_place_where_no_gpu_changes_it(tmp_path: Path, stays: list, limits: dict) -> None:
    assert limits_of(without_inventory(tmp_path, stays_frame(stays, "index"))) == limits


@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize(
    ("dated", "turn"),
    [(-24, 24), (6, 24), (24, 24), (40, 24), (None, 24)],
    ids=["before", "early", "right", "late", "not"],
)
def test_a_swap_in_one_slot_is_when_the_samples_show_it(
    tmp_path: Path, dated: int | None, turn: int, has_places: bool
) -> None:
    swap = None if dated is None else (DAY + pd.Timedelta(hours=dated)).isoformat()
    inventory = inventory_frame(2).assign(node="node-0", pci_bus_id=FIRST, slot="0", removed_at=[swap, None])
    inventory.loc[1, "installed_at"] = swap
    samples = stays_frame([(A, FIRST, 0, turn), (B, FIRST, turn, HOURS)])
    if swap is None:
        inventory = inventory[:1]
        has_places = True  # nothing else says that they share a slot
    samples = samples if has_places else samples.drop(columns="pci_bus_id")
    result = run_import(tmp_path, samples=samples, events=xids_frame([10, 40]), inventory=inventory)
    assert limits_of(result) == {A: (None, turn), B: (turn, None)}
    assert result.dataset.events()["gpu"].tolist() == [A, B]
    assert bool(result.contradictions) == (dated != turn)


def test_a_gpu_that_a_later_import_shows_in_the_slot_ends_the_installation(tmp_path: Path) -> None:
    without_inventory(tmp_path, stays_frame([(A, FIRST, 0, 24)]))
    result = without_inventory(tmp_path, stays_frame([(B, FIRST, 24, 48)]))
    assert limits_of(result) == {A: (None, 24), B: (24, None)}


def test_without_an_inventory_samples_have_to_name_the_node(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not name the node"):
        without_inventory(tmp_path, samples_frame().drop(columns="node"))


def test_more_samples_add_to_a_dataset_without_an_inventory(tmp_path: Path) -> None:
    without_inventory(tmp_path, samples_frame(gpus=2))
    result = without_inventory(tmp_path, samples_frame(gpus=4, times=12))
    assert result.dataset.inventory()["gpu"].tolist() == [gpu(number) for number in range(4)]
    assert len(all_samples(result)) == 48


def tickets(nodes: list[str]) -> pd.DataFrame:
    when = [(DAY + number * pd.Timedelta(minutes=10)).isoformat() for number in range(len(nodes))]
    return pd.DataFrame({"timestamp": when, "node": nodes, "type": "failure", "code": "gpu"})


def test_tickets_of_nodes_without_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    desk = write_csv(tmp_path / "tickets.csv", tickets(["node-0", *(f"login-{number}" for number in range(30))]))
    result = without_inventory(tmp_path, samples_frame(), events=[desk])
    assert result.dataset.events()["node"].tolist() == ["node-0"]
    account = result.accounting.tables["events"]
    assert (account.read, account.used, dict(account.left_out)) == (31, 1, {"unknown node": 30})


def test_tickets_of_which_none_names_a_node_of_the_samples_are_an_error(tmp_path: Path) -> None:
    desk = write_csv(tmp_path / "tickets.csv", tickets([f"login-{number}" for number in range(30)]))
    with pytest.raises(InputError):
        without_inventory(tmp_path, samples_frame(), events=[desk])


@pytest.mark.parametrize("is_log", [True, False])
def test_a_source_mostly_of_other_nodes_is_an_error_that_names_both(tmp_path: Path, is_log: bool) -> None:
    nodes = ["node-0", *(f"compute-{number}" for number in range(30))]
    samples = pd.concat([samples_frame(2).assign(node=f"node-{number}", gpu=gpu(number)) for number in range(8)])
    if is_log:
        source = tmp_path / "kernel.log"
        form = "2026-03-01T00:{:02d}:00Z {} kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
        source.write_text("".join(form.format(number, node) for number, node in enumerate(nodes)))
    else:
        source = write_csv(tmp_path / "tickets.csv", tickets(nodes))
    samples = samples.drop_duplicates(["timestamp", "gpu"])
    with pytest.raises(InputError, match=r"compute-0.*node-0"):
        without_inventory(tmp_path, samples, events=[source])
    account = without_inventory(tmp_path, samples, events=[source], max_loss=0.99).accounting.tables["events"]
    assert (account.used, dict(account.left_out)) == (1, {"unknown node": 30})


def claimed(gpus: int = 2) -> pd.DataFrame:
    """GPU 0 is reported by node-0 and by node-9 in every step, 30 degrees hotter there."""
    frame = samples_frame(gpus, times=20)
    other = frame[frame["gpu"] == gpu(0)]
    return pd.concat([frame, other.assign(node="node-9", gpu_temp_c=other["gpu_temp_c"] + 30)], ignore_index=True)


def test_without_an_inventory_an_identity_on_two_nodes_at_one_time_is_none(tmp_path: Path) -> None:
    result = without_inventory(tmp_path, claimed())
    samples = all_samples(result)
    expected = claimed().groupby(["gpu", "node"])["gpu_temp_c"].max().to_dict()
    expected = {(name if name != gpu(0) else f"{node}@{name}", node): high for (name, node), high in expected.items()}
    assert samples.groupby(["gpu", "node"])["gpu_temp_c"].max().to_dict() == pytest.approx(expected)
    assert len(samples) == len(claimed())
    assert set(result.dataset.inventory()["gpu"]) == {name for name, _ in expected}
    assert result.counts["identities_on_several_nodes"] == 1
    assert any(f"{gpu(0)} is on 2 nodes at one time: node-0, node-9" in line for line in result.contradictions)


def test_placeholders_without_a_place_are_not_counted_as_named(tmp_path: Path) -> None:
    frame = samples_frame(gpus=4)
    frame.loc[frame.index[::12], "gpu"] = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"
    result = run_import(tmp_path, samples=frame, inventory=inventory_frame(), max_loss=0.5)
    assert result.quarantined == {"missing gpu": 2}
    assert result.counts.get("gpus_named_by_their_place", 0) == 0
