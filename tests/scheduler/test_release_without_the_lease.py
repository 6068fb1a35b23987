"""Expired marks are released although the lease cannot be read, valid ones are not, and nobody is blamed for it."""

from datetime import timedelta
from unittest.mock import Mock

import pytest

from policy.fleet import Fact, Level
from policy.plan import Action
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Precondition, Switches, WriteResult
from scheduler.ports.risks import ReportedFacts
from tests.policy.decide_world import STEP, T0
from tests.scheduler.cluster import at_risk, marked, without_our_taints


def test_an_overdue_mark_is_released_without_the_lease_and_a_current_one_stays() -> None:
    cluster = marked(4, n1=0.9)
    cluster.clock.move(STEP)
    cluster.scored(n1=None, n2=0.9)
    cluster.round()
    hold_lease, apply = cluster.scheduler.hold_lease, cluster.scheduler.apply
    cluster.scheduler.hold_lease = Mock(side_effect=SchedulerError("the folder hangs"))
    for minutes, left in ((0, {"n1", "n2"}), (9, {"n1", "n2"}), (1, {"n2"})):
        cluster.clock.move((timedelta(0) if minutes else STEP) + timedelta(minutes=minutes))
        report = cluster.round()
        assert (report.active, report.errors) == (False, ["the lease cannot be read: the folder hangs"])
        assert set(cluster.levels()) == left
    assert [(step.action.node, step.outcome) for step in report.steps] == [("n1", "done")]
    assert [node for _, node, out in cluster.ledger.service(T0) if not out] == ["n1"]

    def renewed(action: Action, precondition: Precondition) -> WriteResult:
        cluster.scheduler.apply = apply
        cluster.scheduler.hold_lease = hold_lease
        cluster.restart()
        cluster.scored(n2=0.9)
        cluster.round()
        cluster.scheduler.hold_lease = Mock(side_effect=SchedulerError("the folder hangs"))
        return apply(action, precondition)

    cluster.clock.move(STEP)
    cluster.scheduler.apply, overdue = renewed, cluster.controller
    report = overdue.round()
    assert [step.message for step in report.steps] == ["its markers were renewed"]
    assert set(cluster.levels()) == {"n2"}
    cluster.scheduler.set_switches(Switches(release_all=True))
    overdue.round()
    assert cluster.levels() == {}
    cluster.scheduler.set_switches(Switches())
    cluster.scheduler.hold_lease = hold_lease
    cluster.clock.move(timedelta(minutes=1))
    cluster.scored(n1=0.9, n2=0.9)
    cluster.round()
    assert set(cluster.levels()) == {"n1", "n2"}, "nobody took the marks off by hand"


@pytest.mark.parametrize(("server_minutes", "left"), [(9, True), (10, False), (600, False), (None, True)])
def test_a_replica_whose_clock_is_ahead_releases_no_valid_mark_without_the_lease(server_minutes, left):
    cluster = marked(4, n1=0.9)
    until = T0 + 2 * STEP
    cluster.scheduler.hold_lease = Mock(side_effect=SchedulerError("the folder hangs"))
    server_time = None if server_minutes is None else until + timedelta(minutes=server_minutes)
    cluster.scheduler.server_time = lambda: server_time
    cluster.clock.move(2 * STEP + timedelta(hours=1))
    report = cluster.round()
    assert set(cluster.levels()) == ({"n1"} if left else set())
    assert any("expired markers stay" in note for note in report.notes) is (server_time is None)
    assert any("two clocks" in note for note in report.notes) is (server_time is not None)
    cluster.scheduler.set_switches(Switches(release_all=True))
    cluster.scheduler.server_time = Mock()
    cluster.round()
    assert cluster.levels() == {}
    assert not cluster.scheduler.server_time.called, "it may hang"


@pytest.mark.parametrize(
    ("risk", "why", "set_again"),
    [(0.4, "expired", True), (0.9, "expired", True), (0.9, "renewed late", True), (0.01, "fault", True),
     (0.9, "release all", True), (0.9, "release all that ended", True), (0.4, "release all that ended", True),
     (0.9, "by hand", False), (0.9, "by hand before the end", False)],
)  # fmt: skip
def test_a_mark_that_was_released_without_the_lease_is_set_again_and_one_that_a_person_removed_is_not(
    risk: float, why: str, set_again: bool
) -> None:
    cluster = at_risk(4, n1=risk)
    if why == "fault":
        cluster.facts.facts = {"n1-0": ReportedFacts((Fact("xid 79", T0),))}
    cluster.round()
    before = cluster.levels()
    view = cluster.scheduler.revalidate("n1").view
    until = view.marks.published.expires_at
    if why == "renewed late":  # evidence that lasts longer, but not by as much as policy.renew
        cluster.clock.move(timedelta(minutes=30))
        cluster.scored(n1=risk)
        cluster.round()
    hold_lease = cluster.scheduler.hold_lease
    cluster.scheduler.hold_lease = Mock(side_effect=SchedulerError("the folder hangs"))
    early = "before" in why or "release all" in why
    cluster.clock.move(until + timedelta(minutes=-1 if early else 10) - cluster.clock.now())
    cluster.scheduler.set_switches(Switches(release_all="release all" in why))
    if "by hand" in why:
        cluster.write("n1", lambda node: without_our_taints(node, cluster))
    else:
        cluster.round()
        assert cluster.levels() == {}
    cluster.scheduler.hold_lease = hold_lease
    cluster.restart()
    if "ended" in why:
        cluster.scheduler.set_switches(Switches())
    cluster.scored(n1=risk)
    cluster.round()
    cluster.scheduler.set_switches(Switches())
    if why == "fault":
        cluster.facts.facts = {"n1-0": ReportedFacts((Fact("xid 79", cluster.clock.now()),))}
    cluster.round()
    assert cluster.levels() == (before if set_again else {"n1": Level.PUBLISH})
