"""Racks and outcomes of alerts: written by `predrain score` from a real, small dataset, shown by the pages."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

from serving.scores.alert_outcomes import _by_week, write_facts
from serving.scores.reading import FACTS, read_facts
from serving.scores.writing import ScoresFolder
from telemetry.dataset.store import Dataset
from tests.serving.http.world import Running, record, running
from tests.serving.http.world import small_fleet as of_five_nodes
from tests.serving.pages.page_world import look, store


@pytest.fixture(scope="module")
def scores(small_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decisions of the simulated fleet, a day before its end; every fourth GPU is raised."""
    folder = tmp_path_factory.mktemp("scores")
    dataset = Dataset.open(small_fleet)
    here = dataset.inventory()
    here = here[here["removed_at"].isna()].drop_duplicates("gpu")
    for back in (30, 24):
        decided = (dataset.meta.span[1] - timedelta(hours=back)).replace(minute=0, second=0, microsecond=0)
        records = [
            record(gpu, node, 0.2 if at % 4 == 0 else 0.01, "elevated" if at % 4 == 0 else "clear", decided=decided)
            for at, (gpu, node) in enumerate(zip(here["gpu"], here["node"], strict=True))
        ]
        store(folder, records, decided)
    write_facts(ScoresFolder(folder), dataset)
    return folder


@pytest.fixture(scope="module")
def service(scores: Path, small_fleet: Path) -> Iterator[Running]:
    now = Dataset.open(small_fleet).meta.span[1] - timedelta(hours=23)
    with running(scores, clock=lambda: now) as started:
        yield started


def test_racks_groups_and_outcomes_come_to_the_page(service: Running, small_fleet: Path) -> None:
    page = look(service, "/")
    head = page.rows[0]
    assert "Group" in head
    racks = set(Dataset.open(small_fleet).inventory()["rack"])
    assert set(page.column(head.index("Rack"))) <= racks
    rack = sorted(racks)[0]
    narrowed = look(service, f"/?rack={rack}")
    assert set(narrowed.column(head.index("Rack"))) == {rack}
    assert "evaluated alerts were right" in look(service, "/outcomes").text
    assert "alerts of nodes were right" in page.text


def test_outcomes_begin_with_the_backtest_and_give_the_precision_so_far(tmp_path: Path) -> None:
    measured = {
        "since": "2025-10-01T00:00:00Z", "until": "2025-12-31T00:00:00Z", "episode_precision": 0.25,
        "episode_precision_low": 0.125, "episode_precision_high": 0.5, "episodes_right": 5, "episodes_known": 20,
        "incidents": 30, "caught": 9,
    }  # fmt: skip
    store(tmp_path, of_five_nodes(), backtest=measured)
    weeks = _by_week(
        [
            {"at": at, "verdict": verdict}
            for at, verdict in (
                ("2026-01-06T00:00:00+00:00", "right"), ("2026-01-07T00:00:00+00:00", "wrong"),
                ("2026-01-14T00:00:00+00:00", "right"), ("2026-01-14T00:00:00+00:00", "open"),
            )
        ]
    )  # fmt: skip
    assert [(each["week"], each["precision"]) for each in weeks] == [("2026-01-05", 1 / 2), ("2026-01-12", 2 / 3)]
    with running(tmp_path) as started:
        text = look(started, "/outcomes").text
    assert "5 of 20" in text
    assert "25 % of the drains would have been right" in text
    assert "9 of 30 node failures would have been caught" in text


def test_the_facts_name_each_unit_and_each_alert(scores: Path, small_fleet: Path) -> None:
    dataset, facts = Dataset.open(small_fleet), read_facts(scores)
    assert facts.data_end == dataset.meta.span[1]
    assert len(facts.places) == dataset.inventory()["gpu"].nunique()
    assert sum(facts.outcomes["verdicts"].values()) == len(facts.outcomes["alerts"]) > 0


def test_a_gpu_shows_hour_by_hour_the_telemetry_that_its_reasons_rest_on(
    service: Running, scores: Path, small_fleet: Path
) -> None:
    dataset, facts = Dataset.open(small_fleet), read_facts(scores)
    unit = sorted(facts.courses)[0]
    end = dataset.meta.span[1]
    samples = pd.concat([dataset.read_bucket(bucket).to_pandas() for bucket in dataset.buckets()])
    mine = samples[(samples["gpu"] == unit) & (samples["timestamp"] < end)]
    means = facts.courses[unit]["gpu_temp_c"]
    assert len(means) == 7 * 24
    for back, mean in enumerate(reversed(means)):
        begin = pd.Timestamp(end) - pd.Timedelta(hours=back + 1)
        there = mine[(mine["timestamp"] >= begin) & (mine["timestamp"] < begin + pd.Timedelta(hours=1))]["gpu_temp_c"]
        assert mean == (None if there.isna().all() else pytest.approx(there.astype(float).mean(), rel=1e-4))
    text = look(service, f"/gpus/{unit}").text
    assert "Telemetry behind the reasons" in text
    assert f"{max(mean for mean in means if mean is not None):,.5g}" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"places": {"g": 1}}', '{"places": {"g": [1, 2, 3, 4, 5]}}'])
def test_damaged_facts_are_left_out_and_logged(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_facts(tmp_path).outcomes is None
    (tmp_path / FACTS).write_text(content)
    assert read_facts(tmp_path).outcomes is None
    assert "the facts of the fleet cannot be read" in caplog.text
