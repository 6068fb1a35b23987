"""Metrics of exporters that operators run besides the current dcgm-exporter."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from telemetry.accounting import Accounting
from telemetry.collect.openmetrics import stage_dump
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.staging.folder import StagingFolder
from tests.telemetry.helpers import gpu

START_S = 1_793_491_200
LABELS = f'uuid="{gpu(0)}",instance="node-0:9835"'


def staged(folder: Path, lines: list[str], kind: str) -> pd.DataFrame:
    (folder / "dump.om").write_text("\n".join([*lines, "# EOF", ""]))
    staging = StagingFolder(folder / "fleet.live", writer="openmetrics", channels=CATALOGUE)
    stage_dump(folder / "dump.om", staging, SeriesCatalogue(CATALOGUE), accounting=Accounting(), delay=timedelta(0))
    return pd.concat([pd.read_parquet(file) for file in (folder / "fleet.live" / kind).glob("*.parquet")])


@pytest.mark.parametrize(
    ("metric", "value", "channel", "expected"),
    [
        ("dcgm_gpu_temp", 50, "gpu_temp_c", 50),  # names of dcgm-exporter 1.x
        ("dcgm_gpu_utilization", 90, "gpu_util_pct", 90),
        ("dcgm_memory_clock", 1593, "mem_clock_mhz", 1593),
        ("dcgm_ecc_dbe_volatile_total", 1, "ecc_dbe_volatile_total", 1),
        ("dcgm_nvlink_replay_error_count_total", 2, "nvlink_replay_total", 2),
        ("nvidia_smi_memory_used_bytes", 2**30, "fb_used_mib", 1024),
        ("nvidia_smi_memory_used", 1024, "fb_used_mib", 1024),  # Telegraf's
        ("nvidia_gpu_power_usage_milliwatts", 350_500, "power_w", 350.5),
        ("nvidia_smi_utilization_encoder_ratio", 0.5, "enc_util_pct", 50),  # nvidia_gpu_exporter
        ("nvidia_smi_pcie_throughput_tx_bytes_per_second", 1e9, "pcie_tx_bytes_s", 1e9),
        ("nvidia_smi_ecc_errors_uncorrected_aggregate_sram_threshold_exceeded", 1, "sram_threshold_exceeded", 1),
        ("nvidia_smi_power_draw_average_watts", 627.5, "power_w", 627.5),
    ],
)
def test_a_metric_is_read_in_its_unit(tmp_path: Path, metric: str, value: float, channel: str, expected: float) -> None:
    rows = staged(tmp_path, [f"{metric}{{{LABELS}}} {value} {START_S}"], "samples")
    assert rows[["gpu", "node", channel]].values.tolist() == [[gpu(0), "node-0", expected]]


def test_counts_of_xids_of_two_exporters_rise_each_for_itself(tmp_path: Path) -> None:
    lines = [f"nvidia_smi_temperature_gpu{{{LABELS}}} 50 {START_S + 60 * turn}" for turn in range(6)]
    for turn, (since_start, in_window) in enumerate([(None, None), (1, 1), (1, 1), (3, 2), (3, 1)]):
        for name, count in (("nvidia_smi_xid_errors_total", since_start), ("DCGM_EXP_XID_ERRORS_COUNT", in_window)):
            if count is not None:
                lines.append(f'{name}{{{LABELS},xid="79"}} {count} {START_S + 60 * turn}')
    events = staged(tmp_path, lines, "events").sort_values(["source", "timestamp"])
    sources = ["exporter:DCGM_EXP_XID_ERRORS_COUNT", "exporter:nvidia_smi_xid_errors_total"]
    times = [datetime.fromtimestamp(START_S + seconds, UTC) for seconds in (60, 180)]
    assert events[["source", "timestamp"]].values.tolist() == [[source, time] for source in sources for time in times]
    assert set(events["code"]) == {"79"}
