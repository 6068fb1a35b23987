"""Comparison with peers against a plain reading, and the fleet's bookkeeping."""

import numpy as np
import pytest

from features.fleet import Fleet
from features.groups.peers import model_codes
from tests.features.small_fleet import (
    HOUR,
    SMALL,
    T0,
    frame_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    write_dataset,
)


def window_value(samples, gpu, node, time, channel, statistic):
    """One unit's value over the peer window, from the samples."""
    border = time - SMALL.delay
    of_gpu = samples[(samples["gpu"] == gpu) & (samples["node"] == node) & (samples["timestamp"] <= border)]
    of_gpu = of_gpu[of_gpu["timestamp"] > border - 2 * SMALL.peer_window]
    of_gpu = of_gpu[of_gpu[channel].notna()].sort_values("timestamp")
    inside = of_gpu["timestamp"] > border - SMALL.peer_window
    if statistic == "mean":
        return of_gpu.loc[inside, channel].astype(float).mean() if inside.any() else np.nan
    values = of_gpu[channel].astype(float).to_numpy()
    rises = np.where(values[1:] >= values[:-1], values[1:] - values[:-1], values[1:])
    chosen = inside.to_numpy()[1:]
    return rises[chosen].sum() if chosen.any() else np.nan


def in_service(inventory, time):
    removed = inventory["removed_at"].isna() | (inventory["removed_at"] > time)
    return inventory[(inventory["installed_at"] <= time) & removed]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    rows = gpus(9)
    rows[2]["removed_at"] = T0 + 11 * HOUR
    rows.append({**rows[2], "node": "node1", "slot": "9", "installed_at": T0 + 12 * HOUR, "removed_at": None})
    rows.append({**rows[5], "gpu": "gpu99", "node": "node2", "installed_at": T0 + 13 * HOUR})
    inventory = inventory_of(rows)
    samples = samples_of(inventory, 20, seed=3)
    path = tmp_path_factory.mktemp("peers")
    dataset = write_dataset(path / "data", inventory, hours=20, samples=samples)
    return inventory, samples, frame_of(make_matrix(dataset, path / "matrix"))


@pytest.mark.parametrize(
    ("channel", "statistic"), [("gpu_temp_c", "mean"), ("ecc_sbe_volatile_total", "rise"), ("power_w", "mean")]
)
def test_peers_equal_the_plain_reading(world, channel, statistic):
    inventory, samples, frame = world
    for row in frame[frame.index % 3 == 0].to_dict("records"):
        time = row["decision_time"]
        present = in_service(inventory, time)
        values = {
            (u.gpu, u.node): window_value(samples, u.gpu, u.node, time, channel, statistic)
            for u in present.itertuples()
        }
        value = values[row["gpu"], row["node"]]
        peers = [
            v for (gpu, node), v in values.items() if node == row["node"] and gpu != row["gpu"] and not np.isnan(v)
        ]
        models = dict(zip(inventory["gpu"], inventory["model"], strict=True))
        alike = [v for (gpu, _), v in values.items() if models[gpu] == models[row["gpu"]] and not np.isnan(v)]
        name = f"peers__{channel}__{{}}__2h"
        deviation = value - np.median(peers) if peers else np.nan
        assert row[name.format("node_deviation")] == pytest.approx(deviation, rel=1e-4, abs=1e-4, nan_ok=True)
        fleet = value - np.median(alike) if alike else np.nan
        assert row[name.format("fleet_deviation")] == pytest.approx(fleet, rel=1e-4, abs=1e-4, nan_ok=True)
        if statistic == "mean":
            rank = (
                np.mean([0.5 if v == value else v < value for v in peers]) if peers and not np.isnan(value) else np.nan
            )
            assert row[name.format("node_rank")] == pytest.approx(rank, nan_ok=True)


def test_augmented_rows_are_held_against_the_fleet_of_the_last_grid_time_and_their_node_of_their_own(tmp_path):
    from tests.features.small_fleet import events_of, xid

    inventory = inventory_of(gpus(8))
    samples = samples_of(inventory, 20, seed=4)
    dataset = write_dataset(
        tmp_path / "data", inventory, hours=20, samples=samples, events=events_of([xid(15.3, "gpu01", "node0")])
    )
    matrix = make_matrix(dataset, tmp_path / "matrix")
    frame = frame_of(matrix)
    extra = frame[frame["augmented"]]
    assert len(extra)
    place = inventory.set_index("gpu")
    every = matrix.config.decision.every
    for row in extra.to_dict("records"):
        time = row["decision_time"]

        def taken(gpu, at):
            return window_value(samples, gpu, place["node"][gpu], at, "gpu_temp_c", "mean")

        grid = T0 + (time - T0) // every * every
        alike = [taken(gpu, grid) for gpu in place.index[place["model"] == place["model"][row["gpu"]]]]
        fleet = taken(row["gpu"], grid) - np.median([value for value in alike if not np.isnan(value)] or [np.nan])
        assert row["peers__gpu_temp_c__fleet_deviation__2h"] == pytest.approx(fleet, abs=1e-4, nan_ok=True)
        peer_values = [taken(gpu, time) for gpu in place.index[place["node"] == row["node"]] if gpu != row["gpu"]]
        node = taken(row["gpu"], time) - np.median(peer_values)
        assert row["peers__gpu_temp_c__node_deviation__2h"] == pytest.approx(node, abs=1e-4)


def test_a_later_installation_does_not_change_a_units_model():
    rows = gpus(1)
    rows.append({**rows[0], "model": "B200", "installed_at": T0 + HOUR})
    rows.append({**rows[0], "gpu": "other"})
    codes, models = model_codes(Fleet.of(inventory_of(rows)), inventory_of(rows))
    assert (codes.tolist(), models) == ([0, 0], 1)
