"""Looking at a dataset."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.dataset_source import observe_dataset, silent_sources
from tests.telemetry.helpers import DAY, events_frame, gpu, run_import, samples_frame

NOW = (DAY + pd.Timedelta(days=1)).to_pydatetime()


def fleet(folder: Path, *, silent: str = "") -> Path:
    samples = samples_frame(times=24)
    samples.loc[samples["gpu"] > gpu(1), "power_w"] = np.nan
    samples.loc[samples.index % 2 == 0, "ecc_sbe_volatile_total"] = np.nan
    events = events_frame([("02:00", gpu(0), "xid", "79")])
    return run_import(folder, samples=samples[samples["gpu"] != silent], events=events).dataset.path


def test_channels_are_counted_over_gpus_and_rows(tmp_path: Path) -> None:
    seen = observe_dataset(fleet(tmp_path), channels=CATALOGUE, now=NOW)
    assert (seen.units, seen.nodes, seen.xid_events) == (4, 2, True)
    assert dict(seen.models) == {"H100": 4}
    assert (seen.channels["gpu_temp_c"].gpus, seen.channels["gpu_temp_c"].null_share) == (4, 0.0)
    assert seen.channels["power_w"].gpus == 2
    assert seen.channels["ecc_sbe_volatile_total"].null_share == pytest.approx(0.5)
    assert seen.facts["step"] == "10m"
    assert seen.facts["XIDs"].startswith("1")


def test_what_events_lack_and_age_are_findings(tmp_path: Path) -> None:
    seen = observe_dataset(fleet(tmp_path), channels=CATALOGUE, now=NOW + timedelta(days=29))
    problems = {finding.what: finding.problem for finding in seen.findings}
    assert problems == {
        "the events contain no repair or replacement: incidents end by timeout only": False,
        "the newest row is 29 days old": False,
    }


def test_samples_that_come_too_seldom_for_the_step_are_a_problem_with_the_step_to_set(tmp_path: Path) -> None:
    path = run_import(tmp_path, samples=samples_frame(times=24, every="1h")).dataset.path
    finding = observe_dataset(path, channels=CATALOGUE, now=NOW).findings[0]
    assert (
        finding.what == "samples arrive every 1h, but the dataset's step is 10m: scoring treats such units as unknown"
    )
    assert finding.do.startswith("Set `telemetry.step: 1h` ")
    path = run_import(tmp_path, samples=samples_frame(times=24, every="20min"), out="half").dataset.path
    assert not any(
        "samples come" in found.what for found in observe_dataset(path, channels=CATALOGUE, now=NOW).findings
    )


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (range(0, 60, 3), True),
        (range(0, 85, 3), False),  # five days are not long
        (range(0, 60, 10), False),  # too few events to tell
        ([*range(0, 30, 3), 50], False),  # it was silent for three weeks before
    ],
)
def test_a_source_of_events_that_fell_silent_is_named(days: list[int], said: bool) -> None:
    talks = pd.DataFrame({"source": "tickets", "timestamp": [DAY + pd.Timedelta(days=day) for day in days]})
    other = pd.DataFrame({"source": "kernel log", "timestamp": [DAY + pd.Timedelta(days=day) for day in range(90)]})
    found = silent_sources(pd.concat([talks, other]), (DAY + pd.Timedelta(days=89)).to_pydatetime())
    assert [finding.what.split(" for ")[0] for finding in found] == ["no events from the source tickets"] * said


def test_a_silent_gpu_is_reported_and_is_no_missing_channel(tmp_path: Path) -> None:
    seen = observe_dataset(fleet(tmp_path, silent=gpu(3)), channels=CATALOGUE, now=NOW)
    assert (seen.units, seen.models) == (3, {"H100": 3})
    first = f"in the newest 7d, no samples from 1 GPU of the inventory, such as {gpu(3)} on node-1"
    assert seen.findings[0].what == first


def test_a_channel_that_a_failed_gpu_stopped_reporting_is_in_the_whole_history(tmp_path: Path) -> None:
    samples = samples_frame(times=80, every="6h")
    times = pd.to_datetime(samples["timestamp"])
    late = times > times.max() - pd.Timedelta(days=10)
    samples.loc[late, "power_w"] = np.nan
    path = run_import(tmp_path, samples=samples).dataset.path
    assert observe_dataset(path, channels=CATALOGUE, now=NOW).channels["power_w"].gpus == 0
    whole = observe_dataset(path, channels=CATALOGUE, now=NOW, whole_history=True).channels["power_w"]
    assert (whole.gpus, whole.null_share) == (4, pytest.approx(0.5, abs=0.01))


def test_rows_of_a_frozen_instrument_lack_no_channel(tmp_path: Path) -> None:
    samples = samples_frame(times=24)
    samples["xid_last"] = 0
    frozen = samples.index % 4 == 0
    samples.loc[frozen, [name for name in samples if name not in ("timestamp", "node", "gpu", "xid_last")]] = np.nan
    path = run_import(tmp_path, samples=samples).dataset.path
    seen = observe_dataset(path, channels=CATALOGUE, now=NOW)
    assert seen.channels["gpu_temp_c"].null_share == pytest.approx(0)
