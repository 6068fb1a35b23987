"""`predrain act` empties nodes of a Slurm cluster, with real commands as hooks; and the ledger tells of it."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from predrain.command import app
from tests.scheduler.score_files import record, write
from tests.scheduler.slurm.fake_slurm import FakeSlurm, job_row

SETTINGS = """
policy:
  thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}
  hysteresis: {rise_after: 1}
  stages: {pinned: {c/g: hard}}
  cost_benefit: {always: true, may_wait: false}
controller: {lease: 20s}
evacuation:
  enabled: true
  checkpoint: {default: command, command: {argv: [PLACE/hook]}}
  verification: {method: command, command: {argv: [PLACE/hook]}}
slurm: {folder: PLACE/shared, cluster: c, bin_dir: PLACE/bin}
"""
HOOK = """
import json, pathlib, sys
payload = json.load(sys.stdin)
with open("PLACE/told", "a") as file:
    file.write(json.dumps([sys.argv[1:], payload]) + "\\n")
if payload["kind"] == "checkpoint":
    sys.exit(0 if pathlib.Path("PLACE/written").exists() else 75)
if payload["step"] == "result":
    print(json.dumps({"state": "passed", "node": payload["node"], "key": payload["key"], "message": "level 3"}))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    nodes = [{"name": f"n{i}", "cluster": "c", "group": "g", "units": [f"gpu{i}"]} for i in range(12)]
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (tmp_path / "shared").mkdir()
    (tmp_path / "act.yaml").write_text(SETTINGS.replace("PLACE", str(tmp_path)))
    (tmp_path / "hook").write_text(f"#!{sys.executable}\n" + HOOK.replace("PLACE", str(tmp_path)))
    (tmp_path / "hook").chmod(0o755)
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    fitted = (now - timedelta(days=1)).isoformat()
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": fitted})
    return tmp_path


GO = ("act", "--scheduler", "slurm", "--scores", "scores", "--settings", "act.yaml")
FILE = ("act", "--cluster", "cluster.json", "--settings", "act.yaml")


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def told(place):
    lines = (place / "told").read_text().splitlines() if (place / "told").exists() else []
    return [json.loads(line) for line in lines]


def test_from_the_risk_to_the_release_with_commands_as_hooks(place):
    slurm = FakeSlurm(place / "bin", nodes=12)
    slurm.tell(jobs=[job_row(5, "n3")])
    shown = run(*GO, "--dry-run").stdout
    assert "would    evict 5 on n3: after a checkpoint by command" in shown
    assert told(place) == []

    assert "waiting  checkpoint 5 on n3: exit code 75" in run(*GO).stdout
    run(*GO)
    (place / "written").touch()
    gone = run(*GO).stdout
    assert "done     checkpoint 5 on n3" in gone
    assert "done     evict 5 on n3" in gone
    assert ["scontrol", "requeue", "5"] in [call[:3] for call in slurm.calls]
    slurm.tell(jobs=[])
    assert "done     empty n3" in run(*GO).stdout
    assert "passed   verify n3: level 3" in run(*GO).stdout
    assert "done     release n3" in run(*GO).stdout
    left = slurm.told["nodes"][3]
    assert (left["state"], left["reason"], left["extra"]) == (["IDLE"], "", "")

    assert len({argv[1] for argv, payload in told(place) if payload["kind"] == "checkpoint"}) == 1
    why = run("ledger", "why", "n3").stdout
    for words in ("checkpoint 5 through command: done", "evict 5 through scheduler: done", "verified: pass"):
        assert words in why
    kinds = [each["kind"] for each in json.loads(run("ledger", "why", "n3", "--json").stdout)["work"]]
    assert kinds == ["began", "checkpoint", "acknowledged", "evict", "empty", "verify", "verified", "ended"]
    run("ledger", "export", "--out", "own.parquet")
    events = pq.read_table("own.parquet").to_pylist()
    assert [(each["type"], each["gpu"], each["code"], each["source"]) for each in events] == [
        ("drain", None, "high", "predrain"),
        ("drain", None, "release", "predrain"),
        ("diagnostic", "gpu3", "pass", "verification"),
    ]


def test_a_cluster_whose_workloads_nobody_tells_is_not_emptied_and_that_is_said(place):
    failed = run(*FILE, "--scores", "scores", code=1)
    assert "evacuation.enabled is true, and nothing tells what runs on the nodes (cluster.json)." in failed.stderr
    run(*FILE, "--release-all")


def test_a_diagnostic_that_the_scheduler_cannot_start_is_refused_at_once(place):
    FakeSlurm(place / "bin", nodes=12)
    text = (place / "act.yaml").read_text().replace("method: command", "method: scheduler")
    (place / "act.yaml").write_text(text)
    assert "this scheduler starts no diagnostics here (Slurm c)" in run(*GO, code=1).stderr
