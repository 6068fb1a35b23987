"""Whatever raises in a round: expired marks are released, on request all marks are, and nothing new is done."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from policy.fleet import Level
from scheduler.controller import controller as controller_module
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import CheckpointSettings, EvacuationSettings, VerificationSettings
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import LedgerError, SchedulerError, SourceError
from scheduler.ports.readings import Switches, WriteResult
from scheduler.ports.report import RoundReport
from scheduler.ports.workloads import Workload
from tests.policy.decide_world import STEP
from tests.scheduler.cluster import Cluster
from tests.scheduler.faults import MemoryVerification, MemoryWorkloads

EXCEPTIONS = (
    OSError("disk"), ValueError("value"), KeyError("key"), AttributeError("attribute"), OverflowError("year 10000"),
    RecursionError("nested"), MemoryError("large"), StopIteration("stop"), json.JSONDecodeError("json", "{", 1),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "start"), sqlite3.OperationalError("locked"), SourceError("source"),
    LedgerError("ledger"), SchedulerError("scheduler"),
)  # fmt: skip
FEW = EXCEPTIONS[-4:]
LEDGER = (
    "unsettled", "last_digest", "begin", "begin_releases", "intend", "settle", "skip", "alerts", "open_calls", "call",
    "settle_call", "find",
)  # fmt: skip


class Hooked:
    """An object of which one method raises."""

    def __init__(self, inner: Any) -> None:
        self.__dict__.update(inner=inner, broken=None, calls=0)

    def __getattr__(self, name: str) -> Any:
        if name != self.broken:
            return getattr(self.inner, name)

        def fail(*_: Any, **__: Any) -> Any:
            self.__dict__["calls"] += 1
            raise self.error

        return fail

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def breaks(self, name: str, error: Exception) -> None:
        self.__dict__.update(broken=name, error=error)


class World:
    """A cluster with one drained node whose workload does not go, and hands on everything that is not the scheduler."""

    def __init__(self) -> None:
        self.cluster = cluster = Cluster(3, ledger=Hooked(SqliteLedger(None)))
        cluster.risks, cluster.facts = Hooked(cluster.risks), Hooked(cluster.facts)
        workload = Workload("w1", "team/trainer", "n1", 2)
        self.workloads = Hooked(MemoryWorkloads([workload], cluster.clock))
        self.workloads.inner.blocked["w1"] = "a disruption budget"
        self.verification = Hooked(MemoryVerification())
        self.evacuation: Any = None
        self.restart()
        cluster.scored(n1=0.9)
        assert not cluster.round().failed
        assert cluster.level("n1") is Level.DRAIN

    def restart(self) -> None:
        cluster = self.cluster
        settings = EvacuationSettings(
            enabled=True, checkpoint=CheckpointSettings(), verification=VerificationSettings(method="scheduler")
        )
        self.evacuation = Hooked(
            Evacuation(cluster.scheduler, self.workloads, cluster.clock, settings, {}, self.verification)
        )
        cluster.restart(holder="p")
        cluster.controller.evacuation = self.evacuation

    def breaks(self, part: str, call: str, error: Exception) -> None:
        """Let one call raise from now on."""
        part_of: dict[str, Any] = {
            "ledger": self.cluster.ledger, "scores": self.cluster.risks, "events": self.cluster.facts,
            "workloads": self.workloads, "verification": self.verification, "evacuation": self.evacuation,
        }  # fmt: skip
        if part in part_of:
            part_of[part].breaks(call, error)
        else:  # the safety state, which the scheduler stores

            def fail(*_: Any) -> Any:
                raise error

            setattr(self.cluster.scheduler, call, fail)
            self.restart()

    def round(self) -> RoundReport:
        return self.cluster.round()


CALLS = [
    *(("ledger", call) for call in LEDGER),
    ("scores", "read"), ("events", "read"), ("events", "outcomes"),
    ("state", "load_state"), ("state", "save_state"),
    ("evacuation", "load"), ("evacuation", "round"),
    ("workloads", "on_node"), ("workloads", "load_progress"), ("workloads", "save_progress"),
    ("workloads", "evict"), ("workloads", "checkpoint_state"),
    ("verification", "result"), ("verification", "drop"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "call"), CALLS)
def test_expired_marks_are_released_whatever_raises(part: str, call: str) -> None:
    world = World()
    start = world.cluster.scheduler.nodes["n1"], world.cluster.scheduler.state, world.workloads.inner.text
    world.cluster.clock.move(2 * STEP)
    for error in EXCEPTIONS:
        world.restart()
        world.cluster.scheduler.nodes["n1"], world.cluster.scheduler.state, world.workloads.inner.text = start
        world.breaks(part, call, error)
        report = world.round()
        assert report.active, error
        assert world.cluster.levels() == {}, f"{error!r}: {report.errors}"


@pytest.mark.parametrize(("part", "call"), CALLS)
def test_a_release_of_everything_is_complete_whatever_raises(part: str, call: str) -> None:
    world = World()
    world.cluster.scheduler.set_switches(Switches(release_all=True))
    start = world.cluster.scheduler.nodes["n1"], world.cluster.scheduler.state, world.workloads.inner.text
    for error in FEW:
        world.restart()
        world.cluster.scheduler.nodes["n1"], world.cluster.scheduler.state, world.workloads.inner.text = start
        world.breaks(part, call, error)
        report = world.round()
        assert world.cluster.levels() == {}, f"{error!r}: {report.errors}"


SOURCES = {
    ("ledger", "unsettled"): "the ledger", ("ledger", "begin"): "the ledger", ("ledger", "alerts"): "alert outcomes",
    ("scores", "read"): "the scores", ("events", "read"): "the events", ("events", "outcomes"): "alert outcomes",
    ("state", "load_state"): "the safety state", ("evacuation", "load"): "the evacuation state",
}  # fmt: skip


@pytest.mark.parametrize(("part", "call"), SOURCES)
def test_nothing_new_is_done_and_no_current_mark_is_lost_while_a_source_is_broken(part: str, call: str) -> None:
    world, source = World(), SOURCES[part, call]
    before = world.cluster.scheduler.nodes
    for error in FEW:
        world.cluster.scheduler.nodes = dict(before)
        world.restart()
        world.cluster.clock.move(timedelta(minutes=1))
        world.cluster.scored(n1=0.9, n2=0.95)
        world.breaks(part, call, error)
        report = world.round()
        assert any(message.startswith(source) or message == str(error) for message in report.errors), report.errors
        assert world.cluster.levels() == {"n1": Level.DRAIN}, f"{error!r}: {report.steps}"
        if not isinstance(error, LedgerError | SourceError | SchedulerError):
            assert any(type(error).__name__ in message for message in report.errors)


def test_a_mark_whose_reasons_cannot_be_read_stands_until_it_expires() -> None:
    world = World()
    world.cluster.scored()
    for part, call in (("scores", "read"), ("state", "load_state")):
        world.breaks(part, call, MemoryError(part))
    world.restart()
    world.cluster.clock.move(STEP)
    assert len(world.round().errors) == 2
    assert world.cluster.levels() == {"n1": Level.DRAIN}
    world.cluster.clock.move(STEP)
    world.round()
    assert world.cluster.levels() == {}


@pytest.mark.parametrize("function", ["decide", "odd_thresholds", "settled_by_reading", "carried_out"])
def test_a_fault_in_a_rule_of_the_round_releases_all_the_same(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.cluster.clock.move(2 * STEP)
    world.cluster.scored(n1=None, n2=0.95)

    def fail(*_: Any, **__: Any) -> Any:
        raise OverflowError(function)

    monkeypatch.setattr(controller_module, function, fail)
    world.round()
    assert world.cluster.level("n1") is Level.NONE


def test_a_release_without_a_decision_is_recorded_and_is_not_taken_for_a_persons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.cluster.clock.move(2 * STEP)
    with monkeypatch.context() as patched:
        patched.setattr(controller_module, "decide", lambda *_: 1 / 0)
        report = world.round()
    assert report.errors == ["the decision: ZeroDivisionError: division by zero"]
    assert [(step.action.verb, step.action.node, step.outcome) for step in report.steps] == [("release", "n1", "done")]
    service = world.cluster.ledger.service(world.cluster.clock.now() - STEP)
    assert [(node, out) for _, node, out in service] == [("n1", False)]
    world.cluster.clock.move(timedelta(minutes=1))
    world.cluster.scored(n1=0.9)
    world.round()
    assert world.cluster.level("n1") is Level.DRAIN, "nobody took the mark off by hand"


def test_one_node_that_cannot_be_released_keeps_no_other_from_it() -> None:
    cluster = Cluster(4)
    cluster.scored(n0=0.4, n1=0.4, n2=0.4)
    cluster.round()
    assert len(cluster.levels()) == 3
    preview: Callable[..., Any] = cluster.scheduler.preview

    def odd(actions: Any, reading: Any) -> Any:
        if reading.view.name == "n1":
            raise KeyError("spec")
        return preview(actions, reading)

    cluster.scheduler.preview = odd
    cluster.clock.move(2 * STEP)
    report = cluster.round()
    assert set(cluster.levels()) == {"n1"}
    assert any("KeyError" in step.message for step in report.steps if step.action.node == "n1")


def test_a_renewal_that_fails_does_not_leave_an_expired_mark() -> None:
    cluster = Cluster(3)
    cluster.scored(n1=0.4)
    cluster.round()
    cluster.clock.move(2 * STEP)
    cluster.scored(n1=0.4)
    apply = cluster.scheduler.apply

    def refused(action: Any, precondition: Any) -> Any:
        return WriteResult("refused", "quota") if action.verb != "release" else apply(action, precondition)

    cluster.scheduler.apply = refused
    cluster.round()
    assert cluster.levels() == {}


def test_a_node_that_is_listed_twice_is_an_error_and_is_released_when_it_expires() -> None:
    cluster = Cluster(3)
    cluster.scored(n1=0.9)
    cluster.round()
    read_fleet = cluster.scheduler.read_fleet

    def twice() -> Any:
        fleet = read_fleet()
        return replace(fleet, nodes=(*fleet.nodes, fleet.nodes[1]))

    cluster.scheduler.read_fleet = twice
    cluster.clock.move(timedelta(minutes=1))
    cluster.scored(n1=0.9, n2=0.95)
    report = cluster.round()
    assert report.errors == ["the scheduler lists nodes more than once: n1"]
    assert cluster.levels() == {"n1": Level.DRAIN}
    cluster.clock.move(2 * STEP)
    cluster.round()
    assert cluster.levels() == {}


def test_a_controller_that_cannot_be_set_up_releases_what_has_expired_and_nothing_else() -> None:
    cluster = Cluster(4)
    cluster.scored(n1=0.9)
    cluster.round()
    cluster.clock.move(STEP)
    cluster.scored(n1=None, n2=0.4)
    cluster.round()
    assert set(cluster.levels()) == {"n1", "n2"}
    cluster.restart(holder="p1")
    cluster.controller.unusable = "the settings are broken"
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9, n3=0.9)
    report = cluster.round()
    assert "the settings are broken" in report.errors[0]
    assert set(cluster.levels()) == {"n2"}, "of n1 the prediction has expired, of n2 it has not"


def test_a_model_that_is_dated_in_the_future_has_no_known_age_and_drains_nobody() -> None:
    cluster = Cluster(4)
    cluster.scored(n1=0.9)
    cluster.risks.risks = replace(cluster.risks.risks, model_fitted_at=cluster.clock.now() + timedelta(days=3650))
    report = cluster.round()
    assert any("in the future" in note for note in report.notes)
    assert not any(level.hard for level in cluster.levels().values())
