from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.fleets.disks import CHANNELS, DAY_MS, START, make_drives, write_disks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("disks")
    write_disks(out, devices=5000, days=120, seed=100)
    return out


def samples_of(folder: Path) -> pd.DataFrame:
    return pd.concat([pq.read_table(file).to_pandas() for file in sorted((folder / "samples").iterdir())])


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_disks(tmp_path / name, devices=300, days=30, seed=100)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.parquet"))
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_failure_rates_are_those_of_published_fleets() -> None:
    catalogue, drives = make_drives(20_000, 365, 100)
    inside = drives.installed < 365
    served = np.minimum(drives.removed, 365) - np.maximum(drives.installed, 0)
    years = served[inside].sum() / 365
    assert 0.01 < np.isfinite(drives.failed[inside]).sum() / years < 0.03
    assert (catalogue.yearly >= 0.05).sum() == 3
    with_signs = np.isfinite(drives.onset[np.isfinite(drives.failed)])
    assert 0.4 < with_signs.mean() < 0.65


def test_no_drive_reports_after_it_failed_or_before_it_was_installed(folder: Path) -> None:
    samples, inventory = samples_of(folder), pd.read_parquet(folder / "inventory.parquet")
    events = pd.read_parquet(folder / "events.parquet")
    at = samples.groupby("serial_number")["date"].agg(["min", "max"])
    installed = inventory.set_index("serial_number")["installed"]
    assert (at["min"] >= installed.reindex(at.index)).all()
    failed = events.set_index("serial_number")["date"]
    both = at.index.intersection(failed.index)
    assert len(both) > 10
    assert (at.loc[both, "max"] <= failed.loc[both]).all()


def test_what_decided_the_failures_is_written_nowhere(folder: Path) -> None:
    assert list(samples_of(folder).columns) == ["date", "serial_number", *CHANNELS]
    events = pd.read_parquet(folder / "events.parquet")
    assert list(events.columns) == ["date", "serial_number", "type", "code"]
    inventory = pd.read_parquet(folder / "inventory.parquet")
    assert list(inventory.columns) == [
        *("serial_number", "host", "model", "capacity_bytes", "installed", "removed", "bay"),
    ]


def test_samples_come_at_irregular_times_and_some_attributes_only_from_some_makers(folder: Path) -> None:
    samples = samples_of(folder)
    gaps = samples.sort_values("date").groupby("serial_number")["date"].diff().dropna() / pd.Timedelta(1, "D")
    assert (gaps < 0.9).any()
    assert (gaps > 1.5).any()
    assert 0.8 < gaps.median() < 1.2
    reported = samples.groupby("serial_number")[list(CHANNELS)].count() > 0
    assert reported["smart_5_raw"].mean() > 0.95
    assert 0.1 < reported["smart_188_raw"].mean() < 0.9


def test_error_counts_never_fall_and_are_higher_at_the_end_of_drives_that_fail(folder: Path) -> None:
    samples = samples_of(folder).sort_values(["serial_number", "date"], kind="stable")
    sectors = samples.groupby("serial_number")["smart_5_raw"]
    assert (sectors.diff().dropna() >= 0).all()
    failed = set(pd.read_parquet(folder / "events.parquet")["serial_number"])
    last = sectors.last().dropna() - sectors.first().dropna()
    of_failed = last[last.index.isin(failed)]
    assert (of_failed > 0).mean() > 4 * (last[~last.index.isin(failed)] > 0).mean()


def test_the_year_begins_at_the_stated_instant(folder: Path) -> None:
    first = samples_of(folder)["date"].min()
    assert pd.Timedelta(0) <= first - START < pd.Timedelta(DAY_MS, "ms")
