"""Whatever raises in a round: expired marks are released, on request all marks are, and nothing new is done."""

import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from policy.breaker import BreakerConfig, CommonCauseConfig
from policy.fleet import JobView, Level, UnitView
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS
from scheduler.controller import controller as controller_module
from scheduler.controller.executor import Executor
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import VerificationSettings
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import LedgerError, SchedulerError, SourceError
from scheduler.ports.readings import Switches, WriteResult
from scheduler.ports.report import RoundReport
from scheduler.ports.workloads import CheckpointOffer, HookReply
from tests import waiting
from tests.policy.decide_world import STEP, config
from tests.scheduler.cluster import Cluster, at_risk, marked
from tests.scheduler.evacuation.emptying_cluster import FAST, Recording, workload
from tests.scheduler.faults import MemoryVerification, MemoryWorkloads


class Panic(BaseException):
    """As native extensions raise it."""


EXCEPTIONS = (
    Panic("native code"), SystemExit(3),
    OSError("disk"), ValueError("value"), KeyError("key"), AttributeError("attribute"), OverflowError("year 10000"),
    RecursionError("nested"), MemoryError("large"), StopIteration("stop"), json.JSONDecodeError("json", "{", 1),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "start"), sqlite3.OperationalError("locked"), SourceError("source"),
    LedgerError("ledger"), SchedulerError("scheduler"),
)  # fmt: skip
FEW = EXCEPTIONS[-4:]
LEDGER = (
    "unsettled", "last_digest", "begin", "begin_releases", "call", "settle", "skip", "alerts", "open_calls", "find",
)  # fmt: skip
WORK = (
    "on_node", "load_progress", "save_progress", "ask_checkpoint", "checkpoint_state", "evict", "preview",
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

    def breaks(self, name: str, error: BaseException) -> None:
        self.__dict__.update(broken=name, error=error)


class World:
    """A cluster on which the next round makes every call there is, with hands on all that is not the scheduler.

    The marks of n3 and n5 have expired, the others are current; other nodes are newly at risk.
    """

    expired = ("n3", "n5")
    current = ("n1", "n2", "n4")

    def __init__(self) -> None:
        self.cluster = cluster = Cluster(
            12, ledger=Hooked(SqliteLedger(None)),
            policy=config(
                "g", free=True, rungs=RUNGS, probes=ProbeConfig(max_concurrent=2, max_idle_share=1.0),
                breaker=BreakerConfig(max_risky=1.0, jump=100.0, max_missing=1.0, common_cause=CommonCauseConfig(100)),
            ),
        )  # fmt: skip
        cluster.risks, cluster.facts = Hooked(cluster.risks), Hooked(cluster.facts)
        self.work = MemoryWorkloads(
            [workload("w0", "n0"), workload("w1", "n1", checkpoint=None), workload("w2", "n2"),
             workload("w7", "n7", checkpoint=CheckpointOffer("webhook"))],
            cluster.clock,
        )  # fmt: skip
        self.work.blocked["w1-uid"] = "a disruption budget"
        self.diagnostics, self.probes = MemoryVerification(), MemoryVerification()
        self.hook = Recording(HookReply("waiting"))
        self.hooked = [Hooked(part) for part in (self.work, self.diagnostics, self.probes, self.hook)]
        for name in ("n8", "n9", "n11"):
            cluster.change(name, jobs=())
        self.restart()
        cluster.scored(n1=0.9, n2=0.9, n3=0.4, n4=0.9, n5=0.9, n8=0.25, n9=0.2)
        early = cluster.clock.now() + timedelta(minutes=9)
        units = {name: (self._until(cluster.risks.risks.nodes[name][0], early),) for name in self.expired}
        cluster.risks.risks = replace(cluster.risks.risks, nodes={**cluster.risks.risks.nodes, **units})
        assert not cluster.round().failed
        assert {name for name, level in cluster.levels().items() if level.hard} == {"n5", *self.current}
        assert {node for node, _ in self.probes.started.values()} == {"n8", "n9"}
        cluster.clock.move(timedelta(minutes=10))
        cluster.scored(n0=0.9, n3=None, n5=None, n6=0.25, n7=0.9, n10=0.9, n11=0.4)
        cluster.change("n6", jobs=())
        cluster.change("n9", jobs=(JobView("j9", 8),))
        cluster.settings = replace(cluster.settings, max_new_per_round=6)
        cluster.policy = replace(cluster.policy, probes=replace(cluster.policy.probes, max_concurrent=8))

    @staticmethod
    def _until(unit: UnitView, end: datetime) -> UnitView:
        return replace(unit, score=replace(unit.score, expires_at=end))

    def restart(self) -> None:
        cluster = self.cluster
        settings = replace(FAST, verification=VerificationSettings(method="scheduler"))
        work, diagnostics, probes, hook = self.hooked
        self.evacuation: Any = Hooked(
            Evacuation(cluster.scheduler, work, cluster.clock, settings, {"webhook": hook}, diagnostics, probes)
        )
        cluster.restart(holder="p")
        cluster.controller.evacuation = self.evacuation

    def snapshot(self) -> Callable[[], None]:
        """Return what puts all back as it is now, under another process."""
        scheduler, work = self.cluster.scheduler, self.work
        nodes, state, running, text = dict(scheduler.nodes), scheduler.state, dict(work.running), work.text

        def restore() -> None:
            scheduler.nodes, scheduler.state = dict(nodes), state
            work.running, work.asked, work.text = dict(running), {}, text
            self.restart()

        return restore

    def breaks(self, part: str, call: str, error: BaseException) -> Hooked:
        """Let one call raise from now on."""
        cluster = self.cluster
        parts: dict[str, Any] = {
            "ledger": cluster.ledger, "scores": cluster.risks, "events": cluster.facts, "evacuation": self.evacuation,
            **dict(zip(("workloads", "diagnostics", "probes", "hooks"), self.hooked, strict=True)),
        }  # fmt: skip
        if part in ("state", "markers"):  # the safety state, which the scheduler stores, and what follows the marks
            parts[part] = Hooked(cluster.scheduler)
            parts[part].breaks(call, error)
            setattr(cluster.scheduler, call, getattr(parts[part], call))
            self.restart()
        parts[part].breaks(call, error)
        return parts[part]

    def round(self) -> RoundReport:
        return self.cluster.round()


CALLS = [
    *(("ledger", call) for call in LEDGER),
    ("scores", "read"), ("events", "read"), ("events", "outcomes"),
    ("state", "load_state"), ("state", "save_state"), ("markers", "upkeep"), ("markers", "announce"),
    *(("evacuation", call) for call in ("load", "round", "results", "probes", "end_probes")),
    *(("workloads", call) for call in WORK),
    *(("diagnostics", call) for call in ("start", "result", "drop")),
    *(("probes", call) for call in ("start", "result", "drop")),
    ("hooks", "tell"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "call"), CALLS)
def test_expired_marks_are_released_whatever_raises(part: str, call: str) -> None:
    world = World()
    restore, calls = world.snapshot(), 0
    for error in (*EXCEPTIONS, KeyboardInterrupt()):
        restore()
        if call in ("begin_releases", "end_probes"):
            world.cluster.controller.policy = None  # there is no decision
        broken = world.breaks(part, call, error)
        if isinstance(error, KeyboardInterrupt):  # the process is to end
            with pytest.raises(KeyboardInterrupt):
                world.round()
            break
        report = world.round()
        assert report.active, error
        assert not {*world.expired} & world.cluster.levels().keys(), f"{error!r}: {report.errors}"
        assert {*world.current} <= world.cluster.levels().keys(), "a current mark is lost"
        assert not [message for message in report.errors if message.startswith("the scheduler cannot be read")]
        calls += broken.calls
    assert calls >= len(EXCEPTIONS), "the round makes the call"


@pytest.mark.parametrize(("part", "call"), [("scores", "read"), ("events", "read"), ("events", "outcomes")])
def test_a_source_that_never_answers_delays_a_release_once_and_is_read_again_when_it_has(part: str, call: str) -> None:
    world, gate = World(), threading.Event()
    cluster = world.cluster
    source = {"scores": cluster.risks, "events": cluster.facts}[part].inner
    read = getattr(source, call)
    cluster.settings = replace(cluster.settings, max_round_duration=timedelta(milliseconds=50))
    world.restart()
    setattr(source, call, lambda *given: gate.wait() and read(*given))
    for why in ("timed out after 0.05 s", "an earlier call has not ended yet"):
        report = world.round()
        assert any(f"TimeoutError: {why}" in error for error in report.errors), report.errors
        assert not {*world.expired} & cluster.levels().keys()
        assert {*world.current} <= cluster.levels().keys()
    gate.set()
    waiting.wait(lambda: not any("TimeoutError" in error for error in world.round().errors))


@pytest.mark.parametrize(("part", "call"), CALLS)
def test_a_release_of_everything_is_complete_whatever_raises(part: str, call: str) -> None:
    world = World()
    world.cluster.scheduler.set_switches(Switches(release_all=True))
    restore = world.snapshot()
    for error in FEW:
        restore()
        world.breaks(part, call, error)
        report = world.round()
        assert world.cluster.levels() == {}, f"{error!r}: {report.errors}"


SOURCES = {
    ("ledger", "unsettled"): "the ledger", ("ledger", "begin"): "the ledger", ("ledger", "call"): "the ledger",
    ("ledger", "alerts"): "alert outcomes",
    ("scores", "read"): "the scores", ("events", "read"): "the events", ("events", "outcomes"): "alert outcomes",
    ("state", "load_state"): "the safety state", ("state", "save_state"): "the safety state",
    ("evacuation", "load"): "the evacuation state",
}  # fmt: skip


@pytest.mark.parametrize(("part", "call"), SOURCES)
def test_nothing_new_is_done_and_no_current_mark_is_lost_while_a_source_is_broken(part: str, call: str) -> None:
    world, source = World(), SOURCES[part, call]
    before, started = world.cluster.levels(), {**world.diagnostics.started, **world.probes.started}
    restore = world.snapshot()
    for error in FEW:
        restore()
        world.breaks(part, call, error)
        report = world.round()
        assert any(source in message or message == str(error) for message in report.errors), report.errors
        levels = world.cluster.levels()
        assert {*world.current} <= levels.keys()
        assert all(level <= before.get(name, Level.NONE) for name, level in levels.items()), f"{error!r}"
        assert {**world.diagnostics.started, **world.probes.started} == started
        assert (world.work.evicted, world.hook.requests) == ([], [])
        if not isinstance(error, LedgerError | SourceError | SchedulerError):
            assert any(type(error).__name__ in message for message in report.errors)


def test_a_call_that_cannot_be_recorded_is_not_made() -> None:
    cluster = Cluster(3, ledger=Hooked(SqliteLedger(None)))
    cluster.scored(n1=0.9)
    cluster.ledger.breaks("call", LedgerError("full"))
    cluster.round()
    assert cluster.levels() == {}


def test_a_mark_whose_reasons_cannot_be_read_stands_until_it_expires() -> None:
    world = World()
    for part, call in (("scores", "read"), ("state", "load_state")):
        world.breaks(part, call, MemoryError(part))
    world.restart()
    assert len(world.round().errors) == 2
    assert {*world.current} <= world.cluster.levels().keys()
    world.cluster.clock.move(2 * STEP)
    world.round()
    assert world.cluster.levels() == {}


@pytest.mark.parametrize("function", ["decide", "odd_thresholds", "settled_by_reading", "carried_out"])
def test_a_fault_in_a_rule_of_the_round_releases_all_the_same(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def fail(*_: Any, **__: Any) -> Any:
        raise OverflowError(function)

    monkeypatch.setattr(controller_module, function, fail)
    world.round()
    assert not {*world.expired} & world.cluster.levels().keys()


def test_a_fault_on_the_way_to_the_actions_releases_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world, carry_out, faults = World(), Executor.carry_out, [OverflowError("once")]

    def once(*given: Any) -> None:
        if faults:
            raise faults.pop()
        carry_out(*given)

    monkeypatch.setattr(Executor, "carry_out", once)
    assert world.round().errors == ["the actions: OverflowError: once"]
    assert not {*world.expired} & world.cluster.levels().keys()


def test_a_release_without_a_decision_is_recorded_and_is_not_taken_for_a_persons(monkeypatch):
    world = World()
    with monkeypatch.context() as patched:
        patched.setattr(controller_module, "decide", lambda *_: 1 / 0)
        report = world.round()
    assert report.errors == ["the decision: ZeroDivisionError: division by zero"]
    released = [(step.action.verb, step.action.node, step.outcome) for step in report.steps]
    assert released == [("release", name, "done") for name in world.expired]
    service = world.cluster.ledger.service(world.cluster.clock.now())
    assert [(node, out) for _, node, out in service] == [("n3", False), ("n5", False)]
    world.cluster.clock.move(timedelta(minutes=1))
    world.cluster.scored(n5=0.9)
    world.round()
    assert world.cluster.level("n5") is Level.DRAIN, "nobody took the mark off by hand"


@pytest.mark.parametrize("call", ["preview", "apply"])
def test_one_node_that_cannot_be_released_keeps_no_other_from_it(call: str) -> None:
    cluster = marked(4, n0=0.4, n1=0.4, n2=0.4)
    assert len(cluster.levels()) == 3
    calls: Callable[..., Any] = getattr(cluster.scheduler, call)

    def odd(what: Any, given: Any) -> Any:
        actions = what if call == "preview" else [what]
        if any(action.node == "n1" for action in actions):
            raise KeyError("spec")
        return calls(what, given)

    setattr(cluster.scheduler, call, odd)
    cluster.clock.move(2 * STEP)
    report = cluster.round()
    assert set(cluster.levels()) == {"n1"}
    assert any("KeyError" in step.message for step in report.steps if step.action.node == "n1")


@pytest.mark.parametrize(
    ("part", "call", "source"),
    [("evacuation", "rehearse", "the evacuation"), ("markers", "read_fleet", "the scheduler cannot be read")],
)
def test_a_dry_run_names_what_is_broken_and_ends(part: str, call: str, source: str) -> None:
    world = World()
    world.breaks(part, call, KeyError("spec"))
    report = world.cluster.controller.rehearse()
    assert report.errors == [f"{source}: KeyError: 'spec'"]


def test_a_renewal_that_fails_does_not_leave_an_expired_mark() -> None:
    cluster = marked(3, n1=0.4)
    cluster.clock.move(2 * STEP)
    cluster.scored(n1=0.4)
    apply = cluster.scheduler.apply

    def refused(action: Any, precondition: Any) -> Any:
        return WriteResult("refused", "quota") if action.verb != "release" else apply(action, precondition)

    cluster.scheduler.apply = refused
    cluster.round()
    assert cluster.levels() == {}


def test_a_node_that_is_listed_twice_is_an_error_and_is_released_when_it_expires() -> None:
    cluster = marked(3, n1=0.9)
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


@pytest.mark.parametrize(
    ("change", "why"),
    [({"readable": False}, "the state of the node cannot be read"), ({"unwritable": "a reboot"}, "a reboot")],
)
def test_an_expired_mark_that_cannot_be_released_is_reported_until_it_is(change: Any, why: str) -> None:
    cluster = marked(3, n1=0.9)
    cluster.change("n1", **change)
    assert cluster.round().notes == []
    cluster.clock.move(2 * STEP)
    for _ in range(2):
        assert f"n1: expired markers stay, {why}" in cluster.round().notes
    assert set(cluster.levels()) == {"n1"}
    cluster.change("n1", readable=True, unwritable=None)
    cluster.round()
    assert cluster.levels() == {}


def test_a_controller_that_cannot_be_set_up_releases_what_has_expired_and_nothing_else() -> None:
    cluster = marked(4, n1=0.9)
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
    cluster = at_risk(4, n1=0.9)
    cluster.risks.risks = replace(cluster.risks.risks, model_fitted_at=cluster.clock.now() + timedelta(days=3650))
    report = cluster.round()
    assert any("in the future" in note for note in report.notes)
    assert not any(level.hard for level in cluster.levels().values())
