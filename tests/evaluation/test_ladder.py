"""Which rungs are recommended: those that pay where they were not chosen, cheapest first."""

import numpy as np
import pytest

from evaluation.value.gpu_hours import net_interval
from evaluation.value.ladder import FOLDS, choose_ladder

RUNS = {"replicates": 200, "seed": 1}
FOLD = np.random.default_rng(RUNS["seed"]).permutation(40) % FOLDS


def steady(net: float) -> np.ndarray:
    """A net for each node, with some spread."""
    return (net * np.linspace(0.5, 1.5, 40))[None]


def on_part(number: int, net: float, elsewhere: float) -> np.ndarray:
    """A net on one part of the nodes, and another on the rest."""
    return np.where(number == FOLD, net, elsewhere)[None]


LUCK = np.where(np.arange(40) == 7, 90.0, 0.0)[None]
DRAINS = [("probe", "swap"), ("probe", "drain"), ("probe", "checkpoint", "swap"), ("avoid", "probe", "swap"), ("swap",)]


@pytest.mark.parametrize(
    ("nets", "chosen", "value"),
    [
        ({}, (), 0),
        ({("avoid",): steady(1), ("probe",): steady(3), ("drain",): steady(-5)}, ("probe",), 120),
        ({("probe",): steady(1), ("probe", "drain"): steady(3)}, ("probe", "drain"), 120),
        pytest.param({("drain",): on_part(0, 20, -1)}, (), 0, id="it pays only on the nodes that it was chosen on"),
        pytest.param({("probe",): steady(4), ("probe", "swap"): steady(4) + LUCK}, ("probe",), 160, id="chance added"),
        pytest.param(
            {("probe",): steady(4)} | {ladder: steady(4) + on_part(n, -40, 10) for n, ladder in enumerate(DRAINS)},
            ("probe",), 160, id="each part would choose another expensive ladder",
        ),
        pytest.param(
            {("probe",): on_part(0, 20, -5), ("drain",): None}, (), 0, id="no drain is tried if no probe pays"
        ),
    ],
)  # fmt: skip
def test_the_ladder_is_the_best_of_the_families_that_are_sure_to_pay(nets, chosen, value):
    got, net = choose_ladder(nets, nets.__getitem__, **RUNS)
    assert got == chosen
    assert net["value"] == pytest.approx(value)
    assert net["low"] <= net["value"] <= net["high"]
    assert (net["low"] > 0) == bool(chosen)
    assert not got or net_interval(nets[got], **RUNS)[1].low > 0


def test_where_nothing_pays_a_ladder_is_recommended_no_more_often_than_in_one_table_of_forty():
    """Cheap rungs cost a little and seldom gain much; those that move jobs gain a little and seldom lose much."""
    rng, recommended = np.random.default_rng(3), 0
    for _ in range(80):
        seldom = np.where(rng.random((3, 40)) < 0.1, 9.0, -1.0)
        probe, avoid, swap = seldom * [[1], [0.1], [-1]] * (rng.random((3, 40)) < 0.5)
        nets = {("probe",): probe, ("avoid",): avoid, ("avoid", "probe"): avoid + probe, ("swap",): swap}
        nets |= {("probe", "swap"): probe + swap, ("probe", "drain"): probe + np.roll(swap, 1)}
        tables = {ladder: net[None] for ladder, net in nets.items()}
        recommended += bool(choose_ladder(tables, tables.__getitem__, replicates=100, seed=1)[0])
    assert recommended <= 80 / 40
