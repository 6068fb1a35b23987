"""A live row equals the training row."""

import numpy as np
import pandas as pd
import pytest

from features.matrix.live_rows import live_plan, live_rows
from features.matrix.meta import ROW_COLUMNS
from foundation.errors import InputError
from tests.features.small_fleet import (
    HOUR,
    T0,
    events_of,
    frame_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    to_table,
    write_dataset,
    xid,
)


def window(node, start, end, *, known=None):
    """A planned maintenance of a node, in hours; known as it begins."""
    at, until = T0 + start * HOUR, T0 + end * HOUR
    told = at if known is None else T0 + known * HOUR
    return {"timestamp": at, "node": node, "type": "maintenance", "code": until.isoformat(), "known_at": told}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    rows = gpus(10)
    rows[3]["removed_at"] = T0 + 16 * HOUR
    rows.append({**rows[3], "node": "node2", "slot": "7", "installed_at": T0 + 17 * HOUR, "removed_at": None})
    inventory = inventory_of(rows)
    events = events_of(
        [
            xid(13.2, "gpu01", "node0"),
            xid(14.0, "gpu05", "node1", "63"),
            {**xid(15, "gpu01", "node0", ""), "type": "repair"},
            {"timestamp": T0 + 12.5 * HOUR, "node": "node1", "type": "driver", "code": "550"},
            xid(21.2, "gpu06", "node1"),
            window("node2", 8, 10),
            window("node1", 14, 15.5, known=17),
            {**xid(19, "gpu00", "node0", "begin"), "type": "maintenance"},
            {**xid(19.5, "gpu00", "node0", "end"), "type": "maintenance"},
        ]
    )
    samples = samples_of(inventory, 24, seed=8)
    path = tmp_path_factory.mktemp("live")
    matrix = make_matrix(write_dataset(path / "data", inventory, samples=samples, events=events), path / "matrix")
    return matrix, frame_of(matrix), samples, events, inventory


def as_known(t, samples, events, inventory, config):
    """What a live system holds at t: the look-back, what has happened, no removal to come."""
    oldest = live_plan(config).look_back
    recent = samples[(samples["timestamp"] <= t) & (samples["timestamp"] > t - oldest)]
    stays = inventory[inventory["installed_at"] <= t].copy()
    stays["removed_at"] = stays["removed_at"].where(stays["removed_at"] <= t)
    return [[to_table(recent)]], events[events["known_at"] <= t], stays


def same(live: pd.DataFrame, training: pd.DataFrame) -> None:
    """Bit for bit, which is more than the 1e-6 that is asked."""
    training = training.reset_index(drop=True)
    keys = ["decision_time", "node", "gpu", "unit"]
    pd.testing.assert_frame_equal(live[keys], training[keys].astype(live[keys].dtypes))
    names = [name for name in training.columns if name not in ROW_COLUMNS]
    assert live.columns.tolist() == training.columns.tolist()
    for name in names:
        np.testing.assert_array_equal(live[name].to_numpy(), training[name].to_numpy(), err_msg=name)


@pytest.mark.parametrize("hour", range(0, 25, 3))
def test_a_replayed_hour_gives_the_matrix_rows(world, hour):
    matrix, frame, *data = world
    t = T0 + hour * HOUR
    live = live_rows(*as_known(t, *data, matrix.config), t, matrix.config)
    same(live, frame[(frame["decision_time"] == t) & ~frame["augmented"]])


def test_a_category_not_seen_in_training_is_unknown(world):
    matrix, _, *data = world
    t = T0 + 18 * HOUR
    samples, events, inventory = as_known(t, *data, matrix.config)
    live = live_rows(samples, events, inventory.assign(model="B999"), t, matrix.config)
    assert live["static__model__code"].isna().all()
    assert live["static__driver__code"].notna().all()


def test_a_silent_fleet_still_has_rows(world):
    matrix, _, *data = world
    t = T0 + 18 * HOUR
    _, events, inventory = as_known(t, *data, matrix.config)
    live = live_rows([], events, inventory, t, matrix.config)
    assert len(live)
    assert (live["gaps__samples__missing__4h"].dropna() == 1).all()
    assert live["telemetry__gpu_temp_c__mean__4h"].isna().all()


def test_columns_of_another_version_are_refused(world):
    from dataclasses import replace

    config = world[0].config
    with pytest.raises(InputError, match="this version of predrain computes other feature columns"):
        live_plan(replace(config, columns=config.columns[1:]))


def test_older_samples_and_later_ones_change_nothing(world):
    matrix, frame, samples, events, inventory = world
    t = T0 + 18 * HOUR
    same(
        live_rows([[to_table(samples)]], events, inventory, t, matrix.config),
        frame[(frame["decision_time"] == t) & ~frame["augmented"]],
    )
