"""The live demo: its world at work, and the command that shows it and leaves nothing behind."""

import json
import os
import signal
import subprocess
import urllib.request
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from policy.ladder.rungs import RUNGS
from predrain.demo.world import ArrivedDataset, World
from tests.processes import PREDRAIN


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world in which each rung was used: within five minutes of the demo."""
    demo = World.make(tmp_path_factory.mktemp("demo"), gpus=128, seed=11, say=lambda _: None, ahead=timedelta(days=40))
    for hour in range(300):
        demo.step(demo.now + timedelta(hours=1))
        if hour % 20 == 0 and all(times for times, _ in demo.count().rungs.values()):
            return demo
    raise AssertionError(f"not each rung was used: {demo.balance.rungs}")


def newest_summary(world: World) -> dict:
    newest = json.loads((world.folder / "scores" / "latest.json").read_text())
    return json.loads((world.folder / "scores" / "decisions" / newest["decision"] / "summary.json").read_text())


def test_a_drain_rests_on_scores_that_hold_and_stands_in_the_ledger(world: World) -> None:
    summary = newest_summary(world)
    assert datetime.fromisoformat(summary["decision_time"]) <= world.now < datetime.fromisoformat(summary["expires_at"])
    assert any("drain" in json.dumps(row, default=str) for row in world.ledger().rounds(50))


def test_nothing_of_the_time_to_come_is_seen(world: World) -> None:
    arrived = ArrivedDataset.by(world.dataset, world.now)
    assert arrived.meta.span[1] == world.now
    assert (arrived.events()["known_at"] <= world.now).all()
    assert len(arrived.events()) < len(world.dataset.events())
    installations = arrived.inventory()
    assert (installations["installed_at"] <= world.now).all()
    assert not (installations["removed_at"] > world.now).any()


def test_what_came_of_acting_is_counted_until_now(world: World) -> None:
    balance = world.count()
    fleet = world.cluster.fleet
    assert balance.drains >= 1
    assert balance.failures == int(((fleet.at >= fleet.begin) & (fleet.at < world.now.timestamp() * 1000)).sum())
    assert f"Failures: {balance.failures}" in world.notice()
    assert list(balance.rungs) == list(RUNGS[1:])
    assert sum(balance.rungs[rung][0] for rung in ("swap", "drain")) == balance.drains
    results = {probe[4] >= 0 for probe in world.cluster.diagnostic.probes.values() if not probe[3]}
    assert results == {True, False}, "a probe found a failure, and one passed"
    assert all(times > 0 for times, _ in balance.rungs.values())
    steps = [step for node in fleet.names for step in world.ledger().work(node)]
    acknowledged = {step["key"] for step in steps if step["kind"] == "acknowledged"}
    assert acknowledged & {*world.cluster.checkpoints}, "a job on a node that stays in service wrote a checkpoint"
    assert all(f"{rung} {net:,.0f} ({times}x)" in world.notice() for rung, (times, net) in balance.rungs.items())


def test_the_model_does_not_grow_too_old_to_act_on(world: World) -> None:
    world.step(world.now + timedelta(days=22))
    fitted = datetime.fromisoformat(newest_summary(world)["model"]["fitted_at"])
    assert world.now - fitted < timedelta(days=2)


def test_the_command_shows_the_fleet_and_leaves_nothing_behind(tmp_path: Path) -> None:
    # how long it may run is how much is simulated
    command = [*PREDRAIN, "demo", "--listen", "127.0.0.1:0", "--gpus", "64", "--stop-after", "10m"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    address = process.stdout.readline().strip()
    with urllib.request.urlopen(address, timeout=60) as response:
        page = response.read().decode()
    assert "Simulated demo" in page
    assert "expired" not in page
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("predrain-demo")] == []
