"""The loop from telemetry to marks, each command killed at random moments and run again: as if nothing had happened."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from tests.light_models import lightgbm_alone
from tests.system.nursery import Nursery
from tests.system.simulated_exposition import exposition, same_values, samples_of

pytestmark = pytest.mark.system
OURS = "predrain.io/at-risk"
KILLS = int(os.environ.get("KILLS", "30"))
SEED = os.environ.get("SEED", "7")
FIRST = datetime(2030, 6, 3, tzinfo=UTC)
HISTORY, PERIOD, LATE = timedelta(days=12), timedelta(hours=6), timedelta(minutes=40)
PERIODS = 8
PARAMS = lightgbm_alone(
    20,
    "telemetry: {step: 1h}",
    "features: {groups: [telemetry, history], windows: [2h], history_windows: [7d]}",
    "training: {window: 14d, augmentation: 2}",
)
ACT = """
policy:
  thresholds: {watch: 0.005, elevated: 0.02, high: 0.1}
  hysteresis: {rise_after: 1, fall_after: 2}
  stages: {pinned: {c/g: hard}}
  budget: {disruption_budgets: [{scope: fleet, max_unavailable_share: 0.5}], rate_limits: []}
  breaker: {max_risky: 1.0, jump: 100.0}
  cost_benefit: {always: true, may_wait: false}
controller: {lease: 2s}
"""


class Loop:
    """A fleet whose telemetry and tickets arrive, are scored and acted on; of its commands so many are killed.

    ``marks``: predrain's taints of each node after each period.
    ``changes``: nodes in the order in which they were taken out of service.
    """

    def __init__(self, root: Path, fleet: "SimulatedFleet", kills: int) -> None:
        self.root, self.fleet, self.goal, self.kills = root, fleet, kills, 0
        self.random, self.now, self.done = random.Random(SEED), FIRST, 0
        self.marks: list[dict[str, list[str]]] = []
        self.changes: list[str] = []
        self._took: dict[str, float] = {}
        self._out: set[str] = set()
        root.mkdir()
        (root / "params.yaml").write_text(PARAMS)
        (root / "act.yaml").write_text(ACT)
        team = [{"key": "team", "value": "x", "effect": "NoSchedule"}]
        nodes = [
            {"name": name, "cluster": "c", "group": "g", "labels": {"zone": "a"}, "annotations": {}, "taints": team}
            for name in fleet.nodes
        ]
        (root / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
        self.nursery = Nursery(root)

    def close(self) -> None:
        self.nursery.close()

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in json.loads((self.root / "cluster.json").read_text())["nodes"]}

    def fork(self, *words: object, dies: float = 0.0) -> int:
        """Run a command, which dies after so many seconds; 0: when it is done. Give how it ended."""
        log = self.root / "log"
        return self.nursery.run(*words, now=self.now.timestamp(), environment=os.environ, output=(log, log), dies=dies)

    def command(self, *words: object) -> None:
        """Run a command to success, after as many kills as are its share."""
        verb = " ".join(map(str, words[:2]))
        self.done += 1
        while verb in self._took and self.kills * PERIODS * 6 < self.goal * self.done:
            code = self.fork(*words, dies=max(self.random.uniform(0.0, self._took[verb]), 0.001))
            assert code in (0, -signal.SIGALRM), (words, (self.root / "log").read_text())
            self.kills += code != 0
            self.look()
        began = time.monotonic()
        assert self.fork(*words) == 0, (words, (self.root / "log").read_text())
        self._took[verb] = time.monotonic() - began
        self.look()

    def look(self) -> None:
        """Look at the cluster: what others put there stands, and which nodes were taken out of service since."""
        self.now += timedelta(seconds=3)  # longer than the lease of a controller that was killed
        out = set()
        for name, node in self.nodes().items():
            assert [taint["key"] for taint in node["taints"]][:1] == ["team"]
            assert node["labels"]["zone"] == "a"
            out |= {name for taint in node["taints"] if (taint["key"], taint["effect"]) == (OURS, "NoSchedule")}
        self.changes += sorted(out - self._out)
        self._out = out

    def period(self, number: int) -> None:
        """Let telemetry and tickets of a period come, score, and let the controller decide twice."""
        self.now = FIRST + number * PERIOD + LATE
        self.fleet.write(self.root, self.now)
        params = ("--params", "params.yaml")
        self.command("collect", "openmetrics", f"{number}.om", "--dataset", "fleet", *params)
        self.command("collect", "tickets", "tickets.csv", "--dataset", "fleet", *params)
        self.command("collect", "compact", "--dataset", "fleet", *params)
        if number == 0:
            self.command("features", "--dataset", "fleet", "--out", "matrix", *params)
            self.command("train", "--matrix", "matrix", "--out", "bundle", *params)
        self.command("score", "--dataset", "fleet", "--model", "bundle", "--out", "scores", *params)
        for _ in range(2):
            self.now += timedelta(minutes=1)
            self.act()
        taints = {name: node["taints"] for name, node in self.nodes().items()}
        self.marks.append({name: [t["effect"] for t in held if t["key"] == OURS] for name, held in taints.items()})

    def act(self) -> None:
        self.command(
            "act", "--cluster", "cluster.json", "--scores", "scores", "--events", "fleet", "--settings", "act.yaml"
        )

    def scores(self) -> dict[str, list[tuple[str, float | None]]]:
        """Each decision's risks, as they are served."""
        found = {}
        for folder in sorted((self.root / "scores" / "decisions").glob("[0-9]*Z")):
            records = map(json.loads, (folder / "risks.jsonl").read_text().splitlines())
            found[folder.name] = sorted((record["unit"], record["risk"]) for record in records)
        return found


class SimulatedFleet:
    """What a simulated fleet tells, cut into periods."""

    def __init__(self, root: Path) -> None:
        days = HISTORY + PERIODS * PERIOD
        simulate(
            root, gpus=24, days=days // timedelta(days=1), seed=7, scenario="announced", acceleration=100.0,
            step=timedelta(hours=1), start=FIRST - HISTORY,
        )  # fmt: skip
        self.truth = Dataset.open(root)
        self.nodes, self.events = sorted(self.truth.inventory()["node"].unique()), self.truth.events()
        self._pieces: dict[int, list[str]] = {}
        for line in exposition(self.truth):
            after = datetime.fromtimestamp(int(line.rsplit(" ", 1)[1]), UTC) - FIRST
            self._pieces.setdefault(max(-(-after // PERIOD), 0), []).append(line)

    def write(self, folder: Path, now: datetime) -> None:
        """Write what is known at a time: the period's telemetry, and all tickets so far."""
        number = (now - FIRST) // PERIOD
        (folder / f"{number}.om").write_text("".join([*self._pieces.get(number, []), "# EOF\n"]))
        self.events[self.events["known_at"] <= now].to_csv(folder / "tickets.csv", index=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SimulatedFleet:
    return SimulatedFleet(tmp_path_factory.mktemp("simulated") / "fleet")


@pytest.fixture(scope="module")
def untroubled(fleet: SimulatedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """The loop without a kill."""
    with contextlib.closing(Loop(tmp_path_factory.mktemp("loop") / "a", fleet, kills=0)) as loop:
        for number in range(PERIODS):
            loop.period(number)
        yield loop


def test_whatever_is_killed_when_what_follows_is_as_if_nothing_had_been(
    fleet: SimulatedFleet, untroubled: Loop, tmp_path: Path
) -> None:
    with contextlib.closing(Loop(tmp_path / "b", fleet, KILLS)) as loop:
        for number in range(PERIODS):
            loop.period(number)
        assert loop.kills >= KILLS
        assert loop.scores() == untroubled.scores()
        assert loop.marks == untroubled.marks
        assert loop.changes == untroubled.changes != []
        held = Dataset.open(loop.root / "fleet")
        mine, theirs = samples_of(held), samples_of(Dataset.open(untroubled.root / "fleet"))
        assert all(same_values(mine[name], theirs[name]) for name in theirs)
        pd.testing.assert_frame_equal(held.events(), Dataset.open(untroubled.root / "fleet").events())
        loop.now += timedelta(days=3)
        loop.goal += 5
        loop.act()
        loop.act()
        left = loop.nodes().values()
        assert {len(node["taints"]) for node in left} == {1}, "what has expired is off"
        assert [node["annotations"] for node in left] == [{}] * len(fleet.nodes)
        assert [node["labels"] for node in left] == [{"zone": "a"}] * len(fleet.nodes)
