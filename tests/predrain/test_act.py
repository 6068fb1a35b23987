"""`predrain act` and `predrain ledger` on a cluster in a file, as an operator uses them."""

import json
import re
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from policy.risk_record import RiskReason
from scheduler.file import FileScheduler
from scheduler.ports.clock import SystemClock
from telemetry.dataset.schema import EVENTS
from tests.processes import hanging, invoke, predrain
from tests.scheduler.score_files import record, write

SETTINGS = """
policy:
  thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}
  hysteresis: {rise_after: 1}
  stages: {pinned: {c/g: hard}}
controller: {lease: 2m}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    nodes = [
        {
            "name": f"n{i}", "cluster": "c", "group": "g", "rack": f"r{i}", "labels": {"zone": "a"},
            "taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}],
        }
        for i in range(12)
    ]  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (tmp_path / "act.yaml").write_text(SETTINGS)
    fitted = (now - timedelta(days=1)).isoformat()
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": fitted})
    return tmp_path


ACT = ("act", "--cluster", "cluster.json")
GO = (*ACT, "--scores", "scores", "--settings", "act.yaml")


def node(place, name="n3"):
    return next(entry for entry in json.loads((place / "cluster.json").read_text())["nodes"] if entry["name"] == name)


def test_a_dry_run_prints_what_would_be_written_and_writes_nothing(place):
    content = (place / "cluster.json").read_bytes()
    output = invoke(*GO, "--dry-run").stdout
    assert "would    swap n3 (high)" in output
    assert "node n3: spec.taints: team=x:NoSchedule -> team=x:NoSchedule, predrain.io/at-risk=high:NoSchedule" in output
    assert (place / "cluster.json").read_bytes() == content
    assert not (place / "ledger.db").exists()


def test_act_then_ask_then_replay_then_undo(place):
    plain = node(place)
    report = json.loads(invoke(*GO, "--json").stdout)
    assert [(step["verb"], step["outcome"]) for step in report["steps"]] == [
        ("swap", "done"),
        ("drain", "done"),
        ("publish", "already"),
    ]
    assert {"key": "predrain.io/at-risk", "value": "high", "effect": "NoSchedule"} in node(place)["taints"]
    again = invoke(*GO)
    assert "nothing to do" in again.stdout

    explained = invoke("ledger", "why", "n3").stdout
    assert "high, risk 90 %, drain" in explained
    assert "why: " in explained
    assert "spec.taints" not in explained
    listed = json.loads(invoke("ledger", "list", "--json").stdout)
    assert any(write["path"] == "spec.taints" for call in listed["decisions"][0]["calls"] for write in call["wrote"])
    (drain,) = listed["rungs"]
    assert (drain["node"], drain["rung"], drain["outcome"]) == ("n3", "drain", "not yet known")
    for output in (explained, invoke("ledger", "list").stdout):
        assert f"n3    drain   {drain['saves']:.2f} " in output
    number = listed["decisions"][0]["decision"]
    assert "identical" in invoke("ledger", "replay", str(number)).stdout
    assert json.loads(invoke("ledger", "replay", str(number), "--json").stdout)["equal"] is True
    assert "1 event in drains.parquet" in invoke("ledger", "export", "--out", "drains.parquet").stdout
    refused = invoke("ledger", "export", "--out", "scores", code=1).stderr
    assert "Is a directory (scores). Give a file, not a folder." in refused

    assert "release n3" in invoke(*ACT, "--release-all", "--dry-run").stdout
    invoke(*ACT, "--release-all")
    left = node(place)
    assert (left["labels"], left["annotations"], left["taints"]) == (plain["labels"], {}, plain["taints"])
    output = invoke(*GO).stdout
    assert "nothing to do" in output
    assert "note: new actions are blocked until `predrain act --resume`" in output
    invoke(*ACT, "--resume")
    invoke(*GO)
    assert len(node(place)["taints"]) == 2


def test_a_standby_is_no_failure_but_cannot_complete_a_release(place):
    invoke(*GO)
    scheduler = FileScheduler(place / "cluster.json", SystemClock())
    assert scheduler.hold_lease("another", timedelta(seconds=30)) is not None
    assert "standby: another replica holds the lease" in invoke(*GO).stdout
    left = invoke(*ACT, "--release-all", "--wait", "1s", code=1)
    assert "standby" in left.stdout
    assert "markers are left on 1 node (n3)" in left.stderr
    scheduler.drop_lease("another")
    invoke(*ACT, "--release-all", "--wait", "1m")
    assert len(node(place)["taints"]) == 1
    invoke(*ACT, "--kill", "--wait", "1m", code=2)


def test_a_damaged_ledger_stops_it_and_does_not_stop_the_undoing(place):
    invoke(*GO)
    (place / "ledger.db").write_bytes(b"no ledger" * 1000)
    for file in place.glob("ledger.db-*"):
        file.unlink()
    failed = invoke(*GO, code=1)
    assert re.search(r"the ledger is damaged: .+ \(ledger\.db\)\. Keep the file", failed.stderr)
    undone = invoke(*ACT, "--release-all")
    assert "All markers are still released" in undone.stderr
    assert len(node(place)["taints"]) == 1


def test_wrong_usage_exits_with_2_and_bad_files_with_1_and_one_line(place):
    assert "--scores" in invoke(*ACT, code=2).output
    absent = invoke(*ACT, "--scores", "absent", "--events", "act.yaml", "--dry-run", code=1)
    assert "no scores in absent: run `predrain score` with --out on this folder" in absent.stderr
    assert "the events in act.yaml cannot be read: " in absent.stderr
    assert ": expected a dataset's events.parquet\n" in absent.stderr
    assert "or by --reset-breaker" in absent.stdout
    assert "the ledger path is a folder (scores)." in invoke(*GO, "--ledger", "scores", code=1).stderr
    invoke(*GO, "--kill", "--resume", code=2)
    invoke(*GO, "--loop", "--dry-run", code=2)
    (place / "act.yaml").write_text("polcy: {}")
    assert "settings.polcy: unknown key. Did you mean 'policy'? (act.yaml)" in invoke(*GO, code=1).stderr
    (place / "cluster.json").write_text('{"format": 1, "nodes": [{"name": "a", "cluster": "c", "grup": "g"}]}')
    failed = invoke(*GO, code=1)
    assert "cluster.nodes.0.grup: unknown key. Did you mean 'group'?" in failed.stderr
    assert "no ledger found" in invoke("ledger", "why", "n3", "--ledger", "absent.db", code=1).stderr


def test_the_loop_serves_metrics_until_it_is_stopped(place):
    command = [Path(sys.executable).with_name("predrain"), *GO, "--loop", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stderr.readline().rpartition(" ")[2])
            page = ""
            while "predrain_act_rounds_total" not in page or 'result="decided"} 0.0' in page:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
                    page = response.read().decode()
            assert 'predrain_act_actions_total{outcome="done",verb="swap"} 1.0' in page
            assert 'predrain_act_nodes{tier="high"} 1.0' in page
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()
    invoke(*GO, "--listen", "127.0.0.1:0", code=2)


def test_to_release_everything_without_scores_would_open_the_breaker_for_an_hour_and_leaves_it_closed(place):
    invoke(*GO)
    invoke(*ACT, "--release-all")
    invoke(*ACT, "--resume")
    again = json.loads(invoke(*GO, "--json").stdout)
    assert again["breaker"] == {}
    assert [step["verb"] for step in again["steps"]] == ["swap", "drain", "publish"]


def test_switches_and_a_release_of_everything_are_answered_by_one_json_document(place):
    content = json.loads(invoke(*ACT, "--resume", "--reset-breaker", "--json").stdout)
    assert content["switches"].pop("reset_breaker_at") is not None
    assert content == {"switches": {"kill": False, "release_all": False}}
    invoke(*GO)
    rehearsed = json.loads(invoke(*ACT, "--release-all", "--dry-run", "--json").stdout)
    assert (rehearsed["rehearsed"], "switches" in rehearsed) == (True, False)
    content = json.loads(invoke(*ACT, "--release-all", "--json").stdout)
    assert content["switches"]["release_all"] is True
    assert [step["verb"] for step in content["steps"]] == ["release"]


def test_all_missing_options_are_named_in_one_error_with_the_default_file(place):
    (place / "act.yaml").unlink()
    bare = invoke("act", code=2).output.replace("│", " ")
    text = " ".join(bare.split())
    assert "--cluster FILE (or --scheduler kubernetes or slurm)" in text
    assert "--scores FOLDER" in text
    assert "--settings FILE with policy.thresholds and policy.stages (default: act.yaml in this folder" in text
    only = " ".join(invoke(*ACT, "--scores", "scores", code=2).output.replace("│", " ").split())
    assert "--settings FILE" in only
    assert "--scores FOLDER" not in only


def test_settings_in_the_folder_are_found_and_none_are_needed_to_stop_or_undo(place):
    assert "swap n3" in invoke(*ACT, "--scores", "scores").stdout
    (place / "act.yaml").unlink()
    undone = invoke(*ACT, "--release-all").stdout
    assert "release n3" in undone
    assert "no threshold" not in undone
    invoke(*ACT, "--resume")
    invoke(*ACT, "--kill")


def test_broken_settings_do_not_keep_everything_from_being_released(place):
    invoke(*GO)
    (place / "act.yaml").write_text("polcy: {}")
    undone = invoke(*ACT, "--release-all")
    assert "release n3" in undone.stdout
    assert "All markers are still released." in undone.stderr
    assert "Did you mean 'policy'?" in invoke(*ACT, "--scores", "scores", code=1).stderr


def test_a_ledger_on_a_disk_that_hangs_delays_a_stop_and_a_release_by_no_more_than_the_time_of_a_round(place):
    invoke(*GO)
    (place / "act.yaml").write_text(SETTINGS.replace("{lease: 2m}", "{lease: 2m, max_round_duration: 2s}"))
    with hanging(place / "ledger.db"):
        assert "kill switch set" in invoke(*ACT, "--kill").stderr
        assert "the ledger does not respond" in invoke(*GO, code=1).stderr
        assert len(node(place)["taints"]) == 2
        undone = predrain(*ACT, "--release-all", cwd=place)
    assert "the ledger does not respond: timed out after 2 s" in undone.stderr
    assert len(node(place)["taints"]) == 1


def test_scores_on_a_disk_that_hangs_at_the_start_delay_the_releases_once(place, monkeypatch):
    gate = threading.Event()
    (place / "act.yaml").write_text(SETTINGS.replace("{lease: 2m}", "{lease: 2m, max_round_duration: 1s}"))
    monkeypatch.setattr("predrain.act.command.check_scores", lambda _: gate.wait(300))
    assert "only expired markers are released: TimeoutError: timed out after 1 s" in invoke(*GO, code=1).stderr
    gate.set()


def test_a_pinned_group_that_does_not_exist_is_refused_and_nothing_new_is_done(place):
    (place / "act.yaml").write_text(SETTINGS.replace("c/g", "c/gg"))
    for more in ((), ("--dry-run",)):
        refused = invoke(*GO, *more, code=1).stderr
        assert "policy.stages.pinned names 'c/gg'" in refused
        assert "'c/g'" in refused
    assert len(node(place)["taints"]) == 1


def test_a_rule_of_the_settings_is_fed_by_the_events_that_it_names(place):
    now = datetime.now(UTC)
    event = dict.fromkeys(EVENTS.names) | {
        "timestamp": now, "known_at": now, "node": "n5", "gpu": "gpu5", "type": "xid", "code": "63", "source": "test",
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([event], schema=EVENTS), "events.parquet")
    assert "n5" not in invoke(*GO, "--events", "events.parquet", "--dry-run").stdout
    rule = "{fact: xid 63, tier: elevated, holds: 1d, description: a row remap is pending}"
    Path("act.yaml").write_text(SETTINGS.replace("controller:", f"  rules: {{rules: [{rule}]}}\ncontroller:"))
    output = invoke(*GO, "--events", "events.parquet", "--dry-run").stdout
    assert "would    avoid n5 (elevated)" in output
    assert "a row remap is pending" in output


def test_a_reason_forges_no_line_and_moves_no_cursor(place):
    forged = "hot\nrelease n3\r\x1b[2Jdecision 9\u2028\u202e"
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    reasoned = replace(records[3], reasons=(RiskReason(forged, "telemetry", 1.0, None),))
    write(place / "scores", *records[:3], reasoned, *records[4:], at=now, model={"fitted_at": now.isoformat()})
    for output in (invoke(*GO).stdout, invoke("ledger", "why", "n3").stdout):
        (line,) = (line for line in output.split("\n") if "hot" in line)
        assert "decision 9" in line
        assert line.isprintable()


def test_settings_without_any_threshold_say_that_no_score_has_a_tier(place):
    (place / "act.yaml").write_text("controller: {interval: 1m}")
    output = invoke(*GO).stdout
    assert "note: no thresholds are set (policy.thresholds): only hard rules act" in output
    assert "nothing to do" in output
