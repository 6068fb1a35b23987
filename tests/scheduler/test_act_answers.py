"""What `predrain act` answers: one JSON document a command, what is missing, and releases that harm nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from predrain.command import app
from tests.scheduler.test_scores_reader import record, write

SETTINGS = """
policy:
  thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}
  hysteresis: {rise_after: 1}
  stages: {pinned: {c/g: hard}}
"""
ACT = ("act", "--cluster", "cluster.json")
GO = (*ACT, "--scores", "scores", "--settings", "act.yaml")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [{"name": f"n{i}", "cluster": "c", "group": "g", "rack": f"r{i}"} for i in range(12)]
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (tmp_path / "act.yaml").write_text(SETTINGS)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()})
    return tmp_path


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_to_release_everything_without_scores_would_open_the_breaker_for_an_hour_and_leaves_it_closed(place):
    run(*GO)
    run(*ACT, "--release-all")
    run(*ACT, "--resume")
    again = json.loads(run(*GO, "--json").stdout)
    assert again["breaker"] == {}
    assert [each["verb"] for each in again["steps"]] == ["publish", "taint", "drain"]


@pytest.mark.parametrize(
    ("options", "state"),
    [
        (("--kill",), {"kill": True, "release_all": False}),
        (("--resume",), {"kill": False, "release_all": False}),
        (("--reset-breaker",), {"kill": False, "release_all": False}),
        (("--resume", "--reset-breaker"), {"kill": False, "release_all": False}),
    ],
)
def test_switches_are_answered_by_one_json_document(place, options, state):
    said = json.loads(run(*ACT, *options, "--json").stdout)
    reset = said["switches"].pop("reset_breaker_at")
    assert said == {"switches": state}
    assert (reset is not None) == ("--reset-breaker" in options)


def test_a_release_of_everything_is_answered_by_one_json_document_as_well(place):
    run(*GO)
    said = json.loads(run(*ACT, "--release-all", "--json").stdout)
    assert said["switches"]["release_all"] is True
    assert [(each["verb"], each["came_to"]) for each in said["steps"]] == [("release", "done")]
    rehearsed = json.loads(run(*ACT, "--release-all", "--dry-run", "--json").stdout)
    assert (rehearsed["rehearsed"], "switches" in rehearsed) == (True, False)


def test_what_is_missing_is_said_all_at_once_with_the_file_that_is_looked_for(place):
    (place / "act.yaml").unlink()
    bare = run("act", code=2).output.replace("│", " ")
    words = " ".join(bare.split())
    assert "a scheduler: --cluster FILE, or --scheduler kubernetes or slurm" in words
    assert "--scores FOLDER, which predrain score writes" in words
    assert "--settings FILE; there is no act.yaml in this folder either" in words
    assert "policy.thresholds" in words
    only = " ".join(run(*ACT, "--scores", "scores", code=2).output.replace("│", " ").split())
    assert "--settings FILE" in only
    assert "--scores FOLDER" not in only


def test_settings_in_the_folder_are_found_and_none_are_needed_to_stop_or_undo(place):
    assert "taint n3" in run(*ACT, "--scores", "scores").stdout
    (place / "act.yaml").unlink()
    undone = run(*ACT, "--release-all").stdout
    assert "release n3" in undone
    assert "no threshold" not in undone
    run(*ACT, "--resume")
    run(*ACT, "--kill")


def test_broken_settings_do_not_keep_everything_from_being_released(place):
    run(*GO)
    (place / "act.yaml").write_text("polcy: {}")
    undone = run(*ACT, "--release-all")
    assert "release n3" in undone.stdout
    assert "did you mean 'policy'? (act.yaml). Correct the value. Everything is released all the same." in undone.stderr
    assert "did you mean 'policy'?" in run(*ACT, "--scores", "scores", code=1).stderr


def test_settings_without_any_threshold_say_that_no_score_has_a_tier(place):
    (place / "act.yaml").write_text("controller: {every: 1m}")
    shown = run(*GO).stdout
    assert "note: the settings give no threshold (policy.thresholds), so no score has a tier" in shown
    assert "nothing to do" in shown


def test_a_release_by_hand_names_the_hand_first_and_does_not_speak_of_a_rise(place):
    run(*GO)
    (step,) = json.loads(run(*ACT, "--release-all", "--json").stdout)["steps"]
    assert step["reasons"][0] == "everything is to be released"
    assert step["reasons"][1].startswith("its tier is high: from clear to high: a risk of 90.0%")


def test_thresholds_of_the_scores_are_taken_from_their_summary(place):
    (place / "act.yaml").write_text(
        SETTINGS.replace("thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}", "thresholds_from: scores")
    )
    assert "the scores name no thresholds" in run(*GO, "--dry-run").stdout
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu{i}", f"n{i}", 0.5 if i == 3 else 0.01, now) for i in range(12)]
    summary = {
        "thresholds": {"watch": 0.1, "elevated": 0.4, "high": None},
        "threshold_sources": {"high": "none: too few"},
    }
    write(place / "other", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()}, **summary)
    shown = run(*ACT, "--scores", "other", "--settings", "act.yaml").stdout
    assert "done     soft_taint n3 (elevated)" in shown
    assert "note: no node is of tier high (none: too few)" in shown
