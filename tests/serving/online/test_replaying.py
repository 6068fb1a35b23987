"""A journal that is read again makes the state that the pushes made, however many are taken in one go."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from serving.online.journal import Journal
from serving.online.replaying import replay
from serving.online.state import OnlineState
from tests.features.small_fleet import HOUR, T0, events_of, xid
from tests.serving.online.online_world import MINUTE, Clock, World, as_table


def arrivals(world: World, rng: np.random.Generator, hours: float) -> Iterator[tuple[timedelta, pa.Table]]:
    """Give small tables as they come: out of order, some far too late, some without a channel, one of no known GPU."""
    samples = world.samples[world.samples["timestamp"] < T0 + hours * HOUR]
    came = (samples["timestamp"] - T0) / MINUTE + rng.uniform(0, 9, len(samples))
    came[rng.random(len(samples)) < 0.03] += 25
    order = np.argsort(came.to_numpy(), kind="stable")
    table = as_table(samples)
    for part in np.array_split(order, len(order) // 7):
        piece = table.take(pa.array(part))
        if rng.random() < 0.05:
            piece = piece.drop_columns(["power_w"])
        yield float(came.iloc[part].max()) * MINUTE, piece
    stranger = table.slice(0, 2).set_column(table.column_names.index("gpu"), "gpu", pa.array(["no", "none"]))
    yield hours * HOUR + HOUR / 2, stranger


def everything(state: OnlineState, world: World) -> list[object]:
    found: list[object] = []
    for node, gpu in zip(world.inventory["node"], world.inventory["gpu"], strict=True):
        block = state.samples_of(node, gpu, 0)
        if block is not None:
            found += [gpu, block.ms.tolist()]
            found += [(name, np.where(each.valid, each.values, 0).tolist()) for name, each in block.series.items()]
    return found


@pytest.mark.parametrize("set_back", [False, True])
def test_a_journal_read_again_makes_the_state_that_pushes_one_by_one_made(
    tmp_path: Path, raw_world: World, *, set_back: bool
) -> None:
    rng, clock, journal = np.random.default_rng(8), Clock(), Journal(tmp_path / "journal")
    first = raw_world.state(clock)
    pushes = 0
    for number, (came, table) in enumerate(arrivals(raw_world, rng, 3)):
        clock.now = T0 + came - (set_back and 22 < number < 35) * HOUR
        clock.now -= timedelta(microseconds=clock.now.microsecond % 1000)
        journal.append("samples", table, clock.now)
        first.push(table)
        pushes += 1
        if number % 20 == 0:
            known = came / HOUR - (number == 40) * 0.5  # one that was known before others
            event = events_of([xid(known, "gpu01", "node0", str(31 + number % 3))])
            journal.append("events", as_table(event), clock.now)
            first.push_events(event)
            pushes += 1
    assert first.totals.late > 2
    assert first.totals.closed > 1
    assert first.totals.unknown == 2
    again = OnlineState.of(raw_world.config, raw_world.inventory, raw_world.events, clock, T0)
    assert replay(again, journal, 0) == pushes
    assert again.totals == first.totals
    assert again.closed_to == first.closed_to
    assert everything(again, raw_world) == everything(first, raw_world)
    pd.testing.assert_frame_equal(again.fleet[1], first.fleet[1])
    t = T0 + 3.5 * HOUR
    np.testing.assert_array_equal(again.rows(t).values, first.rows(t).values)


def test_a_push_that_cannot_be_taken_again_costs_no_other(tmp_path: Path, raw_world: World) -> None:
    table = as_table(raw_world.samples.iloc[:40])
    journal, clock = Journal(tmp_path / "journal"), Clock(T0 + HOUR)
    journal.append("samples", table.slice(0, 20), clock.now)
    journal.append("samples", table.drop_columns(["node"]), clock.now)
    journal.append("samples", table.slice(20), clock.now)
    state = OnlineState.of(raw_world.config, raw_world.inventory, raw_world.events, clock, T0)
    assert replay(state, journal, 0) == 2
    assert state.totals.rows == 40
