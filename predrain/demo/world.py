"""The demo's world: a simulated fleet whose past trains a model, and whose future arrives by a simulated clock."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Final, Self

import numpy as np
import pandas as pd

from evaluation.value.controller_replay import rule_events
from evaluation.value.gpu_hours import Extras, ReplayOutcome, count_outcome, net_of
from evaluation.value.load import ReplayedFleet, generated_load
from evaluation.value.marks import NO_ACTION, ReplayMarks
from evaluation.value.probing import Checkpoints, Probes
from features.matrix.matrix import FeatureMatrix
from foundation.instants import from_ms
from foundation.times import duration_ms, instant_ms
from models.bundle.store import load_bundle
from models.config import ServingSection
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from pipeline.stages import train_bundle
from policy.budget import BudgetConfig, DisruptionBudget
from policy.config import PolicyConfig
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.rungs import RUNGS, Rung
from policy.node_tier.hysteresis import HysteresisConfig
from policy.tiers import TierThresholds
from predrain.demo.cluster import SimulatedCluster
from scheduler.controller.scores_reader import ScoresReader
from scheduler.controller.settings import ControllerSettings
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import ManualClock
from serving.scores.alert_outcomes import write_facts
from serving.scores.batch import ServedModel, score_decision
from serving.scores.writing import ScoresFolder, nothing_due, record_attempt
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset

HISTORY: Final = timedelta(days=40)
"""History that the model learns from."""

SIMULATED_AHEAD: Final = timedelta(days=151)
"""Maximum simulated time to come: one hour at a speed of 1 h per second."""

REFIT: Final = timedelta(days=7)
"""Interval of refits, each on everything known by then."""

TICK_S: Final = 0.2
_COUNT_EVERY_S: Final = 2.0
_GANG: Final = 64
"""GPUs per job: drains pay where a failure stops many nodes."""

_PAUSE: Final = timedelta(hours=2)
"""Pause between two jobs, in which nodes are idle and can be probed."""

_REACH: Final = timedelta(hours=72)
_ACCELERATION: Final = 25.0
_TIERS: Final = TierThresholds(watch=0.02, elevated=0.08, high=0.25)
_PARAMS: Final = {
    "features": {"groups": ["history", "onset", "peers", "gaps"]},
    "training": {"window": "expanding", "negative_ratio": 50},
    "models": {"profile": "lightgbm"},
}
"""One quick learner, for a demo that must start within a minute."""


@dataclass(frozen=True, slots=True)
class Balance:
    """What the simulator knows of the actions until ``now``, compared with no action on the same failures.

    ``spared``: failures on an evacuated node, or found by a probe before they occurred.
    ``saved``, ``spent``: GPU-hours of all actions except ``avoid``; ``net``: GPU-hours of each rung alone.
    """

    now: datetime
    failures: int
    spared: int
    saved: float
    spent: float
    net: Mapping[Rung, float]


class ArrivedDataset(Dataset):
    """A dataset as of a time, without later data."""

    now: datetime

    @classmethod
    def by(cls, dataset: Dataset, now: datetime) -> Self:
        """Return a view of a dataset as of a time."""
        arrived = cls(dataset.place, replace(dataset.meta, span=(dataset.meta.span[0], now)), dataset._files)
        arrived.now = now
        return arrived

    def events(self) -> pd.DataFrame:
        """Return the events known by then."""
        events = super().events()
        return events[(events["known_at"] <= self.now).to_numpy()].reset_index(drop=True)

    def inventory(self) -> pd.DataFrame:
        """Return the installations and removals by then."""
        stays = super().inventory()
        stays = stays[(stays["installed_at"] <= self.now).to_numpy()].reset_index(drop=True)
        return stays.assign(removed_at=stays["removed_at"].where(stays["removed_at"] <= self.now))


@dataclass(slots=True)
class World:
    """A fleet under the real controller; :meth:`run` advances the simulated time.

    ``folder``: holds all files: dataset, bundle, scores, ledger.
    """

    folder: Path
    dataset: Dataset
    matrix: FeatureMatrix
    model: ServedModel
    fitted: datetime
    cluster: SimulatedCluster
    scores: ScoresFolder
    balance: Balance | None = None

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        gpus: int,
        seed: int,
        say: Callable[[str], None],
        stop: Event | None = None,
        ahead: timedelta = SIMULATED_AHEAD,
    ) -> "World | None":
        """Simulate the fleet, train on its past, and set up the controller for the time ahead.

        ``ahead``: length of the time ahead, in whole days; at most :data:`SIMULATED_AHEAD`.
        Returns: None if ``stop`` was set in the meantime.
        """
        given_up = (stop or Event()).is_set
        say(f"simulating {gpus} GPUs")
        days = (HISTORY + min(ahead, SIMULATED_AHEAD)) // timedelta(days=1)
        simulate(folder / "fleet", gpus=gpus, days=days, seed=seed, scenario="announced", acceleration=_ACCELERATION)
        dataset = Dataset.open(folder / "fleet")
        params = Params.model_validate(_PARAMS)
        begin = dataset.meta.span[0] + HISTORY
        if given_up():
            return None
        say("computing features")
        matrix = make_matrix(folder / "fleet", params, folder / "matrix")
        if given_up():
            return None
        say(f"training on {HISTORY.days} days")
        return cls._at_start(folder, dataset, matrix, begin, seed)

    @classmethod
    def _at_start(cls, folder: Path, dataset: Dataset, matrix: FeatureMatrix, begin: datetime, seed: int) -> "World":
        first, last = instant_ms(begin), instant_ms(dataset.meta.span[1])
        fleet = ReplayedFleet.of(dataset.inventory(), matrix.incidents(), first, last)
        policy = PolicyConfig(
            thresholds_from="scores",
            rungs=RUNGS,
            cost_benefit=CostBenefitConfig(checkpoint=timedelta(minutes=2), checkpoint_every=timedelta(hours=12)),
            hysteresis=HysteresisConfig(rise_after=1),
            budget=BudgetConfig(disruption_budgets=(DisruptionBudget("fleet", max_unavailable_share=0.25),)),
        )
        scores = ScoresFolder(folder / "scores")
        clock = ManualClock(from_ms(first))
        every = policy.cost_benefit.checkpoint_every
        jobs = generated_load(fleet.gpus, first - duration_ms(HISTORY), last, seed, every, gpus_per_job=_GANG)
        end = np.maximum(jobs.start + 1, jobs.end - duration_ms(_PAUSE))
        jobs = replace(jobs, end=end, on_request=jobs.job % 2 == 0)  # without checkpoints on request, swaps pay
        events = rule_events(dataset.events(), fleet.boots())
        cluster = SimulatedCluster(
            fleet, ScoresReader(folder / "scores", clock, ControllerSettings().max_score_lifetime), events, jobs,
            fleet.stage(policy, "hard"), clock, SqliteLedger(folder / "ledger.sqlite"), diagnostic="perfect",
            reach=_REACH, gangs_avoid=True,
        )  # fmt: skip
        return cls(folder, dataset, matrix, _fit(matrix, folder, begin), begin, cluster, scores)

    @property
    def now(self) -> datetime:
        """The simulated time."""
        return self.cluster.clock.now()

    @property
    def ledger(self) -> Callable[[], LedgerReader]:
        """Function that opens the ledger, for the pages."""
        return partial(LedgerReader, self.folder / "ledger.sqlite")

    def step(self, now: datetime) -> None:
        """Advance to ``now``: score the due decision, and run a round of the controller.

        If jobs leave a drained node, the clock ends some minutes after ``now``.
        """
        if now - self.fitted >= REFIT:
            self.model, self.fitted = _fit(self.matrix, self.folder, now), now
        if nothing_due(self.scores, now) is None:
            arrived = ArrivedDataset.by(self.dataset, now)
            result = score_decision(arrived, self.model, self.scores, ServingSection(), tiers=_TIERS, clock=lambda: now)
            record_attempt(self.scores, now, result)
            write_facts(self.scores, arrived)
        self.cluster.go_round(now)
        self.cluster.follow(now)

    def count(self) -> Balance:
        """Count the outcomes of all actions so far."""
        now_ms, costs, replayed = instant_ms(self.now), self.cluster.policy.cost_benefit, self.cluster.fleet
        past = np.flatnonzero(replayed.at < now_ms)
        fleet = replace(
            replayed, failed=replayed.failed[past], unit=tuple(replayed.unit[place] for place in past),
            at=replayed.at[past], until=np.minimum(replayed.until[past], now_ms), end=now_ms,
        )  # fmt: skip
        cluster, jobs = self.cluster, self.cluster.jobs
        marks = cluster.marks_by(now_ms)
        probes = Probes.of(
            [*row[:4], row[4] if row[4] < len(past) else -1] for row in cluster.diagnostic.probes.values()
        )
        checkpoints = Checkpoints.of(jobs, cluster.checkpoints.values(), costs)

        def counted(marks: ReplayMarks = NO_ACTION, *, soft: bool = False, **cheap: Any) -> ReplayOutcome:
            return count_outcome(fleet, [jobs], marks, costs, reach=_REACH, soft=soft, extras=[Extras(**cheap)])

        no_action, acted = counted(), counted(marks, probes=probes, checkpoints=checkpoints)
        swapped = np.array([mark in cluster.swaps for mark in zip(marks.node, marks.at, strict=True)], dtype=np.bool_)
        softly = ReplayMarks.of([*row[:2], min(row[2], now_ms), *row[3:]] for row in cluster.softly)
        by_rung: dict[Rung, ReplayOutcome] = {
            "avoid": counted(softly, soft=True),
            "probe": counted(probes=probes),
            "checkpoint": counted(checkpoints=checkpoints),
            "swap": counted(marks.chosen(swapped)),
            "drain": counted(marks.chosen(~swapped)),
        }
        failures = int((fleet.at >= fleet.begin).sum())
        saved = float(no_action.hit.sum() - acted.hit.sum() + acted.repaired.sum())
        gpu_hours = float(acted.spent.sum() + acted.idle.sum())
        net = {rung: float(net_of(no_action, outcome).sum()) for rung, outcome in by_rung.items()}
        self.balance = Balance(from_ms(now_ms), failures, acted.caught, saved, gpu_hours, net)
        return self.balance

    def run(self, speed: float, stop: Event) -> None:
        """Advance the simulated time at ``speed`` times real time, until the data ends or ``stop`` is set.

        No step exceeds half the pause between two jobs, so that a slow machine takes longer but shows the same.
        """
        started, begin, counted = time.monotonic(), self.now, 0.0
        max_step = max(_PAUSE / 2, timedelta(seconds=TICK_S * speed))
        end = from_ms(self.cluster.fleet.end)
        while not stop.wait(TICK_S):
            now = min(begin + timedelta(seconds=(time.monotonic() - started) * speed), self.now + max_step)
            if now >= end:
                break
            if now > self.now:
                self.step(now)
            if time.monotonic() - counted > _COUNT_EVERY_S:
                self.count()
                counted = time.monotonic()
        stop.set()

    def notice(self) -> str:
        """Return the banner of all pages: counts of the ledger, and the GPU-hours that only the simulator knows."""
        with closing(self.ledger()) as reader:
            calls = reader.counts()
        actions = ", ".join(f"{rung} {calls.get(rung, 0)}" for rung in RUNGS[1:])
        banner = f"Simulated demo, {self.now:%Y-%m-%d %H:%M} UTC. Confirmed actions in the ledger: {actions}."
        true = self.balance
        if true is None:
            return banner
        return (
            f"{banner} The simulator's count until {true.now:%Y-%m-%d %H:%M}, from all failures and jobs: "
            f"{true.spared} of {true.failures} failures were on an evacuated node or found by a probe. Compared with "
            f"no action, {true.saved:,.0f} GPU-hours were saved and {true.spent:,.0f} spent. Net of each action alone: "
            + ", ".join(f"{rung} {net:z,.0f}" for rung, net in true.net.items())
            + " (a swap followed by a drain counts as a drain only if jobs still ran)."
        )


def _fit(matrix: FeatureMatrix, folder: Path, refit_at: datetime) -> ServedModel:
    train_bundle(matrix, Params.model_validate(_PARAMS), folder / "bundle", until=refit_at)
    return ServedModel(load_bundle(folder / "bundle"))
