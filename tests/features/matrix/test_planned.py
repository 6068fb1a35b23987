"""Samples of a planned maintenance: silence and errors in it are no sign."""

import numpy as np
import pandas as pd
import pytest

from features.matrix.meta import ROW_COLUMNS
from tests.features.small_fleet import (
    HOUR,
    T0,
    events_of,
    frame_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    window,
    write_dataset,
)

START, END = T0 + 8 * HOUR, T0 + 10 * HOUR
COUNTER = "ecc_sbe_volatile_total"


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    def build(samples, *, inventory=None, planned=True):
        path = tmp_path_factory.mktemp("planned")
        installations = inventory_of(gpus(24)) if inventory is None else inventory
        events = events_of([window("node0", 8, 10)] if planned else [])
        dataset = write_dataset(path / "data", installations, samples=samples, events=events)
        return frame_of(make_matrix(dataset, path / "matrix"))

    return build


@pytest.fixture(scope="module")
def samples():
    return samples_of(inventory_of(gpus(24)), 24, seed=4)


def inside(samples):
    return (samples["node"] == "node0") & (samples["timestamp"] >= START) & (samples["timestamp"] < END)


def columns(frame, *groups):
    return [name for name in frame.columns if name not in ROW_COLUMNS and name.split("__")[0] in groups]


def test_no_sample_of_a_known_maintenance_changes_gaps_or_onset_of_any_row(rows_of, samples):
    """Whether they are lost, or their counters rise by a million."""
    risen = samples.copy()
    risen[COUNTER] += 1e6 * inside(samples)
    unchanged, silent, burst = (rows_of(table) for table in (samples, samples[~inside(samples)], risen))
    names = columns(unchanged, "gaps", "onset")
    assert {name.split("__")[0] for name in names} == {"gaps", "onset"}
    for changed in (silent, burst):
        np.testing.assert_array_equal(unchanged[names].to_numpy(), changed[names].to_numpy())


def test_silence_in_a_known_maintenance_is_no_gap(rows_of, samples):
    gone = samples[~inside(samples)]
    gaps = []
    for frame in (rows_of(gone, planned=False), rows_of(gone)):
        row = frame[(frame["decision_time"] == T0 + 12 * HOUR) & (frame["node"] == "node0") & ~frame["augmented"]]
        gaps.append(row[["gaps__samples__missing__4h", "gaps__samples__longest_gap__4h"]].min().tolist())
    assert gaps[0] > [0.4, 2]
    assert gaps[1] < [0.3, 1]


def test_gaps_of_a_unit_after_maintenance_are_those_of_a_new_one(rows_of, samples):
    new = inventory_of(gpus(24))
    new["installed_at"] = new["installed_at"].where(new["node"] != "node0", pd.Timestamp(END))
    since = samples[(samples["node"] != "node0") | (samples["timestamp"] >= END)]
    sides = (rows_of(samples), rows_of(since, inventory=new))
    planned, fresh = (frame[frame["decision_time"] > END] for frame in sides)
    names = [name for name in columns(planned, "gaps") if "fresh" not in name]
    keys = ["decision_time", "unit"]
    pd.testing.assert_frame_equal(
        planned[~planned["augmented"]][keys + names].reset_index(drop=True),
        fresh[~fresh["augmented"]][keys + names].reset_index(drop=True),
    )


def test_silence_after_maintenance_is_as_old_as_its_end(rows_of, samples):
    gone = samples[(samples["node"] != "node0") | (samples["timestamp"] < START)]
    frame = rows_of(gone)
    row = frame[(frame["decision_time"] == T0 + 12 * HOUR) & (frame["node"] == "node0")].iloc[0]
    assert row["gaps__samples__age"] == 2
    assert row["gaps__samples__missing__1h"] == 1
    assert row["gaps__samples__longest_gap__4h"] == pytest.approx(2 - 1 / 6)
