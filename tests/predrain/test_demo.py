"""The live demo: its world at work, and the command that shows it and leaves nothing behind."""

import json
import os
import signal
import subprocess
import urllib.request
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from policy.ladder.rungs import RUNGS
from predrain.demo.world import ArrivedDataset, World
from scheduler.ledger.export import drain_events
from tests.processes import PREDRAIN


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world in which each rung was used: within five minutes of the demo."""
    demo = World.make(tmp_path_factory.mktemp("demo"), gpus=128, seed=11, say=lambda _: None, ahead=timedelta(days=40))
    cluster, avoided = demo.cluster, False
    for hour in range(300):
        demo.step(demo.now + timedelta(hours=1))
        soft = [node for node, _, until, *_ in cluster.softly if until == cluster.fleet.end]
        avoided |= bool(np.isin(cluster.jobs.node[cluster.left == cluster.jobs.start], soft).any())
        if hour % 20 == 0 and avoided and set(RUNGS[1:]) <= set(demo.ledger().counts()):
            return demo
    raise AssertionError(f"not each rung was used: {avoided}, {demo.ledger().counts()}")


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
    assert balance.failures == int(((fleet.at >= fleet.begin) & (fleet.at < world.now.timestamp() * 1000)).sum())
    assert f"{balance.spared} of {balance.failures} failures" in world.notice()
    assert list(balance.net) == list(RUNGS[1:])
    results = {probe[4] >= 0 for probe in world.cluster.diagnostic.probes.values() if not probe[3]}
    assert results == {True, False}, "a probe found a failure, and one passed"
    steps = [step for node in fleet.names for step in world.ledger().work(node)]
    acknowledged = {step["key"] for step in steps if step["kind"] == "acknowledged"}
    assert acknowledged & {*world.cluster.checkpoints}, "a job on a node that stays in service wrote a checkpoint"
    assert all(f"{rung} {net:z,.0f}" in world.notice() for rung, net in balance.net.items())


def test_the_banner_counts_the_confirmed_actions_of_the_ledger(world: World) -> None:
    reader = world.ledger()
    calls = [call for call in reader.actions(limit=10_000) if call["confirmed"]]
    drained = {(call["decision"], call["node"]) for call in calls if call["verb"] == "drain"}
    counts = Counter(
        call["verb"] for call in calls if call["verb"] != "swap" or (call["decision"], call["node"]) not in drained
    )
    assert counts == reader.counts()
    actions, _, _ = world.notice().partition("simulator's count")
    assert all(f"{rung} {counts[rung]}" in actions for rung in RUNGS[1:])
    assert len(reader.drains("")) == reader.counts()["drain"], "the drains that the outcomes page evaluates"
    last = {event["node"]: event for event in drain_events(reader.marks())}
    out = {node: event["timestamp"] for node, event in last.items() if event["code"] != "release"}
    assert {node: datetime.fromisoformat(entry["since"]) for node, entry in reader.out_of_service().items()} == out


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
