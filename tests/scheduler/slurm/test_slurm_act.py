"""`predrain act --scheduler slurm`, as an operator uses it: marks, emptied nodes with commands as hooks, undoing."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from telemetry.dataset.schema import EVENTS
from tests.processes import invoke
from tests.scheduler.score_files import record, write
from tests.scheduler.slurm.fake_slurm import FakeSlurm, job_row

POLICY = """
policy:
  thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}
  hysteresis: {rise_after: 1}
  stages: {pinned: {c/g: hard}}
  budget: {disruption_budgets: [], rate_limits: []}
  cost_benefit: {always: true, may_wait: false}
"""
SLURM = "slurm: {folder: PLACE/shared, cluster: c, bin_dir: PLACE/bin}\n"
EVACUATION = """
controller: {lease: 20s}
evacuation:
  enabled: true
  checkpoint: {default: command, command: {argv: [PLACE/hook]}}
  verification: {method: command, command: {argv: [PLACE/hook]}}
"""
HOOK = """
import json, pathlib, sys
payload = json.load(sys.stdin)
with open("PLACE/requests", "a") as file:
    file.write(json.dumps([sys.argv[1:], payload]) + "\\n")
if payload["kind"] == "checkpoint":
    sys.exit(0 if pathlib.Path("PLACE/written").exists() else 75)
if payload["step"] == "result":
    print(json.dumps({"state": "passed", "node": payload["node"], "key": payload["key"], "message": "level 3"}))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    made = FakeSlurm(tmp_path / "bin", nodes=12)
    made.tell(jobs=[job_row(5, "n3")])
    (tmp_path / "shared").mkdir()
    settings(tmp_path, POLICY + SLURM)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()})
    return made


@pytest.fixture
def place(fake: FakeSlurm, tmp_path: Path) -> Path:
    """The same, with nodes that are emptied."""
    settings(tmp_path, POLICY + SLURM + EVACUATION)
    (tmp_path / "hook").write_text(f"#!{sys.executable}\n" + HOOK.replace("PLACE", str(tmp_path)))
    (tmp_path / "hook").chmod(0o755)
    return tmp_path


def settings(place: Path, text: str) -> None:
    (place / "act.yaml").write_text(text.replace("PLACE", str(place)))


ACT = ("act", "--scheduler", "slurm", "--settings", "act.yaml")
GO = (*ACT, "--scores", "scores")


def hook_calls(place):
    lines = (place / "requests").read_text().splitlines() if (place / "requests").exists() else []
    return [json.loads(line) for line in lines]


def test_act_then_kill_then_undo(fake):
    before = fake.cluster["nodes"]
    assert "node n3: State: (none) -> DRAIN" in invoke(*GO, "--dry-run").stdout
    assert fake.cluster["nodes"] == before
    done = json.loads(invoke(*GO, "--json").stdout)
    assert [(step["verb"], step["outcome"]) for step in done["steps"]] == [
        ("swap", "done"), ("drain", "done"), ("publish", "already"),
    ]  # fmt: skip
    node = fake.cluster["nodes"][3]
    assert node["state"] == ["IDLE", "DRAIN"]
    assert node["reason"].startswith("predrain: tier=high risk=0.9000 until=")
    assert "kill switch set" in invoke(*ACT, "--kill").stderr
    assert "nothing to do" in invoke(*GO).stdout
    invoke(*ACT, "--resume")
    invoke(*ACT, "--release-all")
    left = fake.cluster["nodes"][3]
    assert (left["state"], left["extra"], left["weight"]) == (["IDLE"], "", 1)


def test_a_shared_folder_that_is_gone_keeps_no_mark_from_being_released(fake, tmp_path):
    invoke(*GO)
    node = fake.cluster["nodes"][3]
    assert "DRAIN" in node["state"]
    (tmp_path / "shared").rename(tmp_path / "unmounted")
    assert "does not exist" in invoke(*ACT, "--kill", code=1).stderr
    assert "DRAIN" in fake.cluster["nodes"][3]["state"]
    shown = invoke(*ACT, "--release-all", code=1)
    assert "other controllers may set new markers" in shown.stderr
    assert "done     release n3" in shown.stdout
    left = fake.cluster["nodes"][3]
    assert (left["state"], left["extra"]) == (["IDLE"], "")


def test_what_is_missing_is_named(fake, tmp_path):
    settings(tmp_path, POLICY)
    assert "the settings have no section slurm (--settings)" in invoke(*GO, code=1).stderr
    settings(tmp_path, POLICY + SLURM.replace("shared", "gone"))
    assert "gone does not exist: check that its disk is mounted" in invoke(*GO, code=1).stderr
    settings(tmp_path, POLICY + "slurm: {folder: /x, hard_stat: fail}\n")
    assert "Did you mean 'hard_state'?" in invoke(*GO, code=1).stderr
    assert "requires --scheduler file" in invoke(*GO, "--cluster", "x", code=2).stderr


def test_from_the_risk_to_the_release_with_commands_as_hooks(fake, place):
    shown = invoke(*GO, "--dry-run").stdout
    assert "would    evict 5 on n3: after a checkpoint by command" in shown
    assert hook_calls(place) == []

    assert "waiting  checkpoint 5 on n3: exit code 75" in invoke(*GO).stdout
    invoke(*GO)
    (place / "written").touch()
    gone = invoke(*GO).stdout
    assert "done     checkpoint 5 on n3" in gone
    assert "done     evict 5 on n3" in gone
    assert ["scontrol", "requeue", "5"] in [call[:3] for call in fake.calls]
    fake.tell(jobs=[])
    assert "done     empty n3" in invoke(*GO).stdout
    assert "passed   verify n3: level 3" in invoke(*GO).stdout
    assert "done     release n3" in invoke(*GO).stdout
    left = fake.cluster["nodes"][3]
    assert (left["state"], left["extra"]) == (["IDLE"], "")

    assert len({argv[1] for argv, payload in hook_calls(place) if payload["kind"] == "checkpoint"}) == 1
    why = invoke("ledger", "why", "n3").stdout
    for message in ("checkpoint 5 through command: done", "evict 5 through scheduler: done", "verified: pass"):
        assert message in why
    kinds = [step["kind"] for step in json.loads(invoke("ledger", "why", "n3", "--json").stdout)["work"]]
    assert kinds == ["started", "checkpoint", "acknowledged", "evict", "empty", "verify", "verified", "ended"]
    invoke("ledger", "export", "--out", "own.parquet")
    exported = pq.read_table("own.parquet")
    assert exported.schema.equals(EVENTS)
    events = exported.to_pylist()
    assert [(event["type"], event["gpu"], event["code"], event["source"]) for event in events] == [
        ("drain", None, "high", "predrain"),
        ("drain", None, "release", "predrain"),
        ("diagnostic", "gpu3", "pass", "verification"),
    ]


def test_a_cluster_whose_workloads_nobody_lists_is_not_emptied_and_reports_it(place):
    nodes = [{"name": f"n{i}", "cluster": "c", "group": "g", "units": [f"gpu{i}"]} for i in range(12)]
    (place / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    file = ("act", "--cluster", "cluster.json", "--settings", "act.yaml")
    failed = invoke(*file, "--scores", "scores", code=1)
    assert "evacuation.enabled is true" in failed.stderr
    invoke(*file, "--release-all")


def test_a_diagnostic_that_the_scheduler_cannot_start_is_refused_at_once(place):
    settings(place, (place / "act.yaml").read_text().replace("method: command", "method: scheduler"))
    assert "this scheduler cannot start diagnostics (Slurm c)" in invoke(*GO, code=1).stderr
