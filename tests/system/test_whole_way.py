"""The whole way on a real control plane: a simulated GPU degrades, and its node is empty before it fails.

The fleet, its telemetry and its failure are simulated; training, scoring, the controller and Kubernetes are real.
The scores of each decision time are shown to the controller as of now, so that hours of the fleet pass in seconds. What
is compared with the failure is the decision time, with what passed until its scores were there and the node was empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from models.bundle.store import load_bundle
from models.config import ServingSection
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params
from pipeline.stages import train_bundle
from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig, DisruptionBudget
from policy.config import PolicyConfig
from policy.cost_benefit import CostBenefitConfig
from policy.fleet import Level, UnitView
from policy.hysteresis import HysteresisConfig
from policy.stages import StagesConfig
from policy.tiers import TierThresholds
from scheduler.controller.scores_reader import ScoresReader
from scheduler.ports.clock import SystemClock
from scheduler.ports.report import RoundReport
from scheduler.ports.risks import Risks
from serving.scores.batch import ServedModel, score_decision
from serving.scores.writing import ScoresFolder
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from tests.system.kubernetes_cluster import PODS, KubernetesCluster, kubernetes_cluster_in
from tests.system.test_kubernetes_actuator import Replica, effects, passed, until
from tests.waiting import wait

pytestmark = pytest.mark.system
LIGHT = """
models:
  profile: lightgbm
  learners: [lightgbm]
  parallel: {members: [lightgbm], combiner: mean_log_odds}
  cascade: {stages: [lightgbm]}
  horizons: []
  settings: {lightgbm: {n_estimators: 60}}
features: {groups: [telemetry, history, onset], windows: [1h], history_windows: [7d]}
training: {candidate_windows: [14d, 28d], augmentation: 2}
"""
SEED = 141
SICK = "node-00007"
TRAINED = datetime(2026, 2, 1, tzinfo=UTC)
FIRST = datetime(2026, 2, 3, 12, tzinfo=UTC)
STEP = timedelta(hours=6)
DELAY = timedelta(minutes=10)
TIERS = TierThresholds(0.03, 0.1, 0.4)
SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Degrading:
    """A simulated fleet around one failure.

    ``fails_at``: when the first GPU of the sick node fails.
    ``scores``: the folder of scores as it was at each decision time.
    """

    nodes: tuple[str, ...]
    fails_at: datetime
    scores: dict[datetime, Path]


@pytest.fixture(scope="module")
def degrading(tmp_path_factory: pytest.TempPathFactory) -> Degrading:
    """Simulate, train on what was known before, and score each decision until the failure."""
    folder = tmp_path_factory.mktemp("degrading")
    (folder / "light.yaml").write_text(LIGHT)
    params = load_params([folder / "light.yaml"])
    simulate(folder / "fleet", gpus=64, days=45, seed=SEED, scenario="announced", acceleration=60.0)
    matrix = make_matrix(folder / "fleet", params, folder / "matrix")
    train_bundle(matrix, params, folder / "bundle", until=TRAINED)
    failures = pq.read_table(folder / "fleet-truth" / "failures.parquet").to_pylist()
    fails_at = min(failure["start"] for failure in failures if failure["node"] == SICK and failure["start"] > FIRST)
    dataset = Dataset.open(folder / "fleet")
    model = ServedModel(load_bundle(folder / "bundle"), None)
    scores: dict[datetime, Path] = {}
    at = FIRST
    while at < fails_at:
        out = folder / f"scores-{at:%d-%H}"
        clock = at + DELAY
        score_decision(dataset, model, ScoresFolder(out), ServingSection(), tiers=TIERS, clock=lambda c=clock: c, at=at)
        scores[at] = out
        at += STEP
    return Degrading(tuple(sorted(set(dataset.inventory()["node"].astype(str)))), fails_at, scores)


class Shifted:
    """The scores of one decision time as if it were now."""

    def __init__(self) -> None:
        self.risks = Risks()

    def show(self, folder: Path) -> None:
        """Take over a folder of scores."""
        read = ScoresReader(folder, SystemClock(), timedelta(days=7)).read()
        assert read.decided_at is not None
        assert read.model_fitted_at is not None
        by = datetime.now(UTC) - read.decided_at

        def moved(unit: UnitView) -> UnitView:
            score = unit.score
            assert score is not None
            return UnitView(
                unit.name, replace(score, decided_at=score.decided_at + by, expires_at=score.expires_at + by)
            )

        nodes = {name: tuple(map(moved, units)) for name, units in read.nodes.items()}
        self.risks = replace(
            read, nodes=nodes, decided_at=read.decided_at + by, model_fitted_at=read.model_fitted_at + by
        )

    def read(self) -> Risks:
        """Give them."""
        return self.risks


class Way(Replica):
    """A controller, and what became of the sick node at which decision time."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        policy = PolicyConfig(
            thresholds_from="scores",
            hysteresis=HysteresisConfig(rise_after=1, fall_after=2),
            stages=StagesConfig(pinned={"kubernetes/none": "hard"}),
            budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable=2),), ()),
            # a fleet that fails sixty times as often has more nodes at risk than a sound model would say
            breaker=BreakerConfig(max_risky=1.0, jump=100.0),
            cost_benefit=CostBenefitConfig(always=True, may_wait=False),
        )
        super().__init__(cluster, "way", diagnostic=True, policy=policy, risks=Shifted())

    def decide(self, folder: Path) -> RoundReport:
        """A new decision time, and the round that follows it."""
        self.risks.show(folder)
        return self.round()

    def round(self) -> RoundReport:
        """A round, in which nothing may fail."""
        report = self.controller.round()
        assert not report.failed, (report.errors, [str(step) for step in report.steps], report.work)
        return report

    def level(self) -> Level:
        """What of ours stands on the sick node."""
        reading = self.scheduler.revalidate(SICK)
        assert reading is not None
        return reading.view.marks.level


def the_way(way: Way, fleet: Degrading, written: Callable[[], None], gone: Callable[[], bool]) -> list[datetime]:
    """Go from decision to decision until the node is drained and empty; give the times of soft mark and emptiness."""
    soft: list[datetime] = []
    decisions: list[object] = []
    for at, folder in fleet.scores.items():
        began = time.monotonic()
        decided = way.decide(folder).plan
        assert decided is not None
        decisions.append(
            (at, {name: (node.tier, node.target, node.reasons[:2]) for name, node in decided.nodes.items()})
        )
        if way.level() is Level.SOFT:
            soft.append(at)
        if way.level() is Level.DRAINED:
            assert not gone(), "nothing moves before its checkpoint is written"
            written()
            until(way, gone)
            return [*soft[:1], at + DELAY + (time.monotonic() - began) * SECOND]
        assert not gone()
    raise AssertionError(f"it failed before it was drained: {decisions}")


def test_on_kubernetes_a_node_is_empty_before_it_fails_and_comes_back_after_a_diagnostic(degrading, tmp_path):
    with kubernetes_cluster_in(tmp_path, [*degrading.nodes, "spare"]) as cluster:
        cluster.change("spare", unschedulable=True)
        cluster.deploy("train", len(degrading.nodes), 8, {"predrain.io/checkpoint": "annotation"})
        before = cluster.running("train", len(degrading.nodes))
        cluster.change("spare", unschedulable=None)
        would_be_hit = cluster.on(SICK)
        assert len(would_be_hit) == 1
        way = Way(cluster)
        victim = f"{PODS}/{would_be_hit[0]}"

        def write_the_checkpoint() -> None:
            assert effects(cluster.node(SICK))[-1] == "NoSchedule"
            asked = cluster.server.request("GET", victim)[1]["metadata"]["annotations"]
            key = json.loads(asked["predrain.io/checkpoint-requested"])["key"]
            done = {"metadata": {"annotations": {"predrain.io/checkpoint-acknowledged": key}}}
            cluster.server.request("PATCH", victim, done)

        soft_at, empty_at = the_way(way, degrading, write_the_checkpoint, lambda: not cluster.on(SICK))
        assert soft_at < empty_at < degrading.fails_at
        pods = wait(lambda: cluster.running("train", len(before)))
        assert SICK not in {pod["spec"]["nodeName"] for pod in pods}
        assert "spare" in {pod["spec"]["nodeName"] for pod in pods}, "its job runs on, elsewhere"
        hit = [name for name in cluster.on(SICK) if name.startswith("train")]
        assert (len(would_be_hit), len(hit)) == (1, 0), "jobs that the failure hits, without predrain and with it"

        cluster.kubelets.ends = passed
        until(way, lambda: not effects(cluster.node(SICK)))
        assert way.level() is Level.NONE
