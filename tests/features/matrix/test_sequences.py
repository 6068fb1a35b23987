"""Raw windows: what they hold, what they must not hold, and that they live with the matrix."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.config import FeatureSection, SequenceSection
from features.matrix.matrix import FeatureMatrix
from features.matrix.sequences import SequencePlan, live_windows
from foundation.errors import InputError
from tests.features.small_fleet import (
    CHANNELS,
    HOUR,
    SMALL,
    STEP,
    T0,
    config_of,
    events_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    to_table,
    write_dataset,
    xid,
)

NAMES = ("gpu_temp_c", "power_w", "ecc_sbe_volatile_total")
SECTION = SequenceSection(channels=NAMES, window=6 * HOUR, step=timedelta(minutes=30))
WINDOWS = SMALL.model_copy(update={"sequence": SECTION})
EVENTS = [xid(15.3, "gpu01", "node0"), xid(20.1, "gpu06", "node1", known_at=T0 + 21 * HOUR)]
DELAY = timedelta(minutes=10)


def fleet(path, samples=None, features=WINDOWS, **kwargs):
    inventory = inventory_of(gpus(8))
    samples = samples_of(inventory, 24) if samples is None else samples
    dataset = write_dataset(path / "data", inventory, samples=samples, events=events_of(EVENTS))
    return dataset, make_matrix(dataset, path / "matrix", features=features, **kwargs)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return fleet(tmp_path_factory.mktemp("sequences"))


def by_hand(samples, node, unit, t, section=SECTION):
    """One window, slowly: steps end at the newest usable instant that the grid of decisions allows."""
    border = t - DELAY
    anchor = pd.Timestamp(T0) - DELAY
    end = anchor + ((border - anchor) // section.step) * section.step
    steps = int(section.window / section.step)
    of_unit = samples[(samples["node"] == node) & (samples["gpu"] == unit)].sort_values("timestamp")
    times = pd.DatetimeIndex(of_unit["timestamp"])
    times = times.tz_localize("UTC") if times.tz is None else times
    out = np.full((steps, len(section.channels)), np.nan)
    for j, name in enumerate(section.channels):
        values = of_unit[name].astype("float64").to_numpy(dtype=float, na_value=np.nan)
        if name.endswith("_total"):
            rises = np.full(len(values), np.nan)
            last = None
            for i, value in enumerate(values):
                if np.isnan(value):
                    continue
                if last is not None:
                    rises[i] = value - last if value >= last else value
                last = value
            values = rises
        for step in range(steps):
            stop = end - (steps - 1 - step) * section.step
            inside = (times > stop - section.step) & (times <= stop)
            known = values[inside][~np.isnan(values[inside])]
            if known.size:
                out[step, j] = known.sum() if name.endswith("_total") else known.mean()
    return out


def test_windows_equal_the_same_taken_by_hand(small):
    _, matrix = small
    samples = samples_of(inventory_of(gpus(8)), 24)
    rows = matrix.rows
    rng = np.random.default_rng(0)
    grid, off = np.flatnonzero(~rows["augmented"]), np.flatnonzero(rows["augmented"])
    chosen = np.concatenate([rng.choice(grid, 15), rng.choice(off, 10)])
    windows = matrix.windows(chosen)
    assert windows.shape == (25, 12, 3)
    assert windows.dtype == np.float32
    assert np.isfinite(windows).any()
    for row, window in zip(chosen, windows, strict=True):
        key = rows.iloc[row]
        expected = by_hand(samples, key["node"], key["unit"], key["decision_time"])
        np.testing.assert_allclose(window, expected, rtol=1e-6)


@settings(max_examples=3, deadline=None)
@given(st.integers(30, 140), st.integers(0, 10**6))
def test_a_poisoned_future_changes_no_window(tmp_path_factory, at_step, seed):
    inventory = inventory_of(gpus(8))
    samples = samples_of(inventory, 24, seed=seed)
    poisoned = samples.copy()
    border = T0 + at_step * STEP
    late = pd.DatetimeIndex(poisoned["timestamp"]).tz_convert("UTC") > pd.Timestamp(border)
    for name in NAMES:
        poisoned.loc[late, name] = 1e6
    remaining = samples[~late | (np.random.default_rng(seed).random(len(samples)) < 0.5)]
    matrices = {}
    for name, frame in (("whole", samples), ("poisoned", poisoned), ("thinned", remaining)):
        _, matrix = fleet(tmp_path_factory.mktemp(name), frame)
        matrices[name] = matrix
    known = matrices["whole"].rows["decision_time"] <= pd.Timestamp(border + DELAY)
    rows = np.flatnonzero(known)
    keys = matrices["whole"].rows.iloc[rows][["decision_time", "unit"]]
    expected = matrices["whole"].windows(rows)
    for name in ("poisoned", "thinned"):
        other = matrices[name].rows.reset_index(names="at").merge(keys, on=["decision_time", "unit"], how="inner")
        assert len(other) == len(rows)
        np.testing.assert_array_equal(matrices[name].windows(other["at"].to_numpy()), expected)


def test_a_live_window_is_the_matrix_s(small):
    dataset, matrix = small
    for t in (T0 + 9 * HOUR, T0 + 15 * HOUR):
        rows = np.flatnonzero((matrix.rows["decision_time"] == pd.Timestamp(t)) & ~matrix.rows["augmented"])
        samples = samples_of(inventory_of(gpus(8)), 24)
        young = pd.DatetimeIndex(samples["timestamp"]) > pd.Timestamp(t - 8 * HOUR)
        live = live_windows(to_table(samples[young]), matrix.rows.iloc[rows], dataset.inventory(), t, matrix.config)
        np.testing.assert_allclose(live, matrix.windows(rows), rtol=1e-6)


def test_a_roll_up_s_own_rise_is_taken(tmp_path):
    counter = CHANNELS["ecc_sbe_volatile_total"]
    import dataclasses

    rise = dataclasses.replace(CHANNELS["power_w"], name="ecc_sbe_volatile_total_rise", unit="errors")
    inventory = inventory_of(gpus(4))
    frame = samples_of(inventory, 24, channels={counter.name: counter}, lost=0.0)
    frame[counter.name] = pd.array(np.full(len(frame), 5.0), dtype="Float64")
    frame[rise.name] = pd.array(np.full(len(frame), 2.0), dtype="Float32")
    channels = {counter.name: counter, rise.name: rise}
    dataset = write_dataset(tmp_path / "d", inventory, samples=frame, channels=channels, events=events_of([]))
    section = SequenceSection(channels=(counter.name,), window=2 * HOUR, step=HOUR)
    matrix = make_matrix(dataset, tmp_path / "m", features=SMALL.model_copy(update={"sequence": section}))
    last = matrix.windows([len(matrix.rows) - 1])[0]
    np.testing.assert_array_equal(last, np.full((2, 1), 12.0))  # six samples a step, two each


def test_columns_say_what_a_flattened_window_holds(small):
    plan = small[1].sequences.plan
    names = [column.name for column in plan.columns]
    assert len(names) == len(set(names)) == 36
    assert names[0] == "telemetry__gpu_temp_c__step_mean__6h"
    assert names[-1] == "telemetry__ecc_sbe_volatile_total__step_rise__30m"


def test_a_second_build_takes_what_stands_and_a_lost_array_is_built_again(small, tmp_path):
    dataset, matrix = fleet(tmp_path)
    mtime_ns = (matrix.path / "sequences.npy").stat().st_mtime_ns
    again = make_matrix(dataset, matrix.path, features=WINDOWS)
    assert (again.path / "sequences.npy").stat().st_mtime_ns == mtime_ns
    first = again.windows()
    (matrix.path / "sequences.npy").unlink()
    np.testing.assert_array_equal(make_matrix(dataset, matrix.path, features=WINDOWS).windows(), first)
    assert (matrix.path / "sequences.npy").read_bytes() == (small[1].path / "sequences.npy").read_bytes()


def test_windows_leave_the_other_columns_as_they_are(small, tmp_path):
    plain = make_matrix(small[0], tmp_path / "plain", features=SMALL)
    np.testing.assert_array_equal(plain.values(), small[1].values())
    assert plain.columns == small[1].columns
    assert plain.sequences is None
    with pytest.raises(InputError, match="the matrix has no raw windows"):
        plain.windows([0])


def test_another_matrix_s_array_is_refused(small, tmp_path):
    _, other = fleet(tmp_path)
    np.save(other.path / "sequences.npy", np.zeros((1, 2, 3), dtype=np.float32))
    with pytest.raises(InputError, match="the raw windows do not belong to this matrix"):
        FeatureMatrix.open(other.path).windows([0])
    (other.path / "sequences.npy").write_bytes(b"nothing")
    with pytest.raises(InputError, match="the raw windows cannot be read"):
        FeatureMatrix.open(other.path).windows([0])


@pytest.mark.parametrize(
    ("channels", "what", "do"),
    [
        (("power",), "the dataset has no channel 'power'", "Did you mean 'power_w'?"),
        (("xid_last",), "channel 'xid_last' is of kind enum, which has neither a mean nor a rise", "Name gauges"),
    ],
)
def test_a_channel_that_cannot_be_taken_is_named(channels, what, do):
    with pytest.raises(InputError) as raised:
        SequencePlan.of(config_of(features=FeatureSection(sequence=SequenceSection(channels=channels))))
    assert raised.value.problem == what
    assert raised.value.advice.startswith(do)
    assert raised.value.location == "parameter features.sequence.channels"


def test_chosen_channels_keep_their_roll_ups_and_a_wrong_one_is_named(small, tmp_path):
    chosen = make_matrix(small[0], tmp_path / "m", features=SMALL.model_copy(update={"channels": ("power_w",)}))
    assert {c.channel for c in chosen.columns if c.group == "telemetry"} == {"power_w"}
    with pytest.raises(InputError, match="the dataset has no channel 'power'"):
        make_matrix(small[0], tmp_path / "n", features=SMALL.model_copy(update={"channels": ("power",)}))
