"""The online state's rows are the batch's, whatever the order of arrival."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from features.live import live_rows
from features.matrix_meta import ROW_COLUMNS
from serving.config import ScoringSettings
from serving.fleet_rows import fleet_rows
from serving.online.state import OnlineState
from tests.features.small_fleet import CHANNELS, HOUR, T0
from tests.serving.online.online_world import (
    HOURS,
    MINUTE,
    Clock,
    as_table,
    equal_to_live,
    make_world,
    push_by_arrival,
)

# Shrinking would take minutes and explain no more than the seed.
RANDOM = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
DELAY = 600_000  # ms, the default of features.delay


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("online"))


def since(frame: pd.DataFrame) -> np.ndarray:
    return ((frame["timestamp"] - T0) / timedelta(milliseconds=1)).to_numpy(np.int64)


@pytest.mark.parametrize("hour", [3, 6, 9, 12])
def test_rows_are_those_of_batch_scoring_in_every_field(world, hour):
    t = T0 + hour * HOUR
    clock = Clock()
    state = world.state(clock)
    push_by_arrival(state, clock, as_table(world.samples), since(world.samples), until=t, every=10 * MINUTE)
    online, batch = state.rows(t), fleet_rows(world.dataset, world.config, ScoringSettings(), t)
    pd.testing.assert_frame_equal(online.keys, batch.keys)
    np.testing.assert_allclose(online.values, batch.values, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(online.fresh.sample_age_s, batch.fresh.sample_age_s)
    np.testing.assert_array_equal(online.fresh.completeness, batch.fresh.completeness)
    assert online.why == batch.why
    assert online.slots == batch.slots
    assert online.newest_ms == batch.newest_ms
    pd.testing.assert_frame_equal(online.idle.reset_index(drop=True), batch.idle.reset_index(drop=True))


@RANDOM
@given(seed=st.integers(0, 2**32 - 1), tidy=st.booleans())
def test_no_order_of_arrival_duplicate_gap_or_restart_changes_a_row(world, tmp_path_factory, seed, tidy):
    rng = np.random.default_rng(seed)
    samples = world.samples[rng.random(len(world.samples)) > 0.1].reset_index(drop=True)
    # Clocks of exporters stand anywhere within the step and jitter.
    phase = samples["gpu"].map({name: int(rng.integers(0, 500_000)) for name in samples["gpu"].unique()})
    moved = phase.to_numpy() + rng.integers(0, 2_000, len(samples))
    samples["timestamp"] = (samples["timestamp"] + pd.to_timedelta(moved, unit="ms")).astype("datetime64[ms, UTC]")
    twice = samples.iloc[rng.integers(0, len(samples), 60)]
    every = pd.concat([samples, twice], ignore_index=True)
    arrival = since(every) + rng.integers(0, DELAY, len(every))
    hopeless = rng.random(len(every)) < 0.02  # later than the delay: they count from when they are there
    arrival[hopeless] += rng.integers(DELAY, 4 * DELAY, int(hopeless.sum()))
    table = as_table(every)
    clock = Clock()
    state = world.state(clock)
    folder = tmp_path_factory.mktemp("restart")
    for hour in (4, 11):
        t = T0 + hour * HOUR
        push_by_arrival(state, clock, table, arrival, until=t, every=timedelta(minutes=float(rng.uniform(3, 25))))
        state.snapshot(folder / "state")
        state = OnlineState.restore(folder / "state", clock=clock, config=world.config)
        if tidy:
            state.tidy()
        came = arrival < hour * 3_600_000
        equal_to_live(state.rows(t), every[came].drop_duplicates(["timestamp", "gpu", "node"]), world, t)
    assert state.totals.rows == int(came.sum())
    assert state.totals.late >= int((hopeless & came).sum())


@settings(RANDOM, max_examples=2)
@given(seed=st.integers(0, 2**32 - 1))
def test_raw_samples_come_to_the_step_as_an_import_brings_them(raw_world, tmp_path_factory, seed):
    assert "gpu_temp_c_max" in raw_world.config.channels
    rng = np.random.default_rng(seed)
    every = 3 * 60_000  # the clock moves by so much, so a row may come so much later than it arrives here
    arrival = since(raw_world.samples) + rng.integers(0, DELAY - every + 1, len(raw_world.samples))
    clock = Clock()
    state = raw_world.state(clock)
    stored = pa.concat_tables([raw_world.dataset.read_bucket(each) for each in raw_world.dataset.buckets()])
    for hour in (3, 8):
        t = T0 + hour * HOUR
        push_by_arrival(state, clock, as_table(raw_world.samples), arrival, until=t, every=3 * MINUTE)
        folder = tmp_path_factory.mktemp("raw-restart") / "state"
        state.snapshot(folder)
        state = OnlineState.restore(folder, clock=clock)
        equal_to_live(state.rows(t), stored, raw_world, t)
    assert state.totals.closed == 0


def test_raw_samples_read_again_at_once_warm_a_cold_state(raw_world):
    t = T0 + 6 * HOUR
    clock = Clock(t)
    state = raw_world.state(clock)
    recent = raw_world.samples[raw_world.samples["timestamp"] <= t]
    state.push(as_table(recent.sample(frac=1, random_state=1)), replayed=True)
    stored = pa.concat_tables([raw_world.dataset.read_bucket(each) for each in raw_world.dataset.buckets()])
    equal_to_live(state.rows(t), stored, raw_world, t)


def test_a_late_sample_between_two_whose_rise_is_known_adds_no_rise(raw_world):
    clock = Clock()
    state = raw_world.state(clock)
    name = "ecc_sbe_volatile_total"
    made = {"node": ["node1"], "gpu": ["gpu04"]}

    def push(minute, value):
        at = pa.array([T0 + minute * MINUTE], pa.timestamp("ms", tz="UTC"))
        return state.push(pa.table({"timestamp": at, **made, name: [value]}))

    for minute, value in ((10, 100.0), (20, 104.0), (40, 120.0), (50, 120.0)):
        clock.now = T0 + minute * MINUTE
        push(minute, value)
    clock.now = T0 + 70 * MINUTE
    column = [each.name for each in raw_world.config.columns].index(f"telemetry__{name}__rise__2h")

    def rise():
        rows = state.rows(clock.now)
        return rows.values[rows.keys.index[rows.keys["gpu"] == "gpu04"][0], column]

    assert rise() == 20.0
    assert push(30, 110.0).late == 1
    assert rise() == 20.0
    push(40, 120.0)  # said again
    assert rise() == 20.0


def test_a_time_off_the_grid_and_single_nodes_have_the_rows_of_the_fleet(world):
    clock = Clock()
    state = world.state(clock)
    t = T0 + 8 * HOUR + 20 * MINUTE
    push_by_arrival(state, clock, as_table(world.samples), since(world.samples), until=t, every=10 * MINUTE)
    whole = state.rows(t)
    equal_to_live(whole, world.samples[world.samples["timestamp"] < t], world, t)
    one = state.rows(t, nodes={"node1"}, reference=state.reference(t))
    mine = (whole.keys["node"] == "node1").to_numpy()
    pd.testing.assert_frame_equal(one.keys, whole.keys[mine].reset_index(drop=True))
    np.testing.assert_array_equal(one.values, whole.values[mine])


def test_a_later_row_of_the_same_instant_counts_and_parts_of_a_sample_come_together(world):
    t = T0 + 6 * HOUR
    samples = world.samples[world.samples["timestamp"] <= t - 600_000 * timedelta(milliseconds=1)].copy()
    wrong = samples.assign(gpu_temp_c=samples["gpu_temp_c"] + 1)
    for whole_first in (False, True):
        clock = Clock(t)
        state = world.state(clock)
        if whole_first:
            state.push(as_table(wrong), replayed=True)
            state.push(as_table(samples), replayed=True)
            # what the second row does not report is not taken from a row that it contradicts, as in an import
        else:
            for name in CHANNELS:
                state.push(as_table(samples[["timestamp", "node", "gpu", name]]), replayed=True)
        equal_to_live(state.rows(t), samples, world, t)


def test_samples_of_a_dataset_warm_a_cold_state(world):
    t = T0 + 9 * HOUR
    state = world.state(Clock(t))
    for bucket in world.dataset.buckets():
        absorbed = state.push(world.dataset.read_bucket(bucket), replayed=True)
        assert absorbed.late == 0
    equal_to_live(state.rows(t), world.samples, world, t)


def test_a_gpu_that_moves_is_followed_once_the_inventory_says_so(world):
    clock = Clock()
    before = world.inventory[world.inventory["installed_at"] <= T0]
    state = OnlineState.of(world.config, before, world.events, clock)
    push_by_arrival(state, clock, as_table(world.samples), since(world.samples), until=T0 + 7 * HOUR, every=HOUR)
    state.push_inventory(world.inventory)
    t = T0 + 12 * HOUR
    push_by_arrival(state, clock, as_table(world.samples), since(world.samples), until=t, every=HOUR)
    rows = state.rows(t)
    at = rows.keys.index[rows.keys["gpu"] == "gpu03"]
    assert rows.keys.loc[at, "node"].tolist() == ["node1"]
    equal_to_live(rows, world.samples, world, t)


def test_hours_without_any_sample_are_gaps_like_any_other(world):
    clock = Clock()
    state = world.state(clock)
    t = T0 + HOURS * HOUR
    quiet = (world.samples["timestamp"] > T0 + 5 * HOUR) & (world.samples["timestamp"] < T0 + 9 * HOUR)
    samples = world.samples[~quiet].reset_index(drop=True)
    push_by_arrival(state, clock, as_table(samples), since(samples), until=t, every=30 * MINUTE)
    equal_to_live(state.rows(t), samples, world, t)


def test_the_rows_are_made_by_the_kernels_of_training_bit_for_bit(world):
    clock = Clock()
    state = world.state(clock)
    t = T0 + 9 * HOUR
    push_by_arrival(state, clock, as_table(world.samples), since(world.samples), until=t, every=10 * MINUTE)
    frame = live_rows(world.samples, world.events, world.inventory, t, world.config)
    np.testing.assert_array_equal(state.rows(t).values, frame.drop(columns=list(ROW_COLUMNS)).to_numpy(np.float32))
