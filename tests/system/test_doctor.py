"""The doctor before a real Prometheus."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from foundation.errors import InputError
from foundation.http import connect_to
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import diagnose
from telemetry.doctor.observation import Observation
from telemetry.doctor.series_source import observe_prometheus
from tests.system.prometheus_server import load_blocks, need_prometheus, prometheus

pytestmark = pytest.mark.system

START = datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
END = START + timedelta(minutes=90)
SCRAPE_S, READ_S = 15, 30
H100 = "NVIDIA H100 80GB HBM3"


def series(name: str, gpu: int, value: object, *, until: datetime = END, job: str = "dcgm") -> list[str]:
    """Give the samples of one series: scraped every 15 s, of an exporter that reads every 30 s."""
    labels = (
        f'UUID="GPU-{gpu}",Hostname="node{gpu // 2}",modelName="{H100}",instance="10.0.0.{gpu // 2}:9400",job="{job}"'
    )
    lines = []
    for number in range(int((until - START).total_seconds()) // SCRAPE_S):
        at = START + timedelta(seconds=number * SCRAPE_S)
        number_read = number * SCRAPE_S // READ_S
        shown = value(number_read) if callable(value) else value
        lines.append(f"{name}{{{labels}}} {shown} {at.timestamp():.0f}")
    return lines


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_prometheus()
    folder = tmp_path_factory.mktemp("doctor")
    metrics: dict[str, Callable[[int], list[str]]] = {
        "DCGM_FI_DEV_GPU_TEMP": lambda gpu: series("DCGM_FI_DEV_GPU_TEMP", gpu, 40 + gpu),
        "DCGM_FI_DEV_MEMORY_TEMP": lambda gpu: series("DCGM_FI_DEV_MEMORY_TEMP", gpu, 9223372036854775794),
        "DCGM_FI_DEV_POWER_USAGE": lambda gpu: series("DCGM_FI_DEV_POWER_USAGE", gpu, lambda read: 300 + read % 7),
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": lambda gpu: (
            series("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", gpu, 1) if gpu < 3 else []
        ),
        "DCGM_FI_DEV_SM_CLOCK": lambda gpu: series(
            "DCGM_FI_DEV_SM_CLOCK", gpu, 1980, until=START + timedelta(minutes=30)
        ),
        "DCGM_FI_DEV_SHINY": lambda gpu: series("DCGM_FI_DEV_SHINY", gpu, 1),
        "job:util:avg": lambda gpu: series("job:util:avg", gpu, 1, job="rules"),
    }
    lines = []
    for name, made in metrics.items():
        lines.append(f"# TYPE {name} unknown")
        lines += [line for gpu in range(4) for line in made(gpu)]
    (folder / "dump.om").write_text("\n".join([*lines, "# EOF"]) + "\n")
    load_blocks(folder / "dump.om", folder / "data")
    with prometheus(folder / "data") as server:
        yield server


def look(url: str, match: str | None = None, at: datetime = END - timedelta(seconds=10)) -> Observation:
    return observe_prometheus(connect_to(url), channels=CATALOGUE, match=match, timeout_s=20.0, now=at)


def test_it_reports_what_is_there_for_how_many_and_how_well(url: str) -> None:
    seen = look(url, '{job="dcgm"}')
    assert (seen.units, seen.nodes, dict(seen.models), seen.xid_events) == (4, 2, {H100: 4}, False)
    assert seen.channels["gpu_temp_c"].gpus == 4
    assert (seen.channels["mem_temp_c"].gpus, seen.channels["mem_temp_c"].sentinels) == (0, 4)
    assert seen.channels["pcie_replay_total"].gpus == 3
    assert seen.channels["sm_clock_mhz"].gpus == 0
    assert seen.unknown == ("DCGM_FI_DEV_SHINY",)
    findings = [finding.what for finding in seen.findings]
    assert "within the last day there was sm_clock_mhz, and now there is none" in findings
    states = {state.channel.name: state.status for state in diagnose(seen, None, "", CATALOGUE).states}
    assert states["pcie_replay_total"] == "partly"
    assert states["mem_temp_c"] == "empty"
    assert states["xid_last"] == "unsure"
    assert states["gpu_temp_c"] == "ok"


def test_no_known_metric_and_a_wrong_address(url: str) -> None:
    with pytest.raises(InputError, match="none of the server's 1 metrics is known"):
        look(url, '{job="rules"}')
    with pytest.raises(InputError, match=r"HTTP 404"):
        look(f"{url}/graph", at=END)
