"""Collectors that are real processes: killed at every step of writing, two at once, ended by a signal."""

import itertools
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from telemetry.exporters.ownership import Ownership
from telemetry.exporters.targets import target_hash
from tests.telemetry.exporters.exporter_pages import landed
from tests.telemetry.exporters.page_server import ROOT, page_server, start_collector

HOLD = """
import sys, time
from pathlib import Path
from telemetry.exporters.ownership import Ownership
owner = Ownership(Path(sys.argv[1]))
print(*[owner.acquire(url) for url in sys.argv[2:]], flush=True)
time.sleep(60)
"""


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


def test_a_target_belongs_to_one_process_and_is_free_when_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "state" / "lock"
    urls = [f"http://n{number}:9400/metrics" for number in range(3)]
    command = [sys.executable, "-c", HOLD, str(path), *urls[:2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline().split() == ["True", "True"]
        with Ownership(path) as owner:
            assert [owner.acquire(url) for url in urls] == [False, False, True]
            assert [owner.owns(url) for url in urls] == [False, False, True]
            other.kill()
            other.wait()
            assert [owner.acquire(url) for url in urls] == [True, True, True]


def test_targets_that_share_a_byte_are_held_until_both_are_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = "http://n0:9400/metrics"
    second = next(
        url
        for url in (f"http://n{number}:9400/metrics" for number in itertools.count(1))
        if target_hash(url) % 8 == target_hash(first) % 8
    )
    ask = [sys.executable, "-c", HOLD.replace("owner = Ownership(Path(sys.argv[1]))", "").replace("time.sleep(60)", "")]
    ask[2] = ask[2].replace("print", "owner = Ownership(Path(sys.argv[1]), positions=8)\nprint")

    def other_may_have(url: str) -> bool:
        done = subprocess.run([*ask, str(path), url], capture_output=True, text=True, cwd=ROOT, check=True)
        return done.stdout.strip() == "True"

    with Ownership(path, positions=8) as owner:
        assert owner.acquire(first)
        assert owner.acquire(second)
        owner.release(first)
        assert not owner.owns(first)
        assert owner.owns(second)
        assert not other_may_have(first)
        owner.release(second)
        owner.release(second)
        assert other_may_have(first)


def test_a_process_killed_at_any_step_leaves_whole_files_and_nothing_twice(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_points.py")
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    points = int(done.stdout)
    assert points >= 30
    lives = Counter(int(row["energy_mj"] // 1_000_000) for row in landed(tmp_path, "samples").to_pylist())
    check_whole(tmp_path)
    # The last life was not killed: it has all its rows, and each life has at least those of the one before.
    assert lives[points + 1] == max(lives.values()) >= 16
    counts = [lives[life] for life in range(1, points + 2)]
    assert counts == sorted(counts)
    assert json.loads((tmp_path / "state" / "exporters.json").read_text())["targets"].keys() == {"n1:9400", "n2:9400"}


@pytest.mark.system
def test_two_collectors_share_the_targets_and_one_takes_over_from_the_other(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    with page_server() as server:
        first = start_collector(dataset, server.targets(4))
        server.wait_for(8)
        second = start_collector(dataset, server.targets(4))
        try:
            time.sleep(1.5)
            server.wait_for(8)
            first.kill()
            first.communicate()
            server.wait_for(24)
            second.send_signal(signal.SIGTERM)
            _, err = second.communicate(timeout=90)
        finally:
            for process in (first, second):
                process.kill()
                process.communicate()
        assert second.returncode == 0, err
        assert "4 of 4 targets are scraped by this process" in err
        for times in server.requests.values():
            # Two at once would halve the distance between most requests.
            gaps = sorted(b - a for a, b in itertools.pairwise(times))
            assert gaps[len(gaps) // 2] > 0.15
    assert len(check_whole(tmp_path / "fleet.live")) == 8


@pytest.mark.system
def test_an_exporter_that_restarts_is_scraped_on_and_its_failures_are_told(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    with page_server() as server:
        process = start_collector(dataset, server.targets(1))
        try:
            server.wait_for(4)
        except AssertionError:
            process.kill()
            raise
    try:
        time.sleep(1.5)
        with page_server(server):
            server.wait_for(4)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    check_whole(tmp_path / "fleet.live")
    rows = sorted(
        landed(tmp_path / "fleet.live", "samples").to_pylist(), key=lambda row: (row["gpu"], row["timestamp"])
    )
    mine = [row for row in rows if row["gpu"] == "GPU-n0-0"]
    failures = [row["scrape_failures_total"] for row in mine]
    assert failures[0] == 0
    assert failures == sorted(failures)
    assert failures[-1] >= 1
    gaps = [b["timestamp"] - a["timestamp"] for a, b in itertools.pairwise(mine)]
    assert max(gaps).total_seconds() > 1.2


def test_a_signal_lands_everything_and_the_collector_tells_how_it_is(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with page_server() as server:
        targets = server.targets(2) + ",127.0.0.1:1/dead"
        process = start_collector(dataset, targets, "--listen", listen, "--json", interval="0.5s")
        try:
            server.wait_for(6)
            assert urllib.request.urlopen(f"http://{listen}/healthz", timeout=5).read() == b"ok\n"
            metrics = urllib.request.urlopen(f"http://{listen}/metrics", timeout=5).read().decode()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, err
    told = json.loads(out)
    assert told["rows_landed"] == 2 * told["good"] == sum(check_whole(tmp_path / "fleet.live").values())
    assert told["failed"] > 0
    assert "predrain_exporters_targets_owned 3.0\n" in metrics
    assert 'predrain_exporters_targets_in{state="failing"} 1.0\n' in metrics
    state = json.loads((tmp_path / "fleet.live" / "state" / "exporters.json").read_text())
    dead = state["targets"]["127.0.0.1:1/dead"]
    assert (dead["last_failure_kind"], dead["last_success_at"]) == ("refused", None)
    assert dead["failures_total"] == dead["failures"]["refused"] > 0
    good = state["targets"][f"127.0.0.1:{server.port}/n0"]
    assert good["gpus"] == {"GPU-n0-0": 3, "GPU-n0-1": 3}
    assert good["failures_total"] == 0


def test_one_round_of_targets_that_all_fail_is_an_error(tmp_path: Path) -> None:
    process = start_collector(tmp_path / "fleet", "127.0.0.1:1", "--once")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert err.splitlines()[-1] == (
        "predrain: error: none of 1 targets could be scraped, such as 127.0.0.1:1: refused: nobody listens there "
        "(--targets). Check the addresses, and that the exporters run."
    )
