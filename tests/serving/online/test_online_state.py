"""What the online state counts, refuses, keeps and lets go."""

import threading
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from features.config import SequenceSection
from features.errors import InputError
from features.sequences import SequencePlan
from serving.config import ScoringSettings
from serving.fleet_rows import fleet_rows
from serving.online.state import OnlineState
from tests.features.small_fleet import HOUR, T0, events_of, xid
from tests.serving.online.online_world import MINUTE, Clock, as_table, equal_to_live, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("state"))


def one(at, gpu="gpu00", node="node0", **values):
    table = {"timestamp": pa.array([at], pa.timestamp("ms", tz="UTC")), "node": [node], "gpu": [gpu]}
    return pa.table({**table, **{name: [value] for name, value in values.items()}})


def test_every_row_is_in_one_count(world):
    clock = Clock(T0 + 10 * HOUR)
    state = world.state(clock)
    now = clock.now
    rows = [
        one(now - MINUTE, gpu_temp_c=50.0),
        one(now - HOUR, gpu_temp_c=50.0),  # late, and held
        one(now - timedelta(days=30), gpu_temp_c=50.0),
        one(now + 2 * HOUR, gpu_temp_c=50.0),
        one(now, gpu="gpu99", gpu_temp_c=50.0),
        one(now, node="node1", gpu_temp_c=50.0),
        one(now, gpu_temp_c=5000.0),
        one(now, gpu=None, gpu_temp_c=50.0),
    ]
    absorbed = state.push(pa.concat_tables(rows, promote_options="permissive"))
    assert (absorbed.rows, absorbed.stored, absorbed.late) == (8, 3, 1)
    assert (absorbed.too_old, absorbed.ahead, absorbed.unknown, absorbed.values_nulled) == (1, 1, 3, 1)
    assert absorbed.closed == 0
    assert state.totals == absorbed
    assert state.size.waiting == 2
    assert state.size.rows == 1


def test_a_late_sample_is_in_the_rows_from_then_on_as_in_training(world):
    t = T0 + 9 * HOUR
    clock = Clock(t)
    state = world.state(clock)
    samples = world.samples[world.samples["timestamp"] < t]
    held_back = samples["timestamp"] == T0 + 8 * HOUR
    state.push(as_table(samples[~held_back]), replayed=True)
    equal_to_live(state.rows(t), samples[~held_back], world, t)
    assert state.push(as_table(samples[held_back])).late == int(held_back.sum())
    equal_to_live(state.rows(t), samples, world, t)


def test_a_raw_sample_of_a_step_that_was_rolled_up_without_it_is_counted_and_left_out(world):
    clock = Clock(T0)
    state = world.state(clock)
    for minute in range(60):
        clock.now = T0 + minute * MINUTE
        if minute != 15:
            state.push(one(clock.now, gpu_temp_c=40.0 + minute))
    before = state.rows(T0 + HOUR - MINUTE)
    absorbed = state.push(one(T0 + 15 * MINUTE, gpu_temp_c=99.0))
    assert (absorbed.closed, absorbed.stored, absorbed.late) == (1, 0, 1)
    np.testing.assert_array_equal(state.rows(T0 + HOUR - MINUTE).values, before.values)


def test_a_counter_at_seventeen_million_does_not_lose_a_one(world):
    clock = Clock(T0)
    state = world.state(clock)
    for step in range(13):
        clock.now = T0 + step * 10 * MINUTE
        state.push(one(clock.now, ecc_sbe_volatile_total=2.0**24 + step, gpu_temp_c=40.0))
    state.tidy()
    rows = state.rows(clock.now)
    at = next(
        i
        for i, c in enumerate(world.config.columns)
        if c.name.startswith("telemetry__ecc_sbe_volatile_total__rise__1h")
    )
    row = rows.keys.index[rows.keys["gpu"] == "gpu00"][0]
    assert rows.values[row, at] == 6.0


def test_old_samples_go_and_memory_stays(world):
    clock = Clock(T0)
    state = world.state(clock)
    sizes = []
    for day in range(60):
        clock.now = T0 + timedelta(days=day)
        times = [clock.now - timedelta(hours=h) for h in range(24)]
        table = pa.concat_tables([one(at, gpu_temp_c=40.0 + day) for at in times])
        state.push(table, replayed=True)
        state.tidy()
        sizes.append(state.size.rows)
    assert max(sizes[20:]) <= sizes[12] * 1.5
    assert state.size.rows < 24 * (state.look_back / timedelta(days=1) + 2)


def test_a_push_that_cannot_be_used_changes_nothing(world):
    state = world.state(Clock(T0 + HOUR))
    table = one(T0, gpu_temp_c=50.0)
    for bad, words in (
        (table.drop_columns(["node"]), "the samples have no column 'node' (pushed samples). Add it."),
        (
            table.set_column(0, "timestamp", table["timestamp"].cast(pa.timestamp("ms"))),
            "timestamps of type timestamp[ms] have no time zone (pushed samples). Give aware timestamps, such as UTC.",
        ),
        (
            table.append_column("power_w", pa.array([[1.0]])),
            "the column 'power_w' is of type list<item: double> (pushed samples). Give numbers.",
        ),
    ):
        with pytest.raises(InputError) as error:
            state.push(bad)
        assert str(error.value) == words
    assert state.totals.rows == 0
    assert state.size.waiting == 0


def test_a_time_out_of_reach_is_refused(world):
    state = world.state(Clock(T0 + 10 * HOUR))
    for t in (T0 + 11 * HOUR, T0):
        with pytest.raises(InputError, match="is out of reach of the online state"):
            state.rows(t)


def test_single_nodes_without_the_fleets_reference_are_refused(world):
    state = world.state(Clock(T0 + 10 * HOUR))
    with pytest.raises(InputError) as error:
        state.rows(T0 + 10 * HOUR, nodes={"node0"})
    assert str(error.value) == (
        "the features compare with the fleet, and no reference is given for single nodes "
        "(rows of the online state). Take one with reference(), and give it along."
    )


def test_events_are_added_once(world):
    t = T0 + 10 * HOUR
    state = OnlineState.of(world.config, world.inventory, events_of([]), Clock(t))
    assert state.push_events(world.events) == len(world.events)
    assert state.push_events(world.events) == 0
    state.push(as_table(world.samples[world.samples["timestamp"] < t]), replayed=True)
    equal_to_live(state.rows(t), world.samples, world, t)


def test_events_that_cannot_be_used_are_refused(world):
    state = world.state(Clock())
    for bad, words in (
        (events_of([xid(1, "gpu00", "node0")]).drop(columns="type"), "the events have no column 'type'"),
        (events_of([{**xid(1, "gpu00", "node0"), "type": "xidd"}]), "'xidd' is no type of event"),
        (events_of([{**xid(1, "gpu00", "node0"), "node": None}]), "1 events have no 'node'"),
    ):
        with pytest.raises(InputError) as error:
            state.push_events(bad)
        assert str(error.value).startswith(words)


def test_raw_windows_are_those_of_batch_scoring(world):
    t = T0 + 9 * HOUR
    section = SequenceSection(channels=("gpu_temp_c", "power_w"), window=3 * HOUR, step=30 * MINUTE)
    plan = SequencePlan.of(section, world.config.channels, delay=world.config.features.delay)
    state = world.state(Clock(t))
    state.push(as_table(world.samples[world.samples["timestamp"] < t]), replayed=True)
    online = state.rows(t, windows=plan)
    batch = fleet_rows(world.dataset, world.config, ScoringSettings(), t, plan)
    np.testing.assert_array_equal(online.values, batch.values)


def test_parts_of_a_gpu_are_one_sample_as_in_an_import(world):
    t = T0 + HOUR
    state = world.state(Clock(t))
    table = pa.concat_tables([one(T0 + 30 * MINUTE, gpu_temp_c=value) for value in (40.0, 60.0, 50.0)])
    state.push(table.append_column("mig_instance", pa.array(["1", "2", "3"])))
    at = [column.name for column in world.config.columns].index("telemetry__gpu_temp_c__last__1h")
    rows = state.rows(t)
    assert rows.values[rows.keys.index[rows.keys["gpu"] == "gpu00"][0], at] == 60.0


def test_a_retrained_bundle_takes_over_what_is_held_and_another_kind_does_not(world):
    state = world.state(Clock(T0 + HOUR))
    state.serve(world.config)
    with pytest.raises(InputError, match="looks at other samples"):
        state.serve(replace(world.config, step=5 * MINUTE))


def test_a_fleet_of_nodes_without_gpus_is_followed_too(tmp_path):
    from tests.features.small_fleet import inventory_of, make_matrix, samples_of, write_dataset
    from tests.serving.online.online_world import World

    inventory = inventory_of([{"node": f"n{i}", "gpu": None, "slot": None} for i in range(3)])
    samples = samples_of(inventory, 8, seed=2)
    dataset = write_dataset(tmp_path / "data", inventory, samples=samples, events=events_of([]), hours=8, unit="node")
    config = make_matrix(dataset, tmp_path / "matrix").config
    small = World(dataset, config, samples.drop(columns="gpu"), inventory, events_of([]))
    t = T0 + 6 * HOUR
    state = small.state(Clock(t))
    state.push(as_table(small.samples[small.samples["timestamp"] < t]), replayed=True)
    equal_to_live(state.rows(t), small.samples, small, t)
    assert pd.isna(state.rows(t).keys["gpu"]).all()


def test_pushes_rows_and_tidying_may_go_on_at_once(world):
    clock = Clock(T0 + 9 * HOUR)
    state = world.state(clock)
    table = as_table(world.samples[world.samples["timestamp"] < clock.now])
    parts = [table.slice(at, 20) for at in range(0, table.num_rows, 20)]
    failures = []

    def push(mine):
        try:
            for part in mine:
                state.push(part, replayed=True)
        except Exception as error:  # what a thread raises would be lost
            failures.append(error)

    threads = [threading.Thread(target=push, args=(parts[k::3],)) for k in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        state.rows(clock.now)
        state.tidy()
    for thread in threads:
        thread.join()
    assert failures == []
    equal_to_live(state.rows(clock.now), table, world, clock.now)


def test_thousands_of_small_pushes_wait_in_few_blocks(world):
    clock = Clock(T0 + HOUR)
    state = world.state(clock)
    for second in range(400):
        state.push(one(clock.now - timedelta(seconds=second), gpu_temp_c=50.0))
    assert len(state._stepper.waiting) < 20
    assert state.size.waiting == 400


def test_a_table_without_rows_is_no_harm(world):
    state = world.state(Clock(T0 + HOUR))
    assert state.push(one(T0, gpu_temp_c=50.0).slice(0, 0)).rows == 0
    assert state.push(one(T0, gpu="gpu99", gpu_temp_c=50.0)).unknown == 1
    assert state.size.rows == 0
