"""One UUID that two nodes report: cloned machines, virtual GPUs, and a GPU that really moves."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from telemetry.dataset.store import Dataset
from telemetry.importing.evidence import STRAY
from tests.telemetry.collect.remote_write.encoding import pushed
from tests.telemetry.helpers import DAY, STEP, all_samples, gpu, inventory_frame, run_import, samples_frame, write_csv
from tests.telemetry.staging_world import compacted, event, raw, samples_of, staging, table_of

ADDRESS = {"node-0": "00000000:10:00", "node-9": "00000000:3b:00"}


def twin(times: int = 20) -> pd.DataFrame:
    """GPU 0 on node-0 and on node-9 in every step, each at its own address."""
    frame = samples_frame(2, times=times).assign(pci_bus_id="0000:10:00.0")
    other = frame[frame["gpu"] == gpu(0)].assign(node="node-9", pci_bus_id="0000:3b:00.0")
    other["gpu_temp_c"] += 30
    return pd.concat([frame, other], ignore_index=True)


def test_each_gpu_is_named_by_its_node_and_address_and_takes_its_events(tmp_path: Path) -> None:
    rows = [("node-0", gpu(0)), ("node-9", gpu(0)), (None, gpu(0)), ("node-9", gpu(0).upper())]
    events = pd.DataFrame(rows, columns=["node", "gpu"]).assign(type="failure")
    events["timestamp"] = [(DAY + pd.Timedelta(minutes=20 * turn)).isoformat() for turn in range(len(rows))]
    result = run_import(tmp_path, samples=twin(), events=events, inventory=inventory_frame(2), max_loss=0.5)
    names = {node: f"{node}@{address}" for node, address in ADDRESS.items()}
    samples = all_samples(result)
    for node, name in names.items():
        assert set(samples["node"][samples["gpu"] == name]) == {node}
    assert gpu(0) not in set(samples["gpu"])
    placed = result.dataset.events()
    assert placed[["node", "gpu"]].values.tolist() == [[node, names[node]] for node in ("node-0", "node-9", "node-9")]
    assert result.quarantined == {"identity of GPUs on several nodes": 1}


def test_a_second_import_of_the_same_twins_adds_to_the_same_gpus(tmp_path: Path) -> None:
    whole = twin(40)
    first = whole["timestamp"] < (DAY + pd.Timedelta(minutes=200)).isoformat()
    run_import(tmp_path, samples=whole[first], inventory=inventory_frame(2))
    part = write_csv(tmp_path / "second.csv", whole[~first])
    both = run_import(tmp_path, samples=[part], inventory=tmp_path / "inventory.csv")
    assert all_samples(both).groupby("gpu").size().to_dict() == dict.fromkeys(
        [gpu(1), *(f"{node}@{address}" for node, address in ADDRESS.items())], 40
    )


def test_twins_of_an_identity_that_the_dataset_holds_already_leave_its_samples_readable(tmp_path: Path) -> None:
    whole = twin(40)
    first = (whole["timestamp"] < (DAY + pd.Timedelta(minutes=200)).isoformat()) & (whole["node"] != "node-9")
    run_import(tmp_path, samples=whole[first], inventory=inventory_frame(2))
    second = ~first & (whole["timestamp"] < (DAY + pd.Timedelta(minutes=300)).isoformat())
    for number, chosen in enumerate((second, ~first & ~second, [False] * len(whole)), start=2):
        more = whole[chosen] if number < 4 else samples_frame(2, times=60)[lambda rows: rows["gpu"] == gpu(1)]
        part = write_csv(tmp_path / f"part-{number}.csv", more)
        result = run_import(tmp_path, samples=[part], inventory=tmp_path / "inventory.csv")
    sizes = all_samples(result).groupby("gpu").size()
    assert sizes[gpu(0)] == 20
    assert sizes[f"node-9@{ADDRESS['node-9']}"] == 40
    assert sizes[f"node-0@{ADDRESS['node-0']}"] == 20
    installations = result.dataset.inventory().groupby("gpu").size()
    assert installations[f"node-0@{ADDRESS['node-0']}"] == installations[f"node-9@{ADDRESS['node-9']}"] == 1


def test_a_gpu_that_moves_there_and_back_is_one_gpu(tmp_path: Path) -> None:
    frame = samples_frame(1, times=60).assign(pci_bus_id="0000:10:00.0")
    frame.loc[20:39, "node"] = "node-9"
    result = run_import(tmp_path, samples=frame, inventory=inventory_frame(1))
    assert set(all_samples(result)["gpu"]) == {gpu(0)}
    assert result.dataset.inventory().sort_values("installed_at")["node"].tolist() == ["node-0", "node-9", "node-0"]
    assert "identities_on_several_nodes" not in result.counts


def test_two_nodes_that_overlap_at_the_instant_of_a_move_only_are_a_move(tmp_path: Path) -> None:
    frame = samples_frame(1, times=20)
    both = pd.concat([frame[:10], frame[9:].assign(node="node-9")], ignore_index=True)
    result = run_import(tmp_path, samples=both, inventory=inventory_frame(1))
    assert set(all_samples(result)["gpu"]) == {gpu(0)}


def with_strays(frame: pd.DataFrame, steps: list[int]) -> pd.DataFrame:
    """Return samples of GPU 0 with a copy on node-9 of those of some steps."""
    own = frame[frame["gpu"] == gpu(0)].iloc[steps]
    return pd.concat([frame, own.assign(node="node-9", gpu_temp_c=own["gpu_temp_c"] + 30)], ignore_index=True)


@pytest.mark.parametrize("steps", [[10], [10, 11], [5, 30]])
def test_a_stray_sample_on_a_second_node_leaves_the_identity(tmp_path: Path, steps: list[int]) -> None:
    frame = samples_frame(2, times=40)
    result = run_import(tmp_path, samples=with_strays(frame, steps), inventory=inventory_frame(2))
    (tmp_path / "clean").mkdir()
    clean = run_import(tmp_path / "clean", samples=frame, inventory=inventory_frame(2))
    assert all_samples(result).equals(all_samples(clean))
    assert result.dataset.inventory().equals(clean.dataset.inventory())
    account = result.accounting.tables["samples"]
    assert account.left_out == {STRAY: len(steps)}
    assert account.unaccounted == 0


@pytest.mark.parametrize("steps", [[10, 11, 12], [5, 20, 30]])
def test_several_samples_at_overlapping_times_are_a_second_gpu(tmp_path: Path, steps: list[int]) -> None:
    result = run_import(tmp_path, samples=with_strays(samples_frame(2, times=40), steps), inventory=inventory_frame(2))
    assert gpu(0) not in set(all_samples(result)["gpu"])
    assert result.counts["identities_on_several_nodes"] == 1


def test_a_gpu_whose_last_sample_is_on_a_second_node_has_moved(tmp_path: Path) -> None:
    frame = samples_frame(2, times=40)
    frame.loc[frame.index[frame["gpu"] == gpu(0)][-1], "node"] = "node-9"
    result = run_import(tmp_path, samples=frame, inventory=inventory_frame(2))
    assert result.dataset.inventory().query("gpu == @gpu(0)")["node"].tolist() == ["node-0", "node-9"]


@pytest.mark.parametrize("later", [False, True], ids=["in one compaction", "after one"])
def test_pushed_events_of_twins_are_of_the_gpu_at_their_place(tmp_path: Path, later: bool) -> None:
    """Two machines with one UUID push samples, sightings and events: by UUID and node, and by address and node."""
    frame = raw(1, 60)
    twins = pd.concat([frame.assign(node=node) for node in ADDRESS], ignore_index=True)
    rows = [{"node": node, "gpu": gpu(0), "seen_at": DAY.to_pydatetime()} for node in ADDRESS]
    sightings = pa.Table.from_pylist([row | {"pci_bus_id": ADDRESS[str(row["node"])]} for row in rows])
    events = [event(DAY + STEP / 2, "79", node=node, gpu=gpu(0)) for node in ADDRESS]
    events += [event(DAY + STEP, "48", node=node, gpu=None, pci_bus_id=ADDRESS[node]) for node in ADDRESS]
    staged = staging(tmp_path).root
    for kind, table in (("samples", table_of(twins)), ("inventory", sightings)):
        answer = pushed(staged, table, kind)[1]
        assert answer.is_success, answer.text
    if later:
        compacted(tmp_path)
    whole = pa.Table.from_pylist([{"pci_bus_id": None, **row, "source": "kernel_log:journal"} for row in events])
    answer = pushed(staged, whole, "events")[1]
    assert answer.is_success, answer.text
    compacted(tmp_path)
    placed = Dataset.open(tmp_path / "dataset").events()
    assert sorted(placed[["code", "node", "gpu"]].values.tolist()) == [
        [code, node, f"{node}@{ADDRESS[node]}"] for code in ("48", "79") for node in ADDRESS
    ]
    assert set(samples_of(tmp_path)["gpu"]) == {f"{node}@{address}" for node, address in ADDRESS.items()}
