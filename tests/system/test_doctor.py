"""The doctor before a real Prometheus."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from foundation.http import connect_to
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import diagnose
from telemetry.doctor.series_source import observe_prometheus
from tests.system.prometheus_server import load_blocks, need_prometheus, prometheus

pytestmark = pytest.mark.system

START = datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
END = START + timedelta(minutes=90)
H100 = "NVIDIA H100 80GB HBM3"
METRICS = {  # value, GPUs, and the end
    "DCGM_FI_DEV_GPU_TEMP": (40, 4, END),
    "DCGM_FI_DEV_MEMORY_TEMP": (9223372036854775794, 4, END),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": (1, 3, END),
    "DCGM_FI_DEV_SM_CLOCK": (1980, 4, START + timedelta(minutes=30)),
    "DCGM_FI_DEV_SHINY": (1, 4, END),
}


def series(name: str, gpu: int, value: int, until: datetime) -> list[str]:
    """Give the samples of one series, scraped every 15 s."""
    labels = (
        f'UUID="GPU-{gpu}",Hostname="node{gpu // 2}",modelName="{H100}",instance="10.0.0.{gpu // 2}:9400",job="dcgm"'
    )
    seconds = range(int(START.timestamp()), int(until.timestamp()), 15)
    return [f"{name}{{{labels}}} {value} {second}" for second in seconds]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_prometheus()
    folder = tmp_path_factory.mktemp("doctor")
    lines = []
    for name, (value, gpus, until) in METRICS.items():
        lines.append(f"# TYPE {name} unknown")
        lines += [line for gpu in range(gpus) for line in series(name, gpu, value, until)]
    (folder / "dump.om").write_text("\n".join([*lines, "# EOF"]) + "\n")
    load_blocks(folder / "dump.om", folder / "data")
    with prometheus(folder / "data") as server:
        yield server


def test_it_reports_what_is_there_for_how_many_and_how_well(url: str) -> None:
    now = END - timedelta(seconds=10)
    seen = observe_prometheus(connect_to(url), channels=CATALOGUE, match='{job="dcgm"}', timeout_s=20.0, now=now)
    assert (seen.units, seen.nodes, dict(seen.models), seen.xid_events) == (4, 2, {H100: 4}, False)
    assert seen.channels["gpu_temp_c"].gpus == 4
    assert (seen.channels["mem_temp_c"].gpus, seen.channels["mem_temp_c"].sentinels) == (0, 4)
    assert seen.channels["pcie_replay_total"].gpus == 3
    assert seen.channels["sm_clock_mhz"].gpus == 0
    assert seen.unknown == ("DCGM_FI_DEV_SHINY",)
    findings = [finding.what for finding in seen.findings]
    assert "sm_clock_mhz stopped within the last day" in findings
    states = {state.channel.name: state.status for state in diagnose(seen, None, "", CATALOGUE).states}
    assert states["pcie_replay_total"] == "partial"
    assert states["mem_temp_c"] == "empty"
    assert states["xid_last"] == "unsure"
    assert states["gpu_temp_c"] == "ok"
