"""status.json and the textfile: a late or failed run is seen."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serving.scores.writing import ScoresFolder, ScoringResult, record_attempt

T = datetime(2026, 1, 1, 6, tzinfo=UTC)
SUMMARY: dict[str, Any] = {
    "format": 2,
    "decision_time": "2026-01-01T06:00:00Z",
    "expires_at": "2026-01-01T18:12:00Z",
    "tiers": {"clear": 5, "watch": 2, "elevated": 1, "high": 0, "unknown": 3},
    "alerts": 2,
    "newest_sample": "2026-01-01T05:50:00Z",
    "newest_sample_age_seconds": 600.0,
    "duration_seconds": 2.5,
    "model": {"fitted_at": "2025-12-31T00:00:00Z"},
}


def metrics(out: Path) -> dict[str, float]:
    page = (out / "predrain_score.prom").read_text()
    families = list(text_string_to_metric_families(page))
    assert all(family.type == "gauge" and family.documentation for family in families)
    values: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            labels = "".join(f"[{value}]" for value in sample.labels.values())
            values[sample.name.removeprefix("predrain_score_") + labels] = sample.value
    return values


def scored(out: Path) -> ScoringResult:
    folder = out / "decisions" / "20260101T060000Z"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    for name in ("risks.jsonl", "risks.parquet"):
        (folder / name).touch()
    return ScoringResult(T, True, folder, SUMMARY, 21600.0, ("the model in use is kept: x",))


def test_a_success_is_reported_with_its_counts(tmp_path: Path) -> None:
    at = T + timedelta(minutes=12)
    status = record_attempt(ScoresFolder(tmp_path), at, scored(tmp_path))
    assert status == json.loads((tmp_path / "status.json").read_text())
    assert status == {
        "format": 2,
        "last_attempt": "2026-01-01T06:12:00Z",
        "last_success": "2026-01-01T06:12:00Z",
        "error": None,
        "consecutive_failures": 0,
        "decision": "2026-01-01T06:00:00Z",
        "lag_seconds": 21600.0,
        "notes": ["the model in use is kept: x"],
    }
    values = metrics(tmp_path)
    assert values.pop("last_attempt_timestamp_seconds") == at.timestamp()
    assert values.pop("last_success_timestamp_seconds") == at.timestamp()
    assert values == {
        "success": 1,
        "consecutive_failures": 0,
        "lag_seconds": 21600,
        "decision_timestamp_seconds": T.timestamp(),
        "expires_timestamp_seconds": (T + timedelta(hours=12, minutes=12)).timestamp(),
        "duration_seconds": 2.5,
        "units[clear]": 5,
        "units[watch]": 2,
        "units[elevated]": 1,
        "units[high]": 0,
        "units[unknown]": 3,
        "alerts": 2,
        "newest_sample_timestamp_seconds": (T - timedelta(minutes=10)).timestamp(),
        "newest_sample_age_seconds": 600,
        "model_fitted_timestamp_seconds": datetime(2025, 12, 31, tzinfo=UTC).timestamp(),
    }


def test_a_failure_is_reported_and_the_last_success_kept(tmp_path: Path) -> None:
    scores = ScoresFolder(tmp_path)
    record_attempt(scores, T, scored(tmp_path))
    for number in (1, 2):
        later = T + timedelta(minutes=5 * number)
        status = record_attempt(scores, later, None, "no dataset (here). Do.")
        assert status["consecutive_failures"] == number
    assert status["last_success"] == "2026-01-01T06:00:00Z"
    assert status["last_attempt"] == "2026-01-01T06:10:00Z"
    assert status["error"] == "no dataset (here). Do."
    values = metrics(tmp_path)
    assert (values["success"], values["consecutive_failures"]) == (0, 2)
    assert values["last_success_timestamp_seconds"] == T.timestamp()
    assert values["units[watch]"] == 2
    record_attempt(scores, T + timedelta(hours=1), ScoringResult(T, False, tmp_path, SUMMARY))
    assert metrics(tmp_path)["consecutive_failures"] == 0


def test_a_replay_of_an_older_decision_does_not_say_that_the_newest_is_late(tmp_path: Path) -> None:
    scores = ScoresFolder(tmp_path)
    newest = scored(tmp_path)
    scores.point_to_newest()
    replay = ScoringResult(T - timedelta(hours=12), True, tmp_path, SUMMARY, 21600.0 + 43200)
    assert record_attempt(scores, T, replay)["lag_seconds"] == 21600
    assert metrics(tmp_path)["lag_seconds"] == 21600
    in_time = ScoringResult(T - timedelta(hours=12), True, tmp_path, SUMMARY, 43200.0)
    assert record_attempt(scores, T, in_time)["lag_seconds"] == 0
    assert record_attempt(scores, T, newest)["lag_seconds"] == 21600


def test_a_damaged_status_or_summary_does_not_stop_the_next_run(tmp_path: Path) -> None:
    scores = ScoresFolder(tmp_path)
    result = scored(tmp_path)
    (tmp_path / "status.json").write_text("{")
    for text in ('{"format": 2}', '{"format": 1}', '{"format"'):
        (result.folder / "summary.json").write_text(text)
        status = record_attempt(scores, T, result)
        assert status["error"] is None
        assert metrics(tmp_path)["success"] == 1
