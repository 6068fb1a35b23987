"""``predrain assess`` from a real Prometheus in one command, and what it names next, run as it is written."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from tests.light_models import lightgbm_alone
from tests.processes import predrain
from tests.system.prometheus_server import load_blocks, need_prometheus, prometheus
from tests.system.simulated_exposition import write_openmetrics

pytestmark = pytest.mark.system

GPUS, DAYS = 32, 31
LIGHT = lightgbm_alone(
    20,
    "features: {windows: [1h], history_windows: [7d]}",
    "training: {candidate_windows: [10d], refit_every: 10d, augmentation: 2}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a fleet's tickets and parameters; ``url`` has the address of the server with its telemetry."""
    need_prometheus()
    base = tmp_path_factory.mktemp("assess")
    begin = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=DAYS)
    simulate(base / "sim", gpus=GPUS, days=DAYS, seed=101, scenario="announced", acceleration=90.0, start=begin)
    (base / "light.yaml").write_text(LIGHT)
    fleet = Dataset.open(base / "sim")
    tickets = fleet.events()
    tickets.to_csv(base / "tickets.csv", index=False)  # further back than what is assessed
    write_openmetrics(fleet, base / "history.om")
    load_blocks(base / "history.om", base / "data")
    with prometheus(base / "data") as url:
        (base / "url").write_text(url)
        yield base


def assess(folder: Path) -> tuple[dict, str, str]:
    """Assess the last 30 days in one command; return what it wrote, and what it printed on stdout and stderr."""
    words = ("--prometheus", (folder / "url").read_text(), "--since", "30d", "--events", "tickets.csv")
    done = predrain("assess", *words, "--params", "light.yaml", "--out", "out", cwd=folder)
    return json.loads((folder / "out" / "assessment.json").read_text()), done.stdout, done.stderr


def test_a_prometheus_is_assessed_in_one_command_and_the_next_ones_take_its_settings(folder: Path) -> None:
    content, output, announced = assess(folder)
    # Counted at some instants of the period: with GPUs that were replaced in it, without a few that are silent.
    size = re.match(r"predrain: (\d+) GPUs, at most ([\d,]+) values of 30 days", announced)
    assert size is not None, announced
    assert 0.75 * GPUS <= int(size[1]) <= content["data"]["units"]
    assert int(size[2].replace(",", "")) > 1e6
    assert content["data"]["units"] >= GPUS
    assert content["data"]["days"] == pytest.approx(30, abs=1)
    assert sum(content["data"]["failures"].values()) >= 5
    assert content["predictable"]["failures"] >= 1
    train, score, act = (line.split()[1:] for line in output.split("Next steps\n")[1].splitlines())
    predrain(*train, cwd=folder)
    predrain(*score, cwd=folder)
    (summary,) = (folder / "out" / "scores" / "decisions").rglob("summary.json")
    assert json.loads(summary.read_text())["thresholds"] == pytest.approx(content["settings"]["thresholds"], rel=1e-3)
    nodes = sorted(Dataset.open(folder / "out" / "dataset").inventory()["node"].unique())
    cluster = {"format": 1, "nodes": [{"name": name, "cluster": "c", "group": "g"} for name in nodes]}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    act[act.index("kubernetes")] = "file"
    before = (folder / "cluster.json").read_bytes()
    predrain(*act, "--cluster", "cluster.json", cwd=folder)
    assert (folder / "cluster.json").read_bytes() == before, "a dry run marks nothing"

    written = {path: path.stat().st_mtime_ns for path in (folder / "out" / "dataset").rglob("*") if path.is_file()}
    written |= {path: path.stat().st_mtime_ns for path in (folder / "out" / "matrix").rglob("*") if path.is_file()}
    again, _, _ = assess(folder)
    assert again == content
    assert {path for path, at in written.items() if path.stat().st_mtime_ns != at} == set(), "made again"
