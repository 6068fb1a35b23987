from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.fleets.lifetimes import Lifetimes, make_lifetimes, write_lifetimes


@pytest.fixture(scope="module")
def lives() -> Lifetimes:
    return make_lifetimes(6000, 6, 100)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_lifetimes(tmp_path / name, devices=400, years=2, seed=100)
    for file in ("events.csv", "inventory.csv"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_bad_batch_fails_ever_more_and_the_next_one_hardly_ever(lives: Lifetimes) -> None:
    by_year = np.bincount((lives.event_day / 365.25).astype(int), minlength=6)[:6]
    assert by_year[0] < by_year[1] / 3
    assert by_year[1] < by_year[2] / 2
    late = lives.installed > 4 * 365.25
    served = (np.minimum(lives.removed, 2191) - lives.installed)[late].sum() / 365.25
    failed = np.isin(lives.event_device, lives.device[late]).sum()
    assert failed / served < 0.02


def test_the_top_cage_fails_about_three_times_as_often_as_the_bottom_one(lives: Lifetimes) -> None:
    cage = np.bincount((lives.event_slot // 32) % 3, minlength=3)
    assert 2.0 < cage[2] / cage[0] < 4.5


def test_about_as_many_devices_live_as_were_asked_for(lives: Lifetimes) -> None:
    assert 5000 < len(np.unique(lives.device)) < 7000
    assert len(np.unique(lives.slot)) == round(6000 * 18_688 / 30_207)


def test_no_device_is_in_two_places_and_events_fall_into_stays(lives: Lifetimes) -> None:
    frame = pd.DataFrame({"slot": lives.slot, "from": lives.installed, "to": lives.removed})
    frame = frame.sort_values(["slot", "from"])
    following = frame.groupby("slot")["from"].shift(-1)
    assert (frame["to"][following.notna()] <= following[following.notna()]).all()
    first = pd.Series(lives.installed, index=lives.device).groupby(level=0).min()
    last = pd.Series(lives.removed, index=lives.device).groupby(level=0).max()
    assert (lives.event_day >= first.loc[lives.event_device].to_numpy()).all()
    assert (lives.event_day <= last.loc[lives.event_device].to_numpy() + 1e-9).all()


def test_the_batch_is_written_nowhere(tmp_path: Path) -> None:
    write_lifetimes(tmp_path, devices=400, years=2, seed=100)
    assert list(pd.read_csv(tmp_path / "inventory.csv").columns) == [
        *("gpu", "node", "slot", "rack", "cage", "blade", "column", "installed_at", "removed_at"),
    ]
    assert list(pd.read_csv(tmp_path / "events.csv").columns) == ["timestamp", "node", "gpu", "type", "code"]


def test_a_fleet_too_small_and_short_to_fail_is_written_all_the_same(tmp_path: Path) -> None:
    counts = write_lifetimes(tmp_path, devices=20, years=1, seed=100)
    assert counts["failures"] == 0
    assert len(pd.read_csv(tmp_path / "events.csv")) == 0
