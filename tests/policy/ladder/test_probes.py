"""Which idle nodes are probed: riskiest first, within a budget, at risk daily and the others weekly."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.requests import Candidate, FleetRisk, probes_of
from policy.plan import LastRequest
from tests.policy.decide_world import T0, node

DAY = timedelta(days=1)
CONFIG = ProbeConfig(max_concurrent=3, max_idle_share=1.0)


def idle(name: str, risk: float, rested: timedelta | None = None) -> Candidate:
    """An idle node whose risk has not changed since its last probe."""
    probed = None if rested is None else LastRequest(T0 - rested, risk, T0 - rested)
    return Candidate(node(name, risk), risk, T0, T0 + DAY, {"probe": None}, True, probed)


def chosen(*nodes: Candidate, config: ProbeConfig = CONFIG, running: int = 0, mean: float = 0.1) -> list[str]:
    probing = [f"p{number}" for number in range(running)]
    busy = [idle(name, 0.5) for name in probing]
    fleet = FleetRisk(mean, len(nodes) + running)
    requests, _ = probes_of([*nodes, *busy], fleet, probing, config, CostBenefitConfig(), T0)
    return [request.node for request in requests]


def test_the_riskiest_go_first():
    assert chosen(idle("a", 0.2), idle("b", 0.9), idle("c", 0.5)) == ["b", "c", "a"]


def test_a_node_at_risk_is_probed_again_after_a_day_and_another_one_after_a_week():
    assert chosen(idle("a", 0.2, DAY), idle("b", 0.2, DAY / 2)) == ["a"]
    assert chosen(idle("a", 0.05, 6 * DAY), idle("b", 0.05, 7 * DAY)) == ["b"]


def test_at_equal_risks_the_node_that_rested_longest_goes_first():
    nodes = idle("a", 0.2, 2 * DAY), idle("b", 0.2, 3 * DAY), idle("c", 0.2)
    assert chosen(*nodes) == ["c", "b", "a"]


RESTED = st.none() | st.integers(1, 40).map(lambda half_days: half_days * DAY / 2)
NODES = st.lists(st.tuples(st.floats(0, 1), RESTED), max_size=12)


@given(NODES, st.integers(0, 6), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1))
def test_no_budget_is_ever_exceeded_and_no_node_probed_twice_within_a_day(drawn, running, most, share, mean):
    nodes = [idle(f"n{place}", *fields) for place, fields in enumerate(drawn)]
    config = ProbeConfig(max_concurrent=most, max_idle_share=share)
    names = chosen(*nodes, config=config, running=running, mean=mean)
    assert len(names) == len({*names})
    assert not names or running + len(names) <= max(1, min(most, share * (len(nodes) + running)))
    assert all(rested is None or rested >= DAY for place, (_, rested) in enumerate(drawn) if f"n{place}" in names)
