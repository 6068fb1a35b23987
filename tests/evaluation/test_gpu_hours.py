"""Jobs packed on a fleet, and drains and taints replayed against its failures: what a hand would count."""

from dataclasses import replace as changed
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.value.gpu_hours import _free, count_outcome, mean_prices, net_interval, net_of
from evaluation.value.load import (
    _QUANTILES,
    _SHAPE,
    HOUR_MS,
    Placements,
    ReplayedFleet,
    first_fit,
    generated_load,
    job_views,
    jobs_of_table,
)
from evaluation.value.marks import NO_ACTION, ReplayMarks
from foundation.instants import from_ms
from foundation.times import NEVER
from policy.fleet import NodeView
from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, Price, hours_of
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import Rung, prices

PHILLY = Path(__file__).resolve().parents[3] / "shared" / "data" / "philly-jobs" / "philly.csv"
H = HOUR_MS
HOUR = timedelta(hours=1)
COSTS = CostBenefitConfig(checkpoint_every=HOUR)
PERFECT = ProbeConfig(found={"other": 1.0})
GANGS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=30)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(max_examples=40)
@given(gpus=st.lists(st.integers(1, 8), min_size=1, max_size=6), gangs=GANGS)
def test_no_gpu_holds_two_jobs_and_a_gang_starts_whole(gpus, gangs):
    capacity = ints(*gpus)
    size = np.minimum(ints(*(wanted for wanted, _, _ in gangs)), capacity.sum())
    arrival = np.sort(ints(*(at for _, at, _ in gangs)))
    packed = first_fit(capacity, size, arrival, ints(*(duration for _, _, duration in gangs)), 10**6, 0)
    for at in np.unique(packed.start):
        runs = (packed.start <= at) & (at < packed.end)
        assert (np.bincount(packed.node[runs], packed.gpus[runs], len(capacity)) <= capacity).all()
    assert set(packed.job) == set(range(len(size)))
    for job, wanted in enumerate(size):
        mine = packed.job == job
        assert len(set(packed.start[mine])) == 1
        assert packed.start[mine][0] >= arrival[job]
        assert packed.gpus[mine].sum() >= wanted


def test_a_generated_load_fills_a_fleet_nearly_and_repeats_by_its_seed():
    gpus = np.full(16, 8)
    one, again = (generated_load(gpus, 0, 30 * 24 * H, 7, HOUR) for _ in range(2))
    held = (one.gpus * (np.minimum(one.end, 30 * 24 * H) - one.start)).sum()
    assert 0.5 < held / (128 * 30 * 24 * H) <= 1
    assert (one.start == again.start).all()
    most = [generated_load(np.full(128, 8), 0, 30 * 24 * H, 7, HOUR, largest=size).size.max() for size in (None, 512)]
    assert most == [128, 512]


@given(
    size=st.sampled_from([8, 16, 24, 64]), seed=st.integers(0, 99), nodes=st.integers(8, 20), at=st.integers(0, 1919)
)
@settings(max_examples=25, deadline=None)
def test_gangs_of_a_given_size_take_whole_nodes_and_a_failure_hits_each_on_its_node_once(size, seed, nodes, at):
    gpus, end = np.full(nodes, 8), 20 * 24 * H
    load = generated_load(gpus, 0, end, seed, HOUR, size)
    assert (load.size == size).all()
    duration = np.minimum(load.end, end) - load.start
    gangs = pd.DataFrame(
        {"job": load.job, "gpus": load.gpus, "hours": load.gpus * duration / H, "whole": size * duration / H}
    )
    by_job = gangs.groupby("job").agg({"gpus": "sum", "hours": "sum", "whole": "first"})
    assert (by_job["gpus"] == size).all()
    assert by_job["hours"].to_numpy() == pytest.approx(by_job["whole"].to_numpy()), "GPU-hours are those of the gangs"
    assert not pd.DataFrame({"job": load.job, "node": load.node}).duplicated().any()
    node, at = seed % nodes, at * H // 4
    runs = [entry for entry in load.running(at, np.full(len(load.job), NEVER)) if load.node[entry] == node]
    struck = counted(NO_ACTION, where=fleet((node, at / H), nodes=nodes), load=load)
    assert struck.hits == pytest.approx(len(runs))
    assert struck.hit.sum() == pytest.approx(sum(size * (load.unsaved(entry, at) / H + 0.25) for entry in runs))


@pytest.mark.skipif(not PHILLY.is_file(), reason="the trace of Microsoft's Philly cluster is not here")
def test_the_shape_of_generated_jobs_is_that_of_the_trace():
    trace = pd.read_csv(PHILLY)
    power = 2 ** np.ceil(np.log2(trace["num_gpus"])).astype(int)
    power = power.where(power <= 32, 128)
    for gpus, share, quantiles in _SHAPE:
        hours = trace["duration"][(power == gpus) | ((power >= 32) & (gpus >= 32))] / 3600
        assert share == pytest.approx((power == gpus).mean(), rel=0.02)
        assert quantiles == pytest.approx(tuple(hours.quantile(_QUANTILES)), rel=0.06, abs=1e-4)
    gang = trace["num_gpus"] >= 8
    assert trace["gpu_time"][gang].sum() / trace["gpu_time"].sum() == pytest.approx(0.62, abs=0.005)


def test_a_jobs_table_is_read_with_gangs_over_nodes_single_gpus_whole_nodes_and_its_own_checkpoints():
    instant = [pd.Timestamp(hours, unit="h", tz="UTC").as_unit("ms") for hours in (1, 1, 2, 3)]
    table = pd.DataFrame(
        {
            "job": ["gang", "gang", "one", "failed"], "node": ["a", "b", "a", "elsewhere"],
            "gpu": [None, None, "GPU-1", None], "gpus": pd.array([8, 8, None, 8], dtype="Int32"),
            "started_at": instant, "ended_at": [*instant[2:], pd.NaT, pd.NaT],
            "checkpointed_at": [instant[1], pd.NaT, pd.NaT, pd.NaT], "outcome": ["completed", "node_fail", None, None],
            "checkpoint_every_s": pd.array([1800, None, 0, None], dtype="Int32"),
            "min_gpus": pd.array([8, 8, None, None], dtype="Int32"),
        }
    )  # fmt: skip
    read = jobs_of_table(table, pd.Index(["a", "b"]), ints(8, 8), 9 * H, HOUR)
    assert read.size.tolist() == [16, 1, 16]
    assert read.end.tolist() == [2 * H, 9 * H, 4 * H], "a failure may be logged an hour after it ended the job"
    assert read.every.tolist() == [H // 2, 0, H], "the option fills in for the jobs that do not tell"
    assert read.saved.tolist() == [H, -1, -1]
    assert read.shrinks.tolist() == [True, False, True], "it goes on with its other node"
    older = jobs_of_table(
        table.drop(columns=["checkpoint_every_s", "min_gpus"]), pd.Index(["a", "b"]), ints(8, 8), 9 * H, HOUR
    )
    assert older.every.tolist() == [H, H, H]
    assert not older.shrinks.any()


@pytest.mark.parametrize(
    ("every", "saved", "lost"),
    [(1.0, -1, 0.5), (3.0, -1, 1.5), (0, -1, 0), (1.0, 2.0, 2.5), (1.0, 4.75, 0.5)],
    ids=["its interval", "another", "it loses none", "its last checkpoint", "no checkpoint is after the failure"],
)
def test_what_a_job_loses_goes_by_its_own_checkpoints(every, saved, lost):
    job = Placements.ordered(
        ints(0), ints(0), ints(8), ints(0), ints(round(4.5 * H)), round(every * H), round(saved * H)
    )
    assert job.unsaved(ints(0), round(4.5 * H)).tolist() == [lost * H]


def fleet(*failures: tuple[int, float], nodes: int = 4) -> ReplayedFleet:
    at = np.array([hours * H for _, hours in failures], dtype=np.int64)
    node = ints(*(node for node, _ in failures))
    views = tuple(NodeView(f"n{place}", "c", "g") for place in range(nodes))
    units = ("gpu",) * len(failures)
    return ReplayedFleet(views, ((),) * nodes, np.full(nodes, 8), node, units, at, at + 10 * H, 0, 200 * H)


GANG = Placements.ordered(ints(0, 0), ints(0, 1), ints(8, 8), ints(0, 0), ints(200 * H, 200 * H), H)
"""One job on the whole of two nodes of 8 GPUs."""
FAILS = fleet((0, 40.5))


def mark(node: int, at: float, until: float, *, drained: bool = True, found: bool = False) -> ReplayMarks:
    begin = round(at * H)
    seen = begin + round(2.1 * H) if found else NEVER  # a checkpoint, the eviction, and two hours of diagnostic
    return ReplayMarks.of([[node, begin, round(until * H), begin if drained else NEVER, seen]])


DRAINED = mark(0, 20, 92)


def counted(marks, where=FAILS, load=GANG):
    return count_outcome(where, [load], marks, COSTS, reach=72 * HOUR)


def test_a_failure_costs_the_whole_gang_its_work_since_the_checkpoint_and_a_restart():
    assert counted(NO_ACTION).hit.sum() == pytest.approx(16 * (0.5 + 0.25))


def test_a_drain_before_it_spares_the_gang_and_costs_the_move_and_the_idle_node_until_it_fails_and_from_its_repair():
    outcome = counted(DRAINED)
    assert (outcome.drains, outcome.right, outcome.caught, outcome.hit.sum(), outcome.moved) == (1, 1, 1, 0, 1)
    assert outcome.spent.sum() == pytest.approx(16 * (5 + 15) / 60)
    assert outcome.idle.sum() == pytest.approx(8 * (20.5 - 0.1 + 92 - 50.5))


@pytest.mark.parametrize(
    ("size", "high", "nodes", "stays"),
    [(16, (), 4, 0), (16, (), 2, 1), (8, (), 4, 1), (8, (25, 35), 4, 0), (8, (31, 35), 4, 1)],
    ids=["a gang avoids", "every other node is full", "a small job may use it", "but not in tier high", "before that"],
)
def test_new_jobs_avoid_a_node_by_the_rule_of_the_extender_while_there_is_room(size, high, nodes, stays):
    load = Placements.ordered(ints(0, 1), ints(0, 1), ints(8, 8), ints(30 * H, 0), ints(90 * H, 200 * H), H)
    marks = changed(mark(0, 20, 92, drained=False), high=ints(0, *(hours * H for hours in high or (0, 0)))[None])
    load = changed(load, size=np.array([size, 8.0]))
    outcome = count_outcome(fleet((0, 40.5), nodes=nodes), [load], marks, COSTS, reach=72 * HOUR, soft=True)
    assert outcome.hits == stays
    assert outcome.hit.sum() == pytest.approx(stays * size * (0.5 + 0.25))
    assert outcome.idle.sum() == outcome.spent.sum() == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 20), st.integers(1, 8)), max_size=12))
def test_free_gpus_are_those_that_no_job_mark_or_repair_holds(entries):
    entries = entries or [(0, 0, 1, 1)]
    node, start, duration, gpus = (ints(*column) for column in zip(*entries, strict=True))
    jobs = Placements.ordered(np.arange(len(node)), node, gpus, start * H, (start + duration) * H, H)
    marks, down = ReplayMarks.of([[1, 5 * H, 12 * H, NEVER, NEVER], [2, 7 * H, 9 * H, NEVER, NEVER]]), fleet((3, 6))
    for hour in range(30):
        held = gpus[(start < hour) & (hour <= start + duration)].sum() + 8 * ((5 < hour <= 12) + (7 < hour <= 9))
        assert _free(down, jobs, marks)(ints(hour * H)).tolist() == [32 - held - 8 * (6 < hour <= 16)]


@pytest.mark.parametrize(("fewest", "again"), [(8, 2), (9, 15)], ids=["it goes on with 8", "8 are too few"])
def test_an_elastic_gang_waits_for_no_restart_where_enough_of_it_is_left(fewest, again):
    gang = Placements.ordered(ints(0, 0), ints(0, 1), ints(8, 8), ints(0, 0), ints(200 * H, 200 * H), H, fewest=fewest)
    assert counted(NO_ACTION, load=gang).hit.sum() == pytest.approx(16 * (0.5 + again / 60))
    assert counted(DRAINED, load=gang).spent.sum() == pytest.approx(16 * (5 + again) / 60)
    elastic, rigid = (
        mean_prices(FAILS, [load], 24 * HOUR, COSTS, PERFECT)["drain"].break_even for load in (gang, GANG)
    )
    assert (elastic < rigid) == (again == 2)


def test_a_node_that_is_back_before_it_fails_has_its_job_again():
    back = counted(mark(0, 20, 23))
    assert (back.caught, back.hits, back.moved) == (0, 1, 1)
    assert back.hit.sum() == counted(NO_ACTION).hit.sum()


def test_a_gang_that_writes_no_checkpoint_on_request_loses_its_work_since_the_last_one_when_it_is_moved():
    moved = counted(mark(0, 20.75, 92), load=changed(GANG, on_request=False))
    assert (moved.hits, moved.spent.sum()) == (0, pytest.approx(16 * (0.75 + 0.25)))


def test_a_drain_begun_too_late_for_the_checkpoint_spares_nothing():
    late = counted(mark(0, 40.45, 92))
    assert (late.caught, late.hits) == (0, 1)


def test_what_a_diagnostic_finds_goes_into_a_planned_repair():
    outcome = counted(mark(0, 20, 92, found=True))
    assert outcome.idle.sum() == pytest.approx(8 * 2), "while it is tested"
    assert outcome.repaired.sum() == 8 * 12


def test_a_taint_leaves_running_jobs_to_the_failure_and_keeps_later_ones_away():
    taint = mark(0, 20, 40.6, drained=False)
    running = counted(taint)
    assert (running.hit.sum(), running.idle.sum(), running.spent.sum()) == (pytest.approx(12), 0, 0)
    later = counted(taint, load=Placements.ordered(ints(0), ints(0), ints(8), ints(30 * H), ints(90 * H), H))
    assert (later.hit.sum(), later.idle.sum()) == (0, pytest.approx(8 * 20.5))


def test_on_a_node_in_repair_no_job_is_hit_and_none_is_moved():
    again = fleet((0, 40.5), (0, 45))
    assert counted(NO_ACTION, where=again).hits == 1
    assert (counted(mark(0, 41, 49)).moved, counted(mark(0, 41, 49)).spent.sum()) == (0, 0)


def test_a_gpus_failure_hits_a_job_by_its_share_of_the_node():
    half = Placements.ordered(ints(0), ints(0), ints(4), ints(0), ints(90 * H), H)
    assert counted(NO_ACTION, load=half).hit.sum() == pytest.approx(0.5 * 4 * 0.75)


def test_a_drain_before_no_failure_is_wrong_and_one_whose_reach_is_not_over_unknown():
    marks = ReplayMarks.of([[0, 20 * H, 92 * H, 20 * H, 0], [1, 180 * H, 200 * H, 180 * H, 0]])
    outcome = counted(marks, where=fleet())
    assert (outcome.drains, outcome.known, outcome.right) == (2, 1, 0)


def test_a_mark_on_a_node_that_has_failed_already_foretells_nothing():
    outcome = counted(mark(0, 41, 92))
    assert (outcome.drains, outcome.known, outcome.right, outcome.hits) == (1, 0, 0, 1)


def test_break_even_is_the_risk_at_which_a_drain_of_the_mean_node_pays():
    even = mean_prices(FAILS, [GANG], 24 * HOUR, COSTS, PERFECT)["drain"].break_even
    stop, fail = 16 / 2 / 3, 16 / 2 * 0.75  # two of four nodes are busy
    assert even == pytest.approx((stop + 16) / (8 * 12 + fail))


def priced(load: Placements, at: float, rung: Rung = "swap") -> tuple[JobHours, Price]:
    running = load.running(round(at * H), load.end)
    views = [
        changed(view, ends_at=from_ms(int(load.end[entry])))
        for entry, view in zip(running, job_views(load, running, round(at * H)), strict=True)
        if load.node[entry] == 0
    ]
    hours = hours_of(8, views, 24 * HOUR, COSTS, from_ms(round(at * H)))
    return hours, prices(8, hours, COSTS, PERFECT)[rung]


@pytest.mark.parametrize("entries", [((2, 25), (4, 40)), ((8, 25),), ((4, 30), (4, 30)), ((1, 21), (1, 22), (2, 43))])
def test_the_idle_time_in_the_price_of_a_swap_is_what_the_replay_counts(entries):
    count = np.arange(len(entries))
    gpus, ends = (ints(*column) for column in zip(*entries, strict=True))
    load = Placements.ordered(count, 0 * count, gpus, 0 * count, ends * H, H)
    idle = sum(8 - sum(size for size, end in entries if hour < end) for hour in range(20, max(ends)))
    replayed = counted(mark(0, 20, max(ends), drained=False), where=fleet(), load=load)
    assert (priced(load, 20)[0].idle, replayed.idle.sum()) == (pytest.approx(idle), pytest.approx(idle))


SHORT = Placements.ordered(ints(0, 1), ints(0, 0), ints(2, 4), ints(0, 0), ints(25 * H, 30 * H), H)


@pytest.mark.parametrize(
    ("rung", "load", "marks", "where", "needed"),
    [("drain", GANG, mark(0, 20, 92, found=True), FAILS, True),
     ("drain", GANG, mark(0, 20, 22.1), fleet(), False),
     ("drain", changed(GANG, on_request=False), mark(0, 20.75, 22.75 + 1 / 60), fleet(), False),
     ("swap", SHORT, changed(mark(0, 20, 32), drained=ints(30 * H)), fleet(), False)],
    ids=["a drain that finds a fault", "an unneeded one", "without checkpoints on request", "an unneeded swap"],
)  # fmt: skip
def test_the_replay_counts_for_an_action_what_its_price_says(rung, load, marks, where, needed):
    net = net_of(counted(NO_ACTION, where, load), counted(marks, where, load)).sum()
    price = priced(load, marks.at[0] / H, rung)[1]
    assert net == pytest.approx(price.saved if needed else -price.unneeded)


def test_a_gpu_failure_is_priced_by_the_share_of_the_node_that_a_job_has():
    half = Placements.ordered(ints(0), ints(0), ints(4), ints(0), ints(90 * H), H)
    assert priced(half, 20)[0].fail == pytest.approx(counted(NO_ACTION, load=half).hit.sum())


def test_the_same_fleet_under_another_job_seed_saves_what_the_interval_allows():
    rng = np.random.default_rng(101)
    failures = sorted((int(rng.integers(32)), float(hours)) for hours in rng.uniform(100, 1000, 60))
    large = fleet(*sorted(failures, key=lambda failure: failure[1]), nodes=32)
    large = changed(large, end=1100 * H)
    spans = [
        [node, at - 10 * H, at + 10 * H, at - 10 * H, at - 8 * H]
        for node, at in zip(large.failed, large.at, strict=True)
    ]
    marks = ReplayMarks.of(spans[::2])
    intervals = []
    for seed in (1, 2):
        loads = [generated_load(large.gpus, 0, 1100 * H, 10 * seed + number, HOUR) for number in range(5)]
        costs = changed(COSTS, planned_repair=COSTS.unplanned_repair)  # of jobs alone
        no_action, outcome = (count_outcome(large, loads, act, costs, reach=72 * HOUR) for act in (NO_ACTION, marks))
        intervals.append(net_interval(net_of(no_action, outcome), replicates=400, seed=1))
    (one, first), (two, second) = intervals
    assert first.low <= two <= first.high
    assert second.low <= one <= second.high
