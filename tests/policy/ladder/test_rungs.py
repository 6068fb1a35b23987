"""What each rung costs and saves, and the risk from which it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cost_benefit import CostBenefitConfig, JobHours
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS, prices

COSTS = CostBenefitConfig()
HOURS = st.floats(0, 500)
JOBS = st.builds(JobHours, HOURS, HOURS, HOURS, HOURS)


@given(JOBS, st.floats(0, 1), st.floats(0.001, 0.999))
def test_a_rung_pays_on_average_exactly_above_its_break_even(jobs, found, risk):
    priced = prices(8, jobs, COSTS, ProbeConfig(found={"other": found}))
    assert list(priced) == list(RUNGS)
    for price in priced.values():
        expected, even = risk * price.saved - (1 - risk) * price.unneeded, price.break_even
        if even is None:
            assert expected <= 1e-9
        elif abs(risk - even) > 1e-6 and even > 0:
            assert (expected > 0) == (risk > even)


def test_what_costs_nothing_pays_at_any_risk():
    priced = prices(8, JobHours(5, 10), COSTS, ProbeConfig())
    assert (priced["publish"].break_even, priced["avoid"].break_even) == (0, 0)


@pytest.mark.parametrize(("unsaved", "even"), [(4.0, 0.25), (10.0, 0.1), (1.0, None), (0.5, None)])
def test_a_checkpoint_pays_when_the_work_since_the_last_one_exceeds_its_cost_over_the_risk(unsaved, even):
    assert prices(8, JobHours(checkpoint=1.0, unsaved=unsaved), COSTS, ProbeConfig())["checkpoint"].break_even == even


def test_a_diagnostic_that_finds_less_makes_a_drain_pay_later():
    evens = [
        prices(8, JobHours(3, 10), COSTS, ProbeConfig(found={"other": share}))["drain"].break_even
        for share in (1.0, 0.5, 0.05)
    ]
    assert evens[0] < evens[1]
    assert evens[2] is None
