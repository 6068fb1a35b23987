"""`predrain act --scheduler slurm`, as an operator uses it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

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
  budget: {disruption_budgets: [], rate_limits: []}
  cost_benefit: {always: true}
"""
SECTION = "slurm: {{folder: '{shared}', cluster: c, bin_dir: '{bin}'}}\n"


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    made = FakeSlurm(tmp_path / "bin", nodes=12)
    made.tell(jobs=[job_row(5, "n3")])
    (tmp_path / "shared").mkdir()
    (tmp_path / "act.yaml").write_text(SETTINGS + SECTION.format(shared=tmp_path / "shared", bin=made.folder))
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu{i}", f"n{i}", 0.9 if i == 3 else 0.01, now) for i in range(12)]
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()})
    return made


ACT = ("act", "--scheduler", "slurm", "--settings", "act.yaml")
GO = (*ACT, "--scores", "scores")


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_act_then_kill_then_undo(fake):
    before = fake.told["nodes"]
    assert "node n3: State: (none) -> DRAIN" in run(*GO, "--dry-run").stdout
    assert fake.told["nodes"] == before
    done = json.loads(run(*GO, "--json").stdout)
    assert [(each["verb"], each["outcome"]) for each in done["steps"]] == [
        ("publish", "done"), ("taint", "done"), ("drain", "done"),
    ]  # fmt: skip
    node = fake.told["nodes"][3]
    assert node["state"] == ["IDLE", "DRAIN"]
    assert node["reason"].startswith("predrain: tier=high risk=0.9000 until=")
    assert "kill switch on" in run(*ACT, "--kill").stderr
    assert "nothing to do" in run(*GO).stdout
    run(*ACT, "--resume")
    run(*ACT, "--release-all")
    left = fake.told["nodes"][3]
    assert (left["state"], left["reason"], left["extra"], left["weight"]) == (["IDLE"], "", "", 1)


def test_a_slurm_that_is_not_known_is_told_and_left_alone(fake):
    fake.tell(version=99, only_own=True)
    shown = run(*GO, code=1)
    assert "v0.0.99; v0.0.38 to v0.0.45 are known: it is only read" in shown.output
    assert fake.told["nodes"][3]["state"] == ["IDLE"]


def test_what_is_missing_is_named(fake, tmp_path):
    (tmp_path / "act.yaml").write_text(SETTINGS)
    assert "the settings have no section slurm (--settings)" in run(*GO, code=1).stderr
    (tmp_path / "act.yaml").write_text(SETTINGS + SECTION.format(shared=tmp_path / "gone", bin="/bin"))
    assert "there is no folder for the controllers' state here" in run(*GO, code=1).stderr
    (tmp_path / "act.yaml").write_text(SETTINGS + "slurm: {folder: /x, hard_stat: fail}\n")
    assert "did you mean 'hard_state'?" in run(*GO, code=1).stderr
    assert "goes with --scheduler file only" in run(*GO, "--cluster", "x", code=2).stderr
