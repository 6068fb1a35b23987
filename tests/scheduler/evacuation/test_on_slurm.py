"""The whole way on Slurm's adapter: a signal, the job's own word, a requeue, an empty node, a diagnostic, UNDRAIN."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.fleet import Level
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.ports.risks import MemoryFacts
from scheduler.ports.workloads import DiagnosticResult
from scheduler.slurm.job import SlurmJob
from tests.policy.decide_world import HOUR, T0
from tests.scheduler.evacuation.emptying_cluster import FAST, MINUTE, work
from tests.scheduler.faults import MemoryVerification
from tests.scheduler.slurm.slurm_world import LEASE, World

JOB = SlurmJob(
    7, "7", 7, "7.0.1", ("n0",), frozenset({"RUNNING"}), "ann", 8, T0 - HOUR, T0 - HOUR, T0 + 50 * HOUR, True, True,
    "predrain.checkpoint=USR1@120",
)  # fmt: skip


class EmptyingWorld(World):
    """A small Slurm whose nodes are emptied."""

    verification = MemoryVerification()

    def restart(self) -> None:
        super().restart()
        evacuation = Evacuation(
            self.scheduler, self.workloads, self.ledger, self.clock, FAST,
            {}, self.verification,
        )  # fmt: skip
        facts = VerifiedFacts(MemoryFacts(), evacuation.results)
        self.controller = Controller(
            self.scheduler, self.risks, facts, self.ledger, self.clock, self.policy, ControllerSettings(lease=LEASE),
            holder=f"p{self.restarts}", code="1.0", evacuation=evacuation,
        )  # fmt: skip

    def later(self, by: timedelta = MINUTE):
        """Another process goes on a little later, with nothing but Slurm and the folder."""
        self.clock.move(by)
        self.controller.stop()  # gives the lease back, which another one would else have to watch for its time
        self.restart()
        return self.round()


@pytest.fixture
def world(tmp_path) -> EmptyingWorld:
    made = EmptyingWorld(tmp_path / "shared")
    made.verification = MemoryVerification()
    made.slurm.running[7] = JOB
    made.scored(n0=0.95)
    report = made.later()
    assert not report.failed, report.errors
    return made


def test_each_step_is_done_by_another_process(world):
    assert world.level("n0") is Level.DRAINED
    assert world.slurm.sent == [(7, "USR1")]
    world.later()
    assert (world.slurm.sent, world.slurm.requeued) == ([(7, "USR1")], [])
    wrote = int((world.clock.now()).timestamp())
    world.slurm.running[7] = replace(JOB, comment=f"{JOB.comment} predrain.checkpointed={wrote}")
    assert work(world.later()) == [("checkpoint", "done", "7"), ("evict", "done", "7")]
    assert world.slurm.requeued == [7]
    assert ("empty", "done", None) in work(world.later())
    world.later()
    world.verification.results["n0"] = DiagnosticResult("passed")
    world.later()
    report = world.later()
    assert [(s.action.verb, s.action.node, s.outcome) for s in report.steps] == [("release", "n0", "done")]
    assert world.slurm.all["n0"].states == frozenset({"IDLE"})
    assert world.level("n0") is Level.NONE


def test_a_job_that_says_nothing_is_requeued_when_its_time_is_over(world):
    world.later(timedelta(seconds=119))
    assert world.slurm.requeued == []
    world.later(timedelta(seconds=2))
    assert world.slurm.requeued == [7]


def test_a_reason_of_somebody_else_stops_it(world):
    world.slurm.person("n0", "DRAIN", "ann: bad fan")
    for _ in range(4):
        world.later(10 * MINUTE)
    assert world.slurm.requeued == []
    assert world.slurm.all["n0"].reason == "ann: bad fan"
