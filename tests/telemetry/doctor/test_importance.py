"""The importance of channels, from the files that backtests and trainings leave."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.importance import XIDS, read_importance


def write_attributions(folder: Path, rows: list[tuple[int, str, str, str, str | None, float, int]]) -> None:
    names = ("fold", "model", "feature", "group", "channel", "share", "rows")
    table = pa.table({name: [row[at] for row in rows] for at, name in enumerate(names)})
    (folder / "evaluation").mkdir(parents=True)
    pq.write_table(table, folder / "evaluation" / "attributions.parquet")


def write_bundle(folder: Path) -> None:
    features = [("telemetry", "power_w_max"), ("peers", "gpu_temp_c"), ("history", "xid_memory"), ("static", "age")]
    manifest = {
        "profile": "mean_rank",
        "features": [
            {"group": group, "channel": channel, "name": f"f{n}"} for n, (group, channel) in enumerate(features)
        ],
    }
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))


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
    importance, source = read_importance(tmp_path, None, CATALOGUE)
    assert importance.shares == pytest.approx({"power_w": 0.5, "clocks_event_reasons": 0.3, XIDS: 0.2})
    assert importance.used == {"power_w", "clocks_event_reasons"}
    assert importance.of(["power_w", "gpu_temp_c"]) == pytest.approx(0.5)
    assert importance.of(["gpu_temp_c"]) is None
    assert "attributions of mean_rank over 2 folds" in source
    assert "not what its precision would lose" in source


def test_a_bundle_tells_what_it_uses(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    importance, _ = read_importance(None, tmp_path, CATALOGUE)
    assert importance.used == {"power_w", "gpu_temp_c"}
    assert importance.of(["power_w"]) is None


def test_without_files_it_says_what_to_run(tmp_path: Path) -> None:
    importance, source = read_importance(tmp_path, tmp_path / "bundle", CATALOGUE)
    assert importance is None
    assert f"{tmp_path}/evaluation/attributions.parquet is not there; {tmp_path}/bundle holds no bundle" in source
    assert "Run `predrain train` or `predrain backtest`" in source


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "attributions.parquet").write_bytes(b"PAR0")
    with pytest.raises(InputError, match="the file cannot be used"):
        read_importance(tmp_path, None, CATALOGUE)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"lacks or misstates 'features'.*manifest.json"):
        read_importance(None, tmp_path / "bundle", CATALOGUE)
