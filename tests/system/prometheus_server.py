"""A real Prometheus for tests: its own port and data, loaded from OpenMetrics text by promtool."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import answers, running
from tests.waiting import free_port, wait

CONFIG = "global:\n  scrape_interval: 1h\n"


def need_prometheus() -> None:
    """Skip the test where Prometheus is not installed."""
    for tool in ("prometheus", "promtool"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: apt-get install prometheus")


def load_blocks(openmetrics: Path, data: Path) -> None:
    """Make a data folder from an OpenMetrics file with time stamps."""
    made = subprocess.run(
        [
            "promtool",
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--max-block-duration=768h",  # not listed by --help; without it the text is read once for every two hours
            "--quiet",
            openmetrics,
            data,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr


@contextmanager
def prometheus(data: Path, *options: str, config: str = CONFIG, program: str | Path = "prometheus") -> Iterator[str]:
    """Run a server on a data folder until the block ends; gives its address."""
    data.mkdir(parents=True, exist_ok=True)
    file, log, port = data.with_name(f"{data.name}.yml"), data.with_name(f"{data.name}.log"), free_port()
    file.write_text(config)
    flags = (f"--config.file={file}", f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{port}")
    command = [str(program), *flags, "--storage.tsdb.retention.time=100y", "--log.level=warn", *options]
    with running(command, log) as process:
        wait(lambda: process.poll() is not None or answers(port, "/-/ready"))
        assert process.poll() is None, log.read_text()[-2000:]
        yield f"http://127.0.0.1:{port}"
