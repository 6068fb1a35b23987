"""Importing twice, adding, and being interrupted."""

import errno
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import telemetry.dataset.writer
import telemetry.importing.samples.block
from foundation.errors import InputError
from tests.telemetry.helpers import (
    all_samples,
    events_frame,
    gpu,
    inventory_frame,
    quarantine_of,
    run_import,
    samples_frame,
    tree,
    write_csv,
)

EVENTS = events_frame([("00:05", gpu(0), "xid", "79"), ("00:06", gpu(0), "xid", "79"), ("00:07", "nobody", "xid", "1")])


def test_the_same_import_again_changes_nothing(tmp_path: Path):
    first = run_import(tmp_path, samples=samples_frame(), events=EVENTS)
    before = tree(tmp_path / "dataset")
    again = run_import(tmp_path, samples=samples_frame(), events=EVENTS)
    assert tree(tmp_path / "dataset") == before
    assert (first.changed, again.changed, again.counts) == (True, False, {})
    assert again.dataset.digest == first.dataset.digest
    twice = write_csv(tmp_path / "copy.csv", samples_frame())
    run_import(tmp_path, samples=[tmp_path / "samples.csv", twice], events=EVENTS)
    assert tree(tmp_path / "dataset") == before


def test_other_settings_for_a_known_source(tmp_path: Path):
    run_import(tmp_path, samples=samples_frame(), events=EVENTS)
    before = tree(tmp_path / "dataset")
    for changed, texts in [
        ({"delay": timedelta(minutes=20)}, "imported before with other settings: delay"),
        ({"dedupe": timedelta(minutes=20)}, "imported before with other settings: dedupe"),
        ({"mapping": "samples: {scale: {power_w: 2}}"}, "imported before with other settings: mapping"),
        ({"step": timedelta(minutes=5)}, "the dataset has a step of 10m, but the new data have a step of 5m"),
    ]:
        with pytest.raises(InputError) as caught:
            run_import(tmp_path, samples=samples_frame(), events=EVENTS, **changed)
        assert texts in str(caught.value)
        assert "empty folder" in str(caught.value)
    assert tree(tmp_path / "dataset") == before


def test_more_files_add_to_a_dataset(tmp_path: Path):
    frame = samples_frame(times=12)
    early = frame["timestamp"] < "2026-03-01T01:00"
    files = [write_csv(tmp_path / "early.csv", frame[early]), write_csv(tmp_path / "late.csv", frame[~early])]
    whole = run_import(tmp_path, samples=files, events=EVENTS, out="whole")
    run_import(tmp_path, samples=files[:1], out="grown")
    run_import(tmp_path, events=EVENTS, out="grown")
    grown = run_import(tmp_path, samples=files, events=EVENTS, out="grown")
    assert grown.dataset.digest == whole.dataset.digest
    assert grown.dataset.meta.quarantine == whole.dataset.meta.quarantine == {"unknown gpu": 1}
    assert len(quarantine_of(grown)) == 1
    names = [(source["role"], source["name"]) for source in grown.dataset.meta.sources]
    assert names == [
        ("events", "events.csv"),
        ("inventory", "inventory.csv"),
        ("samples", "early.csv"),
        ("samples", "late.csv"),
    ]


def test_a_rolled_up_dataset_goes_on_inside_a_step(tmp_path: Path):
    frame = samples_frame(times=60, every="1min")
    early = frame["timestamp"] < "2026-03-01T00:44"
    files = [write_csv(tmp_path / "early.csv", frame[early]), write_csv(tmp_path / "late.csv", frame[~early])]
    whole = run_import(tmp_path, samples=files, out="whole")
    run_import(tmp_path, samples=files[:1], out="grown")
    grown = run_import(tmp_path, samples=files, out="grown")
    assert grown.quarantined == {}
    pd.testing.assert_frame_equal(all_samples(grown), all_samples(whole), rtol=1e-6)
    overlapping = write_csv(tmp_path / "overlap.csv", frame[frame["timestamp"] < "2026-03-01T00:50"])
    run_import(tmp_path, samples=files[:1], out="over")
    over = run_import(tmp_path, samples=[overlapping], out="over")
    assert over.quarantined == {"its step was rolled up by an earlier import": int(early.sum())}
    fifty = all_samples(over)["timestamp"] <= pd.Timestamp("2026-03-01T00:49Z")
    expected = all_samples(whole)
    expected = expected[expected["timestamp"] <= pd.Timestamp("2026-03-01T00:49Z")].reset_index(drop=True)
    pd.testing.assert_frame_equal(all_samples(over)[fifty].reset_index(drop=True), expected, rtol=1e-6)


def test_a_newer_inventory_ends_stays_and_adds_some(tmp_path: Path):
    run_import(tmp_path, samples=samples_frame(), events=EVENTS)
    newer = inventory_frame(5)
    newer["removed_at"] = ["2026-04-01T00:00:00Z", *[None] * 4]
    result = run_import(tmp_path, inventory=newer)
    inventory = result.dataset.inventory()
    assert inventory["removed_at"].notna().tolist() == [True, False, False, False, False]
    assert result.dataset.meta.counts["samples"] == 24


def test_a_channel_that_changed_its_kind(tmp_path: Path):
    from telemetry.config import ChannelDeclaration

    frame = samples_frame()[["timestamp", "node", "gpu"]].assign(own=1)
    run_import(tmp_path, samples=frame, declared={"own": ChannelDeclaration(kind="gauge")})
    later = write_csv(tmp_path / "later.csv", frame.assign(own=2))
    with pytest.raises(InputError, match="channel 'own' is a gauge in the dataset, but now declared a counter"):
        run_import(tmp_path, samples=[later], declared={"own": ChannelDeclaration(kind="counter")})


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=2, max_size=40, unique=True),
    seed=st.integers(0, 1000),
    parts=st.integers(1, 3),
)
def test_the_order_of_rows_and_files_does_not_matter(keys, seed, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("order")
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "timestamp": [f"2026-03-01T{minute // 60:02d}:{minute % 60:02d}:00Z" for _, minute in keys],
            "node": [f"node-{number // 2}" for number, _ in keys],
            "gpu": [gpu(number) for number, _ in keys],
            "power_w": rng.integers(0, 700, len(keys)),
            "energy_mj": rng.integers(0, 9, len(keys)),
            "clocks_event_reasons": rng.integers(0, 8, len(keys)),
        }
    )
    again = frame.sample(frac=0.5, random_state=seed)
    rows = pd.concat([frame, again]).sample(frac=1, random_state=seed)
    files = [write_csv(folder / f"{number}.csv", rows[number::parts]) for number in range(parts)]
    straight = run_import(folder, samples=frame, out="straight")
    shuffled = run_import(folder, samples=files[::-1], out="shuffled")
    assert shuffled.dataset.digest == straight.dataset.digest
    assert shuffled.counts.get("samples_repeated", 0) == len(again)


def test_a_full_disk_at_any_write_leaves_the_old_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_import(tmp_path, samples=samples_frame())
    before = tree(tmp_path / "dataset")
    more = write_csv(tmp_path / "more.csv", samples_frame(times=9))
    bad = write_csv(tmp_path / "bad.csv", EVENTS)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    places = [
        (telemetry.dataset.writer, "write_part"),
        (telemetry.dataset.writer, "write_small"),
        (telemetry.dataset.writer, "fsync_path"),
        (telemetry.importing.samples.block.pa.ipc, "new_file"),
        (telemetry.importing.quarantine.pq, "ParquetWriter"),
        (telemetry.dataset.writer.shutil, "copyfile"),
    ]
    monkeypatch.setattr(Path, "hardlink_to", full)
    # so that there is a quarantine to copy, on a disk that knows no links
    run_import(tmp_path, events=[bad], max_loss=1.0)
    before = tree(tmp_path / "dataset")
    worse = write_csv(tmp_path / "worse.csv", EVENTS.assign(gpu="who"))
    for module, name in places:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, full)
            with pytest.raises(InputError, match=r"the disk is full.*Free space.*unchanged"):
                run_import(tmp_path, samples=[more], events=[worse], max_loss=1.0)
        assert tree(tmp_path / "dataset") == before
        assert not list(tmp_path.glob(".dataset*"))


def test_what_earlier_imports_set_aside_is_neither_copied_nor_forced_to_the_disk_again(tmp_path, monkeypatch):
    forced: list[str] = []
    force = telemetry.dataset.writer.fsync_path
    monkeypatch.setattr(telemetry.dataset.writer, "fsync_path", lambda path: (forced.append(path.name), force(path)))
    quarantine = tmp_path / "dataset/quarantine"
    run_import(tmp_path, samples=samples_frame(), events=EVENTS)
    kept = (quarantine / "import-0001.parquet").stat().st_ino
    forced.clear()
    result = run_import(tmp_path, events=EVENTS.assign(gpu="who"), max_loss=1.0)
    assert result.quarantined == {"unknown gpu": 3}
    assert (quarantine / "import-0001.parquet").stat().st_ino == kept
    assert "import-0002.parquet" in forced
    assert "quarantine" in forced
    assert "import-0001.parquet" not in forced
    assert len(quarantine_of(result)) == 4
    (quarantine / "import-0001.parquet").unlink()  # by an operator
    run_import(tmp_path, events=EVENTS.assign(gpu="where"), max_loss=1.0)
    assert sorted(path.name for path in quarantine.iterdir()) == ["import-0002.parquet", "import-0003.parquet"]


def test_an_inventory_without_installation_times_can_grow(tmp_path: Path):
    for nodes, when in ((["n1", "n2"], "2026-03-01T01:00:00Z"), (["n1", "n2", "n3"], "2026-03-02T01:00:00Z")):
        tickets = pd.DataFrame({"timestamp": [when], "node": nodes[-1:], "type": "failure", "code": "x"})
        result = run_import(tmp_path, events=tickets, inventory=pd.DataFrame({"node": nodes}))
    assert result.dataset.inventory()["node"].tolist() == ["n1", "n2", "n3"]
    assert len(result.dataset.events()) == 2
