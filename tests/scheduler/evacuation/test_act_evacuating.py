"""`predrain act` empties nodes of a cluster in a file, with real commands as hooks; and the ledger tells of it."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from predrain.command import app
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.codec import plain_of
from scheduler.ports.workloads import CheckpointOffer, Workload
from tests.scheduler.score_files import record, write

SETTINGS = """
policy:
  thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}
  hysteresis: {rise_after: 1}
  stages: {pinned: {c/g: hard}}
controller: {lease: 20s}
evacuation:
  enabled: true
  checkpoint: {otherwise: command, command: {argv: [PLACE/hook]}}
  verification: {by: command, command: {argv: [PLACE/hook]}}
"""
HOOK = """
import json, pathlib, sys
payload = json.load(sys.stdin)
with open("PLACE/told", "a") as file:
    file.write(json.dumps([sys.argv[1:], payload]) + "\\n")
if payload["kind"] == "checkpoint":
    sys.exit(0 if pathlib.Path("PLACE/written").exists() else 75)
if payload["step"] == "result":
    print(json.dumps({"state": "passed", "node": payload["node"], "key": payload["key"], "words": "level 3"}))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    nodes = [
        {"name": f"n{i}", "cluster": "c", "group": "g", "rack": f"r{i}", "units": [f"gpu{i}"]} for i in range(12)
    ]  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (tmp_path / "act.yaml").write_text(SETTINGS.replace("PLACE", str(tmp_path)))
    (tmp_path / "hook").write_text(f"#!{sys.executable}\n" + HOOK.replace("PLACE", str(tmp_path)))
    (tmp_path / "hook").chmod(0o755)
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    fitted = (now - timedelta(days=1)).isoformat()
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": fitted})
    runs(tmp_path, Workload("train-0", "uid-0", "pod", "n3", "Job train", job=None, checkpoint=None))
    return tmp_path


def runs(place, *workloads, **others):
    listed = [plain_of(each) for each in workloads]
    (place / "cluster.workloads.json").write_text(json.dumps({"format": 1, "workloads": listed, **others}))


def workloads(place):
    return json.loads((place / "cluster.workloads.json").read_text())


GO = ("act", "--cluster", "cluster.json", "--scores", "scores", "--settings", "act.yaml")


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def told(place):
    lines = (place / "told").read_text().splitlines() if (place / "told").exists() else []
    return [json.loads(line) for line in lines]


def test_from_the_risk_to_the_release_with_commands_as_hooks(place):
    offer = CheckpointOffer("command")
    runs(place, Workload("train-0", "uid-0", "pod", "n3", "Job train", checkpoint=offer))
    shown = run(*GO, "--dry-run").stdout
    assert "would    evict train-0 on n3: after a checkpoint by command" in shown
    assert told(place) == []

    assert "waiting  checkpoint train-0 on n3: exit code 75" in run(*GO).stdout
    run(*GO)
    (place / "written").touch()
    gone = run(*GO).stdout
    assert "done     checkpoint train-0 on n3" in gone
    assert "done     evict train-0 on n3" in gone
    content = workloads(place)
    assert content["workloads"][0]["ending"] is True
    (place / "cluster.workloads.json").write_text(json.dumps({**content, "workloads": []}))
    emptied = run(*GO).stdout
    assert "done     empty n3" in emptied
    assert "passed   verify n3: level 3" in run(*GO).stdout
    assert "done     release n3" in run(*GO).stdout
    left = next(each for each in json.loads((place / "cluster.json").read_text())["nodes"] if each["name"] == "n3")
    assert (left["taints"], left["annotations"]) == ([], {})

    assert len({argv[1] for argv, payload in told(place) if payload["kind"] == "checkpoint"}) == 1
    why = run("ledger", "why", "n3").stdout
    for words in (
        "checkpoint train-0 through command: done",
        "evict train-0 through scheduler: done",
        "verified: pass",
    ):
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
    (place / "cluster.workloads.json").unlink()
    failed = run(*GO, code=1)
    assert "evacuation.enabled is true, and nothing tells what runs on the nodes (cluster.json)." in failed.stderr
    run("act", "--cluster", "cluster.json", "--settings", "act.yaml", "--release-all")


def test_a_diagnostic_that_the_scheduler_cannot_start_is_refused_at_once(place):
    text = (place / "act.yaml").read_text().replace("by: command", "by: scheduler")
    (place / "act.yaml").write_text(text)
    assert "this scheduler starts no diagnostics here (cluster.json)" in run(*GO, code=1).stderr


def test_a_file_of_workloads_that_cannot_be_used_says_where(place):
    runs(place, plain_of(Workload("a", "u", "pod", "n3")), plain_of(Workload("b", "u", "pod", "n3")))
    assert "uid u is listed twice" in run(*GO, code=1).stderr
    (place / "cluster.workloads.json").write_text('{"format": 9}')
    assert "it has format 9, this code reads 1" in run(*GO, code=1).stderr
    for undo in ("--kill", "--resume", "--release-all"):
        run("act", "--cluster", "cluster.json", "--settings", "act.yaml", undo)


def test_a_ledger_from_before_evacuations_is_read_and_goes_on(place):
    file = place / "old.db"
    ledger = SqliteLedger(file)
    for name in ("calls_settled", "findings", "calls"):
        ledger._link.execute(f"DROP TABLE {name}")
    ledger.close()
    assert LedgerReader(file).work("n3") == []
    assert LedgerReader(file).results() == []
    run(*GO, "--ledger", "old.db")
    assert [each["kind"] for each in LedgerReader(file).work("n3")][:2] == ["began", "evict"]
    with pytest.raises(Exception, match="append-only"):
        SqliteLedger(file)._link.execute("UPDATE calls SET kind = 'x'")
