"""A run that is killed while it writes leaves the scores as they were or as they should be, never in between."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from policy.risk_record import ModelName, RiskRecord
from serving.scores.writing import ScoresFolder, write_decision

ROOT = Path(__file__).resolve().parents[3]
T = datetime(2026, 1, 1, 6, tzinfo=UTC)
RECORD = RiskRecord(
    unit="g1", gpu="g1", node="n1", slot=None, status="ok", unknown_reason=None, risk=0.1, risks={}, score=-2.0, rank=1,
    alert=True, tier="clear", decision_time=T, issued_at=T, expires_at=T + timedelta(hours=12),
    horizon=timedelta(hours=24), model=ModelName("d", "p"), sample_age_seconds=600.0, completeness=1.0,
)  # fmt: skip

# Kills itself at the Nth call that the operating system is asked to sync or rename something.
SCRIPT = """
import json, os, pathlib, signal, sys
from datetime import datetime
from policy.risk_record import RiskRecord
from serving.scores.writing import ScoresFolder, write_decision
out, at, record = pathlib.Path(sys.argv[1]), int(sys.argv[2]), RiskRecord.from_json(json.loads(sys.argv[3]))
calls = 0
def counted(real):
    def call(*given, **more):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **more)
    return call
os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
pathlib.Path.rename, pathlib.Path.replace = counted(pathlib.Path.rename), counted(pathlib.Path.replace)
scores = ScoresFolder(out)
with scores.building(record.decision_time) as swap:
    write_decision(swap.path, [record] * 50, {"format": 2})
    swap.commit()
scores.point_to_newest()
print("CALLS", calls)
"""


def run(out: Path, at: int, record: RiskRecord) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(out), str(at), json.dumps(record.to_json())]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def pointed(out: Path) -> str:
    name = json.loads((out / "latest.json").read_text())["decision"]
    folder = out / "decisions" / name
    assert json.loads((folder / "summary.json").read_text()) == {"format": 2}
    assert len((folder / "risks.jsonl").read_text().splitlines()) == 50
    return str(name)


def test_a_kill_at_any_write_leaves_old_or_new_and_the_next_run_goes_on(tmp_path: Path) -> None:
    first = ScoresFolder(tmp_path)
    with first.building(T) as swap:
        write_decision(swap.path, [RECORD] * 50, {"format": 2})
        swap.commit()
    first.point_to_newest()
    record = replace(RECORD, decision_time=T + timedelta(hours=6))
    killed = 0
    for at in range(1, 12):
        done = run(tmp_path, at, record)
        current = pointed(tmp_path)
        whole = ScoresFolder(tmp_path).stamps()
        assert whole in (["20260101T060000Z"], ["20260101T060000Z", "20260101T120000Z"])
        if done.returncode == 0:
            assert (current, len(whole)) == ("20260101T120000Z", 2)
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        assert current in whole
        if len(whole) == 2:  # it was killed before the pointer: the next run of any kind sets it
            ScoresFolder(tmp_path).point_to_newest()
            assert pointed(tmp_path) == "20260101T120000Z"
            break
    else:
        pytest.fail("it never ended by itself")
    assert killed >= 4
    hidden = [path.name for path in (tmp_path / "decisions").iterdir() if path.name.startswith(".")]
    assert [name for name in hidden if not name.endswith(".lock")] == []  # an empty one goes with its decision


def test_a_full_disk_leaves_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foundation.errors import InputError

    def full(*_given: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    scores = ScoresFolder(tmp_path)
    monkeypatch.setattr("serving.scores.writing.pq.write_table", full)
    with pytest.raises(InputError, match="the disk is full"), scores.building(T) as swap:
        write_decision(swap.path, [RECORD], {"format": 2})
    assert scores.stamps() == []
    assert list((tmp_path / "decisions").iterdir()) == []
