"""The group ``onset``: surges against the fleet and against the unit's own past."""

import math
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from features.config import DecisionSection, FeatureSection, LabelSection
from features.groups.onset import MIN_UNITS, QUANTILE, OnsetPlan
from features.matrix.building import build_matrix
from features.windows.layout import ChannelLayout
from models.config import TrainingSection
from simulator.simulate import simulate
from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.store import Dataset

HOUR = timedelta(hours=1)
DELAY = timedelta(minutes=10)
LOOK_BACK = 48 * HOUR
FEATURES = FeatureSection(
    groups=("peers", "onset"), windows=(HOUR, 6 * HOUR), onset=((HOUR, 12 * HOUR), (6 * HOUR, 48 * HOUR))
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("onset")
    simulate(folder / "fleet", gpus=64, days=8, seed=117, scenario="base", acceleration=60.0)
    dataset = Dataset.open(folder / "fleet")
    matrix = build_matrix(
        dataset,
        folder / "matrix",
        decision=DecisionSection(),
        labels=LabelSection(),
        features=FEATURES,
        training=TrainingSection(augmentation=2, negative_ratio=4),
        seed=1,
    )
    samples = pd.concat([dataset.read_bucket(bucket).to_pandas() for bucket in dataset.buckets()], ignore_index=True)
    frame = pd.concat(
        [matrix.rows, pd.DataFrame(matrix.values(), columns=[column.name for column in matrix.columns])], axis=1
    )
    return matrix, frame, samples, dataset.events(), dataset.inventory()


def rise(samples, channel, t, window):
    """Slow oracle: what a counter rose by from sample to sample in a trailing window, from the look-back's samples."""
    samples = samples[samples["timestamp"] > t - DELAY - LOOK_BACK]
    recent = samples[(samples["timestamp"] > t - DELAY - window) & (samples["timestamp"] <= t - DELAY)]
    baseline = samples[samples["timestamp"] <= t - DELAY - window][channel].dropna().tail(1)
    values = pd.concat([baseline, recent[channel].dropna()]).to_numpy(np.float64)
    if not recent[channel].notna().any():
        return math.nan
    steps = np.diff(values)
    return float(np.where(steps >= 0, steps, values[1:]).sum()) if len(values) > 1 else 0.0


def driver(gpu, node, t, events, inventory):
    """Slow oracle: the newest driver change of the node that was known, or the driver at installation."""
    installation = inventory[(inventory["gpu"] == gpu) & (inventory["installed_at"] <= t)].iloc[-1]
    changes = events[(events["type"] == "driver") & (events["node"] == node) & (events["known_at"] <= t)]
    changes = changes[changes["timestamp"] >= installation["installed_at"]].sort_values("timestamp")
    return installation["driver"] if changes.empty else changes["code"].iloc[-1]


def test_a_surge_is_the_smaller_of_two_log_ratios_by_a_slow_oracle(world):
    _, frame, samples, events, inventory = world
    channel, window, past = "ecc_sbe_volatile_total", 6 * HOUR, 48 * HOUR
    grid = frame[~frame["augmented"]]
    t = grid["decision_time"].max()
    rows = grid[grid["decision_time"] == t]
    model = inventory.drop_duplicates("gpu").set_index("gpu")["model"]
    by_gpu = {gpu: part.sort_values("timestamp") for gpu, part in samples.groupby("gpu", observed=True)}
    column = f"telemetry__{channel}"
    assert column not in frame  # the group needs no other group's columns
    rises, surges = [], []
    for _, row in rows.iterrows():
        of_gpu = by_gpu.get(row["gpu"])
        amount = math.nan if of_gpu is None else rise(of_gpu, channel, t, window)
        baseline = math.nan if of_gpu is None else max(rise(of_gpu, channel, t, past) - amount, 0.0)
        rises.append((model[row["gpu"]], amount, baseline))
        surges.append(row[f"onset__{channel}__surge__6h"])
    logs = pd.Series([math.log1p(amount) for _, amount, _ in rises])
    models = pd.Series([name for name, _, _ in rises])
    versions = pd.Series([driver(row["gpu"], row["node"], t, events, inventory) for _, row in rows.iterrows()])
    checked = 0
    for i, (name, amount, baseline) in enumerate(rises):
        alike = logs[(models == name) & (versions == versions[i])].dropna()
        like = logs[models == name].dropna()
        comparable = alike if len(alike) >= MIN_UNITS else like if len(like) >= MIN_UNITS else logs.dropna()
        excess = logs[i] - np.quantile(comparable, QUANTILE)
        own_ratio = math.log1p(amount) - math.log1p(baseline / 42 * 6)
        if math.isnan(amount):
            assert math.isnan(surges[i])
        else:
            assert surges[i] == pytest.approx(min(excess, own_ratio), abs=1e-5)
            checked += 1
    assert checked > 40


def test_the_joined_columns_join_all_counters(world):
    matrix, frame, *_ = world
    surges = [column.name for column in matrix.columns if column.statistic == "surge" and column.window == HOUR]
    assert len(surges) > 3
    values = frame[surges].to_numpy(np.float64)
    known = ~np.isnan(values).all(axis=1)
    assert known.any()
    most = np.nanmax(values[known], axis=1)
    np.testing.assert_allclose(frame["onset__errors__surge_max__1h"].to_numpy()[known], most, rtol=1e-5, atol=1e-6)
    total = np.nansum(np.maximum(values[known], 0), axis=1)
    np.testing.assert_allclose(frame["onset__errors__surge_sum__1h"].to_numpy()[known], total, rtol=1e-4, atol=1e-5)
    assert np.isnan(frame["onset__errors__surge_max__1h"].to_numpy()[~known]).all()


def test_traffic_energy_and_time_are_no_errors():
    channels = {
        "energy_mj": CATALOGUE["energy_mj"],
        "wear_total": replace(CATALOGUE["pcie_replay_total"], name="wear_total"),
    }
    plan = OnsetPlan.of(ChannelLayout.of(channels), FEATURES.onset, step=DELAY)
    assert {column.channel for column in plan.columns} == {"wear_total", "errors"}
    assert OnsetPlan.of(ChannelLayout.of({"energy_mj": channels["energy_mj"]}), FEATURES.onset, step=DELAY) is None
