"""Probes of idle nodes in a fleet's past, against a plain count."""

from bisect import bisect_right
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from evaluation.value.controller_replay import Controlled
from evaluation.value.gpu_hours import Extras, count_outcome, net_of
from evaluation.value.load import HOUR_MS, Placements, ReplayedFleet
from evaluation.value.marks import NO_ACTION, ReplayMarks
from evaluation.value.probing import (
    Checkpoints,
    ProbeReplay,
    Probes,
    after_passes,
    findable,
    idle_times,
    node_risks,
    replay_checkpoints,
    replay_probes,
)
from evaluation.value.readings import Readings
from foundation.instants import from_ms
from foundation.times import NEVER
from policy.config import PolicyConfig
from policy.decide import decide
from policy.fleet import JobView, Level, NodeView, Score, Signals, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS
from policy.plan import PolicyState
from policy.stages import StagesConfig
from policy.tiers import TierThresholds

H, HOUR = HOUR_MS, timedelta(hours=1)
COSTS = CostBenefitConfig()
NODES = tuple(NodeView(name, "c", "g") for name in "abc")
STAYS = tuple(((f"{node.name}-0", 0, NEVER),) for node in NODES)


def fleet(*failures: tuple[int, float, float], family: str = "memory") -> ReplayedFleet:
    """Three nodes of 8 GPUs over 100 hours."""
    node, at, until = (np.array(column) for column in zip(*failures, strict=True)) if failures else ([], [], [])
    return ReplayedFleet(
        NODES, STAYS, np.full(3, 8), np.array(node, dtype=np.int64), tuple(f"{'abc'[n]}-0" for n in node),
        (np.array(at) * H).astype(np.int64), (np.array(until) * H).astype(np.int64), 0, 100 * H,
        (family,) * len(node),
    )  # fmt: skip


def jobs(*rows: tuple[int, float, float]) -> Placements:
    """Jobs on whole nodes, with a checkpoint each two hours."""
    node, start, end = (np.array(column) for column in zip(*rows, strict=True))
    times = ((hours * H).astype(np.int64) for hours in (start, end))
    return Placements.ordered(np.arange(len(rows)), node, np.full(len(rows), 8), *times, 2 * H)


AT = [k * 6 * H for k in range(17)]
BUSY = jobs((0, 0, 20), (0, 20.1, 60), (1, 0, 100), (2, 0, 50))
ALL = ProbeConfig(max_idle_share=1.0, lowers_for=timedelta(minutes=1))


def settings(probes: ProbeConfig = ALL) -> PolicyConfig:
    return PolicyConfig(rungs=RUNGS, horizon=24 * HOUR, cost_benefit=COSTS, probes=probes)


def probed(
    where: ReplayedFleet, risk: tuple[float, float, float] = (0.2, 0.1, 0.1), closed: ReplayMarks = NO_ACTION,
    found: bool = True, reach: int = 72, config: ProbeConfig = ALL,
) -> Probes:  # fmt: skip
    risks, can_be_found = np.tile(np.array(risk), (len(AT), 1)), np.full(len(where.at), found)
    replay = ProbeReplay(where, BUSY, AT, risks, risks, can_be_found, reach * HOUR, settings(config))
    return replay_probes(replay, closed)


def test_a_node_is_idle_while_it_has_no_job_and_is_not_down():
    gaps = sorted((node, since / H, until / H) for since, until, node in idle_times(fleet((0, 70.0, 75.0)), BUSY))
    assert gaps == [(0, 20, 20.1), (0, 60, 70), (0, 75, 100), (2, 50, 100)]


def test_a_job_preempts_a_probe_that_then_finds_nothing():
    probes = probed(fleet((0, 60.0, 75.0)))
    assert (probes.begin[0], probes.end[0]) == (20 * H, int(20.1 * H))
    assert probes.preempted.tolist()[0]
    assert (probes.failure == -1).all()


def test_a_probe_finds_a_failure_that_begins_within_reach_and_the_node_goes_to_a_planned_repair():
    where = fleet((2, 70.0, 94.0))
    probes = probed(where, risk=(0.1, 0.1, 0.3))
    assert probes.failure.max() == 0
    first = int(np.argmax(probes.failure == 0))
    assert (probes.node[first], probes.begin[first] / H) == (2, 50)
    assert not ((probes.node[first + 1 :] == 2) & (probes.begin[first + 1 :] < 94 * H)).any(), "it is in repair"
    no_action = count_outcome(where, [BUSY], NO_ACTION, COSTS, reach=72 * HOUR)
    acted = count_outcome(where, [BUSY], NO_ACTION, COSTS, reach=72 * HOUR, extras=[Extras(probes, config=ALL)])
    assert acted.repaired.sum() == 8 * 12
    assert (acted.drains, acted.right) == (len(probes.node), 1)
    energy = ((probes.end - probes.begin) * 8).sum() / H * ALL.idle_cost
    delayed = 8 * (probes.end == int(20.1 * H)).sum() / 60
    assert net_of(no_action, acted).sum() == pytest.approx(96 - energy - delayed)


@pytest.mark.parametrize(("reach", "findable_one", "found"), [(72, True, True), (24, True, False), (72, False, False)])
def test_a_failure_is_found_if_a_diagnostic_can_and_it_begins_within_reach(reach, findable_one, found):
    once = replace(ALL, every=timedelta(days=9), base_every=timedelta(days=9))
    where = fleet((2, 80.0, 94.0))  # 30 hours after the only probe
    probes = probed(where, (0.1, 0.1, 0.3), found=findable_one, reach=reach, config=once)
    assert (probes.failure == 0).any() == found


def test_nodes_out_of_service_are_not_probed_and_a_running_probe_ends():
    begin = 50 * H + H // 10
    closed = ReplayMarks.of([[2, begin, 80 * H, NEVER, NEVER]])
    probes = probed(fleet((2, 70.0, 75.0)), risk=(0.1, 0.1, 0.3), closed=closed)
    of_it = probes.node == 2
    assert (probes.begin[of_it][0], probes.end[of_it][0], probes.failure[of_it][0]) == (50 * H, begin, -1)
    assert probes.begin[of_it][1] == 80 * H


def test_a_passed_probe_lowers_the_risk_that_taints_and_checkpoints_go_by():
    share = 0.95
    config = replace(ALL, found={"other": share}, lowers_for=timedelta(hours=24))
    where, scores = fleet(), Readings(
        pd.DataFrame({"decision_time": pd.to_datetime(np.repeat(AT, 3), unit="ms", utc=True),
                      "unit": ["a-0", "b-0", "c-0"] * len(AT), "risk": [0.01, 0.01, 0.3] * len(AT), "fold": 0}),
        pd.DataFrame({"fold": [0], "refit_at": [pd.Timestamp(0, tz="UTC")]}), delay=timedelta(0), lifetime=12 * HOUR,
    )  # fmt: skip
    risks, passed = node_risks(where, scores), node_risks(where, scores, share)
    policy = where.stage(replace(settings(config), thresholds=TierThresholds(0.1, 0.2, 0.9)), "soft")
    probing = ProbeReplay(where, BUSY, AT, risks, passed, np.zeros(0, dtype=bool), 72 * HOUR, policy)
    without, marks = (
        Controlled(where, scores, [], BUSY, policy, 72 * HOUR, "none", Level.AVOID, None, replay).marks()
        for replay in (None, probing)
    )
    assert (without.node.tolist(), without.until.tolist()) == ([2], [where.end])
    passes = probing.probes.end[int(np.argmax(probing.probes.node == 2))]
    fell = AT[-(-passes // (6 * H)) + policy.hysteresis.fall_after - 1]
    assert (marks.node[0], marks.until[0]) == (2, fell), "the decisions after the pass see a low risk"
    low = after_passes(AT, risks, passed, probing.probes, config)[:, 2] < 0.1
    assert low.tolist()[:12] == [at >= passes for at in AT[:12]]


def test_a_larger_share_finds_what_a_smaller_one_does_and_more():
    where = fleet(*((0, float(i), i + 0.5) for i in range(90)))
    quarter, half, whole = (findable(where, {"memory": share}, 1) for share in (0.25, 0.5, 1.0))
    assert not (quarter & ~half).any()
    assert whole.all()
    assert 10 < quarter.sum() < half.sum() < 65


def test_a_checkpoint_is_asked_for_where_work_times_risk_exceeds_its_cost_and_spares_that_work():
    long = replace(jobs((0, 0, 100)), every=np.array([48 * H]))
    where, risks = fleet((0, 13.0, 20.0)), np.tile(np.array([0.9, 0, 0]), (len(AT), 1))
    rare = PolicyConfig(rungs=RUNGS, horizon=24 * HOUR, cost_benefit=replace(COSTS, checkpoint_every=48 * HOUR))
    asked = replay_checkpoints(where, long, AT, risks, rare)
    assert (asked.at / H).tolist() == [6, 30, 54, 78], "again after the horizon, for the risk has not doubled"
    no_action, acted = (
        count_outcome(where, [long], NO_ACTION, COSTS, reach=72 * HOUR, extras=[Extras(checkpoints=checkpoints)])
        for checkpoints in (Checkpoints(asked.job[:0], asked.at[:0], asked.hours[:0]), asked)
    )
    assert no_action.hit.sum() - acted.hit.sum() == pytest.approx(8 * 6), "7 hours are lost, not 13"
    assert acted.spent.sum() == pytest.approx(asked.hours.sum())
    assert not len(replay_checkpoints(where, replace(long, on_request=False), AT, risks, rare).at)


def test_a_gang_is_asked_for_one_checkpoint_by_the_risks_of_all_its_nodes():
    both = replace(jobs((0, 0, 100), (1, 0, 100)), every=np.full(2, 48 * H), job=np.zeros(2, dtype=np.int64))
    both, rare = replace(both, size=np.full(2, 16.0)), replace(COSTS, checkpoint_every=48 * HOUR)
    policy = PolicyConfig(rungs=RUNGS, horizon=24 * HOUR, cost_benefit=rare)
    one, two = (
        replay_checkpoints(fleet(), both, AT, np.tile(np.array(risk), (len(AT), 1)), policy)
        for risk in ((0.013, 0, 0), (0.013, 0.013, 0))
    )
    assert (one.at[0], two.at[0]) == (12 * H, 6 * H)
    assert two.hours[0] == pytest.approx(16 / 12)


@settings_of_hypothesis(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.2)), min_size=17, max_size=17),
    st.sampled_from([None, 50.0, 70.0]), st.integers(1, 2),
)  # fmt: skip
def test_the_replay_probes_what_the_controller_would_request(drawn, fails, most):
    """The oracle is a controller that goes round each minute in which anything changes."""
    probes = ProbeConfig(max_idle_share=1.0, max_concurrent=most)
    where, risks = fleet(*([] if fails is None else [(2, fails, fails + 20)])), np.array(drawn)
    share = probes.mean_found
    policy = replace(settings(probes), stages=StagesConfig(pinned={"c/g": "soft"}))
    passed = risks * (1 - share) / (1 - risks * share)
    found = np.ones(len(where.at), dtype=bool)
    replayed = replay_probes(ProbeReplay(where, BUSY, AT, risks, passed, found, 72 * HOUR, policy), NO_ACTION)

    state, expected, running, passes = PolicyState(), [], {}, {}
    shut: dict[str, int] = {}
    minute = H // 60
    busy, down = (
        [("abc"[node], since, until) for node, since, until in zip(*(one.tolist() for one in columns), strict=True)]
        for columns in ((BUSY.node, BUSY.start, BUSY.end), (where.failed, where.at, where.until))
    )
    turns = {*AT, *(end for *_, end in busy), *(until for *_, until in down)}
    while turns:
        now = min(turns)
        turns -= {now}
        if now >= where.end:
            continue
        running = {name: ends for name, ends in running.items() if ends > now}
        row, newest = risks[bisect_right(AT, now) - 1], from_ms(AT[bisect_right(AT, now) - 1])
        works = {name for name, since, until in busy if since <= now < until}
        lost = {name for name, since, until in down if since <= now < until or shut.get(name, 0) > now}
        fleet_now = [
            NodeView(
                name, "c", "g", down=name in lost, jobs=(JobView("j", 8),) if name in works | lost else (),
                units=(UnitView(f"{name}-0", Score(row[at], newest, newest + 24 * HOUR), probed_at=passes.get(name)),),
            )
            for at, name in enumerate("abc")
        ]  # fmt: skip
        signals = Signals(read_at=from_ms(now), model_fitted_at=from_ms(now), probes=tuple(running))
        plan = decide(fleet_now, state, signals, policy, from_ms(now))
        state = plan.state
        for request in plan.requests:
            closes = min(
                (since for name, since, _ in (*busy, *down) if name == request.node and since > now), default=where.end
            )
            ends = min(now + H // 4, closes)
            running[request.node] = ends
            turns.add(-(-ends // minute) * minute)
            expected.append(("abc".index(request.node), now))
            if ends == now + H // 4:
                sick = [until for name, at, until in down if name == request.node and ends < at <= ends + 72 * H]
                if sick:
                    shut[request.node] = sick[0]
                else:
                    passes[request.node] = from_ms(ends)
    assert sorted(zip(replayed.node.tolist(), replayed.begin.tolist(), strict=True)) == sorted(expected)
