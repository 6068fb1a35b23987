"""status.json and the textfile of a run that is late, failed or killed."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foundation.errors import InputError
from foundation.files import FolderSwap
from policy.risk_record import RiskRecord
from serving.scores.reading import decision_folders
from serving.scores.writing import ScoresFolder, ScoringResult, record_attempt, write_decision
from tests.killed import die_at, exit_code_of
from tests.scheduler.score_files import record

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
    return ScoringResult(T, True, folder, SUMMARY, 21600.0, ("the current model stays in use: x",))


def test_a_success_is_reported_with_its_counts(tmp_path: Path) -> None:
    now = T + timedelta(minutes=12)
    status = record_attempt(ScoresFolder(tmp_path), now, scored(tmp_path))
    assert status == json.loads((tmp_path / "status.json").read_text())
    assert status == {
        "format": 2,
        "last_attempt": "2026-01-01T06:12:00Z",
        "last_success": "2026-01-01T06:12:00Z",
        "error": None,
        "consecutive_failures": 0,
        "decision": "2026-01-01T06:00:00Z",
        "lag_seconds": 21600.0,
        "notes": ["the current model stays in use: x"],
    }
    values = metrics(tmp_path)
    assert values.pop("last_attempt_timestamp_seconds") == now.timestamp()
    assert values.pop("last_success_timestamp_seconds") == now.timestamp()
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


RECORD = record("g1", "n1", 0.1, T)


def write_killed_at(out: Path, n_writes: int, record: RiskRecord) -> None:
    """Write a decision, and die before the call of that number among those that the disk sees; 7 if it did not."""
    die_at(n_writes, ((os, "fsync"), (os, "rename"), (os, "replace"), (Path, "rename"), (Path, "replace")))
    scores = ScoresFolder(out)
    with FolderSwap(scores.folder_of(record.decision_time)) as swap:
        write_decision(swap.path, [record] * 50, {"format": 2})
        swap.commit()
    scores.point_to_newest()
    os._exit(7)


def pointed(out: Path) -> str:
    name = json.loads((out / "latest.json").read_text())["decision"]
    folder = out / "decisions" / name
    assert json.loads((folder / "summary.json").read_text()) == {"format": 2}
    assert len((folder / "risks.jsonl").read_text().splitlines()) == 50
    return str(name)


def test_a_kill_at_any_write_leaves_old_or_new_and_the_next_run_goes_on(tmp_path: Path) -> None:
    first = ScoresFolder(tmp_path)
    with FolderSwap(first.folder_of(T)) as swap:
        write_decision(swap.path, [RECORD] * 50, {"format": 2})
        swap.commit()
    first.point_to_newest()
    later = replace(RECORD, decision_time=T + timedelta(hours=6))
    killed = 0
    for i in range(1, 12):
        code = exit_code_of(write_killed_at, tmp_path, i, later)
        current = pointed(tmp_path)
        decisions = [folder.name for _, folder in decision_folders(tmp_path)]
        assert decisions in (["20260101T060000Z"], ["20260101T060000Z", "20260101T120000Z"])
        if code == 7:
            assert (current, len(decisions)) == ("20260101T120000Z", 2)
            break
        assert code == 9
        killed += 1
        assert current in decisions
        if len(decisions) == 2:  # it was killed before the pointer: the next run of any kind sets it
            ScoresFolder(tmp_path).point_to_newest()
            assert pointed(tmp_path) == "20260101T120000Z"
            break
    else:
        pytest.fail("it never ended by itself")
    assert killed >= 4
    hidden = [path.name for path in (tmp_path / "decisions").iterdir() if path.name.startswith(".")]
    assert [name for name in hidden if not name.endswith(".lock")] == []  # an empty one goes with its decision


def test_a_full_disk_leaves_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    scores = ScoresFolder(tmp_path)
    monkeypatch.setattr("serving.scores.writing.pq.write_table", full)
    with pytest.raises(InputError, match="the disk is full"), FolderSwap(scores.folder_of(T)) as swap:
        write_decision(swap.path, [RECORD], {"format": 2})
    assert list((tmp_path / "decisions").iterdir()) == []
