"""Two backtests side by side, and a folder of one's own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner, Result

from pipeline.params import Params, load_params
from predrain.command import app


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def other(small_backtest: Path, tmp_path: Path) -> Path:
    """Give the same backtest with its ranks turned round."""
    folder = tmp_path / "other"
    shutil.copytree(small_backtest, folder, ignore=shutil.ignore_patterns("matrix", ".folds"))
    file = folder / "predictions_all.parquet"
    frame = pd.read_parquet(file)
    group = frame.groupby(["model", "variant", "decision_time"], observed=True)["rank"]
    frame["rank"] = (group.transform("max") + 1 - frame["rank"]).astype("int32")
    frame.to_parquet(file)
    return folder


def test_a_backtest_is_no_better_than_itself(small_backtest: Path) -> None:
    result = json.loads(run("compare", small_backtest, small_backtest, "--json").stdout)
    assert result["params"] == {}
    for row in result["statistics"].values():
        assert row["difference"] == 0
        assert row["one"] == row["two"]


def test_precision_is_that_of_as_many_alerts_on_both_sides(small_backtest: Path, other: Path) -> None:
    result = json.loads(run("compare", small_backtest, other, "--json").stdout)
    for side, folder in (("one", small_backtest), ("two", other)):
        frame = pd.read_parquet(folder / "predictions_all.parquet")
        mine = frame[(frame["model"] == result["profiles"][0]) & (frame["variant"] == "sliding")]
        nodes = mine.dropna(subset=["label"]).groupby(["decision_time", "node"], observed=True)
        nodes = nodes.agg(rank=("rank", "min"), label=("label", "max")).reset_index()
        top = nodes[nodes.groupby("decision_time")["rank"].rank() <= result["k"]]
        assert np.isclose(result["statistics"]["precision_at_k"][side], (top["label"] == 1).mean())
    row = result["statistics"]["roc_auc"]
    assert np.isclose(row["difference"], row["two"] - row["one"])
    assert row["low"] <= row["difference"] <= row["high"]


def test_other_labels_are_not_compared(small_backtest: Path, other: Path) -> None:
    frame = pd.read_parquet(other / "predictions_all.parquet")
    frame["label"] = 1 - frame["label"]
    frame.to_parquet(other / "predictions_all.parquet")
    result = run("compare", small_backtest, other)
    assert result.exit_code == 1
    assert "another label" in result.stderr


def test_another_fleet_is_not_compared(small_backtest: Path, other: Path) -> None:
    frame = pd.read_parquet(other / "predictions_all.parquet")
    frame["unit"] = "other-" + frame["unit"].astype(str)
    frame.to_parquet(other / "predictions_all.parquet")
    result = run("compare", small_backtest, other)
    assert result.exit_code == 1
    assert "no common decision" in result.stderr


def test_a_new_folder_holds_the_defaults_and_replaces_nothing(tmp_path: Path) -> None:
    assert run("init", tmp_path / "mine", "--dataset", "/srv/fleet").exit_code == 0
    held = load_params([tmp_path / "mine" / "predrain.yaml"]).model_dump(exclude={"data"})
    assert held == Params().model_dump(exclude={"data"})
    assert yaml.safe_load((tmp_path / "mine" / "predrain.yaml").read_text())["data"] == {"dataset": "/srv/fleet"}
    before = sorted(path.name for path in (tmp_path / "mine").iterdir())
    (tmp_path / "mine" / "dvc.yaml").unlink()
    again = run("init", tmp_path / "mine")
    assert again.exit_code == 1
    assert "predrain.yaml, .gitignore, README.md exist already" in again.stderr
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        name for name in before if name != "dvc.yaml"
    ]
