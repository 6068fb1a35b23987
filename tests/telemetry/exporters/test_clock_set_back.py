"""A clock that ran ahead for a while must not cost the rows of the time that it ran ahead."""

import asyncio
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from telemetry.exporters.holding import Holding
from telemetry.exporters.newest import NewestRows
from telemetry.exporters.set_back import without_future
from telemetry.landing.tables import LANDED_INVENTORY
from tests.telemetry.exporters.exporter_pages import (
    START,
    FakeFetcher,
    FleetClock,
    exporter_page,
    landed,
    make_collector,
    run_for,
    run_virtual,
)

DAYS = timedelta(days=30)
MINUTE_MS = 60_000
START_MS = round(START.timestamp() * 1000)


def samples(*times_ms: int) -> pa.Table:
    stamps = pa.array(times_ms, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    return pa.table({"timestamp": stamps, "node": ["n1"] * len(times_ms), "gpu": ["GPU-1"] * len(times_ms)})


def test_one_scrape_with_a_clock_a_month_ahead_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FleetClock()

    async def work() -> Any:
        loop = asyncio.get_running_loop()
        fetcher = FakeFetcher(lambda _, number: exporter_page("n1", number))
        collector = make_collector(tmp_path, fetcher, ["n1"], clock=clock)
        # The scrapes come every 30 s from some moment in the first: this holds one of them.
        loop.call_later(180, lambda: setattr(clock, "offset", DAYS))
        loop.call_later(210, lambda: setattr(clock, "offset", timedelta()))
        await run_for(collector, 600)
        return collector

    with caplog.at_level(logging.WARNING):
        collector = run_virtual(work)
    times = [row["timestamp"] for row in landed(tmp_path, "samples").to_pylist() if row["gpu"] == "GPU-n1-0"]
    late = [time for time in times if time > START + timedelta(hours=1)]
    assert len(times) - len(late) == 19
    right = [time for time in times if time not in late]
    assert right == sorted(set(right))
    assert len(late) * 2 + collector.newest.dropped == 2
    assert sum("go on at the time that was set" in record.message for record in caplog.records) == 1
    assert collector.clock.jumps_back == 1


@pytest.mark.parametrize("full", [False, True])
def test_rows_in_the_future_that_wait_are_dropped_and_news_are_told_as_of_now(full: bool) -> None:
    table_of: dict[str, list[pa.Table]] = {"samples": [], "inventory": []}

    class Folder:
        def land(self, kind: str, table: pa.Table) -> None:
            table_of[kind].append(table)

    holding = Holding(Folder(), max_rows=100)
    if full:  # as after a landing that failed
        batch = holding.take()
        batch.tables["samples"] = [samples(START_MS), samples(START_MS + 10**9, START_MS + 1)]
        holding.give_back(batch)
    else:
        holding.add_table("samples", samples(START_MS, START_MS + 10**9, START_MS + 1))
    seen = {"node": "n1", "gpu": "GPU-1", "seen_at": START + DAYS}
    holding.add_table("inventory", pa.Table.from_pylist([seen], schema=LANDED_INVENTORY))
    assert without_future(holding, START, START_MS + MINUTE_MS) == 1
    assert holding.rows == 2
    assert holding.land(holding.take())
    assert sum(table.num_rows for table in table_of["samples"]) == 2
    assert [row["seen_at"] for row in table_of["inventory"][0].to_pylist()] == [START]


def test_an_exporters_own_wrong_stamp_holds_for_an_hour_at_most(caplog: pytest.LogCaptureFixture) -> None:
    newest = NewestRows()
    month_ms = START_MS + round(DAYS.total_seconds() * 1000)
    kept = [newest.keep(samples(month_ms), START_MS).num_rows]
    kept += [newest.keep(samples(month_ms), START_MS).num_rows]  # the same row again
    kept += [newest.keep(samples(START_MS + at), START_MS + at).num_rows for at in (1, 2, 2)]
    assert kept == [1, 0, 1, 1, 0]
    assert (newest.dropped, newest.forgotten) == (2, 1)
    assert [record.message for record in caplog.records] == [
        "rows of n1 were stamped over an hour in the future; rows of now are taken again"
    ]
    soon_ms = START_MS + 50 * MINUTE_MS
    assert newest.keep(samples(soon_ms), START_MS).num_rows == 1
    assert newest.keep(samples(START_MS + 3), START_MS + 3).num_rows == 0  # within the hour order holds


def test_newest_times_after_an_instant_can_be_forgotten() -> None:
    newest = NewestRows()
    newest.keep(samples(START_MS + MINUTE_MS))
    assert newest.forget_after(START_MS + MINUTE_MS) == 0
    assert newest.forget_after(START_MS) == 1
    assert newest.keep(samples(START_MS)).num_rows == 1
