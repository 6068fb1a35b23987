"""The NVML collector with the real binding over a driver library that is built here."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.processes import PREDRAIN
from tests.waiting import wait

pytestmark = pytest.mark.system

STUB = Path(__file__).with_name("nvml_stub.c")

# What a GPU of the stand-in answers: its lines in nvml_stub.c's file, without the GPU's number before them.
GPU = """
uuid=GPU-{i} serial=132{i} model=NVIDIA-H200 pci=00000000:{i}B:00.0 temperature=4{i} margin=-3 slowdown=90
power=123456 power_limit=700000 clock_sm=1980 clock_memory=3201 util=97 util_memory=55 encoder=1 decoder=2
memory_used=1073741824 memory_free=2147483648 memory_reserved=536870912 pstate=0 pcie_gen=5 pcie_width=16
reasons=132 violation.0=5000000001 violation.1=7 violation.5=9 fabric=1 field.82=66 field.83=54700000000
field.186=130000 field.3=1 field.4=2 field.5=17000001 field.6=4 field.142=5 field.143=6 field.144=1 field.145=0
field.94=11 field.230=1 sram.parity=1 sram.secded=2 sram.corrected=8 sram.exceeded=1 ecc.0.0.2=21 ecc.1.0.2=22
retired.0=3 retired.1=0 pending=1 link.0.0=10 link.0.1=1 link.1.0=20 link.1.1=2 gpm.1=50 gpm.2=25.5 gpm.20=2
fan=4294967295
"""
READ = """
gpu_temp_c=40 mem_temp_c=66 gpu_margin_c=-3 slowdown_temp_c=90 power_w=123.456 power_instant_w=130 power_limit_w=700
energy_mj=54700000000 power_violation_ns=5000000001 thermal_violation_ns=7 reliability_violation_ns=9
sm_clock_mhz=1980 mem_clock_mhz=3201 gpu_util_pct=97 mem_util_pct=55 enc_util_pct=1 dec_util_pct=2
fb_used_mib=1024 fb_free_mib=2048 fb_reserved_mib=512
gr_engine_active_ratio=0.5 sm_active_ratio=0.255 pcie_tx_bytes_s=2097152
ecc_sbe_volatile_total=1 ecc_dbe_volatile_total=2 ecc_sbe_aggregate_total=17000001 ecc_dbe_aggregate_total=4
ecc_sbe_dram_volatile_total=21 ecc_dbe_dram_volatile_total=22 ecc_sbe_sram_volatile_total=8
ecc_dbe_sram_volatile_total=3 sram_threshold_exceeded=1
retired_pages_sbe_total=3 retired_pages_dbe_total=0 retired_pages_pending=1
row_remap_correctable_total=5 row_remap_uncorrectable_total=6 row_remap_pending=1 row_remap_failure=0
pcie_replay_total=11 pcie_link_gen=5 pcie_link_width=16 nvlink_replay_total=30 nvlink_recovery_total=3
clocks_event_reasons=132 pstate=0 recovery_action=1 fabric_health=1 channels_reported=48
"""


class Node:
    """A node: the driver's state file, the environment that finds its library, and a collector on it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.state = folder / "state.txt"
        self.spool = folder / "spool"
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB_STATE": str(self.state)}
        self.lines: dict[str, str] = {}
        self.set(driver="580.95.05", count="2", gpm="1")
        for gpu in range(2):
            self.set(**dict(f"{gpu}.{line}".split("=", 1) for line in GPU.format(i=gpu).split()))

    def set(self, **lines: str | None) -> None:
        for key, value in lines.items():
            if value is None:
                self.lines.pop(key, None)
            else:
                self.lines[key] = value
        temporary = self.state.with_suffix(".new")
        temporary.write_text("".join(f"{key}={value}\n" for key, value in self.lines.items()))
        temporary.replace(self.state)

    def command(self, *options: str) -> list[str]:
        return [*PREDRAIN, "collect", "nvml", "--spool", str(self.spool), "--node", "node7", *options]

    def once(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("--once", "--json"),
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    def daemon(self, *options: str) -> subprocess.Popen[str]:
        with (self.folder / "log.txt").open("a") as log:
            return subprocess.Popen(
                self.command("--interval", "1s", *options),
                env=self.env, cwd=self.folder, stderr=log, stdout=subprocess.DEVNULL, text=True,
            )  # fmt: skip

    def rows(self, kind: str, root: Path | None = None) -> list[dict[str, Any]]:
        paths = sorted(((root or self.spool) / kind).glob("*.parquet"))
        return [row for path in paths for row in _read(path)]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as stored:
            rows: list[dict[str, Any]] = stored.read().to_pylist()
            return rows
    except FileNotFoundError:  # pushed meanwhile
        return []


def stop(daemon: subprocess.Popen[str]) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(120) == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds a stand-in for the driver's library."""
    folder = tmp_path_factory.mktemp("library")
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    subprocess.run(
        [
            *("gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"),
            *("-o", str(folder / "libnvidia-ml.so.1"), str(STUB)),
        ],
        check=True,
        timeout=300,
    )
    return folder


@pytest.fixture
def node(tmp_path: Path, library: Path) -> Node:
    return Node(tmp_path, library)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def daemons(node: Node) -> Iterator[Start]:
    """Starts daemons, and leaves none behind."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        started.append(node.daemon(*options))
        wait(lambda: "listening for XIDs of" in node.log())
        return started[-1]

    yield start
    for daemon in started:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(120)


def test_one_reading_has_every_value_in_our_units(node: Node) -> None:
    run = node.once()
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["samples"] == 2
    row, other = node.rows("samples")
    assert (row["node"], row["gpu"], other["gpu"]) == ("node7", "GPU-0", "GPU-1")
    given = {key: value for key, value in row.items() if value is not None}
    for key in ("timestamp", "node", "gpu", "scrape_duration_s", "scrape_failures_total"):
        del given[key]
    expected = {name: float(value) for name, value in (pair.split("=") for pair in READ.split())}
    assert given == pytest.approx(expected, rel=1e-6)
    seen = node.rows("inventory")[0]
    assert (seen["slot"], seen["pci_bus_id"], seen["serial"]) == ("0", "00000000:0b:00", "1320")
    assert (seen["model"], seen["driver"]) == ("NVIDIA-H200", "580.95.05")
    assert seen["nvlink_domain"] == "ab" * 16 + ".7"
    assert node.rows("events") == []


def test_xids_land_at_once_and_a_lost_gpu_is_reported_once_and_stops_neither_the_others_nor_their_xids(
    node: Node, daemons: Start
) -> None:
    node.env["NVML_STUB_PRINTS"] = "1"
    daemon = daemons()
    node.set(xid="1:0:48")
    wait(lambda: len(node.rows("events")) == 1)
    node.set(**{"0.lost": "15"})
    wait(lambda: "listening for XIDs of 1 GPUs" in node.log())
    wait(lambda: len(node.rows("events")) == 2)
    node.set(xid="2:1:63")
    wait(lambda: len(node.rows("events")) == 3)
    time.sleep(5)
    stop(daemon)
    xid, lost, other = sorted(node.rows("events"), key=lambda event: event["timestamp"])
    assert [(event["type"], event["code"], event["gpu"]) for event in (xid, lost, other)] == [
        ("xid", "48", "GPU-0"),
        ("other", "gpu_lost", "GPU-0"),
        ("xid", "63", "GPU-1"),
    ]
    assert (xid["source"], xid["node"], xid["known_at"]) == ("nvml", "node7", xid["timestamp"])
    assert lost["pci_bus_id"] == "00000000:0b:00"
    samples = node.rows("samples")
    assert {row["gpu"] for row in samples if row["timestamp"] > lost["timestamp"]} == {"GPU-1"}
    assert len(samples) == len({(row["gpu"], row["timestamp"]) for row in samples})
    # A restart does not tell the same loss again; the return is heard by watching all GPUs again.
    daemon = daemons()
    wait(lambda: node.log().count("listening for XIDs of 1 GPUs") == 2)
    node.set(**{"0.lost": None})
    wait(lambda: node.log().count("listening for XIDs of 2 GPUs") == 2)
    stop(daemon)
    assert len(node.rows("events")) == 3


def test_a_driver_reload_is_survived_and_a_new_version_seen(node: Node, daemons: Start) -> None:
    daemon = daemons()
    node.set(init="9", epoch="1")
    wait(lambda: "driver_not_loaded" in node.log() or "uninitialized" in node.log())
    node.set(init=None, driver="590.10", **{"0.field.83": "5"})
    wait(lambda: "driver 590.10 opened" in node.log())
    wait(lambda: node.log().count("listening for XIDs of 2 GPUs") == 2)
    node.set(xid="1:0:31")
    wait(lambda: node.rows("events"))
    stop(daemon)
    assert [(event["type"], event["code"], event["gpu"]) for event in node.rows("events")] == [("xid", "31", "GPU-0")]
    energy = [row["energy_mj"] for row in node.rows("samples") if row["gpu"] == "GPU-0"]
    assert (energy[0], energy[-1]) == (54700000000.0, 5.0)
    assert {row["driver"] for row in node.rows("inventory")} == {"580.95.05", "590.10"}


def test_a_gpu_that_blocks_the_driver_stops_nothing_and_no_process_outlives_a_killed_daemon(
    node: Node, daemons: Start
) -> None:
    daemon = daemons()
    node.set(**{"0.hang": "1"})
    wait(lambda: node.rows("events"))
    hung_at = node.rows("events")[0]["timestamp"]
    time.sleep(5)
    stop(daemon)
    assert [(event["type"], event["code"], event["gpu"]) for event in node.rows("events")] == [
        ("other", "nvml_hang", "GPU-0")
    ]
    assert {row["gpu"] for row in node.rows("samples") if row["timestamp"] > hung_at} == {"GPU-1"}
    node.set(**{"0.hang": None})
    daemon = daemons()
    wait(lambda: node.log().count("listening for XIDs of 2 GPUs") == 2)
    node.set(**{"0.hang": "1"})
    time.sleep(1.5)  # the next reading now stands in the call
    threads = Path(f"/proc/{daemon.pid}/task").iterdir()
    (child,) = (pid for task in threads for pid in (task / "children").read_text().split())
    daemon.kill()
    daemon.wait(120)
    wait(lambda: not _runs(child))


def _runs(pid: str) -> bool:
    try:
        return b"telemetry.collect.nvml.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
