"""A small fleet, its bundle's settings, and a clock that tests turn, for the tests of the online state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from features.blocks import table_of
from features.live import live_rows
from features.matrix_meta import ROW_COLUMNS, MatrixConfig
from serving.fleet_rows import FleetRows
from serving.online.state import OnlineState
from telemetry.importing import import_dataset
from telemetry.store import Dataset
from tests.features.small_fleet import (
    CHANNELS,
    HOUR,
    SMALL,
    STEP,
    T0,
    events_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    write_dataset,
    xid,
)

HOURS = 12
MINUTE = timedelta(minutes=1)


class Clock:
    """A clock that stands until it is turned."""

    def __init__(self, now: datetime = T0) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


@dataclass(frozen=True, repr=False)
class World:
    """What the tests share."""

    dataset: Dataset
    config: MatrixConfig
    samples: pd.DataFrame
    inventory: pd.DataFrame
    events: pd.DataFrame

    def __repr__(self) -> str:  # hypothesis prints what it draws
        return "World"

    def state(self, clock: Clock) -> OnlineState:
        return OnlineState.of(self.config, self.inventory, self.events, clock)


def make_world(folder: Path) -> World:
    """Eight GPUs, of which one moves and one is down, with missing samples and values and counter resets."""
    rows = gpus(8)
    rows[3]["removed_at"] = T0 + 6 * HOUR
    rows.append({**rows[3], "node": "node1", "slot": "7", "installed_at": T0 + 7 * HOUR, "removed_at": None})
    inventory = inventory_of(rows)
    events = events_of([xid(3.2, "gpu01", "node0"), xid(7.0, "gpu05", "node1", "63")])
    samples = samples_of(inventory, HOURS, seed=4)
    dataset = write_dataset(folder / "data", inventory, samples=samples, events=events, hours=HOURS)
    matrix = make_matrix(dataset, folder / "matrix")
    return World(dataset, matrix.config, samples, inventory, events)


def push_by_arrival(
    state: OnlineState, clock: Clock, table: pa.Table, arrival: Sequence[int], *, until: datetime, every: timedelta
) -> None:
    """Push rows in the order in which they arrive (ms since T0), one table an interval of the clock."""
    order = np.argsort(arrival, kind="stable")
    came = np.asarray(arrival)[order]
    while clock.now < until:
        begin = (clock.now - T0) / timedelta(milliseconds=1)
        clock.now = min(clock.now + every, until)
        end = (clock.now - T0) / timedelta(milliseconds=1)
        mine = order[(came >= begin) & (came < end)]
        if mine.size:
            state.push(table.take(pa.array(mine)))


def equal_to_live(rows: FleetRows, samples: pa.Table | pd.DataFrame, world: World, t: datetime) -> None:
    """Compare with what the room of features makes of the same samples: 1e-6 relative, 1e-9 near zero."""
    frame = live_rows(samples, world.events, world.inventory, t, world.config)
    pd.testing.assert_frame_equal(rows.keys, frame[list(ROW_COLUMNS)])
    expected = frame.drop(columns=list(ROW_COLUMNS)).to_numpy(np.float32)
    for at, column in enumerate(world.config.columns):
        np.testing.assert_allclose(
            rows.values[:, at], expected[:, at], rtol=1e-6, atol=1e-9, equal_nan=True, err_msg=column.name
        )


def as_table(frame: pd.DataFrame) -> pa.Table:
    return table_of(frame)


def make_raw_world(folder: Path) -> World:
    """Samples every minute, and the dataset that an import makes of them, rolled up to ten minutes."""
    small = make_world(folder / "small")
    inventory = small.inventory[small.inventory["gpu"].isin(["gpu00", "gpu01", "gpu04"])].reset_index(drop=True)
    samples = samples_of(inventory, 8, seed=6, step=MINUTE)
    slow = samples_of(inventory[inventory["gpu"] == "gpu04"], 8, seed=7, step=STEP)
    samples = pd.concat([samples[samples["gpu"] != "gpu04"], slow], ignore_index=True)
    pq.write_table(as_table(samples), folder / "samples.parquet")
    pq.write_table(as_table(inventory), folder / "inventory.parquet")
    made = import_dataset(
        folder / "data",
        inventory=folder / "inventory.parquet",
        step=STEP,
        channels=CHANNELS,
        dedupe=MINUTE,
        delay=SMALL.delay,
        samples=[folder / "samples.parquet"],
    )
    matrix = make_matrix(made.dataset, folder / "matrix")
    return World(made.dataset, matrix.config, samples, inventory, small.events)
