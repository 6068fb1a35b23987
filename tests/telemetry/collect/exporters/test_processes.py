"""Collectors that are real processes: two at once, killed, ended by a signal."""

import json
import signal
import socket
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from tests.telemetry.collect.exporters.exporter_pages import landed
from tests.telemetry.collect.exporters.page_server import page_server, start_collector


def check_whole(live: Path) -> Counter[str]:
    """Check that every file can be read and no page counts twice; return the rows by GPU."""
    for kind in ("samples", "inventory", "events"):
        for path in (live / kind).glob("*"):
            assert path.suffix == ".parquet"
            assert pq.read_table(path).num_rows > 0
    rows = landed(live, "samples").to_pylist()
    assert max(Counter((row["gpu"], row["energy_mj"]) for row in rows).values()) == 1
    assert max(Counter((row["gpu"], row["timestamp"]) for row in rows).values()) == 1
    return Counter(row["gpu"] for row in rows)


def test_a_second_collector_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    with page_server() as server:
        first = start_collector(dataset, server.targets(4))
        try:
            server.wait_for(8)
            second = start_collector(dataset, server.targets(4))
            assert "another collector scrapes for this dataset" in second.communicate(timeout=90)[1]
            assert second.returncode == 1
        finally:
            first.kill()
            first.communicate()
        third = start_collector(dataset, server.targets(4), "--once")
        _, err = third.communicate(timeout=90)
        assert third.returncode == 0, err
    assert len(check_whole(tmp_path / "fleet.live")) == 8


def test_a_signal_lands_everything_and_the_collector_reports_its_state(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with page_server() as server:
        targets = server.targets(2) + ",127.0.0.1:1/dead"
        process = start_collector(dataset, targets, "--listen", listen, "--json")
        try:
            server.wait_for(6)
            assert urllib.request.urlopen(f"http://{listen}/healthz", timeout=60).read() == b"ok\n"
            metrics = urllib.request.urlopen(f"http://{listen}/metrics", timeout=60).read().decode()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, err
    report = json.loads(out)
    assert (
        report["rows_written"] == 2 * report["scrapes_succeeded"] == sum(check_whole(tmp_path / "fleet.live").values())
    )
    assert report["scrapes_failed"] > 0
    assert "predrain_exporters_targets_owned 3.0\n" in metrics
    assert 'predrain_exporters_targets{state="failing"} 1.0\n' in metrics
