import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.programs import CommandError, run_command
from telemetry.collect.outbox import Outbox
from telemetry.collect.slurm.collector import SlurmCollector
from telemetry.phrases import PhraseRules
from tests.clock import NOW, Clock
from tests.telemetry.collect.builders import staged, staging


class Slurm:
    """A Slurm by hand: what it would print, and what it was asked."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {"n1": {"state": "idle"}}
        self.rows: list[str] = []
        self.asked: list[Sequence[str]] = []
        self.refused: dict[str, CommandError] = {}
        self.accounting = True
        self.resources = "cpu|\nmem|\ngres|gpu\ngres|gpu:h100\n"

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(command)
        if command[0] in self.refused:
            raise self.refused[command[0]]
        if command[0] == "scontrol":
            raise CommandError(command, "unrecognized option '--json'", lasting=True)
        if command[0] == "sinfo":
            return json.dumps({"nodes": [{"name": name, **node} for name, node in self.nodes.items()]})
        if command[0] == "sacct":
            if not self.accounting:
                raise CommandError(command, "Slurm accounting storage is disabled", lasting=True)
            return "\n".join(self.rows)
        if command[0] == "sacctmgr":
            return self.resources
        job = {"job_id": 5, "job_state": "RUNNING", "start_time": int(NOW.timestamp()), "nodes": "n1"}
        return json.dumps({"jobs": [job]})


class Watched:
    """A collector of this Slurm, in a folder of its own; each look is a minute later."""

    def __init__(self, folder: Path, since: datetime | None = None) -> None:
        self.where, self.slurm, self.clock = staging(folder), Slurm(), Clock()
        self._since = since
        self.start()

    def start(self) -> None:
        self.outbox = Outbox(self.where, "slurm")
        self.collector = SlurmCollector(
            self.outbox, self.where, run=self.slurm, rules=PhraseRules(), clock=self.clock, since=self._since
        )

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.collector.once()
            self.clock.move(minutes=1)

    def asked(self, program: str) -> list[Sequence[str]]:
        return [command for command in self.slurm.asked if command[0] == program]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path, since=NOW - timedelta(days=3))
    yield made
    made.outbox.close()


def sacct(job: str, start: datetime, end: datetime | None = None, state: str = "RUNNING") -> str:
    ended = "Unknown" if end is None else int(end.timestamp())
    return f"{job}|{state}|{int(start.timestamp())}|{ended}|n1|gres/gpu=8"


def test_looks_land_what_changed_and_survive_a_restart(watched: Watched):
    watched.look()
    for node in ({"state": "idle", "state_flags": ["DRAIN"], "reason": "RMA"}, {"state": "idle"}):
        watched.slurm.nodes["n1"] = node
        for _ in range(2):
            watched.outbox.close()
            watched.start()
            watched.look()
    rows = staged(watched.where)
    assert [(row["type"], row["code"], row["node"], row["gpu"]) for row in rows] == [
        ("drain", "drain", "n1", None),
        ("replacement", "replacement", "n1", None),
        ("drain", "resume", "n1", None),
    ]
    assert rows[0]["known_at"] == NOW + timedelta(minutes=1)
    assert [command[0] for command in watched.slurm.asked[:3]] == ["scontrol", "sinfo", "sacct"]


def test_a_running_job_lands_once_and_again_when_it_ends(watched: Watched):
    start = NOW - timedelta(hours=2)
    watched.slurm.rows = [sacct("7", start)]
    watched.look(2)
    watched.slurm.rows = [sacct("7", start, NOW, "COMPLETED")]
    watched.look(2)
    rows = staged(watched.where, "jobs")
    assert [(row["job"], row["started_at"], row["gpus"], row["ended_at"], row["outcome"]) for row in rows] == [
        ("7", start, 8, None, None),
        ("7", start, 8, NOW, "completed"),
    ]


def test_history_is_asked_for_a_day_at_a_time_and_gone_on_with(watched: Watched):
    watched.look()
    asked = watched.asked("sacct")
    assert asked[0][6:8] == ("--starttime=2026-02-26T12:00:00", "--endtime=2026-02-27T12:00:00")
    assert len(asked) == 3
    watched.look()
    assert watched.asked("sacct")[3][6:8] == ("--starttime=2026-03-01T11:00:00", "--endtime=2026-03-01T12:02:00")


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ({"accounting": False}, "Slurm has no accounting"),
        ({"resources": "cpu|\nmem|\n"}, "sacct reports no GPUs of jobs"),
    ],
    ids=["none", "without GPUs"],
)
def test_without_accounting_jobs_come_from_the_controller(watched, caplog, lacks, message):
    watched.slurm.rows = ["9|COMPLETED|1772000000|1772003600|n1|cpu=8"]
    vars(watched.slurm).update(lacks)
    watched.look(2)
    assert [row["job"] for row in staged(watched.where, "jobs")] == ["5"]
    assert caplog.text.count(message) == 1


def test_a_controller_that_is_down_is_tried_again_and_logged_once(watched: Watched, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    error = CommandError(["sinfo"], "Unable to contact slurm controller")
    faults: list[dict[str, CommandError]] = [{"sinfo": error}, {"sinfo": error}, {}]

    def stop(_seconds: float) -> bool:
        if not faults:
            return True
        watched.slurm.refused = faults.pop(0)
        return False

    watched.collector.follow(60.0, stop)
    assert (watched.collector.counts["rounds"], watched.collector.counts["failed"]) == (4, 2)
    assert caplog.text.count("reading Slurm's nodes: `sinfo`") == 1
    assert caplog.text.count("reading Slurm's nodes: recovered after 2 failures") == 1


def test_once_says_that_slurm_does_not_answer(watched: Watched):
    watched.slurm.refused = {"sinfo": CommandError(["sinfo"], "no answer within 60 s")}
    with pytest.raises(InputError, match="Slurm does not respond: `sinfo`: no answer within 60 s") as error:
        watched.look()
    assert "jobs" in watched.outbox.position  # what could be had is kept
    assert error.value.advice.startswith("Run this on a host where `sinfo` works")


def test_a_node_that_is_not_listed_for_a_moment_keeps_its_drain(watched: Watched):
    both = watched.slurm.nodes | {"n2": {"state": "idle", "state_flags": ["DRAIN"], "reason": "x"}}
    for watched.slurm.nodes in (both, {"n1": {"state": "idle"}}, both):
        watched.look()
    assert [row["node"] for row in staged(watched.where)] == ["n2"]


@pytest.mark.parametrize(
    ("command", "message", "lasting"),
    [
        (["sleep", "9"], r"no answer within 0\.5 s", False),
        (["/nowhere/none"], "No such file", True),
        (["sh", "-c", "echo unrecognized option >&2; echo try --help >&2; exit 1"], "option try --help$", True),
        (["false"], "exit status 1", False),
    ],
)
def test_commands_fail_clearly(command: list[str], message: str, lasting: bool):
    with pytest.raises(CommandError, match=message) as error:
        run_command(command, timeout_s=0.5 if command[0] == "sleep" else 60.0)
    assert error.value.lasting is lasting
