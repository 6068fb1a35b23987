"""Which rungs are recommended: those that pay where they were not chosen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evaluation.value.gpu_hours import net_interval
from evaluation.value.ladder import choose_ladder

RUNS = {"replicates": 200, "seed": 1}


def steady(first: float, second: float, nodes: int = 40) -> np.ndarray:
    """A net per node in each half, with some spread."""
    spread = np.linspace(0.5, 1.5, nodes)
    return np.stack([first * spread, second * spread])[None]


def test_the_ladder_of_highest_net_is_chosen_and_its_net_comes_from_the_other_half():
    nets = {("avoid",): steady(1, 1), ("probe",): steady(3, 2), ("drain",): steady(-5, -5)}
    chosen, net = choose_ladder(nets, **RUNS)
    assert chosen == ("probe",)
    assert net["value"] == 40 * (3 + 2)
    assert 0 < net["low"] < net["value"] < net["high"]


def test_what_paid_in_one_half_only_is_not_credited_with_that_half():
    # drain wins the first half by far and loses the second: chosen in the first, it is evaluated in the second.
    assert choose_ladder({("drain",): steady(9, -3)}, **RUNS) == ((), {"value": 0.0, "low": 0.0, "high": 0.0})
    chosen, net = choose_ladder({("drain",): steady(9, -3), ("probe",): steady(4, 4)}, **RUNS)
    assert chosen == ("probe",)
    assert net["value"] == 40 * (4 - 3)


def test_a_rung_that_adds_chance_alone_is_left_out():
    luck = np.zeros((1, 2, 40))
    luck[0, 0, 7], luck[0, 1, 7] = 90, -400  # one node's luck in the first half
    chosen, net = choose_ladder({("probe",): steady(4, 4), ("probe", "swap"): steady(4, 4) + luck}, **RUNS)
    assert chosen == ("probe",)
    assert net["value"] == 40 * (4 + 4)


def test_without_a_ladder_nothing_is_recommended():
    assert choose_ladder({}, **RUNS)[0] == ()


@given(st.integers(0, 10_000), st.floats(-2, 2))
def test_a_recommended_ladder_never_loses_in_the_replay_it_is_chosen_on(seed, mean):
    rng = np.random.default_rng(seed)
    nets = {(rung,): rng.normal(mean, 5, (2, 2, 30)) for rung in ("avoid", "probe", "drain")}
    chosen, net = choose_ladder(nets, **RUNS)
    if chosen:
        assert net_interval(nets[chosen].sum(axis=1), **RUNS)[1].low > 0
        assert net["low"] > 0
    else:
        assert set(net.values()) == {0.0}
