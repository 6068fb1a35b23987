"""The verb: from a server to a dataset in one command, and what it says when it cannot."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from predrain.command import app
from telemetry.dataset.store import Dataset
from tests.telemetry.collect.prometheus.fake_prometheus import FakePrometheus
from tests.telemetry.collect.prometheus.test_backfill import fill, landed


def collect(fake: FakePrometheus, dataset: Path, *options: str, start: str = "2026-01-01T00:00:00Z") -> tuple[int, str]:
    """Run the verb; returns its exit code and everything it wrote."""
    arguments = [
        "--prometheus",
        fake.url,
        "--since",
        start,
        "--until",
        "2026-01-01T06:00:00+00:00",
        "--dataset",
        str(dataset),
    ]
    ran = CliRunner().invoke(app, ["collect", "prometheus", *arguments, *options])
    return ran.exit_code, ran.output


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No params.yaml of the checkout."""
    monkeypatch.chdir(tmp_path)


def test_one_command_makes_a_dataset_and_a_second_adds_nothing(fake: FakePrometheus, tmp_path: Path) -> None:
    expected = fill(fake, step_ms=600_000)
    code, text = collect(fake, tmp_path / "fleet", "--json", "--chunk", "2h")
    assert code == 0, text
    report = json.loads(text.splitlines()[-1])
    assert (report["chunks"], report["rows"], report["samples"], report["metrics"]) == (
        3,
        len(expected),
        2 * len(expected),
        2,
    )
    dataset = Dataset.open(tmp_path / "fleet")
    assert dataset.meta.counts["samples"] == len(expected)
    assert set(dataset.inventory()["driver"]) == {"570.1"}
    code, text = collect(fake, tmp_path / "fleet", "--chunk", "2h")
    assert code == 0
    assert "chunks fetched before  3" in text
    assert Dataset.open(tmp_path / "fleet").digest == dataset.digest


def test_what_is_fetched_can_be_left_for_later(fake: FakePrometheus, tmp_path: Path) -> None:
    expected = fill(fake)
    code, _ = collect(fake, tmp_path / "fleet", "--no-compact")
    assert code == 0
    assert not (tmp_path / "fleet").exists()
    assert len(landed(tmp_path)) == len(expected)


def test_a_dataset_that_was_removed_is_reported(fake: FakePrometheus, tmp_path: Path) -> None:
    import shutil

    fill(fake)
    assert collect(fake, tmp_path / "fleet")[0] == 0
    shutil.rmtree(tmp_path / "fleet")
    code, text = collect(fake, tmp_path / "fleet")
    assert code == 1
    assert "history was fetched before, but the dataset does not exist" in text
    assert "fleet.live as well to fetch everything again." in text
