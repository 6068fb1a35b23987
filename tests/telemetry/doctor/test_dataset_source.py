"""Looking at a dataset."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.dataset_source import observe_dataset
from telemetry.importing.importer import import_dataset
from tests.telemetry.doctor.looks import H100

START = datetime(2026, 1, 1, tzinfo=UTC)
HOURS = 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    times = [START + timedelta(hours=hour) for hour in range(HOURS)]
    gpus = [f"GPU-{number}" for number in range(4)]
    samples = pd.DataFrame(
        [
            {
                "timestamp": at.isoformat(),
                "node": f"n{number // 2}",
                "gpu": gpu,
                "gpu_temp_c": 40.0 + hour % 5,
                "power_w": 100.0,
                "mem_temp_c": 50.0 + hour % 3 if number < 2 else np.nan,
                "pcie_replay_total": float(hour) if hour % 2 else np.nan,
            }
            for number, gpu in enumerate(gpus)
            for hour, at in enumerate(times)
        ]
    )
    samples.to_csv(folder / "samples.csv", index=False)
    pd.DataFrame(
        {
            "gpu": gpus,
            "node": ["n0", "n0", "n1", "n1"],
            "model": "NVIDIA H100 80GB HBM3",
            "installed_at": "2025-12-01T00:00Z",
        }
    ).to_csv(folder / "inventory.csv", index=False)
    pd.DataFrame(
        {"timestamp": ["2026-01-01T02:00Z"], "node": ["n0"], "gpu": ["GPU-0"], "type": ["xid"], "code": ["79"]}
    ).to_csv(folder / "events.csv", index=False)
    import_dataset(
        folder / "fleet",
        samples=[folder / "samples.csv"],
        events=[folder / "events.csv"],
        inventory=folder / "inventory.csv",
        jobs=None,
        mapping=None,
        step=timedelta(hours=1),
        channels=dict(CATALOGUE),
        dedupe=timedelta(seconds=60),
        delay=timedelta(minutes=10),
    )
    return folder / "fleet"


def test_channels_are_counted_over_gpus_and_rows(dataset: Path) -> None:
    seen = observe_dataset(dataset, channels=CATALOGUE, now=START + timedelta(days=1))
    assert (seen.units, seen.nodes, seen.xid_events) == (4, 2, True)
    assert dict(seen.models) == {H100: 4}
    assert seen.channels["gpu_temp_c"].gpus == 4
    assert seen.channels["gpu_temp_c"].null_share == 0.0
    assert seen.channels["mem_temp_c"].gpus == 2
    assert seen.channels["pcie_replay_total"].null_share == pytest.approx(0.5)
    assert seen.facts["step"] == "1h"
    assert seen.facts["XIDs"].startswith("1")


def test_what_events_lack_and_age_are_findings(dataset: Path) -> None:
    seen = observe_dataset(dataset, channels=CATALOGUE, now=START + timedelta(days=30))
    told = {each.what: each.problem for each in seen.findings}
    assert told["no repair and no replacement is among the events: incidents end only by time"] is False
    assert told["the newest row is 29 days old"] is False
    assert not any("XID" in what for what in told)


def test_a_silent_gpu_is_told_and_is_no_missing_channel(dataset: Path, tmp_path: Path) -> None:
    samples = pd.read_csv(dataset.parent / "samples.csv")
    samples[samples["gpu"] != "GPU-3"].to_csv(tmp_path / "samples.csv", index=False)
    import_dataset(
        tmp_path / "fleet",
        samples=[tmp_path / "samples.csv"],
        inventory=dataset.parent / "inventory.csv",
        step=timedelta(hours=1),
        channels=CATALOGUE,
        dedupe=timedelta(seconds=60),
        delay=timedelta(minutes=10),
    )
    seen = observe_dataset(tmp_path / "fleet", channels=CATALOGUE, now=START + timedelta(days=1))
    assert (seen.units, seen.models) == (3, {H100: 3})
    assert seen.findings[0].what == ("1 GPUs of the inventory sent nothing in the newest 7d, such as GPU-3 on n1")
    assert not [
        each for each in observe_dataset(dataset, channels=CATALOGUE, now=START).findings if "sent" in each.what
    ]
