"""Reading a folder of scores: whole or not at all, and the old ones are kept while the new are damaged."""

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.files import FolderSwap
from serving.http.score_cache import ScoreCache
from serving.scores.reading import read_scores
from serving.scores.writing import ScoresFolder, record_attempt, write_decision
from tests.serving.http.world import DECIDED, record, running, small_fleet
from tests.serving.score_folder import write_scores

NEXT = DECIDED + timedelta(hours=6)


def change(folder: Path, edit: Callable[[dict[str, Any]], None], line: int = 1) -> Path:
    """Edit one record of a folder's newest decision."""
    path = next((folder / "decisions").glob("*/risks.jsonl"))
    lines = path.read_text().splitlines()
    content = json.loads(lines[line])
    edit(content)
    lines[line] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_the_batch_scoring_writes_is_served(tmp_path: Path) -> None:
    """Its own writer, not this test's: the two rooms agree on every file."""
    written = ScoresFolder(tmp_path)
    fleet = small_fleet()
    summary = {"format": 2, "decision_time": "2026-01-01T06:00:00Z", "model": {"fitted_at": "2025-12-31T07:00:00Z"}}
    with FolderSwap(written.folder_of(DECIDED)) as swap:
        write_decision(swap.path, fleet, summary)
        swap.commit()
    written.point_to_newest()
    record_attempt(written, DECIDED, None, "the model is gone")
    scores = read_scores(tmp_path)
    assert list(scores.units.values()) == fleet
    assert [unit.unit for unit in scores.nodes["n1"]] == ["GPU-n1-0", "GPU-n1-1"]
    assert (scores.decided, scores.expires, scores.summary) == (DECIDED, DECIDED + timedelta(hours=12), summary)
    with running(tmp_path) as service:
        client = service.client()
        assert client.get("/v1/nodes")["nodes"][0]["tier"] == "high"
        assert client.get("/readyz")["warnings"] == ["the last attempt to score failed: the model is gone"]
        assert "predrain_scores_model_age_seconds 86400.0" in client.get("/metrics").decode()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(format=1), "a risk record of format 1"),
        (lambda c: c.update(expires_at="2026-01-01T18:00:00"), "expires_at: a time without a time zone"),
    ],
)
def test_one_damaged_record_refuses_the_decision(tmp_path, edit, message):
    write_scores(tmp_path, small_fleet())
    path = change(tmp_path, edit)
    with pytest.raises(InputError, match=f"a record is damaged: .*{message}.*{path.name}, line 2"):
        read_scores(tmp_path)


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        ("", "the pointer to the newest scores cannot be read"),
        ("[]", "the scores are of format None, but this version reads 2"),
        ('{"format": 1}', "the scores are of format 1, but this version reads 2"),
        ('{"format": 2, "decision": "../../etc"}', r"'\.\./\.\./etc' is not the name of a decision"),
        ('{"format": 2, "decision": "20250101T000000Z"}', "the scores cannot be read: No such file"),
    ],
)
def test_a_pointer_that_cannot_be_followed_is_reported(tmp_path: Path, pointer: str, message: str) -> None:
    write_scores(tmp_path, small_fleet())
    (tmp_path / "latest.json").write_text(pointer)
    with pytest.raises(InputError, match=message):
        read_scores(tmp_path)


def test_a_file_that_was_cut_short_is_damaged(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    path = next(tmp_path.glob("decisions/*/risks.jsonl"))
    complete = path.read_bytes()
    path.write_bytes(complete[:-100])
    with pytest.raises(InputError, match="a record is damaged"):
        read_scores(tmp_path)
    content = json.loads(complete.splitlines()[0]) | {"risk": float("nan")}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="a record is damaged: unexpected character"):
        read_scores(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="the decision contains no records"):
        read_scores(tmp_path)
    path.write_bytes(complete + complete.splitlines(keepends=True)[0])
    with pytest.raises(InputError, match="unit 'GPU-n1-0' is listed twice"):
        read_scores(tmp_path)


def test_the_keeper_reads_again_only_when_something_changed(tmp_path: Path) -> None:
    keeper = ScoreCache(tmp_path)
    assert not keeper.refresh()
    assert keeper.served.fleet is None
    write_scores(tmp_path, small_fleet())
    assert keeper.refresh()
    served = keeper.served
    assert not keeper.refresh()
    assert keeper.served is served
    write_scores(tmp_path, small_fleet(NEXT), NEXT)
    assert keeper.refresh()
    assert keeper.served.fleet.scores.decided == NEXT
    write_scores(tmp_path, [record("only", "n", 0.1, decided=NEXT)], NEXT)  # the same decision, scored again
    assert keeper.refresh()
    assert len(keeper.served.fleet.scores.units) == 1


def test_the_old_scores_are_kept_while_the_new_ones_are_damaged(tmp_path, caplog):
    keeper = ScoreCache(tmp_path)
    write_scores(tmp_path, small_fleet())
    keeper.refresh()
    write_scores(tmp_path, small_fleet(NEXT), NEXT)
    path = tmp_path / "decisions" / "20260101T120000Z" / "risks.jsonl"
    complete = path.read_bytes()
    path.write_bytes(complete[:500])
    assert not keeper.refresh()
    assert keeper.served.fleet.scores.decided == DECIDED
    assert "a record is damaged" in str(keeper.served.error)
    assert "decision 20260101T060000Z stays in use" in caplog.text
    failures = keeper.failures
    assert not keeper.refresh()  # nothing changed: not read again immediately
    assert keeper.failures == failures
    path.write_bytes(complete)
    assert keeper.refresh()
    assert keeper.served.error is None
    assert keeper.served.fleet.scores.decided == NEXT


def test_what_could_not_be_read_is_tried_again_though_nothing_seems_to_change(tmp_path: Path) -> None:
    keeper = ScoreCache(tmp_path)
    write_scores(tmp_path, small_fleet())
    shutil.move(tmp_path / "decisions", tmp_path / "elsewhere")
    for _ in range(25):
        keeper.refresh()
    assert keeper.served.fleet is None
    assert 2 <= keeper.failures <= 4
