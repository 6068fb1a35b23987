"""Every command of README and the tutorial runs as it is written."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pandas as pd
import pytest

from tests.processes import ROOT, predrain
from tests.waiting import wait

pytestmark = pytest.mark.system

ELSEWHERE = {
    "git clone": "this checkout",
    "make ": ".ci/run",
    "pip install": "tests/system/test_wheel.py",
    "dvc ": "tests/system/test_pipeline.py",
    "mlflow ui": "MLflow's own",
    "predrain doctor http": "tests/telemetry/doctor/test_series_source.py",
    "predrain collect prometheus": "tests/system/test_prometheus_backfill.py",
    "predrain assess --prometheus": "tests/predrain/test_assess.py",
    "predrain import ...": "the same command with more options: tests/telemetry/test_import_samples.py",
    "predrain backtest --params params.yaml --matrix data/matrix": "make results",
    "source ": "the environment of the tests",
    "predrain serve": "below: it does not end by itself",
}
"""Commands that are not run here, by how they begin, and where they are."""


def commands(page: str) -> list[str]:
    """Give the lines of the fenced blocks without a language, in order, continued lines joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(text for language, text in blocks if not language).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match(r"[a-z]+ ", line) and not line.startswith(tuple(ELSEWHERE))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with what a reader has: the repository's parameters, and files of an own fleet."""
    here = tmp_path_factory.mktemp("tutorial")
    shutil.copy(ROOT / "params.yaml", here)
    shutil.copytree(ROOT / "params", here / "params")
    predrain("simulate", "--gpus", 64, "--days", 45, "--acceleration", 40, "--seed", 5, "--out", here / "own")
    samples = [pd.read_parquet(path) for path in sorted((here / "own" / "telemetry").rglob("*.parquet"))]
    pd.concat(samples).to_parquet(here / "dcgm.parquet", index=False)
    pd.read_parquet(here / "own" / "inventory.parquet").to_csv(here / "hosts.csv", index=False)
    events = pd.read_parquet(here / "own" / "events.parquet")
    events[events["type"] != "xid"].to_csv(here / "tickets.csv", index=False)
    bus = pd.read_parquet(here / "own" / "inventory.parquet").set_index("gpu")["pci_bus_id"]
    xids = events[(events["type"] == "xid") & events["gpu"].isin(bus.index)]
    lines = [
        f"{at:%Y-%m-%dT%H:%M:%S.%f+00:00} {node} kernel: NVRM: Xid (PCI:{bus[gpu]}): {code}, pid=1, name=a, text"
        for at, node, gpu, code in xids[["timestamp", "node", "gpu", "code"]].itertuples(index=False)
    ]
    (here / "dmesg.log").write_text("\n".join(lines) + "\n")
    shutil.rmtree(here / "own")
    return here


def test_the_commands_of_the_tutorial_and_then_of_the_readme(folder: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    written = dict.fromkeys([*commands("docs/tutorial.md"), *commands("README.md")])
    assert len(written) >= 9
    for line in written:
        run = subprocess.run(
            ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert run.returncode == 0, f"{line}\n{run.stdout}{run.stderr}"
    assert (folder / "mine" / "dataset.json").exists()
    assert (folder / "assessment" / "assessment.json").exists()
    assert (folder / "scores" / "latest.json").exists()
    (serve,) = re.findall(r"^(predrain serve .*)$", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE)
    service = subprocess.Popen(["bash", "-c", f"exec {serve}"], cwd=folder, env=environment, start_new_session=True)
    try:
        wait(lambda: service.poll() is not None or answered("http://127.0.0.1:8080/"))
        assert service.poll() is None
    finally:
        os.killpg(service.pid, signal.SIGTERM)
        assert service.wait(60) == 0


def answered(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
