"""Which rungs are recommended: those that pay where they were not chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.value.gpu_hours import net_interval
from evaluation.value.ladder import PARTS, choose_ladder

RUNS = {"replicates": 200, "seed": 1}


def steady(net: float, nodes: int = 40) -> np.ndarray:
    """A net for each node, with some spread."""
    return (net * np.linspace(0.5, 1.5, nodes))[None]


def test_the_ladder_of_highest_net_is_chosen():
    chosen, net = choose_ladder({("avoid",): steady(1), ("probe",): steady(3), ("drain",): steady(-5)}, **RUNS)
    assert chosen == ("probe",)
    assert net["value"] == pytest.approx(40 * 3)
    assert 0 < net["low"] < net["value"] < net["high"]


def test_what_pays_only_on_the_nodes_that_it_was_chosen_on_is_not_recommended():
    net = np.full((1, 40), -1.0)
    net[0, np.random.default_rng(RUNS["seed"]).permutation(40) % PARTS == 0] = 20
    assert net_interval(net, **RUNS)[1].low > 0, "all nodes together say that it pays"
    assert choose_ladder({("drain",): net}, **RUNS) == ((), {"value": 0.0, "low": 0.0, "high": 0.0})


def test_a_rung_that_adds_chance_alone_is_left_out():
    luck = np.zeros((1, 40))
    luck[0, 7] = 90
    chosen, net = choose_ladder({("probe",): steady(4), ("probe", "swap"): steady(4) + luck}, **RUNS)
    assert chosen == ("probe",)
    assert net["value"] == pytest.approx(40 * 4)


def test_without_a_ladder_nothing_is_recommended():
    assert choose_ladder({}, **RUNS)[0] == ()


@given(st.integers(0, 10_000), st.floats(-2, 2))
def test_a_recommended_ladder_never_loses_in_the_replay_it_is_chosen_on(seed, mean):
    rng = np.random.default_rng(seed)
    nets = {(rung,): rng.normal(mean, 5, (2, 30)) for rung in ("avoid", "probe", "drain")}
    chosen, net = choose_ladder(nets, **RUNS)
    if chosen:
        assert net_interval(nets[chosen], **RUNS)[1].low > 0
        assert net["low"] > 0
    else:
        assert set(net.values()) == {0.0}
