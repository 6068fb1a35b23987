"""What channels are worth, from the files that backtests and trainings leave."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.worth import BESIDES, EVENTS, XIDS, channel_of, read_worth
from telemetry.errors import InputError


def write_attributions(folder: Path, rows: list[tuple[int, str, str, str, str | None, float, int]]) -> None:
    names = ("fold", "model", "feature", "group", "channel", "share", "rows")
    table = pa.table({name: [row[at] for row in rows] for at, name in enumerate(names)})
    (folder / "evaluation").mkdir(parents=True)
    pq.write_table(table, folder / "evaluation" / "attributions.parquet")


def write_bundle(folder: Path, *, trees: str | None) -> None:
    features = [("telemetry", "power_w_max"), ("peers", "gpu_temp_c"), ("history", "xid_memory"), ("static", "age")]
    manifest = {
        "profile": "mean_rank",
        "features": [
            {"group": group, "channel": channel, "name": f"f{n}"} for n, (group, channel) in enumerate(features)
        ],
    }
    (folder / "learners").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if trees is not None:
        (folder / "learners" / "lightgbm.txt").write_text(trees)


def test_shares_are_averaged_over_folds_by_their_rows_for_the_profile(tmp_path: Path) -> None:
    write_attributions(
        tmp_path,
        [
            (0, "mean_rank", "a", "telemetry", "power_w", 0.6, 300),
            (0, "mean_rank", "b", "telemetry", "clocks_event_reasons_power_brake", 0.4, 300),
            (1, "mean_rank", "a", "telemetry", "power_w", 0.2, 100),
            (1, "mean_rank", "c", "history", "xid_memory", 0.8, 100),
            (0, "xgboost", "a", "telemetry", "gpu_temp_c", 1.0, 300),
        ],
    )
    (tmp_path / "metrics.json").write_text('{"profile": "mean_rank"}')
    worth, said = read_worth(tmp_path, None, CATALOGUE)
    assert worth is not None
    assert worth.shares == pytest.approx({"power_w": 0.5, "clocks_event_reasons": 0.3, XIDS: 0.2})
    assert worth.used == {"power_w", "clocks_event_reasons"}
    assert worth.of(["power_w", "gpu_temp_c"]) == pytest.approx(0.5)
    assert worth.of(["gpu_temp_c"]) is None
    assert "attributions of mean_rank over 2 folds" in said
    assert "not what its precision would lose" in said


def test_a_bundle_tells_by_the_gain_of_its_trees(tmp_path: Path) -> None:
    first = "tree\nversion=v4\nTree=0\nsplit_feature=0 1 2\nsplit_gain=5 3 1\n"
    write_bundle(tmp_path / "bundle", trees=f"{first}\nTree=1\nsplit_feature=0 3\nsplit_gain=0.5 0.5\n")
    worth, said = read_worth(tmp_path / "no-backtest", tmp_path / "bundle", CATALOGUE)
    assert worth is not None
    assert worth.shares == pytest.approx({"power_w": 0.55, "gpu_temp_c": 0.3, XIDS: 0.1, BESIDES: 0.05})
    assert worth.used == {"power_w", "gpu_temp_c"}
    assert "split gain of the bundle's LightGBM" in said
    assert EVENTS not in worth.shares


def test_a_bundle_without_such_trees_tells_only_what_it_uses(tmp_path: Path) -> None:
    write_bundle(tmp_path, trees=None)
    worth, _ = read_worth(None, tmp_path, CATALOGUE)
    assert worth is not None
    assert worth.used == {"power_w", "gpu_temp_c"}
    assert worth.of(["power_w"]) is None


def test_without_files_it_says_what_to_run(tmp_path: Path) -> None:
    worth, said = read_worth(tmp_path, tmp_path / "bundle", CATALOGUE)
    assert worth is None
    assert f"{tmp_path}/evaluation/attributions.parquet is not there; {tmp_path}/bundle holds no bundle" in said
    assert "Run `predrain train` or `predrain backtest`" in said


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "attributions.parquet").write_bytes(b"PAR0")
    with pytest.raises(InputError, match="the file cannot be used"):
        read_worth(tmp_path, None, CATALOGUE)
    write_bundle(tmp_path / "bundle", trees="split_feature=9\nsplit_gain=1\n")
    with pytest.raises(InputError, match=r"a split on feature 9 of 4 .*lightgbm.txt"):
        read_worth(None, tmp_path / "bundle", CATALOGUE)


@pytest.mark.parametrize(
    ("name", "channel"),
    [
        ("power_w", "power_w"),
        ("power_w_min", "power_w"),
        ("ecc_sbe_volatile_total_rise", "ecc_sbe_volatile_total"),
        ("clocks_event_reasons_hw_slowdown", "clocks_event_reasons"),
        ("samples", None),
    ],
)
def test_features_channels_are_led_back_to_the_catalogue(name: str, channel: str | None) -> None:
    assert channel_of(name, CATALOGUE) == channel
