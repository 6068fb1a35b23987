from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.fleet import JobView
from policy.ladder.cost_benefit import CostBenefitConfig, evaluate_drain, hours_of
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import prices
from tests.policy.decide_world import HOUR, T0

DAY = timedelta(days=1)
CONFIG = CostBenefitConfig()


def job(gpus=64, age=HOUR, **others):
    return JobView("j", gpus, started_at=T0 - age, **others)


def net(worth):
    return worth.saved - worth.lost


def simulate(gpus, job_gpus, risk, wait_hours, config, *, age_hours, rounds=200_000):
    """Mean GPU-hours lost by leaving, draining now, and waiting, by playing it out."""
    rng = np.random.default_rng(0)
    fails = rng.random(rounds) < risk
    # When, given that it does within the horizon: a constant hazard.
    rate = -np.log(1 - risk) / 24
    when = -np.log(1 - rng.random(rounds) * risk) / rate
    hours = {name: getattr(config, name) / HOUR for name in ("restart", "verify", "planned_repair", "unplanned_repair")}
    every = config.checkpoint_every / HOUR
    broke = gpus * hours["unplanned_repair"] + job_gpus * (every / 2 + hours["restart"])
    leave = np.where(fails, broke, 0.0)
    stop = job_gpus * (age_hours + hours["restart"])
    drained = gpus * (hours["verify"] + np.where(fails, hours["planned_repair"], 0))
    met = fails & (when < wait_hours)
    return leave.mean(), (stop + drained).mean(), np.where(met, broke, drained).mean()


def test_the_sums_are_those_of_playing_it_out():
    for risk in (0.1, 0.4, 0.8):
        worth = evaluate_drain(8, [job(ends_at=T0 + 6 * HOUR)], risk, DAY, CONFIG, T0)
        leave, drain, wait = simulate(8, 64, risk, 6, CONFIG, age_hours=1)
        assert net(worth) == pytest.approx(leave - drain, rel=0.02, abs=0.5)
        assert worth.wait == pytest.approx(drain - wait, rel=0.02, abs=0.5)


@pytest.mark.parametrize("tenths", range(1, 60, 7))
def test_a_drain_that_gains_nothing_but_the_rounding_of_its_terms_is_never_worth_it(tenths):
    even = replace(CONFIG, planned_repair=CONFIG.unplanned_repair, restart=timedelta(minutes=tenths * 0.7))
    for gpus in (1, 3, 7):  # stopped or failed, a job of unknown age loses the same
        worth = evaluate_drain(gpus, [JobView("j", 8 * gpus)], 0.3, DAY, even, T0)
        assert worth.choice == "leave"
        assert net(worth) < 0


def test_a_big_job_long_after_its_checkpoint_makes_a_drain_dearer_and_a_fresh_checkpoint_cheaper():
    idle = evaluate_drain(8, [], 0.3, DAY, CONFIG, T0)
    small = evaluate_drain(8, [job(8)], 0.3, DAY, CONFIG, T0)
    old = evaluate_drain(8, [job(512, 2 * HOUR)], 0.3, DAY, CONFIG, T0)
    fresh = evaluate_drain(8, [job(512, 10 * DAY, checkpointed_at=T0)], 0.3, DAY, CONFIG, T0)
    asked = evaluate_drain(8, [job(512, 2 * HOUR, can_checkpoint=True)], 0.3, DAY, CONFIG, T0)
    assert net(old) < net(asked) < net(fresh)
    assert idle.choice == small.choice == "drain"
    assert old.choice == "leave"
    assert old.message.startswith("a drain now is expected to lose ")
    assert "GPU-hours at a risk of 30 %" in old.message


def test_a_job_that_goes_on_with_its_other_nodes_costs_no_restart():
    stiff, elastic = (evaluate_drain(8, [job(512, can_shrink=can)], 0.3, DAY, CONFIG, T0) for can in (False, True))
    spared = 512 * ((CONFIG.restart - CONFIG.resize) / HOUR)
    assert elastic.lost == pytest.approx(stiff.lost - 0.7 * spared)
    assert elastic.saved == pytest.approx(stiff.saved), "it is spared by a failure as well"


def test_a_job_that_ends_soon_is_waited_for_and_one_that_ends_late_is_not():
    soon = evaluate_drain(8, [job(512, 2 * HOUR, ends_at=T0 + HOUR / 2)], 0.6, DAY, CONFIG, T0)
    assert soon.choice == "wait"
    assert soon.wait_until == T0 + HOUR / 2
    assert "waiting for the end of j at 2026-03-01 00:30 UTC is" in soon.message
    late = evaluate_drain(8, [job(64, HOUR, can_checkpoint=True, ends_at=T0 + 20 * HOUR)], 0.6, DAY, CONFIG, T0)
    assert late.choice == "drain"
    assert late.wait < 0
    beyond = evaluate_drain(8, [job(ends_at=T0 + 30 * HOUR)], 0.6, DAY, CONFIG, T0)
    assert beyond.wait is None
    assert evaluate_drain(8, [job()], 0.6, DAY, CONFIG, T0).wait is None
    beside = evaluate_drain(8, [job(512, 2 * HOUR, ends_at=T0 + HOUR / 2), job(8)], 0.6, DAY, CONFIG, T0)
    assert beside.choice == "wait", "for the large one, though the other runs on"


def test_gpus_that_idle_until_a_job_ends_count_against_waiting_for_it():
    free = CostBenefitConfig(checkpoint=timedelta(0), restart=timedelta(0))
    jobs = [job(gpus, can_checkpoint=True, ends_at=T0 + hours * HOUR) for gpus, hours in ((4, 6), (1, 2))]
    assert evaluate_drain(8, jobs[:1], 0.0, DAY, free, T0).wait == pytest.approx(-4 * 6)
    assert evaluate_drain(8, jobs, 0.0, DAY, free, T0).wait == pytest.approx(-3 * 2), "the first end is the better"


def test_work_since_a_checkpoint_counts_for_another_as_far_as_the_node_fails_before_the_next_regular_one():
    due = JobView("j", 4, checkpointed_at=T0 - 1.5 * HOUR, can_checkpoint=True)
    assert hours_of(8, [due], DAY, CONFIG, T0).unsaved == pytest.approx(4 / 8 * 4 * 1.5 * 0.5 / 24)


def test_a_job_of_which_only_its_start_is_known_writes_checkpoints_as_often_as_is_assumed():
    young, old, unknown = (
        evaluate_drain(8, [given], 0.3, DAY, CONFIG, T0)
        for given in (job(age=HOUR / 2), job(age=9 * DAY), JobView("j", 64))
    )
    assert (old.saved, old.lost) == (unknown.saved, unknown.lost)
    assert unknown.lost - young.lost == pytest.approx(0.7 * 64 * 0.5), "it cannot lose more than it has computed"


def test_a_gang_whose_checkpoint_is_due_soon_is_drained_at_it_and_then_not_put_off_again():
    def gang(age, **others):
        return [JobView("g", 512, T0 - 9 * DAY, checkpointed_at=T0 - age, **others)]

    due = evaluate_drain(8, gang(1.5 * HOUR), 0.6, DAY, CONFIG, T0)
    assert (due.choice, due.wait_until) == ("wait", T0 + HOUR / 2)
    assert "waiting for the next checkpoint of g at 2026-03-01 00:30 UTC is" in due.message
    assert evaluate_drain(8, gang(1.5 * HOUR, can_checkpoint=True), 0.6, DAY, CONFIG, T0).wait is None, (
        "it is asked for one"
    )
    assert evaluate_drain(8, gang(3 * HOUR), 0.6, DAY, CONFIG, T0).wait is None, "it is overdue"
    for reported in (0, 4, 5):  # minutes after it was written
        assert evaluate_drain(8, gang(reported * HOUR / 60), 0.3, DAY, CONFIG, T0).choice == "drain"


def test_a_drain_that_can_never_pay_is_left_and_one_that_is_ordered_is_done():
    # A job that computed for days without a checkpoint, and repairs that cost nothing either way.
    free = CostBenefitConfig(planned_repair=HOUR, unplanned_repair=HOUR, checkpoint_every=30 * DAY)
    worth = evaluate_drain(8, [job(512, 20 * DAY)], 0.99, DAY, free, T0)
    assert worth.break_even is None
    assert worth.choice == "leave"
    assert "(no risk makes it pay)" in worth.message
    always = CostBenefitConfig(planned_repair=HOUR, unplanned_repair=HOUR, checkpoint_every=30 * DAY, always=True)
    assert evaluate_drain(8, [job(512, 20 * DAY)], 0.01, DAY, always, T0).choice == "drain"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 16), st.integers(1, 4096), st.floats(0, 1), st.floats(0, 300), st.floats(0.01, 60), st.booleans()
)  # fmt: skip
def test_the_choice_is_the_best_of_the_three(gpus, job_gpus, risk, age, ends, can):
    jobs = [job(job_gpus, age * HOUR, ends_at=T0 + ends * HOUR, can_checkpoint=can)]
    worth = evaluate_drain(gpus, jobs, risk, DAY, CONFIG, T0)
    values = {"leave": 0.0, "drain": net(worth)}
    if worth.wait is not None:
        values["wait"] = net(worth) + worth.wait
    assert values[worth.choice] == pytest.approx(max(values.values()), abs=1e-6)
    assert worth.saved >= 0 or worth.break_even is None
    assert worth.lost >= 0


@given(found=st.floats(0, 1), risk=st.floats(0, 1))
def test_a_drain_is_priced_as_the_rung_of_the_ladder_is(found, risk):
    shares = ProbeConfig(found={"other": found})
    worth = evaluate_drain(8, [job(64)], risk, DAY, CONFIG, T0, found)
    price = prices(8, hours_of(8, [job(64)], DAY, CONFIG, T0), CONFIG, shares)["drain"]
    assert worth.saved == pytest.approx(risk * price.saved)
    assert worth.lost == pytest.approx((1 - risk) * price.unneeded)
    assert worth.break_even == (None if price.break_even is None else pytest.approx(price.break_even))
