import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from telemetry.collect.outbox import Outbox
from telemetry.collect.slurm.collector import SlurmCollector
from telemetry.collect.slurm.commands import CommandError, run_command
from telemetry.collect.slurm.drain_reasons import DEFAULT_RULES
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from tests.telemetry.collect.builders import (
    NOW,
    Clock,
    landed,
    landing,
)


class Slurm:
    """A Slurm by hand: what it would print, and what it was asked."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {"n1": {"state": "idle"}}
        self.rows: list[str] = []
        self.asked: list[Sequence[str]] = []
        self.refused: dict[str, CommandError] = {}
        self.accounting = True

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
        job = {"job_id": 5, "job_state": "RUNNING", "start_time": int(NOW.timestamp()), "nodes": "n1"}
        return json.dumps({"jobs": [job]})


def collector(outbox: Outbox, where: Landing, slurm: Slurm, clock: Clock, since: datetime | None = None):
    return SlurmCollector(outbox, where, run=slurm, rules=DEFAULT_RULES, clock=clock, since=since)


def never(_seconds: float) -> bool:
    return False


def sacct(job: str, start: datetime, end: datetime | None = None, state: str = "RUNNING") -> str:
    ended = "Unknown" if end is None else int(end.timestamp())
    return f"{job}|{state}|{int(start.timestamp())}|{ended}|n1|gres/gpu=8"


def test_rounds_land_what_changed_and_survive_a_restart(tmp_path: Path):
    where, slurm, clock = landing(tmp_path), Slurm(), Clock()
    with Outbox(where, "slurm") as outbox:
        collector(outbox, where, slurm, clock).once(never)
    slurm.nodes["n1"] = {"state": "idle", "state_flags": ["DRAIN"], "reason": "RMA"}
    clock.move(minutes=1)
    for _ in range(2):
        with Outbox(where, "slurm") as outbox:
            collector(outbox, where, slurm, clock).once(never)
    slurm.nodes["n1"] = {"state": "idle"}
    clock.move(minutes=1)
    with Outbox(where, "slurm") as outbox:
        collector(outbox, where, slurm, clock).once(never)
    rows = landed(where)
    assert [(row["type"], row["code"], row["node"], row["gpu"]) for row in rows] == [
        ("drain", "drain", "n1", None),
        ("replacement", "replacement", "n1", None),
        ("drain", "resume", "n1", None),
    ]
    assert rows[0]["known_at"] == NOW + timedelta(minutes=1)
    assert [command[0] for command in slurm.asked[:3]] == ["scontrol", "sinfo", "sacct"]


def test_a_running_job_lands_once_and_again_when_it_ends(tmp_path: Path):
    where, slurm, clock = landing(tmp_path), Slurm(), Clock()
    start = NOW - timedelta(hours=2)
    with Outbox(where, "slurm") as outbox:
        watch = collector(outbox, where, slurm, clock)
        slurm.rows = [sacct("7", start)]
        watch.once(never)
        watch.once(never)
        slurm.rows = [sacct("7", start, NOW, "COMPLETED")]
        clock.move(minutes=1)
        watch.once(never)
        watch.once(never)
    rows = landed(where, "jobs")
    assert [(row["job"], row["gpus"], row["ended_at"], row["outcome"]) for row in rows] == [
        ("7", 8, None, None),
        ("7", 8, NOW, "completed"),
    ]
    assert {row["started_at"] for row in rows} == {start}


def test_history_is_asked_for_a_day_at_a_time_and_gone_on_with_after_a_failure(tmp_path: Path):
    where, slurm, clock = landing(tmp_path), Slurm(), Clock()
    with Outbox(where, "slurm") as outbox:
        watch = collector(outbox, where, slurm, clock, since=NOW - timedelta(days=3))
        watch.once(never)
        asked = [command[6:8] for command in slurm.asked if command[0] == "sacct"]
        assert asked[0] == ("--starttime=2026-02-26T12:00:00", "--endtime=2026-02-27T12:00:00")
        assert len(asked) == 3
        slurm.asked.clear()
        clock.move(minutes=5)
        watch.once(never)
        (command,) = [command for command in slurm.asked if command[0] == "sacct"]
        assert command[6:8] == ("--starttime=2026-03-01T11:00:00", "--endtime=2026-03-01T12:06:00")


def test_without_accounting_jobs_come_from_the_controller(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    where, slurm = landing(tmp_path), Slurm()
    slurm.accounting = False
    with Outbox(where, "slurm") as outbox:
        watch = collector(outbox, where, slurm, Clock())
        watch.once(never)
        watch.once(never)
    assert [row["job"] for row in landed(where, "jobs")] == ["5"]
    assert caplog.text.count("Slurm keeps no accounting") == 1


def test_a_controller_that_is_down_is_tried_again_and_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    where, slurm, clock = landing(tmp_path), Slurm(), Clock()
    with Outbox(where, "slurm") as outbox:
        watch = collector(outbox, where, slurm, clock)
        turns = 0

        def stop(_seconds: float) -> bool:
            nonlocal turns
            turns += 1
            slurm.refused = (
                {"sinfo": CommandError(["sinfo"], "Unable to contact slurm controller")} if turns < 3 else {}
            )
            return turns == 4

        watch.follow(60.0, stop)
        assert (watch.counts["rounds"], watch.counts["failed"]) == (4, 2)
    assert caplog.text.count("cannot be read") == 1
    assert caplog.text.count("can be read again") == 1


def test_once_says_that_slurm_does_not_answer(tmp_path: Path):
    where, slurm = landing(tmp_path), Slurm()
    slurm.refused = {"sinfo": CommandError(["sinfo"], "no answer within 60 s")}
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    with Outbox(where, "slurm") as outbox:
        with pytest.raises(InputError, match="Slurm does not answer: `sinfo`: no answer within 60 s") as error:
            collector(outbox, where, slurm, Clock()).once(wait)
        assert len(waits) == 2
        assert "jobs" in outbox.position  # what could be had is kept
    assert error.value.do.startswith("Run this where `sinfo` works")


def test_a_node_that_is_not_listed_for_a_moment_keeps_its_drain(tmp_path: Path):
    where, slurm, clock = landing(tmp_path), Slurm(), Clock()
    slurm.nodes["n2"] = {"state": "idle", "state_flags": ["DRAIN"], "reason": "x"}
    with Outbox(where, "slurm") as outbox:
        watch = collector(outbox, where, slurm, clock)
        for nodes in (slurm.nodes, {"n1": {"state": "idle"}}, slurm.nodes):
            slurm.nodes = nodes
            watch.once(never)
    assert [row["node"] for row in landed(where)] == ["n2"]


def test_commands_fail_clearly(tmp_path: Path):
    assert run_command(["echo", "x"]) == "x\n"
    assert run_command(["sh", "-c", "echo $SLURM_X"], environment={"SLURM_X": "1"}) == "1\n"
    with pytest.raises(CommandError, match=r"no answer within 0\.1 s"):
        run_command(["sleep", "9"], timeout_s=0.1)
    with pytest.raises(CommandError, match="No such file"):
        run_command([str(tmp_path / "none")])
    with pytest.raises(CommandError) as error:
        run_command(["sh", "-c", "echo unrecognized option >&2; echo try --help >&2; exit 1"])
    assert error.value.lasting
    assert str(error.value).endswith("unrecognized option try --help")
