import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from foundation.errors import InputError
from foundation.settings import read_settings
from foundation.slurm import SlurmFormatError
from telemetry.accounting import Accounting
from telemetry.collect.slurm.nodes import ObservedSlurmNode, changes, read_nodes
from telemetry.dataset.event import Event
from telemetry.phrases import PhraseRules
from tests.clock import NOW

AT = int(NOW.timestamp())
CODEC = TypeAdapter(ObservedSlurmNode)
DRAINED = {"name": "n1", "reason": "xid 79", "reason_set_by_user": "ann"}
REPORTS = {
    "22.05 sinfo": DRAINED | {"state": "mixed", "state_flags": ["DRAIN"], "reason_changed_at": AT},
    "24.11 scontrol": DRAINED
    | {"state": ["MIXED", "DRAIN"], "reason_changed_at": {"set": True, "infinite": False, "number": AT}},
}


@pytest.mark.parametrize("version", REPORTS)
def test_a_drained_node_in_every_version(version: str):
    report = json.dumps({"meta": {}, "errors": [], "nodes": [REPORTS[version]]})
    assert read_nodes(report, Accounting())["n1"] == ObservedSlurmNode(
        "n1", "drain", "xid 79", "ann", NOW, None, ("xid 79",)
    )


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ("slurm_load_node: error", "not JSON"),
        ('{"meta": {}}', "it has no list nodes"),
        ('{"errors": [{"error": "Unspecified error"}], "nodes": []}', "Slurm reports .*Unspecified error"),
        ('{"errors": [], "nodes": []}', "Slurm lists no nodes"),
    ],
)
def test_what_is_no_report(report: str, problem: str):
    with pytest.raises(SlurmFormatError, match=problem):
        read_nodes(report, Accounting())


class Watch:
    """Looks at one node every minute."""

    def __init__(self) -> None:
        self.view: ObservedSlurmNode | None = None
        self.now, self.before = NOW, None

    def look(self, out: str | None = None, reason: str | None = None, **more: Any) -> list[tuple[Any, ...]]:
        seen = ObservedSlurmNode("n1", out, reason, reasons=() if reason is None else (reason,), **more)
        events, kept = changes(self.view, seen, PhraseRules(), now=self.now, last_poll=self.before)
        self.view = CODEC.validate_json(CODEC.dump_json(kept, exclude_defaults=True))
        self.before, self.now = self.now, self.now + timedelta(minutes=1)
        return [brief(event) for event in events]


def brief(event: Event) -> tuple[Any, ...]:
    return (event.type, event.code, event.detail, event.source, round((event.timestamp - NOW).total_seconds()))


def test_a_drain_and_its_resume():
    watch = Watch()
    assert watch.look() == []
    at = NOW + timedelta(seconds=50)
    assert watch.look("drain", "xid 79", user="ann", reason_at=at) == [("drain", "drain", "xid 79 [ann]", "slurm", 50)]
    assert watch.look("drain", "xid 79", user="ann", reason_at=at) == []
    assert watch.look() == [("drain", "resume", "xid 79", "slurm", 180)]
    assert watch.look() == []


def test_a_maintenance_reservation_begins_and_ends():
    watch, detail = Watch(), "a reservation with the flag MAINT"
    assert watch.look() == []
    assert watch.look(maintained=True) == [("maintenance", "begin", detail, "slurm", 60)]
    assert watch.look(maintained=True) == []
    assert watch.look("drain", "burn-in") == [
        ("maintenance", "end", detail, "slurm", 180), ("drain", "drain", "burn-in", "slurm", 180)
    ]  # fmt: skip


def test_a_resume_is_a_repair_only_if_a_reason_says_so():
    watch = Watch()
    watch.look("drain", "xid 79")
    watch.look("drain", "GPU 3 replaced, testing")
    watch.look("drain", "burn-in")
    assert watch.look() == [
        ("replacement", "replacement", "GPU 3 replaced, testing", "slurm", 180),
        ("drain", "resume", "burn-in", "slurm", 180),
    ]


def test_our_own_drain_says_so_and_a_human_takes_it_over():
    watch = Watch()
    (event,) = watch.look("drain", "predrain: p=0.83 replace gpu 3")
    assert event[3] == "predrain"
    (event,) = watch.look("drain", "ann is looking")
    assert event[2:4] == ("ann is looking", "slurm")
    assert [event[0] for event in watch.look()] == ["drain"]  # an own reason is no repair


def test_an_old_reason_does_not_date_a_new_state():
    watch = Watch()
    watch.look()
    watch.look()
    old = NOW - timedelta(days=3)
    assert watch.look("down", "Not responding", reason_at=old) == [("drain", "down", "Not responding", "slurm", 120)]
    assert watch.look("down", "Not responding", reason_at=old + timedelta(hours=1)) == []


def test_a_drain_that_is_on_at_the_first_look_began_when_its_reason_was_set():
    ((*_, seconds),) = Watch().look("drain", "x", reason_at=NOW - timedelta(days=3))
    assert seconds == -3 * 86400


def test_a_boot_is_a_new_boot_time():
    watch = Watch()
    boot = NOW - timedelta(days=9)
    assert watch.look(booted_at=boot) == []
    assert watch.look(booted_at=boot + timedelta(seconds=2)) == []
    again = NOW + timedelta(seconds=90)
    assert watch.look(booted_at=None) == []
    assert [event[:2] + event[4:] for event in watch.look(booted_at=again)] == [("other", "boot", 90)]
    assert watch.look(booted_at=again + timedelta(seconds=1)) == []


def test_rules_of_a_file_go_before_the_catalogue(tmp_path: Path):
    path = tmp_path / "rules.yaml"
    path.write_text('reasons: [{match: "ticket closed", type: repair, code: ticket}, {match: spare, type: other}]')
    rules = read_settings(path, PhraseRules, "rules")
    assert rules.classify("Ticket closed", "reason")[:2] == ("repair", "ticket")
    assert rules.classify("spare GPU", "reason").type == "other"
    assert rules.classify("RMA", "reason").type == "replacement"
    path.write_text("reasons: [{match: '(', type: repair}]")
    with pytest.raises(InputError, match="should be a valid regular expression"):
        read_settings(path, PhraseRules, "rules")
