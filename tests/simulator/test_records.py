"""What the labels make of a simulated dataset is what happened."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from features.labels.incidents import find_incidents
from pipeline.params import load_params
from telemetry.dataset.store import Dataset

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


def test_tickets_are_known_when_they_were_entered(events: pd.DataFrame) -> None:
    tickets = events[events["source"] == "ticket"]
    assert (tickets["known_at"] >= tickets["timestamp"]).all()
    assert (tickets["known_at"] > tickets["timestamp"]).mean() > 0.8
    kernel = events[events["source"] == "kernel"]
    assert ((kernel["known_at"] - kernel["timestamp"]) == pd.Timedelta("10min")).all()
