"""Events and jobs that come before their GPU or node was seen, or that call the node otherwise than the inventory."""

from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

import telemetry.staging.compaction
from foundation.errors import InputError
from telemetry.dataset.store import Dataset
from tests.telemetry.helpers import DAY, gpu
from tests.telemetry.staging_world import NOW, compacted, event, raw, stage_events, stage_frame, stage_rows, state_of

LOG = "kernel_log:journal"
LATER = DAY + pd.Timedelta("5h")


def see(folder: Path, name: str, *, node: str = "node-0", address: str, at: pd.Timestamp = DAY) -> None:
    row = {"gpu": name, "node": node, "pci_bus_id": address, "seen_at": at.to_pydatetime()}
    stage_rows(folder, "inventory", row)


def pending(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(state_of(folder, "pending"))


def events_of(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Return node and GPU of each event, by its code."""
    events = Dataset.open(folder / "dataset").events()
    gpus = events["gpu"].astype(object).where(events["gpu"].notna(), None)
    return dict(zip(events["code"], zip(events["node"], gpus, strict=True), strict=True))


def fail(*_: object, **__: object) -> None:
    raise InputError("the disk is full", "somewhere", "Make room.")


def test_a_failing_compaction_loses_no_event_that_was_waiting_and_keeps_each_once(tmp_path, monkeypatch):
    stage_frame(tmp_path, raw(gpus=1))
    stage_events(tmp_path, [event(DAY, "79", gpu=gpu(1), source=LOG)])
    compacted(tmp_path)
    stage_frame(tmp_path, raw(gpus=2, start=DAY + pd.Timedelta("30min")))
    stage_events(tmp_path, [event(DAY, "48", gpu=gpu(5), source=LOG)])
    with monkeypatch.context() as patch:
        patch.setattr(telemetry.staging.compaction.Ingest, "run", fail)
        for day in range(3):
            with pytest.raises(InputError, match="the disk is full"):
                compacted(tmp_path, now=NOW + timedelta(days=day))
    since = pending(tmp_path)["since_ms"].tolist()
    assert compacted(tmp_path, now=NOW + timedelta(days=3)).quarantined == {}
    assert events_of(tmp_path) == {"79": ("node-0", gpu(1))}
    assert pending(tmp_path)["code"].tolist() == ["48"]
    assert pending(tmp_path)["since_ms"].tolist() > since


def test_an_event_of_an_address_waits_for_its_node_and_for_its_gpu(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1))
    see(tmp_path, gpu(0), address="0:10:0")
    stage_events(
        tmp_path,
        [
            event(LATER, "79", node="node-5", pci_bus_id="0000:3b:00", source=LOG),
            event(LATER, "48", pci_bus_id="0000:11:00", source=LOG),
        ],
    )
    first = compacted(tmp_path)
    assert events_of(tmp_path) == {}
    assert pending(tmp_path)["pci_bus_id"].tolist() == ["0000:3b:00", "0000:11:00"]
    assert "xids_without_a_gpu" not in first.counts
    stage_frame(tmp_path, raw(gpus=2))
    see(tmp_path, gpu(1), address="0:11:0")
    stage_frame(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta("4h")).assign(gpu=gpu(5), node="node-5"))
    see(tmp_path, gpu(5), node="node-5", address="0:3b:0", at=DAY + pd.Timedelta("4h"))
    compacted(tmp_path)
    assert events_of(tmp_path) == {"79": ("node-5", gpu(5)), "48": ("node-0", gpu(1))}
    assert pending(tmp_path).empty


def test_an_address_that_nobody_sees_a_gpu_at_is_the_nodes_in_the_end_and_is_counted(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1))
    see(tmp_path, gpu(0), address="0:10:0")
    lost = {"pci_bus_id": "0000:aa:00.0", "source": LOG}
    stage_events(tmp_path, [event(DAY, "79", **lost), event(DAY, "cordon", **lost) | {"type": "drain"}])
    for days, expected in ((0, {}), (29, {}), (31, {"xids_without_a_gpu": 1}), (32, {})):
        stage_frame(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta(days=days)))
        result = compacted(tmp_path, now=NOW + timedelta(days=days))
        counted = {name: number for name, number in result.counts.items() if name == "xids_without_a_gpu"}
        assert (counted, result.quarantined) == (expected, {})
    assert events_of(tmp_path) == {"79": ("node-0", None), "cordon": ("node-0", None)}


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_where_no_gpu_has_an_address_nobody_waits_for_one(unit: str, tmp_path: Path):
    frame = raw(gpus=1, times=12, every="10min")
    stage_frame(tmp_path, frame if unit == "gpu" else frame.drop(columns=["gpu", "xid_last"]))
    stage_events(tmp_path, [event(DAY, "79", pci_bus_id="0000:10:00", source=LOG)])
    assert compacted(tmp_path).counts["xids_without_a_gpu"] == 1
    assert events_of(tmp_path) == {"79": ("node-0", None)}


@pytest.mark.parametrize(("seen", "named"), [("node-0.example.com", "node-0"), ("node-0", "node-0.example.com")])
def test_events_and_jobs_find_a_node_under_more_or_less_of_its_domain(seen: str, named: str, tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1).assign(node=seen))
    see(tmp_path, gpu(0), node=seen, address="0:10:0")
    stage_events(
        tmp_path,
        [
            event(DAY, "79", node=named, pci_bus_id="0000:10:00", source=LOG),
            event(DAY, "48", node=named, gpu=gpu(0), source=LOG),
            event(DAY, "cordon", node=named, source="slurm") | {"type": "drain"},
        ],
    )
    job = {"job": "7", "node": named, "started_at": DAY.to_pydatetime()}
    stage_rows(tmp_path, "jobs", job)
    assert compacted(tmp_path).quarantined == {}
    assert events_of(tmp_path) == {"79": (seen, gpu(0)), "48": (seen, gpu(0)), "cordon": (seen, None)}
    jobs = Dataset.open(tmp_path / "dataset").jobs()
    assert jobs["node"].tolist() == [seen]


def test_of_two_nodes_that_a_bare_name_may_be_the_gpu_tells_which(tmp_path: Path):
    for number, node in enumerate(("node-0.east", "node-0.west")):
        stage_frame(tmp_path, raw(gpus=1).assign(gpu=gpu(number), node=node))
    stage_events(
        tmp_path,
        [
            event(DAY, "79", gpu=gpu(1), source=LOG),
            event(DAY, "cordon", source="slurm") | {"type": "drain"},
            event(DAY, "13", node="node-0.east", gpu=gpu(1), source=LOG),
        ],
    )
    assert compacted(tmp_path).quarantined == {"on another node than the inventory says": 1}
    assert events_of(tmp_path) == {"79": ("node-0.west", gpu(1))}
    assert pending(tmp_path)["code"].tolist() == ["cordon"]
