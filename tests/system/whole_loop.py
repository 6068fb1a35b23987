"""The whole loop on any scheduler, a simulated week in minutes: what is done each day, and what has to come of it.

Prometheus and the scheduler are real, and each command that is installed is a process of its own, in turn killed at a
random moment and run again. The fleet's telemetry and tickets are simulated; the clock is shifted for our processes
alone.
"""

import itertools
import json
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from features.matrix.matrix import FeatureMatrix
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from tests.light_models import lightgbm_alone
from tests.system.nursery import Nursery
from tests.system.prometheus_server import load_blocks, need_prometheus
from tests.system.simulated_exposition import same_values, samples_of, write_openmetrics
from tests.waiting import wait

SEED, SICK, ADMINS = 198, "node-00005", "node-00002"
FIRST = datetime(2030, 6, 3, tzinfo=UTC)
HISTORY, WEEK, DAY, LATE = timedelta(days=38), timedelta(days=7), timedelta(days=1), timedelta(minutes=70)
SINCE = f"{HISTORY.days + 1}d"
RETRY_AFTER = "23h"  # a failed diagnostic is run again in the next day's rounds, however late it ended in this day's
WHAT = ("timestamp", "gpu", "type", "code")
SCHEDULERS = ("slurm", "kubernetes", "predrain")
PARAMS = lightgbm_alone(
    60,
    "telemetry: {step: 30m}",
    "decision: {every: 24h}",
    "features: {groups: [telemetry, history, onset], windows: [1h], history_windows: [7d]}",
    "training: {candidate_windows: [14d, 28d], augmentation: 2}",
)
# The fleet fails sixty times as often as a real one, so the breaker has to bear more nodes at risk.
POLICY = """
thresholds: {watch: 0.03, elevated: 0.07, high: 0.4}
hysteresis: {rise_after: 1, fall_after: 2}
stages: {pinned: {GROUP: hard}}
budget: {disruption_budgets: [{scope: fleet, max_unavailable_share: 0.5}], rate_limits: []}
breaker: {max_risky: 1.0, jump: 100.0}
cost_benefit: {always: true, may_wait: false}
"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A simulated fleet, whose telemetry Prometheus holds.

    ``failure``: the one of the week.
    """

    truth: Dataset
    nodes: list[str]
    events: pd.DataFrame
    failure: dict[str, Any]


def simulated(root: Path) -> Fleet:
    """Simulate the weeks before and the week itself; a Prometheus on ``root/data`` has all of it."""
    need_prometheus()
    simulate(
        root / "fleet", gpus=48, days=(HISTORY + WEEK) // DAY, seed=SEED, scenario="announced", acceleration=60.0,
        step=timedelta(minutes=30), start=FIRST - HISTORY,
    )  # fmt: skip
    truth = Dataset.open(root / "fleet")
    failures = pq.read_table(root / "fleet-truth" / "failures.parquet").to_pylist()
    (failure,) = (failure for failure in failures if failure["start"] > FIRST)
    assert failure["node"] == SICK
    write_openmetrics(truth, root / "history.om")
    load_blocks(root / "history.om", root / "data")
    return Fleet(truth, sorted(truth.inventory()["node"].unique()), truth.events(), failure)


class Loop(ABC):
    """A fleet with predrain installed, a job on the node that will fail, and people who write tickets.

    ``now``: the time of predrain's processes.
    ``broken``: names the nodes whose diagnostic fails now.
    ``doomed``: the verbs that are killed once, the next time that they run.
    ``kills``: how many were.
    ``drains``: the nodes that were taken out of service, each as often as it was.
    """

    scheduler: str

    def __init__(self, root: Path, fleet: Fleet, state: Path, environment: Mapping[str, str]) -> None:
        self.root, self.fleet, self.state, self._environment = root, fleet, state, environment
        self.random, self.now = random.Random(SEED), FIRST
        self.doomed, self.kills = set[str](), 0
        self.drains, self._out = list[str](), frozenset[str]()
        self.broken = root / "broken"
        self.broken.write_text("")
        self._took = dict[str, float]()
        self._output = (root / "stdout", root / "stderr")

    @abstractmethod
    def installed(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Give the words of the command that is installed under a name, and the variables of its environment."""

    @abstractmethod
    def out(self) -> frozenset[str]:
        """Name the nodes that predrain has taken out of service."""

    @abstractmethod
    def checkpoint(self) -> None:
        """See that the job is still where it was, until it has written the checkpoint that it was asked for."""

    @abstractmethod
    def moved(self) -> bool:
        """Whether the job runs elsewhere."""

    @abstractmethod
    def untouched(self) -> bool:
        """Whether nothing stands on any node but what stood there before, such as an administrator's drain."""

    def run(self, name: str, *more: str) -> str:
        """Run the command that is installed under a name to its end; give what it prints."""
        words, variables = self.installed(name)
        return self.predrain(*words, *more, **variables)

    def predrain(self, *words: object, **variables: str) -> str:
        """Run a predrain command to success, after a kill where its verb is doomed; return what it prints."""
        verb = " ".join(map(str, words[: 2 if words[0] == "collect" else 1]))
        if verb in self.doomed:
            moment = self.random.uniform(0.2, 0.9) * min(self._took[verb], 10.0)
            if self._fork(words, variables, dies=moment) == -signal.SIGALRM:  # else its turn comes again
                self.doomed.discard(verb)
                self.kills += 1
        began = time.monotonic()
        code = self._fork(words, variables)
        self._took[verb] = time.monotonic() - began
        out, errors = (path.read_text() for path in self._output)
        assert code == 0, (words, self.now, out, errors)
        return out

    @cached_property
    def _nursery(self) -> Nursery:
        return Nursery(self.state)

    def _fork(self, words: tuple[object, ...], variables: dict[str, str], dies: float = 0.0) -> int:
        (self.root / "shift").write_text(str(int((self.now - datetime.now(UTC)).total_seconds())))
        return self._nursery.run(
            *words, now=self.now.timestamp(), environment={**self._environment, **variables}, output=self._output,
            dies=dies,
        )  # fmt: skip

    def close(self) -> None:
        self._nursery.close()

    def collect(self, now: datetime) -> None:
        """Let a time come, with the telemetry, tickets and nodes' states of it."""
        self.now, tickets = now, self.root / "tickets.csv"
        self.run("prometheus")
        self.fleet.events[self.fleet.events["known_at"] <= now].to_csv(tickets, index=False)
        self.predrain("collect", "tickets", tickets, "--dataset", self.state / "fleet")
        self.run(self.scheduler)
        self.run("compact")

    def round(self) -> None:
        """A round of the controller, a minute after the one before; it waits for the lease of one that was killed."""
        wait(lambda: json.loads(self.run("act", "--json"))["active"])
        self.now += timedelta(minutes=1)
        out = self.out()
        self.drains += sorted(out - self._out)
        self._out = out

    def week(self) -> None:
        """Go from the installation through the failure that is foreseen to a model that has learned from it."""
        failure, dataset = self.fleet.failure, self.state / "fleet"
        self.collect(FIRST + LATE)
        assert json.loads(self.run("retrain", "--json"))["action"] == "promoted"
        when = dict[str, datetime]()
        collected = (f"collect {what}" for what in ("prometheus", "tickets", self.scheduler, "compact"))
        turns = iter((*collected, "score", "act"))
        for day in range(WEEK // DAY):
            self.collect(FIRST + day * DAY + LATE)
            self.broken.write_text(SICK if failure["degraded_at"] < self.now < failure["repaired"] else "")
            self.run("score")
            for _ in range(4):
                self.round()
            if "drained" not in when and SICK in self.drains:
                when["drained"] = self.now
                self.checkpoint()

                def moved() -> bool:
                    self.doomed.add("act")
                    self.round()
                    return self.moved()

                wait(moved)
                when["emptied"] = self.now
            if "drained" in when and SICK not in self.out():
                when.setdefault("released", self.now)
            self.doomed.update(itertools.islice(turns, 1))
        assert failure["degraded_at"] < when["drained"] < when["emptied"] < failure["start"]
        assert failure["repaired"] < when["released"], "its diagnostic failed until then"
        assert self.drains.count(SICK) == 1
        assert len(set(self.drains)) == len(self.drains)

        self.collect(FIRST + WEEK)
        self.doomed.add("retrain")
        champion = json.loads(self.run("retrain", "--json"))
        assert (champion["champion"], champion["done"]) == (2, True)
        matrix = FeatureMatrix.open(self.state / "fleet-matrix")
        rows = matrix.rows.assign(label=matrix.labels()["label"])
        assert failure["gpu"] in set(rows["gpu"][(rows["label"] == 1) & (rows["decision_time"] > FIRST)])
        self.now += 3 * DAY
        self.round()
        wait(self.untouched)  # what expired is off
        assert self.kills >= WEEK // DAY

        held = Dataset.open(dataset)
        mine, theirs = samples_of(held), samples_of(self.fleet.truth)
        theirs = theirs[theirs["timestamp"] <= mine["timestamp"].max()].reset_index(drop=True)
        assert all(same_values(mine[name], theirs[name]) for name in mine)
        assert theirs[theirs.columns.difference(mine.columns)].isna().all(axis=None)
        waiting = pd.read_parquet(dataset / "compaction" / "pending.parquet")  # of GPUs that were not seen by then
        ours = held.events()
        ours = ours[~ours["source"].isin(SCHEDULERS)]
        known = self.fleet.events[self.fleet.events["known_at"] <= FIRST + WEEK]
        assert occurred(pd.concat([ours, waiting])) == occurred(known)


def occurred(events: pd.DataFrame) -> list[tuple[object, ...]]:
    """Give events in an order, each as often as it is there."""
    events = events.assign(timestamp=events["timestamp"].astype("datetime64[ms, UTC]"))
    return sorted(zip(*(events[name].astype(object).fillna("").map(str) for name in WHAT), strict=True))
