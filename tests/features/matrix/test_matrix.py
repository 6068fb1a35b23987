"""The feature matrix as an artefact, its prefetch, and live rows equal to its training rows."""

import errno
import json
import os
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from features.config import FeatureSection, LabelSection
from features.labels.incidents import find_incidents
from features.labels.labelling import label_rows
from features.matrix import build_tasks, building, filling, parts
from features.matrix.live_rows import live_plan, live_rows, prefetch
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import ROW_COLUMNS
from foundation.errors import InputError
from telemetry.dataset.store import Dataset
from tests.features.small_fleet import (
    HOUR,
    T0,
    events_of,
    frame_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    to_table,
    window,
    write_dataset,
    xid,
)
from tests.killed import die_at, exit_code_of

EVENTS = [
    xid(15.3, "gpu01", "node0"),
    xid(15.4, "gpu01", "node0", "48"),
    {**xid(18, "gpu01", "node0", ""), "type": "repair"},
    xid(20.1, "gpu06", "node1", known_at=T0 + 21 * HOUR),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix")
    inventory = inventory_of(gpus(8))
    samples = samples_of(inventory, 24)
    dataset = write_dataset(path / "data", inventory, samples=samples, events=events_of(EVENTS))
    return dataset, make_matrix(dataset, path / "matrix")


def test_values_align_with_rows_and_columns(small):
    matrix = small[1]
    values = matrix.values()
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    assert values.shape == (len(matrix.rows), len(matrix.columns))
    assert {column.group for column in matrix.columns} == set(FeatureSection().groups)
    assert matrix.meta.counts == {
        "rows": len(matrix.rows),
        "augmented": int(matrix.rows["augmented"].sum()),
        "features": len(matrix.columns),
    }


def test_rows_and_columns_can_be_chosen(small, monkeypatch, tmp_path):
    dataset, matrix = small
    values = matrix.values()
    monkeypatch.setattr(parts, "PART_ROWS", 10)
    parted = make_matrix(dataset, tmp_path / "parted")
    assert len(parted.meta.parts) > 3
    np.testing.assert_array_equal(parted.values(), values)
    pd.testing.assert_frame_equal(parted.rows, matrix.rows)
    chosen = np.array([40, 3, 3, len(values) - 1, 0])
    names = [matrix.columns[-1].name, matrix.columns[0].name]
    np.testing.assert_array_equal(parted.values(chosen), values[chosen])
    np.testing.assert_array_equal(parted.values(chosen, names), values[chosen][:, [-1, 0]])
    assert parted.values([]).shape == (0, values.shape[1])


def test_a_damaged_file_is_named_with_what_to_do(small, tmp_path):
    dataset, _ = small
    matrix = make_matrix(dataset, tmp_path / "matrix")
    part = matrix.path / matrix.meta.parts[0].file
    for path in (part, matrix.path / "events.parquet"):
        content = path.read_bytes()
        path.write_bytes(content[:-20])
        opened = FeatureMatrix.open(matrix.path)
        with pytest.raises(InputError, match=rf"the file is damaged: .*{path.name}.*build it again"):
            opened.values() if path == part else opened.events
        path.write_bytes(content)
    (matrix.path / "events.parquet").unlink()
    (matrix.path / "events.parquet").mkdir()
    with pytest.raises(OSError, match=r"Is a directory.*events\.parquet"):
        opened = FeatureMatrix.open(matrix.path).events


def test_a_wrong_row_or_column_is_named(small):
    with pytest.raises(KeyError, match="the matrix has no column 'telemetry__nothing'"):
        small[1].values(columns=["telemetry__nothing"])
    with pytest.raises(IndexError, match="row indices must lie in 0"):
        small[1].values([10**6])


def test_the_same_inputs_build_nothing_again(small, monkeypatch):
    dataset, matrix = small
    mtimes = {path.name: path.stat().st_mtime_ns for path in matrix.path.iterdir()}
    monkeypatch.setattr(building, "_write", lambda *args: pytest.fail("built again"))
    again = make_matrix(dataset, matrix.path)
    assert again.digest == matrix.digest
    assert {path.name: path.stat().st_mtime_ns for path in matrix.path.iterdir()} == mtimes


def test_labels_follow_from_the_matrix_alone(small):
    dataset, matrix = small
    opened = FeatureMatrix.open(matrix.path)
    labels = LabelSection(horizon=6 * HOUR)
    for as_of in (None, T0 + 17 * HOUR, T0 + 20.5 * HOUR):
        incidents = find_incidents(
            dataset.events(), dataset.inventory(), labels, as_of=as_of, data_end=dataset.meta.span[1]
        )
        pd.testing.assert_frame_equal(opened.incidents(as_of), incidents)
        expected = label_rows(
            opened.rows,
            incidents,
            dataset.inventory(),
            labels,
            data_end=dataset.meta.span[1],
            as_of=as_of,
            events=dataset.events(),
        )
        pd.testing.assert_frame_equal(opened.labels(as_of), expected)
    assert (opened.labels()["label"] == 1).any()


def test_progress_is_reported(small, tmp_path):
    reports = []
    matrix = make_matrix(small[0], tmp_path / "m", progress=lambda *counts: reports.append(counts))
    total = small[0].meta.counts["samples"] + matrix.meta.counts["rows"]
    assert reports == sorted(reports)
    assert (reports[0], reports[-1]) == ((0, total), (total, total))
    assert len(reports) == 1 + len(small[0].buckets()) + len(matrix.meta.parts)


def test_a_failed_build_leaves_the_old_matrix(small, tmp_path, monkeypatch):
    dataset, _ = small
    old = make_matrix(dataset, tmp_path / "m").digest

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(parts.pq, "ParquetWriter", full)
        with pytest.raises(InputError, match=r"the disk is full \(while writing .*m\)"):
            make_matrix(dataset, tmp_path / "m", labels=LabelSection(horizon=3 * HOUR))
    assert FeatureMatrix.open(tmp_path / "m").digest == old
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_worker_that_fails_is_heard(small, tmp_path, monkeypatch):
    monkeypatch.setattr(build_tasks, "read_samples", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_matrix(small[0], tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def build_until_death(dataset: str, out: str, n_writes: int) -> None:
    """Build, and die before one of the calls by which something gets its place."""
    os.cpu_count = lambda: 1
    die_at(n_writes, [(filling.BucketStore, "put"), (build_tasks, "write_part"), (building, "write_bytes")])
    make_matrix(Dataset.open(Path(dataset)), Path(out))


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_process_that_dies_anywhere_leaves_a_build_that_starts_again(small, tmp_path, at):
    dataset, matrix = small
    assert exit_code_of(build_until_death, str(dataset.path), str(tmp_path / "m"), at) == 9
    assert not (tmp_path / "m").exists()
    again = make_matrix(dataset, tmp_path / "m")
    for path in matrix.path.iterdir():
        assert path.read_bytes() == (again.path / path.name).read_bytes(), path.name
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_another_folder_is_never_replaced(small, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="exists and is not a feature matrix"):
        make_matrix(small[0], tmp_path / "m")
    assert (tmp_path / "m" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a feature matrix: it has no matrix.json"),
        ("{", "matrix.json is damaged"),
        (json.dumps({"schema_version": 99}), "the matrix has schema version 99, but this predrain reads 3"),
    ],
)
def test_a_folder_that_is_no_matrix_is_explained(tmp_path, content, message):
    if content is not None:
        (tmp_path / "matrix.json").write_text(content)
    with pytest.raises(InputError, match=message):
        FeatureMatrix.open(tmp_path)


def test_a_window_must_fit_the_datasets_step(small, tmp_path):
    features = FeatureSection(windows=(timedelta(minutes=15), HOUR), peer_window=HOUR)
    with pytest.raises(InputError, match=r"15m is not a multiple .*step of 10m \(parameter features\.windows"):
        make_matrix(small[0], tmp_path / "m", features=features)


def test_an_empty_period_is_explained(tmp_path):
    rows = [row | {"installed_at": T0 + 99 * HOUR} for row in gpus(2)]
    dataset = write_dataset(tmp_path / "data", inventory_of(rows))
    with pytest.raises(InputError, match="no unit is in service at any decision time"):
        make_matrix(dataset, tmp_path / "m")


def test_events_and_inventory_are_enough(tmp_path):
    dataset = write_dataset(tmp_path / "data", inventory_of(gpus(8)), events=events_of(EVENTS))
    matrix = make_matrix(dataset, tmp_path / "m")
    assert {column.group for column in matrix.columns} == {"history", "static"}
    frame = frame_of(matrix)
    later = frame[(frame["decision_time"] == T0 + 18 * HOUR) & (frame["gpu"] == "gpu00")]
    assert later["history__node_xid_bus__count__24h"].tolist() == [1.0]
    assert (matrix.labels()["label"] == 1).any()


def test_nodes_without_gpus_are_units(tmp_path):
    rows = [{"gpu": None, "node": f"n{i}", "model": "x", "installed_at": T0 - HOUR * i} for i in range(5)]
    inventory = inventory_of(rows)
    inventory["gpu"] = pd.Series([None] * 5, dtype="object")
    samples = samples_of(inventory, 24)
    events = events_of([{"timestamp": T0 + 13 * HOUR, "node": "n3", "type": "failure", "code": "cooling"}])
    dataset = write_dataset(tmp_path / "data", inventory, samples=samples, events=events, unit="node")
    matrix = make_matrix(dataset, tmp_path / "m")
    rows_frame = matrix.rows
    assert rows_frame["gpu"].isna().all()
    assert (rows_frame["unit"] == rows_frame["node"]).all()
    names = {column.name for column in matrix.columns}
    assert "peers__gpu_temp_c__fleet_deviation__2h" in names
    assert not [name for name in names if "node_deviation" in name or "__fresh__" in name]
    assert np.isfinite(frame_of(matrix)["telemetry__gpu_temp_c__mean__4h"].iloc[-5:]).all()
    assert matrix.labels()["failure_class"].dropna().unique().tolist() == ["other"]


def test_a_node_without_samples_has_rows_that_say_so(tmp_path):
    inventory = inventory_of(gpus(8))
    samples = samples_of(inventory, 24)
    dataset = write_dataset(tmp_path / "data", inventory, samples=samples[samples["node"] == "node0"])
    frame = frame_of(make_matrix(dataset, tmp_path / "m"))
    silent = frame[(frame["node"] == "node1") & (frame["decision_time"] > T0 + 9 * HOUR)]
    assert len(silent)
    assert (silent["gaps__samples__missing__4h"] == 1).all()
    assert (silent["gaps__node_units__fresh__1h"] == 0).all()
    assert silent["telemetry__gpu_temp_c__mean__4h"].isna().all()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    rows = gpus(10)
    rows[3]["removed_at"] = T0 + 16 * HOUR
    rows.append({**rows[3], "node": "node2", "slot": "7", "installed_at": T0 + 17 * HOUR, "removed_at": None})
    inventory = inventory_of(rows)
    events = events_of(
        [
            xid(13.2, "gpu01", "node0"),
            xid(14.0, "gpu05", "node1", "63"),
            {**xid(15, "gpu01", "node0", ""), "type": "repair"},
            {"timestamp": T0 + 12.5 * HOUR, "node": "node1", "type": "driver", "code": "550"},
            xid(21.2, "gpu06", "node1"),
            window("node2", 8, 10),
            window("node1", 14, 15.5, known=17),
            {**xid(19, "gpu00", "node0", "begin"), "type": "maintenance"},
            {**xid(19.5, "gpu00", "node0", "end"), "type": "maintenance"},
        ]
    )
    samples = samples_of(inventory, 24, seed=8)
    path = tmp_path_factory.mktemp("live")
    matrix = make_matrix(write_dataset(path / "data", inventory, samples=samples, events=events), path / "matrix")
    return matrix, frame_of(matrix), samples, events, inventory


def as_known(t, samples, events, inventory, config):
    """What a live system holds at t: the look-back, what has happened, no removal to come."""
    oldest = live_plan(config).look_back
    recent = samples[(samples["timestamp"] <= t) & (samples["timestamp"] > t - oldest)]
    installations = inventory[inventory["installed_at"] <= t].copy()
    installations["removed_at"] = installations["removed_at"].where(installations["removed_at"] <= t)
    return [[to_table(recent)]], events[events["known_at"] <= t], installations


def same(live: pd.DataFrame, training: pd.DataFrame) -> None:
    """Bit for bit, which is more than the 1e-6 that is asked."""
    training = training.reset_index(drop=True)
    keys = ["decision_time", "node", "gpu", "unit"]
    pd.testing.assert_frame_equal(live[keys], training[keys].astype(live[keys].dtypes))
    names = [name for name in training.columns if name not in ROW_COLUMNS]
    assert live.columns.tolist() == training.columns.tolist()
    for name in names:
        np.testing.assert_array_equal(live[name].to_numpy(), training[name].to_numpy(), err_msg=name)


@pytest.mark.parametrize("hour", range(0, 25, 3))
def test_a_replayed_hour_gives_the_matrix_rows(world, hour):
    matrix, frame, *data = world
    t = T0 + hour * HOUR
    live = live_rows(*as_known(t, *data, matrix.config), t, matrix.config)
    same(live, frame[(frame["decision_time"] == t) & ~frame["augmented"]])


def test_a_category_not_seen_in_training_is_unknown(world):
    matrix, _, *data = world
    t = T0 + 18 * HOUR
    samples, events, inventory = as_known(t, *data, matrix.config)
    live = live_rows(samples, events, inventory.assign(model="B999"), t, matrix.config)
    assert live["static__model__code"].isna().all()
    assert live["static__driver__code"].notna().all()


def test_a_silent_fleet_still_has_rows(world):
    matrix, _, *data = world
    t = T0 + 18 * HOUR
    _, events, inventory = as_known(t, *data, matrix.config)
    live = live_rows([], events, inventory, t, matrix.config)
    assert len(live)
    assert (live["gaps__samples__missing__4h"].dropna() == 1).all()
    assert live["telemetry__gpu_temp_c__mean__4h"].isna().all()


def test_columns_of_another_version_are_refused(world):
    from dataclasses import replace

    config = world[0].config
    with pytest.raises(InputError, match="feature columns of this version of predrain differ"):
        live_plan(replace(config, columns=config.columns[1:]))


def test_older_samples_and_later_ones_change_nothing(world):
    matrix, frame, samples, events, inventory = world
    t = T0 + 18 * HOUR
    same(
        live_rows([[to_table(samples)]], events, inventory, t, matrix.config),
        frame[(frame["decision_time"] == t) & ~frame["augmented"]],
    )


def test_an_error_is_raised_where_its_item_is_asked_for():
    def items():
        yield 1
        raise ValueError("no more")

    fetched = prefetch(items())
    assert next(fetched) == 1
    with pytest.raises(ValueError, match="no more"):
        next(fetched)


def test_whoever_stops_early_leaves_no_thread_behind():
    n_threads = threading.active_count()
    fetched = prefetch(iter(range(10)))
    next(fetched)
    fetched.close()
    assert threading.active_count() == n_threads
