"""Rounds of scraping in virtual time, with a network made of functions."""

import asyncio
import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pandas as pd
import pyarrow as pa
import pytest

from foundation.errors import InputError
from telemetry.collect.scraping.collector import SCRAPES, ScrapeError, ScrapeSettings
from telemetry.collect.scraping.targets import Target, read_targets
from telemetry.importing.event_runs import is_from_exporter
from telemetry.staging.folder import StagingFolder
from tests.staged import staged_table
from tests.telemetry.collect.exporters.exporter_pages import (
    START,
    FakeFetcher,
    collect,
    exporter_page,
    fleet_time,
    make_collector,
    run_for,
    run_virtual,
)


def node_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def moving(url: str, number: int) -> str:
    return exporter_page(node_of(url), number)


def test_every_target_is_scraped_once_an_interval_at_a_time_of_its_own(tmp_path: Path) -> None:
    fetcher = FakeFetcher(moving)
    collector = collect(tmp_path, fetcher, 299, [f"n{number}" for number in range(40)])
    calls = Counter(url for _, url in fetcher.calls)
    assert set(calls.values()) <= {9, 10}
    assert len(calls) == 40
    for url in calls:
        times = [when for when, called in fetcher.calls if called == url]
        assert all(abs(b - a - 30) < 0.01 for a, b in pairwise(times))
    thirds = Counter(int((when % 30) // 10) for when, _ in fetcher.calls)
    assert min(thirds.values()) > 0.15 * len(fetcher.calls)
    scrapes, samples = (collector.accounting.tables[name] for name in (SCRAPES, "samples"))
    assert scrapes.read == scrapes.used == len(fetcher.calls)
    rows = staged_table(tmp_path, "samples")
    assert rows.num_rows == 2 * len(fetcher.calls) == samples.used == samples.read


def test_the_rows_hold_the_page_and_how_it_was_scraped(tmp_path: Path) -> None:
    collect(tmp_path, moving, 89)
    rows = sorted(staged_table(tmp_path, "samples").to_pylist(), key=lambda row: (row["gpu"], row["timestamp"]))
    assert [row["energy_mj"] for row in rows] == [0.0, 1000.0, 2000.0] * 2
    assert [row["page_age_s"] for row in rows[:3]] == [None, 30.0, 30.0]
    assert {row["channels_reported"] for row in rows} == {3.0}
    assert {row["scrape_failures_total"] for row in rows} == {0.0}
    assert all(abs(row["scrape_duration_s"] - 0.01) < 1e-6 for row in rows)
    assert all(abs(row["clock_skew_s"]) < 0.52 for row in rows), "the server's date has whole seconds"
    seen = staged_table(tmp_path, "inventory").to_pylist()
    assert [(row["gpu"], row["node"], row["driver"]) for row in seen] == [
        ("GPU-n1-0", "n1", "580.1"),
        ("GPU-n1-1", "n1", "580.1"),
    ]


def test_the_next_good_row_counts_the_failures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def answer(url: str, number: int) -> str | Exception:
        return ScrapeError("timeout", "no page") if 1 <= number <= 2 else moving(url, number)

    with caplog.at_level(logging.WARNING):
        collector = collect(tmp_path, answer, 200)
    rows = [row for row in staged_table(tmp_path, "samples").to_pylist() if row["gpu"] == "GPU-n1-0"]
    assert [row["scrape_failures_total"] for row in rows[:2]] == [0.0, 2.0]
    (watch,) = collector.watches.values()
    assert watch.failures == {"timeout": 2}
    assert collector.accounting.tables[SCRAPES].left_out == {"timeout": 2}
    first, again = (record.message for record in caplog.records)
    assert first.startswith("n1:9400: timeout: no page")
    assert again == "n1:9400: recovered after 2 failures"


def test_a_page_that_stands_still_says_for_how_long(tmp_path: Path) -> None:
    def answer(url: str, number: int) -> str:
        return moving(url, number // 2 if number < 6 else 2 if number < 20 else number)

    collect(tmp_path, answer, 30 * 22)
    rows = [row for row in staged_table(tmp_path, "samples").to_pylist() if row["gpu"] == "GPU-n1-0"]
    ages = {row["energy_mj"]: row["page_age_s"] for row in rows}  # of the newest row with these values
    assert ages == {0.0: 30.0, 1000.0: 30.0, 2000.0: 450.0, 20_000.0: 480.0, 21_000.0: 30.0}
    assert len(rows) == 22


def test_xid_counts_that_rise_are_events(tmp_path: Path) -> None:
    counts = [{31: 2}, {31: 2}, {31: 3}, {31: 1, 79: 2}, {}, {79: 1}]

    def answer(url: str, number: int) -> str:
        return exporter_page(node_of(url), number, xids=counts[min(number, len(counts) - 1)])

    collect(tmp_path, answer, 30 * 6)
    events = staged_table(tmp_path, "events").to_pylist()
    assert [(row["gpu"], row["type"], row["code"], row["detail"]) for row in events] == [
        ("GPU-n1-0", "xid", "31", "count rose from 2 to 3"),
        ("GPU-n1-0", "xid", "79", "count rose from 0 to 2"),
        ("GPU-n1-0", "xid", "79", "count rose from 0 to 1"),
    ]
    assert all(row["known_at"] == row["timestamp"] for row in events)
    made = pd.DataFrame({"source": [row["source"] for row in events]})
    assert is_from_exporter(made["source"]).all(), "else they would count in addition to the kernel's"


def test_what_is_known_of_a_target_fills_the_inventory_and_names_the_node(tmp_path: Path) -> None:
    target = Target("http://10.0.0.7:9400/metrics", "worker-7", (("rack", "r12"),))
    collect(tmp_path, lambda _, number: exporter_page("pod-x", number), 0, [target])
    seen = staged_table(tmp_path, "inventory").to_pylist()
    assert {(row["node"], row["rack"]) for row in seen} == {("worker-7", "r12")}
    assert set(staged_table(tmp_path, "samples").column("node").to_pylist()) == {"worker-7"}


MANY = "".join(f'DCGM_FI_DEV_GPU_TEMP{{UUID="GPU-{number}",Hostname="n1"}} 40\n' for number in range(5000))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ("<html>not a page</html>\n", "parse", ""),
        ("# HELP node_load1 text\nnode_load1 0.5\n", "empty", ""),
        ("", "empty", ""),
        (exporter_page("n1", 1).rstrip("\n")[:-300] + "\nDCGM_FI_DEV_GPU_TEMP{gpu", "truncated", ""),
        (MANY, "too_large", "the page has 5000 GPUs, over 4096"),
    ],
)
def test_a_page_with_nothing_or_too_much_is_a_failure(tmp_path: Path, answer: str, kind: str, message: str) -> None:
    (watch,) = collect(tmp_path, lambda *_: answer, 0).watches.values()
    assert (dict(watch.failures), message in str(watch.last_failure)) == ({kind: 1}, True)
    assert staged_table(tmp_path, "samples").num_rows == 0


class FullDisk:
    """A staging whose disk is full for a while."""

    def __init__(self, root: Path, full: tuple[float, float]) -> None:
        self.inner = StagingFolder(root, writer="exporters")
        self.full = full

    def stage(self, kind: Any, table: pa.Table) -> object:
        since = (fleet_time() - START).total_seconds()
        if self.full[0] <= since < self.full[1]:
            raise InputError("the disk is full", "test", "Free space.")
        return self.inner.stage(kind, table)


def test_a_full_disk_is_waited_for_and_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        collector = collect(tmp_path, moving, 600, ["n1", "n2"], staging=FullDisk(tmp_path, (60, 400)))
    rows = staged_table(tmp_path, "samples")
    assert rows.num_rows == 2 * collector.accounting.tables[SCRAPES].read
    keys = {(row["gpu"], row["timestamp"]) for row in rows.to_pylist()}
    assert len(keys) == rows.num_rows
    first, again = (record.message for record in caplog.records)
    assert first.startswith("writing rows: the disk is full")
    assert again.startswith("writing rows: recovered")


def test_a_disk_that_stays_full_drops_the_oldest_and_says_so(tmp_path: Path) -> None:
    disk, limits = FullDisk(tmp_path, (0, 1e9)), ScrapeSettings(max_buffered_rows=10)
    collector = collect(tmp_path, moving, 600, staging=disk, settings=limits)
    samples = collector.accounting.tables["samples"]
    assert 8 <= samples.waiting.total() <= 10
    assert samples.waiting.total() + samples.left_out.total() == samples.read
    assert samples.read == 2 * collector.accounting.tables[SCRAPES].read


def test_an_internal_error_in_one_page_does_not_stop_the_others(tmp_path: Path) -> None:
    class Broken(FakeFetcher):
        async def fetch(self, url: str) -> Any:
            if "bad" in url:
                raise RuntimeError("a bug")
            return await super().fetch(url)

    collector = collect(tmp_path, Broken(moving), 120, ["bad", "n1"])
    assert staged_table(tmp_path, "samples").num_rows >= 6
    assert collector.watches["http://bad:9400/metrics"].failures["parse"] > 0


def test_a_list_that_breaks_keeps_the_targets_that_are_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "targets.json"
    path.write_text('[{"targets": ["n1"]}]')

    async def work() -> None:
        collector = make_collector(tmp_path, FakeFetcher(moving), [])
        collector._read_targets = lambda: read_targets([str(path)])
        running = asyncio.create_task(run_for(collector, 200))
        await asyncio.sleep(1)
        path.write_text('[{"targets": ["n1"')
        await asyncio.sleep(100)
        assert len(collector.watches) == 1
        path.write_text('[{"targets": ["n1", "n2"]}]')
        await running
        assert len(collector.watches) == 2

    run_virtual(work)
    assert caplog.records[0].message.startswith("targets: cannot be parsed: ")


def test_dead_targets_do_not_delay_the_good(tmp_path: Path) -> None:
    class Dead(FakeFetcher):
        async def fetch(self, url: str) -> Any:
            if "dead" in url:
                await asyncio.sleep(10)
                raise ScrapeError("timeout", "no page")
            return await super().fetch(url)

    fetcher = Dead(moving)
    targets = [*(f"dead{number}" for number in range(200)), *(f"n{number}" for number in range(20))]
    collect(tmp_path, fetcher, 1200, targets, settings=ScrapeSettings(concurrency=8))
    calls = Counter(url for when, url in fetcher.calls if when > 1600)  # the first rounds show which are dead
    assert len(calls) == 20
    assert min(calls.values()) >= 19
