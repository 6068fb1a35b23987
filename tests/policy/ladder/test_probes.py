"""Which idle nodes are probed: riskiest first, within a budget, at risk daily and the others weekly."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from policy.ladder.probes import IdleNode, ProbeConfig, choose_probes

DAY = timedelta(days=1)
CONFIG = ProbeConfig(max_concurrent=3, max_idle_share=1.0)


def chosen(*nodes: IdleNode, config: ProbeConfig = CONFIG, running: int = 0, mean: float = 0.1) -> list[str]:
    return choose_probes(nodes, running=running, idle=len(nodes) + running, mean_risk=mean, config=config)


def test_the_riskiest_go_first():
    assert chosen(IdleNode("a", 0.2), IdleNode("b", 0.9), IdleNode("c", 0.5)) == ["b", "c", "a"]


def test_a_node_at_risk_is_probed_again_after_a_day_and_another_one_after_a_week():
    assert chosen(IdleNode("a", 0.2, DAY), IdleNode("b", 0.2, DAY / 2)) == ["a"]
    assert chosen(IdleNode("a", 0.05, 6 * DAY), IdleNode("b", 0.05, 7 * DAY)) == ["b"]


def test_at_equal_risks_the_node_that_rested_longest_goes_first():
    nodes = IdleNode("a", 0.2, 2 * DAY), IdleNode("b", 0.2, 3 * DAY), IdleNode("c", 0.2)
    assert chosen(*nodes) == ["c", "b", "a"]


RESTED = st.none() | st.integers(0, 20).map(lambda days: days * DAY)
NODES = st.lists(st.tuples(st.floats(0, 1), RESTED), max_size=12)


@given(NODES, st.integers(0, 6), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1))
def test_no_budget_is_ever_exceeded_and_no_node_probed_twice_within_a_day(drawn, running, most, share, mean):
    nodes = [IdleNode(f"n{place}", *fields) for place, fields in enumerate(drawn)]
    config = ProbeConfig(max_concurrent=most, max_idle_share=share)
    names = chosen(*nodes, config=config, running=running, mean=mean)
    assert len(names) == len({*names})
    assert not names or running + len(names) <= max(1, min(most, share * (len(nodes) + running)))
    assert all(node.rested is None or node.rested >= DAY for node in nodes if node.name in names)
