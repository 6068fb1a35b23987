"""The verb ``score``: usage, messages, exit codes, and the loop."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from predrain import score
from predrain.command import app
from tests.processes import invoke
from tests.serving.batch_world import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def command(world: World, out: Path, *more: str, dataset: Path | None = None) -> list[str]:
    where = dataset or world.dataset.path
    return ["score", "--dataset", str(where), "--model", str(world.bundle.path), "--out", str(out), *more]


def test_it_scores_once_and_says_so_the_second_time(world: World, tmp_path: Path) -> None:
    first = invoke(*command(world, tmp_path, "--json"))
    result = json.loads(first.stdout)
    assert (result["decision"], result["written"]) == ("2026-01-02T00:00:00Z", True)
    assert result["tiers"]["unknown"] == 5
    unknown, expired, thresholds = result["notes"].rsplit("; ", 2)
    assert unknown.startswith("5 of 12 GPUs are unknown (1: the newest sample is ")
    assert expired.startswith("these scores have expired")
    assert thresholds == "no tier has a threshold: every unit is clear (none: no backtest was given)"
    assert result["lag_seconds"] > 0  # the data end in the past
    again = invoke(*command(world, tmp_path))
    assert "written      no" in again.stdout
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["error"], status["decision"]) == (None, "2026-01-02T00:00:00Z")
    assert "predrain_score_success 1" in (tmp_path / "predrain_score.prom").read_text()


def test_a_failed_run_exits_with_1_and_leaves_its_mark(world: World, tmp_path: Path) -> None:
    out = tmp_path / "scores"
    result = invoke(*command(world, out, dataset=tmp_path / "absent"), code=1)
    assert "predrain: error: not a dataset" in result.output
    status = json.loads((out / "status.json").read_text())
    assert status["error"].startswith("not a dataset")
    assert (status["last_success"], status["consecutive_failures"]) == (None, 1)
    assert "predrain_score_success 0" in (out / "predrain_score.prom").read_text()
    assert not (out / "latest.json").exists()


def test_thresholds_come_from_the_parameters(world: World, tmp_path: Path) -> None:
    params = tmp_path / "tiers.yaml"
    params.write_text("policy: {thresholds: {watch: 0.000001, high: 1.0}}\nserving: {max_explained: 1}\n")
    result = invoke(*command(world, tmp_path / "out", "--params", str(params), "--json"))
    assert "no tier has a threshold" not in json.loads(result.stdout)["notes"]
    assert json.loads(result.stdout)["tiers"] == {"clear": 0, "watch": 7, "elevated": 0, "high": 0, "unknown": 5}
    params.write_text("policy: {thresholds: {watch: 0.5, high: 0.1}}")
    result = invoke(*command(world, tmp_path / "out", "--params", str(params)), code=1)
    assert "a higher tier needs a higher risk: watch <= elevated <= high" in result.output


def follow(world: World, out: Path, dataset: Path, until: Callable[[dict], bool]) -> tuple[int, str]:
    """Run the loop and end it by SIGTERM once its status is as asked."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if until(json.loads((out / "status.json").read_text())):
                    break
            except (OSError, ValueError):
                pass
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = CliRunner().invoke(app, command(world, out, "--interval", "1s", dataset=dataset))
    watcher.join()
    return result.exit_code, result.output


def test_the_loop_survives_a_failed_round_and_ends_well_when_the_last_was_good(world: World, tmp_path: Path) -> None:
    out, place = tmp_path / "scores", tmp_path / "data"

    def good_after_bad(status: dict) -> bool:
        if status["consecutive_failures"] == 1 and not place.exists():
            place.symlink_to(world.dataset.path)
        return status["last_success"] is not None

    code, output = follow(world, out, place, good_after_bad)
    assert code == 0
    assert "predrain score: round failed: not a dataset" in output
    assert "predrain score: decision 2026-01-02T00:00:00Z, written True" in output
    assert json.loads((out / "latest.json").read_text())["decision"] == "20260102T000000Z"


def test_the_loop_reports_its_state_once_where_nothing_is_new(world: World, tmp_path: Path) -> None:
    states: set[str] = set()

    def third_attempt(status: dict) -> bool:
        states.add(status["last_attempt"])
        return len(states) > 2

    code, output = follow(world, tmp_path, world.dataset.path, lambda status: True)
    assert (code, output.count("written True")) == (0, 1)
    code, output = follow(world, tmp_path, world.dataset.path, third_attempt)
    assert code == 0
    assert output.count("predrain score: decision 2026-01-02T00:00:00Z, written False") == 1


def test_the_loop_exits_with_1_when_the_last_round_failed(world: World, tmp_path: Path) -> None:
    code, output = follow(
        world, tmp_path / "s", tmp_path / "absent", lambda status: status["consecutive_failures"] >= 2
    )
    assert code == 1
    assert output.count("round failed") >= 2


def test_a_round_with_nothing_due_reads_neither_model_nor_data(world, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "_now", lambda: datetime(2026, 1, 1, 21, 30, tzinfo=UTC))
    invoke(*command(world, tmp_path))
    monkeypatch.setattr(score, "_now", lambda: datetime(2026, 1, 1, 21, 30, tzinfo=UTC) + timedelta(hours=1))
    result = invoke(*command(world, tmp_path, "--json", dataset=tmp_path / "absent"))
    assert json.loads(result.stdout)["written"] is False
    assert json.loads((tmp_path / "status.json").read_text())["last_success"] == "2026-01-01T22:30:00Z"
