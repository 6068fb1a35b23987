"""Simulated datasets: the same bytes again, and labels that are what happened."""

import errno
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from features.labels.incidents import find_incidents
from foundation.errors import InputError
from pipeline.params import load_params
from simulator.randomness import poisson, stream
from simulator.samples import channels
from simulator.scenarios import STEPS, draw_fleet
from simulator.simulate import simulate
from telemetry.dataset.event import EVENT_TYPES
from telemetry.dataset.store import Dataset

SMALL = {"gpus": 20, "days": 2, "scenario": "base", "acceleration": 30.0, "step": timedelta(minutes=30)}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    simulate(tmp_path / "a", seed=3, threads=1, **SMALL)
    simulate(tmp_path / "b", seed=3, threads=3, **SMALL)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a-truth") == content(tmp_path / "b-truth")


def test_a_node_is_the_same_in_a_larger_fleet(tmp_path: Path) -> None:
    small = Dataset.open(Path(simulate(tmp_path / "a", seed=3, **SMALL)["dataset"]))
    large = Dataset.open(Path(simulate(tmp_path / "b", seed=3, **{**SMALL, "gpus": 64})["dataset"]))
    name = "node-00001"
    one, other = (
        data.read_bucket(data.bucket_of(name)).to_pandas().query("node == @name").reset_index(drop=True)
        for data in (small, large)
    )
    for frame in (one, other):
        frame["gpu"] = frame["gpu"].astype(str)
        frame["node"] = frame["node"].astype(str)
    pd.testing.assert_frame_equal(one, other)


def test_the_dataset_keeps_the_contract(written: dict[str, Any]) -> None:
    data = Dataset.open(Path(written["dataset"]))
    assert data.meta.unit == "gpu"
    assert len(data.meta.channels) == 20
    assert data.meta.counts["samples"] == written["samples"]
    assert data.meta.counts["events"] == written["events"]
    inventory = data.inventory()
    for bucket in data.buckets():
        table = data.read_bucket(bucket)
        frame = table.select(["gpu", "timestamp", "node"]).to_pandas()
        keys = list(zip(frame["gpu"].astype(str), frame["timestamp"], strict=True))
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
        assert set(frame["gpu"]) <= set(inventory["gpu"])
        for name, channel in channels().items():
            values = table.column(name).drop_null().to_numpy().astype(float)
            assert np.isfinite(values).all()
            assert channel.low is None or (values >= channel.low).all(), name
            assert channel.high is None or (values <= channel.high).all(), name
    events = data.events()
    assert set(events["type"]) <= set(EVENT_TYPES)
    assert (events["known_at"] >= events["timestamp"]).all()
    assert {"xid", "failure", "repair", "replacement", "driver", "diagnostic", "drain"} <= set(events["type"])
    start, end = data.meta.span
    assert events["timestamp"].between(start, end + timedelta(hours=1)).all()
    jobs = data.jobs()
    done = jobs.dropna(subset=["ended_at"])
    assert (done["ended_at"] > done["started_at"]).all()
    saved = done.dropna(subset=["checkpointed_at"])
    assert saved["checkpointed_at"].between(saved["started_at"], saved["ended_at"]).all()


def test_the_hidden_state_is_in_no_column_of_the_dataset(written: dict[str, Any]) -> None:
    data = Dataset.open(Path(written["dataset"]))
    names = set(data.schema.names) | set(data.events().columns) | set(data.inventory().columns)
    hidden = ("risk", "lemon", "hidden", "degrad", "precursor", "cause", "announced", "truth", "state", "chronic")
    assert not [name for name in names for word in hidden if word in name]
    text = pd.concat([data.events()[name] for name in ("code", "detail", "source")]).dropna().str.cat(sep=" ")
    assert not [word for word in hidden if word in text]
    files = [path.name for path in Path(written["dataset"]).rglob("*") if path.is_file()]
    assert {re.sub(r"\d+", "N", name) for name in files} == {
        "dataset.json",
        "events.parquet",
        "inventory.parquet",
        "jobs.parquet",
        "part-N.parquet",
    }


def test_the_truth_stands_beside_the_dataset(written: dict[str, Any]) -> None:
    assert Path(written["truth"]) == Path(written["dataset"]).with_name("fleet-truth")
    about = json.loads((Path(written["truth"]) / "truth.json").read_text())
    assert about["seed"] == written["seed"]
    assert (
        about["failures"]
        == written["incidents"]
        == sum(written["by_class"].values())
        == sum(written["by_precursor"].values())
    )
    risk = pq.read_table(Path(written["truth"]) / "risk.parquet").to_pandas()
    assert list(risk.columns) == ["timestamp", "node", "gpu", "risk"]
    assert str(risk["timestamp"].dtype) == "datetime64[ms, UTC]"
    assert set(risk["timestamp"].dt.hour) == {0, 6, 12, 18}
    assert risk["risk"].between(0, 1).all()
    assert not risk.duplicated(["timestamp", "gpu"]).any()
    failures = pd.read_parquet(Path(written["truth"]) / "failures.parquet")
    assert {"gpu", "node", "start", "failure_class", "precursor", "announced"} <= set(failures.columns)


def test_a_failed_gpu_has_no_true_risk_until_it_is_back(written: dict[str, Any]) -> None:
    risk = pd.read_parquet(Path(written["truth"]) / "risk.parquet").groupby("gpu")["timestamp"]
    times = {gpu: group.to_numpy() for gpu, group in risk}
    failures = pd.read_parquet(Path(written["truth"]) / "failures.parquet")
    checked = 0
    for row in failures.itertuples():
        own = pd.DatetimeIndex(times.get(row.gpu, []))
        back = row.repaired if pd.notna(row.repaired) else pd.Timestamp.max.tz_localize("UTC")
        assert not ((own >= row.start) & (own < back)).any()
        checked += 1
    assert checked == written["incidents"] > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": "dritf"}, "unknown scenario 'dritf' (scenario). Did you mean 'drift'? Choose one of base, "),
        ({"days": 0}, "a simulation of 0 days (days). Give a number from 1 to 3660."),
        ({"seed": -1}, "seed -1 (seed). Give an integer from 0 to 2**63 - 1."),
        ({"acceleration": float("nan")}, "an acceleration of nan (acceleration)."),
        ({"step": timedelta(minutes=7)}, "a step of 0:07:00 (step). Give a duration that divides a day, at most 6 h."),
        ({"start": datetime(2026, 1, 1)}, "start 2026-01-01T00:00:00 has no time zone (start). Give an aware time"),  # noqa: DTZ001 - a naive time is what is tested
        ({"start": datetime(2026, 1, 1, 5, tzinfo=UTC)}, "is not a midnight in UTC (start). Give 00:00 UTC of a day."),
    ],
)
def test_impossible_arguments_are_explained(tmp_path: Path, change: dict[str, object], message: str) -> None:
    arguments = {"gpus": 8, "days": 1, "seed": 1, "scenario": "base", **change}
    with pytest.raises(InputError, match=re.escape(message)):
        simulate(tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "truth", "message"),
    [
        ("d", "d", "lies inside the dataset"),
        ("d", "d/../d/x/y", "lies inside the dataset"),
        ("t/d", "t", "lies inside the truth folder"),
    ],
)
def test_the_truth_is_never_inside_the_dataset(tmp_path: Path, out: str, truth: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(tmp_path / out, gpus=8, days=1, seed=1, scenario="base", truth=tmp_path / truth)


def test_a_folder_that_is_no_truth_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match=r"is not the truth of a simulation.*Choose another folder"):
        simulate(tmp_path / "d", gpus=8, days=1, seed=1, scenario="base", truth=tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "d").exists()


def test_a_full_disk_leaves_the_old_fleet_and_its_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(tmp_path / "d", seed=1, **SMALL)
    before = content(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("telemetry.dataset.writer.write_part", full)
    with pytest.raises(InputError, match="the disk is full"):
        simulate(tmp_path / "d", seed=2, **SMALL)
    assert content(tmp_path) == before


@pytest.mark.parametrize("mean", [0.0, 1e-4, 0.3, 4.0, 29.0, 31.0, 5000.0])
def test_poisson_numbers_have_their_mean_and_variance(mean: float) -> None:
    state = stream(7, 0, 0, 1)
    draws = np.array([poisson(state, mean, np.exp(-mean)) for _ in range(20_000)])
    assert (draws >= 0).all()
    assert (draws == np.floor(draws)).all()
    assert draws.mean() == pytest.approx(mean, abs=5 * np.sqrt(mean / 20_000) + 1e-9)
    if mean > 0.1:
        assert draws.var() == pytest.approx(mean, rel=0.06)


def test_a_fleet_depends_on_its_seed_and_number_only():
    assert draw_fleet(7, 3) == draw_fleet(7, 3)
    drawn = [draw_fleet(seed, number) for seed in (7, 8) for number in range(30)]
    assert len({fleet.seed for fleet in drawn}) == len(drawn)
    assert {fleet.step for fleet in drawn} == set(STEPS)
    assert any(fleet.hidden and fleet.scenario.drifts for fleet in drawn)
    for fleet in drawn:
        for mechanism in fleet.scenario.parameters.hazards.mechanisms:
            announced = mechanism.weak + mechanism.strong + mechanism.structural
            assert announced == 0 or abs(announced - (1 - fleet.silent)) < 1e-9


LABELS = load_params([Path("params.yaml")]).labels


@pytest.fixture(scope="module")
def events(written: dict[str, Any]) -> pd.DataFrame:
    return Dataset.open(Path(written["dataset"])).events()


@pytest.fixture(scope="module")
def failures(written: dict[str, Any]) -> pd.DataFrame:
    return pd.read_parquet(Path(written["truth"]) / "failures.parquet")


def test_incidents_found_by_the_labels_are_the_failures(written: dict[str, Any], failures: pd.DataFrame) -> None:
    data = Dataset.open(Path(written["dataset"]))
    incidents = find_incidents(data.events(), data.inventory(), LABELS)
    columns = ["gpu", "start", "failure_class"]
    left = incidents[columns].astype({"gpu": object}).sort_values("start")
    right = failures[["gpu", "logged", "failure_class"]].rename(columns={"logged": "at", "failure_class": "true_class"})
    right = right.assign(start=right["at"]).astype({"gpu": object}).sort_values("start")
    both = pd.merge_asof(left, right, on="start", by="gpu", direction="nearest", tolerance=pd.Timedelta("1s"))
    # A recurrence within the hour, or a ticket dated into another failure, is one incident by the labels' rules.
    assert len(incidents) >= 0.93 * len(failures)
    assert both["at"].notna().mean() > 0.97
    known = both.dropna(subset=["at"])
    assert (known["failure_class"] == known["true_class"]).mean() > 0.97


def test_recoverable_link_errors_never_come_twice_in_a_day(events: pd.DataFrame, failures: pd.DataFrame) -> None:
    links = events[(events["type"] == "xid") & (events["code"] == "74")].sort_values("timestamp")
    fatal = set(failures[failures["mechanism"] == "nvlink"]["logged"])
    spared = links[~links["timestamp"].isin(fatal)]
    gaps = spared.groupby("gpu")["timestamp"].diff().dropna()
    assert len(spared) > 20
    assert (gaps >= pd.Timedelta(days=1)).all()
