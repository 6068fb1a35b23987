"""The four verbs, as an operator runs them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from click.testing import Result

from telemetry.staging.folder import StagingFolder
from tests.processes import invoke
from tests.telemetry.collect.builders import staged
from tests.waiting import wait

PREDRAIN = str(Path(sys.executable).with_name("predrain"))
DIAG = Path(__file__).parents[2] / "data" / "dcgmi" / "dcgm4.json"
XID = "kernel: NVRM: Xid (PCI:0000:10:00): 79, pid=1, name=x, GPU has fallen off the bus."


def collect(folder: Path, *arguments: str, code: int = 0) -> Result:
    return invoke("collect", *arguments, "--dataset", "fleet", cwd=folder, code=code)


def events(folder: Path) -> list:
    return staged(StagingFolder(folder / "fleet.live", writer="test"))


def test_a_log_once_and_followed_until_a_signal(tmp_path: Path):
    log = tmp_path / "kern.log"
    log.write_text(f"2026-03-01T10:00:00+00:00 h1 {XID}\n")
    arguments = ("kernel-log", "--source", "kern.log", "--json")
    result = json.loads(collect(tmp_path, *arguments, "--once").stdout)
    assert (result["events_written"], result["unclear"]) == (1, 0)
    process = subprocess.Popen(
        [PREDRAIN, "collect", *arguments, "--dataset", "fleet"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        with log.open("a") as stream:
            stream.write(f"2026-03-01T11:00:00+00:00 h1 {XID}\n")
        wait(lambda: len(events(tmp_path)) == 2)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, json.loads(out)["events_written"]) == (0, 1)
    assert [(row["node"], row["code"], row["pci_bus_id"]) for row in events(tmp_path)] == [
        ("h1", "79", "00000000:10:00")
    ] * 2


def test_a_log_whose_times_cannot_be_read_is_an_error(tmp_path: Path):
    (tmp_path / "xids.txt").write_text(f"{XID.removeprefix('kernel: ')}\n" * 3)
    done = collect(tmp_path, "kernel-log", "--source", "xids.txt", "--node", "h1", "--once", code=1)
    assert "none of 3 lines about XIDs has a readable timestamp" in done.stderr
    assert "predrain import --events" in done.stderr


def test_a_file_that_is_no_report_of_diagnostics_is_refused(tmp_path: Path):
    (tmp_path / "x.json").write_text("hello\n")
    assert (
        "the file has no JSON report (x.json)"
        in collect(tmp_path, "diagnostics", "x.json", "--node", "n1", code=1).stderr
    )


def test_wrong_words(tmp_path: Path):
    command = ("kernel-log", "--source", "kern.log")
    assert "cannot read both the journal and files" in collect(tmp_path, *command, "--source", "journal", code=2).stderr
    assert "is not a time zone" in collect(tmp_path, *command, "--timezone", "Mars", code=2).stderr


def test_tickets_and_diagnostics(tmp_path: Path):
    (tmp_path / "t.csv").write_text("timestamp,node,type\n2026-03-01T10:00:00Z,n1,RMA\n")
    assert json.loads(collect(tmp_path, "tickets", "t.csv", "--json").stdout)["events_written"] == 1
    os.symlink(DIAG, tmp_path / "diag.json")
    command = ("diagnostics", "diag.json", "--node", "n1", "--json")
    assert "unknown GPU" in collect(tmp_path, *command, code=1).stderr
    (tmp_path / "g.csv").write_text("index,uuid\n0,GPU-a\n1,GPU-b\n10,GPU-k\n")
    run = collect(tmp_path, *command, "--gpus", "g.csv")
    assert json.loads(run.stdout)["verdicts"] == {"pass": 1, "fail": 1, "inconclusive": 1}
    assert len(events(tmp_path)) == 4
