"""A node whose driver is built here, and a collector on it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

STUB = Path(__file__).with_name("nvml_stub.c")
PREDRAIN = [sys.executable, "-c", "from predrain.command import main; main()"]

GPU = """
{i}.uuid=GPU-{i}
{i}.serial=132{i}
{i}.model=NVIDIA H200
{i}.pci=00000000:{i}B:00.0
{i}.temperature=4{i}
{i}.margin=-3
{i}.slowdown=90
{i}.power=123456
{i}.power_limit=700000
{i}.clock_sm=1980
{i}.clock_memory=3201
{i}.util=97
{i}.util_memory=55
{i}.encoder=1
{i}.decoder=2
{i}.memory_used=1073741824
{i}.memory_free=2147483648
{i}.memory_reserved=536870912
{i}.pstate=0
{i}.pcie_gen=5
{i}.pcie_width=16
{i}.reasons=132
{i}.violation.0=5000000001
{i}.violation.1=7
{i}.violation.5=9
{i}.fabric=1
{i}.field.82=66
{i}.field.83=54700000000
{i}.field.186=130000
{i}.field.3=1
{i}.field.4=2
{i}.field.5=17000001
{i}.field.6=4
{i}.field.142=5
{i}.field.143=6
{i}.field.144=1
{i}.field.145=0
{i}.field.94=11
{i}.field.230=1
{i}.sram.parity=1
{i}.sram.secded=2
{i}.sram.corrected=8
{i}.sram.exceeded=1
{i}.ecc.0.0.2=21
{i}.ecc.1.0.2=22
{i}.retired.0=3
{i}.retired.1=0
{i}.pending=1
{i}.link.0.up=1
{i}.link.0.0=10
{i}.link.0.1=1
{i}.link.1.up=1
{i}.link.1.0=20
{i}.link.1.1=2
{i}.link.2.up=0
{i}.link.2.0=4000
{i}.gpm.1=50
{i}.gpm.2=25.5
{i}.gpm.20=2
{i}.fan=4294967295
"""


class Node:
    """A node: the driver's state file, the environment that finds its library, and a collector on it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.state = folder / "state.txt"
        self.spool = folder / "spool"
        self.target = folder / "target"
        self.target.mkdir()
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB_STATE": str(self.state)}
        self.lines: dict[str, str] = {}
        self.set(driver="580.95.05", count="2", gpm="1")
        for gpu in range(2):
            self.set(**dict(line.split("=", 1) for line in GPU.format(i=gpu).split("\n") if line))

    def set(self, **lines: str | None) -> None:
        for key, value in lines.items():
            if value is None:
                self.lines.pop(key, None)
            else:
                self.lines[key] = value
        temporary = self.state.with_suffix(".new")
        temporary.write_text("".join(f"{key}={value}\n" for key, value in self.lines.items()))
        temporary.replace(self.state)

    def once(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PREDRAIN, "collect", "nvml", "--spool", str(self.spool), "--node", "node7", "--once", "--json", *options],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def daemon(self, *options: str) -> subprocess.Popen[str]:
        with (self.folder / "log.txt").open("a") as log:
            return subprocess.Popen(
                [*PREDRAIN, "collect", "nvml", "--spool", str(self.spool), "--node", "node7", *options],
                env=self.env,
                cwd=self.folder,
                stderr=log,
                stdout=subprocess.DEVNULL,
                text=True,
            )

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


def build_library(folder: Path) -> Path:
    """Build the stand-in for the driver's library; return the folder that holds it."""
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


@contextmanager
def daemons_of(node: Node) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start daemons, and leave none behind."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        started.append(node.daemon(*options))
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            each.kill()
            each.wait(120)
