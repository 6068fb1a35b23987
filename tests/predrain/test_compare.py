"""Two backtests side by side, and priors built twice."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from models.learners.prior import load_prior
from pipeline.params import Params, load_params
from simulator.scenarios import draw_fleet
from tests.processes import invoke


@pytest.fixture
def other(small_backtest: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    shutil.copytree(small_backtest, folder, ignore=shutil.ignore_patterns("matrix", ".fits"))
    file = folder / "predictions_all.parquet"
    frame = pd.read_parquet(file)
    group = frame.groupby(["model", "variant", "decision_time"], observed=True)["rank"]
    frame["rank"] = (group.transform("max") + 1 - frame["rank"]).astype("int32")
    frame.to_parquet(file)
    return folder


def test_precision_is_that_of_as_many_alerts_on_both_sides(small_backtest: Path, other: Path) -> None:
    result = json.loads(invoke("compare", small_backtest, other, "--json").stdout)
    for side, folder in (("one", small_backtest), ("two", other)):
        frame = pd.read_parquet(folder / "predictions_all.parquet")
        of_profile = frame[(frame["model"] == result["profiles"][0]) & (frame["variant"] == "sliding")]
        nodes = of_profile.dropna(subset=["label"]).groupby(["decision_time", "node"], observed=True)
        nodes = nodes.agg(rank=("rank", "min"), label=("label", "max")).reset_index()
        top = nodes[nodes.groupby("decision_time")["rank"].rank() <= result["k"]]
        assert np.isclose(result["statistics"]["precision_at_k"][side], (top["label"] == 1).mean())
    assert result["params"] == {}
    row = result["statistics"]["roc_auc"]
    assert np.isclose(row["difference"], row["two"] - row["one"])
    assert row["low"] <= row["difference"] <= row["high"]


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("label", lambda held: 1 - held, "different labels"),
        ("unit", lambda held: "other-" + held, "no decision in common"),
    ],
)
def test_another_fleet_or_other_labels_are_not_compared(small_backtest, other, column, change, message):
    frame = pd.read_parquet(other / "predictions_all.parquet")
    frame[column] = change(frame[column].astype(str) if column == "unit" else frame[column])
    frame.to_parquet(other / "predictions_all.parquet")
    assert message in invoke("compare", small_backtest, other, code=1).stderr


def test_a_new_folder_holds_the_defaults_and_replaces_nothing(tmp_path: Path) -> None:
    invoke("init", tmp_path / "mine", "--dataset", "/srv/fleet")
    settings = load_params([tmp_path / "mine" / "predrain.yaml"]).model_dump(exclude={"data"})
    assert settings == Params().model_dump(exclude={"data"})
    assert yaml.safe_load((tmp_path / "mine" / "predrain.yaml").read_text())["data"] == {"dataset": "/srv/fleet"}
    names = sorted(path.name for path in (tmp_path / "mine").iterdir())
    (tmp_path / "mine" / "dvc.yaml").unlink()
    again = invoke("init", tmp_path / "mine", code=1)
    assert "predrain.yaml, .gitignore, README.md already exist" in again.stderr
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [name for name in names if name != "dvc.yaml"]


def groups_of(prior: Path) -> set[str]:
    return {name.split("__")[0] for name in load_prior(str(prior)).card.columns}


def test_it_is_built_to_the_same_bytes_again(tmp_path):
    for out in (tmp_path / "one", tmp_path / "two"):
        invoke("prior", "build", "--out", out, "--fleets", 2, "--gpus", 48, "--days", 20)
    for file in ("card.json", "model.txt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert groups_of(tmp_path / "one") == {"history", "peers", "onset", "gaps"}


def test_it_is_built_from_other_clusters_by_name_and_without_what_tells_them_apart(tmp_path):
    invoke("simulate", "--out", tmp_path / "fleet", "--gpus", 48, "--days", 20, "--acceleration", 30)
    for name, groups in (("one", "[onset, static]"), ("two", "[history, static]")):
        (tmp_path / f"{name}.yaml").write_text(f"features: {{groups: {groups}}}")
        params = ("--dataset", tmp_path / "fleet", "--params", tmp_path / f"{name}.yaml")
        invoke("features", *params, "--out", tmp_path / name)
    invoke("prior", "build", "--out", tmp_path / "p", "--matrix", tmp_path / "one", "--matrix", tmp_path / "two")
    assert groups_of(tmp_path / "p") == {"onset", "history"}


def test_a_folder_that_is_no_prior_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    assert "is not a prior" in invoke("prior", "build", "--out", tmp_path, code=1).output
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_a_prior_to_measure_knows_no_fleet_like_those_measured(tmp_path):
    build = ("prior", "build", "--out", tmp_path / "prior", "--fleets")
    assert "every fleet is omitted" in invoke(*build, 3, "--without-silent", 0, 1, code=1).output
    between = (0, (draw_fleet(7, 0).silent + draw_fleet(7, 1).silent) / 2)
    invoke(*build, 2, "--gpus", 24, "--days", 14, "--without-silent", *between)
    made_of = load_prior(str(tmp_path / "prior")).card.made_of
    assert (made_of["fleets"], made_of["without_silent"]) == (1, [*between])
