"""Tables with a row for each value, as databases of metrics export them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.mapping import load_mapping
from telemetry.importing.suggestion.questions import Inquiry, find_questions
from tests.telemetry.helpers import all_samples, gpu, inventory_frame, run_import

TIDY = "samples: {long: {metric: metric, value: value}}\n"
WINDOWS = Path(__file__).parents[3].parent / "shared/data/gwdg/telemetry_raw_bz2"


def wide(times: int = 6) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "timestamp": np.repeat(pd.date_range("2026-03-01", periods=times, freq="10min", tz="UTC").astype(str), 2),
            "uuid": [gpu(0), gpu(1)] * times,
            "DCGM_FI_DEV_GPU_TEMP": random.integers(40, 80, 2 * times),
            "DCGM_FI_DEV_POWER_USAGE": random.integers(100, 400, 2 * times),
        }
    )


@pytest.mark.parametrize("order", ["metric", "timestamp", "random", "files"])
def test_a_long_table_is_the_wide_one(tmp_path: Path, order: str) -> None:
    frame = wide()
    long = frame.melt(["timestamp", "uuid"], var_name="metric", value_name="value")
    other = long.assign(metric="node_load1", uuid=None)
    given = {"samples": [tmp_path / "tidy.csv"]}
    if order == "files":  # one of which has no metric of a GPU
        other.to_csv(tmp_path / "other.csv", index=False)
        given["samples"].insert(0, tmp_path / "other.csv")
    else:
        long = pd.concat([long, other])
    long = (
        long.sample(frac=1, random_state=1)
        if order == "random"
        else long.sort_values("metric" if order == "files" else order, kind="stable")
    )
    long.to_csv(tmp_path / "tidy.csv", index=False)
    inquiry = Inquiry(given, None, *find_questions(given, load_mapping(None), CATALOGUE))
    assert "To decide" not in inquiry.report(tmp_path / "mapping.yaml")
    result = run_import(tmp_path, samples=given["samples"], mapping=inquiry.mapping_text(), out="long")
    pd.testing.assert_frame_equal(all_samples(result), all_samples(run_import(tmp_path, samples=frame, out="wide")))


@pytest.mark.parametrize(
    "labels", ['{{"UUID": "{}", "job": "dcgm"}}', 'UUID="{}",job="dcgm"', '{{UUID="{}", job="dcgm"}}', "UUID={},job=x"]
)
def test_labels_in_a_column_of_their_own_name_the_gpu(tmp_path: Path, labels: str) -> None:
    rows = [(f"2026-03-01T00:{minute}0:00Z", "DCGM_FI_DEV_GPU_TEMP", 50 + minute) for minute in range(6)]
    frame = pd.DataFrame(rows, columns=["_time", "_field", "_value"]).assign(labels=labels.format(gpu(0)))
    frame.to_csv(tmp_path / "influx.csv", index=False)
    mapping = "samples: {columns: {_time: timestamp}, long: {metric: _field, value: _value, labels: labels}}\n"
    result = run_import(tmp_path, samples=[tmp_path / "influx.csv"], mapping=mapping)
    assert all_samples(result)["gpu_temp_c"].tolist() == [50, 51, 52, 53, 54, 55]


def test_progress_counts_the_rows_of_long_files_and_corrects_its_total_after_each(tmp_path: Path) -> None:
    frame = wide(60)
    others = pd.concat([frame[["timestamp", "uuid"]].assign(metric=f"node_{n}", value=0) for n in range(50)])
    files = [tmp_path / f"{n}.csv" for n in range(4)]
    for n, file in enumerate(files):
        long = frame.iloc[n::4].melt(["timestamp", "uuid"], var_name="metric", value_name="value")
        pd.concat([others, long]).to_csv(file, index=False)
    calls: list[tuple[int, int]] = []
    run_import(tmp_path, samples=files, mapping=TIDY, progress=lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls, strict=True)
    assert sorted(done) == list(done)
    assert calls[-1][0] == totals[-1]
    assert set(totals[2:]) == {totals[-1]}, "the files have the same size"


def test_a_value_has_the_unit_that_its_row_names(tmp_path: Path) -> None:
    given = [("power.draw", 300_000, "mW"), ("temperature.gpu", 122, "F"), ("utilization.gpu", 90, "Percent")]
    given += [("pstate", 0, "None")]
    rows = [(when, gpu(0), *row) for when in wide()["timestamp"].unique() for row in given]
    frame = pd.DataFrame(rows, columns=["timestamp", "uuid", "metric", "value", "unit"])
    frame.to_csv(tmp_path / "tidy.csv", index=False)
    result = run_import(tmp_path, samples=[tmp_path / "tidy.csv"], mapping=TIDY)
    first = all_samples(result).iloc[0]
    expected = {"power_w": 300, "gpu_temp_c": pytest.approx(50), "gpu_util_pct": 90, "pstate": 0}
    assert {name: first[name] for name in expected} == expected
    assert not result.accounting.tables["sample values"].left_out


def test_two_values_of_one_metric_at_one_time_conflict_and_are_set_aside(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"timestamp": "2026-03-01T00:00:00Z", "uuid": gpu(0), "metric": "gpu_temp_c", "value": [50, 60]}
    )
    frame.to_csv(tmp_path / "tidy.csv", index=False)
    result = run_import(tmp_path, samples=[tmp_path / "tidy.csv"], mapping=TIDY)
    assert all_samples(result)["gpu_temp_c"].tolist() == [50]
    assert result.quarantined == {"conflicting duplicate sample": 1}


@pytest.mark.skipif(not WINDOWS.is_dir(), reason="the published windows of GWDG are absent")
def test_a_published_window_is_imported_as_downloaded(tmp_path: Path) -> None:
    path = sorted(WINDOWS.glob("ggpu149_2026*_tidy.csv.bz2"))[0]
    table = pd.read_csv(path, usecols=["timeUtc", "node", "uuid", "metric", "value"], dtype={"uuid": str})
    temperatures = table[table["metric"] == "DCGM_FI_DEV_GPU_TEMP"]
    installations = temperatures.groupby(["uuid", "node"], as_index=False)["timeUtc"].min()
    inventory = inventory_frame(gpus=len(installations)).assign(
        gpu=installations["uuid"], node=installations["node"], installed_at="2025-01-01T00:00:00Z"
    )
    result = run_import(tmp_path, samples=[path], inventory=inventory, mapping=TIDY)
    rows = all_samples(result).dropna(subset=["gpu_temp_c"])[["gpu", "timestamp", "gpu_temp_c"]]
    given = temperatures.assign(timestamp=pd.to_datetime(temperatures["timeUtc"], utc=True))
    given = given.merge(rows, how="left", left_on=["uuid", "timestamp"], right_on=["gpu", "timestamp"])
    used = given[given["gpu"].notna()]
    assert len(used) == len(rows)
    assert (used["gpu_temp_c"] == used["value"]).all()
    # All four GPUs fell off the bus; the exporter repeated their last page until the reboot.
    frozen = given[given["gpu"].isna()]
    assert len(frozen) == result.quarantined["frozen instrument"]
    for uuid, stretch in frozen.groupby("uuid"):
        lost = table[(table["uuid"] == uuid) & (table["metric"] == "DCGM_FI_DEV_XID_ERRORS") & (table["value"] == 79)]
        assert set(stretch["timeUtc"]) <= set(lost["timeUtc"])
        assert stretch["value"].nunique() == 1
        assert len(stretch) >= len(lost) - 6  # the first samples of a stretch do not show yet that it is one
    assert frozen["uuid"].nunique() == len(installations)
    assert (result.dataset.events()["code"] == "79").sum() > 0
