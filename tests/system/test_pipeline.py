"""``dvc repro`` in a clone: it makes everything, then nothing, then only what a changed parameter asks for."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.system

FLEET = {"gpus": 32, "days": 40, "seed": 131, "scenario": "base", "acceleration": 100.0}


def repro(project: Path) -> str:
    env = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DVC_NO_ANALYTICS": "1",
    }
    done = subprocess.run(
        [str(BIN / "dvc"), "repro"], cwd=project, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(project: Path) -> str:
    return subprocess.run(
        ["git", "status", "--porcelain"], cwd=project, capture_output=True, text=True, timeout=300, check=True
    ).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, light_params_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("clone") / "predrain"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], timeout=120, check=True)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    for section, values in {**yaml.safe_load(light_params_file.read_text()), "simulate": FLEET}.items():
        params[section] |= values
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    return folder


def test_repro_makes_everything_then_nothing_then_what_changed(project: Path) -> None:
    first = repro(project)
    for stage in ("prepare", "features", "train", "backtest", "report"):
        assert f"Running stage '{stage}'" in first
    assert (project / "data" / "backtest" / "report" / "index.html").is_file()
    assert status(project) == " M params.yaml\n"

    assert "Data and pipelines are up to date." in repro(project)

    params = yaml.safe_load((project / "params.yaml").read_text())
    params["backtest"]["k"] = 3
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    third = repro(project)
    ran = {
        stage for stage in ("prepare", "features", "train", "backtest", "report") if f"Running stage '{stage}'" in third
    }
    assert ran == {"backtest", "train", "report"}  # the bundle carries what the backtest allows to promise
    assert json.loads((project / "data" / "backtest" / "metrics.json").read_text())["k"] == 3

    with sqlite3.connect(project / "mlflow.db") as store:
        runs = [name for (name,) in store.execute("select name from runs order by start_time")]
        (refits,) = store.execute("select max(step) from metrics where key like 'refit.%'").fetchone()
        digests = {value for (value,) in store.execute("select value from tags where key = 'dataset_digest'")}
    assert [name.startswith("backtest of ") for name in runs] == [True, False, True, False]
    assert refits  # every refit is a step of its backtest
    dataset = json.loads((project / "data" / "dataset" / "dataset.json").read_text())
    assert digests == {dataset["digest"]}
