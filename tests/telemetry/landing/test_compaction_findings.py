"""What may go wrong around a fold in a real cluster: wrong clocks, lagging sources, unknown GPUs, damaged files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.errors import InputError
from telemetry.landing.folder import Landing, landing_of
from telemetry.store import Dataset
from tests.telemetry.helpers import DAY, gpu, inventory_frame, run_import, samples_frame, write_csv
from tests.telemetry.landing.test_compaction import NOW, event, fold, land, land_events, raw, samples_of


def landing(folder: Path) -> Landing:
    return Landing(landing_of(folder / "dataset"), writer="test")


def test_what_an_import_adds_between_two_folds_keeps_its_place(tmp_path: Path):
    land(tmp_path, raw(gpus=1))
    fold(tmp_path)
    foreign = samples_frame(gpus=1, times=6).assign(gpu=gpu(9), gpu_temp_c=90.0)
    run_import(tmp_path, samples=foreign, inventory=inventory_frame(1).assign(gpu=gpu(9)))
    land(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta("1h")))
    fold(tmp_path)
    samples = samples_of(tmp_path)
    assert set(Dataset.open(tmp_path / "dataset").inventory()["gpu"]) == {gpu(0), gpu(9)}
    assert (samples.loc[samples["gpu"] == gpu(9), "gpu_temp_c"] == 90).all()
    assert (samples.loc[samples["gpu"] == gpu(0), "gpu_temp_c"] < 60).all()


def test_lost_sightings_do_not_lose_a_silent_gpu(tmp_path: Path):
    land(tmp_path, raw(gpus=2))
    fold(tmp_path)
    before = samples_of(tmp_path)
    landing(tmp_path).state("sightings.parquet").unlink()
    land(tmp_path, raw(gpus=2, start=DAY + pd.Timedelta("1h")).query(f"gpu == '{gpu(1)}'"))
    fold(tmp_path)
    after = samples_of(tmp_path)
    pd.testing.assert_frame_equal(after[after["gpu"] == gpu(0)], before[before["gpu"] == gpu(0)])


def test_an_inventory_alone_is_folded_and_a_corrected_one_replaces_it(tmp_path: Path):
    land(tmp_path, raw(gpus=2))
    fold(tmp_path)
    for day in ("2026-02-01", "2026-02-03"):
        told = inventory_frame(2).assign(installed_at=f"{day}T00:00:00Z", rack="r1")
        fold(tmp_path, inventory=write_csv(tmp_path / "hosts.csv", told))
        stays = Dataset.open(tmp_path / "dataset").inventory()
        assert stays["installed_at"].tolist() == [pd.Timestamp(day, tz="UTC")] * 2
        assert stays["rack"].tolist() == ["r1", "r1"]


def test_an_impossible_inventory_is_refused_and_forgotten(tmp_path: Path):
    land(tmp_path, raw(gpus=2))
    twice = pd.concat([inventory_frame(2), inventory_frame(2).assign(node="node-7")])
    with pytest.raises(InputError, match="is in two places at once"):
        fold(tmp_path, inventory=write_csv(tmp_path / "hosts.csv", twice))
    assert fold(tmp_path).folded == {"samples": 1}


def test_an_event_waits_for_its_gpu_to_be_seen(tmp_path: Path):
    land(tmp_path, raw(gpus=1))
    land_events(
        tmp_path,
        [
            event(DAY, "79", gpu=gpu(5), node="node-5", source="kernel_log:kmsg"),
            event(DAY, "cordon", node="node-6") | {"type": "drain"},
        ],
    )
    first = fold(tmp_path)
    assert first.quarantined == {}
    assert Dataset.open(tmp_path / "dataset").events().empty
    land(tmp_path, raw(gpus=1).assign(gpu=gpu(5), node="node-5"))
    land(tmp_path, raw(gpus=1).assign(gpu=gpu(6), node="node-6"))
    fold(tmp_path)
    assert sorted(Dataset.open(tmp_path / "dataset").events()["code"]) == ["79", "cordon"]


def test_an_event_whose_gpu_never_comes_is_quarantined_in_the_end(tmp_path: Path):
    land(tmp_path, raw(gpus=1))
    land_events(tmp_path, [event(DAY, "79", gpu="GPU-never")])
    for days, expected in ((0, {}), (29, {}), (31, {"unknown gpu": 1}), (32, {})):
        land(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta(days=days)))
        assert fold(tmp_path, now=NOW + timedelta(days=days)).quarantined == expected


def test_rows_of_steps_that_are_not_over_wait_and_lagging_sources_join_them(tmp_path: Path):
    now = (DAY + pd.Timedelta("1h")).to_pydatetime()
    temperatures = raw(gpus=1, times=120)[["timestamp", "node", "gpu", "gpu_temp_c"]]
    powers = raw(gpus=1, times=120)[["timestamp", "node", "gpu", "power_w"]]
    land(tmp_path, temperatures)
    lagging = powers["timestamp"] <= DAY + pd.Timedelta("45min")
    land(tmp_path, powers[lagging])
    first = fold(tmp_path, now=now)
    assert "their steps to be over: 49 rows later than 2026-03-01T00:40:00.000Z" in first.waits_for
    assert samples_of(tmp_path)["timestamp"].max() == DAY + pd.Timedelta("40min")
    land(tmp_path, powers[~lagging])
    second = fold(tmp_path, now=now + timedelta(hours=1))
    assert second.quarantined == {}
    samples = samples_of(tmp_path)
    assert samples["sample_count"].sum() == 120
    assert samples[["gpu_temp_c", "power_w"]].notna().all(axis=None)
    assert landing(tmp_path).waiting() == []


def test_nothing_is_folded_before_a_step_is_over_and_it_says_so(tmp_path: Path):
    land(tmp_path, raw(gpus=1, times=4))
    result = fold(tmp_path, now=(DAY + pd.Timedelta("5min")).to_pydatetime())
    assert (result.folded, result.meta) == ({}, None)
    assert "4 rows later than" in result.waits_for
    assert fold(tmp_path).folded == {"samples": 1}


def test_clocks_that_cannot_be_right_move_nothing(tmp_path: Path):
    land(tmp_path, raw(gpus=2))
    for wrong in ("2040-01-01", "2001-01-01"):
        land(tmp_path, raw(gpus=2, times=3, start=pd.Timestamp(wrong, tz="UTC")))
    land_events(tmp_path, [event(pd.Timestamp("2041-01-01", tz="UTC"), "79", gpu=gpu(0))])
    result = fold(tmp_path)
    assert result.quarantined == {"a clock that cannot be right": 13}
    dataset = Dataset.open(tmp_path / "dataset")
    assert dataset.meta.span[0] == DAY.to_pydatetime()
    assert dataset.meta.span[1] < DAY.to_pydatetime() + timedelta(hours=1)
    assert (dataset.inventory()["installed_at"] == DAY).all()


def test_a_watched_node_alone_does_not_decide_what_a_fleet_is_of(tmp_path: Path):
    seen = {"node": "node-0", "rack": "r", "seen_at": DAY.to_pydatetime()}
    landing(tmp_path).land("inventory", pa.Table.from_pylist([seen]))
    land_events(tmp_path, [event(DAY, "cordon") | {"type": "drain"}])
    assert "no GPU was seen yet" in fold(tmp_path).waits_for
    land(tmp_path, raw(gpus=1))
    fold(tmp_path)
    assert Dataset.open(tmp_path / "dataset").meta.unit == "gpu"


def test_an_empty_name_is_no_gpu(tmp_path: Path):
    land(tmp_path, raw(gpus=1))
    land(tmp_path, raw(gpus=1).assign(gpu=""))
    assert fold(tmp_path).quarantined == {"missing gpu": 60}


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"timestamp": [DAY.to_pydatetime()], "node": ["n"], "gpu": ["g"]}),
        pa.table({"timestamp": [DAY.to_pydatetime()], "node": ["n"], "gpu": ["g"], "gpu_temp_c": ["warm"]}),
        pa.table({"when": [1]}),
    ],
)
def test_a_file_that_no_collector_of_ours_writes_is_put_aside(table: pa.Table, tmp_path: Path):
    good = land(tmp_path, raw())
    assert good is not None
    pq.write_table(table, good.with_name("foreign.parquet"))
    result = fold(tmp_path)
    assert (result.refused, result.folded) == (1, {"samples": 1})


def test_a_damaged_page_inside_a_file_is_found_before_the_fold(tmp_path: Path):
    good, damaged = land(tmp_path, raw()), land(tmp_path, raw(start=DAY + pd.Timedelta("1h")))
    assert good is not None
    assert damaged is not None
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 40] = b"\xff" * 40
    damaged.write_bytes(bytes(content))
    result = fold(tmp_path)
    assert (result.refused, result.folded) == (1, {"samples": 1})


def test_a_channel_that_nobody_declared_waits_for_its_declaration(tmp_path: Path):
    path = land(tmp_path, raw())
    assert path is not None
    table = pq.read_table(path)
    pq.write_table(table.append_column("bus_errors_total", pa.array([1.0] * table.num_rows)), path)
    land(tmp_path, raw(start=DAY + pd.Timedelta("1h")))
    result = fold(tmp_path)
    assert result.folded == {"samples": 1}
    assert "a declaration of bus_errors_total under `channels:`" in result.waits_for
    assert landing(tmp_path).waiting() == [path]


def test_an_endless_xid_code_is_no_reason_to_stop(tmp_path: Path):
    land(tmp_path, raw(gpus=1))
    land_events(tmp_path, [event(DAY, "9" * 5000, gpu=gpu(0)), event(DAY, "79", gpu=gpu(0))])
    fold(tmp_path)
    assert "79" in set(Dataset.open(tmp_path / "dataset").events()["code"])


def test_a_gpu_told_under_two_node_names_is_kept_in_one_place(tmp_path: Path):
    frame = raw(gpus=1, times=400)
    frame.loc[1::2, "node"] = "node-0.example.com"
    land(tmp_path, frame)
    fold(tmp_path)
    assert len(Dataset.open(tmp_path / "dataset").inventory()) == 1
