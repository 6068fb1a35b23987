"""States that Slurm's nodes go through as planned, and the drains and failures among them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from telemetry.collect.outbox import Outbox
from telemetry.collect.slurm.collector import SlurmCollector
from telemetry.phrases import PhraseRules
from tests.clock import NOW, Clock
from tests.telemetry.collect.builders import staged, staging
from tests.telemetry.helpers import run_import

Look = tuple[list[str], str]


def collected(folder: Path, *looks: Look) -> tuple[list[tuple[str, str]], SlurmCollector]:
    """Return type and code of the events of looks at a node: states and reason."""
    where, clock = staging(folder), Clock()
    row: dict[str, Any] = {}

    def run(command: Sequence[str]) -> str:
        return json.dumps({"nodes": [row]}) if command[0] == "scontrol" else ""

    with Outbox(where, "slurm") as outbox:
        collector = SlurmCollector(outbox, where, run=run, rules=PhraseRules(), clock=clock, since=NOW)
        for states, reason in looks:
            row = {"name": "n1", "state": states, "reason": reason, "boot_time": int(NOW.timestamp()) - 86_400}
            collector.once()
            clock.move(minutes=1)
    return [(event["type"], event["code"]) for event in staged(where)], collector


IDLE: Look = (["IDLE"], "")


@pytest.mark.parametrize(
    "looks",
    [
        [(["IDLE", "POWERED_DOWN"], "")],
        [(["DOWN", "POWERED_DOWN"], ""), (["IDLE", "POWERING_UP"], "")],
        [(["IDLE", "POWERING_DOWN"], ""), (["DOWN", "POWERING_UP", "NOT_RESPONDING"], "Not responding")],
        [(["IDLE", "POWERED_DOWN"], ""), (["DOWN"], "Not responding")],
        [(["DRAIN", "REBOOT_REQUESTED"], "Reboot ASAP"), (["DOWN", "REBOOT_ISSUED"], "Reboot ASAP : reboot issued")],
        [(["IDLE", "DRAIN"], "Reboot ASAP")],
        [(["IDLE", "PLANNED"], ""), (["IDLE", "RESERVED"], "")],
        [(["IDLE", "CLOUD", "DYNAMIC_NORM"], ""), (["FUTURE"], "")],
        [(["IDLE", "NOT_RESPONDING"], "")],
        # suffixes of states, as sinfo and older versions write them
        [(["IDLE~"], ""), (["IDLE#"], ""), (["IDLE%"], "")],
        [(["DRAIN@"], "Reboot ASAP"), (["DOWN^"], "Reboot ASAP : reboot issued")],
        [(["IDLE-"], ""), (["MIXED-", "CLOUD"], "")],
        [(["DOWN~"], ""), (["DOWN#*"], "Not responding")],
        # a cloud that has no instance to start
        [(["DOWN", "CLOUD"], "(Code:InsufficientInstanceCapacity)Failure when resuming nodes")],
        [(["DOWN", "CLOUD"], "(Code:VcpuLimitExceeded)Failure when resuming nodes [root@2026-11-01]")],
    ],
    ids=str,
)
def test_planned_states_are_no_drains(tmp_path: Path, looks: list[Look]) -> None:
    events, collector = collected(tmp_path, IDLE, *looks, IDLE)
    assert events == []
    assert collector.accounting.tables["nodes"].unaccounted == 0


@pytest.mark.parametrize(
    ("look", "code"),
    [
        ((["DOWN"], "Not responding"), "down"),
        ((["DOWN*"], "Not responding"), "down"),
        ((["DRAINED*", "CLOUD"], "xid 79"), "drain"),
        ((["DOWN", "CLOUD"], "Not responding"), "down"),
        ((["IDLE", "DRAIN"], "gres/gpu count reported lower than configured (7 < 8)"), "drain"),
        ((["IDLE", "DRAIN", "DYNAMIC_NORM"], "xid 79"), "drain"),
        ((["FAIL"], "bad"), "fail"),
        ((["FAILING"], "bad"), "fail"),
        ((["ALLOCATED", "DRAIN"], "xid 79"), "drain"),
        ((["DOWN", "DRAIN", "NOT_RESPONDING"], "Not responding"), "down"),
    ],
)
def test_other_states_are_drains(tmp_path: Path, look: Look, code: str) -> None:
    assert collected(tmp_path, IDLE, look, IDLE)[0] == [("drain", code), ("drain", "resume")]


def test_a_drain_lasts_through_a_planned_reboot(tmp_path: Path) -> None:
    drained: Look = (["IDLE", "DRAIN"], "xid 79")
    rebooting: Look = (["DOWN", "DRAIN", "REBOOT_ISSUED"], "Reboot ASAP")
    events, _ = collected(tmp_path, IDLE, drained, rebooting, drained, IDLE)
    assert events == [("drain", "drain"), ("drain", "resume")]


@pytest.mark.parametrize("states", [["DOWN", "MAINT"], ["IDLE", "MAINTENANCE", "RESERVED"], ["MAINT", "DRAIN"]])
def test_a_maintenance_reservation_is_maintenance_and_no_drain(tmp_path: Path, states: list[str]) -> None:
    events, _ = collected(tmp_path, IDLE, (states, "power work"), IDLE)
    assert events == [("maintenance", "begin"), ("maintenance", "end")]


@pytest.mark.parametrize(
    ("reason", "work"),
    [
        ("NHC: check_hw_swap:  Actual SWAP size (0 kB) less than minimum allowed (1048576 kB).", []),
        ("swap full, job 4242 thrashing", []),
        ("firmware replaced by 1.2.3", []),
        ("fixed-width test reservation", []),
        ("user repair shop quota", []),
        ("GPU 3 will be replaced", []),
        ("GPU 3 swapped by vendor", [("replacement", "replacement")]),
        ("GPU 3 reseated", [("repair", "repair")]),
    ],
)
def test_a_resume_reports_the_work_that_a_reason_names(tmp_path, reason, work):
    events, collector = collected(tmp_path, IDLE, (["IDLE", "DRAIN"], reason), IDLE)
    assert events == [("drain", "drain"), *work, ("drain", "resume")]
    assert [row["count"] for row in collector.review.rows()] == [1]


def test_reasons_that_sinfo_prints_are_events_of_each_node(tmp_path: Path) -> None:
    rows = [
        ("REASON", "USER", "TIMESTAMP", "NODELIST"),
        ("GPU 1 Xid 79", "root", "2026-03-01T00:10:00", "node-0"),
        ("Prolog error", "slurm", "2026-03-01T00:20:00", "node-[0-1]"),
    ]
    (tmp_path / "sinfo.txt").write_text("".join(f"{a:<20} {b:<9} {c:<19} {d}\n" for a, b, c, d in rows))
    result = run_import(tmp_path, events=[tmp_path / "sinfo.txt"], mapping=SINFO)
    events = result.dataset.events().astype(object)
    assert [
        (event.timestamp.strftime("%H:%M"), event.node, event.type, event.code)
        for event in events.where(events.notna(), None).itertuples()
    ] == [("00:10", "node-0", "xid", "79"), *(("00:20", f"node-{number}", "other", None) for number in (0, 1))]


SINFO = "timezone: UTC\nevents: {columns: {REASON: type, USER: null, NODELIST: node}}\n"
