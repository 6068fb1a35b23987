"""A folder of the operator's own: every command of its README works in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import predrain

pytestmark = pytest.mark.system

WHO = {f"GIT_{role}_{key}": f"{key}@x" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}


def test_the_readme_of_a_new_folder_runs_as_it_is_written(tmp_path: Path, light_params_file: Path) -> None:
    predrain("simulate", "--gpus", 32, "--days", 40, "--acceleration", 100, "--seed", 131, "--out", tmp_path / "fleet")
    predrain("init", tmp_path / "mine")
    decided = tmp_path / "mine" / "predrain.yaml"
    params = yaml.safe_load(decided.read_text())
    for section, values in yaml.safe_load(light_params_file.read_text()).items():
        params[section] = params.get(section, {}) | values
    decided.write_text(yaml.safe_dump(params))
    environment = os.environ | WHO | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"DVC_NO_ANALYTICS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    (block,) = re.findall(r"^```\n(.*?)^```", (tmp_path / "mine" / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.replace("/srv/dvc", str(tmp_path / "store")) for line in block.splitlines()]
    said = {}
    for line in lines:
        if line.startswith("mlflow ui"):
            continue  # it does not end by itself
        run = subprocess.run(
            ["bash", "-ec", line], cwd=tmp_path / "mine", env=environment, capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        assert run.returncode == 0, f"{line}\n{run.stdout}{run.stderr}"
        said[" ".join(line.split()[:3])] = run.stdout
    assert "training.window" in said["dvc exp show"]
    assert "average_precision" in said["dvc metrics diff"]
    page = (tmp_path / "mine" / "dvc_plots" / "index.html").read_text()
    assert all(name in page for name in ("by_month", "precision_recall", "lead_times", "calibration"))
    assert "pushed" in said["dvc remote add"]
    again = subprocess.check_output(["dvc", "repro"], cwd=tmp_path / "mine", env=environment, text=True, timeout=600)
    assert "Data and pipelines are up to date" in again
